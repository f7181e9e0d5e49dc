"""Claims about ``hosting``: what is known of an engine from its settings, and how its end is bounded."""

import asyncio
import contextlib
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import structlog
from api.rig import attached

from polykv_proxy import hosting
from polykv_proxy.app import Proxy
from polykv_proxy.engine import build
from polykv_proxy.engine.build import Manifest
from polykv_proxy.engine.source import read_series
from polykv_proxy.hosting import drain
from polykv_proxy.settings import Settings


async def test_settings_that_an_attached_engine_does_not_obey_are_named(engine):
    """Who sets the slots of an engine that runs already would wait for them in vain."""
    with structlog.testing.capture_logs() as logs:
        async with Proxy(attached(engine, parallel=9, args=("-ngl", "99"))):
            pass
        async with Proxy(attached(engine)):
            pass
    (told,) = [entry for entry in logs if entry["event"] == "settings_ignored"]
    assert told["keys"] == ["engine.parallel", "engine.args"]


def test_the_patches_are_known_of_an_engine_that_we_built(tmp_path):
    """Not of another binary, nor where none is installed."""
    home = tmp_path / "engine" / "current"
    (home / "bin").mkdir(parents=True)
    ours = Settings(cache_dir=tmp_path, engine={"binary": home / "bin" / "llama-server"})
    assert hosting._patch(ours) is None
    digest = read_series().digest
    manifest = Manifest(tag="b1", series=digest, source=None, flags="f", cmake_args=(), checked=True)
    (home / "manifest.json").write_text(json.dumps(asdict(manifest)))
    for name in ("llama-server", "llama-server-stock"):
        (home / "bin" / name).touch(mode=0o755)
    binary = build.installed(tmp_path).binary
    assert hosting._patch(Settings(cache_dir=tmp_path, engine={"binary": binary})) == digest[:12]
    assert hosting._patch(Settings(cache_dir=tmp_path, engine={"binary": tmp_path / "other"})) is None


@pytest.mark.parametrize("how", ["late", "left"])
async def test_a_drain_that_does_not_end_is_left(how):
    """After its time, and at once at the second signal: the engines are to be stopped."""
    over, begun = asyncio.Event(), asyncio.Event()

    class Stuck:
        async def drain(self):
            begun.set()
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

    start = SimpleNamespace(durable=Stuck())
    draining = asyncio.create_task(drain([start], 0.01 if how == "late" else 1000.0))
    await begun.wait()
    if how == "left":
        draining.cancel()
    async with asyncio.timeout(20.0):
        await asyncio.wait([draining])
    assert draining.cancelled() is (how == "left")
    over.set()
    assert await drain([], 1.0) is None
