"""Who is inside, who works now, and how many of those who do not will be back.

A floor is promised to sessions, and an agent that runs a tool for a few seconds is still one of them: it
comes back in the middle of its work and is not asked again. Counting only those who decode now would let
others in at every pause, until all come back at once.

Rule 1: a session is inside while it has a request, or had one within its policy's ``session_idle_s``.
``close`` ends that at once. One whose only requests came to nothing is not inside after them.
Rule 2: a newcomer is settled when it has decoded some tokens or some time has passed.
Rule 3: whether those who pause come back is learned from those who did, by how long they had paused.
Rule 4: what a step costs does not depend on how many are inside, and they are bounded: beyond a number,
who would be outside next is outside.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil, exp, inf, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from polykv_proxy.core.policies import Policy

AGES_S = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, inf)
"""Limits between classes of pauses, by their length so far."""

MAX_INSIDE = 10_000
"""Sessions inside at once, as far as some of them pause."""

HORIZON_S = 60.0
"""Who is back within this time is expected back."""

PRIOR = 0.02
"""Pauses of each class that count as seen before any was."""

MEMORY_S = 300.0
"""How far back the pauses that are learned from go, about."""

DUTY_S = 60.0
"""How far back the share of those who work goes, about."""

RARE = 0.01
RARE_SIGMAS = 2.33
"""How often more may work at once than room is kept for, as a share of the time and as deviations."""

EXACT = 40.0
"""Sessions up to which that is counted out."""


@dataclass(slots=True, eq=False)
class Inside:
    """One session that is inside."""

    session: Hashable
    policy: Policy
    requests: int = 0
    """That run or wait for a slot."""
    idle_since: float = 0.0
    decoded: int = 0
    entered_at: float = 0.0
    settled: bool = False
    pause: int = 0
    """Changes as a pause begins and ends, so that an old entry is not taken for a new one."""


@dataclass(slots=True)
class _Class:
    """Pauses of about the same length."""

    members: deque[tuple[Inside, int]] = field(default_factory=deque)
    """Those in one now, the longest first; some of them are out of date."""
    count: int = 0
    returns: float = 0.0
    exposure_s: float = 0.0


class Returns:
    """Pauses: how many last now, and how likely each is to end.

    Time passes in ``advance`` only; a pause is of the class that its length had then.
    """

    def __init__(self) -> None:
        # at the start: half a chance to come back within each class, and little weight on that
        self._classes = [
            _Class(returns=PRIOR / 2, exposure_s=PRIOR * (min(upper, 300.0) - lower))
            for lower, upper in pairwise(AGES_S)
        ]
        self._at: dict[int, int] = {}
        """Class of each one that pauses."""
        self._now = -inf

    def __len__(self) -> int:
        return len(self._at)

    def begin(self, inside: Inside) -> None:
        """A session has no request any more."""
        inside.pause += 1
        self._classes[0].members.append((inside, inside.pause))
        self._classes[0].count += 1
        self._at[id(inside)] = 0

    def end(self, inside: Inside, *, returned: bool) -> None:
        """It came back, or it is over."""
        at = self._at.pop(id(inside), None)
        if at is None:
            return
        inside.pause += 1
        self._classes[at].count -= 1
        self._classes[at].returns += returned

    def advance(self, now: float) -> None:
        """Time passes: pauses become longer."""
        if now <= self._now:
            return
        span = now - self._now if self._now > -inf else 0.0
        self._now = now
        kept = exp(-span / MEMORY_S)
        for each in self._classes:
            each.returns *= kept
            each.exposure_s = each.exposure_s * kept + each.count * span
        for at, each in enumerate(self._classes):
            members = each.members
            while members:
                inside, pause = members[0]
                if inside.pause == pause:
                    if now - inside.idle_since < AGES_S[at + 1]:
                        break
                    each.count -= 1
                    self._classes[at + 1].count += 1
                    self._classes[at + 1].members.append((inside, pause))
                    self._at[id(inside)] = at + 1
                members.popleft()

    def expected(self) -> float:
        """How many of those who pause will be back within the horizon."""
        rates = [each.returns / each.exposure_s if each.exposure_s > 0.0 else 0.0 for each in self._classes]
        total = 0.0
        for at, each in enumerate(self._classes):
            if each.count:
                until = AGES_S[at] + HORIZON_S
                hazard = sum(
                    rate * max(0.0, min(upper, until) - lower)
                    for rate, lower, upper in zip(rates[at:], AGES_S[at:], AGES_S[at + 1 :], strict=False)
                )
                total += each.count * (1.0 - exp(-hazard))
        return total


class Presence:
    """All sessions that are inside."""

    def __init__(self) -> None:
        self._inside: dict[Hashable, Inside] = {}
        self._ends: list[tuple[float, int, Inside, int]] = []
        """When each pause ends its session; some are out of date."""
        self._floors: dict[float, int] = {}
        self._settling: dict[int, Inside] = {}
        self._pauses = Returns()
        self._number = 0
        self._duty: float | None = None
        self._duty_at = 0.0
        self.working = 0
        """Sessions with a request."""
        self.left = 0
        """Sessions that left so far."""
        self._gap_s: float | None = None
        self._left_at: float | None = None

    def __contains__(self, session: Hashable) -> bool:
        return session in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def settling(self) -> int:
        """Newcomers whose effect is not seen yet."""
        return len(self._settling)

    @property
    def floor(self) -> float | None:
        """The highest floor that was promised to anybody inside."""
        return max(self._floors) if self._floors else None

    @property
    def gap_s(self) -> float | None:
        """Seconds between two sessions that leave; None before the second did."""
        return self._gap_s

    def enter(self, session: Hashable, policy: Policy, now: float) -> None:
        """A session comes in, and its first request with it."""
        self._number += 1
        one = self._inside[session] = Inside(session, policy, requests=1, entered_at=now)
        self.working += 1
        self._settling[id(one)] = one
        if policy.enforced and policy.target_tps_per_session is not None:
            floor = policy.target_tps_per_session
            self._floors[floor] = self._floors.get(floor, 0) + 1

    def rename(self, old: Hashable, new: Hashable) -> None:
        """A session that is inside has another name from now on, which nobody inside has."""
        one = self._inside.pop(old)
        one.session = new
        self._inside[new] = one

    def begin(self, session: Hashable) -> None:
        """One that is inside has a further request."""
        one = self._inside[session]
        if not one.requests:
            self.working += 1
            self._pauses.end(one, returned=True)
        one.requests += 1

    def end(self, session: Hashable, now: float) -> None:
        """One of its requests is over; one that is not inside does not matter."""
        one = self._inside.get(session)
        if one is None or not one.requests:
            return
        one.requests -= 1
        if one.requests:
            return
        self.working -= 1
        self._settling.pop(id(one), None)
        one.settled = True
        one.idle_since = now
        self._pauses.begin(one)
        self._number += 1
        heappush(self._ends, (now + one.policy.session_idle_s, self._number, one, one.pause))
        if len(self._ends) > 2 * len(self._inside) + 64:
            self._ends = [entry for entry in self._ends if entry[2].pause == entry[3]]
            heapify(self._ends)

    def close(self, session: Hashable, now: float) -> bool:
        """It is over; returns whether it was inside. Requests of it that still run do not bring it back."""
        one = self._inside.get(session)
        if one is None:
            return False
        self._out(one)
        self._on_left(now)
        return True

    def _on_left(self, now: float) -> None:
        self.left += 1
        if self._left_at is not None:
            gap_s = now - self._left_at
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + (gap_s - self._gap_s) / 8
        self._left_at = now

    def drop(self, session: Hashable) -> None:
        """It never was inside, as it turned out: no place came free, and nothing is learned of it."""
        one = self._inside.get(session)
        if one is not None and not one.requests:
            self._out(one)

    def _out(self, one: Inside) -> None:
        del self._inside[one.session]
        if one.requests:
            self.working -= 1
        else:
            self._pauses.end(one, returned=False)
        self._settling.pop(id(one), None)
        if one.policy.enforced and one.policy.target_tps_per_session is not None:
            floor = one.policy.target_tps_per_session
            self._floors[floor] -= 1
            if not self._floors[floor]:
                del self._floors[floor]

    def decoded(self, session: Hashable, tokens: int) -> None:
        """So many more tokens of a session came."""
        one = self._inside.get(session)
        if one is None or one.settled:
            return
        one.decoded += tokens
        if one.decoded >= one.policy.settle_tokens:
            one.settled = True
            self._settling.pop(id(one), None)

    def advance(self, now: float) -> None:
        """Time passes: pauses grow, sessions that paused too long are outside, newcomers have settled."""
        while self._ends and (self._ends[0][0] <= now or len(self._inside) > MAX_INSIDE):
            _, _, one, pause = heappop(self._ends)
            if one.pause == pause:
                self.close(one.session, now)
        while self._settling:
            one = next(iter(self._settling.values()))
            if now - one.entered_at < one.policy.settle_max_s:
                break  # those behind it came later; with a shorter time than its own they wait for it
            one.settled = True
            del self._settling[id(one)]
        self._pauses.advance(now)

    def on_look(self, now: float) -> None:
        """Once a sample: how many work, of those who are here or will be back."""
        self.advance(now)
        live = self.live
        if not live:
            return
        share = 1.0 if self._duty is None else 1.0 - exp(-(now - self._duty_at) / DUTY_S)
        self._duty_at = now
        duty = self.working / live
        self._duty = duty if self._duty is None else self._duty + share * (duty - self._duty)

    @property
    def live(self) -> float:
        """Sessions that work, and those of the others that will be back."""
        return self.working + self._pauses.expected()

    @property
    def duty(self) -> float:
        """Share of those that works at a time, 0 to 1."""
        return 1.0 if self._duty is None else min(1.0, self._duty)


def working_at_most(live: float, duty: float) -> int:
    """Sessions of so many that work at once, but for one time in a hundred.

    Args:
        live: sessions; a part of one is one that comes with that probability.
        duty: share of its time that each works, 0 to 1.
    """
    if duty >= 1.0:
        return ceil(live - 1e-9)
    if live > EXACT:
        return ceil(live * duty + RARE_SIGMAS * sqrt(live * duty * (1.0 - duty)) - 0.5)
    whole = int(live)
    part = (live - whole) * duty
    chance = (1.0 - duty) ** whole
    more = 1.0 - chance  # chance that more than k of the whole ones work
    k = 0
    while k < whole and more + part * chance > RARE:
        k += 1
        chance *= (whole - k + 1) / k * duty / (1.0 - duty)
        more -= chance
    return k + (k == whole and part > RARE)
