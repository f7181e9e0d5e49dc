"""What a request took of its slot that tells nothing itself: the engine's totals before it, and after it.

Rule: exact or unknown. What is not surely the request's is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.types import SlotState

if TYPE_CHECKING:
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import EngineSample, LeaseId, SlotId, SlotSample


@dataclass(frozen=True, slots=True)
class Before:
    """Totals of a slot in which nothing has begun yet."""

    epoch: str
    slot: SlotId
    generated: int
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Took:
    """Tokens of one request, as far as it came."""

    generated: int
    prompt: int | None
    """All of its prompt; None before that is computed."""
    cached: int | None


def before(slot: Slot, sample: EngineSample | None) -> Before | None:
    """Totals of a slot that a request is sent to; None where the last reading is older than its last use."""
    seen = _seen(sample, slot.slot)
    if (
        sample is None
        or seen is None
        or sample.taken_at <= slot.last_used
        or seen.state is not SlotState.IDLE
    ):
        return None
    return Before(sample.epoch, slot.slot, seen.gen_total, seen.prompt_total, seen.cached_total)


def took(then: Before, lease_id: LeaseId, sample: EngineSample) -> Took | None:
    """What a request took that was sent after ``then``; None where its slot does not show it."""
    seen = _seen(sample, then.slot)
    if sample.epoch != then.epoch or seen is None or seen.tag != lease_id:
        return None
    generated = seen.gen_total - then.generated
    if generated <= 0:
        return Took(0, None, None)
    cached = seen.cached_total - then.cached
    return Took(generated, seen.prompt_total - then.prompt + cached, cached)


def _seen(sample: EngineSample | None, slot: SlotId) -> SlotSample | None:
    slots = () if sample is None else sample.slots
    return next((each for each in slots if each.slot == slot), None)
