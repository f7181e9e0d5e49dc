"""The ledger of an engine's KV cells: what is held, what is promised, what can be taken back.

The engine's cache is one room for all, and when it is full every running request suffers. So nothing is
sent unless the ledger says that it fits.

Rule 1: ours first. Every change is written down when it is decided, in the same step; a sample corrects it
later, and one that is too old counts as a full cache.
Rule 2: a cell is counted once. What pools hold is theirs; a request reserves what it adds.
Rule 3: a request reserves its prompt and the tokens it is expected to produce. As they come it is costed
anew, and a reservation is never less than what is held.
Rule 4: a reservation is released exactly once. Releasing again changes nothing.
Rule 5: residents that nobody needs now (``core.residents``) do not count as used: they are taken back before
their cells are needed.
Rule 6: a request that fits an empty cache is never told that it can never fit, and one that cannot is told
at once.
Rule 7: when running requests outgrow what was expected of them and nothing is left to take back, those that
came last are stopped before the cache is full. With ``overcommit`` off that cannot happen: every request
reserves all it may produce.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from polykv_proxy.core.residents import Residents

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from polykv_proxy.core.costs import Cost
    from polykv_proxy.core.policies import CellPolicy
    from polykv_proxy.core.residents import Key
    from polykv_proxy.core.types import LeaseId


class Fit(Enum):
    """Whether a request fits."""

    FITS = "fits"
    WAITS = "waits"
    """Not now: wait as for a free slot."""
    NEVER = "never"
    """Not even with everything gone that may go."""


@dataclass(slots=True, eq=False)
class _Request:
    prompt: int
    bound: int
    reserved: int
    due: int
    """Cells it holds or is about to fill."""
    held: int
    uses: tuple[Key, ...]
    answers: int
    stopping: bool = False

    def beyond(self, cells: int, growth: int) -> int:
        """Cells that it may fill beyond so many before anybody looks again; each answer ``growth``."""
        return max(0, min(self.answers * growth, self.prompt + self.bound - cells))


@dataclass(frozen=True, slots=True)
class Figures:
    """The ledger at one moment, in cells."""

    total: int
    protected: int
    """Held by residents that are not taken back."""
    reclaimable: int
    """Held by residents that are, when their cells are needed."""
    reserved: int
    """Of running requests, and set aside for promised ones."""
    unexplained: int
    """That the engine reports beyond what the ledger knows of."""
    free: int
    """Free for newcomers, once what can be taken back is; 0 if more is reserved than there is."""
    margin: int
    """Kept free of ``free`` for the growth of those who run."""
    running: int

    @property
    def used(self) -> int:
        """What newcomers cannot have."""
        return self.total - self.free

    @property
    def admissible(self) -> int:
        """What one more request may cost."""
        return max(0, self.free - self.margin)


@dataclass(slots=True)
class _Sums:
    reserved: int = 0
    due: int = 0
    slack: int = 0


class CellLedger:
    """Cells of one engine, of one load of its model.

    Args:
        total: cells of the engine.
        watermark: cells that admissions always leave free.
        growth: cells that a running request may fill between two looks at it, and while one is stopped
            and a slot is emptied after that.
        overcommit: reserve what requests are expected to produce, not all they may.
        stale_after_s: age of the last sample from which the engine counts as full; None where there is
            nobody to ask.
    """

    def __init__(
        self,
        total: int,
        *,
        watermark: int = 0,
        growth: int = 32,
        overcommit: bool = True,
        stale_after_s: float | None = None,
    ) -> None:
        self.total = total
        self._watermark = watermark
        self._growth = self._brake = growth
        self._overcommit = overcommit
        self._stale_after_s = stale_after_s
        self._sampled_at: float | None = None
        self._unexplained = 0
        self.residents = Residents()
        self._requests: dict[Key, _Request] = {}
        self._earmarks: dict[Key, int] = {}
        self._sum = _Sums()

    def adopt(self, policy: CellPolicy) -> None:
        """Other margins from now on; what is reserved already stays reserved until it is costed anew."""
        self._watermark = int(self.total * policy.watermark_ratio)
        self._overcommit = policy.overcommit
        self.grow(policy.growth_tokens)
        if self._stale_after_s is not None:
            self._stale_after_s = policy.stale_after_s

    @property
    def growth(self) -> int:
        """Cells that a running request may fill between two looks."""
        return self._growth

    def grow(self, cells: int, *, brake: int | None = None) -> None:
        """Running requests fill so many cells between two looks; see ``growth``.

        Args:
            cells: that are kept free for each.
            brake: that each may fill before it is stopped (rule 7), if that is more.
        """
        self._growth = cells
        self._brake = cells if brake is None else max(cells, brake)
        self._sum.slack = sum(self._slack(each) for each in self._requests.values())

    # -- what is seen ------------------------------------------------------------------------------------

    def __contains__(self, request: LeaseId | Key) -> bool:
        return request in self._requests

    @property
    def margin(self) -> int:
        """Cells that an admission leaves free for the growth of those who run, beyond what they reserved."""
        return self._watermark + self._sum.slack

    @property
    def _free(self) -> int:
        """Free for newcomers; negative when more is reserved than there is."""
        return self.total - self.residents.protected - self._unexplained - self._sum.reserved

    @property
    def empty_now(self) -> int:
        """Cells that hold nothing and are nobody's in the next moment; what is resident is not empty."""
        return self.total - self.residents.cells - self._unexplained - self._sum.due

    @property
    def room_at_best(self) -> int:
        """Cells that one request could have if nothing else ran."""
        return max(0, self.total - self._watermark - self.residents.lasting)

    def reserved(self, request: LeaseId | Key) -> int:
        """Cells that a running request has in the books; 0 if it is over."""
        known = self._requests.get(request)
        return 0 if known is None else known.reserved

    @property
    def awaits_room(self) -> bool:
        """Whether what is about to be filled has to wait for residents that are going."""
        return self._short > 0 and self.residents.going

    @property
    def _short(self) -> int:
        """Cells that have to become empty for those who run to go on until the next look."""
        # what is reserved is there in the books; here it has to be empty in time
        growing = sum(self._may_grow(each) for each in self._requests.values())
        return self._watermark + growing + self._growth - self.empty_now

    def figures(self) -> Figures:
        """Everything at once, for reports."""
        return Figures(
            total=self.total,
            protected=self.residents.protected,
            reclaimable=self.residents.cells - self.residents.protected,
            reserved=self._sum.reserved,
            unexplained=self._unexplained,
            free=max(0, self._free),
            margin=self.margin,
            running=len(self._requests),
        )

    def stale(self, now: float) -> bool:
        """Whether the last sample is too old to tell."""
        if self._stale_after_s is None:
            return False
        return self._sampled_at is None or now - self._sampled_at > self._stale_after_s

    def _slack(self, each: _Request) -> int:
        return each.beyond(each.reserved, self._growth) if self._overcommit else 0

    def _book(self, each: _Request, *, reserved: int, due: int) -> None:
        """Change what a running request has in the books."""
        self._sum.slack -= self._slack(each)
        self._sum.reserved += reserved - each.reserved
        self._sum.due += due - each.due
        each.reserved, each.due = reserved, due
        self._sum.slack += self._slack(each)

    def _most(self, wanted: int, end: int, growth: int, room: int) -> int:
        """What a request reserves, no more than it could ever get here.

        Args:
            wanted: cells that it is expected to fill.
            end: cells that it may fill at most.
            growth: what it may fill beyond what it reserved before anybody looks again.
            room: cells that there are.
        """
        if not self._overcommit:
            return min(wanted, room)
        return wanted if wanted + min(growth, end - wanted) <= room else min(wanted, room - growth)

    def earmark(self, key: Key, cells: int) -> None:
        """Set cells aside for a request that was promised a place; 0 ends that."""
        self._sum.reserved += cells - self._earmarks.pop(key, 0)
        if cells:
            self._earmarks[key] = cells

    def reclaim(self) -> list[Key]:
        """Residents to take back now, for the cells that are about to be filled."""
        return self.residents.reclaim(self._short)

    # -- requests ----------------------------------------------------------------------------------------

    def fit(self, cost: Cost, now: float, *, uses: Iterable[Key] = (), replaces: Key | None = None) -> Fit:
        """Whether a request could be sent; asking changes nothing.

        1. Counted, and its prompt, shared part included, and one token do not fit beside what lasts: never.
        2. The last sample is stale: nobody can tell, so it waits.
        3. What it needs, but no more than it could ever get here, and the margin fit: it fits.
        4. It waits.

        Args:
            cost: what it adds.
            now: monotonic seconds.
            uses: residents whose cells it will share; they are no longer to be taken back.
            replaces: the idle resident whose slot it gets; its cells are the request's, or are given back.
        """
        used = tuple(uses)
        shared = self.residents.shared(used)
        if cost.exact and shared + cost.prompt + 1 > self.total - self._watermark - self.residents.lasting:
            return Fit.NEVER  # 1
        if self.stale(now):
            return Fit.WAITS  # 2
        reserved, claimed = self._need(cost, used, replaces)
        fits = self._free - claimed - reserved >= self._margin_for(cost, reserved, claimed)
        return Fit.FITS if fits else Fit.WAITS  # 3, 4

    def _margin_for(self, cost: Cost, reserved: int, claimed: int) -> int:
        """The margin with this one, but alone a request has the room that there is."""
        own = min(cost.answers * self._growth, cost.prompt + cost.bound - reserved) if self._overcommit else 0
        margin = self.margin + max(0, own)
        if self._requests:
            return margin
        left = self.total - self.residents.protected - claimed - self._unexplained - cost.prompt - 1
        return min(margin, max(0, left))

    def _need(self, cost: Cost, uses: tuple[Key, ...], replaces: Key | None) -> tuple[int, int]:
        """Cells that a request reserves, and those of residents that it makes unreclaimable."""
        claimed = self.residents.claimed(uses, replaces)
        new = min(cost.expected, cost.bound) if self._overcommit else cost.bound
        room = self.total - self.residents.protected - self._unexplained - claimed - self._watermark
        most = self._most(cost.prompt + new, cost.prompt + cost.bound, cost.answers * self._growth, room)
        return max(most, min(cost.prompt + new, cost.prompt + 1 if cost.exact else 1)), claimed

    def reserve(
        self, request: LeaseId | Key, cost: Cost, *, uses: Iterable[Key] = (), replaces: Key | None = None
    ) -> None:
        """Write a request down; ``fit`` said that it fits.

        Args:
            request: names it; one that is known already keeps what it has.
            cost: see ``fit``.
            uses: see ``fit``.
            replaces: see ``fit``.
        """
        if request in self._requests:
            return
        used = tuple(key for key in uses if key in self.residents)
        need, _ = self._need(cost, used, replaces)
        self.residents.hold(used)
        if replaces is not None:
            self.residents.take_over(replaces)
        prompt = min(cost.prompt, need)
        each_new = self._requests[request] = _Request(prompt, cost.bound, need, prompt, 0, used, cost.answers)
        self._sum.reserved += need
        self._sum.due += prompt
        self._sum.slack += self._slack(each_new)

    def recost(self, request: LeaseId | Key, cost: Cost, *, uses: Iterable[Key] = ()) -> None:
        """More is known of a running request than when it was written down; see ``fit`` for the arguments."""
        old = self._requests.get(request)
        if old is None:
            return
        order = list(self._requests)
        self.release(request)
        self.reserve(request, cost, uses=uses)
        self._requests = {key: self._requests[key] for key in order}  # it came when it came
        self.progress(request, held=old.held, expected=cost.expected)

    def progress(self, request: LeaseId | Key, *, held: int, expected: int) -> None:
        """Cost a running request anew.

        Args:
            request: one that is not known is over.
            held: cells that it fills now, beyond those of residents.
            expected: tokens that it will produce in all.
        """
        each = self._requests.get(request)
        if each is None:
            return
        each.held = held
        new = min(expected, each.bound) if self._overcommit else each.bound
        room = self.total - self.residents.protected - self._unexplained - self._watermark
        most = self._most(each.prompt + new, each.prompt + each.bound, each.answers * self._growth, room)
        reserved = max(held, most)
        self._book(each, reserved=reserved, due=max(held, each.prompt))

    def release(
        self, request: LeaseId | Key, *, leaves: Key | None = None, cells: int = 0, value: float = 0.0
    ) -> bool:
        """A request is over, whatever way; returns whether it was running until now.

        Args:
            request: see ``reserve``.
            leaves: the resident that its slot is from now on; None: its cells are empty.
            cells: that the resident holds.
            value: see ``keep``.
        """
        each = self._requests.pop(request, None)
        if each is None:
            return False
        self._sum.reserved -= each.reserved
        self._sum.due -= each.due
        self._sum.slack -= self._slack(each)
        self.residents.let_go(each.uses)
        if leaves is not None:
            self.residents.keep(leaves, cells, value=value)
        return True

    def overdrawn(self, leaving: int = 0) -> list[LeaseId | Key]:
        """Running requests to stop before the cache is full, the latest first; empty almost always.

        1. There is room for what those who run may fill until the next look: nobody.
        2. Something can still be taken back, or is going: that comes first.
        3. The latest, until those who are left have that room.

        Each is named once; it counts until it is released. One that produces nothing does not grow.

        Args:
            leaving: cells of protected residents that go before anybody who was let in needs them.
        """
        running = [(key, each) for key, each in self._requests.items() if not each.stopping and each.bound]
        going = sum(each.due for each in self._requests.values() if each.stopping)
        short = sum(each.beyond(each.due, self._brake) for _, each in running) - self.empty_now - going
        short -= self.residents.cells - self.residents.protected + leaving  # 2
        named = []
        for key, each in reversed(running):
            if short <= 0:
                break  # 1
            each.stopping = True
            short -= each.due + each.beyond(each.due, self._brake)
            named.append(key)  # 3
        return named

    def _may_grow(self, each: _Request) -> int:
        """Cells that it may fill until the next look, and while it is being stopped."""
        return each.beyond(each.due, self._growth)

    # -- samples -----------------------------------------------------------------------------------------

    def on_sample(self, used: int, held: Mapping[LeaseId, int], taken_at: float) -> None:
        """The engine says how many cells are used. Residents have been corrected before.

        Args:
            used: cells, all together.
            held: cells that each running request fills, beyond those of residents.
            taken_at: monotonic seconds.
        """
        self._sampled_at = taken_at
        for request, cells in held.items():
            each = self._requests.get(request)
            if each is not None:
                each.held = cells
                self._book(each, reserved=max(cells, each.reserved), due=max(cells, each.prompt))
        self._unexplained = max(0, used - self.residents.cells - sum(held.values()))
