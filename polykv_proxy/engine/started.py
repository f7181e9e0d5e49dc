"""A record of what an engine was started with, for a proxy that did not start it.

``polykv-proxy engine run`` writes it beside the engine's socket, and then becomes the engine. A proxy that
attaches to that socket reads it (``origin``).

Rule 1: it is believed of the process that answers, and of no other. The kernel says who listens at a socket;
that process must have the recorded id, start, boot and command line, every word of it.
Rule 2: only what our own user runs and wrote is believed: what it names is changed and deleted.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.engine.record import EngineRecord
from polykv_proxy.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from polykv_proxy.engine.launch import EngineSpec

VERSION = 1
"""Of the record."""

NOT_OURS = "the proxy did not start this engine, so it does not know where it saves"

Mark = tuple[int, int, int]
"""What tells whether a file is still the same: inode, bytes, nanoseconds of its last change."""


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``engine run`` writes down."""

    version: int = VERSION
    process: EngineRecord
    command: tuple[str, ...]
    """The engine's command line, binary included."""
    cwd: str
    model: str
    slot_dir: str
    files: dict[str, Mark]
    """What the engine may have read, by absolute path."""

    def disagrees(self, reported: Mapping[str, str]) -> str | None:
        """What of it is not what the engine says of itself, or None."""
        if reported.get("model_path") == self.model:
            return None
        return "the engine has loaded another model than the record beside its socket says"


def record_file(socket: Path) -> Path:
    """Where the record of the engine at a socket is."""
    return socket.with_name(f"{socket.name}.json")


def write(spec: EngineSpec, shards: Iterable[Path]) -> None:
    """Write down what this process is going to become.

    Args:
        spec: the engine.
        shards: all files of its model.

    Raises:
        EngineStartError: the folder of its socket does not take it.
    """
    file, cwd = record_file(spec.socket), Path.cwd()
    process = EngineRecord.take(os.getpid(), spec.socket)
    if process is None:
        raise EngineStartError("/proc does not show when this process started")
    try:
        record = StartRecord(
            process=process,
            command=(str(spec.binary), *spec.argv),
            cwd=str(cwd),
            model=str(spec.model),
            slot_dir=str(spec.slot_dir),
            files=marks_of([*map(str, shards), *spec.argv], cwd),
        )
        fresh = file.with_name(f"{file.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(record) + b"\n")
        fresh.replace(file)
    except OSError as error:
        raise EngineStartError(f"cannot write {file}: {error.strerror or error}") from None


def read(file: Path) -> StartRecord | str:
    """The record in a file, or why there is none to be believed (rule 2)."""
    try:
        with file.open("rb") as opened:
            owner = os.fstat(opened.fileno()).st_uid
            raw = opened.read()
    except OSError:
        return NOT_OURS
    if owner != os.geteuid():
        return "the record beside the engine's socket is another user's"
    try:
        record = msgspec.json.decode(raw, type=StartRecord)
    except msgspec.DecodeError:
        return "the record beside the engine's socket cannot be read"
    if record.version != VERSION:
        return f"the record beside the engine's socket is of version {record.version}, not {VERSION}"
    return record


def mark(found: os.stat_result) -> Mark:
    """See ``Mark``."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def marks_of(words: Iterable[str], cwd: Path) -> dict[str, Mark]:
    """All files that words name, also as ``a,b``, as ``--option=a`` and with a scale, as ``a:0.5``.

    More than the engine loads does no harm; what is left out will be believed nothing of.
    """
    found: dict[str, Mark] = {}
    for word in words:
        pieces = [*word.split(","), *word.partition("=")[2].split(",")]
        for piece in (word, *pieces, *(piece.rpartition(":")[0] for piece in pieces)):
            path = cwd / piece
            if piece and path.is_file():
                found[str(path)] = mark(path.stat())
    return found


# -- who it is of ----------------------------------------------------------------------------------------


def listener(path: Path) -> tuple[int, int] | None:
    """Process and user that listen at a Unix socket, as the kernel says; None if nobody does now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # of a Unix socket: it is connected at once, or not at all
        try:
            probe.connect(str(path))
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
