"""Watching somebody else's engine."""

import asyncio

import pytest
from aiohttp import web

from polykv_proxy.engine import attached
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.attached import Attached
from polykv_proxy.engine.health import Seen
from polykv_proxy.engine.state import EngineState

READY, LOADING, DOWN = EngineState.READY, EngineState.LOADING, EngineState.DOWN
SILENT = Seen(DOWN, "no answer", silent=True)


@pytest.fixture
def watch(monkeypatch):
    """Watch an engine that shows what is listed; returns the states that were reported."""
    monkeypatch.setattr(attached, "POLL_S", 0.001)

    async def watch(*looks):
        waiting, reports = list(looks), []
        watcher = Attached(EngineAddress.parse("http://127.0.0.1:1"), reports.append)

        async def probe(*_):
            if len(waiting) == 1:
                watcher._stop_asked.set()
            return waiting.pop(0)

        monkeypatch.setattr(attached, "probe", probe)
        await watcher.run()
        return [status.state for status in reports[:-1]]

    return watch


async def test_only_changes_are_reported(watch):
    """An engine that stays as it is makes no noise."""
    ready, loading = Seen(READY), Seen(LOADING)
    assert await watch(loading, loading, ready, ready, ready) == [LOADING, READY]


async def test_silence_counts_only_when_it_lasts(watch):
    """An engine in a long batch may miss a look or two."""
    ready = Seen(READY)
    assert await watch(ready, SILENT, SILENT, ready) == [READY]
    assert await watch(ready, SILENT, SILENT, SILENT, ready) == [READY, DOWN, READY]


async def test_refusal_counts_at_once(watch):
    """Nobody listens: it is gone."""
    assert await watch(Seen(READY), Seen(DOWN, "cannot be reached"), Seen(LOADING)) == [READY, DOWN, LOADING]


async def test_stop_leaves_the_engine_alone(aiohttp_server):
    """It is told nothing; only the watching ends."""
    paths = []

    async def answer(request):
        paths.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = await aiohttp_server(app)
    reports, ready = [], asyncio.Event()

    def on_state(status):
        reports.append(status)
        ready.set()

    watcher = Attached(EngineAddress.parse(str(server.make_url("/"))), on_state)
    watcher.prepare()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watcher.run())
        await ready.wait()
        await watcher.stop(60)
    assert [status.state for status in reports] == [READY, DOWN]
    assert set(paths) == {"/health"}


async def test_stop_before_run(aiohttp_server):
    """Nothing to wait for."""
    watcher = Attached(EngineAddress.parse("http://127.0.0.1:1"), print)
    await watcher.stop(60)
    await watcher.run()
