"""What can be asked of the proxy: one frozen value for each request. Pure.

Rule 1: a function here makes a ``Call``; nothing is sent. The shells send it and hand the answer to ``read``.
Rule 2: ``idempotent`` says whether sending it twice is the same as once. Pools are named by their content, so
making, pinning and releasing them is; a chat is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from polykv_proxy.client import results

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")

JsonObject = dict[str, Any]

CHAT = "/v1/chat/completions"
COUNT = "/v1/chat/completions/input_tokens"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[JsonObject], T]
    """Makes the result from the JSON document of a successful answer."""
    body: JsonObject | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True

    @property
    def content(self) -> bytes | None:
        """The bytes to send; None for a request without a body."""
        if self.method != "POST":
            return None
        return b"" if self.body is None else json.dumps(self.body, ensure_ascii=False).encode()

    @property
    def all_headers(self) -> dict[str, str]:
        """With the content type, which the proxy demands wherever state changes."""
        declared = {} if self.method == "GET" else {"Content-Type": "application/json"}
        return {**declared, **self.headers}


class ContentOptions(TypedDict, total=False):
    """What a pool is made of: exactly one of ``messages``, ``prompt``, ``tokens``, ``from_session``.

    Of a fork, ``tokens`` and ``messages`` are the child's whole prefix, its parent's included. From
    ``messages``, with ``tools`` and ``chat_template_kwargs`` if the chats have them, the pool is what all
    chats have in common that begin with these. ``n_tokens``: at most so many; ``engine``: where.
    """

    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    prompt: str | None
    tokens: Sequence[int] | None
    from_session: str | None
    n_tokens: int | None
    engine: str | None


class KeepOptions(TypedDict, total=False):
    """How long a pool stays, and what it is called.

    ``pin``: no eviction takes it. ``ttl_s``: it is released by itself when it was out of use for so long.
    """

    pin: bool
    ttl_s: float | None
    label: str | None


class PoolOptions(ContentOptions, KeepOptions, total=False):
    """Of a new pool. ``idempotency_key``: sent as a header; the content names the pool in any case."""

    idempotency_key: str | None


class ForkOptions(PoolOptions, total=False):
    """Of a fork. ``branch_pos``: leading tokens that are the parent's; as many as agree if left out."""

    branch_pos: int | None


# -- pools ------------------------------------------------------------------------------------------------


def create_pool(**options: Unpack[PoolOptions]) -> Call[results.Pool]:
    """``POST /polykv/pools``; computes the prefix unless this content has a pool already."""
    return Call("POST", "/polykv/pools", results.Pool.read, _members(options), headers=_key(options))


def fork_pool(pool_id: str, **options: Unpack[ForkOptions]) -> Call[results.Pool]:
    """``POST /polykv/pools/{id}/fork``: a child whose first tokens are the parent's cells."""
    path = _pool(pool_id, "/fork")
    return Call("POST", path, results.Pool.read, _members(options), headers=_key(options))


def list_pools() -> Call[results.PoolListing]:
    """``GET /polykv/pools``."""
    return Call("GET", "/polykv/pools", results.PoolListing.read)


def show_pool(pool_id: str) -> Call[results.PoolStatus]:
    """``GET /polykv/pools/{id}``."""
    return Call("GET", _pool(pool_id), results.PoolStatus.read)


def release_pool(pool_id: str, *, recursive: bool = False) -> Call[results.Released]:
    """``DELETE /polykv/pools/{id}``; again is no error."""
    params = {"recursive": "1"} if recursive else {}
    return Call("DELETE", _pool(pool_id), results.Released.read, params=params)


def pin_pool(pool_id: str, *, pinned: bool) -> Call[bool]:
    """``POST …/pin`` and ``…/unpin``; whether it is pinned now."""
    action = "/pin" if pinned else "/unpin"
    return Call("POST", _pool(pool_id, action), lambda document: bool(document["pinned"]))


def evict_pool(pool_id: str, *, subtree: bool = False) -> Call[results.Evicted]:
    """``POST …/evict``, or ``…/flush`` for all below it too: cells go, ids stay."""
    return Call("POST", _pool(pool_id, "/flush" if subtree else "/evict"), results.Evicted.read)


def set_admission(pool_id: str, policy: Mapping[str, Any]) -> Call[JsonObject]:
    """``POST …/admission``: what holds for the sessions of a pool; returns what is in force."""

    def read(document: JsonObject) -> JsonObject:
        return dict(document["effective"])

    return Call("POST", _pool(pool_id, "/admission"), read, dict(policy))


# -- room -------------------------------------------------------------------------------------------------


def capacity(pool_id: str | None = None, *, expected_tokens: int | None = None) -> Call[results.Capacity]:
    """``GET …/capacity`` of a pool, or of the engine for sessions that name none."""
    path = "/polykv/capacity" if pool_id is None else _pool(pool_id, "/capacity")
    params = {} if expected_tokens is None else {"expected_tokens": str(expected_tokens)}
    return Call("GET", path, results.Capacity.read, params=params)


def reserve(pool_id: str, *, sessions: int, ttl_s: float, idempotency_key: str) -> Call[results.Reservation]:
    """``POST …/reserve``: places for sessions, all or none; the same key gets the same places."""
    path, body = _pool(pool_id, "/reserve"), {"sessions": sessions, "ttl_s": ttl_s}
    return Call(
        "POST", path, results.Reservation.read, body, headers=_key({"idempotency_key": idempotency_key})
    )


# -- sessions ---------------------------------------------------------------------------------------------


def list_sessions() -> Call[tuple[results.Session, ...]]:
    """``GET /polykv/sessions``."""

    def read(document: JsonObject) -> tuple[results.Session, ...]:
        return tuple(results.Session.read(each) for each in document["sessions"])

    return Call("GET", "/polykv/sessions", read)


def close_session(session_id: str, *, scope: str | None = None) -> Call[results.Migrated]:
    """``POST …/close``: the session is over; again is a 404.

    Args:
        session_id: which.
        scope: with the admin key, which of those that several API keys have.
    """
    path, params = _session(session_id, "/close"), _scope(scope)
    return Call("POST", path, results.Migrated.read, params=params, idempotent=False)


def migrate_session(session_id: str, pool_id: str, *, scope: str | None = None) -> Call[results.Migrated]:
    """``POST …/migrate``: its next request attaches to that pool; all of it, or nothing. See above."""
    path, params = _session(session_id, "/migrate"), _scope(scope)
    return Call("POST", path, results.Migrated.read, {"pool_id": pool_id}, params=params)


# -- text, rates, the engine ------------------------------------------------------------------------------


def tokenize(**options: Unpack[ContentOptions]) -> Call[results.Tokens]:
    """``POST /polykv/tokenize``: tokens of a prompt, or of what chats with these messages share."""
    return Call("POST", "/polykv/tokenize", results.Tokens.read, _members(options))


def count_tokens(body: Mapping[str, Any]) -> Call[int]:
    """Prompt tokens of a whole chat body, as the engine counts them; of a plain llama-server too."""
    return Call("POST", COUNT, lambda document: int(document["input_tokens"]), dict(body))


def rates() -> Call[results.Rates]:
    """``GET /polykv/tps``, one document."""
    return Call("GET", "/polykv/tps", results.Rates.read, params={"once": "1"})


def rates_stream() -> Call[JsonObject]:
    """``GET /polykv/tps``, document after document."""
    return Call("GET", "/polykv/tps", dict, headers={"Accept": "text/event-stream"})


def props() -> Call[JsonObject]:
    """``GET /props``; has a member ``opencoti`` where it is the proxy's."""
    return Call("GET", "/props", dict)


def chat(body: Mapping[str, Any]) -> Call[results.Chat]:
    """``POST /v1/chat/completions``, not streamed."""
    return Call("POST", CHAT, results.Chat.read, dict(body), idempotent=False)


def _members(options: Mapping[str, Any]) -> JsonObject:
    """The body: what was given. An empty tool list is none, as in the chats that are to share the pool."""
    body = {
        name: list(value) if name in _LISTS and value is not None else value
        for name, value in options.items()
        if name != "idempotency_key"
    }
    return {name: value for name, value in body.items() if not _says_nothing(value)}


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ([], {})


_LISTS = frozenset({"messages", "tools", "tokens"})


def _key(options: Mapping[str, Any]) -> dict[str, str]:
    key = options.get("idempotency_key")
    return {} if key is None else {"Idempotency-Key": key}


def _scope(scope: str | None) -> dict[str, str]:
    return {} if scope is None else {"scope": scope}


def _pool(pool_id: str, rest: str = "") -> str:
    return f"/polykv/pools/{quote(pool_id, safe='')}{rest}"


def _session(session_id: str, rest: str) -> str:
    return f"/polykv/sessions/{quote(session_id, safe='')}{rest}"
