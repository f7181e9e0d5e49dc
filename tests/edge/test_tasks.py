"""Claims about ``edge.tasks``."""

import asyncio

from polykv_proxy.edge.tasks import TaskSet


async def test_counts_what_runs():
    """A task is held until it ended, then forgotten."""
    tasks, gate = TaskSet(), asyncio.Event()

    async def work():
        await gate.wait()

    tasks.spawn(work())
    assert len(tasks) == 1
    gate.set()
    assert await tasks.wait(10)
    assert len(tasks) == 0


async def test_wait_gives_up_without_cancelling():
    """``wait`` reports what is left and leaves it alone; ``cancel`` ends it."""
    tasks = TaskSet()

    async def work():
        await asyncio.Event().wait()

    task = tasks.spawn(work())
    assert not await tasks.wait(0.01)
    assert not task.cancelling()
    await tasks.cancel(10)
    assert task.cancelled()
