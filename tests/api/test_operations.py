"""Claims about ``api.operations``: they are the routes that there are, and their codes are explained."""

import re
from pathlib import Path

import msgspec
import pytest

from polykv_proxy.api.admission import Places
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


async def test_numbers_are_bounded_as_told(rig):
    """The last that is told to be right is not refused, and the next one is."""
    seen = 0
    for each in OPERATIONS:
        for name, schema in each.query.items():
            if each.method != "get" or "maximum" not in schema:
                continue
            url = each.path.format(pool_id=(await rig.pool())["pool_id"], key="none")
            for value, refused in (
                (schema["minimum"], False),
                (schema["minimum"] - 1, True),
                (schema["maximum"], False),
                (schema["maximum"] + 1, True),
            ):
                answer = await rig.ask(f"{url}?{name}={value}")
                assert (answer.status == 400) is refused, (url, name, value)
                seen += 1
    assert seen == 4 * 5


async def test_places_are_bounded_as_told(rig):
    """In number and in time; so many as are in bounds may still find no room."""
    pool = await rig.pool()
    bounds = msgspec.json.schema(Places)["$defs"]["Places"]["properties"]
    for body, refused in (
        ({"sessions": bounds["sessions"]["maximum"], "ttl_s": bounds["ttl_s"]["maximum"]}, False),
        ({"sessions": bounds["sessions"]["minimum"], "ttl_s": 1}, False),
        ({"sessions": bounds["sessions"]["maximum"] + 1, "ttl_s": 1}, True),
        ({"sessions": bounds["sessions"]["minimum"] - 1, "ttl_s": 1}, True),
        ({"sessions": 1, "ttl_s": bounds["ttl_s"]["maximum"] + 1}, True),
        ({"sessions": 1, "ttl_s": bounds["ttl_s"]["exclusiveMinimum"]}, True),
    ):
        answer = await rig.ask(f"/polykv/pools/{pool['pool_id']}/reserve", body)
        assert (answer.status == 400) is refused, body
