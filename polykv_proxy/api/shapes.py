"""The shapes of what the proxy's own routes answer.

Only ``openapi`` is made of them: answers are plain dicts. mypy holds those to these that a view spells out,
and the tests hold every answer to them that they get.

Unknown is null. Units are in the names: tokens, cells, bytes, seconds (``_s``), milliseconds (``_ms``), epoch
seconds (``_ts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from polykv_proxy.core.types import Capability, PoolId, PoolOrigin, PoolState, SlotState
from polykv_proxy.engine.state import EngineState

if TYPE_CHECKING:
    from enum import StrEnum


def one_of(kind: type[StrEnum]) -> Meta:
    """A text that is a value of an enumeration."""
    return Meta(extra_json_schema={"enum": [each.value for each in kind]})


def says(text: str) -> Meta:
    """What a member means."""
    return Meta(description=text)


Activity = Annotated[str, Meta(extra_json_schema={"enum": ["running", "idle"]})]
Presence = Annotated[
    str,
    Meta(extra_json_schema={"enum": ["running", "waiting", "idle"]}),
    says("Waiting: at the gate, or for slots or cells."),
]
SessionOrNew = Annotated[str | None, says("Null of one whose first request waits.")]
Rate = Annotated[float | None, says("Decode tokens per second that come to the session.")]
WhoseScope = Annotated[str, says("Digest of the API key that it belongs to; empty: of none.")]
OtherSessions = Annotated[int, says("Sessions of other API keys, which are not listed.")]
CtxUsed = Annotated[int | None, says("Tokens in its context.")]
CtxHeadroom = Annotated[int | None, says("Tokens to the end of the window, or of the free cells if nearer.")]


# -- pools -------------------------------------------------------------------------------------------------


class Rider(TypedDict):
    """A slot that shares a pool's cells."""

    session_id: str | None
    slot: int
    suffix_n_tokens: Annotated[int | None, says("Tokens that it holds beyond the pool.")]
    marginal_kv_bytes: int | None
    tps_ewma: Rate
    ttft_ms: float | None
    state: Activity


class Pool(TypedDict):
    """A pool; bytes are by ownership."""

    pool_id: str
    engine: str
    scope: WhoseScope
    label: str | None
    parent: Annotated[str | None, says("The nearest ancestor that has an id.")]
    branch_pos: Annotated[int, says("Leading tokens that are the parent's.")]
    prefix_len: int
    own_len: Annotated[int, says("Tokens that are not an ancestor's.")]
    own_kv_bytes: int | None
    subtree_kv_bytes: int | None
    file_bytes: Annotated[int | None, says("Size of the file that it is, where pools are files.")]
    residency: Annotated[str, one_of(PoolState)]
    pinned: bool
    pinned_by_descendants: Annotated[bool, says("Something needs its cells; nothing evicts it unasked.")]
    ttl_s: float | None
    expires_ts: Annotated[float | None, says("When ttl_s ends; null while somebody uses it.")]
    orphaned_pin: Annotated[bool, says("Pinned, and used by nobody.")]
    origin: Annotated[str, one_of(PoolOrigin)]
    created_at: float
    last_access_ts: float
    hits: Annotated[int, says("Requests that attached.")]
    children: list[PoolId]
    sessions: list[Rider]


class PoolWithSubtree(Pool):
    """A pool, and what is below it."""

    subtree: list[Pool]


class CreatedPool(TypedDict):
    """A pool that was asked for."""

    pool_id: str
    engine: str
    prefix_len: int
    parent: str | None
    branch_pos: int
    created: Annotated[bool, says("False: this content had a pool already, and this is it.")]
    pinned: bool
    label: str | None
    prompt_tokens_computed: int
    shared_probe_tokens: NotRequired[
        Annotated[int, says("For messages: tokens that a sample chat shares with it.")]
    ]
    warning: NotRequired[str]


class PoolFiles(TypedDict):
    """What there is on disk, where pools are files."""

    pool_files: NotRequired[int]
    pool_files_max: NotRequired[int]
    pool_file_bytes: NotRequired[int]
    pool_files_left: NotRequired[Annotated[list[str], says("Files of pools that are gone.")]]


class Figures(TypedDict):
    """Where an engine's cells and sequence ids are."""

    seq_ids_used: int | None
    seq_ids_max: int | None
    pool_seq_ids_used: int
    pool_seq_ids_max: int
    kv_cells_used: int | None
    kv_cells_total: int | None
    other_keys_cells: Annotated[int, says("Cells of other API keys' pools, which are not listed.")]
    unattributed_cells: Annotated[int | None, says("What a request added between two readings.")]


class EngineFigures(Figures, PoolFiles):
    """Those of one engine of several."""

    engine: str
    tree_depth: int


class Unpooled(TypedDict):
    """A slot that shares nothing."""

    engine: str
    slot: int
    session_id: str | None
    cells: int
    state: Annotated[str, one_of(SlotState)]


class Draining(TypedDict):
    """What is left of a released pool."""

    engine: str
    pool_id: str | None
    cells: int
    holders: int
    lingers: Annotated[bool, says("All of it is there, and comes back if the same content is created.")]
    prefix_len: int | None
    sessions: list[Rider]


class Pools(Figures):
    """All pools, and where all used cells are."""

    pools: list[Pool]
    tree_depth: int
    unpooled: list[Unpooled]
    draining: list[Draining]
    engines: list[EngineFigures]


class Pin(TypedDict):
    """Whether a pool is pinned now."""

    pool_id: str
    pinned: bool


class _GivenBack(PoolFiles):
    pool_id: str
    cells_freed: int
    cells_draining: Annotated[int, says("Cells that go when their last holder leaves.")]
    holders: int


class Evicted(_GivenBack):
    """Pools whose cells were given back; their ids stay."""

    evicted: list[str]


class Released(_GivenBack):
    """Pools whose ids are gone."""

    released: NotRequired[list[str]]
    already_released: NotRequired[Annotated[bool, says("It was before; nothing happened now.")]]


class Tokenized(TypedDict):
    """The tokens that a pool of this content has."""

    tokens: list[int]
    n_tokens: int
    pool_id: str
    probe_tokens: Annotated[int | None, says("For messages: the length of a sample chat.")]


# -- admission ---------------------------------------------------------------------------------------------


class Capacity(TypedDict):
    """Room for one more session."""

    engine: str
    can_admit: Annotated[bool, says("Whether all arms hold, and nobody is before it at the gate.")]
    reason: Annotated[str | None, says("Why not; or, if so, what it waits for once it is in.")]
    projected_mean_tps_if_admitted: Annotated[
        float | None, says("The projection that decides; null while nobody works.")
    ]
    projected_model: Annotated[float | None, says("From the fitted curve.")]
    projected_measured: Annotated[float | None, says("From the mean of now.")]
    projection_bias_ewma: Annotated[float | None, says("Measured over fitted, lately.")]
    mean_active_tps: Annotated[float | None, says("Of the sessions that decode now.")]
    n_active_sessions: Annotated[int, says("Sessions with a request, waiting ones too.")]
    headroom_sessions: Annotated[
        int | None,
        says(
            "Sessions that have room now behind those who wait, each with `expected_tokens` or the mean; 0 "
            "unless can_admit; null: nothing limits them. Not held to the free slots."
        ),
    ]
    kv_headroom_pct: Annotated[float | None, says("`kv_cells_free` in percent.")]
    kv_cells_free: Annotated[
        int | None, says("What newcomers can have: less what running answers are expected to take.")
    ]
    kv_cells_total: int | None
    marginal_tokens_mean: Annotated[float | None, says("Cells that a session takes, on average.")]
    seq_ids_used: int | None
    seq_ids_max: int | None
    slots_free: Annotated[int | None, says("Slots that can be given away.")]
    ctx_headroom_tokens: Annotated[int | None, says("The most that a newcomer can use now.")]
    compaction_pressure: Annotated[float | None, says("0 up to a use of 0.7, 1 at the wall.")]
    pressure: Annotated[float | None, says("Use, 0 to 1, of what is nearest to its end.")]
    settling: Annotated[bool, says("Whether newcomers settle, for whom others may have to wait.")]
    queue_depth: Annotated[int, says("All that wait: at the gate, and for slots or cells.")]
    sessions_waiting: Annotated[int, says("Those of them at the gate.")]
    retry_after_s: Annotated[int | None, says("When to ask again; null if can_admit.")]


class Leases(TypedDict):
    """Places for sessions that will come."""

    pool_id: str
    leases: list[str]
    expires_in_s: float


# -- sessions ----------------------------------------------------------------------------------------------


class SessionRate(TypedDict):
    """What a session experiences."""

    engine: str
    session_id: SessionOrNew
    name: Annotated[str | None, says("What its client called it.")]
    request_id: Annotated[str | None, says("Of the request that waits; null of one that does not wait.")]
    scope: WhoseScope
    pool_id: str | None
    state: Presence
    tps_ewma: Rate
    ctx_used: CtxUsed
    ctx_total: int | None
    ctx_headroom_tokens: CtxHeadroom


class Session(SessionRate):
    """A client's conversation."""

    slot: int | None
    resident: Annotated[bool, says("Whether a slot holds it.")]
    turns: int
    ttft_ms: float | None
    started_ts: Annotated[float, says("When its first request arrived.")]


class Sessions(TypedDict):
    """Of each engine the most recently used first."""

    sessions: list[Session]
    other_keys_sessions: OtherSessions


class Closed(TypedDict):
    """A session that is over."""

    session_id: str
    closed: bool
    cells_freed: int
    kept: Annotated[bool, says("Whether its state stays on disk.")]


class Migrated(TypedDict):
    """A session whose next request attaches to another pool."""

    session_id: str
    pool_id: str
    cells_freed: int


# -- rates -------------------------------------------------------------------------------------------------


class Rates(TypedDict):
    """What the engines do now."""

    ts: float
    aggregate_tps: Annotated[float | None, says("Tokens generated per second by all slots.")]
    mean_active_tps: Annotated[float | None, says("Over the sessions that decode now.")]
    prefill_tps: Annotated[float | None, says("Prompt tokens computed per second.")]
    pressure: Annotated[float | None, says("Use, 0 to 1, of what is nearest to its end.")]
    compaction_pressure: Annotated[float | None, says("0 up to a use of 0.7, 1 at the wall.")]
    sessions: list[SessionRate]
    other_keys_sessions: OtherSessions


# -- members of the engine's documents ---------------------------------------------------------------------


class Durable(TypedDict):
    """Whether an engine's KV is saved, and why not."""

    state: Annotated[str, Meta(extra_json_schema={"enum": ["on", "off"]})]
    reason: str | None
    entries: NotRequired[int]
    bytes: NotRequired[int]
    max_bytes: NotRequired[int]
    last_error: NotRequired[str | None]


class PolicyInForce(TypedDict):
    """What is done without being asked for, and who comes in."""

    pools: dict[str, Any]
    admission: Annotated[
        dict[str, Any], says("Of sessions that name no pool, as `effective` says it of a pool's.")
    ]


class Properties(TypedDict):
    """What the proxy says of itself and of an engine in `/props`."""

    version: str
    engine_patch: str | None
    capability: Annotated[str, one_of(Capability)]
    capability_reason: str | None
    features: Annotated[list[str], says("Names to branch on, instead of versions.")]
    engine_build: str | None
    engine_epoch: str | None
    max_pools: int | None
    kv_cells_total: int | None
    kv_bytes_per_cell: int | None
    attach_shortfall_total: int
    durable_kv: Durable | None
    policy: PolicyInForce


class SlotMember(TypedDict):
    """What the proxy says of a slot in `/slots`."""

    pool_id: str | None
    session_id: Annotated[str | None, says("Null also for sessions of other API keys.")]
    tps_ewma: Rate
    ctx_used: CtxUsed
    ctx_headroom_tokens: CtxHeadroom


class EngineHealth(TypedDict):
    """One engine of several in `/health`."""

    name: str
    state: Annotated[str | None, Meta(extra_json_schema={"enum": [*EngineState, None]})]
    serving: bool
    reason: str | None
    restarts: int | None
    models: list[str]
    capability: Annotated[str, one_of(Capability)]
    capability_reason: str | None
