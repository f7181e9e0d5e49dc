"""Building the engine: what is installed, and that nothing is where something went wrong."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from polykv_proxy.engine import build, download
from polykv_proxy.engine.build import BuildRequest, ensure, installed
from polykv_proxy.engine.progress import Progress
from polykv_proxy.errors import BuildError


def run(world, **request):
    """Build, and return the engine and what was shown."""
    shown = io.StringIO()
    engine = build.build(BuildRequest(cache=world.cache, jobs=3, **request), Progress(shown))
    return engine, shown.getvalue()


def fails(world, **request):
    """Build in vain: one line, and no engine, stage or partial file."""
    with pytest.raises(BuildError) as caught:
        run(world, **request)
    assert "\n" not in caught.value.message
    assert_nothing_installed(world)
    return caught.value.message


def assert_nothing_installed(world):
    """Neither half an engine nor what it was made from is left."""
    files = (world.cache / "engine").glob("*")
    assert [file for file in files if file.name != ".lock" and file.suffix not in (".log", ".refused")] == []
    with pytest.raises(BuildError, match="no engine is installed"):
        installed(world.cache)


def test_both_servers_are_installed_and_found_again(world):
    """The patched one and, beside it, the one upstream made."""
    engine, shown = run(world)
    assert "PATCHED = True" in engine.binary.read_text()
    assert "PATCHED = False" in engine.stock.read_text()
    assert os.access(engine.binary, os.X_OK)
    assert engine.home.parent == world.cache / "engine"
    assert engine.home.name.startswith("b1-")
    assert installed(world.cache) == engine
    assert "[2/2]" in shown
    assert "checked: it decodes" in shown
    assert not (world.cache / "engine" / ".stage").exists()


def test_second_build_returns_at_once(world):
    """No tool runs, no tool is even needed."""
    first, _ = run(world)
    shutil.rmtree(world.tools)
    second, shown = run(world)
    assert second == first
    assert shown == ""
    assert ensure(world.cache) == first


def test_options_given_to_cmake_and_ninja(world):
    """Static, release, nothing optional, flags of this CPU, the user's word last."""
    engine, _ = run(world, cmake_args=("-DGGML_CUDA=ON", "-DGGML_AVX2=OFF"))
    options = engine.binary.read_text().partition("OPTIONS = ")[2].partition("\nPATCHED")[0]
    for option in (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DGGML_NATIVE=OFF",
        "-DGGML_AVX512=ON",
        "-DGGML_AMX_TILE=OFF",
        "-DLLAMA_BUILD_NUMBER=1",
    ):
        assert option in options
    assert (
        options.index("-DGGML_AVX2=ON") < options.index("-DGGML_CUDA=ON") < options.index("-DGGML_AVX2=OFF")
    )
    assert [line[-3:] for line in world.runs()] == [["-j", "3", "llama-server"]] * 2


def test_other_arguments_make_another_engine(world):
    """Each combination has its folder; `current` follows the last one asked for."""
    plain, _ = run(world)
    cuda, _ = run(world, cmake_args=("-DGGML_CUDA=ON",))
    assert plain.home != cuda.home
    assert installed(world.cache) == cuda
    run(world)
    assert installed(world.cache) == plain


def test_changed_patch_makes_the_installed_engine_stale(world):
    """`installed` refuses it; `ensure` builds again, with the back end that the user chose."""
    old, _ = run(world, cmake_args=("-DGGML_CUDA=ON",))
    patch = world.patches / "patches" / "say-so.patch"
    patch.write_text(patch.read_text().replace("+# patched", "+# patched again"))
    with pytest.raises(BuildError, match="run `polykv-proxy engine build` again"):
        installed(world.cache)
    new = ensure(world.cache, Progress(io.StringIO()))
    assert new.home != old.home
    assert new.manifest.cmake_args == ("-DGGML_CUDA=ON",)


def test_crashing_engine_is_built_again_with_safer_flags(world):
    """An instruction that the CPU advertises and traps on costs one build, once."""
    world.put("crashes", "-DGGML_AVX512=ON")
    engine, shown = run(world)
    assert "the engine was killed by SIGILL when built for AVX-512; trying safer flags" in shown
    assert engine.manifest.flags == "AVX2"
    assert len(world.runs()) == 4
    assert run(world) == (engine, "")
    shutil.rmtree(engine.home)
    assert run(world)[0] == engine
    assert len(world.runs()) == 6


def test_engine_that_crashes_with_every_set_of_flags(world):
    """Nothing is installed, the refusals are kept and named."""
    world.put("crashes", "-DGGML_NATIVE=OFF")
    assert "crashes on this CPU with every set of flags" in fails(world)
    assert len(world.runs()) == 6
    assert "Delete them to try again" in fails(world)
    assert len(world.runs()) == 6


def test_engine_that_does_not_boot_is_not_installed(world):
    """Safer CPU flags would not help; the reason is the engine's own."""
    world.put("boot_error", "error: something else")
    assert fails(world) == "the engine exited with status 1: error: something else"


def test_engine_that_decodes_too_little_is_not_installed(world):
    """A boot is not enough."""
    world.put("short")
    assert "decoded 7 tokens where 8 were asked for" in fails(world)


def test_check_can_be_left_out(world):
    """For a machine that builds and does not run."""
    world.put("boot_error", "no GPU here")
    engine, _ = run(world, check=False)
    assert engine.manifest.checked is False


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("c++", "no C++ compiler found; install one (Debian: apt install g++)"),
        ("cc", "no C compiler found; install one (Debian: apt install gcc)"),
        ("git", "neither git nor patch found; install one of them (Debian: apt install git)"),
    ],
)
def test_missing_tool(world, tool, message):
    """Named, with how to get it."""
    (world.tools / tool).unlink()
    assert fails(world) == message


@pytest.mark.parametrize(("tool", "package"), [("cmake", "cmake"), ("ninja", "ninja-build")])
def test_missing_build_tool(world, monkeypatch, tool, package):
    """Both ways to get it are named."""
    (world.tools / tool).unlink()
    monkeypatch.setattr(sys, "executable", str(world.folder / "python"))
    message = fails(world)
    assert (
        message
        == f"{tool} not found; install it (Debian: apt install {package}) or `pip install {tool}` here"
    )


def test_download_that_is_not_the_pinned_file(world):
    """Refused by hash before any of its code runs."""
    world.write_series("0" * 64)
    assert "the download is not the pinned file" in fails(world)
    assert list((world.cache / "downloads").rglob("*.tar.gz")) == []


def test_download_that_does_not_arrive(world):
    """An index without the file, or no index at all."""
    world.archive.unlink()
    assert fails(world).startswith(
        "tiny-engine==1.0: the package index has no such file or cannot be reached"
    )


def test_archive_without_llama_cpp(world):
    """A pin that points at something else."""
    upstream = world.patches / "UPSTREAM"
    upstream.write_text(upstream.read_text().replace("subtree=llama.cpp/", "subtree=other/"))
    assert fails(world) == "tiny-engine==1.0: no llama.cpp source under other/"


def test_too_little_disk_is_found_before_anything_is_done(world, monkeypatch):
    """A build that cannot end is not begun."""
    usage = SimpleNamespace(free=1024**3)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage)
    message = fails(world)
    assert "has 1.0 GiB free, a build needs 2; free some space or set POLYKV_CACHE_DIR" in message
    assert not (world.cache / "downloads").exists()


def test_disk_that_fills_up_while_compiling(world):
    """The compiler's complaint is translated."""
    world.put("ninja_fails", "fatal error: error writing to x.o: No space left on device")
    assert fails(world).startswith("the stock engine does not compile: the disk is full; free some space")


def test_disk_that_fills_up_while_installing(world, monkeypatch):
    """So is our own."""

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(build.shutil, "copy2", full)
    assert fails(world) == f"the disk that holds {world.cache} is full; {download.NEXT_STEP_DISK}"


def test_compile_error_shows_the_first_error_and_the_log(world):
    """The whole output is in a file whose path is told."""
    world.put("ninja_fails", "note: x\nserver.cpp:1:2: error: expected ';'\nserver.cpp:3:4: error: more")
    message = fails(world)
    log = Path(message.rpartition("full log: ")[2].rstrip(")"))
    assert message.startswith(
        "the stock engine does not compile: server.cpp:1:2: error: expected ';' (full log: "
    )
    assert "error: more" in log.read_text()


def test_configure_error(world):
    """CMake's first error is the message."""
    world.put("cmake_fails", "CMake Error at CMakeLists.txt:1: CUDA not found")
    assert fails(world).startswith(
        "cmake cannot configure the engine: CMake Error at CMakeLists.txt:1: CUDA not found"
    )


def test_patch_that_does_not_apply(world):
    """The patch is named; the stock server alone is not an engine."""
    patch = world.patches / "patches" / "say-so.patch"
    patch.write_text(patch.read_text().replace(" add_executable", " other"))
    assert fails(world) == "say-so.patch does not apply to this source; it must be llama.cpp b1"


def test_checkout_is_copied_not_changed(world, tmp_path):
    """`--source` builds from somebody's tree and leaves it as it was."""
    checkout = tmp_path / "checkout"
    world.write_checkout(checkout)
    (checkout / ".git").mkdir()
    (checkout / "build" / "bin").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    engine, _ = run(world, source=checkout)
    assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*")} == before
    assert engine.manifest.source == str(checkout)
    assert not (world.cache / "downloads").exists()
    (checkout / "tools" / "server" / "server.cpp").write_text("int main() { return 1; }\n")
    assert run(world, source=checkout)[0].home != engine.home


def test_folder_that_is_no_checkout(world, tmp_path):
    """The argument is named."""
    assert (
        fails(world, source=tmp_path / "script")
        == f"--source {tmp_path / 'script'}: not a llama.cpp checkout"
    )


def test_leftovers_of_a_killed_build_are_cleaned(world):
    """A stage that nobody works in is garbage."""
    stage = world.cache / "engine" / ".stage" / "source"
    stage.mkdir(parents=True)
    (stage / "CMakeLists.txt").write_text("half")
    engine, _ = run(world)
    assert engine.binary.exists()
    assert not stage.exists()


def test_two_builds_at_once_build_once(world):
    """The second waits, says so, and finds what the first installed."""
    world.put("ninja_hangs")
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(world))) for _ in range(2)]
    threads[0].start()
    wait_for(world.runs)
    threads[1].start()
    (world.script / "ninja_hangs").unlink()
    for thread in threads:
        thread.join()
    assert results[0][0] == results[1][0]
    assert len(world.runs()) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_installs_nothing_and_leaves_no_process(world, number):
    """Ctrl-C or a service manager's stop in the middle of a compilation."""
    world.put("ninja_hangs")
    # whoever runs the tests in the background may have had SIGINT ignored, which children inherit
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = listens + "import sys, fake_build; fake_build.build_in(sys.argv[1])"
    argv = [sys.executable, "-c", code, str(world.folder)]
    process = subprocess.Popen(
        argv, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ninja = int(wait_for(world.runs)[0][0])
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1] == "polykv-proxy: interrupted; nothing was installed"
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(ninja, 0)
    assert_nothing_installed(world)


def wait_for(look):
    """What ``look`` returns once it is something."""
    pause = threading.Event()
    while not (seen := look()):
        pause.wait(0.02)
    return seen
