"""Claims about ``durable.sweeps``: what there is no room for goes, and nothing that somebody works with."""

import time

from durable.files import engine_saves
from durable.test_shelf import Bench
from polykv_proxy.core.catalogue import Kind, Reason, Retention
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.names import temporary_name
from polykv_proxy.durable.saves import Label
from polykv_proxy.durable.sweeps import LITTER_S, SWEEP_S
from polykv_proxy.engine.wire import SlotFile


async def test_a_disk_without_room_is_not_written_to(tmp_path):
    """And the next round sweeps."""
    bench = Bench(tmp_path, min_free_bytes=0)
    await bench.save(range(50))
    assert await bench.shelf.sweeps.sweep(10.0) == 0
    bench.shelf.limits = Retention(min_free_bytes=1 << 60)
    assert await bench.save(range(100), "you") is None
    assert "stay free" in bench.shelf.last_error
    assert await bench.shelf.sweeps.sweep(11.0) == 1
    assert bench.files == []
    assert [each.reason for each in bench.shelf.catalogue.tombstones(None)] == [Reason.SWEPT]


async def test_a_sweep_waits_for_its_time(tmp_path):
    """Unless it is due."""
    bench = Bench(tmp_path, max_bytes=1000)
    assert await bench.shelf.sweeps.sweep(5.0) == 0
    for key in ("a", "b", "c"):
        await bench.save(range(100), key)
    assert await bench.shelf.sweeps.sweep(5.0 + SWEEP_S / 2) == 0
    assert await bench.shelf.sweeps.sweep(5.0 + SWEEP_S) == 2
    await bench.save(range(100), "d")
    assert await bench.shelf.sweeps.sweep(6.0 + SWEEP_S, due=True) == 1


async def test_what_the_engine_wrote_for_nobody_goes_and_is_counted(tmp_path):
    """A call that was given up before it was done; not what is on its way, known, or being read."""
    bench = Bench(tmp_path, max_idle_s=1e12)
    entry, gone = await bench.save(range(100), "a"), await bench.save(range(100), "b")
    late = temporary_name(("session", "late"))
    engine_saves(tmp_path, late, range(70))

    async def write(name):
        size = engine_saves(tmp_path, name, range(90))
        bench.now = time.time() + LITTER_S + 60.0
        async with bench.shelf.holding(gone):
            going = bench.shelf.take_out(gone, Reason.INEFFECTIVE)
            await going
            assert await bench.shelf.sweeps.sweep(5.0, due=True) == 0
            assert (tmp_path / gone.state.file).exists()
        return SlotFile(90, size)

    label = Label(kind=Kind.SESSION, key="c", scope=Scope(""), config={})
    assert await bench.shelf.saves.save(label, 90, write) is not None
    assert await bench.shelf.check(entry)
    assert late not in bench.files
    assert len(bench.files) == 4
    assert bench.shelf.metrics.saves["late"] == 1


async def test_near_the_floor_of_the_disk_room_is_made_for_what_came(tmp_path):
    """The disk has enough, and not for that as well; who still finds none waits for the next sweep."""
    bench = Bench(tmp_path, min_free_bytes=900)
    bench.shelf.store.free_bytes = lambda: 1000
    for key in ("a", "b", "c", "d"):
        await bench.save(range(100), key)
    assert await bench.shelf.sweeps.sweep(10.0) == 0
    bench.shelf.bytes_per_token = 2
    assert await bench.save(range(100), "you") is None
    assert await bench.shelf.sweeps.sweep(11.0) == 1
    assert await bench.save(range(100), "you") is None
    assert await bench.shelf.sweeps.sweep(12.0) == 0
    assert await bench.shelf.sweeps.sweep(11.0 + SWEEP_S) == 1
    assert await bench.shelf.sweeps.sweep(11.0 + 2 * SWEEP_S) == 0  # nobody wanted any since
