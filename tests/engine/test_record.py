"""Recognising a process again."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from polykv_proxy.engine.record import EngineRecord, stop_recorded

SOCKET = Path("/run/engine-0.sock")


@pytest.fixture
def process():
    """A process with the socket on its command line, listening to its input when ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", SOCKET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


def test_record_survives_the_file(process, tmp_path):
    """Written and read, it is the same."""
    record = EngineRecord.take(process.pid, SOCKET)
    record.write(tmp_path / "engine.json")
    assert EngineRecord.read(tmp_path / "engine.json") == record
    assert [file.name for file in tmp_path.iterdir()] == ["engine.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": 1}', '{"pid": 1, "x": 2}'])
def test_file_that_makes_no_sense_is_no_record(tmp_path, text):
    """A half-written or foreign file must not keep a proxy from starting."""
    (tmp_path / "engine.json").write_text(text)
    assert EngineRecord.read(tmp_path / "engine.json") is None
    assert EngineRecord.read(tmp_path / "none.json") is None


def test_running_process_is_recognised(process):
    """All of id, start, boot and command line agree."""
    descriptor = EngineRecord.take(process.pid, SOCKET).open()
    assert descriptor is not None
    os.close(descriptor)


@pytest.mark.parametrize("change", [{"start_ticks": 7}, {"boot_id": "x"}, {"socket": "/run/engine-1.sock"}])
def test_any_difference_makes_it_another_process(process, change):
    """Then there is nothing to open, let alone to signal."""
    assert replace(EngineRecord.take(process.pid, SOCKET), **change).open() is None


async def test_process_that_ended_is_not_stopped(process):
    """Neither while it waits to be reaped nor afterwards."""
    record = EngineRecord.take(process.pid, SOCKET)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert await stop_recorded(record, 1) is False
    process.wait()
    assert EngineRecord.take(process.pid, SOCKET) is None
    assert await stop_recorded(record, 1) is False


async def test_recorded_process_is_stopped(process):
    """SIGTERM is enough for a process that obeys."""
    assert await asyncio.wait_for(stop_recorded(EngineRecord.take(process.pid, SOCKET), 60), 60)
    assert process.wait() == -15


def test_command_name_may_hold_anything(tmp_path):
    """The kernel puts it in parentheses and does not escape it."""
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(sys.executable)
    child = subprocess.Popen(
        [program, "-c", "input()"], stdin=subprocess.PIPE, env={"PYTHONHOME": sys.base_prefix}
    )
    try:
        assert EngineRecord.take(child.pid, SOCKET).start_ticks > 1
    finally:
        child.communicate(b"\n")
