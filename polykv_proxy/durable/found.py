"""Saved states as they are found on disk: which of them can be believed. Blocking; call it through ``Disk``.

Rule 1: a state is believed only after its sidecar's checksum, the size, the tokens and the digest of its file
agree; the last before every use. The engine does not survive a file that was cut.
Rule 2: what cannot be read now says nothing of what it is.
Rule 3: looking changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from polykv_proxy.durable import sidecar
from polykv_proxy.durable.names import is_ours, sidecar_name, stem
from polykv_proxy.engine import slotfile
from polykv_proxy.engine.disk import progress
from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from polykv_proxy.core.catalogue import SavedState

_CHUNK = 1 << 20


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


def look(folder: Path, names: Iterable[str]) -> Scan:
    """What can be believed of the files of these names, and what not.

    Args:
        folder: where they are.
        names: all of ours that are there.
    """
    seen = Scan()
    for name in names:
        if not name.endswith(".json"):
            continue
        progress()
        try:
            seen.found.append(read(folder, name))
        except (OSError, sidecar.BadSidecarError, UnavailableError) as error:
            seen.problems.append(f"{name}: {error}")
            if not tells(error):
                seen.unread.add(stem(name))
            elif (told := _told(folder / name)) is not None:
                seen.wrong.append(told)
    seen.found.sort(key=lambda one: one.state.created_ts)
    return seen


def _told(path: Path) -> sidecar.Sidecar | None:
    """What a sidecar says of a state that is not there, or not as it was."""
    try:
        return sidecar.read(path.read_bytes())
    except (OSError, sidecar.BadSidecarError):
        return None


def read(folder: Path, name: str) -> Found:
    """The state of one sidecar; all is checked but its file's digest.

    Raises:
        OSError, BadSidecarError, UnavailableError: it is not to be believed.
    """
    path = folder / name
    document = sidecar.read(path.read_bytes())
    if not is_ours(document.file):
        raise sidecar.BadSidecarError("it names a file that is not ours")
    file = folder / document.file
    if file.stat().st_size != document.file_bytes:
        raise sidecar.BadSidecarError(f"{document.file} is not as long as it was saved")
    state = sidecar.state_of(document, slotfile.read_file(file))
    if sidecar_name(state) != name:
        raise sidecar.BadSidecarError("it belongs under another name")
    return Found(state, max(document.used_ts, path.stat().st_mtime), document.uses)


def what_is_wrong(file: Path, state: SavedState) -> str | None:
    """What is wrong with a state's file, by its size, tokens and digest; None if nothing is.

    Raises:
        OSError, UnavailableError: it cannot be read; see ``tells``.
    """
    if file.stat().st_size != state.file_bytes:
        return "it is not as long as it was saved"
    if slotfile.read_version(file) != slotfile.STATE_VERSION:
        return "it has another version"
    if slotfile.read_file(file) != state.tokens:
        return "it holds other tokens"
    return None if digest_of(file) == state.file_digest else "its digest is wrong"


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


def tells(error: Exception) -> bool:
    """Whether an error says that a state is not what it should be; else nobody could look (rule 2)."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError)
    return not isinstance(error, slotfile.UnreadableError)
