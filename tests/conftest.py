"""Fixtures for all: a proxy in front of a fake patched engine, for one test."""

from __future__ import annotations

import contextlib
import signal

import hypothesis
import pytest
from api.rig import Rig
from fake_polykv import FakePolykv


def pytest_configure():
    """Whoever ends a run by a signal gets it ended as by the keyboard: the servers it started stop, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


# the machine may be busy: how long an example takes says nothing
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.fixture
async def proxies():
    """Starts proxies with settings of one's choice; all of them are stopped, and none may have had a bug."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = []

        async def start(**options):
            rigs.append(await stack.enter_async_context(Rig(**options)))
            return rigs[-1]

        yield start
        for rig in rigs:
            assert not rig.problems
            assert not any(engine.overlaps for engine in rig.engines)


@pytest.fixture
async def rig(proxies):
    """A proxy with two slots and two pools."""
    return await proxies()


@pytest.fixture
async def engine():
    """A patched engine that somebody else runs."""
    async with FakePolykv() as engine:
        yield engine
