"""CPU flags from sample CPUs, and tools from PATH."""

import sys

import pytest

from polykv_proxy.engine.toolchain import find_toolchain, flag_sets
from polykv_proxy.errors import BuildError

AVX2 = "fpu sse4_2 avx f16c avx2 fma bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
SAPPHIRE_RAPIDS = f"{AVX512} avx512vbmi avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8 avx_vnni"


def cpuinfo(*lines, key="flags"):
    """Text of /proc/cpuinfo with these features, one CPU each."""
    return "".join(f"processor\t: {at}\n{key}\t\t: {line}\n\n" for at, line in enumerate(lines))


def on(flags):
    """Options that a set switches on."""
    return {
        option.removeprefix("-DGGML_").removesuffix("=ON")
        for option in flags.options
        if option.endswith("=ON")
    }


def test_zen3_gets_avx2_and_one_safer_set():
    """AVX2, FMA, F16C, BMI2; then none of them."""
    best, safe = flag_sets(cpuinfo(AVX2), "x86_64")
    assert on(best) == {"AVX", "AVX2", "FMA", "F16C", "BMI2"}
    assert on(safe) == set()


def test_amx_is_never_used():
    """Virtual machines advertise it and trap on it."""
    sets = flag_sets(cpuinfo(SAPPHIRE_RAPIDS), "x86_64")
    assert [flags.name for flags in sets] == ["AVX-512", "AVX2", "no vector extensions beyond SSE4.2"]
    assert on(sets[0]) == {
        *("AVX", "AVX2", "FMA", "F16C", "BMI2"),
        *("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
    }
    for flags in sets:
        assert {"-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF"} <= set(flags.options)


def test_avx512_needs_its_whole_base():
    """What the compiler may use must all be there."""
    without_vl = AVX512.replace(" avx512vl", "")
    assert flag_sets(cpuinfo(without_vl), "x86_64")[0].name == "AVX2"
    assert on(flag_sets(cpuinfo(AVX512), "x86_64")[0]) >= {"AVX512"}


def test_cpus_of_one_machine_that_differ():
    """A thread may run on any of them."""
    best = flag_sets(cpuinfo(AVX512, AVX2), "x86_64")[0]
    assert best.name == "AVX2"


@pytest.mark.parametrize("text", ["", cpuinfo("fpu sse4_2 avx")])
def test_old_or_unknown_cpu_gets_the_safe_set(text):
    """Nothing is assumed."""
    (only,) = flag_sets(text, "x86_64")
    assert on(only) == set()
    assert "-DGGML_AVX2=OFF" in only.options


def test_every_set_names_every_option():
    """An option that is left out would take CMake's default."""
    sets = flag_sets(cpuinfo(SAPPHIRE_RAPIDS), "x86_64")
    names = [{option.partition("=")[0] for option in flags.options} for flags in sets]
    assert names[0] == names[1] == names[2]


def test_arm_extensions():
    """Dot products and half floats where the CPU has them, plain ARMv8 as the safer set."""
    best, safe = flag_sets(cpuinfo("fp asimd asimddp asimdhp i8mm", key="Features"), "aarch64")
    assert best.options == ("-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16+i8mm",)
    assert safe.options == ("-DGGML_CPU_ARM_ARCH=armv8-a",)
    (only,) = flag_sets(cpuinfo("fp asimd", key="Features"), "aarch64")
    assert only == safe


def test_other_machines_get_the_compilers_default():
    """No option is guessed."""
    assert flag_sets("", "riscv64")[0].options == ()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """An empty folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))

    def add(*names):
        for name in names:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("#!/bin/sh\n")
            file.chmod(0o755)

    return add


def test_tools_beside_the_interpreter_are_found(tools, tmp_path):
    """`pip install cmake ninja` puts them there, and a virtual environment need not be on PATH."""
    tools("g++", "gcc", "venv/bin/cmake", "venv/bin/ninja")
    found = find_toolchain()
    assert (found.cmake, found.ninja) == (f"{tmp_path}/venv/bin/cmake", f"{tmp_path}/venv/bin/ninja")


def test_tools_on_the_path_come_first(tools, tmp_path):
    """The distribution's own are what its users expect."""
    tools("clang", "clang++", "cmake", "ninja", "venv/bin/cmake")
    assert find_toolchain().cmake == f"{tmp_path}/cmake"


def test_compiler_named_by_variable_must_exist(tools, monkeypatch):
    """CMake would complain pages later."""
    tools("g++", "gcc", "cmake", "ninja")
    monkeypatch.setenv("CXX", "g++-99 -m64")
    with pytest.raises(BuildError, match=r"^CXX=g\+\+-99 -m64: no such C\+\+ compiler"):
        find_toolchain()


def test_compiler_named_to_cmake_is_cmakes_business(tools):
    """It is not looked for on PATH."""
    tools("cmake", "ninja")
    find_toolchain(["-DCMAKE_C_COMPILER=/x/cc", "-DCMAKE_CXX_COMPILER=/x/c++"])
