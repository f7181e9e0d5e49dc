"""The gate of one engine: who comes in, who waits to, and who was promised a place.

Events in, verdicts out; nothing here happens by itself.

Rule 1: a verdict is acted on in the step in which it is given: who enters is inside at once, so that the
next one is judged with it.
Rule 2: sessions that wait at the gate hold back nobody who is inside. They take turns by pool.
Rule 3: a promised place counts as taken.
Rule 4: without a policy that says anything, a request costs a few look-ups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from polykv_proxy.core.admission import Entered, Held, Newcomer, Refused, decide
from polykv_proxy.core.headroom import Arm, Failing, Picture, Reason, capacity, failing, retry_after_s
from polykv_proxy.core.presence import Presence
from polykv_proxy.core.promises import Promises
from polykv_proxy.core.queueing import FairQueue
from polykv_proxy.core.sight import Sight

if TYPE_CHECKING:
    from polykv_proxy.core.headroom import Capacity
    from polykv_proxy.core.leases import Leases
    from polykv_proxy.core.ledger import CellLedger
    from polykv_proxy.core.policies import Policy
    from polykv_proxy.core.promises import Promise, Wish
    from polykv_proxy.core.sight import Look
    from polykv_proxy.core.types import PoolId, Scope, SessionKey

MAX_WAITING = 4096
"""Sessions that wait at the gate, of all pools together."""

ADVANCE_S = 0.25
"""Seconds between two looks at the clock's consequences, where no sample comes."""

ENTERED = Entered()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request at the gate."""

    session: SessionKey
    policy: Policy
    pool: PoolId | None = None
    """Whose line it waits in."""
    expected_tokens: int | None = None
    lease: str | None = None
    """A promised place that it redeems."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A session that waits to come in; ``entered`` is set by ``Gate.wake``."""

    entry: Entry
    since: float
    max_wait_s: float
    failing: Failing
    entered: Entered | None = None


Passage: TypeAlias = "Entered | Waiter | Refused"

SESSION_OUTCOMES = ("admitted", "queued", "rejected", "expired", "gave_up")
"""What becomes of a session that comes to the gate: let in at once or after a wait, refused at once or after
a wait, or it left."""


class Gate:
    """Admission of one engine.

    Args:
        ledger: the engine's cells; None while they are not known. Replaced with each load of the model.
        stale_after_s: age from which a look says nothing; None where nobody looks.
        leases: on its slots, to see how many are free and who waits for them.
    """

    def __init__(
        self,
        ledger: CellLedger | None = None,
        *,
        stale_after_s: float | None = None,
        leases: Leases | None = None,
    ) -> None:
        self.ledger = ledger
        self._leases = leases
        self.presence = Presence()
        self._sight = Sight(stale_after_s)
        self._queue: FairQueue[Waiter] = FairQueue(MAX_WAITING)
        self._advanced_at = float("-inf")
        self._waiters: dict[SessionKey, list[Waiter]] = {}
        """Requests that wait, by session: they come in together."""
        self._woken: list[Waiter] = []
        self._refused = (0, 0)
        """Sessions refused while so many had left."""
        self._promises = Promises(ledger)
        self.counts: Counter[str] = Counter(dict.fromkeys(SESSION_OUTCOMES, 0))
        """Sessions by what became of them here; turns of those inside are not among them."""

    # -- what comes in -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sessions that wait at the gate."""
        return len(self._queue)

    def on_request(self, entry: Entry, now: float, *, jitter: float, scope: Scope) -> Passage:
        """A request of a session comes.

        1. The session is inside: it goes on.
        2. A place was promised to it: it comes in.
        3. What ``decide`` says.

        Args:
            entry: what it brings.
            now: monotonic seconds.
            jitter: 0 to 1, at random.
            scope: whose it is; a promise to others does not count.
        """
        if now - self._advanced_at >= ADVANCE_S:
            self.advance(now)
        if entry.session in self.presence:
            self.presence.begin(entry.session)
            return ENTERED  # 1
        if entry.lease is not None and self.give_back(entry.lease, scope):
            return self._enter(entry, ENTERED, now, "admitted")  # 2
        if not entry.policy.judges:
            return self._enter(entry, ENTERED, now, "admitted")
        verdict = decide(
            self.picture(now, entry.pool),
            entry.policy,
            Newcomer(expected_tokens=entry.expected_tokens),
            jitter,
        )  # 3
        if isinstance(verdict, Entered):
            return self._enter(entry, verdict, now, "admitted")
        if isinstance(verdict, Held):
            waiter = Waiter(entry, now, verdict.max_wait_s, verdict.failing)
            policy = entry.policy
            if self._queue.push(
                waiter, now, line=entry.pool, priority=policy.priority, max_depth=policy.queue_max_depth
            ):
                self._waiters.setdefault(entry.session, []).append(waiter)
                return waiter
            picture = self.picture(now, entry.pool)
            verdict = Refused(
                Failing(Arm.QUEUE, Reason.QUEUE_FULL),
                retry_after_s(picture, jitter),
                capacity(picture, policy, entry.expected_tokens),
            )
        self.counts["rejected"] += 1
        return self._refuse(verdict)

    def on_gave_up(self, waiter: Waiter, now: float) -> None:
        """Who waited left. If it was just let in, its request is over."""
        session = waiter.entry.session
        if self._leave(waiter):
            self.counts["gave_up"] += session not in self._waiters and session not in self.presence
        elif waiter.entered is not None:
            if waiter in self._woken:
                self._woken.remove(waiter)  # or it would be over twice
            self.on_over(session, now)

    def on_expired(self, waiter: Waiter, now: float, *, jitter: float) -> Entered | Refused:
        """It has waited as long as it may: a last look."""
        if not self._leave(waiter) and waiter.entered is not None:
            return waiter.entered
        entry = waiter.entry
        self.advance(now)
        last = Newcomer(expected_tokens=entry.expected_tokens, may_wait=False, first=True)
        verdict = decide(self.picture(now, entry.pool), entry.policy, last, jitter)
        if isinstance(verdict, Entered):
            return self._enter(entry, verdict, now, "queued")
        assert isinstance(verdict, Refused)
        self.counts["expired"] += entry.session not in self._waiters
        return self._refuse(verdict)

    def on_over(
        self, session: SessionKey, now: float, cells: int | None = None, *, stays: bool = True
    ) -> None:
        """One of a session's requests is over, whatever way.

        Args:
            session: one that is not inside does not matter.
            now: monotonic seconds.
            cells: that the request took beyond what it shared, if it came to an end.
            stays: whether there is such a session; without one that the engine did something for, nobody
                will be back.
        """
        self.presence.end(session, now)
        if not stays:
            self.presence.drop(session)
        if cells is not None:
            self._sight.on_over(cells)

    def on_known(self, newcomer: SessionKey, session: SessionKey, now: float) -> None:
        """A request came in before anybody knew whose it is; now that is known.

        Args:
            newcomer: the name that it came in under.
            session: whose it is; one that is inside already has one request more.
            now: monotonic seconds.
        """
        if newcomer not in self.presence:
            return
        if session in self.presence:
            self.presence.close(newcomer, now)
            self.presence.begin(session)
        else:
            self.presence.rename(newcomer, session)

    def on_close(self, session: SessionKey, now: float) -> bool:
        """A session is over; returns whether it was inside."""
        return self.presence.close(session, now)

    def on_tokens(self, session: SessionKey, tokens: int) -> None:
        """So many more tokens of a session came."""
        self.presence.decoded(session, tokens)

    def on_look(self, look: Look) -> None:
        """A sample came. ``wake`` afterwards."""
        self._sight.on_look(look)
        self.presence.on_look(look.taken_at)
        self._advanced_at = look.taken_at

    def on_engine_ready(
        self, ledger: CellLedger | None, *, same_model: bool, stale_after_s: float | None = None
    ) -> None:
        """The engine is there, empty; another model has another curve. See the class for the arguments."""
        self.ledger = self._promises.ledger = ledger
        self._sight.on_engine_ready(same_model=same_model, stale_after_s=stale_after_s)

    def advance(self, now: float) -> None:
        """Time passes."""
        self._advanced_at = now
        self.presence.advance(now)
        self._promises.expire(now)

    def wake(self, now: float) -> list[Waiter]:
        """Let in those who wait and may come in now, in turn; call it after whatever made room.

        1. It is the first of a line, oldest turn first: judged as if it came now.
        2. It may come in: it is inside, and those behind it are judged after it.
        3. Newcomers have to settle: nobody else may.
        4. It may not: other lines may, theirs is another policy.
        """
        going = len(self._queue) > 0
        if going:
            self.advance(now)
        while going:
            going = False
            for waiter in self._queue.heads():  # 1
                entry = waiter.entry
                newcomer = Newcomer(expected_tokens=entry.expected_tokens, first=True)
                verdict = decide(self.picture(now, entry.pool), entry.policy, newcomer, 0.5)
                if isinstance(verdict, Entered):  # 2
                    self._queue.pop(waiter, now)
                    self._leave(waiter)
                    waiter.entered = self._enter(entry, verdict, now, "queued")
                    self._woken.append(waiter)
                    going = True
                    break
                waiter.failing = verdict.failing
                if verdict.failing.reason is Reason.SETTLING:
                    break  # 3
                # 4
        woken, self._woken = self._woken, []
        return woken

    def _enter(self, entry: Entry, verdict: Entered, now: float, outcome: str) -> Entered:
        """The session is inside from now on, and with it all of its requests that wait."""
        self.counts[outcome] += 1
        self.presence.enter(entry.session, entry.policy, now)
        for other in self._waiters.pop(entry.session, ()):
            self._queue.discard(other)
            self.presence.begin(entry.session)
            other.entered = ENTERED
            self._woken.append(other)
        return verdict

    def _leave(self, waiter: Waiter) -> bool:
        """It does not wait any more; returns whether it did."""
        mine = self._waiters.get(waiter.entry.session)
        if mine is None or waiter not in mine:
            return False
        mine.remove(waiter)
        if not mine:
            del self._waiters[waiter.entry.session]
        self._queue.discard(waiter)
        return True

    def _refuse(self, verdict: Refused) -> Refused:
        left, count = self._refused
        self._refused = (self.presence.left, count + 1 if left == self.presence.left else 1)
        return verdict

    # -- what is seen ------------------------------------------------------------------------------------

    def picture(self, now: float, pool: PoolId | None = None) -> Picture:
        """The engine as the gate sees it now.

        Args:
            now: monotonic seconds.
            pool: whose line is looked at.
        """
        presence, leases = self.presence, self._leases
        left, refused = self._refused
        line_cells, line_unknown = (0, 0) if leases is None else leases.wanted
        inside = Picture(
            working=presence.working,
            live=presence.live,
            duty=presence.duty,
            promised=len(self._promises),
            settling=presence.settling,
            floor=presence.floor,
            cells=None if self.ledger is None else self.ledger.figures(),
            slots_free=None if leases is None or not leases.serving else leases.board.idle_count,
            waiting=self._queue.depth(pool),
            at_gate=self.waiting,
            in_line=0 if leases is None else leases.waiting,
            line_cells=line_cells,
            line_unknown=line_unknown,
            leave_gap_s=presence.gap_s,
            refused=refused if left == presence.left else 0,
        )
        return self._sight.complete(inside, now)

    def capacity(
        self, now: float, policy: Policy, pool: PoolId | None = None, expected_tokens: int | None = None
    ) -> Capacity:
        """The capacity document of a pool; asking changes nothing."""
        return capacity(self._ahead(now, pool), policy, expected_tokens)

    def _ahead(self, now: float, pool: PoolId | None) -> Picture:
        """For who asks before it sends anything: of an engine that does not serve nobody can tell.

        A request that is here may wait for the engine instead, see ``on_request``.
        """
        picture = self.picture(now, pool)
        return picture if self._leases is None or self._leases.serving else replace(picture, stale=True)

    def backpressure(self, now: float, policy: Policy, pool: PoolId | None = None) -> Arm | None:
        """The arm that would refuse a newcomer now; for those who are inside to know."""
        if not policy.judges:
            return None
        picture = self.picture(now, pool)
        if picture.waiting:
            return Arm.QUEUE
        fails = failing(picture, policy)
        return None if fails is None else fails.arm

    # -- promises ----------------------------------------------------------------------------------------

    def reserve(self, wish: Wish, policy: Policy, now: float, *, jitter: float) -> Promise | Refused:
        """Promise places to sessions that will come: all of them, or none.

        1. The key is known: its promise stands as it was.
        2. Something speaks against it, see ``Promises.why_not``: refused.
        3. Promised.

        Args:
            wish: how many places, whose, and for how long.
            policy: in force for the pool.
            now: monotonic seconds.
            jitter: see ``retry_after_s``.
        """
        self.advance(now)
        known = self._promises.find(wish)
        if known is not None:
            return known  # 1
        picture = self._ahead(now, wish.pool)
        fails = self._promises.why_not(wish, picture, policy)
        if fails is not None:  # 2
            return self._refuse(Refused(fails, retry_after_s(picture, jitter), capacity(picture, policy)))
        return self._promises.add(wish, now)  # 3

    def give_back(self, lease: str, scope: Scope) -> bool:
        """A promised place is taken or not wanted any more; returns whether it was still open."""
        return self._promises.close(lease, scope)
