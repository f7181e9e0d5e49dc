"""Claims about ``durable.saves``: who wants a save waits for the engine, and for no disk."""

import asyncio
import threading

import pytest

from durable.files import engine_saves
from durable.test_shelf import Bench
from polykv_proxy.core.catalogue import Kind, Reason
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.saves import MAX_COMING, Label
from polykv_proxy.engine.wire import SlotFile
from polykv_proxy.errors import UnavailableError


def label(key="me"):
    """What something is saved as."""
    return Label(kind=Kind.SESSION, key=key, scope=Scope(""), config={})


class Slow(Bench):
    """A shelf on a disk that hangs in ``commit`` until ``go_on`` is set."""

    def __init__(self, folder, **limits):
        super().__init__(folder, **limits)
        self.go_on, commit = threading.Event(), self.shelf.store.commit

        def slow(*args, **named):
            self.go_on.wait(20)
            return commit(*args, **named)

        self.shelf.store.commit = slow

    async def begin(self, tokens, key="me", **more):
        """Returns when the engine is done."""

        async def write(name):
            return SlotFile(len(tokens), engine_saves(self.folder, name, tokens))

        return await self.shelf.saves.begin(label(key), len(tokens), write, **more)


async def test_what_is_left_to_do_goes_on_by_itself(tmp_path):
    """In the order in which the files came: two of one identity leave the later one."""
    bench = Slow(tmp_path)
    told = []
    first = await bench.begin(range(100), owner="me", then=told.append)
    second = await bench.begin(range(120), owner="me")
    other = await bench.begin(range(80), "you")
    assert bench.shelf.saves.of("me") == [first, second]
    assert len(bench.shelf.saves) == 3
    assert list(bench.shelf.catalogue) == told == []
    bench.go_on.set()
    entries = [await each.over for each in (first, second, other)]
    assert told == entries[:1]
    assert list(bench.shelf.catalogue) == entries[1:]
    assert [await bench.shelf.check(entry) for entry in entries[1:]] == [True, True]
    assert len(bench.files) == 4
    assert len(bench.shelf.saves) == 0


async def test_a_disk_that_is_behind_is_not_given_more(tmp_path):
    """The engine does not even write."""
    bench = Slow(tmp_path)
    coming = [await bench.begin(range(100), f"k{number}") for number in range(MAX_COMING)]
    before = bench.files
    assert await bench.begin(range(100), "more") is None
    assert "behind" in bench.shelf.last_error
    assert bench.files == before
    bench.go_on.set()
    for each in coming:
        await each.over
    assert await bench.save(range(100), "more") is not None


async def test_what_nobody_wants_any_more_does_not_count(tmp_path):
    """Before it is its turn, or when it is over: nothing of it stays."""
    bench = Slow(tmp_path)
    first = await bench.begin(range(100), "a")
    second = await bench.begin(range(100), "b")
    await asyncio.sleep(0.02)  # the first is being made to count
    first.wanted = second.wanted = False
    bench.go_on.set()
    await first.over
    assert await second.over is None
    await bench.shelf.all_over()
    assert bench.files == []
    assert bench.shelf.metrics.saves["failed"] == 0
    assert {each.reason for each in bench.shelf.catalogue.tombstones(None)} == {Reason.DELETED}


async def test_whether_it_is_still_wanted_is_asked_when_it_is_its_turn(tmp_path):
    """Not before: who waits for the engine may be overtaken by a deletion."""
    bench, held = Slow(tmp_path), asyncio.Event()
    bench.go_on.set()

    async def write(name):
        await held.wait()
        return SlotFile(100, engine_saves(tmp_path, name, range(100)))

    first = asyncio.create_task(bench.shelf.saves.save(label("a"), 100, write))
    wanted = [True]
    second = asyncio.create_task(bench.begin(range(100), "b", still=lambda: wanted[0]))
    await asyncio.sleep(0.01)
    wanted[0] = False
    held.set()
    assert await second is None
    assert (await first).state.key == "a"
    assert len(bench.shelf.catalogue) == 1


async def test_a_save_that_the_engine_refuses_is_over_at_once(tmp_path):
    """Its file goes, and nobody waits for it."""
    bench, told = Bench(tmp_path), []

    async def write(name):
        engine_saves(tmp_path, name, range(100))
        raise UnavailableError("Unable to save slot")

    assert await bench.shelf.saves.begin(label(), 100, write, then=told.append) is None
    assert told == [None]
    await bench.shelf.disk.run(lambda: None)
    await asyncio.sleep(0.05)
    assert bench.files == []
    assert len(bench.shelf.saves) == 0


async def test_a_fault_of_ours_is_told(tmp_path):
    """And no later save waits for it."""
    bench = Bench(tmp_path)
    commit = bench.shelf.store.commit

    def fails(*_, **__):
        raise ValueError("a fault")

    bench.shelf.store.commit = fails
    assert await bench.save(range(100)) is None
    assert "a fault" in bench.shelf.last_error
    bench.shelf.store.commit = commit
    assert await bench.save(range(100)) is not None


@pytest.mark.parametrize("ours", [True, False])
async def test_who_saves_under_another_key_by_now_goes_on_there(tmp_path, ours):
    """What was on its way with the first key is of the same owner."""
    bench = Slow(tmp_path)
    bench.go_on.set()
    await bench.save(range(500, 600))
    bench.go_on.clear()
    owner = object()

    def then(entry):
        for later in bench.shelf.saves.of(owner):
            later.under(entry.state.key)

    more = {"owner": owner, "others": lambda _: False}
    first = await bench.begin(range(100), then=then, **more)
    second = await bench.begin(range(50, 150), **(more if ours else more | {"owner": None}))
    bench.go_on.set()
    assert [(await each.over).state.key for each in (first, second)] == ["me#2", "me#2" if ours else "me#3"]
    again = Bench(tmp_path)
    assert await again.shelf.open() is None
    assert sorted(entry.state.key for entry in again.shelf.catalogue) == sorted(
        entry.state.key for entry in bench.shelf.catalogue
    )


async def test_what_was_begun_before_a_failure_does_not_hide_it(tmp_path):
    """The next one that works does."""
    bench = Slow(tmp_path)
    first = await bench.begin(range(100), "a")
    assert await bench.save(range(100), "b", fault=UnavailableError("Unable to save slot")) is None
    bench.go_on.set()
    assert await first.over is not None
    await bench.shelf.all_over()
    assert bench.shelf.last_error == "Unable to save slot"
    assert await bench.save(range(100), "b") is not None
    assert bench.shelf.last_error is None
