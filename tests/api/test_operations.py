"""Claims about ``api.operations``: they are the routes that there are, and their codes are explained."""

import re
from pathlib import Path

import pytest

from polykv_proxy.api.operations import ALWAYS, ANYWHERE, CHANGES, OPERATIONS

ERRORS = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
OF_THE_ENGINE = {"/health", "/props", "/slots", "/slots/{id_slot}"}


def explained():
    """Each status and code that the reference of errors has."""
    found = set()
    for row in ERRORS.read_text().splitlines():
        if re.match(r"\| \d", row):
            _, statuses, codes, *_ = row.split("|")
            for status in re.findall(r"\d+", statuses):
                found |= {(int(status), code) for code in re.findall(r"`(\w+)`", codes)}
    return found


def test_every_control_route_is_told_and_no_other(rig):
    """Method by method; of the engine's routes those to which something is added."""
    routed = {
        (route.method, re.sub(r":[^}]*", "", route.resource.canonical))
        for route in rig.control.router.routes()
        if route.method != "HEAD"
    }
    told = {(each.method.upper(), each.path) for each in OPERATIONS}
    assert {each for each in told if each[1] not in OF_THE_ENGINE} == routed
    assert len(told) == len(OPERATIONS)


@pytest.mark.parametrize("one", OPERATIONS, ids=lambda one: one.name)
def test_refusals_are_those_of_the_reference(one):
    """Each code with a status that it has there."""
    codes = {(status, code) for status, codes in one.codes.items() for code in codes}
    assert codes - {(503, "503")} <= explained()


def test_what_can_happen_anywhere_is_in_the_reference():
    """Also of what no single operation tells."""
    assert set(ANYWHERE.split()) <= {code for _, code in explained()}


def test_the_guard_is_told_wherever_it_stands():
    """Before all control routes, and only there; what has a body can be too large or no JSON."""
    for one in OPERATIONS:
        guarded = one.path not in OF_THE_ENGINE
        assert one.guarded == guarded
        assert all(status in one.codes for status in ALWAYS) or not guarded
        assert all(status in one.codes for status in CHANGES) or not (guarded and one.method == "post")


def test_names_are_each_ones_own():
    """Generated clients make functions of them."""
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)
