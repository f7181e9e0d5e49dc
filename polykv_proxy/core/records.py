"""Records of the last requests: what each was to reuse, what it did reuse, and why not more.

Rule 1: every request has a record from its arrival on, whatever becomes of it.
Rule 2: the book is bounded in number, and a record in bytes: numbers, ids, and two snippets at most. The
oldest goes first, at work or not; whoever still holds it may go on writing into it.
Rule 3: ids are unique, also among the books of earlier runs, and say nothing.
Rule 4: what is not known (yet) is None.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from polykv_proxy.core.divergence import Divergence
    from polykv_proxy.core.types import PoolId, Scope, SessionId, SlotId

RequestId = NewType("RequestId", str)
"""One request at the proxy."""

PATH_CHARS = 128
"""Longest path that a record keeps."""


class RequestState(StrEnum):
    """How far a request came."""

    RUNNING = "running"
    """It waits, or the engine works for it."""
    DONE = "done"
    CANCELLED = "cancelled"
    """The client left."""
    FAILED = "failed"
    """It was refused or broke off; ``error_code`` says why."""


@dataclass(frozen=True, slots=True)
class ClientNames:
    """What a client calls a request."""

    x_request_id: str | None = None
    trace_id: str | None = None


NAMELESS = ClientNames()


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request."""

    request_id: RequestId
    scope: Scope
    path: str
    started_ts: float
    x_request_id: str | None = None
    """What its client calls it."""
    trace_id: str | None = None
    """The distributed trace that it is part of."""
    state: RequestState = RequestState.RUNNING
    error_code: str | None = None
    engine: str | None = None
    """Name of the engine that it was sent to."""
    slot: SlotId | None = None
    """The slot that it ran in; of several, the first."""
    session_id: SessionId | None = None
    continued: bool | None = None
    """Whether it was sent to the slot that held its conversation; None: it was not sent."""
    pool_id: PoolId | None = None
    """The pool that it was to be attached to."""
    pool_unknown: bool = False
    """It named a pool that it did not get."""
    planned_tokens: int | None = None
    """Tokens of that pool that it was to share."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the engine did not compute."""
    generated_tokens: int | None = None
    waited_s: float | None = None
    """From its arrival to the moment it was sent to the engine, the last time; None: it was not."""
    ttft_s: float | None = None
    """Of a stream: an answer in one piece has no first token."""
    duration_s: float | None = None
    """From its arrival to its end."""
    divergence: Divergence | None = None
    """Why less was reused than there was."""

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that the engine computed."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    def end(self, state: RequestState, error_code: str | None = None) -> None:
        """The request is over; the first end counts."""
        if self.state is RequestState.RUNNING:
            self.state, self.error_code = state, error_code


class RecordBook:
    """The last records.

    Args:
        keep: how many; 0 keeps none.
        run: tells this run of the proxy from others; part of every id.
    """

    def __init__(self, keep: int, run: str) -> None:
        self._keep = keep
        self._run = run
        self._count = 0
        self._records: OrderedDict[RequestId, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, path: str, scope: Scope, now_ts: float, names: ClientNames = NAMELESS) -> RequestRecord:
        """A request arrived.

        Args:
            path: as the client wrote it.
            scope: whose it is.
            now_ts: epoch seconds.
            names: what its client calls it.
        """
        self._count += 1
        request_id = RequestId(f"req-{self._run}-{self._count}")
        record = RequestRecord(
            request_id, scope, path[:PATH_CHARS], now_ts, names.x_request_id, names.trace_id
        )
        if self._keep:
            self._records[request_id] = record
            if len(self._records) > self._keep:
                self._records.popitem(last=False)
        return record

    def get(self, request_id: RequestId, scope: Scope | None) -> RequestRecord | None:
        """A record by id, as seen from a scope (None: an administrator, who sees all)."""
        record = self._records.get(request_id)
        return record if record is not None and scope in (None, record.scope) else None

    def latest(
        self,
        scope: Scope | None,
        *,
        session_id: str | None,
        request_id: str | None = None,
        limit: int,
    ) -> list[RequestRecord]:
        """The last requests that ``scope`` may see, latest first.

        Args:
            scope: None sees all.
            session_id: only those of this session, and of conversations that run under its name beside it
                (``id#2`` and so on); None: of all.
            request_id: only those with this id, ours or the client's own, or of this trace; None: all.
            limit: at most so many.
        """
        seen = (
            record
            for record in reversed(self._records.values())
            if scope in (None, record.scope)
            and _is_of(record.session_id, session_id)
            and request_id in (None, record.request_id, record.x_request_id, record.trace_id)
        )
        return list(islice(seen, limit))

    def hidden_from(self, scope: Scope | None) -> int:
        """How many ``scope`` may not see, of all that are kept."""
        return sum(scope not in (None, record.scope) for record in self._records.values())


def _is_of(session_id: str | None, asked: str | None) -> bool:
    """Whether a session is the one that was asked for, or one of its namesakes."""
    if asked is None or session_id == asked:
        return True
    return session_id is not None and session_id.partition("#")[0] == asked
