"""What the proxy answers, as frozen values. Pure.

Each class reads itself from the JSON document of its route with ``read``. What a document leaves out is None,
as is what the proxy does not know; members that are not named here are left out, so newer proxies can be
talked to. Units are in the names: tokens, cells, bytes, seconds (``_s``), milliseconds (``_ms``), epoch
seconds (``_ts``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar


@dataclass(frozen=True, slots=True)
class _Result:
    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document)


R = TypeVar("R", bound=_Result)


def _read(kind: type[R], document: dict[str, Any], /, **parts: Any) -> R:
    """A result from the members that it knows; ``parts`` instead of those of the document."""
    known = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in (document | parts).items() if name in known})


def _several(kind: type[R], documents: Any) -> tuple[R, ...]:
    return tuple(kind.read(each) for each in documents or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(_Result):
    """A pool as its creation or its fork tells."""

    pool_id: str
    prefix_len: int
    """Tokens that requests can share."""
    created: bool = True
    """False: this content had a pool already, and this is it."""
    engine: str | None = None
    parent: str | None = None
    branch_pos: int | None = None
    """Leading tokens that are the parent's."""
    pinned: bool = False
    label: str | None = None
    prompt_tokens_computed: int | None = None
    shared_probe_tokens: int | None = None
    """Tokens that a sample chat shares with it; only for ``messages``."""
    warning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rider(_Result):
    """A slot that shares a pool's cells."""

    session_id: str | None = None
    slot: int | None = None
    suffix_n_tokens: int | None = None
    marginal_kv_bytes: int | None = None
    tps_ewma: float | None = None
    ttft_ms: float | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus(_Result):
    """A pool as the listing shows it; bytes are by ownership."""

    pool_id: str
    prefix_len: int
    engine: str | None = None
    scope: str | None = None
    """Digest of the API key that it belongs to; empty: of none."""
    label: str | None = None
    parent: str | None = None
    branch_pos: int | None = None
    own_len: int | None = None
    own_kv_bytes: int | None = None
    subtree_kv_bytes: int | None = None
    file_bytes: int | None = None
    residency: str | None = None
    pinned: bool = False
    pinned_by_descendants: bool = False
    ttl_s: float | None = None
    expires_ts: float | None = None
    orphaned_pin: bool = False
    origin: str | None = None
    created_at: float | None = None
    last_access_ts: float | None = None
    hits: int | None = None
    children: tuple[str, ...] = ()
    sessions: tuple[Rider, ...] = ()
    subtree: tuple[PoolStatus, ...] = ()
    """What is below it; only where one pool was asked for."""

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(
            cls,
            document,
            children=tuple(document.get("children") or ()),
            sessions=_several(Rider, document.get("sessions")),
            subtree=_several(PoolStatus, document.get("subtree")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolListing(_Result):
    """All pools of this API key, and where all used cells are."""

    pools: tuple[PoolStatus, ...] = ()
    tree_depth: int | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    pool_seq_ids_used: int | None = None
    pool_seq_ids_max: int | None = None
    kv_cells_used: int | None = None
    kv_cells_total: int | None = None
    other_keys_cells: int | None = None
    unattributed_cells: int | None = None
    document: dict[str, Any] = field(default_factory=dict, repr=False)
    """All of it, with ``unpooled``, ``draining`` and the figures of each engine."""

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, pools=_several(PoolStatus, document.get("pools")), document=document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(_Result):
    """What a release gave back, and what still holds the rest."""

    pool_id: str
    released: tuple[str, ...] = ()
    already_released: bool = False
    cells_freed: int | None = None
    cells_draining: int | None = None
    holders: int | None = None

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, released=tuple(document.get("released") or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(_Result):
    """What an eviction gave back; ids and tokens stay."""

    pool_id: str
    evicted: tuple[str, ...] = ()
    cells_freed: int | None = None
    cells_draining: int | None = None
    holders: int | None = None

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, evicted=tuple(document.get("evicted") or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(_Result):
    """A conversation."""

    session_id: str | None
    """None while its first request waits."""
    name: str | None = None
    """What its client called it."""
    request_id: str | None = None
    """Of the request that waits; None of one that does not wait."""
    scope: str | None = None
    """Digest of the API key that it belongs to; empty: of none."""
    engine: str | None = None
    pool_id: str | None = None
    slot: int | None = None
    state: str | None = None
    resident: bool = False
    turns: int | None = None
    tps_ewma: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None
    ttft_ms: float | None = None
    started_ts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated(_Result):
    """A session that was moved to another pool, or closed (then without one)."""

    session_id: str
    pool_id: str | None = None
    cells_freed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(_Result):
    """Whether there is room for one more session, and the figures that say so."""

    can_admit: bool
    engine: str | None = None
    reason: str | None = None
    """Why there is none; with ``can_admit``, what its request waits for once it is in."""
    headroom_sessions: int | None = None
    """Sessions for which there is room, of slots apart; None: nothing limits them, or it is not known."""
    n_active_sessions: int | None = None
    mean_active_tps: float | None = None
    projected_mean_tps_if_admitted: float | None = None
    projected_model: float | None = None
    projected_measured: float | None = None
    projection_bias_ewma: float | None = None
    kv_headroom_pct: float | None = None
    kv_cells_free: int | None = None
    kv_cells_total: int | None = None
    marginal_tokens_mean: float | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    slots_free: int | None = None
    ctx_headroom_tokens: int | None = None
    compaction_pressure: float | None = None
    """How urgent compaction is, 0 to 1."""
    pressure: float | None = None
    settling: bool = False
    queue_depth: int | None = None
    """All that wait: at the gate, and for slots or cells."""
    sessions_waiting: int | None = None
    """Those of them at the gate."""
    retry_after_s: int | None = None

    def has_room_for(self, sessions: int) -> bool:
        """Whether so many would come in."""
        return self.can_admit and (self.headroom_sessions is None or self.headroom_sessions >= sessions)

    @property
    def why_not(self) -> str | None:
        """Why not even one would come in; None if one would."""
        return None if self.can_admit else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation(_Result):
    """Places for sessions that will come; each lease is good for one request, once."""

    pool_id: str
    leases: tuple[str, ...]
    expires_in_s: float

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, leases=tuple(document["leases"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(_Result):
    """Exact tokens: of a prompt, or of what chats that begin with these messages have in common."""

    tokens: tuple[int, ...]
    n_tokens: int
    """For messages: where the poolable prefix ends."""
    pool_id: str | None = None
    """The id that a pool of this content has."""
    probe_tokens: int | None = None
    """Length of a sample chat that goes on from it; only for messages."""

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, tokens=tuple(document["tokens"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRate(_Result):
    """One session in a document of rates."""

    session_id: str | None
    """None while its first request waits."""
    name: str | None = None
    """What its client called it."""
    request_id: str | None = None
    """Of the request that waits; None of one that does not wait."""
    scope: str | None = None
    """Digest of the API key that it belongs to; empty: of none."""
    engine: str | None = None
    pool_id: str | None = None
    state: str | None = None
    tps_ewma: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(_Result):
    """What sessions experience at one moment."""

    ts: float
    aggregate_tps: float | None = None
    mean_active_tps: float | None = None
    prefill_tps: float | None = None
    pressure: float | None = None
    compaction_pressure: float | None = None
    sessions: tuple[SessionRate, ...] = ()
    other_keys_sessions: int | None = None
    """Sessions of other API keys, which are not listed."""

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From the JSON document."""
        return _read(cls, document, sessions=_several(SessionRate, document.get("sessions")))

    def of(self, session_id: str, scope: str | None = None) -> SessionRate | None:
        """One session's rate; with the admin key, that of a scope, since several API keys may have one."""
        return next(
            (each for each in self.sessions if each.session_id == session_id and scope in (None, each.scope)),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(_Result):
    """A plain chat answer."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    opencoti: dict[str, Any]
    """What the proxy says about the request; empty behind a plain engine."""
    document: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """From an OpenAI-style answer."""
        choice = (document.get("choices") or [{}])[0]
        usage = document.get("usage") or {}
        return cls(
            text=(choice.get("message") or {}).get("content") or "",
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            opencoti=document.get("opencoti") or {},
            document=document,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reforked:
    """A conversation that was compacted and moved to a fresh branch."""

    pool: Pool
    """The new branch: the stable ancestor, the summary, the recent tail."""
    messages: tuple[dict[str, Any], ...]
    """What the conversation goes on with."""
    summary: str
    migrated: bool
    """False: the session was not known, so there was nothing to move."""
    cells_freed: int
    """Cells that the session gave up."""
