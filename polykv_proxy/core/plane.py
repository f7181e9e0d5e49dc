"""The control plane of one engine: the one stateful object of the core.

The engine's life and its requests are here; what becomes of pools is the planner's, under ``pools``.

Rule 1: every method is synchronous and returns what should happen; nothing here happens by itself.
Rule 2: a request is sent only to slots that are known to be idle, so the engine never queues.
Rule 3: those who wait are served in order of arrival. A request that cannot be placed holds back those
behind it: none of them may starve it. One that waits for the slot which its client just left does not.
Rule 4: a lease ends exactly once. Ending it again changes nothing.
Rule 5: a request is sent only when its cells are there, see ``core.ledger``; those who wait for them are in
the same line.
Rule 6: what the engine reports corrects what was assumed. A new epoch means that nothing is resident.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from polykv_proxy.core.accounting import attribute
from polykv_proxy.core.cells import Cells
from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Command,
    Decision,
    Lease,
    Never,
    PoolPolicy,
    Queue,
    Reclaim,
    Reject,
    StopRunning,
    Ticket,
    WakeQueued,
)
from polykv_proxy.core.experience import Experience
from polykv_proxy.core.keeping import is_held, is_orphan, resting, riding
from polykv_proxy.core.planner import KnownEngine, PoolPlanner
from polykv_proxy.core.rates import Progress
from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.slots import Ask, Content, Placement, SlotBoard
from polykv_proxy.core.types import Capability, LeaseId
from polykv_proxy.errors import ConflictError, NotFoundError, SessionNotResidentError

if TYPE_CHECKING:
    from collections.abc import Collection

    from polykv_proxy.core.accounting import Ownership
    from polykv_proxy.core.cells import Need
    from polykv_proxy.core.ledger import Key
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.stock import SlotLook
    from polykv_proxy.core.tree import PoolTree
    from polykv_proxy.core.types import EngineFacts, EngineSample, PoolUid, Scope, SessionId, SlotId, Tokens


class ControlPlane:
    """State of one engine and of everybody who uses it.

    Args:
        max_waiting: requests that may wait at once.
        policy: what happens without being asked for.
        number: the engine's, from 0.
    """

    def __init__(self, *, max_waiting: int, policy: PoolPolicy | None = None, number: int = 0) -> None:
        self._max_waiting = max_waiting
        self._policy = policy or PoolPolicy()
        self._engine = KnownEngine()
        self.pools = PoolPlanner(self._engine, self._policy)
        self.board = SlotBoard(0)
        self.sample: EngineSample | None = None
        self.ownership: Ownership | None = None
        self.cells = Cells()
        self._serving = False
        self._waiting: OrderedDict[int, Ticket] = OrderedDict()
        self._held = 0
        """Requests that wait for the engine, or for pools that come back, before they ask for slots."""
        self.sessions = SessionBook(f"auto-{number}-" if number else "auto-")
        self.experience = Experience()
        self._running: dict[LeaseId, Lease] = {}
        self._next_lease = 1

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
    def cells_total(self) -> int | None:
        """Cells of the engine; None where only an upper bound is known."""
        return None if self.facts is None or not self.capability.shares_cells else self.facts.cells

    @property
    def serving(self) -> bool:
        """Whether requests can be sent now."""
        return self._serving

    @property
    def _in_line(self) -> bool:
        """Whether somebody waits for whatever slot comes; who waits for a certain one is in nobody's way."""
        return any(not self.board.awaits(ticket.ask) for ticket in self._waiting.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for slots, or before that for the engine and its pools."""
        return len(self._waiting) + self._held

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
        self._engine.meet(facts, capability, reason, model_identity)
        self.tree.shares_cells = capability.shares_cells
        self._serving = True
        return self._serve_waiting(now)

    def on_engine_down(self) -> None:
        """Nothing can be sent until the next ``on_engine_ready``; what was running ends on its own."""
        self._serving = False

    def _forget_residency(self, facts: EngineFacts, *, same_model: bool) -> None:
        self.pools.lose_all(facts.max_pools, same_model=same_model)
        for session in self.sessions:
            session.slot = None
        for lease in self._running.values():
            lease.ended = True  # its slot belongs to the dead engine
            if lease.session is not None:
                lease.session.running = False
        self._running.clear()
        self.board = SlotBoard(facts.slots)
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
        self.sample = sample
        for slot in self.board.lost(sample):
            self.on_emptied(slot.slot)
        self.ownership = attribute(self.tree.nodes(), sample)
        if self.ownership.dead:
            self.tree.drop_ghosts(set(self.ownership.dead))
        if self.cells.ledger is None:
            return []
        now = sample.taken_at if now is None else now
        self._keep_pools(now_ts)
        self.cells.on_sample(sample, self.board, now)
        commands: list[Command] = [StopRunning(lease) for lease in self.cells.overdrawn()]
        return [*commands, *self._serve_waiting(now), *self.reclaim()]

    def _keep_pools(self, now_ts: float) -> None:
        """The ledger learns what the pools hold."""
        ridden: frozenset[PoolUid] = frozenset()
        if self.sample is not None:
            ridden = frozenset(
                slot.pool_uid
                for slot in self.sample.slots
                if slot.shared_tokens > 0 and not self.board.slots[slot.slot].idle
            )
        own = {} if self.ownership is None else self.ownership.cells
        held = riding(self.sample)
        forlorn = frozenset(
            pool.uid for pool in self.tree.lingering if pool.uid is not None and not is_held(pool, held)
        )
        self.cells.keep_pools(self.tree, own, ridden, forlorn, self._rests(), self._policy.grace_s, now_ts)

    def _rests(self) -> dict[tuple[SlotId, ...], int]:
        """Cells of pools that are gone, by the slots that alone keep them, where these are idle."""
        draining = () if self.ownership is None else self.ownership.draining
        found: dict[tuple[SlotId, ...], int] = {}
        for rest in draining:
            alone = rest.holders == len(rest.slots) and not rest.lingers
            if alone and all(self.board.slots[slot].idle for slot in rest.slots):
                found[rest.slots] = found.get(rest.slots, 0) + rest.cells
        return found

    def reclaim(self) -> list[Command]:
        """What has to go for those who run, and for the next one."""
        ledger = self.cells.ledger
        return [] if ledger is None else [Reclaim(key) for key in ledger.reclaim()]

    def reclaimable_slot(self, slot: SlotId) -> bool:
        """Whether what is in a slot is only what a request displaced that was not sent yet."""
        number = self.board.slots[slot].lease
        lease = None if number is None else self._running.get(number)
        if lease is None or (lease.continues and slot == lease.slots[0]):
            return False
        return self.cells.is_unsent(lease.lease_id)

    def on_emptied(self, slot: SlotId) -> None:
        """A conversation was given up for its cells; what waits to begin in its slot finds it empty."""
        if self.cells.is_unsent(self.board.slots[slot].lease):
            self.board.forget_before(slot)
            return
        session = self.board.slots[slot].session
        self.board.forget(slot)
        if session is not None:
            session.taken = True

    def on_reclaimed(self, key: Key, now: float, *, gone: bool) -> list[Command]:
        """A resident was taken back, or would not go: then it stays until the next sample."""
        ledger = self.cells.ledger
        if ledger is None:
            return []
        if gone:
            ledger.drop(key)
        else:
            ledger.keep(key, ledger.cells_of(key))
        return [*self._serve_waiting(now), *self.reclaim()]

    # -- rates -------------------------------------------------------------------------------------------

    def on_counters(self, sample: EngineSample) -> Progress:
        """The sampler looked: what came since the last time. Readings of another epoch are ignored."""
        if self.facts is None or sample.epoch != self.facts.epoch:
            return Progress()
        return self.experience.on_sample(sample, self.board)

    def on_stock_slots(self, slots: Collection[SlotLook], now: float) -> Progress:
        """The same, of an engine without counters."""
        pinned = self.capability is not Capability.RELAY
        return self.experience.on_stock_slots(slots, self._running.values(), now, pinned=pinned)

    def on_answer(self, lease: Lease, generated: int, seconds: float) -> None:
        """An answer tells that so many tokens came, the last of them ``seconds`` after the first."""
        if not lease.ended:
            pinned = self.capability is not Capability.RELAY
            self.experience.on_answer(lease, generated, seconds, pinned=pinned)

    def session_in(self, slot: SlotId) -> Session | None:
        """Whose conversation the engine's slot is known to hold."""
        if self.capability is Capability.RELAY:
            tag = self.experience.stock.tag_of(slot)
            return next((session for session in self.sessions if tag and session.lease == tag), None)
        return self.board.slots[slot].session if slot < len(self.board.slots) else None

    @property
    def silent(self) -> bool:
        """Whether a request runs whose client gets nothing until it is over."""
        return any(not lease.streams for lease in self._running.values())

    @property
    def running_count(self) -> int:
        """Slots that work for us, as far as we know."""
        return sum(len(lease.slots) for lease in self._running.values())

    # -- requests ----------------------------------------------------------------------------------------

    def on_request(self, ask: Ask, now: float, *, now_ts: float, conversation: bool = True) -> Decision:
        """A request wants slots.

        1. The engine serves, nobody waits, slots are idle and its cells are there: admit.
        2. It can never fit: never.
        3. Too many wait: reject.
        4. Wait in line.

        Args:
            ask: what it wants.
            now: monotonic seconds.
            now_ts: epoch seconds, for the session's record.
            conversation: whether it belongs to a session (computing a pool does not).
        """
        for session in self.sessions.expire(now):
            if session.slot is not None:
                self.board.forget(session.slot)
        if self._serving and not self._in_line:
            lease = self._grant(ask, now, now_ts, conversation=conversation)
            if lease is not None:
                return Admit(lease)  # 1
        if (never := self._never(ask, now)) is not None:
            return never  # 2
        if (full := self._full()) is not None:
            return full  # 3
        ticket = Ticket(ask, conversation, now, now_ts)
        self._waiting[id(ticket)] = ticket
        return Queue(ticket)  # 4

    def on_held(self) -> Reject | None:
        """A request is to wait before it asks for slots: it takes a place in line, if there is one.

        Told of its end by ``on_let_go``.
        """
        full = self._full()
        self._held += full is None
        return full

    def on_let_go(self) -> None:
        """It waits there no more."""
        self._held -= 1

    def _full(self) -> Reject | None:
        if self.waiting < self._max_waiting:
            return None
        return Reject("queue_full", f"{self.waiting} requests are waiting already")

    def _never(self, ask: Ask, now: float) -> Never | None:
        found = self.cells.never(ask, now)
        return None if found is None else Never(*found)

    def must_count(self, need: Need, now: float) -> bool:
        """Whether a request of unknown length should be counted: as long as it may be, it would wait."""
        return self.cells.must_count(need, now, in_line=bool(self._waiting))

    def on_gave_up(self, ticket: Ticket, now: float) -> list[Command]:
        """Whoever held the ticket left or waited too long. A lease it was just given is passed on."""
        self._waiting.pop(id(ticket), None)
        if ticket.lease is not None:
            return self.on_finished(ticket.lease, now, clean=True, content=Content.OLD)
        return self._serve_waiting(now)

    def on_dispatch(self, lease: Lease, plan: AttachPlan) -> None:
        """The request goes out attached to a pool."""
        lease.pool = plan.pool
        session = lease.session
        if session is not None:
            session.moves_to = None
            if not lease.continues and session.pool not in (None, plan.pool.pool_id):
                self.sessions.re_root(session)
        plan.pool.attached += 1

    def on_first_byte(self, lease: Lease, ttft_s: float) -> None:
        """The answer began to reach the client."""
        if lease.session is not None:
            lease.session.ttft_s = ttft_s

    def on_finished(
        self, lease: Lease, now: float, *, clean: bool, content: Content, stop: bool = True
    ) -> list[Command]:
        """A request is over, whatever way.

        Args:
            lease: its lease; ending one twice changes nothing.
            now: monotonic seconds.
            clean: the engine's answer was complete, so its slots are idle. Otherwise the engine may
                still be working for a client that left, and the slots stay taken until ``on_slots_idle``.
            content: what its first slot holds now, where the answer was complete.
            stop: whether the engine is to be stopped where the answer was not complete.
        """
        if lease.ended:
            return []
        lease.ended = True
        if lease.pool is not None:
            lease.pool.attached -= 1
        if lease.session is not None:
            lease.session.running = False
            lease.session.last_seen = now
            if clean and content is Content.NEW:
                lease.session.re_rooted = False
            if not clean and lease.pool is not None:
                lease.session.pool = lease.pool.pool_id  # no answer proves it, but there its slot is
            if content is Content.OLD and lease.session.lease == lease.lease_id:
                lease.session.lease = lease.before  # the slot holds what that one left
        if not clean:
            if stop:
                self.board.leave(lease.slots[0])
            return [
                AwaitIdle(lease, stop),
                *self._serve_waiting(now),
            ]  # one may wait for that slot from now on
        return self._free(lease, now, content)

    def holds(self, lease: Lease) -> bool:
        """Whether a lease's slots are still its own: neither were they freed nor is their engine gone."""
        return lease.lease_id in self._running

    def on_slots_idle(self, lease: Lease, now: float, content: Content) -> list[Command]:
        """The engine is seen to be done with an abandoned request."""
        return self._free(lease, now, content)

    def on_slot_learnt(self, lease: Lease, slot: SlotId, now: float) -> list[Command]:
        """A request that could not be pinned runs in another slot than the one it was given.

        A request that was to have that slot, and was not sent yet, gets the other one.
        """
        if lease.lease_id not in self._running or slot in lease.slots or slot >= len(self.board.slots):
            return []
        source = lease.slots[0]
        waiting = self.board.move(source, slot, now)
        lease.slots = (slot, *lease.slots[1:])
        if waiting is None:
            return self._serve_waiting(now)
        other = self._running[waiting]
        other.slots = tuple(source if each == slot else each for each in other.slots)
        other.continues = False
        if other.session is None:  # it wanted what the slot held, or nothing
            self.board.forget(source)
        return []

    def borrow(self, slot: SlotId, now: float) -> Lease | None:
        """Keep everybody off an idle slot, which goes on to hold what it holds; None while it is at work."""
        lease = Lease(LeaseId(self._next_lease), (slot,), None, continues=True, granted_at=now)
        if not self.board.hold(slot, lease.lease_id):
            return None
        self._next_lease += 1
        self._running[lease.lease_id] = lease
        return lease

    def returned(self, lease: Lease, now: float) -> list[Command]:
        """A borrowed slot is free again; no effect once the engine is gone."""
        lease.ended = True
        if self._running.pop(lease.lease_id, None) is None:
            return []
        self.board.let_go(lease.slots[0])
        return self._serve_waiting(now)

    def _free(self, lease: Lease, now: float, content: Content) -> list[Command]:
        if self._running.pop(lease.lease_id, None) is None:
            return []  # the engine it ran on is gone
        if self.cells.computes(lease):
            self._keep_pools(0.0)  # what was its cells is the pool's from now on
        self.cells.over(lease, kept=content is not Content.NOTHING, untouched=content is Content.OLD)
        came_back = [key for key, ticket in self._waiting.items() if self.board.awaits(ticket.ask)]
        for index, number in enumerate(lease.slots):
            self.board.free(number, now, content if index == 0 else Content.NOTHING)
        for key in came_back:
            if self.board.held_links(self._waiting[key].ask):
                self._waiting.move_to_end(key, last=False)  # whose client left it, and waits for it
                break
        return [*self._serve_waiting(now), *self.reclaim()]

    def _serve_waiting(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for key, ticket in list(self._waiting.items()):
            if not self._serving:
                break
            if self.board.awaits(ticket.ask):
                continue  # its slot is nobody else's until then
            ticket.never = self._never(ticket.ask, now)
            lease = (
                None
                if ticket.never
                else self._grant(ticket.ask, now, ticket.since_ts, conversation=ticket.conversation)
            )
            if lease is None and ticket.never is None:
                break  # rule 3
            del self._waiting[key]
            ticket.lease = lease
            commands.append(WakeQueued(ticket))
        return commands

    def _grant(self, ask: Ask, now: float, now_ts: float, *, conversation: bool) -> Lease | None:
        placement = None if self.board.awaits(ask) else self.board.place(ask)
        if placement is None or not self.cells.fits(ask, placement, now):
            return None
        session = self._session_for(ask, placement, now, now_ts) if conversation else None
        lease = Lease(LeaseId(self._next_lease), placement.slots, session, placement.continues, now)
        lease.evicted = session is not None and session.taken
        self._next_lease += 1
        if session is not None:
            lease.before, session.lease = session.lease, lease.lease_id
        self.board.take(placement, lease.lease_id, session, ask)
        self._running[lease.lease_id] = lease
        self.cells.take(lease, ask)
        return lease

    # -- sessions ----------------------------------------------------------------------------------------

    def _session_for(self, ask: Ask, placement: Placement, now: float, now_ts: float) -> Session:
        """The conversation that continues in the placed slot, else a new one under the client's name."""
        held = self.board.slots[placement.slots[0]].session
        # it may have been forgotten while a request that came to nothing had its slot
        goes_on = placement.continues and held is not None and self.sessions.holds(held)
        session = held if goes_on else self.sessions.idle_namesake(ask.scope, ask.name)
        if session is None:
            session = self.sessions.begin(ask.scope, ask.name, now_ts)
        self.sessions.touch(session, now)
        return session

    def session_of(self, ask: Ask) -> Session | None:
        """The session that a request would go on with if it got its slots now."""
        held = self.board.holder(ask)
        if held is not None and self.sessions.holds(held):
            return held
        return self.sessions.idle_namesake(ask.scope, ask.name)

    def on_prompt(self, lease: Lease, tokens: Tokens) -> None:
        """The exact tokens of a request that is about to run."""
        if not lease.ended:
            self.board.slots[lease.slots[0]].tokens = tokens

    def need_session(
        self, session_id: SessionId, scope: Scope | None, *, param: str = "session_id"
    ) -> Session:
        """A session by id, as seen from a scope (None: an administrator, who sees all).

        Raises:
            NotFoundError: there is none, or it is another key's.
        """
        session = self.sessions.get(session_id)
        if session is None or scope not in (None, session.scope):
            raise NotFoundError(f"session {session_id} does not exist", code="session_not_found", param=param)
        return session

    def idle_session(self, session_id: SessionId, scope: Scope | None) -> Session:
        """Like ``need_session``, for what cannot be done to one that runs.

        Raises:
            NotFoundError: there is none.
            ConflictError: it runs.
        """
        session = self.need_session(session_id, scope)
        if session.running:
            raise ConflictError(
                f"session {session_id} runs; wait for its request, or leave it", code="session_running"
            )
        return session

    def running_lease(self, session: Session) -> Lease | None:
        """The hold of a session's running request on its slots."""
        return None if session.lease is None else self._running.get(session.lease)

    def on_migrated(self, session: Session, now: float) -> None:
        """What it held is gone, and its next request may come to any slot: the name tells whose it is."""
        session.pool = None
        self.sessions.re_root(session)
        if self.sessions.holds(session):
            self.sessions.note(session, now)

    def end_session(self, session_id: SessionId, scope: Scope | None) -> SlotId | None:
        """It is over; returns the slot that held it, which belongs to no conversation any more.

        Raises:
            NotFoundError, ConflictError: see ``idle_session``.
        """
        session = self.idle_session(session_id, scope)
        self.sessions.end(session)
        slot = session.slot
        if slot is not None:
            self.board.forget(slot)
        return slot

    def orphans(self) -> list[PrefixPool]:
        """Pools that are pinned for nobody; see ``keeping.is_orphan``."""
        pinned = [pool for pool in self.tree if pool.pinned]
        if not pinned:
            return []
        ridden, rested_on = riding(self.sample), resting(self.sessions, self.ownership)
        return [pool for pool in pinned if is_orphan(pool, ridden, rested_on)]

    def resident_slot(self, session_id: SessionId, scope: Scope | None) -> Slot:
        """The slot that holds a session now.

        Raises:
            NotFoundError: no such session.
            SessionNotResidentError: another conversation has taken its slot.
        """
        session = self.need_session(session_id, scope, param="from_session")
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
