"""Removing from the cache what ``build`` left there and nobody needs any more.

Rule 1: an engine stays if ``current`` names it, if the settings do, if a process runs from it, or if a proxy
has claimed it, which it does for as long as it runs, engine or not.
Rule 2: nothing is removed, and nothing is said to be removable, while a build runs: what it finds installed
it makes current.
Rule 3: an engine is moved aside in one step before its files go, so that no half of one is ever found. What
an interruption left aside goes the next time.
Rule 4: notes of flags that crash on this CPU stay: without them a build would try those again.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polykv_proxy.engine.download import storage_error
from polykv_proxy.engine.filelock import is_locked, try_lock
from polykv_proxy.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PROCESSES = Path("/proc")

_ENGINE = re.compile(r"[\w.]+-[0-9a-f]{12}")
_ASIDE = ".gone-"
_STAGE = ".stage"
_DELETED = " (deleted)"
"""What the kernel writes behind the path of a program whose file is gone."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that may go."""

    path: Path
    what: str
    """``engine``, ``log`` of a build, or ``remains`` of a build or removal that was cut short."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine that stays."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is in a cache."""

    leftovers: tuple[Leftover, ...]
    kept: tuple[Kept, ...]

    @property
    def size_bytes(self) -> int:
        """Of all leftovers."""
        return sum(each.size_bytes for each in self.leftovers)


def prune(cache: Path, named: Iterable[Path], *, remove: bool) -> Survey:
    """Look for what nobody needs, and remove it or not.

    Args:
        cache: root of the cache folder.
        named: binaries that the settings name.
        remove: whether it goes.

    Raises:
        BuildError: a build runs, or a file cannot be removed.
    """
    root = cache / "engine"
    if not root.is_dir():
        return Survey((), ())
    try:
        lock = try_lock(root / ".lock")
        if lock is None:
            raise BuildError("a build is running; prune when it has ended")
        try:
            found = _survey(root, named)
            for each in found.leftovers if remove else ():
                _remove(each)
        finally:
            os.close(lock)
    except OSError as error:
        raise storage_error(error, cache) from None
    return found


def _survey(root: Path, named: Iterable[Path]) -> Survey:
    why = _in_use(root, named)
    leftovers, kept = [], []
    engines = {each.name for each in root.iterdir() if _ENGINE.fullmatch(each.name) and _is_folder(each)}
    for path in sorted(root.iterdir()):
        if path.name in why and path.name in engines:
            kept.append(Kept(path, why[path.name]))
        elif path.name in engines:
            leftovers.append(Leftover(path, "engine", _size(path)))
        elif path.suffix == ".log" and _ENGINE.fullmatch(path.stem) and path.stem not in why:
            leftovers.append(Leftover(path, "log", _size(path)))
        elif path.name == _STAGE or path.name.startswith(_ASIDE):
            leftovers.append(Leftover(path, "remains", _size(path)))
    return Survey(tuple(leftovers), tuple(kept))


def _in_use(root: Path, named: Iterable[Path]) -> dict[str, str]:
    """Names of the engines that stay, and why (rule 1)."""
    found: dict[str, str] = {}
    homes = {each.resolve(): each.name for each in root.iterdir() if _is_folder(each)}

    def keep(program: Path, why: str) -> None:
        for above in program.parents:
            if above in homes:
                found.setdefault(homes[above], why)

    keep((root / "current").resolve() / "x", "it is the current one")
    for binary in named:
        keep(binary.resolve(), "the configuration names it")
    for pid, program in _programs():
        keep(program, f"process {pid} runs it")
    for home, name in homes.items():
        if any(is_locked(binary) for binary in (home / "bin").glob("*")):
            found.setdefault(name, "a proxy that runs has claimed it")
    return found


def _programs() -> Iterator[tuple[int, Path]]:
    """The programs that run on this machine, as far as this user may see; of others' what they call it."""
    for process in PROCESSES.iterdir():
        if not process.name.isdigit():
            continue
        try:
            program = str((process / "exe").readlink()).removesuffix(_DELETED)
        except OSError:
            try:
                program = os.fsdecode((process / "cmdline").read_bytes().partition(b"\0")[0])
            except OSError:
                continue  # it ended
        if program.startswith("/"):
            yield int(process.name), Path(program).resolve()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(path: Path) -> int:
    """Bytes of a file, or of all that is in a folder."""
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(each.lstat().st_size for each in ([path] if path.is_file() else inside))


def _remove(leftover: Leftover) -> None:
    path = leftover.path
    if path.is_file():
        path.unlink()
        return
    if leftover.what == "engine":
        path = path.rename(path.with_name(f"{_ASIDE}{path.name}"))
    shutil.rmtree(path)
