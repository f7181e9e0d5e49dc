"""Claims about ``engine.prune``: what nobody needs goes, and nothing else."""

import contextlib
import os
import shutil
import subprocess

import pytest

from polykv_proxy.engine import prune as pruning
from polykv_proxy.engine.filelock import share, try_lock
from polykv_proxy.engine.prune import Kept, prune
from polykv_proxy.errors import BuildError

OLD, OTHER, NOW = (f"b1-{digit * 12}" for digit in "abc")


@pytest.fixture
def root(tmp_path):
    """A cache with three engines, the last of them current, and what else builds leave."""
    root = tmp_path / "cache" / "engine"
    for name in (OLD, OTHER, NOW):
        (root / name / "bin").mkdir(parents=True)
        (root / name / "manifest.json").write_text("{}")
        shutil.copy2("/bin/sleep", root / name / "bin" / "llama-server")
        (root / f"{name}.log").write_text("log")
    (root / "current").symlink_to(NOW)
    (root / f"b0-{'d' * 12}.log").write_text("failed")
    (root / f"b0-{'e' * 12}.refused").write_text("AVX512: it died")
    (root / ".stage" / "source").mkdir(parents=True)
    (root / ".stage" / "source" / "x.cpp").write_text("x" * 100)
    (root / "mine").mkdir()
    (root / "notes.log").write_text("mine")
    return root


@contextlib.contextmanager
def process(binary):
    """It runs."""
    child = subprocess.Popen([binary, "60"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def look(root, *named, remove=False):
    """Names of what would go, or goes, and of what stays with the reason."""
    found = prune(root.parent, named, remove=remove)
    return [each.path.name for each in found.leftovers], {each.path.name: each.why for each in found.kept}


def test_what_is_listed_is_what_goes(root):
    """Engines but the current one, logs of what is not there, and a stage; what is not ours stays."""
    before = sorted(root.iterdir())
    found = prune(root.parent, (), remove=False)
    assert sorted(root.iterdir()) == sorted([*before, root / ".lock"])
    assert found.kept == (Kept(root / NOW, "it is the current one"),)
    sizes = {each.path.name: (each.what, each.size_bytes) for each in found.leftovers}
    engine = (root / NOW / "bin" / "llama-server").stat().st_size + 2
    assert sizes == {
        ".stage": ("remains", 100),
        f"b0-{'d' * 12}.log": ("log", 6),
        OLD: ("engine", engine),
        f"{OLD}.log": ("log", 3),
        OTHER: ("engine", engine),
        f"{OTHER}.log": ("log", 3),
    }
    assert found.size_bytes == 2 * engine + 112
    assert prune(root.parent, (), remove=True) == found
    left = {NOW, f"{NOW}.log", "current", f"b0-{'e' * 12}.refused", "mine", "notes.log", ".lock"}
    assert {each.name for each in root.iterdir()} == left
    assert look(root, remove=True)[0] == []


def test_what_the_settings_name_stays(root, tmp_path):
    """By whatever path."""
    link = tmp_path / "llama-server"
    link.symlink_to(root / OLD / "bin" / "llama-server")
    gone, kept = look(root, link, tmp_path / "elsewhere", remove=True)
    assert kept[OLD] == "the configuration names it"
    assert OTHER in gone
    assert f"{OLD}.log" not in gone
    assert (root / OLD / "bin" / "llama-server").exists()


def test_what_runs_stays(root):
    """Also where its file is gone already, as after a build in its place."""
    with process(root / OLD / "bin" / "llama-server") as child:
        why = f"process {child.pid} runs it"
        assert look(root)[1][OLD] == why
        (root / OLD / "bin" / "llama-server").unlink()
        assert look(root, remove=True)[1][OLD] == why
        assert (root / OLD).exists()
    assert OLD in look(root)[0]


def test_a_process_of_somebody_else_is_known_by_its_command_line(root, tmp_path, monkeypatch):
    """What it runs may not be seen then; one that ended meanwhile does not matter."""
    processes = tmp_path / "proc"
    for pid, words in (("7", [os.fsencode(root / OLD / "bin" / "llama-server"), b"-m"]), ("8", [b"sh"])):
        (processes / pid).mkdir(parents=True)
        (processes / pid / "cmdline").write_bytes(b"\0".join(words))
    (processes / "9").mkdir()
    (processes / "self").mkdir()
    monkeypatch.setattr(pruning, "PROCESSES", processes)
    gone, kept = look(root)
    assert kept[OLD] == "process 7 runs it"
    assert OTHER in gone


def test_what_a_proxy_has_claimed_stays(root):
    """Though its engine is down just now."""
    claim = share(root / OLD / "bin" / "llama-server")
    assert look(root, remove=True)[1][OLD] == "a proxy that runs has claimed it"
    os.close(claim)
    assert OLD in look(root)[0]


@pytest.mark.parametrize("remove", [False, True])
def test_nothing_goes_while_a_build_runs(root, remove):
    """It may make any of them current."""
    lock = try_lock(root / ".lock")
    with pytest.raises(BuildError, match="a build is running"):
        look(root, remove=remove)
    os.close(lock)
    assert (root / OLD).exists()


def test_what_could_not_be_removed_goes_the_next_time(root, monkeypatch):
    """No half of an engine is left under its name."""

    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        with pytest.raises(BuildError, match="Permission denied"):
            look(root, remove=True)
        (root / ".stage").rename(root.parent / "away")
        with pytest.raises(BuildError, match=rf"\.gone-{OLD}: Permission denied"):
            look(root, remove=True)
    assert not (root / OLD).exists()
    assert f".gone-{OLD}" in look(root)[0]
    look(root, remove=True)
    assert not list(root.glob(".gone-*"))


def test_without_a_cache_there_is_nothing(tmp_path):
    """And none is made."""
    assert prune(tmp_path / "cache", (), remove=True).leftovers == ()
    assert not (tmp_path / "cache").exists()
