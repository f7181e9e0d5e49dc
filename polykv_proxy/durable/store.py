"""The files of saved states in one folder: how they come and go. Blocking; call it through ``Disk``.

Rule 1: the rename of the sidecar is the commit. Whatever happens before it leaves the old state, whatever
happens after it the new one: a ``.bin`` that no sidecar names is nobody's. When the file of the old one goes
is its readers' business.
Rule 2: nothing is touched that does not have a name of ours (``names``); nor what cannot be read now, which
says nothing of what it is (``found``).
Rule 3: files are as sensitive as the conversations in them: 0600, in a folder of 0700.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.durable import sidecar, tombstones
from polykv_proxy.durable.found import Scan, digest_of, look, tells, what_is_wrong
from polykv_proxy.durable.names import TOMBSTONES, final_name, is_ours, sidecar_name, stem, temporary_name
from polykv_proxy.engine import slotfile
from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from polykv_proxy.core.catalogue import Entry, SavedState, Tombstone
    from polykv_proxy.core.types import Tokens

log = structlog.get_logger(__name__)

STEPS = (
    "inspect",
    "digest",
    "sync_file",
    "rename_file",
    "sync_folder",
    "write_sidecar",
    "rename_sidecar",
    "sync_commit",
)
"""Of a commit, in order; each is announced before it is done."""

COMMIT_STEP = "rename_sidecar"
"""Before it is done the old state counts, from then on the new one."""


class StoreError(UnavailableError):
    """A state cannot be saved or is not what it should be; serving goes on without."""

    code = "slot_file"


class Store:
    """One folder.

    Args:
        folder: the engine's, on this host.
        on_step: called with the name of each step before it is done; for tests of crashes.
    """

    def __init__(self, folder: Path, on_step: Callable[[str], None] = lambda _: None) -> None:
        self.folder = folder
        self._on_step = on_step

    # -- what is there -----------------------------------------------------------------------------------

    def open(self) -> Scan:
        """All states that can be believed, and what was wrong with others.

        Those are removed, but for what could not be read (rule 2).

        Raises:
            StoreError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            names = self._names()
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        seen = look(self.folder, names)
        named = {one.state.file for one in seen.found} | {sidecar_name(one.state) for one in seen.found}
        for name in names:
            if name not in named and stem(name) not in seen.unread:
                self._remove(name)  # of a save that came to nothing, or what was damaged
        return seen

    def scan(self) -> Scan:
        """What can be believed, and what not; nothing is changed."""
        try:
            names = self._names()
        except OSError as error:
            return Scan(problems=[f"{self.folder}: {error.strerror}"])
        return look(self.folder, names)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if is_ours(path.name))

    def litter(self, known: AbstractSet[str], before_ts: float) -> int:
        """Remove slot files that nobody waits for any more; returns how many went.

        The engine may write one after whoever asked for it gave up.

        Args:
            known: names that are somebody's, or may be.
            before_ts: those that were changed later stay.

        Raises:
            StoreError: the folder cannot be read.
        """
        count = 0
        try:
            for name in self._names():
                if ".json" in name or name in known:
                    continue
                with suppress(FileNotFoundError):
                    if (self.folder / name).stat().st_mtime < before_ts:
                        (self.folder / name).unlink()
                        count += 1
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        return count

    def free_bytes(self) -> int | None:
        """Of the disk; None if that cannot be told."""
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

    # -- coming ------------------------------------------------------------------------------------------

    def tokens(self, name: str) -> Tokens:
        """What the engine saved under a name.

        Raises:
            UnavailableError: it cannot be read, or has no token ids.
        """
        return slotfile.read_file(self.folder / name)

    def rename(self, name: str, identity: tuple[str, ...]) -> str:
        """What the engine saved is of another identity; returns its new temporary name.

        Raises:
            StoreError: the disk refuses.
        """
        new = temporary_name(identity)
        try:
            (self.folder / name).rename(self.folder / new)
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        return new

    def commit(self, draft: SavedState, *, used_ts: float, uses: int = 0) -> SavedState:
        """Make what the engine saved count.

        Args:
            draft: the state; ``file`` is the temporary one, ``file_bytes`` and the number of ``tokens`` are
                what the engine said, and the tokens' values may be unknown.
            used_ts: epoch seconds.
            uses: so far.

        Raises:
            StoreError: it is not what the engine said, or the disk refuses; the old state counts. Where the
                disk refuses only what makes the rename of the sidecar last, the new one does, and the log
                tells: after a crash it may be the old one, whose file is gone, and then there is none.
        """
        temporary, final = self.folder / draft.file, final_name(draft.file)
        try:
            self._on_step("inspect")
            size = temporary.stat().st_size
            if size != draft.file_bytes:
                raise StoreError(f"the engine saved {size} bytes and said {draft.file_bytes}")
            if (version := slotfile.read_version(temporary)) != slotfile.STATE_VERSION:
                raise StoreError(f"a slot file of version {version}, not {slotfile.STATE_VERSION}")
            tokens = slotfile.read_file(temporary)
            if len(tokens) != len(draft.tokens):
                raise StoreError(f"the engine saved {len(tokens)} tokens and said {len(draft.tokens)}")
            self._on_step("digest")
            state = replace(draft, tokens=tokens, file=final, file_digest=digest_of(temporary))
            self._on_step("sync_file")
            temporary.chmod(0o600)
            _sync(temporary)
            self._on_step("rename_file")
            temporary.rename(self.folder / final)
            self._on_step("sync_folder")
            _sync(self.folder)
            self._put_sidecar(state, used_ts=used_ts, uses=uses)
        except OSError as error:
            self._remove(draft.file, final, f"{sidecar_name(draft)}.tmp")
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        except UnavailableError:
            self._remove(draft.file)
            raise
        return state

    def _put_sidecar(self, state: SavedState, *, used_ts: float, uses: int) -> None:
        name = sidecar_name(state)
        self._on_step("write_sidecar")
        temporary = self._written(f"{name}.tmp", sidecar.write(state, used_ts=used_ts, uses=uses))
        os.utime(temporary, (used_ts, used_ts))  # being written is no use, see ``touch``
        self._on_step("rename_sidecar")
        temporary.rename(self.folder / name)
        try:
            self._on_step("sync_commit")
            _sync(self.folder)
        except OSError as error:  # it counts by now (rule 1)
            log.warning("sidecar_not_synced", file=name, reason=error.strerror)

    def _written(self, name: str, raw: bytes) -> Path:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(raw)
        _sync(path)
        return path

    def restate(self, state: SavedState, *, used_ts: float, uses: int) -> None:
        """Write the sidecar of a saved state anew: what is said of it changed, not its KV.

        Raises:
            StoreError: the disk refuses.
        """
        try:
            self._put_sidecar(state, used_ts=used_ts, uses=uses)
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None

    def discard(self, name: str) -> None:
        """Delete what the engine saved and nobody wants, or reads any more."""
        if is_ours(name):
            self._remove(name)

    # -- use and end -------------------------------------------------------------------------------------

    def check(self, state: SavedState) -> str | None:
        """What is wrong with a state's file, by its size, tokens and digest; None if nothing is.

        Raises:
            StoreError: it cannot be read now, which says nothing of what it is (rule 2).
        """
        try:
            return what_is_wrong(self.folder / state.file, state)
        except (OSError, UnavailableError) as error:
            reason = str(error.strerror) if isinstance(error, OSError) else error.message
            if tells(error):
                return reason
            raise StoreError(f"{state.file}: {reason}") from None

    def touch(self, *entries: Entry) -> None:
        """Note on disk when they were last used."""
        for entry in entries:
            with suppress(OSError):
                os.utime(self.folder / sidecar_name(entry.state), (entry.used_ts, entry.used_ts))

    def delete(self, state: SavedState, *, read: bool = False, replaced: bool = False) -> None:
        """A state goes; its sidecar first.

        Args:
            state: which.
            read: whether somebody reads its file, which stays then.
            replaced: whether its sidecar is another's by now, and stays.

        Raises:
            StoreError: it is still there.
        """
        names = (() if replaced else (sidecar_name(state),)) + (() if read else (state.file,))
        try:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None

    # -- what went ---------------------------------------------------------------------------------------

    def tombstones(self) -> list[Tombstone]:
        """Why states are gone, the latest last; what cannot be read, or was changed, tells nothing."""
        try:
            return tombstones.read((self.folder / TOMBSTONES).read_bytes())
        except (OSError, tombstones.BadTombstonesError):
            return []

    def keep_tombstones(self, gone: Iterable[Tombstone]) -> bool:
        """Write them, the latest last; returns whether the disk took them."""
        try:
            self._written(f"{TOMBSTONES}.tmp", tombstones.write(gone)).rename(self.folder / TOMBSTONES)
        except OSError:
            return False
        return True

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
