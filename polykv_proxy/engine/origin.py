"""What an engine was started with, as far as its KV on disk depends on that, and where it is known from.

Rule 1: the engine has in memory what its files were when it started. A file that is another by now, by its
inode, size or time, says nothing of that.
Rule 2: a doubt is a reason to save nothing. It is no error, and the engine is used all the same.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from polykv_proxy.engine import started
from polykv_proxy.engine.claims import store_lock
from polykv_proxy.engine.filelock import try_lock
from polykv_proxy.engine.record import command_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polykv_proxy.engine.started import Mark, StartRecord


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine was started with."""

    folder: Path
    """Where it saves."""
    model: Path | None
    """The model's file; None: nobody knows."""
    arguments: tuple[str, ...] = ()
    """Those that may change KV bytes are among them."""
    cwd: Path = Path()
    """Where relative paths of its begin."""
    marks: Mapping[str, Mark] | None = None
    """Its files as they were, by absolute path; None: they are read as soon as it has loaded them."""

    def file(self, path: Path | str) -> Path:
        """A path as the engine means it."""
        return self.cwd / path

    def changed(self, path: Path, found: os.stat_result) -> str | None:
        """Why a file cannot be taken for what the engine loaded (rule 1), or None."""
        if self.marks is None:
            return None
        before = self.marks.get(str(path))
        if before is None:
            return f"nobody noted what {path} was when the engine started"
        return None if before == started.mark(found) else f"{path} was changed since the engine started"


class Origin(Protocol):
    """Where it is known from what an engine was started with."""

    def find(self, reported: Mapping[str, str]) -> Start | str:
        """What it was, of the engine that answers now, or why nobody knows.

        Args:
            reported: what the engine says of itself.
        """

    def claim(self, folder: Path) -> str | None:
        """Keep the states in a folder to this process; returns why that cannot be, or None."""

    @property
    def folder(self) -> Path | None:
        """Where the engine saves, or None while that is not known."""

    @property
    def hopeful(self) -> bool:
        """Whether it may become known later."""

    @property
    def gone(self) -> bool:
        """Whether the engine that was found last has ended."""

    def close(self) -> None:
        """Give up what is held."""


class Fixed:
    """An engine that this process starts, and whose folders it has claimed.

    Args:
        start: how; None: it is another's, and nothing will be known of it.
    """

    hopeful = gone = False

    def __init__(self, start: Start | None) -> None:
        self._start = start
        self.folder = None if start is None else start.folder

    def find(self, reported: Mapping[str, str]) -> Start | str:  # noqa: ARG002
        """What the settings say."""
        return started.NOT_OURS if self._start is None else self._start

    def claim(self, folder: Path) -> str | None:  # noqa: ARG002
        """It has been claimed with the others."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class Recorded:
    """An engine that listens at a socket, with a record beside it or without.

    Args:
        socket: where it listens.
    """

    hopeful, folder = True, None

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._process: int | None = None
        """A pidfd of the engine that was found."""
        self._claimed: tuple[Path, int] | None = None
        """A folder, and what holds the claim."""

    def find(self, reported: Mapping[str, str]) -> Start | str:
        """See ``Origin``."""
        self._forget()
        record = started.read(started.record_file(self._socket))
        if isinstance(record, str):
            return record
        if (doubt := self._recognise(record) or record.disagrees(reported)) is not None:
            return doubt
        return Start(
            folder=Path(record.slot_dir),
            model=Path(record.model),
            arguments=record.command[1:],
            cwd=Path(record.cwd),
            marks=record.files,
        )

    def _recognise(self, record: StartRecord) -> str | None:
        """Keep hold of the process that answers; returns why the record may not be of it, or None."""
        who = started.listener(self._socket)
        if who is None:
            return "the engine's socket does not say who listens there"
        pid, uid = who
        if uid != os.geteuid():
            return "the engine runs as another user"
        if pid != record.process.pid:
            return (
                f"the record beside the engine's socket is of process {record.process.pid}, and {pid} answers"
            )
        self._process = record.process.open()
        if self._process is None:
            return f"the record beside the engine's socket is of an earlier process {pid}"
        if command_line(pid) != list(record.command):
            return "the engine's command line is not the one in the record beside its socket"
        return None

    def claim(self, folder: Path) -> str | None:
        """See ``Origin``; held until ``close``, whatever becomes of the engine."""
        if self._claimed is not None:
            before, _ = self._claimed
            if before == folder:
                return None
            return f"the engine saves in {folder} by now, and not in {before}: start the proxy again"
        try:
            claim = try_lock(store_lock(folder))
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if claim is None:
            return f"{folder}: another polykv-proxy works with what is saved there"
        self._claimed = folder, claim
        return None

    @property
    def gone(self) -> bool:
        """See ``Origin``."""
        if self._process is None:
            return False
        ended = select.poll()
        ended.register(self._process, select.POLLIN)  # a pidfd turns readable when its process ends
        return bool(ended.poll(0))

    def close(self) -> None:
        """See ``Origin``."""
        self._forget()
        if self._claimed is not None:
            os.close(self._claimed[1])
        self._claimed = None

    def _forget(self) -> None:
        if self._process is not None:
            os.close(self._process)
        self._process = None
