"""Claims about ``cli.saved``: saved KV is listed, looked at and removed."""

import json

import pytest
from durable.files import saved, state

from polykv_proxy.cli.options import EXIT_FAILED
from polykv_proxy.durable.store import Store


@pytest.fixture
def states(tmp_path, monkeypatch):
    """A state folder with two saved states of one key."""
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "state"))
    folder = tmp_path / "state" / "slots-0"
    store = Store(folder)
    store.open()
    saved(store, state(range(50), "run"))
    saved(store, state(range(80), "run/a"))
    return folder


def test_saved_states_are_listed(run, states):
    """For people, or a line of JSON each; what cannot be used is said beside it."""
    status, out, err = run("cache", "list")
    assert (status, err) == (0, "")
    assert sorted(line.split()[0] for line in out.splitlines()) == ["KEY", "run", "run/a"]
    _, out, _ = run("cache", "list", "--json")
    assert {json.loads(line)["key"] for line in out.splitlines()} == {"run", "run/a"}
    next(states.glob("*.bin")).write_bytes(b"x")
    _, out, err = run("cache", "list")
    assert len(out.splitlines()) == 2
    assert "not to be used" in err


def test_a_slot_file_is_inspected(run, states):
    """Its own tokens; a file that is none is an error."""
    file = max(states.glob("*.bin"), key=lambda path: path.stat().st_size)
    status, out, _ = run("cache", "inspect", str(file), "--tokens")
    assert status == 0
    assert json.loads(out)["tokens"] == list(range(80))
    status, _, err = run("cache", "inspect", str(next(states.glob("*.json"))))
    assert status == EXIT_FAILED
    assert "no slot file" in err


def test_saved_states_are_verified(run, states):
    """The exit status tells, and the output says which."""
    assert run("cache", "verify")[:2] == (0, "2 states, 0 wrong\n")
    file = next(states.glob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    status, out, _ = run("cache", "verify")
    assert status == EXIT_FAILED
    assert file.name in out


def test_saved_states_are_deleted_and_pruned(run, states, monkeypatch):
    """By key, by what may stay, or all."""
    monkeypatch.setenv("POLYKV_DURABLE__MIN_FREE_BYTES", "0")
    monkeypatch.setenv("POLYKV_DURABLE__MAX_IDLE_S", "1e12")
    status, out, _ = run("cache", "prune")
    assert (status, "0 states removed" in out) == (0, True)
    assert run("cache", "delete", "run/a")[:2] == (0, "1 deleted\n")
    status, _, err = run("cache", "delete", "run/a")
    assert status == EXIT_FAILED
    assert "nothing is saved under run/a" in err
    assert "1 states removed" in run("cache", "prune", "--all")[1]
    assert [path.name for path in states.iterdir()] == ["tombstones.json"]
