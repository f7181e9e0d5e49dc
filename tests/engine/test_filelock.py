"""Locks that end with their holder."""

import os
import subprocess
import sys

from polykv_proxy.engine.filelock import is_locked, locked, share, try_lock


def test_one_holder_at_a_time(tmp_path):
    """The second gets nothing until the first lets go."""
    first = try_lock(tmp_path / "lock")
    assert try_lock(tmp_path / "lock") is None
    os.close(first)
    second = try_lock(tmp_path / "lock")
    assert second is not None
    os.close(second)


def test_child_that_inherits_the_lock_keeps_it(tmp_path):
    """This is how a killed proxy's engine is noticed."""
    lock = try_lock(tmp_path / "lock")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert try_lock(tmp_path / "lock") is None
    child.communicate(b"\n")
    again = try_lock(tmp_path / "lock")
    assert again is not None
    os.close(again)


def test_child_does_not_inherit_it_by_accident(tmp_path):
    """A helper process must not keep a lock alive."""
    lock = try_lock(tmp_path / "lock")
    running = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    child.stdout.readline()
    os.close(lock)
    again = try_lock(tmp_path / "lock")
    assert again is not None
    os.close(again)
    child.communicate(b"\n")


def test_waiting_is_announced_only_when_it_happens(tmp_path):
    """Nobody reads about a wait that did not happen."""
    said = []
    with locked(tmp_path / "lock", lambda: said.append("waiting")):
        assert try_lock(tmp_path / "lock") is None
    assert said == []
    with locked(tmp_path / "lock", lambda: said.append("waiting")):
        pass
    assert said == []


def test_a_lock_is_shared_among_those_who_only_use_a_file(tmp_path):
    """It is locked until the last of them lets go; whoever wants it alone gets nothing meanwhile."""
    file = tmp_path / "file"
    assert share(file) is None
    assert not is_locked(file)
    assert not file.exists()
    file.write_text("x")
    assert not is_locked(file)
    held = [share(file), share(file)]
    assert try_lock(file) is None
    for descriptor in held:
        assert is_locked(file)
        os.close(descriptor)
    assert not is_locked(file)
    alone = try_lock(file)
    assert (share(file), is_locked(file)) == (None, True)
    os.close(alone)
