"""The control plane of one engine: the one stateful object of the core.

The engine's life is here, and what it reports. Who has its slots is in ``leases``; what becomes of pools is
the planner's, under ``pools``.

Rule 1: every method is synchronous and returns what should happen; nothing here happens by itself.
Rule 2: what the engine reports corrects what was assumed. A new epoch means that nothing is resident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.accounting import attribute
from polykv_proxy.core.cells import Cells
from polykv_proxy.core.decisions import Command, Lease, PoolPolicy, StopRunning
from polykv_proxy.core.experience import Experience, fresh
from polykv_proxy.core.holdings import PoolHoldings
from polykv_proxy.core.keeping import is_orphan, resting, riding
from polykv_proxy.core.leases import Leases
from polykv_proxy.core.planner import KnownEngine, PoolPlanner
from polykv_proxy.core.rates import Progress
from polykv_proxy.core.types import Capability
from polykv_proxy.core.waiting import WaitingRoom
from polykv_proxy.errors import SessionNotResidentError

if TYPE_CHECKING:
    from collections.abc import Collection

    from polykv_proxy.core.accounting import Ownership
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.records import RequestId
    from polykv_proxy.core.residents import Key
    from polykv_proxy.core.sessions import Session, SessionBook
    from polykv_proxy.core.slots import Slot, SlotBoard
    from polykv_proxy.core.stock import SlotLook
    from polykv_proxy.core.tree import PoolTree
    from polykv_proxy.core.types import EngineFacts, EngineSample, Scope, SessionId, SlotId, Tokens
    from polykv_proxy.core.waiting import Waiting


class ControlPlane:
    """State of one engine and of everybody who uses it.

    Args:
        max_waiting: requests that may wait at once.
        policy: what happens without being asked for.
        number: the engine's, from 0.
    """

    def __init__(self, *, max_waiting: int, policy: PoolPolicy | None = None, number: int = 0) -> None:
        self._policy = policy or PoolPolicy()
        self._engine = KnownEngine()
        self.pools = PoolPlanner(self._engine, self._policy)
        self.sample: EngineSample | None = None
        self._seen_ts = 0.0
        """Epoch seconds of that."""
        self.ownership: Ownership | None = None
        self.cells = Cells()
        self._holdings = PoolHoldings()
        self.leases = Leases(
            self.cells,
            max_waiting=max_waiting,
            prefix=f"auto-{number}-" if number else "auto-",
            on_computed=lambda: self._keep_pools(self._seen_ts),
            retry_hold_s=self._policy.retry_hold_s,
        )
        self.experience = Experience()
        self.waiting = WaitingRoom()

    # -- the engine's life -------------------------------------------------------------------------------

    @property
    def policy(self) -> PoolPolicy:
        """What happens without being asked for."""
        return self._policy

    @property
    def facts(self) -> EngineFacts | None:
        """Static facts of the engine's load; None before the first."""
        return self._engine.facts

    @property
    def capability(self) -> Capability:
        """What was seen to work."""
        return self._engine.capability

    @property
    def capability_reason(self) -> str | None:
        """Why not more, if not."""
        return self._engine.reason

    @property
    def model_identity(self) -> str:
        """Digest of everything that changes KV bytes; empty before the first engine."""
        return self._engine.model_identity

    @property
    def tree(self) -> PoolTree:
        """All pools of the engine."""
        return self.pools.tree

    @property
    def board(self) -> SlotBoard:
        """All slots of the engine."""
        return self.leases.board

    @property
    def sessions(self) -> SessionBook:
        """All sessions of the engine."""
        return self.leases.sessions

    @property
    def cells_total(self) -> int | None:
        """Cells of the engine; None where only an upper bound is known."""
        return None if self.facts is None or not self.capability.shares_cells else self.facts.cells

    @property
    def serving(self) -> bool:
        """Whether requests can be sent now."""
        return self.leases.serving

    def on_engine_ready(
        self, facts: EngineFacts, capability: Capability, reason: str | None, model_identity: str, now: float
    ) -> list[Command]:
        """An engine answers; what it can do was tested.

        Args:
            facts: static facts, of this load of the model.
            capability: what was seen to work.
            reason: why not more, if not.
            model_identity: digest of everything that changes KV bytes.
            now: monotonic seconds.
        """
        if self.facts != facts:  # not by the epoch alone: an engine without the patch has none
            self._forget_residency(facts, same_model=model_identity == self._engine.model_identity)
            self.cells.meet(facts, counts=capability.shares_cells)
            self._holdings = PoolHoldings()
        self._engine.meet(facts, capability, reason, model_identity)
        self.tree.shares_cells = capability.shares_cells
        self.leases.serving = True
        return self.leases.serve_waiting(now)

    def present(self, now: float) -> EngineSample | None:
        """The last reading, while it speaks of the present."""
        return fresh(self.sample, now) if self.serving else None

    def on_engine_down(self) -> None:
        """Nothing can be sent until the next ``on_engine_ready``; what was running ends on its own."""
        self.leases.serving = False
        self.experience.book.on_down()

    def _forget_residency(self, facts: EngineFacts, *, same_model: bool) -> None:
        self.pools.lose_all(facts.max_pools, same_model=same_model)
        self.leases.lose_all(facts.slots)
        self.sample = self.ownership = None
        self.experience.reset()

    def on_sample(self, sample: EngineSample, now: float | None = None, now_ts: float = 0.0) -> list[Command]:
        """Correct the picture by what the engine reports; readings of another epoch are ignored.

        Args:
            sample: what it reports.
            now: monotonic seconds; None: when it was taken.
            now_ts: epoch seconds.
        """
        if self.facts is None or sample.epoch != self.facts.epoch:
            return []
        self.sample, self._seen_ts = sample, now_ts
        for slot in self.board.lost(sample):
            self.leases.on_emptied(slot.slot)
        self.ownership = attribute(self.tree.nodes(), sample)
        if self.ownership.dead:
            self.tree.drop_ghosts(set(self.ownership.dead))
        if self.cells.ledger is None:
            return []
        now = sample.taken_at if now is None else now
        self._keep_pools(now_ts)
        self.cells.on_sample(sample, self.board, now)
        commands: list[Command] = [StopRunning(lease) for lease in self.cells.overdrawn()]
        return [*commands, *self.leases.serve_waiting(now), *self.cells.reclaim()]

    def _keep_pools(self, now_ts: float) -> None:
        """The ledger learns what the pools hold."""
        if self.cells.ledger is not None:
            self._holdings.write(
                self.cells.ledger,
                self.tree,
                self.board,
                sample=self.sample,
                owned=self.ownership,
                grace_s=self._policy.grace_s,
                now_ts=now_ts,
            )

    def on_reclaimed(self, key: Key, now: float, *, gone: bool) -> list[Command]:
        """A resident was taken back, or would not go: then it stays until the next sample."""
        ledger = self.cells.ledger
        if ledger is None:
            return []
        if gone:
            ledger.residents.drop(key)
        else:
            ledger.residents.keep(key, ledger.residents.cells_of(key))
        return [*self.leases.serve_waiting(now), *self.cells.reclaim()]

    # -- rates -------------------------------------------------------------------------------------------

    def on_counters(self, sample: EngineSample) -> Progress:
        """The sampler looked: what came since the last time. Readings of another epoch are ignored."""
        if self.facts is None or sample.epoch != self.facts.epoch:
            return Progress()
        return self.experience.on_sample(sample, self.board)

    def on_stock_slots(self, slots: Collection[SlotLook], now: float) -> Progress:
        """The same, of an engine without counters."""
        pinned = self.capability is not Capability.RELAY
        return self.experience.on_stock_slots(slots, tuple(self.leases), now, pinned=pinned)

    def on_answer(self, lease: Lease, generated: int, seconds: float | None) -> None:
        """An answer tells that so many tokens came, the last ``seconds`` after the first (None: unknown)."""
        if not lease.ended:
            pinned = self.capability is not Capability.RELAY
            self.experience.on_answer(lease, generated, seconds, pinned=pinned)

    def session_in(self, slot: SlotId) -> Session | None:
        """Whose conversation the engine's slot is known to hold."""
        if self.capability is Capability.RELAY:
            tag = self.experience.stock.tag_of(slot)
            return next((session for session in self.sessions if tag and session.lease == tag), None)
        return self.board.slots[slot].session if slot < len(self.board.slots) else None

    # -- what slots hold ---------------------------------------------------------------------------------

    def on_prompt(self, lease: Lease, tokens: Tokens) -> None:
        """The exact tokens that a request is going to compute, or has attached; others may share with it."""
        if not lease.ended:
            self.board.slots[lease.slots[0]].tokens = tokens

    def end_session(
        self, session_id: SessionId, scope: Scope | None, now: float
    ) -> tuple[SlotId | None, list[Command]]:
        """It is over; returns the slot that held it, which belongs to no conversation any more.

        Who waited for that slot to go on with it waits no more.

        Raises:
            NotFoundError, ConflictError: see ``SessionBook.idle``.
        """
        session = self.sessions.idle(session_id, scope)
        self.sessions.end(session)
        slot = session.slot
        if slot is not None:
            self.board.forget(slot)
        return slot, self.leases.serve_waiting(now)

    def orphans(self) -> list[PrefixPool]:
        """Pools that are pinned for nobody; see ``keeping.is_orphan``."""
        pinned = [pool for pool in self.tree if pool.pinned]
        if not pinned:
            return []
        ridden, rested_on = riding(self.sample), resting(self.sessions, self.ownership)
        return [pool for pool in pinned if is_orphan(pool, ridden, rested_on)]

    def who_waits(self) -> tuple[dict[Session, RequestId], list[Waiting]]:
        """Sessions whose next turn waits, and requests that begin one; see ``WaitingRoom.told``."""
        return self.waiting.told(self.sessions.holds)

    def resident_slot(self, session_id: SessionId, scope: Scope | None) -> Slot:
        """The slot that holds a session now.

        Raises:
            NotFoundError, AmbiguousSessionError: no such session, or several.
            SessionNotResidentError: another conversation has taken its slot.
        """
        session = self.sessions.need(session_id, scope, param="from_session")
        if session.slot is None:
            raise SessionNotResidentError(
                f"no slot holds session {session_id} any more", param="from_session"
            )
        return self.board.slots[session.slot]

    def shareable(
        self, tokens: Tokens, lease: Lease, matched: int, boundary: int = 0
    ) -> tuple[Slot, int] | None:
        """A slot whose prompt has much more in common with this one than any pool, and how much.

        1. Pools that come by themselves are off, or as many exist as may, or would be copies: none.
        2. The closest slot of the same scope reaches a boundary that no pool does: up to there, exactly.
        3. It shares too little, or hardly more than a pool does: none.
        4. Its common prefix is worth a pool.

        Args:
            tokens: the request's prompt.
            lease: its lease.
            matched: leading tokens that a pool holds.
            boundary: leading tokens that the client expects others to begin with, too; 0 if it said nothing.
        """
        policy = self._policy
        if not policy.auto_pools or lease.session is None or not self.capability.shares_cells:
            return None
        found = self.board.closest(tokens, lease.session.scope, other_than=lease.slots[0])
        if found is not None and matched < boundary <= found[1]:
            return found[0], boundary  # 2
        if found is None or found[1] < max(policy.auto_min_tokens, matched + policy.auto_gain_tokens):
            return None  # 3
        return found  # 4
