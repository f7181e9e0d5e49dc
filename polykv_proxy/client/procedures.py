"""What takes several requests: generators that yield calls and pauses, and get answers. Pure.

The shells run them: they send a ``Call`` and pass its result in, sleep through a ``Pause``, throw errors in.
So both clients do the same.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

from polykv_proxy.client import calls
from polykv_proxy.client.errors import ConflictError, NotFoundError, PoolNotFoundError, PoolSaturatedError
from polykv_proxy.client.patience import SLOT_BUSY
from polykv_proxy.client.results import Capacity, Migrated, Pool, Reforked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUMMARISE = (
    "Summarise our conversation so far, so that it can be continued from your summary alone. Keep facts, "
    "names, numbers, decisions and open questions. Answer with the summary only."
)
"""What is appended to a history to have it summarised, and what precedes the summary afterwards."""


MAX_SUMMARY_TOKENS = 512

BUSY_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses after which a session whose slot is busy is asked to move again: its branch is computed already."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before going on."""

    seconds: float


T = TypeVar("T")

Procedure: TypeAlias = Generator["calls.Call[Any] | Pause", Any, T]
"""Yields what is to be done, is sent the results, returns a value."""


def wait_for_capacity(
    pool_id: str | None = None,
    *,
    sessions: int = 1,
    expected_tokens: int | None = None,
    max_wait_s: float = 300.0,
) -> Procedure[Capacity]:
    """Ask until there is room for so many sessions, at the pace that the proxy names.

    Args:
        pool_id: whose admission policy counts; None: the engine's, for sessions that name no pool.
        sessions: how many are to come in.
        expected_tokens: that each is going to need.
        max_wait_s: seconds of waiting at most.

    Raises:
        PoolSaturatedError: there was no room in that time.
    """
    left = max_wait_s
    while True:
        found: Capacity = yield calls.capacity(pool_id, expected_tokens=expected_tokens)
        if found.has_room_for(sessions):
            return found
        pause = float(found.retry_after_s or 1)
        if pause > left:
            raise PoolSaturatedError(
                f"no room for {sessions} more sessions: {found.why_not or 'not enough headroom'}",
                error={"capacity": {"headroom_sessions": found.headroom_sessions}, "reason": found.why_not},
                retry_after=pause,
            )
        left -= pause
        yield Pause(pause)


def summary_messages(summary: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A summary as a turn of the conversation, so that roles go on alternating."""
    return {"role": "user", "content": SUMMARISE}, {"role": "assistant", "content": summary}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A conversation that is to be compacted."""

    system: Sequence[Mapping[str, Any]]
    """What stays in front: the system message."""
    past: Sequence[Mapping[str, Any]]
    """What the summary replaces."""
    tail: Sequence[Mapping[str, Any]] = ()
    """The last turn, which stays as it is."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def content(self, messages: Sequence[Mapping[str, Any]]) -> calls.ContentOptions:
        """A pool of these messages behind the same system and tools."""
        return {
            "messages": [*self.system, *messages],
            "tools": self.tools,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


def compact_by_refork(  # noqa: PLR0913 - what a compaction is made of
    ancestor: str,
    history: History,
    *,
    session_id: str | None = None,
    summary: str | None = None,
    max_summary_tokens: int = MAX_SUMMARY_TOKENS,
    chat_members: Mapping[str, Any] | None = None,
    **keep: Unpack[calls.KeepOptions],
) -> Procedure[Reforked]:
    """Compact a conversation by moving it to a fresh branch (CTX-6).

    1. Without a summary: have it written in place. The same session, the same messages, one more message at
       the end: nothing but that one is computed.
    2. Fork the stable ancestor with summary and tail. An ancestor that is gone is made again by its content.
    3. Migrate the session. It keeps its id and gives up what its slot held.

    The branch that the conversation comes from is not released here: first whoever keeps the conversation
    must have written down what it goes on with. A branch that was made for nothing is released.

    Args:
        ancestor: the pool of system and tools.
        history: the conversation.
        session_id: the conversation's name; None: there is nothing to migrate.
        summary: what to go on with; None: let the model write it.
        max_summary_tokens: at most, where the model writes it.
        chat_members: further members of the request that writes the summary, such as ``model``.
        **keep: of the new branch; see ``KeepOptions``.

    Raises:
        ContextOverflowError: there is no room for the summary's instruction.
        ConflictError: the session runs, its slot stays busy, or its pool is on another engine; nothing has
            changed.
    """
    if summary is None:
        body = _summary_request(
            history, session_id, {"max_tokens": max_summary_tokens, **(chat_members or {})}
        )
        answer = yield calls.chat(body)
        summary = str(answer.text).strip()
    messages = (*summary_messages(summary), *(dict(each) for each in history.tail))
    pool: Pool = yield from fork_or_create(ancestor, history, messages, **keep)
    migrated, freed = False, 0
    if session_id is not None:
        try:
            moved = yield from _migrate(session_id, pool.pool_id)
            migrated, freed = True, moved.cells_freed or 0
        except NotFoundError:
            pass  # it never came, or was forgotten: its next request begins on the new branch anyway
        except ConflictError:
            if pool.created:
                yield calls.release_pool(pool.pool_id)
            raise
    return Reforked(pool=pool, messages=messages, summary=summary, migrated=migrated, cells_freed=freed)


def _migrate(session_id: str, pool_id: str) -> Procedure[Migrated]:
    """Move a session; whoever has its slot for now may be done in a moment."""
    for pause in BUSY_PAUSES_S:
        try:
            moved: Migrated = yield calls.migrate_session(session_id, pool_id)
        except ConflictError as error:
            if error.code != SLOT_BUSY:
                raise
        else:
            return moved
        yield Pause(pause)
    moved = yield calls.migrate_session(session_id, pool_id)
    return moved


def answered(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages up to the last that is not the user's: what the engine has computed already."""
    kept = list(messages)
    while kept and kept[-1].get("role") == "user":
        kept.pop()
    return kept


def fork_or_create(
    ancestor: str,
    history: History,
    messages: Sequence[Mapping[str, Any]],
    **keep: Unpack[calls.KeepOptions],
) -> Procedure[Pool]:
    """A child of the ancestor; of the ancestor made again, if it is gone."""
    child: calls.PoolOptions = {"idempotency_key": None, **history.content(messages), **keep}
    try:
        pool: Pool = yield calls.fork_pool(ancestor, **child)
    except PoolNotFoundError:
        again: Pool = yield calls.create_pool(**history.content(()))
        pool = yield calls.fork_pool(again.pool_id, **child)
    return pool


def _summary_request(history: History, session_id: str | None, members: Mapping[str, Any]) -> dict[str, Any]:
    asked, _ = summary_messages("")
    past = answered([*history.past, *history.tail])
    body: dict[str, Any] = {"messages": [*history.system, *past, asked], **members}
    if history.tools:  # they stay in the prompt, and none is called
        body |= {"tools": list(history.tools), "tool_choice": "none"}
    if history.chat_template_kwargs:
        body["chat_template_kwargs"] = dict(history.chat_template_kwargs)
    return body | {"opencoti": {} if session_id is None else {"session_id": session_id}}
