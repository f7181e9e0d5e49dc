"""Claims about ``line``: nothing is lost when somebody leaves, and it is counted what became of whom."""

import asyncio
import contextlib

import pytest

from polykv_proxy.core.decisions import WakeQueued
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.errors import SaturatedError

TOKENS = as_tokens(range(1, 41))
SCOPE = Scope("")


async def test_a_lease_wakes_its_waiter(rig):
    """And a second look gives it again."""
    one, _ = rig.take_all()
    pending = rig.runtime.line.request(Ask(scope=SCOPE))
    assert await pending.wait(0.0) is None
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    lease = await pending.wait(5.0)
    assert lease.slots == one.slots
    assert await pending.wait(0.0) is lease
    pending.give_up()  # it has its lease: nothing to leave
    assert not lease.ended


async def test_who_leaves_in_the_moment_of_being_woken_passes_the_slot_on(rig):
    """Woken but cancelled before it could run: the next in line has the slot."""
    one, _ = rig.take_all()
    leaver, next_one = rig.runtime.line.request(Ask(scope=SCOPE)), rig.runtime.line.request(Ask(scope=SCOPE))
    task = asyncio.get_running_loop().create_task(leaver.wait(10.0))
    await asyncio.sleep(0)
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    leaver.give_up()
    assert (await next_one.wait(5.0)).slots == one.slots


async def test_a_wake_that_comes_with_the_timeout_is_not_lost(rig):
    """Whichever is seen first, the lease is there for the next look."""
    one, _ = rig.take_all()
    pending = rig.runtime.line.request(Ask(scope=SCOPE))
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, lambda: rig.runtime.finish(one, clean=True, content=Content.NEW))
    first = await pending.wait(0.01)
    assert (first or await pending.wait(5.0)).slots == one.slots


async def test_a_ticket_without_a_waiter_gives_its_lease_back(rig):
    """A wake-up for nobody frees the slot."""
    one, two = rig.take_all()
    pending = rig.runtime.line.request(Ask(scope=SCOPE))
    rig.runtime.line._waiters.clear()
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    assert rig.idle == 1
    assert pending.lease is None
    rig.runtime._perform([WakeQueued(pending.ticket)])  # nothing more happens
    rig.runtime.finish(two, clean=True, content=Content.NEW)
    assert rig.idle == 2


async def test_one_too_many_is_told_when_to_come_again(proxies):
    """An exception with a Retry-After."""
    rig = await proxies(queue={"max_depth": 0})
    rig.take_all()
    with pytest.raises(SaturatedError) as caught:
        rig.runtime.line.request(Ask(scope=SCOPE))
    assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 2)


async def test_what_becomes_of_requests_is_counted(rig):
    """At once, after a wait, given up, refused."""
    one, _ = rig.take_all()
    waiting, leaving = rig.runtime.line.request(Ask(scope="s")), rig.runtime.line.request(Ask(scope="s"))
    leaving.give_up()
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    assert await waiting.wait(20.0)
    rig.runtime.plane.leases._max_waiting = 0
    with pytest.raises(SaturatedError):
        rig.runtime.line.request(Ask(scope="s"))
    counted = rig.runtime.metrics.admissions
    assert (counted["queued"], counted["gave_up"], counted["rejected"]) == (1, 1, 1)
    assert counted["admitted"] == 2
    assert sum(rig.runtime.metrics.queue_wait._counts) == 3


async def test_what_it_waited_before_is_a_part_of_its_wait(rig):
    """Whether it finds a slot at once or not."""
    waits = rig.runtime.metrics.queue_wait
    first = rig.runtime.line.request(Ask(scope=SCOPE), waited_s=100.0)
    rig.runtime.finish(first.lease, clean=True, content=Content.NEW)
    before = waits._sum
    one, _ = rig.take_all()
    pending = rig.runtime.line.request(Ask(scope=SCOPE), waited_s=400.0)
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    await pending.wait(5.0)
    assert before == 100.0
    assert waits._sum >= 500.0
