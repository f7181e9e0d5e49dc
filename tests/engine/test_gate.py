"""Claims about ``engine.gate``: nobody's slot is taken by a request without a pin."""

import asyncio

import pytest

from polykv_proxy.core.decisions import Lease
from polykv_proxy.core.types import LeaseId, SlotId
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.engine import gate as gate_module
from polykv_proxy.engine.gate import Gate
from polykv_proxy.engine.wire import StockSlot
from polykv_proxy.errors import EngineGoneError


class Engine:
    """Slots as a client sees them."""

    def __init__(self):
        self.tasks = [None, None]
        self.busy = [False, False]
        self.looks = 0
        self.gone = False

    async def slots(self):
        """What ``GET /slots`` says."""
        self.looks += 1
        await asyncio.sleep(0)
        if self.gone:
            raise EngineGoneError("gone")
        return [StockSlot(n, self.busy[n], self.tasks[n]) for n in range(2)]

    async def looked(self, times=3):
        """Wait until it was looked at some more times."""
        wanted = self.looks + times
        async with asyncio.timeout(20.0):
            while self.looks < wanted:
                await asyncio.sleep(0.001)


class Bench:
    """A gate, its engine, and what it told."""

    def __init__(self):
        self.engine = Engine()
        self.taken = []
        self.tasks = TaskSet()
        self.gate = Gate(
            self.engine.slots, self.tasks.spawn, lambda lease, slot: self.taken.append((lease, slot))
        )

    def spawn(self, coroutine):
        """Run on the side."""
        return asyncio.get_running_loop().create_task(coroutine)


@pytest.fixture
async def bench(monkeypatch):
    """A gate that looks often."""
    monkeypatch.setattr(gate_module, "LOOK_S", 0.001)
    monkeypatch.setattr(gate_module, "LAUNCH_S", 0.02)
    bench = Bench()
    yield bench
    await bench.tasks.cancel(1.0)


def lease(number, slot=0):
    """A lease on one slot."""
    return Lease(LeaseId(number), (SlotId(slot),), None, continues=False, granted_at=0.0)


def sends(engine, slot, *, task=7, done=None):
    """A request that runs in this slot, and is answered when ``done`` is set."""

    async def send():
        engine.tasks[slot], engine.busy[slot] = task, True
        if done is not None:
            await done.wait()
        return "answer"

    return send


async def test_its_slot_is_learnt(bench):
    """The one whose last task changed."""
    one = lease(1, slot=0)
    assert await bench.gate.alone(one, sends(bench.engine, 1)) == "answer"
    assert bench.taken == [(one, 1)]


async def test_a_slot_that_was_right_is_not_told(bench):
    """Nothing to correct."""
    await bench.gate.alone(lease(1, slot=1), sends(bench.engine, 1))
    assert bench.taken == []


async def test_it_waits_for_pinned_ones_to_run(bench):
    """For the engine their slot is idle until then."""
    entered, done, sent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pinned():
        async with bench.gate.beside(lease(1, slot=0)):
            entered.set()
            await done.wait()

    async def send():
        sent.set()
        bench.engine.tasks[1] = 8

    first = bench.spawn(pinned())
    await entered.wait()
    second = bench.spawn(bench.gate.alone(lease(2, slot=1), send))
    await bench.engine.looked()
    assert not sent.is_set()
    bench.engine.busy[0] = True  # it runs: sent to the end or not
    await second
    assert not first.done()
    done.set()
    await first


async def test_work_in_steps_is_waited_for_to_its_end(bench):
    """Its slot is idle between two of them."""
    entered, done, sent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stepping():
        async with bench.gate.beside(lease(1, slot=0), steps=True):
            bench.engine.busy[0] = True
            entered.set()
            await done.wait()

    async def send():
        sent.set()
        bench.engine.tasks[1] = 8

    bench.spawn(stepping())
    await entered.wait()
    second = bench.spawn(bench.gate.alone(lease(2, slot=1), send))
    await bench.engine.looked()
    assert not sent.is_set()
    done.set()
    await second


async def test_pinned_ones_wait_until_it_is_known(bench):
    """And then find out where they are."""
    done, entered = asyncio.Event(), asyncio.Event()
    other = lease(2, slot=0)

    async def sent_but_not_launched():
        await done.wait()
        return "answer"

    async def pinned():
        async with bench.gate.beside(other):
            entered.set()
            return other.slots[0]

    first = bench.spawn(bench.gate.alone(lease(1, slot=1), sent_but_not_launched))
    await bench.engine.looked()
    second = bench.spawn(pinned())
    await bench.engine.looked()
    assert not entered.is_set()
    bench.engine.tasks[1] = 9
    assert await second == 0
    assert not first.done()  # its answer takes as long as it takes
    done.set()
    assert await first == "answer"


async def test_one_that_is_refused_took_no_slot(bench):
    """Its answer came, and no slot changed."""

    async def refused():
        return "400"

    assert await bench.gate.alone(lease(1), refused) == "400"
    assert bench.taken == []
    async with asyncio.timeout(5.0), bench.gate.beside(lease(2)):
        pass


async def test_one_whose_client_leaves_may_still_start(bench):
    """Its slot is looked for a while longer, and nothing else is sent until then."""
    never, entered = asyncio.Event(), asyncio.Event()
    one = lease(1, slot=0)
    first = bench.spawn(bench.gate.alone(one, sends(bench.engine, 0, done=never, task=None)))
    await bench.engine.looked()
    first.cancel()

    async def pinned():
        async with bench.gate.beside(lease(2)):
            entered.set()

    second = bench.spawn(pinned())
    bench.engine.tasks[1] = 5
    await second
    assert bench.taken == [(one, 1)]


async def test_one_that_never_starts_lets_others_pass_in_the_end(bench):
    """Its client left, and the engine had time to notice."""
    never = asyncio.Event()
    first = bench.spawn(bench.gate.alone(lease(1), sends(bench.engine, 0, done=never, task=None)))
    await bench.engine.looked()
    first.cancel()
    async with asyncio.timeout(5.0), bench.gate.beside(lease(2)):
        pass
    assert bench.taken == []


async def test_an_engine_that_is_gone_holds_nobody_up(bench):
    """Before it is sent, and after."""

    async def fails():
        bench.engine.gone = True
        raise EngineGoneError("gone")

    with pytest.raises(EngineGoneError):
        await bench.gate.alone(lease(1), fails)
    async with asyncio.timeout(5.0):
        with pytest.raises(EngineGoneError):
            await bench.gate.alone(lease(2), fails)
        async with bench.gate.beside(lease(3)):
            pass


async def test_two_without_a_pin_go_one_after_the_other(bench):
    """Else nobody could tell them apart."""
    done, order = asyncio.Event(), []

    async def first():
        order.append("first")
        await done.wait()

    async def second():
        order.append("second")

    one = bench.spawn(bench.gate.alone(lease(1), first))
    await bench.engine.looked()
    two = bench.spawn(bench.gate.alone(lease(2), second))
    await bench.engine.looked()
    assert order == ["first"]
    done.set()
    await asyncio.gather(one, two)
    assert order == ["first", "second"]
