"""The shapes of what is kept of the past: saved KV, requests, advice. See ``shapes``."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from polykv_proxy.api.shapes import Durable, WhoseScope, one_of, says
from polykv_proxy.core.catalogue import Kind, Reason
from polykv_proxy.core.divergence import Cause
from polykv_proxy.core.outlines import Section
from polykv_proxy.core.records import RequestState
from polykv_proxy.core.volatile import VolatileKind

# -- saved KV ----------------------------------------------------------------------------------------------


class SavedState(TypedDict):
    """A conversation or a pool on disk."""

    key: Annotated[str, says("The session's or pool's id.")]
    kind: Annotated[str, one_of(Kind)]
    scope: WhoseScope
    engine: str
    model_id: str
    config_hash: str
    config_changed: Annotated[
        list[str], says("Which of system, tools, template and kwargs differ from the key's last other entry.")
    ]
    n_tokens: int
    bytes: int
    file: str
    created_ts: float
    last_used_ts: float
    uses: int
    in_use: bool
    label: NotRequired[str | None]
    pinned: NotRequired[bool]
    parent: NotRequired[str | None]


class Tombstone(TypedDict):
    """A saved state that is gone, and why."""

    key: str
    kind: Annotated[str, one_of(Kind)]
    scope: WhoseScope
    engine: str
    n_tokens: int
    reason: Annotated[str, one_of(Reason)]
    gone_ts: float


class EngineDurable(Durable):
    """That of one engine of several."""

    engine: str


class _CachePage(TypedDict):
    entries: list[SavedState]
    tombstones: list[Tombstone]
    next: Annotated[str | None, says("What `after` has to be for those that follow; null at the end.")]


class Cache(_CachePage):
    """What is on disk."""

    engines: list[EngineDurable]


class CacheKey(_CachePage):
    """What is on disk under a key."""

    key: str


class Deleted(TypedDict):
    """What was saved under a key is deleted."""

    key: str
    deleted: Annotated[int, says("States.")]


# -- requests and advice -----------------------------------------------------------------------------------


class Divergence(TypedDict):
    """Where and why a request left what its conversation had resident."""

    token_index: int | None
    message_index: int | None
    section: Annotated[str | None, Meta(extra_json_schema={"enum": [*Section, None]})]
    expected_text: str | None
    got_text: str | None
    cause: Annotated[str, one_of(Cause)]


class Request(TypedDict):
    """What became of a request that ran in a slot."""

    request_id: str
    x_request_id: Annotated[str | None, says("What the client called it.")]
    trace_id: Annotated[str | None, says("Of the client's `traceparent`.")]
    session_id: str | None
    scope: WhoseScope
    path: str
    engine: str | None
    slot: Annotated[int | None, says("Where it ran; of several, the first.")]
    state: Annotated[str, one_of(RequestState)]
    error_code: str | None
    started_ts: float
    waited_ms: Annotated[
        float | None, says("From its arrival to its sending to the engine; null of one that was not sent.")
    ]
    ttft_ms: Annotated[float | None, says("Of a stream: to its first token.")]
    duration_ms: Annotated[float | None, says("From its arrival to its end.")]
    pool_id: str | None
    pool_unknown: bool
    continued: Annotated[bool | None, says("Whether its slot held the conversation.")]
    planned_tokens: Annotated[int | None, says("What it was to share with the pool.")]
    prompt_tokens: int | None
    cached_tokens: Annotated[int | None, says("What the engine did not compute.")]
    computed_tokens: int | None
    generated_tokens: int | None
    divergence: Divergence | None


class Requests(TypedDict):
    """The last requests, latest first."""

    requests: list[Request]
    other_keys_requests: Annotated[
        int, says("Requests of other API keys, which are not listed, whatever was asked for.")
    ]


class Finding(TypedDict):
    """What keeps two conversations from sharing that open alike but for this."""

    kind: Annotated[str, one_of(VolatileKind)]
    section: str
    api: str
    old: str
    new: str
    shared_bytes: int
    lost_bytes: int
    times: int
    first_seen_ts: float
    last_seen_ts: float
    remedy: str


class BillingHeader(TypedDict):
    """What was done about the header that a coding agent changes with each request."""

    masked: bool
    requests_masked: int


class Advice(TypedDict):
    """What keeps conversations from sharing."""

    volatile: list[Finding]
    billing_header: BillingHeader
