"""Claims about ``core.tally``: a request's tokens by the engine's totals, exact or unknown."""

from dataclasses import replace

import pytest

from polykv_proxy.core.slots import Slot
from polykv_proxy.core.tally import Before, Took, before, took
from polykv_proxy.core.types import EngineSample, LeaseId, PoolUid, SlotId, SlotSample, SlotState

MINE, OTHER = LeaseId(7), LeaseId(6)


def seen(tag, *totals, state=SlotState.IDLE):
    """A slot with so many tokens generated, of prompts computed, and of prompts not computed."""
    return SlotSample(SlotId(0), state, 1, tag, *totals, 0, 0, PoolUid(0), 1024)


def reading(slot, *, taken_at=5.0, epoch="e"):
    """Of one slot."""
    return EngineSample(epoch, taken_at, 0, 1000, 0, (slot,), ())


def slot(last_used):
    """The proxy's view of it."""
    return replace(Slot(SlotId(0)), last_used=last_used)


THEN = Before("e", SlotId(0), 100, 200, 50)


def test_totals_of_an_idle_slot_that_was_read_since_are_known():
    """They are what the next request finds."""
    assert before(slot(4.0), reading(seen(OTHER, 100, 200, 50))) == THEN


@pytest.mark.parametrize(
    ("last_used", "sample"),
    [
        (4.0, None),
        (5.0, reading(seen(OTHER, 100, 200, 50))),
        (4.0, reading(seen(OTHER, 100, 200, 50, state=SlotState.GEN))),
        (4.0, reading(replace(seen(OTHER, 100, 200, 50), slot=SlotId(1)))),
    ],
)
def test_what_may_have_changed_since_is_not_known(last_used, sample):
    """No reading, one that is older than the slot's last use, one at work, one of another slot."""
    assert before(slot(last_used), sample) is None


def test_a_request_took_the_difference():
    """Of its prompt, once that is all there; before, nobody knows how long it is."""
    assert took(THEN, MINE, reading(seen(MINE, 103, 230, 60))) == Took(3, 40, 10)
    assert took(THEN, MINE, reading(seen(MINE, 100, 210, 60))) == Took(0, None, None)


@pytest.mark.parametrize(
    "sample",
    [
        reading(seen(OTHER, 103, 230, 60)),
        reading(seen(MINE, 103, 230, 60), epoch="f"),
        reading(replace(seen(MINE, 103, 230, 60), slot=SlotId(1))),
    ],
)
def test_what_is_not_surely_its_own_is_nobodys(sample):
    """Another request's, another engine's, another slot's."""
    assert took(THEN, MINE, sample) is None
