"""Claims about ``edge.tasks``."""

import asyncio

import pytest

from edge.wire import until
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.errors import UnavailableError


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


@pytest.mark.parametrize("fails", [False, True])
async def test_what_runs_in_the_background_is_stopped_only_if_that_is_asked_for(fails):
    """Who leaves does not stop it; an outcome that comes with the stop is nobody's."""
    tasks, go_on, ends = TaskSet(), asyncio.Event(), []

    async def work():
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            if fails:
                raise UnavailableError("too late") from None
            return "too late"
        finally:
            ends.append(go_on.is_set())

    going = tasks.background(work())
    leaving = asyncio.ensure_future(asyncio.shield(going))
    await asyncio.sleep(0)
    leaving.cancel()
    go_on.set()
    assert await going is None
    go_on.clear()
    stopped = tasks.background(work())
    await asyncio.sleep(0)
    stopped.cancel()
    await until(lambda: len(ends) == 2)
    assert stopped.cancelled()
    assert ends == [True, False]
