"""Claims about ``engine.disk``: who waits for a disk that hangs waits for a bounded time, and once."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from polykv_proxy.engine.disk import Disk, StuckError, progress


async def test_what_is_done_is_told():
    """Its result, or its error."""
    disk = Disk(20.0)
    assert await disk.run(lambda one, *, two: one + two, 1, two=2) == 3

    def fails():
        raise OSError(5, "I/O error")

    with pytest.raises(OSError, match="I/O error"):
        await disk.run(fails)
    assert disk.reason is None


async def test_nobody_waits_for_a_disk_that_hangs():
    """Who waits is told, who comes later is told at once, and the work goes on to its end."""
    told = []
    disk = Disk(0.05, on_change=lambda: told.append(disk.reason))
    go_on, begun = threading.Event(), []
    first, second = disk.begin(0, go_on.wait, 10), disk.begin(0, go_on.wait, 10)
    with pytest.raises(StuckError, match=r"within 0\.05 s"):
        await disk.in_time(first)
    with pytest.raises(StuckError):
        await disk.run(begun.append, 1)
    assert begun == []
    go_on.set()
    assert await first
    assert await second
    assert disk.reason is None
    assert told[0] is not None
    assert told[-1] is None
    await disk.run(begun.append, 1)
    assert begun == [1]


async def test_what_makes_progress_is_not_stuck():
    """However long it takes; nor what moves many bytes at once."""
    disk = Disk(0.5)

    def works():
        for _ in range(15):
            time.sleep(0.05)
            progress()
        return True

    assert await disk.run(works)
    assert await disk.in_time(disk.begin(10**9, lambda: time.sleep(0.8) or True))
    assert disk.reason is None
    progress()  # outside of such work it is nothing


async def test_who_leaves_does_not_end_the_work():
    """It is begun, and goes on."""
    disk, go_on = Disk(20.0), threading.Event()
    going = disk.begin(0, go_on.wait, 10)
    waiting = asyncio.create_task(disk.in_time(going))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await going


def test_the_end_of_the_process_waits_for_no_disk():
    """Neither the loop nor the interpreter does."""
    program = (
        "import asyncio, threading\n"
        "from polykv_proxy.engine.disk import Disk, StuckError\n"
        "async def main():\n"
        "    try:\n"
        "        await Disk(0.01).run(threading.Event().wait)\n"
        "    except StuckError as error:\n"
        "        print(error.message)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "did not answer" in ended.stdout
