"""Building the patched engine and keeping it: ``<cache>/engine/<tag>-<key>/bin/llama-server``.

The key is a digest of everything that shapes the binary: pin or checkout, patches, CMake options.
Rules:

1. An installed folder is complete and has run. Everything happens in a stage folder beside it; the
   rename is the last step, so that no failure, full disk or interruption leaves half an engine.
2. One build at a time per cache; a lock holds the others, and what they waited for is then found.
3. The stock server is built first from the same tree and kept beside the patched one. It is the
   reference that the disabled path is compared with, and only the patched files compile twice.
4. CPU flags are a guess until the binary has run (see ``toolchain``): one that crashes is noted under
   its key, never tried again, and the next safer set is built.

``current`` names the engine that was built or asked for last.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from polykv_proxy.engine import model
from polykv_proxy.engine.download import NEXT_STEP_DISK, storage_error
from polykv_proxy.engine.filelock import locked
from polykv_proxy.engine.progress import Progress
from polykv_proxy.engine.prove import EngineCrashedError, prove
from polykv_proxy.engine.shell import run_logged
from polykv_proxy.engine.source import apply_series, copy_checkout, read_series, tree_digest, unpack
from polykv_proxy.engine.toolchain import FlagSet, Toolchain, find_toolchain, flag_sets
from polykv_proxy.errors import BuildError

if TYPE_CHECKING:
    from polykv_proxy.engine.source import Series

MIN_FREE_BYTES = 2 * 1024**3
"""Free disk below which no build is begun; source, objects and two binaries need most of it."""
SERVER = "llama-server"
STOCK = "llama-server-stock"

_RECIPE = "1"
"""Part of the key; changes when this file would build something else from the same inputs."""
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DGGML_NATIVE=OFF",
    # the tree is no git checkout, and an enclosing repository must not be taken for it
    "-DLLAMA_BUILD_COMMIT=pinned",
)
_NINJA_COUNT = re.compile(r"^\[(\d+)/(\d+)\] ")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build."""

    cache: Path
    """Root of the cache folder."""
    source: Path | None = None
    """A llama.cpp checkout to build from instead of the pinned archive; it is copied."""
    jobs: int | None = None
    """Compilations at the same time; as many as CPUs by default."""
    cmake_args: tuple[str, ...] = ()
    """Appended to ours, so that the user has the last word."""
    check: bool = True
    """Whether the binary must run here before it is installed; off to build for another machine."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An installed engine."""

    home: Path
    manifest: Manifest

    @property
    def binary(self) -> Path:
        """The patched llama-server."""
        return self.home / "bin" / SERVER

    @property
    def stock(self) -> Path:
        """llama-server as upstream made it, built with the same flags."""
        return self.home / "bin" / STOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an installed engine was made of; ``manifest.json`` in its folder."""

    tag: str
    series: str
    """Digest of pin and patches."""
    source: str | None
    """The checkout it was built from, if not the pinned archive."""
    flags: str
    """Name of the CPU flag set."""
    cmake_args: tuple[str, ...]
    checked: bool


def installed(cache: Path) -> Engine:
    """The engine that ``current`` names.

    Raises:
        BuildError: none is installed, or it was made from other patches than this package carries.
    """
    engine = _read_engine(cache / "engine" / "current")
    if engine is None:
        raise BuildError("no engine is installed; build it with `polykv-proxy engine build`")
    if engine.manifest.series != read_series().digest:
        raise BuildError(
            "the installed engine does not belong to this version; run `polykv-proxy engine build` again"
        )
    return engine


def ensure(cache: Path, progress: Progress | None = None) -> Engine:
    """The installed engine, built first where it is missing or from another version.

    Raises:
        BuildError: as :func:`build`.
    """
    request = BuildRequest(cache=cache)
    engine = _read_engine(cache / "engine" / "current")
    if engine is not None:
        if engine.manifest.series == read_series().digest:
            return engine
        # an upgrade keeps the user's back end
        request = replace(request, cmake_args=engine.manifest.cmake_args)
    return build(request, progress)


def build(request: BuildRequest, progress: Progress | None = None) -> Engine:
    """Build what is asked for, or find it built.

    Raises:
        BuildError: one line that says what is wrong; nothing was installed.
    """
    progress = progress or Progress()
    series = read_series()
    plan = _Plan(request, series, progress)
    try:
        engine = plan.find()
        if engine is None or engine != _read_engine(plan.root / "current"):
            plan.root.mkdir(parents=True, exist_ok=True)
            waiting = "another build is running; waiting for it to end"
            with locked(plan.root / ".lock", lambda: progress.note(waiting)):
                engine = plan.find() or plan.make()
                _point_current_at(engine)
    except OSError as error:
        raise storage_error(error, request.cache) from None
    except KeyboardInterrupt:
        progress.end()
        raise BuildError("interrupted; nothing was installed") from None
    return engine


class _Plan:
    """One request with its candidates: the same source and options under each CPU flag set."""

    def __init__(self, request: BuildRequest, series: Series, progress: Progress) -> None:
        self.root = request.cache / "engine"
        self.request = request
        self.series = series
        self.progress = progress
        identity = "pinned" if request.source is None else tree_digest(request.source)
        shaped_by = (_RECIPE, series.digest, identity, *_OPTIONS, *request.cmake_args)
        self.candidates: dict[str, FlagSet] = {}
        for flags in flag_sets(_cpuinfo(), platform.machine()):
            digest = hashlib.sha256("\0".join((*shaped_by, *flags.options)).encode()).hexdigest()
            self.candidates[f"{series.pin.tag}-{digest[:12]}"] = flags

    def find(self) -> Engine | None:
        """The fastest candidate that is installed and not known to crash."""
        for key in self.candidates:
            engine = _read_engine(self.root / key)
            if engine is not None:
                return engine
            if not self._refusal(key).exists():
                return None
        return None

    def make(self) -> Engine:
        """Build the fastest candidate that runs."""
        toolchain = find_toolchain(self.request.cmake_args)
        for key, flags in self.candidates.items():
            if self._refusal(key).exists():
                continue
            try:
                return _Stage(self, key).run(toolchain)
            except EngineCrashedError as error:
                self._refusal(key).write_text(f"{flags.name}: {error.message}\n", encoding="utf-8")
                self.progress.note(f"{error.message} when built for {flags.name}; trying safer flags")
        raise BuildError(
            f"the engine crashes on this CPU with every set of flags; {self.root}/*.refused say how. "
            "Delete them to try again"
        )

    def _refusal(self, key: str) -> Path:
        return self.root / f"{key}.refused"


class _Stage:
    """One build from source to installed folder, in a stage that is removed however it ends."""

    def __init__(self, plan: _Plan, key: str) -> None:
        self._home = plan.root / key
        # always the same path: compilers write it into objects, and ccache looks at that
        self._stage = plan.root / ".stage"
        self._tree = self._stage / "source"
        self._objects = self._stage / "objects"
        self._out = self._stage / "out"
        self._log_file = plan.root / f"{key}.log"
        self._flags = plan.candidates[key]
        self._request = plan.request
        self._series = plan.series
        self._progress = plan.progress

    def run(self, toolchain: Toolchain) -> Engine:
        """Build, prove and install; called with the cache's lock held."""
        self._clean()
        self._need_disk()
        small_model = model.ensure(self._request.cache, self._progress) if self._request.check else None
        try:
            (self._out / "bin").mkdir(parents=True)
            with self._log_file.open("w", encoding="utf-8") as log:
                self._get_source()
                self._configure(toolchain, log)
                self._compile(toolchain, log, "stock engine", STOCK)
                apply_series(self._series, self._tree, log)
                self._compile(toolchain, log, "patched engine", SERVER)
            if small_model is not None:
                proof = prove(self._out / "bin" / SERVER, small_model)
                self._progress.note(
                    f"checked: it decodes, {proof.decode_tps:.0f} tokens/s on the built-in model"
                )
            return self._install()
        finally:
            self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)

    def _need_disk(self) -> None:
        free = shutil.disk_usage(self._stage.parent).free
        if free < MIN_FREE_BYTES:
            raise BuildError(
                f"{self._stage.parent} has {free / 1024**3:.1f} GiB free, a build needs "
                f"{MIN_FREE_BYTES / 1024**3:.0f}; {NEXT_STEP_DISK}"
            )

    def _get_source(self) -> None:
        pin = self._series.pin
        if self._request.source is not None:
            self._progress.note(f"copying {self._request.source}")
            copy_checkout(self._request.source, self._tree)
        else:
            self._progress.note(f"fetching llama.cpp {pin.tag} ({pin.requirement})")
            unpack(pin, self._request.cache / "downloads", self._tree)

    def _configure(self, toolchain: Toolchain, log: TextIO) -> None:
        self._progress.note(f"configuring for {self._flags.name}")
        where = ["-S", str(self._tree), "-B", str(self._objects), "-G", "Ninja"]
        make_program = f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}"
        number = f"-DLLAMA_BUILD_NUMBER={self._series.pin.build_number}"
        options = [make_program, number, *_OPTIONS, *self._flags.options, *self._request.cmake_args]
        if run_logged([toolchain.cmake, *where, *options], log) != 0:
            raise self._failure("cmake cannot configure the engine", log)

    def _compile(self, toolchain: Toolchain, log: TextIO, what: str, name: str) -> None:
        self._progress.begin(f"building the {what} ({self._jobs} jobs)")
        env = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "CCACHE_BASEDIR": str(self._stage)}
        command = [toolchain.ninja, "-C", str(self._objects), "-j", str(self._jobs), SERVER]
        status = run_logged(command, log, env=env, on_line=self._count)
        self._progress.end()
        if status != 0:
            raise self._failure(f"the {what} does not compile", log)
        shutil.copy2(self._objects / "bin" / SERVER, self._out / "bin" / name)

    def _count(self, line: str) -> None:
        step = _NINJA_COUNT.match(line)
        if step:
            self._progress.count(int(step[1]), int(step[2]))

    @property
    def _jobs(self) -> int:
        return self._request.jobs or os.cpu_count() or 1

    def _failure(self, what: str, log: TextIO) -> BuildError:
        log.flush()
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        if "No space left on device" in text:
            return BuildError(f"{what}: the disk is full; {NEXT_STEP_DISK}")
        found = re.search(r"^.*\berror\b[: ].*$", text, re.IGNORECASE | re.MULTILINE)
        first = f": {found[0].strip()}" if found else ""
        return BuildError(f"{what}{first} (full log: {self._log_file})")

    def _install(self) -> Engine:
        manifest = Manifest(
            tag=self._series.pin.tag,
            series=self._series.digest,
            source=None if self._request.source is None else str(self._request.source.absolute()),
            flags=self._flags.name,
            cmake_args=self._request.cmake_args,
            checked=self._request.check,
        )
        (self._out / "manifest.json").write_text(
            json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8"
        )
        shutil.rmtree(self._home, ignore_errors=True)  # one without a manifest is not an engine
        self._out.rename(self._home)
        return Engine(self._home, manifest)


def _read_engine(home: Path) -> Engine | None:
    try:
        values = json.loads((home / "manifest.json").read_text(encoding="utf-8"))
        manifest = Manifest(**{**values, "cmake_args": tuple(values["cmake_args"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    engine = Engine(home.resolve(), manifest)
    return engine if engine.binary.is_file() and engine.stock.is_file() else None


def _point_current_at(engine: Engine) -> None:
    """Make ``current`` name this engine; called with the cache's lock held."""
    fresh = engine.home.parent / ".current"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(engine.home.name)
    fresh.replace(engine.home.parent / "current")


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
