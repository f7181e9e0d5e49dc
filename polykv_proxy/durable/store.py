"""The files of saved states: how they come, are checked, and go. Blocking; call it through ``Disk``.

::

    kv-<identity>-<generation>.tmp     what the engine writes
    kv-<identity>-<generation>.bin     the same, checked and on disk
    kv-<identity>.json                 the sidecar: names the .bin that counts
    tombstones.json                    why states are gone

Rule 1: the rename of the sidecar is the commit. Whatever happens before it leaves the old state, whatever
happens after it the new one: a ``.bin`` that no sidecar names is nobody's. Each save has a name of its own,
so that whoever reads the old one has it to the end: when that goes is its readers' business.
Rule 2: a state is believed only after its sidecar's checksum, the size, the tokens and the digest of its file
agree; the last before every use. The engine does not survive a file that was cut.
Rule 3: nothing is touched that does not have a name of ours; nor what cannot be read now, which says nothing
of what it is.
Rule 4: files are as sensitive as the conversations in them: 0600, in a folder of 0700.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import structlog
from xxhash import xxh3_128

from polykv_proxy.durable import sidecar, tombstones
from polykv_proxy.durable.identity import canonical
from polykv_proxy.engine import slotfile
from polykv_proxy.engine.disk import progress
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

TOMBSTONES = "tombstones.json"

_OURS = re.compile(r"^kv-[0-9a-f]{32}(?:-[0-9a-f]{8}\.(?:bin|tmp)|\.json(?:\.tmp)?)$")
_CHUNK = 1 << 20


class StoreError(UnavailableError):
    """A state cannot be saved or is not what it should be; serving goes on without."""

    code = "slot_file"


@dataclass(frozen=True, slots=True)
class Found:
    """A saved state that was found on disk."""

    state: SavedState
    used_ts: float
    uses: int


@dataclass(slots=True)
class Scan:
    """What a folder holds."""

    found: list[Found] = field(default_factory=list)
    """What can be believed, the oldest first."""
    problems: list[str] = field(default_factory=list)
    """What was wrong with the rest, a line each."""
    wrong: list[sidecar.Sidecar] = field(default_factory=list)
    """Of the rest: what is known of those whose files are not as they were."""
    unread: set[str] = field(default_factory=set)
    """Of the rest: what the names of those begin with that could not be read now."""


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

        Those are removed, but for what could not be read (rule 3).

        Raises:
            StoreError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            names = self._names()
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror}") from None
        seen = self._scan(names)
        named = {one.state.file for one in seen.found} | {sidecar_name(one.state) for one in seen.found}
        for name in names:
            if name not in named and _stem(name) not in seen.unread:
                self._remove(name)  # of a save that came to nothing, or what was damaged
        return seen

    def scan(self) -> Scan:
        """What can be believed, and what not; nothing is changed."""
        try:
            names = self._names()
        except OSError as error:
            return Scan(problems=[f"{self.folder}: {error.strerror}"])
        return self._scan(names)

    def _scan(self, names: list[str]) -> Scan:
        seen = Scan()
        for name in names:
            if not name.endswith(".json"):
                continue
            progress()
            try:
                seen.found.append(self.read(name))
            except (OSError, sidecar.BadSidecarError, UnavailableError) as error:
                seen.problems.append(f"{name}: {error}")
                if not _is_wrong(error):
                    seen.unread.add(_stem(name))
                elif (told := self._told(name)) is not None:
                    seen.wrong.append(told)
        seen.found.sort(key=lambda one: one.state.created_ts)
        return seen

    def _told(self, name: str) -> sidecar.Sidecar | None:
        """What a sidecar says of a state that is not there, or not as it was."""
        try:
            return sidecar.read((self.folder / name).read_bytes())
        except (OSError, sidecar.BadSidecarError):
            return None

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if _OURS.match(path.name))

    def read(self, name: str) -> Found:
        """The state of one sidecar; all is checked but its file's digest.

        Raises:
            OSError, BadSidecarError, UnavailableError: it is not to be believed.
        """
        path = self.folder / name
        document = sidecar.read(path.read_bytes())
        if not _OURS.match(document.file):
            raise sidecar.BadSidecarError("it names a file that is not ours")
        file = self.folder / document.file
        if file.stat().st_size != document.file_bytes:
            raise sidecar.BadSidecarError(f"{document.file} is not as long as it was saved")
        state = sidecar.state_of(document, _tokens(file))
        if sidecar_name(state) != name:
            raise sidecar.BadSidecarError("it belongs under another name")
        return Found(state, max(document.used_ts, path.stat().st_mtime), document.uses)

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

    @staticmethod
    def temporary(identity: tuple[str, ...]) -> str:
        """A name for the engine to save under."""
        return f"kv-{_hash(identity)}-{secrets.token_hex(4)}.tmp"

    @staticmethod
    def is_named(name: str, identity: tuple[str, ...]) -> bool:
        """Whether a file has a name of an identity."""
        return name.startswith(f"kv-{_hash(identity)}-")

    def tokens(self, name: str) -> Tokens:
        """What the engine saved under a name.

        Raises:
            UnavailableError: it cannot be read, or has no token ids.
        """
        return _tokens(self.folder / name)

    def rename(self, name: str, identity: tuple[str, ...]) -> str:
        """What the engine saved is of another identity; returns its new temporary name.

        Raises:
            StoreError: the disk refuses.
        """
        new = self.temporary(identity)
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
        temporary, final = self.folder / draft.file, draft.file.removesuffix(".tmp") + ".bin"
        try:
            self._on_step("inspect")
            size = temporary.stat().st_size
            if size != draft.file_bytes:
                raise StoreError(f"the engine saved {size} bytes and said {draft.file_bytes}")
            if (version := slotfile.read_version(temporary)) != slotfile.STATE_VERSION:
                raise StoreError(f"a slot file of version {version}, not {slotfile.STATE_VERSION}")
            tokens = _tokens(temporary)
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
        if _OURS.match(name):
            self._remove(name)

    # -- use and end -------------------------------------------------------------------------------------

    def check(self, state: SavedState) -> str | None:
        """What is wrong with a state's file, by its size, tokens and digest; None if nothing is.

        Raises:
            StoreError: it cannot be read now, which says nothing of what it is (rule 3).
        """
        try:
            return _wrong(self.folder / state.file, state)
        except (OSError, UnavailableError) as error:
            reason = str(error.strerror) if isinstance(error, OSError) else error.message
            if _is_wrong(error):
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


def sidecar_name(state: SavedState) -> str:
    """File name of a state's sidecar: the same for all that take each other's place."""
    return f"kv-{_hash(state.identity)}.json"


def digest_of(file: Path) -> str:
    """xxh3 of a whole file: against damage, at the speed of the disk.

    Raises:
        OSError: it cannot be read.
    """
    state = xxh3_128()
    with file.open("rb") as data:
        while chunk := data.read(_CHUNK):
            state.update(chunk)
            progress()
    return state.hexdigest()


def _is_wrong(error: Exception) -> bool:
    """Whether an error tells that a state is not what it should be, or only that nobody could look."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError)
    return not isinstance(error, slotfile.UnreadableError)


def _stem(name: str) -> str:
    """What the names of all files of one identity begin with."""
    return name[: len("kv-") + 32]


def _wrong(file: Path, state: SavedState) -> str | None:
    if file.stat().st_size != state.file_bytes:
        return "it is not as long as it was saved"
    if slotfile.read_version(file) != slotfile.STATE_VERSION:
        return "it has another version"
    if _tokens(file) != state.tokens:
        return "it holds other tokens"
    return None if digest_of(file) == state.file_digest else "its digest is wrong"


def _hash(identity: tuple[str, ...]) -> str:
    return sha256(canonical(list(identity))).hexdigest()[:32]


def _tokens(file: Path) -> Tokens:
    return slotfile.read_file(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
