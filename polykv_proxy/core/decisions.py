"""What the control plane decides, as values: leases and tickets, outcomes, commands, plans, policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.residents import Key
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import LeaseId, PoolId, SlotId


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on its slots."""

    lease_id: LeaseId
    slots: tuple[SlotId, ...]
    session: Session | None
    continues: bool
    """Whether its slot held the conversation's earlier state."""
    granted_at: float
    ended: bool = False
    pool: PrefixPool | None = None
    """The pool its request runs on."""
    evicted: bool = False
    """Whether another conversation had taken the slot that held this one."""
    streams: bool = False
    """Whether its answer comes token by token."""
    before: LeaseId | None = None
    """Its session's request before this one."""
    pool_before: PoolId | None = None
    """The pool that its session was on before."""
    context_tokens: int | None = None
    """What its answer said that its slot holds, those shared with a pool included."""
    restored: Entry | None = None
    """The saved state that its slot was filled from."""
    restored_tokens: int = 0
    """Leading tokens that the state and its prompt have in common."""


@dataclass(slots=True, eq=False)
class Place:
    """A place in line of a request that does not ask for slots yet."""

    number: int
    """Counts arrivals."""
    held: bool = True
    """Whether it is still there to be taken."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for slots."""

    ask: Ask
    conversation: bool
    since: float
    since_ts: float
    number: int
    """Counts arrivals: who has a lower one is served first."""
    cells: int | None = None
    """That it will take; None if that is not known."""
    lease: Lease | None = None
    never: Never | None = None
    """It can never be served, and waits no more."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Go on with this lease."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Queue:
    """Wait; the ticket's owner is woken by ``WakeQueued``."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Reject:
    """No, before anything was sent."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Never:
    """No: it does not fit the cells, not even alone."""

    required_tokens: int
    """Of its prompt."""
    room_tokens: int
    """That there is for one conversation."""


Decision: TypeAlias = "Admit | Queue | Reject | Never"


@dataclass(frozen=True, slots=True)
class WakeQueued:
    """Tell a waiting request that its ticket has a lease now, or never will."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AwaitIdle:
    """Wait for what a request left running, then report ``on_slots_idle``."""

    lease: Lease
    stop: bool
    """Whether to stop it; a resumable stream runs on without its client."""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Take back what a resident of the ledger holds, then report ``on_reclaimed``."""

    key: Key


@dataclass(frozen=True, slots=True)
class StopRunning:
    """Stop a request before the cells are used up."""

    lease_id: LeaseId


Command: TypeAlias = "WakeQueued | AwaitIdle | Reclaim | StopRunning"


@dataclass(frozen=True, slots=True)
class AttachPlan:
    """How a request will use a pool."""

    pool: PrefixPool
    tokens: int
    """P: leading tokens to attach, as far as is known before it runs."""
    matched: int
    """What the request and the pool have in common; P unless the client asked for less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """What happens without being asked for."""

    auto_match: bool = True
    """Requests that name no pool are attached to the one that holds most of their prompt."""
    auto_pools: bool = True
    """A prefix that a second conversation shares becomes a pool."""
    min_match_tokens: int = 32
    """Tokens below which a match is not worth an attach."""
    auto_min_tokens: int = 256
    """Tokens below which a common prefix is not worth a pool."""
    auto_gain_tokens: int = 64
    """Tokens that a new pool must hold beyond what the best existing one does."""
    auto_share: float = 0.5
    """Share of the pools' sequence ids that pools which came by themselves may take, 0 to 1."""
    grace_s: float = 60.0
    """Seconds that a pool which came by itself stays after its last use before it may make room, and that one
    which was released while in use stays after its last holder left."""
    retry_hold_s: float = 30.0
    """Seconds that what a client left unfinished is kept for its retry, unless nothing else can be taken."""
    orphan_ttl_s: float | None = None
    """Seconds after which a pin that nobody uses is given up, and its pool released; None: never."""
    mask_billing_header: bool = False
    """The changing values of a billing header become constants before the engine sees them."""
