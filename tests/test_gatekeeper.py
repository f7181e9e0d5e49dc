"""The gate of one engine at work."""

from dataclasses import replace

import pytest
import pytest_asyncio
from api.rig import CHAT, Rig, chat, until
from fake_engine import Script

from polykv_proxy.core.admission import Refused
from polykv_proxy.core.gate import Gate
from polykv_proxy.core.headroom import Arm, Failing, Reason, capacity
from polykv_proxy.core.policies import Policy
from polykv_proxy.errors import SaturatedError, UnavailableError
from polykv_proxy.gatekeeper import document, refusal


@pytest_asyncio.fixture
async def rig():
    """A proxy with two slots."""
    async with Rig() as running:
        yield running


def refused(arm, reason):
    """A refusal by an empty engine."""
    return Refused(Failing(arm, reason), 7, capacity(Gate().picture(0.0), Policy()))


def test_a_refusal_says_why_and_when_to_come_again():
    """Waiting does not help who can never fit; and not to know is another answer."""
    error = refusal(refused(Arm.TPS, Reason.TPS_FLOOR), "e")
    assert isinstance(error, SaturatedError)
    assert (error.status, error.type, error.retry_after_s, error.should_retry) == (
        429,
        "pool_saturated",
        7,
        True,
    )
    assert refusal(refused(Arm.CONTEXT, Reason.CONTEXT), "e").should_retry is False
    unknown = refusal(refused(Arm.TPS, Reason.STALE), "e")
    assert isinstance(unknown, UnavailableError)
    assert (unknown.status, unknown.code) == (503, "cannot_tell")


def test_the_numbers_are_as_long_as_those_of_the_rates():
    """Three digits, and whose they are; counts stay what they are."""
    found = capacity(replace(Gate().picture(0.0), working=3, decoding=3, mean_tps=100 / 3), Policy())
    told = document(found, "e")
    assert (told["engine"], told["mean_active_tps"], told["projected_measured"]) == ("e", 33.333, 25.0)
    assert (told["n_active_sessions"], told["can_admit"], told["pressure"]) == (3, True, None)


async def test_turns_of_a_session_are_one_session_inside(rig):
    """Whatever it is called before anybody knows whose it is; closing it puts it outside."""
    presence = rig.runtime.gatekeeper.gate.presence
    for turns in (("a",), ("a", "b")):
        assert (await rig.ask(CHAT, chat(*turns, session_id="one"))).status == 200
    await rig.quiet()
    assert (len(presence), presence.working) == (1, 0)
    assert ("", "one") in presence
    await rig.ask("/polykv/sessions/one/close", {})
    assert len(presence) == 0


async def test_sessions_at_the_same_time_are_counted_each(rig):
    """Two run: two work, until their requests are over."""
    presence = rig.runtime.gatekeeper.gate.presence
    rig.engine.gate.clear()
    tasks = [rig.start(CHAT, chat(name, session_id=name)) for name in "ab"]
    await until(lambda: rig.engine.running == 2)
    assert (presence.working, sorted(each.session for each in presence._inside.values())) == (
        2,
        [("", "a"), ("", "b")],
    )
    rig.engine.gate.set()
    assert [(await task).status for task in tasks] == [200, 200]
    await until(lambda: presence.working == 0)


@pytest.mark.parametrize("status", [400, 401, 403])
async def test_who_is_refused_by_the_engine_leaves_no_session(rig, status):
    """And no place inside, whoever it says it is; what it took teaches nothing. Others stay as they were."""
    gate = rig.runtime.gatekeeper.gate
    assert (await rig.ask(CHAT, chat("mine", session_id="mine"))).status == 200
    learned = gate.picture(0.0).marginal_tokens
    rig.engine.script = Script(fault="error", status=status)
    for name in ("one", "one", "two", "mine"):
        assert (await rig.ask(CHAT, chat(name, session_id=name))).status == status
    assert (await rig.ask(CHAT, chat("nameless"))).status == status
    await rig.quiet()
    assert [each.session_id for each in rig.runtime.plane.sessions] == ["mine"]
    assert [each.session for each in gate.presence._inside.values()] == [("", "mine")]
    assert gate.picture(0.0).marginal_tokens == learned


async def test_policies_of_a_file_hold_when_it_changes(tmp_path):
    """By the label of a pool and for all; cells too."""
    file = tmp_path / "policy.yaml"
    file.write_text("labels: {gold: {priority: 3}}\n")
    async with Rig(policy_file=file) as rig:
        keeper = rig.runtime.gatekeeper
        pool = await rig.pool({"messages": chat("x")["messages"][:1], "label": "gold"})
        found = rig.runtime.plane.tree.get(pool["pool_id"])
        assert (keeper.policy(found).priority, keeper.policy(None).priority) == (3, 0)
        file.write_text("default: {priority: 5}\ncells: {growth_tokens: 99}\n")
        assert rig.policies.reload()
        keeper.refresh()
        assert (keeper.policy(found).priority, rig.runtime.plane.cells.ledger._growth) == (5, 99)
