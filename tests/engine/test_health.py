"""One look at an engine."""

import asyncio

import pytest
from aiohttp import web

from polykv_proxy.engine import health
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.health import Seen, open_session, probe
from polykv_proxy.engine.state import EngineState


async def look(address):
    """Look once, with a session of its own."""
    async with open_session(address) as session:
        return await probe(session, address)


@pytest.mark.parametrize(
    ("status", "seen"),
    [
        (200, Seen(EngineState.READY)),
        (503, Seen(EngineState.LOADING)),
        (404, Seen(EngineState.DOWN, "/health answered 404")),
    ],
)
async def test_status_tells_the_state(aiohttp_server, status, seen):
    """llama-server answers 503 while it loads; anything else is no llama-server."""

    async def answer(_):
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/health", answer)
    server = await aiohttp_server(app)
    assert await look(EngineAddress.parse(str(server.make_url("/")))) == seen


async def test_engine_that_does_not_answer_in_time_is_silent(aiohttp_server, monkeypatch):
    """That is not the same as one that refuses."""
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def answer(_):
        await never.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", answer)
    server = await aiohttp_server(app)
    seen = await look(EngineAddress.parse(str(server.make_url("/"))))
    never.set()
    assert (seen.state, seen.silent) == (EngineState.DOWN, True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "unix:/nonexistent/engine.sock"])
async def test_engine_that_is_not_there(url):
    """A value, with the reason."""
    seen = await look(EngineAddress.parse(url))
    assert (seen.state, seen.silent) == (EngineState.DOWN, False)
    assert seen.reason.startswith("cannot be reached: ")
