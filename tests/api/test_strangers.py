"""Claims about ``api.strangers``: who has no key does not wait among those who have one."""

import asyncio

import pytest
import pytest_asyncio

from api.rig import CHAT, Rig, chat, until
from polykv_proxy.api import strangers

REFUSAL = b'{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}'
FULL = {"kv_headroom_ratio": 0.5, "settle_max_ms": 0, "mode": "enforced", "on_saturation": "queue"}
KEYS = {"Authorization": "Bearer wrong", "X_Api_Key": "k"}


@pytest_asyncio.fixture
async def full():
    """A proxy with a pool whose policy holds newcomers while one session runs."""
    async with Rig(slots=3, cells=2048) as rig:
        pool = (await rig.pool(**KEYS))["pool_id"]
        rig.engine.gate.clear()
        running = rig.start(CHAT, chat("first", pool_id=pool, session_id="one"), **KEYS)
        await until(lambda: rig.engine.running == 1)
        await rig.ask(f"/polykv/pools/{pool}/admission", FULL, **KEYS)
        yield rig, chat("hi", pool_id=pool, session_id="two")
        rig.engine.gate.set()
        assert (await running).status == 200
        await rig.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_the_engine_refuses_takes_no_turn(full, stream):
    """The answer is the engine's; it is asked with the client's key, and with nothing else of it."""
    rig, body = full
    rig.engine.broken["/props"] = (401, REFUSAL)
    answer = await rig.ask(CHAT, body | {"stream": stream}, X_Mine="1", **KEYS)
    assert (answer.status, answer.body) == (401, REFUSAL)
    asked = [each for each in rig.engine.requests if each.path == "/props"][-1]
    sent = {name.lower(): value for name, value in asked.headers}
    assert (sent["authorization"], sent["x-api-key"]) == ("Bearer wrong", "k")
    assert "x-mine" not in sent
    gate = rig.runtime.gatekeeper.gate
    assert (gate.waiting, len(gate.presence)) == (0, 1)
    assert [each.session_id for each in rig.runtime.plane.sessions] == ["one"]
    (record,) = (await rig.ask("/polykv/requests?limit=1", **KEYS)).json["requests"]
    assert (record["state"], record["error_code"]) == ("failed", "engine_status_401")


@pytest.mark.parametrize("says", [200, 500, None])
async def test_whoever_is_not_refused_waits(full, monkeypatch, says):
    """Also where the engine does not say, in whatever way."""
    (rig, body), hangs = full, asyncio.Event()
    if says is None:
        monkeypatch.setattr(strangers, "PATIENCE_S", 0.01)
        rig.engine.slow["/props"] = hangs
    elif says != 200:
        rig.engine.broken["/props"] = (says, b"{}")
    waiting = rig.start(CHAT, body, **KEYS)
    gate = rig.runtime.gatekeeper.gate
    await until(lambda: gate.waiting == 1)
    rig.engine.gate.set()
    assert (await waiting).status == 200
    assert gate.counts["queued"] == 1
    hangs.set()
