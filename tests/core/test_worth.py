"""Claims about ``core.worth``: what is worth a file, and what is worth reading."""

import pytest

from polykv_proxy.core.worth import goes_on, pays


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
