"""Claims about ``runtime``: commands become calls, and nothing is lost when somebody leaves."""

import asyncio

import pytest
import structlog
from api.rig import until

from polykv_proxy import runtime as runtime_module
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import PoolState, Scope, as_tokens
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.engine import backend
from polykv_proxy.engine.state import EngineState, EngineStatus
from polykv_proxy.errors import UnavailableError
from polykv_proxy.runtime import Runtime

TOKENS = as_tokens(range(1, 41))
SCOPE = Scope("")


# -- becoming ready ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/props", b"nonsense"),
        ("/polykv/engine", b'{"version":1}'),
        ("/polykv/engine", b'{"version":99}'),
        ("/v1/models", b"[]"),
        ("/polykv/engine/counters", b"{}"),
    ],
)
async def test_an_engine_that_is_not_understood_is_asked_again(rig, monkeypatch, path, body):
    """Whatever it says; as soon as it makes sense, requests go in."""
    monkeypatch.setattr(runtime_module, "RETRY_READY_S", 0.005)
    rig.down()
    rig.engine.restart()
    rig.engine.broken[path] = (200, body)
    rig.runtime.on_engine_status(EngineStatus(state=EngineState.READY))
    await until(lambda: len(rig.engine.of(path)) > 3)
    assert not rig.runtime.plane.serving
    del rig.engine.broken[path]
    await until(lambda: rig.runtime.plane.serving)


async def test_the_log_says_what_is_done_between_loading_and_serving(rig):
    """It takes some seconds on a slow machine, in which requests wait."""
    rig.down()
    rig.engine.restart()
    with structlog.testing.capture_logs() as logs:
        rig.runtime.on_engine_status(EngineStatus(state=EngineState.READY))
        await until(lambda: rig.runtime.plane.serving)
    told = [entry["event"] for entry in logs]
    assert told.index("self_test") < told.index("engine_ready")


@pytest.mark.parametrize("step", ["meet", "counts", "on_ready"])
@pytest.mark.parametrize("fault", [ValueError("a fault"), UnavailableError("not now")])
async def test_no_fault_is_a_reason_to_wait_for_ever(rig, monkeypatch, step, fault):
    """Nothing would be served, and nobody told; it is tried again."""
    monkeypatch.setattr(runtime_module, "RETRY_READY_S", 0.005)
    rig.down()
    tries, of = [], rig.runtime.readings if step == "counts" else rig.runtime.saver
    real = getattr(of, step)

    def fails(*args):
        tries.append(1)
        if len(tries) < 3:
            raise fault
        return real(*args)

    setattr(of, step, fails)
    await rig.up()
    assert len(tries) == 3


async def test_models_without_details_are_fine(rig):
    """``meta`` may be null."""
    rig.engine.broken["/v1/models"] = (200, b'{"data":[{"meta":null}]}')
    rig.down()
    await rig.up()
    assert rig.runtime.plane.serving


async def test_an_engine_that_goes_while_it_is_looked_at_is_not_served(rig):
    """The look is broken off; the next report decides."""
    rig.down()
    rig.runtime.on_engine_status(EngineStatus(state=EngineState.READY))
    rig.runtime.on_engine_status(EngineStatus(state=EngineState.READY))
    rig.down()
    await asyncio.sleep(0.05)
    assert not rig.runtime.serving.is_set()


async def test_a_restart_that_nobody_reported_is_noticed(rig):
    """An engine that came back between two looks has another epoch: it is met anew."""
    made = await rig.pool()
    one, _ = rig.take_all()
    rig.engine.restart()
    await rig.runtime.readings.take(0.0)
    await until(lambda: rig.runtime.plane.facts.epoch == rig.engine.epoch)
    await until(rig.runtime.serving.is_set)
    assert one.ended
    assert rig.idle == 2
    assert rig.runtime.plane.pools.find(made["pool_id"], SCOPE).state is PoolState.LOST


# -- what a client left running ---------------------------------------------------------------------------


async def test_a_request_that_never_began_frees_its_slot_after_a_grace(rig, monkeypatch):
    """The engine may still start it, but not after it had time to notice the closed connection."""
    monkeypatch.setattr(runtime_module, "LAUNCH_GRACE_S", 0.05)
    one, _ = rig.take_all()
    rig.runtime.finish(one, clean=False, content=Content.NEW)
    assert rig.idle == 0
    await until(lambda: rig.idle == 1)


async def conversation_in_a_slot(rig, name):
    """A request of a session that the engine computed ten tokens of; its lease."""
    lease = rig.runtime.line.request(Ask(scope=SCOPE, name=name, chain=(1, 2))).lease
    rig.engine.sequences[lease.slots[0]].tokens = list(range(10))
    rig.runtime.finish(lease, clean=True, content=Content.NEW)
    return lease


@pytest.mark.parametrize(("tokens", "slot"), [(4, 0), (0, None)], ids=["some", "none"])
async def test_who_left_is_where_something_was_computed(proxies, tokens, slot):
    """A request that was stopped before its first token left nothing: no slot is its session's."""
    rig = await proxies(slots=1)
    lease = rig.runtime.line.request(Ask(scope=SCOPE, name="me", chain=(1, 2))).lease
    held = rig.engine.sequences[0]
    held.tag, held.tokens = lease.lease_id, list(range(tokens))
    rig.runtime.finish(lease, clean=False, content=Content.NEW)
    await until(lambda: rig.idle == 1)
    assert lease.session.slot == slot


@pytest.mark.parametrize(("erased", "slot"), [(False, 0), (True, None)], ids=["kept", "erased"])
async def test_a_request_that_never_began_displaced_nobody(proxies, monkeypatch, erased, slot):
    """The slot holds what it held, and that is not the conversation of the request."""
    monkeypatch.setattr(runtime_module, "LAUNCH_GRACE_S", 0.05)
    rig = await proxies(slots=1)
    first = await conversation_in_a_slot(rig, "first")
    second = rig.runtime.line.request(Ask(scope=SCOPE, name="second", chain=(1, 3))).lease
    if erased:
        rig.engine.sequences[0].tokens = []
    rig.runtime.finish(second, clean=False, content=Content.NEW)
    await until(lambda: rig.idle == 1)
    assert (first.session.slot, second.session.slot) == (slot, None)


async def test_a_resumable_stream_is_not_stopped(rig):
    """Its slot is taken until the engine is done with it."""
    one, _ = rig.take_all()
    slot = rig.engine.sequences[one.slots[0]]
    slot.running, slot.tag = True, one.lease_id
    rig.runtime.finish(one, clean=False, content=Content.NEW, stop=False)
    polls = len(rig.engine.of("/polykv/engine/counters"))
    await until(lambda: len(rig.engine.of("/polykv/engine/counters")) > polls + 2)
    assert (rig.engine.cancelled, rig.idle) == ([], 0)
    slot.running = False
    await until(lambda: rig.idle == 1)


async def test_polling_outlives_bad_answers(rig, monkeypatch):
    """A counters document that makes no sense is looked at again."""
    monkeypatch.setattr(runtime_module, "LAUNCH_GRACE_S", 0.02)
    one, _ = rig.take_all()
    rig.engine.broken["/polykv/engine/counters"] = (200, b"nonsense")
    rig.runtime.finish(one, clean=False, content=Content.NEW)
    polls = len(rig.engine.of("/polykv/engine/counters"))
    await until(lambda: len(rig.engine.of("/polykv/engine/counters")) > polls + 2)
    assert rig.idle == 0
    rig.engine.broken.clear()
    await until(lambda: rig.idle == 1)


def abandoned(rig, monkeypatch):
    """A slot whose client left while the engine works on, which is unheard by now."""
    monkeypatch.setattr(runtime_module, "QUIET_POLL_S", 0.01)
    one, _ = rig.take_all()
    slot = rig.engine.sequences[one.slots[0]]
    slot.running, slot.tag = True, one.lease_id
    rig.runtime.finish(one, clean=False, content=Content.NEW, stop=False)
    rig.down()
    return slot


async def test_an_engine_that_comes_back_as_another_has_nothing_running(rig, monkeypatch):
    """Nobody waits for it to be idle."""
    abandoned(rig, monkeypatch)
    rig.engine.restart()
    await rig.up()
    await until(lambda: rig.idle == 2)


async def test_an_engine_that_was_unheard_for_a_moment_goes_on_with_its_work(rig, monkeypatch):
    """The slot that a client left is given away only when the engine is done with it."""
    slot = abandoned(rig, monkeypatch)
    await rig.up()
    looks = len(rig.engine.of("/polykv/engine/counters"))
    await until(lambda: len(rig.engine.of("/polykv/engine/counters")) > looks + 3)
    assert rig.idle == 0
    slot.running = False
    await until(lambda: rig.idle == 1)


async def test_a_stock_engine_that_hides_its_slots_gets_the_slot_back_in_the_end(proxies, monkeypatch):
    """``/slots`` may be switched off: then time has to do."""
    for module in (runtime_module, backend):
        monkeypatch.setattr(module, "LAUNCH_GRACE_S", 0.05)
    rig = await proxies(max_pools=0)
    rig.engine.broken["/slots"] = (501, b'{"error":{"message":"off"}}')
    one, _ = rig.take_all()
    rig.runtime.finish(one, clean=False, content=Content.NEW)
    await until(lambda: rig.idle == 1)


async def test_restarts_are_told_from_reconnections(rig):
    """The same load of the model again is none."""
    rig.down()
    await rig.up()
    assert rig.runtime.metrics.restarts == 0
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert rig.runtime.metrics.restarts == 1


# -- time -------------------------------------------------------------------------------------------------


async def test_wall_time_is_epoch_seconds():
    """A float that a client can read as a date."""
    runtime = Runtime(ControlPlane(max_waiting=1), None, TaskSet())
    assert runtime.now_ts() > 1_700_000_000
