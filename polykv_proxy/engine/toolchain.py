"""Compilers and CPU flags.

``GGML_NATIVE`` stays off: it believes everything that the CPU advertises, and virtual machines
advertise AMX and then trap on it. Flags are chosen from ``/proc/cpuinfo`` instead, never AMX, in sets
from fast to safe; a set counts only once the built engine has run with it.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polykv_proxy.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_AVX2 = {"GGML_AVX": "avx", "GGML_AVX2": "avx2", "GGML_FMA": "fma", "GGML_F16C": "f16c", "GGML_BMI2": "bmi2"}
_AVX512 = {
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
_AVX512_BASE = frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})
"""What the compiler may use under ``GGML_AVX512``; a CPU that lacks one of them has none of it."""
_X86_OFF = ("GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16", "GGML_AVX_VNNI")
_ARM_EXTENSIONS = {"asimddp": "dotprod", "asimdhp": "fp16", "i8mm": "i8mm"}


@dataclass(frozen=True, slots=True)
class FlagSet:
    """CMake options for one level of CPU features."""

    name: str
    """For people: what the set relies on."""
    options: tuple[str, ...]
    """``-DNAME=VALUE``, complete: options that are off are said to be."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Programs that build the engine."""

    cmake: str
    ninja: str


def find_toolchain(cmake_args: Sequence[str] = ()) -> Toolchain:
    """Find cmake, ninja and the compilers.

    Raises:
        BuildError: one is missing; the message says how to get it.
    """
    if not any("CMAKE_CXX_COMPILER=" in arg for arg in cmake_args):
        _need_compiler("C++", "CXX", ("c++", "g++", "clang++"), "g++")
    if not any("CMAKE_C_COMPILER=" in arg for arg in cmake_args):
        _need_compiler("C", "CC", ("cc", "gcc", "clang"), "gcc")
    return Toolchain(cmake=_need_tool("cmake", "cmake"), ninja=_need_tool("ninja", "ninja-build"))


def flag_sets(cpuinfo: str, machine: str) -> tuple[FlagSet, ...]:
    """Sets of CPU options for this machine, fastest first.

    Args:
        cpuinfo: text of ``/proc/cpuinfo``.
        machine: ``platform.machine()``.
    """
    features = _common_features(cpuinfo)
    if machine in ("x86_64", "AMD64"):
        return _x86_sets(features)
    if machine in ("aarch64", "arm64"):
        extensions = [name for feature, name in _ARM_EXTENSIONS.items() if feature in features]
        plain = FlagSet("plain ARMv8", ("-DGGML_CPU_ARM_ARCH=armv8-a",))
        if not extensions:
            return (plain,)
        arch = "+".join(["armv8.2-a", *extensions])
        return (FlagSet(arch, (f"-DGGML_CPU_ARM_ARCH={arch}",)), plain)
    return (FlagSet("the compiler's default CPU", ()),)


def _x86_sets(features: frozenset[str]) -> tuple[FlagSet, ...]:
    avx2 = {option: feature in features for option, feature in _AVX2.items()}
    avx512 = {option: feature in features for option, feature in _AVX512.items()}
    none = dict.fromkeys([*avx2, "GGML_AVX512", *avx512], False)
    sets = [FlagSet("no vector extensions beyond SSE4.2", _switches(none))]
    if features >= {"avx", "avx2", "fma", "f16c"}:
        sets.append(FlagSet("AVX2", _switches(none | avx2)))
        if features >= _AVX512_BASE:
            sets.append(FlagSet("AVX-512", _switches(none | avx2 | {"GGML_AVX512": True} | avx512)))
    return tuple(reversed(sets))


def _switches(options: dict[str, bool]) -> tuple[str, ...]:
    off = dict.fromkeys(_X86_OFF, False)
    return tuple(f"-D{name}={'ON' if on else 'OFF'}" for name, on in (options | off).items())


def _common_features(cpuinfo: str) -> frozenset[str]:
    """Features that every CPU of the machine has; on hybrid ones they differ."""
    lists = [
        frozenset(line.partition(":")[2].split())
        for line in cpuinfo.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*lists) if lists else frozenset()


def _need_compiler(language: str, variable: str, names: Iterable[str], package: str) -> None:
    chosen = os.environ.get(variable)
    if chosen:
        if not shutil.which(chosen.split()[0]):
            raise BuildError(f"{variable}={chosen}: no such {language} compiler")
    elif not any(shutil.which(name) for name in names):
        raise BuildError(f"no {language} compiler found; install one (Debian: apt install {package})")


def _need_tool(name: str, package: str) -> str:
    # a tool from the package index lies beside the interpreter, which need not be on PATH
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if not found:
        raise BuildError(
            f"{name} not found; install it (Debian: apt install {package}) or `pip install {name}` here"
        )
    return found
