"""Claims about ``core.worth``: what is worth a file, and what is worth reading."""

import pytest

from polykv_proxy.core.worth import goes_on, is_kept, is_worth_a_file, pays


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, None),
        ({"matched": 99}, "no_gain"),
        ({"held": 800}, "no_gain"),
        ({"saved": 5001}, "no_room"),
        ({"window": 1000}, "no_room"),
        ({"matched": 112}, None),
        ({"matched": 110}, "too_long"),
        ({"matched": 450, "held": 350, "saved": 1300}, "too_long"),
    ],
)
def test_when_a_restore_pays(values, says):
    """Longer than what is there anyway, and it fits."""
    fine = {"matched": 850, "held": 0, "saved": 1000, "free_cells": 5000, "window": 8192, "min_gain": 100}
    assert pays(**(fine | values)) == says


def test_who_has_half_of_a_state_in_common_goes_on_from_it():
    """Less is another conversation that began alike."""
    assert goes_on(51, 100)
    assert not goes_on(50, 100)


@pytest.mark.parametrize(
    ("values", "worth"),
    [
        ({}, True),
        ({"own": 99}, False),
        ({"held": 8000, "own": 500}, True),
        ({"held": 8001, "own": 500}, False),
        ({"kept": 950}, False),
        ({"kept": 949}, True),
    ],
)
def test_when_a_conversation_is_worth_a_file(values, worth):
    """Enough of its own, also of the file, that is not there yet."""
    fine = {"held": 1000, "own": 1000, "kept": 0, "least": 100}
    assert is_worth_a_file(**(fine | values)) == worth


def test_what_is_nearly_all_on_disk_is_not_written_again():
    """A twentieth may be missing: so much is computed quickly."""
    assert is_kept(950, 1000)
    assert not is_kept(949, 1000)
    assert is_kept(2000, 1000)


def test_what_a_growing_conversation_writes_is_bounded():
    """Twenty times its last file and the first one, in however many turns it grew."""
    kept = written = 0
    for held in range(100, 50_000, 7):
        if not is_kept(kept, held):
            kept, written = held, written + held
    assert written < 20 * 50_000 + 100
