"""Claims about ``durable.offline``: saved states without a proxy."""

import errno
import os

import pytest

from durable.files import saved, state
from polykv_proxy.core.catalogue import Retention
from polykv_proxy.durable import offline
from polykv_proxy.durable.names import TOMBSTONES
from polykv_proxy.durable.store import Store
from polykv_proxy.engine.claims import store_lock
from polykv_proxy.engine.filelock import try_lock
from polykv_proxy.errors import ConflictError, UnavailableError


@pytest.fixture
def folder(tmp_path):
    """Two keys, one nested below the other."""
    store = Store(tmp_path / "slots-0")
    store.open()
    for key, length in (("run", 50), ("run/a", 80)):
        saved(store, state(range(length), key))
    (tmp_path / "slots-1").mkdir()
    return tmp_path / "slots-0"


def test_a_listing_of_all_engines(tmp_path, folder):
    """What was used last comes first."""
    newest = next(path for path in folder.glob("*.json") if b"run/a" in path.read_bytes())
    os.utime(newest, (4e9, 4e9))
    one, other = offline.folders(tmp_path)
    assert [row["key"] for row in one.listing()] == ["run/a", "run"]
    assert other.listing() == []
    table = offline.table(one.listing(), 4e9 + 7200)
    assert table.splitlines()[0].startswith("KEY")
    assert "2 h" in table


def test_engines_that_run_by_themselves_have_folders_of_their_own_below(tmp_path, folder):
    """As units do; what they claim keeps nobody out, what a proxy claims does."""
    store = Store(tmp_path / "unit-0" / "slots-0")
    store.open()
    saved(store, state(range(80), "run/b"))
    assert [len(each.listing()) for each in offline.folders(tmp_path)] == [2, 0, 1]
    engine = try_lock(tmp_path / "unit-0" / "engine-0.lock")
    assert offline.delete(offline.folders(tmp_path), "run/b", 5.0) == 1
    os.close(engine)


def test_what_is_wrong_is_said(folder):
    """Every byte is looked at."""
    assert offline.Folder(folder).wrong() == []
    file = next(folder.glob("*.bin"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + b"!")
    assert offline.Folder(folder).wrong() == [f"{file.name}: its digest is wrong"]
    file.write_bytes(raw[:-1])
    (problem,) = offline.Folder(folder).wrong()
    assert "not as long" in problem


def test_a_file_is_inspected_by_itself(tmp_path, folder):
    """Tokens are read from it; the sidecar adds whose it is."""
    file = next(path for path in folder.glob("*.bin") if len(path.read_bytes()) > 400)
    found = offline.inspect(file, all_tokens=False)
    assert (found["n_tokens"], found["version"], found["tokens"]) == (80, 4, list(range(8)))
    assert (found["key"], found["right"]) == ("run/a", True)
    alone = tmp_path / "alone.bin"
    alone.write_bytes(file.read_bytes())
    assert "key" not in offline.inspect(alone, all_tokens=True)
    assert offline.inspect(alone, all_tokens=True)["tokens"] == list(range(80))
    with pytest.raises(UnavailableError, match="no slot file"):
        offline.inspect(next(folder.glob("*.json")), all_tokens=False)


def test_pruning_keeps_what_may_stay(folder):
    """Litter goes in any case."""
    litter = folder / ("kv-" + "0" * 32 + "-" + "1" * 8 + ".tmp")
    litter.write_bytes(b"x")
    limits = Retention(min_free_bytes=0, max_idle_s=1e12)
    assert offline.Folder(folder).prune(limits, 200.0, everything=False) == (0, 0)
    assert not litter.exists()
    one = min(entry.state.file_bytes for entry in offline.Folder(folder).catalogue)
    limits = Retention(min_free_bytes=0, max_idle_s=1e12, max_bytes=one + 150)
    assert offline.Folder(folder).prune(limits, 200.0, everything=False)[0] == 1
    assert offline.Folder(folder).prune(limits, 200.0, everything=True)[0] == 1
    assert [path.name for path in folder.iterdir()] == [TOMBSTONES]


def test_deleting_takes_what_is_nested(folder):
    """And says how many."""
    assert offline.delete([offline.Folder(folder)], "none", 5.0) == 0
    assert offline.delete([offline.Folder(folder)], "run/a", 5.0) == 1
    assert offline.delete([offline.Folder(folder)], "run", 5.0) == 1
    assert [path.name for path in folder.iterdir()] == [TOMBSTONES]


def test_deleting_is_for_all_folders_or_none(tmp_path, folder):
    """A proxy works with one of them: the others keep what they have."""
    other = Store(tmp_path / "slots-1")
    other.open()
    saved(other, state(range(80), "run/a"))
    claim = try_lock(store_lock(tmp_path / "slots-1"))
    try:
        with pytest.raises(ConflictError, match="running proxy"):
            offline.delete(offline.folders(tmp_path), "run", 5.0)
    finally:
        os.close(claim)
    assert len(offline.Folder(folder).catalogue) == 2
    assert offline.delete(offline.folders(tmp_path), "run", 5.0) == 3


def test_why_a_file_is_gone_is_said(folder):
    """Also after it was removed without a proxy; of a file that nobody knew, nothing."""
    files = {entry.state.key: entry.state.file for entry in offline.Folder(folder).catalogue}
    offline.delete([offline.Folder(folder)], "run/a", 5.0)
    offline.Folder(folder).prune(Retention(), 7.0, everything=True)
    found = offline.inspect(folder / files["run/a"], all_tokens=False)
    assert (found["key"], found["n_tokens"], found["gone"], found["gone_ts"]) == ("run/a", 80, "deleted", 5.0)
    assert offline.inspect(folder / files["run"], all_tokens=False)["gone"] == "swept"
    with pytest.raises(UnavailableError, match="No such file"):
        offline.inspect(folder / "other.bin", all_tokens=False)


def test_a_proxy_at_work_is_not_interfered_with(tmp_path, folder):
    """Looking is allowed."""
    claim = try_lock(store_lock(folder))
    try:
        one = offline.Folder(folder)
        assert len(one.listing()) == 2
        for change in (
            lambda: offline.delete([one], "run", 5.0),
            lambda: one.prune(Retention(), 0.0, everything=True),
        ):
            with pytest.raises(ConflictError, match="running proxy"):
                change()
    finally:
        os.close(claim)
    assert len(offline.Folder(folder).listing()) == 2


def test_a_file_that_cannot_be_read_now_is_told_of(tmp_path, monkeypatch):
    """As one that is wrong."""
    one = saved(Store(tmp_path), state(range(50)))
    folder = offline.Folder(tmp_path)

    def fails(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(type(tmp_path), "open", fails)
    assert "Too many open files" in folder.wrong()[0]
    assert one.file in folder.wrong()[0]
