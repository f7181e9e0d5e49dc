"""Every coroutine test of this folder runs on both event loops."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from edge.wire import Rig


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """The loops that the edge must run on."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def rig():
    """Sockets for one test, closed afterwards."""
    async with Rig() as rig:
        yield rig
