"""Who has which slots of an engine, and who waits for them.

Rule 1: a request is sent only to slots that are known to be idle, so the engine never queues.
Rule 2: those who wait are served in order of arrival. A request that cannot be placed holds back those
behind it: none of them may starve it. One that waits for the slot which its client just left does not.
Rule 3: a lease ends exactly once. Ending it again changes nothing.
Rule 4: a request gets slots only when its cells are there, see ``core.ledger``; who waits for them is in the
same line.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Command,
    Decision,
    Lease,
    Never,
    Place,
    Queue,
    Reject,
    Ticket,
    WakeQueued,
)
from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.slots import Ask, Content, Placement, SlotBoard
from polykv_proxy.core.types import LeaseId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polykv_proxy.core.cells import Cells, Need
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import SlotId


class Leases:
    """Leases on the slots of one engine, and the line for them.

    Args:
        cells: what they take of the engine's cells.
        max_waiting: requests that may wait at once.
        prefix: of the ids of sessions that nobody named.
        on_computed: called when a request is over that computed a pool, before its slots are free.
        retry_hold_s: seconds that what a client left is kept for its retry, unless it is needed.
    """

    def __init__(
        self,
        cells: Cells,
        *,
        max_waiting: int,
        prefix: str,
        on_computed: Callable[[], None],
        retry_hold_s: float,
    ) -> None:
        self._cells = cells
        self._max_waiting = max_waiting
        self._on_computed = on_computed
        self._retry_hold_s = retry_hold_s
        self.board = SlotBoard(0)
        self.sessions = SessionBook(prefix)
        self.serving = False  # whether requests can be sent now
        self._waiting: OrderedDict[int, Ticket] = OrderedDict()
        self._held = 0
        """Places of requests that wait for the engine or its pools before they ask for slots."""
        self._arrivals = 0
        self._running: dict[LeaseId, Lease] = {}
        self._next_lease = 1

    def __iter__(self) -> Iterator[Lease]:
        """All that hold slots."""
        return iter(self._running.values())

    def lose_all(self, slots: int) -> None:
        """Another engine is there, with so many slots: nothing runs in them, and nothing is held."""
        for session in self.sessions:
            session.slot = None
        for lease in self:
            lease.ended = True  # its slot belongs to the dead engine
            if lease.session is not None:
                lease.session.running = False
        self._running.clear()
        self.board = SlotBoard(slots)

    # -- the line -----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait for slots, or before that for the engine and its pools."""
        return len(self._waiting) + self._held

    @property
    def wanted(self) -> tuple[int, int]:
        """Cells that those will take, and how many of them do not say."""
        known = [ticket.cells for ticket in self._waiting.values() if ticket.cells is not None]
        return sum(known), self.waiting - len(known)

    def _is_behind(self, number: int) -> bool:
        """Whether somebody before it waits for any slot; who waits for a certain one is in nobody's way."""
        return any(
            ticket.number < number and not self.board.awaits(ticket.ask) for ticket in self._waiting.values()
        )

    def on_held(self, place: Place | None = None) -> Place | Reject:
        """A request is to wait before it asks for slots: it takes a place in line, if there is one.

        It keeps it until it asks for slots with it, or is told to leave by ``on_let_go``.

        Args:
            place: one that it had before, which is its own again.
        """
        if place is None:
            if (full := self._full()) is not None:
                return full
            place = Place(self._arrive(), held=False)
        self._held += not place.held
        place.held = True
        return place

    def on_let_go(self, place: Place) -> None:
        """It waits there no more; no effect the second time."""
        self._held -= place.held
        place.held = False

    def _arrive(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _full(self) -> Reject | None:
        if self.waiting < self._max_waiting:
            return None
        return Reject("queue_full", f"{self.waiting} requests are waiting already")

    def on_request(
        self, ask: Ask, now: float, *, now_ts: float, conversation: bool = True, place: Place | None = None
    ) -> Decision:
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
            place: in line, where it waited before it asked; those who came later do not pass.
        """
        for session in self.sessions.expire(now):
            if session.slot is not None and not self.board.is_leaving(session.slot):
                self.board.forget(session.slot)  # else its client may come again for it
        admitted = place is not None and place.held
        number = self._arrive() if place is None else place.number
        if place is not None:
            self.on_let_go(place)
        if self.serving and not self._is_behind(number):
            lease = self._grant(ask, now, now_ts, conversation=conversation)
            if lease is not None:
                return Admit(lease)  # 1
        if (never := self._never(ask, now)) is not None:
            return never  # 2
        if not admitted and (full := self._full()) is not None:
            return full  # 3
        ticket = Ticket(ask, conversation, now, now_ts, number, self._cells.wanted(ask))
        self._waiting[id(ticket)] = ticket
        for key in [key for key, other in self._waiting.items() if other.number > number]:
            self._waiting.move_to_end(key)
        return Queue(ticket)  # 4

    def _never(self, ask: Ask, now: float) -> Never | None:
        found = self._cells.never(ask, now)
        return None if found is None else Never(*found)

    def must_count(self, need: Need, now: float) -> bool:
        """Whether a request of unknown length should be counted: as long as it may be, it would wait."""
        return self._cells.must_count(need, now, in_line=bool(self._waiting))

    def on_gave_up(self, ticket: Ticket, now: float) -> list[Command]:
        """Whoever held the ticket left or waited too long. A lease it was just given is passed on."""
        self._waiting.pop(id(ticket), None)
        if ticket.lease is not None:
            return self.on_finished(ticket.lease, now, clean=True, content=Content.OLD)
        return self.serve_waiting(now)

    def serve_waiting(self, now: float) -> list[Command]:
        """Let in whoever can be placed now (rule 2)."""
        commands: list[Command] = []
        for key, one in list(self._waiting.items()):
            if not self.serving:
                break
            if self.board.awaits(one.ask):
                continue  # its slot is nobody else's until then
            one.never, lease = self._never(one.ask, now), None
            if one.never is None:
                lease = self._grant(one.ask, now, one.since_ts, conversation=one.conversation)
            if lease is None and one.never is None:
                break  # rule 2
            del self._waiting[key]
            one.lease = lease
            commands.append(WakeQueued(one))
        return commands

    def _grant(self, ask: Ask, now: float, now_ts: float, *, conversation: bool) -> Lease | None:
        placement = None if self.board.awaits(ask) else self.board.place(ask)
        if placement is None or not self._cells.fits(ask, placement, now):
            return None
        session = self._session_for(ask, placement, now, now_ts) if conversation else None
        lease = Lease(LeaseId(self._next_lease), placement.slots, session, placement.continues, now)
        lease.evicted = session is not None and session.taken
        self._next_lease += 1
        if session is not None:
            lease.before, session.lease = session.lease, lease.lease_id
            lease.pool_before = session.pool
        self.board.take(placement, lease.lease_id, session, ask)
        self._running[lease.lease_id] = lease
        self._cells.take(lease, ask)
        return lease

    # -- a request ----------------------------------------------------------------------------------------

    def on_dispatch(self, lease: Lease, plan: AttachPlan | None) -> None:
        """The request goes out, perhaps attached to a pool."""
        pool = lease.pool = plan.pool if plan is not None and plan.tokens else None
        if pool is not None:
            pool.attached += 1
        if lease.session is not None:
            goes_to = None if pool is None else pool.pool_id
            self.sessions.on_sent(lease.session, goes_to, continues=lease.continues)

    def on_first_byte(self, lease: Lease, ttft_s: float) -> None:
        """The answer begins to reach the client."""
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
            if clean and content is Content.OLD:
                lease.session.pool = lease.pool_before  # the engine refused it; what its slot shares stays
            if content is Content.OLD and lease.session.lease == lease.lease_id:
                lease.session.lease = lease.before  # the slot holds what that one left
                if clean and lease.before is None:
                    self.sessions.drop(lease.session)
        if not clean:
            if stop:
                self.board.leave(lease.slots[0])
            # one may wait for its slot from now on, and no longer hold back the others
            return [AwaitIdle(lease, stop), *self.serve_waiting(now)]
        return self._free(lease, now, content)

    def on_slots_idle(self, lease: Lease, now: float, content: Content) -> list[Command]:
        """The engine is seen to be done with an abandoned request."""
        return self._free(lease, now, content, keep_s=self._retry_hold_s)

    def _free(self, lease: Lease, now: float, content: Content, *, keep_s: float = 0.0) -> list[Command]:
        if self._running.pop(lease.lease_id, None) is None:
            return []  # the engine it ran on is gone
        if self._cells.computes(lease):
            self._on_computed()  # what was its cells is the pool's from now on
        self._cells.over(lease, kept=content is not Content.NOTHING, untouched=content is Content.OLD)
        came_back = [key for key, ticket in self._waiting.items() if self.board.awaits(ticket.ask)]
        for index, number in enumerate(lease.slots):
            before = self.board.slots[number].before[0]
            if before is not None and before.closed:
                self.board.forget_before(number)
            self.board.free(number, now, content if index == 0 else Content.NOTHING, keep_s=keep_s)
        for key in came_back:
            if self.board.held_links(self._waiting[key].ask):
                self._waiting.move_to_end(key, last=False)  # whose client left it, and waits for it
                self._waiting[key].number = 0
                break
        return [*self.serve_waiting(now), *self._cells.reclaim()]

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
            return self.serve_waiting(now)
        other = self._running[waiting]
        other.slots = tuple(source if each == slot else each for each in other.slots)
        other.continues = False
        if other.session is None:  # it wanted what the slot held, or nothing
            self.board.forget(source)
        return []

    # -- slots --------------------------------------------------------------------------------------------

    def holds(self, lease: Lease) -> bool:
        """Whether a lease's slots are still its own: neither were they freed nor is their engine gone."""
        return lease.lease_id in self._running

    @property
    def silent(self) -> bool:
        """Whether a request runs whose client gets nothing until it is over."""
        return any(not lease.streams for lease in self._running.values())

    @property
    def running_count(self) -> int:
        """Slots that work for us, as far as we know."""
        return sum(len(lease.slots) for lease in self._running.values())

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
        return self.serve_waiting(now)

    def is_reclaimable(self, slot: SlotId) -> bool:
        """Whether what is in a slot is only what a request displaced that was not sent yet."""
        number = self.board.slots[slot].lease
        lease = None if number is None else self._running.get(number)
        if lease is None or (lease.continues and slot == lease.slots[0]):
            return False
        return self._cells.is_unsent(lease.lease_id)

    def on_emptied(self, slot: SlotId) -> None:
        """A conversation was given up for its cells; what waits to begin in its slot finds it empty."""
        if self._cells.is_unsent(self.board.slots[slot].lease):
            self.board.forget_before(slot)
            return
        session = self.board.slots[slot].session
        self.board.forget(slot)
        if session is not None:
            session.taken = True

    # -- sessions -----------------------------------------------------------------------------------------

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

    def left_in(self, slot: SlotId) -> LeaseId | None:
        """The request in a slot that its client left, while the engine may still be at it."""
        number = self.board.slots[slot].lease
        lease = None if number is None else self._running.get(number)
        return number if lease is not None and lease.ended else None

    def session_of(self, ask: Ask) -> Session | None:
        """The session that a request would go on with if it got its slots now."""
        held = self.board.holder(ask)
        if held is not None and self.sessions.holds(held):
            return held
        return self.sessions.idle_namesake(ask.scope, ask.name)

    def running_lease(self, session: Session) -> Lease | None:
        """The hold of a session's running request on its slots."""
        return None if session.lease is None else self._running.get(session.lease)
