"""Claims about ``sampler``: it looks again and again, at once when something happens, and never to harm."""

import asyncio

import pytest
from api.rig import CHAT, chat, until

from polykv_proxy import sampler
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import (
    Capability,
    EngineFacts,
    EngineSample,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
)

FACTS = EngineFacts("e", slots=3, max_pools=0, cells=100, ctx_tokens=100, bytes_per_cell=1, build="b")


class FakeReadings:
    """Counts looks."""

    def __init__(self):
        self.due = asyncio.Event()
        self.plane = ControlPlane(max_waiting=1)
        self.looks = 0
        self.fault = None

    async def look(self, max_age_s):
        """A look."""
        self.looks += 1
        if self.fault is not None:
            raise self.fault


@pytest.fixture
async def readings(monkeypatch):
    """One that is sampled, at the pace of ``paces``."""
    readings = FakeReadings()
    readings.pace = (0.003, True)
    monkeypatch.setattr(sampler, "SHORTEST_S", 0.001)
    monkeypatch.setattr(sampler, "pace", lambda _plane: readings.pace)
    task = asyncio.get_running_loop().create_task(sampler.run(readings))
    yield readings
    task.cancel()


async def test_it_looks_again_and_again(readings):
    """Without being told."""
    await until(lambda: readings.looks > 3)


async def test_a_fault_of_ours_does_not_end_it(readings):
    """Nobody would look again, and nothing be known of the engine any more."""
    readings.fault = ZeroDivisionError("a bug")
    await until(lambda: readings.looks > 3)


async def test_it_looks_at_once_when_something_happens(readings):
    """A request that starts or ends is seen at once, and only then."""
    readings.pace = (3600.0, True)
    await until(lambda: readings.looks)
    readings.due.set()
    await asyncio.sleep(0.05)
    looks = readings.looks
    await asyncio.sleep(0.05)
    assert readings.looks == looks
    readings.due.set()
    await until(lambda: readings.looks > looks)
    await until(lambda: not readings.due.is_set())


async def test_it_keeps_its_distance_where_it_would_disturb(readings):
    """Nothing that happens makes it look sooner."""
    readings.pace = (0.2, False)
    await asyncio.sleep(0.02)
    readings.looks = 0
    for _ in range(10):
        readings.due.set()
        await asyncio.sleep(0.005)
    assert readings.looks <= 1


# -- the pace ---------------------------------------------------------------------------------------------


def plane_of(capability, *streams):
    """A plane with one running request for each flag: whether it streams."""
    plane = ControlPlane(max_waiting=1)
    plane.on_engine_ready(FACTS, capability, None, "m", 0.0)
    for number, streaming in enumerate(streams):
        ask = Ask(scope=Scope("s"), chain=(number, number))
        plane.leases.on_request(ask, 0.0, now_ts=0.0).lease.streams = streaming
    return plane


def decode(plane, *tags, generated=0):
    """The engine shows these leases decoding."""
    slots = tuple(
        SlotSample(SlotId(at), SlotState.GEN, tag, tag, generated, 0, 0, 1, 0, 0, 100)
        for at, tag in enumerate(tags)
    )
    for each in range(2):
        plane.on_counters(EngineSample("e", float(each), 0, 100, 0, slots, ()))


def test_an_idle_engine_is_read_once_a_second():
    """Not so often without the patch: somebody else's client may be about to leave it."""
    assert sampler.pace(plane_of(Capability.ZERO_COPY)) == (sampler.IDLE_S, True)
    assert sampler.pace(plane_of(Capability.RELAY)) == (sampler.QUIET_S, True)
    assert sampler.IDLE_S >= 1.0


def test_a_working_engine_is_read_several_times_a_second():
    """Fastest while somebody's rate is not known yet; also for requests of others."""
    plane = plane_of(Capability.ZERO_COPY, False)
    assert sampler.pace(plane) == (sampler.BUSY_S, True)
    decode(plane, 1)
    assert sampler.pace(plane) == (sampler.WARMING_S, True)
    plane.board.slots[0].session.rate.add(100, 1.0)
    assert sampler.pace(plane) == (sampler.BUSY_S, True)
    others = plane_of(Capability.ZERO_COPY)
    decode(others, 77)
    assert sampler.pace(others) == (sampler.BUSY_S, True)
    assert 0.1 <= sampler.WARMING_S < sampler.BUSY_S <= 0.5


def test_an_engine_without_the_patch_is_left_alone_while_a_client_waits():
    """It would not notice that the client left."""
    quiet = (sampler.QUIET_S, False)
    assert sampler.QUIET_S > 1.0
    assert sampler.pace(plane_of(Capability.RELAY, False)) == quiet
    streaming = plane_of(Capability.RELAY, True, True)
    assert sampler.pace(streaming) == quiet, "both are in prefill as far as is known"
    decode(streaming, 1)
    assert sampler.pace(streaming) == quiet, "one still is"
    decode(streaming, 1, 2)
    assert sampler.pace(streaming)[1]
    decode(streaming, 1, 2, 77)
    assert sampler.pace(streaming) == quiet, "nobody knows who gets the third one's tokens"
    left = plane_of(Capability.RELAY)
    decode(left, 77)
    assert sampler.pace(left) == (sampler.QUIET_S, True)


# -- on an engine -----------------------------------------------------------------------------------------


async def asked(rig, seconds, *paths):
    """How often the engine was asked for these in so many seconds."""
    await asyncio.sleep(0.3)
    before = sum(len(rig.engine.of(path)) for path in paths)
    await asyncio.sleep(seconds)
    return sum(len(rig.engine.of(path)) for path in paths) - before


@pytest.mark.parametrize("max_pools", [2, 0])
async def test_an_idle_proxy_asks_at_most_once_a_second(proxies, max_pools):
    """Counters of a patched engine, slots of another, and nothing else."""
    rig = await proxies(max_pools=max_pools)
    await rig.ask(CHAT, chat("a"))
    await asyncio.sleep(1.2)
    everything = len(rig.engine.requests)
    looks = await asked(rig, 2.5, "/polykv/engine/counters", "/slots")
    assert 1 <= looks <= 3
    assert len(rig.engine.requests) - everything <= 4


async def test_whoever_waits_on_a_stock_engine_is_left_in_peace(proxies):
    """The engine is asked seldom enough to have a second of silence, whatever else comes and goes."""
    rig = await proxies(max_pools=0)
    rig.engine.gate.clear()
    waiting = rig.start(CHAT, chat("a"))
    await until(lambda: rig.engine.running)
    await asyncio.sleep(0.3)
    before = len(rig.engine.of("/slots"))
    for _ in range(10):
        rig.runtime.readings.due.set()
        await asyncio.sleep(0.1)
    assert len(rig.engine.of("/slots")) - before <= 1
    rig.engine.gate.set()
    assert (await waiting).status == 200
