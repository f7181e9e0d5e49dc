"""What requests and slots hold of an engine's cells, written into its ledger.

Rule 1: a request is in the ledger from the step in which it gets its slots until they are free again. That
is on one way only, so it ends there once.
Rule 2: what a slot held before stays in the ledger until the engine is seen to work on the new request: only
then is it gone for certain. What the request goes on with is its own from the start.
Rule 3: what was not asked of it changes nothing: work that says nothing of its size (emptying a slot) is not
in the ledger, nor is anything on an engine that does not share cells and counts none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polykv_proxy.core.costs import Asked, Cost, cost_of
from polykv_proxy.core.decisions import Reclaim
from polykv_proxy.core.ledger import CellLedger, Fit
from polykv_proxy.core.lengths import LengthBook
from polykv_proxy.core.policies import CellPolicy
from polykv_proxy.core.types import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.core.decisions import Command, Lease
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.residents import Key
    from polykv_proxy.core.slots import Ask, Placement, Slot, SlotBoard
    from polykv_proxy.core.types import (
        EngineFacts,
        EngineSample,
        LeaseId,
        SlotId,
        SlotSample,
    )

GROWING_LOOKS = 3
"""Looks that pass while a request grows on: until the next, while it is stopped, while a slot is emptied."""

LARGEST_SHARE = 0.125
"""Of the cache, that is kept free at most for what may grow."""

FORGET = 0.98
"""What the fastest growth counts for at the next look, if nothing grew as fast."""

COMPUTE_KIND = "pool"
"""Class of requests that compute a pool and answer nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is known of a request's size when it asks for slots."""

    asked: Asked
    prompt: int | None = None
    """Tokens of its prompt; None if nobody counted them."""
    shared: int = 0
    """Leading ones that a pool holds."""
    pool: PrefixPool | None = None
    """That pool."""


def need_of_pool(tokens: int, parent: PrefixPool | None, branch_pos: int) -> Need:
    """What computing a pool needs.

    Args:
        tokens: of the whole prefix.
        parent: whose cells the first ``branch_pos`` are.
        branch_pos: see there.
    """
    asked = Asked(kind=COMPUTE_KIND, body_bytes=0, max_tokens=0)
    return Need(asked=asked, prompt=tokens, shared=branch_pos, pool=parent)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the ledger."""

    need: Need
    cost: Cost
    slots: tuple[SlotId, ...]
    had: int = 0
    """Cells of its first slot that it goes on with."""
    generated_before: dict[SlotId, int] = field(default_factory=dict)
    """Tokens that each slot had generated when it was given away."""
    begun: bool = False
    """Whether it was sent."""
    seen: bool = False
    """Whether the engine was seen to work on it."""
    filled: int = 0
    """Cells that it was seen to fill."""


class Cells:
    """Keeps the ledger of one engine; without counters there is none, and everything fits."""

    def __init__(self) -> None:
        self.ledger: CellLedger | None = None
        self.lengths = LengthBook()
        self._policy = CellPolicy()
        self._window = 0
        self._running: dict[LeaseId, _Running] = {}
        self._totals: dict[SlotId, int] = {}
        """Tokens that each slot had generated at the last sample."""
        self._fastest = 0.0
        """Most tokens that a slot generated between two samples, lately."""

    def meet(self, facts: EngineFacts, *, counts: bool) -> None:
        """An engine is there, and nothing of ours runs on it.

        Args:
            facts: its sizes.
            counts: whether it tells of its cells.
        """
        self._running.clear()
        self._totals.clear()
        self._window = facts.ctx_tokens or facts.cells
        self.ledger = None
        if counts and facts.cells:
            self.ledger = CellLedger(facts.cells, stale_after_s=self._policy.stale_after_s)
            self.ledger.adopt(self._policy)

    def adopt(self, policy: CellPolicy) -> None:
        """Another policy holds from now on."""
        self._policy = policy
        self.lengths.adopt(policy.assumed_tokens, policy.quantile)
        if self.ledger is not None:
            self.ledger.adopt(policy)

    # -- requests ----------------------------------------------------------------------------------------

    def never(self, ask: Ask, now: float) -> tuple[int, int] | None:
        """Tokens of a request that can never fit, and those that there is room for; else None."""
        if self.ledger is None or ask.need is None:
            return None
        cost = self._cost(ask.need)
        if self.ledger.fit(cost, now, uses=_line(ask.need.pool)) is not Fit.NEVER:
            return None
        return cost.prompt + ask.need.shared, self.ledger.room_at_best

    def wanted(self, ask: Ask) -> int | None:
        """Cells that a request will take once it has its slots; None where it does not say what it needs."""
        if self.ledger is None or ask.need is None:
            return None
        cost = self._cost(ask.need)
        return cost.prompt + (min(cost.expected, cost.bound) if self._policy.overcommit else cost.bound)

    def must_count(self, need: Need, now: float, *, in_line: bool) -> bool:
        """Whether to count a request that nobody counted: as long as it may be, it could not run now.

        Args:
            need: its size.
            now: monotonic seconds.
            in_line: whether others wait already.
        """
        if self.ledger is None:
            return False
        longest = replace(self._cost(need), exact=True)
        return in_line or self.ledger.fit(longest, now, uses=_line(need.pool)) is not Fit.FITS

    def fits(self, ask: Ask, placement: Placement, now: float) -> bool:
        """Whether a request may have these slots now."""
        if self.ledger is None or ask.need is None:
            return True
        replaces = None
        if placement.continues:
            replaces = ("slot", placement.slots[0])
        fit = self.ledger.fit(self._cost(ask.need), now, uses=_line(ask.need.pool), replaces=replaces)
        return fit is Fit.FITS

    def take(self, lease: Lease, ask: Ask) -> None:
        """A request gets its slots."""
        if self.ledger is None or ask.need is None:
            return
        need, cost, had, replaces = ask.need, self._cost(ask.need), 0, None
        first: Key = ("slot", lease.slots[0])
        if lease.continues:
            had = self.ledger.residents.cells_of(first)
            replaces = first
        self.ledger.reserve(lease.lease_id, cost, uses=_line(need.pool), replaces=replaces)
        if had > cost.prompt:  # it was edited: the rest goes when the engine begins
            self.ledger.residents.keep(first, had - cost.prompt)
        before = {slot: self._totals[slot] for slot in lease.slots if slot in self._totals}
        self._running[lease.lease_id] = _Running(need, cost, lease.slots, had, before)

    def settle(self, lease: Lease, *, prompt: int | None, shared: int, pool: PrefixPool | None) -> None:
        """More is known of a request that is about to be sent; see ``Need`` for the arguments."""
        one = self._running.get(lease.lease_id)
        if self.ledger is None or one is None:
            return
        need = replace(one.need, prompt=prompt, shared=shared, pool=pool)
        if need != one.need:
            self._recost(lease.lease_id, one, need)

    def begins(self, lease: Lease) -> None:
        """A request is sent: what its slots held before is not to be taken back any more."""
        if self.ledger is None or lease.lease_id not in self._running:
            return
        self._running[lease.lease_id].begun = True
        for slot in lease.slots:
            if cells := self.ledger.residents.cells_of(("slot", slot)):
                self.ledger.residents.keep(("slot", slot), cells)

    def over(self, lease: Lease, *, kept: bool, untouched: bool) -> None:
        """A request's slots are free.

        Args:
            lease: its hold on them.
            kept: whether its first slot holds its conversation.
            untouched: whether that holds what it held before.
        """
        if self.ledger is None:
            return
        one = self._running.pop(lease.lease_id, None)
        if one is None:
            if not untouched:
                for slot in lease.slots:
                    self.ledger.residents.drop(("slot", slot))
            return
        first: Key = ("slot", lease.slots[0])
        if untouched:
            self.ledger.release(lease.lease_id)
            if cells := one.had or self.ledger.residents.cells_of(first):
                self.ledger.residents.keep(first, cells, value=float(cells))
            return
        for slot in lease.slots:
            self.ledger.residents.drop(("slot", slot))
        held = self.ledger.reserved(lease.lease_id)
        if lease.context_tokens is not None:
            held = min(held, lease.context_tokens - one.need.shared)
        elif one.seen:  # nobody says how far it came: no further than it may have since the last look
            held = min(held, one.filled + one.cost.answers * self.ledger.growth)
        self.ledger.release(lease.lease_id, leaves=first if kept else None, cells=held, value=float(held))

    def on_answer(self, lease: Lease, generated: int) -> None:
        """An answer is complete; one that was as long as it may be was cut short, and tells nothing."""
        one = self._running.get(lease.lease_id)
        if one is not None and 0 < generated < one.cost.bound:
            self.lengths.on_answer(one.need.asked.kind, generated)

    def computes(self, lease: Lease) -> bool:
        """Whether a request makes a pool."""
        one = self._running.get(lease.lease_id)
        return one is not None and one.need.asked.kind == COMPUTE_KIND

    def is_unsent(self, lease: LeaseId | None) -> bool:
        """Whether a request has its slots and was not sent yet."""
        one = None if lease is None else self._running.get(lease)
        return one is not None and not one.begun

    def awaits_room(self, lease: Lease) -> bool:
        """Whether what a request is about to fill is not empty yet, but will be."""
        return self.ledger is not None and lease.lease_id in self._running and self.ledger.awaits_room

    def overdrawn(self) -> list[LeaseId]:
        """Requests to stop before the cells are used up; see ``CellLedger.overdrawn``.

        What a slot held goes as the engine begins the next request there, before that takes a cell.
        """
        if self.ledger is None:
            return []
        begun = (one for one in self._running.values() if one.begun and not one.seen)
        leaving = sum(self.ledger.residents.cells_of(("slot", slot)) for one in begun for slot in one.slots)
        named = set(self.ledger.overdrawn(leaving))
        return [lease for lease in self._running if lease in named]

    def reclaim(self) -> list[Command]:
        """What has to go for those who run, and for the next one."""
        return [] if self.ledger is None else [Reclaim(key) for key in self.ledger.reclaim()]

    def took(self, lease: Lease) -> int | None:
        """Cells that a complete answer takes beyond what it shares; None if that is not known."""
        one = self._running.get(lease.lease_id)
        if one is None or lease.context_tokens is None:
            return None
        return max(0, lease.context_tokens - one.need.shared)

    def _cost(self, need: Need) -> Cost:
        return cost_of(need.asked, self.lengths, self._window, prompt=need.prompt, shared=need.shared)

    def _recost(self, lease: LeaseId, one: _Running, need: Need) -> None:
        assert self.ledger is not None
        one.need, one.cost = need, self._cost(need)
        self.ledger.recost(lease, one.cost, uses=_line(need.pool))

    # -- samples -----------------------------------------------------------------------------------------

    def on_sample(self, sample: EngineSample, board: SlotBoard, now: float) -> None:
        """The engine counted its cells; what pools hold was written down before."""
        ledger = self.ledger
        if ledger is None:
            return
        held: dict[LeaseId, int] = {}
        for each in sample.slots:
            slot = board.slots[each.slot]
            one = None if slot.lease is None else self._running.get(slot.lease)
            if one is None or slot.lease is None:
                self._keep_slot(each, slot, now - slot.last_used)
            elif each.tag == slot.lease:
                one.seen = True
                ledger.residents.drop(("slot", each.slot))
                held[slot.lease] = held.get(slot.lease, 0) + _added(each, one)
            elif one.had and each.slot == one.slots[0]:  # it did not begin: this is what it goes on with
                held[slot.lease] = min(one.had, one.cost.prompt)
        for lease, one in list(self._running.items()):
            if one.seen:
                one.filled = held.get(lease, 0)
                self._progress(lease, one, sample, one.filled)
        self._learn_growth(sample)
        self._totals = {each.slot: each.gen_total for each in sample.slots}
        ledger.on_sample(sample.cells_used, held, sample.taken_at)

    def _learn_growth(self, sample: EngineSample) -> None:
        """A fast model fills more between two looks than any margin that suits a slow one.

        All slots together get no more than a share of the cache: a small one would be nothing but margin.
        """
        assert self.ledger is not None
        grown = (each.gen_total - self._totals.get(each.slot, each.gen_total) for each in sample.slots)
        self._fastest = max(max(grown, default=0), FORGET * self._fastest)
        most = int(LARGEST_SHARE * self.ledger.total / (len(sample.slots) + 1))
        wanted = max(self._policy.growth_tokens, int(GROWING_LOOKS * self._fastest))
        self.ledger.grow(max(1, min(wanted, most)), brake=wanted)

    def _keep_slot(self, seen: SlotSample, slot: Slot, age_s: float) -> None:
        """A slot in which none of our requests runs.

        One that is borrowed is being saved, or taken back: its cells can be had all the same, or are going.
        """
        assert self.ledger is not None
        key, private = ("slot", seen.slot), seen.tokens - seen.shared_tokens
        residents = self.ledger.residents
        if private <= 0:
            residents.drop(key)
        elif not slot.borrowed or residents.cells_of(key) != private:
            can_go = slot.idle or slot.borrowed
            residents.keep(key, private, value=private / (1.0 + max(0.0, age_s)) if can_go else None)

    def _progress(self, lease: LeaseId, one: _Running, sample: EngineSample, held: int) -> None:
        """A request is seen to run: what it still needs."""
        assert self.ledger is not None
        now = {each.slot: each for each in sample.slots}
        slots = [now[slot] for slot in one.slots if slot in now and now[slot].tag == lease]
        if not slots:
            return
        for each in slots:
            one.generated_before.setdefault(each.slot, each.gen_total)
        generated = sum(max(0, each.gen_total - one.generated_before[each.slot]) for each in slots)
        first, answers = slots[0], one.need.asked.answers
        if not one.cost.exact and first.state is SlotState.GEN and len(one.slots) == 1:
            # nobody counted its prompt; now it is there, all of it
            prompt = max(0, first.tokens - generated) + 1
            self._recost(lease, one, replace(one.need, prompt=prompt, shared=first.shared_tokens))
        expected = self.lengths.expected(one.need.asked.kind, one.cost.bound // answers, generated // answers)
        self.ledger.progress(lease, held=held, expected=answers * expected)


def _line(pool: PrefixPool | None) -> Iterable[Key]:
    """The names of a pool and of those whose cells are its first."""
    while pool is not None:
        yield ("pool", pool.pool_id)
        pool = pool.parent


def _added(seen: SlotSample, one: _Running) -> int:
    """Cells that a slot adds to its request; completions of one prompt share it."""
    private = seen.tokens - seen.shared_tokens
    return max(0, private - (0 if seen.slot == one.slots[0] else one.cost.prompt))
