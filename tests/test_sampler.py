"""Claims about ``sampler``: it looks again and again, and at once when something happens."""

import asyncio

import pytest

from polykv_proxy import sampler


class FakeRuntime:
    """Counts readings; ``busy`` is what they show."""

    def __init__(self, *, busy):
        self.sampled = asyncio.Event()
        self.readings = 0
        self.busy = busy

    async def sample(self, max_age_s):
        """A reading, if it is ``busy`` or not; None when that is not known."""
        self.readings += 1
        return None if self.busy is None else self


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sampler, "SHORTEST_S", 0.001)
    monkeypatch.setattr(sampler, "BUSY_S", 0.003)
    monkeypatch.setattr(sampler, "IDLE_S", 3600.0)


async def running(runtime, readings):
    """Run until there were so many readings."""
    task = asyncio.get_running_loop().create_task(sampler.run(runtime))
    try:
        async with asyncio.timeout(20.0):
            while runtime.readings < readings:
                await asyncio.sleep(0.001)
    finally:
        task.cancel()


async def test_an_engine_at_work_is_read_often():
    """Without being told."""
    runtime = FakeRuntime(busy=True)
    await running(runtime, 3)
    assert runtime.readings >= 3


@pytest.mark.parametrize("busy", [False, None])
async def test_an_idle_engine_is_read_when_something_happens(busy):
    """A request that starts or ends is seen at once, and only then."""
    runtime = FakeRuntime(busy=busy)
    task = asyncio.get_running_loop().create_task(sampler.run(runtime))
    await asyncio.sleep(0.05)
    assert runtime.readings == 1
    runtime.sampled.set()
    async with asyncio.timeout(20.0):
        while runtime.readings < 2:
            await asyncio.sleep(0.001)
    assert not runtime.sampled.is_set()
    task.cancel()
