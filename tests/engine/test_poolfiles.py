"""Claims about ``engine.poolfiles``: what is a pool's is deleted, listed or used again, and nothing else."""

import asyncio
import threading

import pytest

from polykv_proxy.core.types import PoolNumber, as_tokens
from polykv_proxy.engine.poolfiles import CopyLimits, PoolFile, PoolFiles

ONE = PoolNumber(1)


def saved(files, folder, number=ONE):
    """A pool whose file is there."""
    name = files.name(number)
    (folder / name).write_bytes(b"kv")
    files.add(number, PoolFile(name, as_tokens([1, 2]), 20))
    return folder / name


async def test_what_is_ours_is_deleted(tmp_path):
    """Once and again; also what an attempt left under the number."""
    files = PoolFiles(CopyLimits(3, tmp_path))
    path = saved(files, tmp_path)
    assert files.get(ONE).tokens == as_tokens([1, 2])
    assert files.listing() == {
        "pool_files": 1,
        "pool_files_max": 3,
        "pool_file_bytes": 20,
        "pool_files_left": [],
    }
    for _ in range(2):
        await files.remove(ONE)
        assert not path.exists()
    path.write_bytes(b"half")
    await files.remove(ONE)
    assert not path.exists()
    assert files.get(ONE) is files.get(None) is None


async def test_what_is_not_ours_is_left_and_listed(tmp_path):
    """Until a new pool of that number takes it; the next load remembers what this one left."""
    files = PoolFiles(CopyLimits(3))
    path = saved(files, tmp_path)
    await files.remove(PoolNumber(2))  # there never was one
    assert files.listing()["pool_files_left"] == []
    await files.remove(ONE)
    assert path.exists()
    assert files.listing()["pool_files_left"] == [path.name]
    saved(files, tmp_path)
    assert files.listing()["pool_files_left"] == []
    later = PoolFiles(CopyLimits(3))
    later.inherit(files)
    later.tidy()
    assert later.listing()["pool_files_left"] == [path.name]
    assert later.name(ONE) != path.name


@pytest.mark.parametrize("name", ["session.bin", "polykv-pool-x", "polykv-other.bin"])
async def test_what_is_no_pools_is_not_touched(tmp_path, name):
    """Others keep files in that folder, too."""
    (tmp_path / name).write_bytes(b"")
    files = PoolFiles(CopyLimits(3, tmp_path))
    path = saved(files, tmp_path)
    PoolFiles(CopyLimits(3, tmp_path)).tidy()
    assert not path.exists()
    assert (tmp_path / name).exists()


async def test_a_file_that_was_cut_is_noticed(tmp_path):
    """The engine would not survive it; one on another host is as good as its word."""
    files = PoolFiles(CopyLimits(3, tmp_path))
    path = saved(files, tmp_path)
    path.write_bytes(b"x" * 20)
    assert await files.is_whole(files.get(ONE))
    path.write_bytes(b"x" * 10)
    assert not await files.is_whole(files.get(ONE))
    path.unlink()
    assert not await files.is_whole(files.get(ONE))
    elsewhere = PoolFiles(CopyLimits(3))
    assert await elsewhere.is_whole(files.get(ONE))


async def test_nobody_waits_for_a_disk_that_hangs(tmp_path):
    """What cannot be looked at is not whole; what is to be deleted is, when the disk answers."""
    files, go_on = PoolFiles(CopyLimits(3, tmp_path)), threading.Event()
    path = saved(files, tmp_path)
    files.disk._patience_s = 0.05
    hanging = files.disk.begin(0, go_on.wait, 20)
    while files.disk.reason is None:
        await asyncio.sleep(0.01)
    assert not await files.is_whole(files.get(ONE))
    await files.remove(ONE)
    go_on.set()
    await hanging
    async with asyncio.timeout(20):
        while path.exists():
            await asyncio.sleep(0.01)
