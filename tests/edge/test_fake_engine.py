"""Claims about the stand-in engine, checked through the edge that it is made for."""

import asyncio
import json

import aiohttp
import pytest
from fake_engine import FakeEngine, Script

from edge.wire import post, until

PATHS = ["/v1/chat/completions", "/completion", "/v1/completions", "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
async def test_generations_through_the_proxy_are_the_engines(rig, path):
    """Streamed or not, on every route, the client reads what it would read from the engine itself."""
    async with FakeEngine() as engine, aiohttp.ClientSession() as session:
        engine.script = Script(tokens=3, extra={"x": 1}, headers={"X-Engine": "1"})
        proxied = f"http://127.0.0.1:{await rig.proxy(rig.upstream(engine.address))}"
        for stream in (False, True):
            answers = []
            for base in (engine.url, proxied):
                async with session.post(base + path, json={"stream": stream}) as reply:
                    answers.append((reply.status, reply.headers["X-Engine"], await reply.read()))
            assert answers[0] == answers[1]
        assert len(engine.of(path)) == 4
        assert engine.requests[-1].json == {"stream": True}


async def test_routes_around_generation(rig):
    """The small routes answer in llama-server's form, over a Unix socket too."""
    async with FakeEngine(unix=True) as engine:
        port = await rig.proxy(rig.upstream(engine.address))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path in (
                "/health",
                "/v1/health",
                "/props",
                "/slots",
                "/v1/models",
                "/metrics",
                "/lora-adapters",
            ):
                async with session.get(path) as reply:
                    assert reply.status == 200
            async with session.post("/tokenize", json={"content": "ab"}) as reply:
                assert await reply.json() == {"tokens": [97, 98]}
            async with session.post("/slots/1?action=save", json={"filename": "x"}) as reply:
                assert (await reply.json())["n_saved"] == 12
            engine.loading = True
            async with session.get("/health") as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["message"] == "Loading model"


async def test_faults_and_disconnects(rig):
    """Faults happen on demand, and a client that leaves is noticed, in prefill and in mid-stream."""
    async with FakeEngine() as engine:
        port = await rig.proxy(rig.upstream(engine.address))
        engine.script = Script(fault="error", status=500, error_body={"error": {"message": "x"}})
        client = await rig.client(port)
        await client.send(post(b"{}", target=b"/completion"))
        message = await client.read_message()
        assert (message.status, json.loads(message.body)) == (500, {"error": {"message": "x"}})
        engine.script = Script(fault="die_before_head")
        await client.send(post(b"{}", target=b"/completion"))
        assert (await client.read_message()).status == 503
        engine.script = Script(fault="die_mid_stream", tokens=4)
        client = await rig.client(port)
        await client.send(post(b'{"stream":true}', target=b"/completion"))
        assert not (await client.read_all()).endswith(b"0\r\n\r\n")
        for script in (Script(prefill_s=60), Script(token_delay_s=60)):
            engine.script = script
            count = len(engine.requests)
            client = await rig.client(port)
            await client.send(post(b'{"stream":true}', target=b"/completion"))
            request = await engine.arrived(count + 1)
            await asyncio.sleep(0.02)
            client.close()
            await asyncio.wait_for(request.disconnected.wait(), 10)
        await until(lambda: len(rig.cancelled) == 2)
