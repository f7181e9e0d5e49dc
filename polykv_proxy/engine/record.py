"""Knowing an engine again after the proxy that started it was killed.

A process id alone proves nothing: it may belong to somebody else by now. A record therefore holds
the id, the start time in kernel ticks (which no change of the wall clock moves), the boot it was
taken in, and the socket, which must be a word of the process's command line. All must agree, and they
are compared while a pidfd pins the process, so that the signal cannot reach a later owner of the id.

The command line is read only at that later time: right after a start the kernel still shows it empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TIME_FIELD = 21 - 2
"""``starttime`` is field 22 of ``/proc/<pid>/stat``; counting starts after the command name."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What is written down about a running engine."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and start of the process."""
    boot_id: str
    socket: str
    """Where it listens, as on its command line."""

    @classmethod
    def take(cls, pid: int, socket: Path) -> EngineRecord | None:
        """Describe a running process; ``None`` where it is gone already."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return None
        # the command name in parentheses may hold anything, a closing one included
        fields = stat.rpartition(")")[2].split()
        return cls(pid, int(fields[_START_TIME_FIELD]), boot_id, str(socket))

    def write(self, file: Path) -> None:
        """Write the record so that a reader sees all of it or none."""
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        fresh.replace(file)

    @classmethod
    def read(cls, file: Path) -> EngineRecord | None:
        """The record of an earlier run; ``None`` where there is none or it makes no sense."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def open(self) -> int | None:
        """A pidfd of exactly the recorded process, to be closed by the caller; ``None`` if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        is_it = EngineRecord.take(self.pid, Path(self.socket)) == self
        if is_it and self.socket in command_line(self.pid):
            return descriptor
        os.close(descriptor)
        return None


def command_line(pid: int) -> list[str]:
    """The words that a process was started with; none if they cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words[:-1]]


async def stop_recorded(record: EngineRecord, deadline_s: float) -> bool:
    """Stop the recorded engine: one SIGTERM, then SIGKILL after ``deadline_s`` seconds.

    Returns:
        Whether it was still there.
    """
    descriptor = record.open()
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not await _exited(descriptor, deadline_s):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            await _exited(descriptor, None)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
    return True


async def _exited(descriptor: int, deadline_s: float | None) -> bool:
    """Whether the process of a pidfd ended in time; a pidfd turns readable when it does."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def wake() -> None:
        loop.remove_reader(descriptor)
        readable.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        async with asyncio.timeout(deadline_s):
            await readable
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True
