"""The slot files that pools are: their names, what they hold, and what is left of them on disk.

Rule 1: a file goes by its pool's number, so that what cannot be deleted is bounded: a new pool takes the
file of an old one.
Rule 2: nothing is touched that is not a pool's.
Rule 3: nobody waits for a disk that hangs: what cannot be looked at is not whole; the pool is computed.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polykv_proxy.engine.disk import PATIENCE_S, Disk, StuckError

if TYPE_CHECKING:
    from pathlib import Path

    from polykv_proxy.core.types import PoolNumber, Tokens

PREFIX = "polykv-pool-"


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """What is allowed for pools as slot files."""

    max_pools: int
    """Files at once."""
    folder: Path | None = None
    """Where the engine's files are, if that is on this host and ours to tidy."""


@dataclass(frozen=True, slots=True)
class PoolFile:
    """One pool's file."""

    name: str
    tokens: Tokens
    """What the pool offers; the file may hold more behind it."""
    file_bytes: int


class PoolFiles:
    """The files of one load of an engine.

    Args:
        limits: what is allowed.
    """

    def __init__(self, limits: CopyLimits) -> None:
        self._limits = limits
        self.disk = Disk(PATIENCE_S)
        self.load = secrets.token_hex(4)
        """Names this load: in file names, so that another's are never taken for its own."""
        self._files: dict[PoolNumber, PoolFile] = {}
        self._left: set[str] = set()
        """Files of pools that are gone, in a folder that is not ours."""

    @property
    def folder(self) -> Path | None:
        """See ``CopyLimits``."""
        return self._limits.folder

    def name(self, number: PoolNumber) -> str:
        """The file of that pool number."""
        return f"{PREFIX}{self.load}-{number}.bin"

    def get(self, number: PoolNumber | None) -> PoolFile | None:
        """What that pool is, if it is."""
        return None if number is None else self._files.get(number)

    def add(self, number: PoolNumber, file: PoolFile) -> None:
        """A pool was saved."""
        self._files[number] = file
        self._left.discard(file.name)

    async def remove(self, number: PoolNumber) -> None:
        """A pool is gone, or an attempt at one came to nothing; there may be no file."""
        file = self._files.pop(number, None)
        if file is not None or self.folder is not None:
            await self.delete(self.name(number))

    async def delete(self, name: str) -> None:
        """Delete a file, or note that it is left."""
        if self.folder is None:
            self._left.add(name)
            return
        with contextlib.suppress(FileNotFoundError, StuckError):  # what is begun goes on
            await self.disk.in_time(self.disk.begin(0, (self.folder / name).unlink))

    async def is_whole(self, file: PoolFile) -> bool:
        """Whether a file is as long as it was saved; always so where it cannot be looked at.

        The engine does not survive one that was cut.
        """
        if self.folder is None:
            return True
        try:
            found = await self.disk.run((self.folder / file.name).stat)
        except (OSError, StuckError):
            return False
        return found.st_size == file.file_bytes

    def inherit(self, before: PoolFiles) -> None:
        """Take over what an earlier load of the engine left on its disk."""
        if self.folder is None:
            self._left |= before._left | {file.name for file in before._files.values()}

    def tidy(self) -> None:
        """Delete the files of earlier loads, which are of no use."""
        if self.folder is None:
            return
        for path in self.folder.glob(f"{PREFIX}*.bin"):
            path.unlink(missing_ok=True)

    def listing(self) -> dict[str, Any]:
        """How much is on disk, and what could not be deleted."""
        return {
            "pool_files": len(self._files),
            "pool_files_max": self._limits.max_pools,
            "pool_file_bytes": sum(file.file_bytes for file in self._files.values()),
            "pool_files_left": sorted(self._left),
        }
