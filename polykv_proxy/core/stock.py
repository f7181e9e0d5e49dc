"""Counters of an engine without the patch, made from what its ``/slots`` shows.

Rule 1: a slot's totals are what its tasks were seen to reach. Such an engine counts from zero with each task
and forgets the count when the task ends, so what came after the last look is known only if the answer told.
Rule 2: such an engine does not say whose a task is. A task belongs to the request that was pinned to its
slot; where requests cannot be pinned, to the only one without a partner, if it is the only such task itself.
Either way the task was not there before the request; nothing is guessed.
Rule 3: an answer that came and went between two looks counts as it says itself, but for one that may be that
of a task whose request is not known: what that was seen to reach is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.rates import Reading, SlotReading

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.types import LeaseId, SlotId

NO_TASK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLook:
    """One slot of ``GET /slots``."""

    slot: SlotId
    working: bool
    task: int = NO_TASK
    """The current or last task."""
    generated: int = 0
    """Tokens of that task; 0 again once it is over."""
    prompt: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Kept:
    """A slot's totals."""

    task: int
    since: float
    """Monotonic seconds of the look that showed this task first."""
    tag: int = 0
    generated_before: int = 0
    prompt_before: int = 0
    cached_before: int = 0
    generated: int = 0
    prompt: int = 0
    cached: int = 0
    last_token_at: float = 0.0

    def is_anybodys(self, lease: Lease) -> bool:
        """Whether it shows tokens of a request that is not known, and may be this one."""
        return not self.tag and self.generated > 0 and self.since > lease.granted_at


class StockCounters:
    """The totals of all slots."""

    def __init__(self) -> None:
        self._slots: dict[SlotId, _Kept] = {}
        self._unseen = 0
        """Tokens of answers that no look showed."""
        self._told: set[LeaseId] = set()
        """Requests whose answers told, as long as they are running."""

    def reset(self) -> None:
        """The engine was started again."""
        self._slots.clear()
        self._told.clear()
        self._unseen = 0

    def look(
        self, slots: Iterable[SlotLook], running: Collection[Lease], now: float, *, pinned: bool = False
    ) -> Reading:
        """Take one look in; returns it in the form that a patched engine's counters have.

        Args:
            slots: what ``/slots`` shows.
            running: the requests that the engine was sent and may still work for.
            now: monotonic seconds at which the answer came.
            pinned: whether the leases' slots are those that the engine runs them in.
        """
        shown = list(slots)
        self._told &= {lease.lease_id for lease in running}
        running = [lease for lease in running if lease.lease_id not in self._told]
        for slot in shown:
            self._take(slot, now)
        (self._assign if pinned else self._match)(shown, running)
        readings = tuple(
            SlotReading(
                slot=slot.slot,
                answer=kept.task,
                tag=kept.tag,
                decoding=slot.working and slot.generated > 0,
                generated=kept.generated_before + kept.generated,
                prompt=kept.prompt_before + kept.prompt,
                cached=kept.cached_before + kept.cached,
                last_token_at=kept.last_token_at,
            )
            for slot in shown
            for kept in (self._slots[slot.slot],)
        )
        return Reading(taken_at=now, clock_s=now, slots=readings, exact=False, unseen=self._unseen)

    def slot_of(self, lease: LeaseId) -> SlotId | None:
        """The slot in which a request is known to run, or to have run last."""
        return next((number for number, kept in self._slots.items() if kept.tag == lease), None)

    def tag_of(self, slot: SlotId) -> int:
        """The request that is known to run, or to have run last, in a slot; 0 if it is not known."""
        kept = self._slots.get(slot)
        return 0 if kept is None else kept.tag

    def on_answer(self, lease: Lease, generated: int) -> None:
        """A request's answer told how many tokens it has; telling it again changes nothing."""
        if not self._slots or lease.lease_id in self._told:
            return  # nobody looks at the slots, or it is known
        self._told.add(lease.lease_id)
        number = self.slot_of(lease.lease_id)
        if number is not None:
            kept = self._slots[number]
            kept.generated = max(kept.generated, generated)
        elif not any(kept.is_anybodys(lease) for kept in self._slots.values()):
            self._unseen += generated  # rule 3

    def _take(self, slot: SlotLook, now: float) -> None:
        kept = self._slots.get(slot.slot)
        if kept is None:
            kept = self._slots[slot.slot] = _Kept(slot.task, now)
        elif kept.task != slot.task:
            self._slots[slot.slot] = _Kept(
                slot.task,
                now,
                generated_before=kept.generated_before + kept.generated,
                prompt_before=kept.prompt_before + kept.prompt,
                cached_before=kept.cached_before + kept.cached,
            )
            kept = self._slots[slot.slot]
        if slot.generated > kept.generated:
            kept.last_token_at = now
        kept.generated = max(kept.generated, slot.generated)
        kept.prompt = max(kept.prompt, slot.prompt)
        kept.cached = max(kept.cached, slot.cached)

    def _assign(self, shown: list[SlotLook], running: Collection[Lease]) -> None:
        owners = {slot: lease for lease in running for slot in lease.slots}
        for slot in shown:
            kept, lease = self._slots[slot.slot], owners.get(slot.slot)
            if slot.working and lease is not None and not kept.tag and kept.since > lease.granted_at:
                kept.tag = lease.lease_id

    def _match(self, shown: list[SlotLook], running: Collection[Lease]) -> None:
        partners = {kept.tag for kept in self._slots.values()}
        requests = [lease for lease in running if lease.lease_id not in partners]
        working = [self._slots[slot.slot] for slot in shown if slot.working]
        tasks = [kept for kept in working if not kept.tag]
        if len(requests) != 1 or len(requests[0].slots) != 1 or len(tasks) != 1:
            return
        if tasks[0].since > requests[0].granted_at:
            tasks[0].tag = requests[0].lease_id
