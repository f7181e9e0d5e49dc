"""Claims about ``engine.origin``: what is known of how an engine was started, and when nothing is."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from polykv_proxy.engine import started
from polykv_proxy.engine.origin import Fixed, Recorded, Start
from polykv_proxy.engine.record import EngineRecord

LISTENS = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
print(flush=True)
input()
"""


class Engine:
    """A process that listens at a socket, with a record beside it."""

    def __init__(self, folder):
        self.socket, self.folder = folder / "e.sock", folder / "state" / "slots-0"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self.command = (sys.executable, "-c", LISTENS, str(self.socket))
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.record = started.StartRecord(
            process=EngineRecord.take(self.process.pid, self.socket),
            command=self.command,
            cwd=str(folder),
            model="/srv/m.gguf",
            slot_dir=str(self.folder),
            files={"/srv/m.gguf": (1, 2, 3)},
        )
        self.note()

    def note(self, **changes):
        """Write the record anew, changed."""
        record = msgspec.structs.replace(self.record, **changes)
        started.record_file(self.socket).write_bytes(msgspec.json.encode(record))

    def end(self):
        """It dies, and leaves its socket."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def engine(tmp_path):
    """One that runs."""
    one = Engine(tmp_path)
    yield one
    one.end()


@pytest.fixture
def origin(engine):
    """Of that one, as a proxy sees it."""
    found = Recorded(engine.socket)
    yield found
    found.close()


SAYS = {"model_path": "/srv/m.gguf"}


def test_a_recorded_engine_is_known_as_our_own_is(engine, origin, tmp_path):
    """Where it saves, its model, its arguments, and what its files were."""
    assert origin.find(SAYS) == Start(
        folder=engine.folder,
        model=Path("/srv/m.gguf"),
        arguments=engine.command[1:],
        cwd=tmp_path,
        marks={"/srv/m.gguf": (1, 2, 3)},
    )
    assert not origin.gone


def changed(engine, **changes):
    """Its process record, changed."""
    told = engine.record.process
    fields = {name: getattr(told, name) for name in ("pid", "start_ticks", "boot_id", "socket")}
    return EngineRecord(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start_ticks": 7}, "is of an earlier process"),
        ({"boot_id": "another"}, "is of an earlier process"),
        ({"socket": "/run/other.sock"}, "is of an earlier process"),
        ({"pid": 1}, "is of process 1, and"),
    ],
)
def test_a_record_of_another_process_is_not_believed(engine, origin, changes, reason):
    """One of an older engine at the same address, or of another one."""
    engine.note(process=changed(engine, **changes))
    assert reason in origin.find(SAYS)


def test_whoever_else_listens_there_is_not_the_recorded_engine(engine, origin, tmp_path):
    """Also while that one lives: somebody took its socket away."""
    engine.socket.unlink()
    other = Engine(tmp_path)
    engine.note()
    assert origin.find(SAYS).endswith(f"is of process {engine.process.pid}, and {other.process.pid} answers")
    other.end()
    assert origin.find(SAYS) == "the engine's socket does not say who listens there"


def test_every_word_of_the_command_line_counts(engine, origin):
    """What was added to it may change KV."""
    engine.note(command=(*engine.command, "--swa-full"))
    assert origin.find(SAYS) == "the engine's command line is not the one in the record beside its socket"


def test_another_users_engine_is_not_touched(engine, origin, monkeypatch):
    """What its record names would be changed and deleted with our rights."""
    monkeypatch.setattr(started, "listener", lambda _: (engine.process.pid, os.geteuid() + 1))
    assert origin.find(SAYS) == "the engine runs as another user"


def test_the_engine_must_agree(engine, origin):
    """It says which model it has."""
    assert "another model" in origin.find({"model_path": "/srv/n.gguf"})


def test_without_a_record_nothing_is_known(engine, origin):
    """As of an engine at a port."""
    started.record_file(engine.socket).unlink()
    assert origin.find(SAYS) == started.NOT_OURS == Fixed(None).find(SAYS)
    assert not origin.gone
    assert (origin.hopeful, Fixed(None).hopeful) == (True, False)


def test_its_end_is_seen_at_once_and_the_next_one_is_found(engine, origin, tmp_path):
    """Before anybody asked whether it answers."""
    origin.find(SAYS)
    engine.end()
    assert origin.gone
    assert origin.find(SAYS) == "the engine's socket does not say who listens there"
    again = Engine(tmp_path)
    assert isinstance(origin.find(SAYS), Start)
    assert not origin.gone
    again.end()
    assert origin.gone


def test_saved_states_are_one_proxys(engine, origin):
    """Whatever becomes of the engine, until that proxy lets go, or is gone."""
    other = Recorded(engine.socket)
    assert origin.claim(engine.folder) is None
    assert origin.claim(engine.folder) is None
    assert "another polykv-proxy works with" in other.claim(engine.folder)
    engine.end()
    assert "another polykv-proxy works with" in other.claim(engine.folder)
    origin.close()
    assert other.claim(engine.folder) is None
    other.close()


def test_an_engine_that_saves_elsewhere_by_now_needs_another_proxy(engine, origin, tmp_path):
    """This one knows what is in the first folder."""
    origin.claim(engine.folder)
    assert origin.claim(tmp_path / "slots-0").endswith("start the proxy again")
    other = Recorded(engine.socket)
    assert other.claim(tmp_path / "none" / "slots-0").endswith("none/slots-0: No such file or directory")


def test_a_file_that_was_changed_since_is_told_apart(tmp_path):
    """By what it is now; of our own engine they are read as soon as it has started."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"abc")
    start = Start(folder=tmp_path, model=path, cwd=tmp_path, marks={str(path): started.mark(path.stat())})
    assert start.file("m.gguf") == start.file(path) == path
    assert start.changed(path, path.stat()) is None
    before = path.stat()
    path.unlink()
    (tmp_path / "n").write_bytes(b"xyz")
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns + 1))
    assert start.changed(path, path.stat()).endswith("m.gguf was changed since the engine started")
    assert start.changed(tmp_path / "l.gguf", path.stat()).startswith("nobody noted what")
    assert Start(folder=tmp_path, model=path).changed(path, path.stat()) is None


def test_our_own_engine_is_what_the_settings_say(tmp_path):
    """And its folders have been claimed."""
    start = Start(folder=tmp_path, model=None)
    own = Fixed(start)
    assert (own.find({}), own.folder, own.claim(tmp_path)) == (start, tmp_path, None)
    assert (own.gone, own.hopeful) == (False, False)
    own.close()
