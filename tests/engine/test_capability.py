"""Claims about ``engine.capability``: what is claimed was seen, once, and nothing is left behind."""

import pytest
from api.rig import CHAT, chat

from polykv_proxy.core.types import Capability, Scope
from polykv_proxy.engine import capability

SCOPE = Scope("")


async def test_pools_are_claimed_after_they_were_seen_to_work(rig):
    """The self-test leaves nothing behind in the engine."""
    assert rig.runtime.plane.capability is Capability.ZERO_COPY
    assert not rig.engine.pools
    assert [slot.tokens for slot in rig.engine.sequences] == [[], []]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("reuse", "reused"),
        ("share", "shares"),
        ("leak", "did not come back"),
    ],
)
async def test_an_engine_that_fails_the_self_test_only_relays(rig, damage, reason):
    """Each of the three promises is looked at; requests run all the same."""
    rig.down()
    rig.engine.restart()
    rig.engine.damage = damage
    await rig.up()
    assert rig.runtime.plane.capability is Capability.RELAY
    assert reason in rig.runtime.plane.capability_reason
    assert (await rig.ask(CHAT, chat("a"))).status == 200


async def test_the_same_epoch_is_tested_once(rig):
    """A connection that came back disturbs nobody."""
    made = await rig.pool()
    orders = len([request for request in rig.engine.requests if "/pools/" in request.path])
    rig.down()
    await rig.up()
    assert len([request for request in rig.engine.requests if "/pools/" in request.path]) == orders
    assert rig.runtime.plane.pools.find(made["pool_id"], SCOPE).resident


@pytest.mark.parametrize("busy", [False, True])
async def test_pools_of_an_earlier_proxy_are_released(rig, busy, monkeypatch):
    """Nobody knows their ids, and their numbers would be taken for ever; also where others are at work."""
    monkeypatch.setattr(capability, "CALM_S", 0.0)
    await rig.pool()
    rig.down()
    rig.engine.epoch = "another proxy's"
    rig.engine.sequences[1].running = busy
    await rig.up()
    assert not rig.engine.pools
    assert rig.runtime.plane.capability is Capability.ZERO_COPY
    rig.engine.sequences[1].running = False
    assert (await rig.pool())["created"]


async def test_what_an_earlier_proxy_left_in_the_slots_goes(rig, monkeypatch):
    """When its requests have ended, which were at work when it was killed: the test needs cells, and time."""
    monkeypatch.setattr(capability, "CALM_LOOK_S", 0.0)
    await rig.ask(CHAT, chat("a"))
    held = next(slot for slot in rig.engine.sequences if slot.tokens)
    held.running = True
    rig.down()
    rig.engine.epoch = "another proxy's"
    looks, counters = [], rig.runtime.client.counters

    async def look():
        looks.append(held.running)
        held.running = len(looks) < 4
        return await counters()

    monkeypatch.setattr(rig.runtime.client, "counters", look)
    orders = len(rig.engine.requests)
    await rig.up()
    assert looks[:4] == [True] * 4
    assert [slot.tokens for slot in rig.engine.sequences] == [[], []]
    tested = [request.path for request in rig.engine.requests[orders:] if "/pools/" in request.path]
    assert tested  # it was not taken at its word
