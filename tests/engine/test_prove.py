"""Proving a binary; the build's tests cover crashes and refusals."""

import pytest
from fake_build import ENGINE, World

from polykv_proxy.engine import build, model, prove
from polykv_proxy.engine.prove import EngineCrashedError, Proof
from polykv_proxy.errors import BuildError


@pytest.fixture
def world(tmp_path):
    """A folder with a scripted engine in it."""
    world = World(tmp_path)
    world.create()
    world.add_tool(
        "llama-server", world.program_text(ENGINE.replace("@OPTIONS@", "'-D'").replace("@PATCHED@", "True"))
    )
    return world


def test_engine_that_works(world):
    """It was booted, it decoded, it is gone."""
    assert prove.prove(world.tools / "llama-server", world.folder / "m.gguf") == Proof(
        tokens=8, decode_tps=100.0
    )


def test_crash_while_decoding_is_told_from_other_failures(world):
    """Only a signal is a reason to try other CPU flags."""
    world.put("crashes", "-D")
    with pytest.raises(EngineCrashedError, match=r"^the engine was killed by SIGILL$"):
        prove.prove(world.tools / "llama-server", world.folder / "m.gguf")


def test_program_that_cannot_be_started(world):
    """Wrong file, wrong machine."""
    with pytest.raises(BuildError, match="cannot be started: No such file"):
        prove.prove(world.folder / "nothing", world.folder / "m.gguf")
    text = world.folder / "text"
    text.write_text("no program")
    text.chmod(0o755)
    with pytest.raises(BuildError, match="cannot be started: Exec format error"):
        prove.prove(text, world.folder / "m.gguf")


def test_engine_that_never_gets_ready(world, monkeypatch):
    """The wait has an end."""
    monkeypatch.setattr(prove, "_BOOT_S", 0.2)
    monkeypatch.setattr(prove, "_STOP_S", 0.2)
    world.add_tool("llama-server", "#!/bin/sh\nexec sleep 600\n")
    (world.tools / "sleep").symlink_to("/bin/sleep")
    with pytest.raises(BuildError, match="was not ready after 0 s"):
        prove.prove(world.tools / "llama-server", world.folder / "m.gguf")


@pytest.mark.engine
@pytest.mark.parametrize("which", ["binary", "stock"])
def test_the_built_engines_decode(build_cache, which):
    """Patched and stock, on the built-in model."""
    binary = getattr(build.ensure(build_cache), which)
    assert prove.prove(binary, model.ensure(build_cache)).tokens == 8
