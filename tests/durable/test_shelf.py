"""Claims about ``durable.shelf``: catalogue and files stay in step, and nobody suffers from the disk."""

import asyncio
import errno
import threading

import pytest

from durable.files import engine_saves
from polykv_proxy.core.catalogue import Kind, PoolRecord, Reason, Retention
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.types import PoolId, Scope
from polykv_proxy.durable.saves import Label
from polykv_proxy.durable.shelf import Shelf
from polykv_proxy.durable.store import StoreError
from polykv_proxy.engine.disk import StuckError
from polykv_proxy.engine.wire import SlotFile
from polykv_proxy.errors import ConflictError, UnavailableError
from polykv_proxy.metrics import Metrics


class Bench:
    """A shelf, the engine that writes for it, and a clock."""

    def __init__(self, folder, *, patience_s=20.0, **limits):
        self.folder, self.now = folder, 1000.0
        limits = {"min_free_bytes": 0} | limits
        self.shelf = Shelf(
            folder,
            Retention(**limits),
            Metrics(ControlPlane(max_waiting=1)),
            lambda: self.now,
            patience_s=patience_s,
        )
        self.shelf.model_id, self.shelf.reason = "m", None

    async def save(self, tokens, key="me", fault=None, **more):
        """Save such a state; the engine may fail."""
        label = {"kind": Kind.SESSION, "key": key, "scope": Scope(""), "config": {}} | more

        async def write(name):
            if fault is not None:
                raise fault
            return SlotFile(len(tokens), engine_saves(self.folder, name, tokens))

        return await self.shelf.saves.save(Label(**label), len(tokens), write)

    async def delete(self, key, scope=None):
        """Delete a key's states; how many went."""
        entries = self.shelf.deletable(key, scope)
        if entries is None:
            return None
        going = self.shelf.delete(entries)
        for each in going:
            await each
        return len(going)

    @property
    def files(self):
        """What is in the folder."""
        return sorted(path.name for path in self.folder.iterdir())


async def test_what_is_saved_is_there_for_the_next_one(tmp_path):
    """With its use, and shown in the metrics."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))
    bench.now = 2000.0
    bench.shelf.used(entry)
    await bench.shelf.remember()
    again = Bench(tmp_path)
    assert await again.shelf.open() is None
    assert await again.shelf.open() is None
    (found,) = again.shelf.catalogue
    assert found.state == entry.state
    assert found.used_ts == 2000.0
    assert again.shelf.metrics.saved_bytes == entry.state.file_bytes
    assert bench.shelf.metrics.saves == {"saved": 1, "failed": 0, "late": 0}


async def test_the_next_state_takes_the_place_of_the_last(tmp_path):
    """One file and one sidecar."""
    bench = Bench(tmp_path)
    await bench.save(range(100))
    entry = await bench.save(range(200))
    assert list(bench.shelf.catalogue) == [entry]
    assert len(bench.files) == 2


@pytest.mark.parametrize("fault", [UnavailableError("Unable to save slot"), None])
async def test_a_save_that_fails_is_told_once_and_leaves_nothing(tmp_path, fault, caplog):
    """The engine's words are in the status; then it works again."""
    bench = Bench(tmp_path)
    old = await bench.save(range(50))
    if fault is None:
        bench.shelf.limits = Retention(max_bytes=0)
        bench.shelf.bytes_per_token = 10
    for _ in range(3):
        assert await bench.save(range(100), fault=fault) is None
    assert bench.shelf.metrics.saves["failed"] == 3
    assert bench.shelf.status()["last_error"]
    assert list(bench.shelf.catalogue) == [old]
    assert len(bench.files) == 2
    bench.shelf.limits = Retention(min_free_bytes=0)
    assert await bench.save(range(100)) is not None
    assert bench.shelf.status()["last_error"] is None


async def test_a_file_that_changed_is_gone(tmp_path):
    """And a tombstone says why."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))
    assert await bench.shelf.check(entry)
    (tmp_path / entry.state.file).write_bytes(b"x")
    assert not await bench.shelf.check(entry)
    assert bench.files == []
    assert bench.shelf.metrics.restores["refused"] == 1
    assert [each.reason for each in bench.shelf.catalogue.tombstones(None)] == [Reason.IDENTITY_CHANGED]


async def test_what_is_in_use_is_not_deleted(tmp_path):
    """None of the keys below it either."""
    bench = Bench(tmp_path)
    one, two = await bench.save(range(100), "run/a"), await bench.save(range(90), "run/b")
    assert await bench.delete("none") is None
    two.holds = 1
    with pytest.raises(ConflictError, match="in use"):
        await bench.delete("run")
    two.holds = 0
    bench.shelf.busy = lambda entry: entry is one
    with pytest.raises(ConflictError, match="in use"):
        await bench.delete("run")
    bench.shelf.busy = lambda _: False
    assert await bench.delete("run") == 2
    assert bench.files == []


async def test_saves_come_one_after_another(tmp_path):
    """Two of the same identity leave one, whole."""
    bench = Bench(tmp_path)
    await asyncio.gather(*(bench.save(range(100 + number)) for number in range(5)))
    (entry,) = bench.shelf.catalogue
    assert await bench.shelf.check(entry)
    assert len(bench.files) == 2


async def test_what_is_said_of_a_pool_changes(tmp_path):
    """On disk, too; where the disk refuses, the old holds."""
    bench = Bench(tmp_path)
    record = PoolRecord(pool_id=PoolId("p"), origin="explicit")
    entry = await bench.save(range(70), "p", kind=Kind.POOL, pool=record)
    pinned = PoolRecord(pool_id=PoolId("p"), origin="explicit", pinned=True)
    await bench.shelf.restate(entry, pinned)
    again = Bench(tmp_path)
    await again.shelf.open()
    assert next(iter(again.shelf.catalogue)).state.pool == pinned
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    await bench.shelf.restate(entry, record)
    assert entry.state.pool == pinned
    assert bench.shelf.last_error
    await bench.shelf.remove(entry, Reason.DELETED)
    await bench.shelf.restate(entry, record)
    tmp_path.mkdir()


async def test_a_folder_on_another_host_is_never_touched():
    """It says so."""
    shelf = Shelf(None, Retention(), Metrics(ControlPlane(max_waiting=1)), lambda: 0.0)
    assert await shelf.open() == "nobody knows where the engine saves"
    assert not shelf.on
    assert shelf.status()["state"] == "off"


async def test_where_the_engine_saves_may_be_found_out_later(tmp_path):
    """It is read once, then."""
    bench = Bench(tmp_path)
    await bench.save(range(100))
    shelf = Shelf(None, Retention(), Metrics(ControlPlane(max_waiting=1)), lambda: 0.0)
    for _ in range(2):
        assert await shelf.open(tmp_path) is None
    assert (len(shelf.catalogue), shelf.store.folder) == (1, tmp_path)


async def test_an_engine_that_ended_neither_saves_nor_restores(tmp_path):
    """Whoever knows says so, and it is the reason where there is no other."""
    shelf = Bench(tmp_path).shelf
    shelf.reason, ended = None, []
    shelf.gone = lambda: bool(ended)
    assert (shelf.on, shelf.status()["reason"]) == (True, None)
    ended.append(1)
    assert (shelf.on, shelf.status()["reason"]) == (False, "the engine has ended")


async def test_a_folder_that_cannot_be_read_says_why(tmp_path):
    """A file stands in its place."""
    path = tmp_path / "slots"
    path.write_bytes(b"")
    shelf = Shelf(path, Retention(), Metrics(ControlPlane(max_waiting=1)), lambda: 0.0)
    assert "exists" in await shelf.open()


async def test_a_file_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    """It is not restored, and nobody knows that it is wrong."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))

    def fails(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", fails)
        assert not await bench.shelf.check(entry)
    assert list(bench.shelf.catalogue) == [entry]
    assert bench.shelf.metrics.restores["failed"] == 1
    assert await bench.shelf.check(entry)


@pytest.mark.parametrize("how", ["delete", "sweep"])
async def test_what_is_being_replaced_does_not_go(tmp_path, how):
    """Old and new have one sidecar: deleting the old would be deleting the new."""
    reached, go_on = threading.Event(), threading.Event()
    bench = Bench(tmp_path)
    old = await bench.save(range(100))

    def step(name):
        if name == "sync_commit":
            reached.set()
            go_on.wait(10)

    bench.shelf.store._on_step = step
    saving = asyncio.create_task(bench.save(range(120)))
    await asyncio.to_thread(reached.wait)
    if how == "delete":
        with pytest.raises(ConflictError, match="in use"):
            await bench.delete("me")
    else:
        bench.shelf.limits = Retention(max_bytes=0, min_free_bytes=0)
        sweeping = asyncio.create_task(bench.shelf.sweeps.sweep(1.0, due=True))
        await asyncio.sleep(0.02)
        bench.shelf.limits = Retention(min_free_bytes=0)
    go_on.set()
    new = await saving
    assert how == "delete" or await sweeping == 0
    assert new is not old
    assert list(bench.shelf.catalogue) == [new]
    again = Bench(tmp_path)
    await again.shelf.open()
    assert [entry.state for entry in again.shelf.catalogue] == [new.state]


@pytest.mark.parametrize("how", ["save", "ineffective", "check"])
async def test_a_file_that_somebody_reads_is_there_until_he_is_done(tmp_path, how):
    """Whatever becomes of its state: saved anew, found to be of no use, or damaged."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))
    file = tmp_path / entry.state.file
    raw = file.read_bytes()
    async with bench.shelf.holding(entry):
        async with bench.shelf.holding(entry):
            if how == "save":
                await bench.save(range(120))
            elif how == "ineffective":
                assert await bench.shelf.remove(entry, Reason.INEFFECTIVE)
            else:
                file.write_bytes(raw[:-1])
                assert not await bench.shelf.check(entry)
                file.write_bytes(raw)
            assert not bench.shelf.catalogue.has(entry)
        assert file.read_bytes() == raw
        for reason in (Reason.SWEPT, Reason.DELETED):
            assert not await bench.shelf.remove(entry, reason)
        assert await bench.delete("none") is None
        bench.shelf.limits = Retention(max_bytes=0, min_free_bytes=0)
        await bench.shelf.sweeps.sweep(1.0, due=True)
        assert file.read_bytes() == raw
    assert not file.exists()
    again = Bench(tmp_path)
    await again.shelf.open()
    assert len(again.shelf.catalogue) == len(bench.shelf.catalogue)


async def test_who_only_looked_takes_nothing_away(tmp_path):
    """A state that is still there keeps its file."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))
    async with bench.shelf.holding(entry):
        pass
    assert await bench.shelf.check(entry)


async def test_why_a_state_is_gone_is_known_after_a_restart(tmp_path):
    """Also of one that was damaged while no proxy ran; nothing is written that is there already."""
    bench = Bench(tmp_path)
    await bench.shelf.open()
    swept, bent = await bench.save(range(100), "a"), await bench.save(range(100), "b")
    await bench.shelf.remove(swept, Reason.SWEPT)
    await bench.shelf.remember()
    (tmp_path / bent.state.file).write_bytes(b"x")
    for _ in range(2):
        again = Bench(tmp_path)
        await again.shelf.open()
        gone = again.shelf.catalogue.tombstones(None)
        assert [(each.key, each.reason) for each in gone] == [
            ("b", Reason.IDENTITY_CHANGED),
            ("a", Reason.SWEPT),
        ]
        assert gone[1].file == swept.state.file
        await again.shelf.remember()
    written = []
    again.shelf.store.keep_tombstones = lambda gone: written.append(list(gone)) or len(written) > 1
    await again.shelf.remember()
    assert written == []
    await again.save(range(50), "a")
    for _ in range(3):  # the disk refuses, takes it, has it
        await again.shelf.remember()
    assert [[each.key for each in one] for one in written] == [["b"], ["b"]]


async def test_a_save_does_not_begin_in_the_middle_of_a_removal(tmp_path):
    """Its sidecar would go with the old one's."""
    bench = Bench(tmp_path)
    old = await bench.save(range(100))
    reached, go_on, delete = threading.Event(), threading.Event(), bench.shelf.store.delete

    def slow(state, **more):
        reached.set()
        go_on.wait(0.2)
        delete(state, **more)

    bench.shelf.store.delete = slow
    going = asyncio.create_task(bench.shelf.remove(old, Reason.SWEPT))
    await asyncio.to_thread(reached.wait)
    new = await bench.save(range(120))
    go_on.set()
    assert await going
    assert await bench.shelf.check(new)
    assert len(bench.files) == 2


async def test_what_is_saved_for_the_first_time_is_in_use(tmp_path):
    """It cannot be deleted yet, and would be there afterwards."""
    bench = Bench(tmp_path)
    told = []

    async def write(name):
        with pytest.raises(ConflictError):
            await bench.delete("run")
        told.append(await bench.delete("run", Scope("other")))
        return SlotFile(100, engine_saves(tmp_path, name, range(100)))

    label = Label(kind=Kind.SESSION, key="run/a", scope=Scope(""), config={})
    assert await bench.shelf.saves.save(label, 100, write) is not None
    assert told == [None]
    assert await bench.delete("run") == 1


async def test_a_disk_that_hangs_is_told_and_nobody_waits_for_it(tmp_path):
    """In the status and a metric; when it answers again all goes on, and what it did meanwhile counts."""
    go_on = threading.Event()
    bench = Bench(tmp_path)
    shelf = bench.shelf
    old = await bench.save(range(100), "a")
    shelf.store._on_step = lambda _: go_on.wait(20)
    shelf.disk._patience_s = 0.05
    assert await bench.save(range(90), "b") is None  # on its way
    assert not shelf.on
    assert "did not answer" in shelf.status()["reason"]
    assert shelf.status()["state"] == "off"
    assert shelf.metrics.disk_stuck == 1
    assert not await shelf.check(old)
    with pytest.raises(StuckError):
        await shelf.remove(old, Reason.INEFFECTIVE)
    assert list(shelf.catalogue) == []
    async with shelf.holding(old):
        pass
    await shelf.restate(old, None)
    await shelf.remember()
    with pytest.raises(StuckError):
        await shelf.all_over()
    shelf.disk._patience_s = 20.0
    go_on.set()
    async with asyncio.timeout(20):
        while not shelf.on:
            await asyncio.sleep(0.01)
    await shelf.all_over()
    (entry,) = shelf.catalogue
    assert entry.state.key == "b"
    assert await shelf.check(entry)
    assert len(bench.files) == 2
    assert shelf.metrics.disk_stuck == 0
    assert shelf.status()["state"] == "on"


async def test_a_folder_that_does_not_answer_at_the_start_says_so(tmp_path):
    """Whoever waits for the engine does not wait for it."""
    bench, go_on = Bench(tmp_path, patience_s=0.05), threading.Event()
    bench.shelf.store.open = lambda: go_on.wait(20)
    assert "did not answer" in await bench.shelf.open()
    go_on.set()


@pytest.mark.parametrize("which", ["none", "new"])
async def test_a_deletion_is_one_step(tmp_path, which):
    """What is saved anew afterwards is another state, and its files stay; those deleted are gone."""
    bench = Bench(tmp_path)
    for key in ("run", "run/a"):
        await bench.save(range(100), key)
    entries = bench.shelf.deletable("run", None)
    going = bench.shelf.delete(entries)
    assert list(bench.shelf.catalogue) == []
    if which == "new":
        new = await bench.save(range(120), "run/a")
    for each in going:
        await each
    if which == "new":
        assert await bench.shelf.check(new)
    again = Bench(tmp_path)
    await again.shelf.open()
    assert [len(entry.tokens) for entry in again.shelf.catalogue] == ([120] if which == "new" else [])


async def test_a_deletion_that_the_disk_refuses_is_told(tmp_path):
    """It is found by nobody, and still there."""
    bench = Bench(tmp_path)
    entry = await bench.save(range(100))

    def refuses(*_, **__):
        raise StoreError("Read-only file system")

    bench.shelf.store.delete = refuses
    with pytest.raises(StoreError):
        await bench.delete("me")
    assert not bench.shelf.catalogue.has(entry)
    assert "Read-only" in bench.shelf.last_error
