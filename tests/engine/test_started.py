"""Claims about ``engine.started``: what is written down of an engine, and who it is believed of."""

import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from polykv_proxy.engine import started
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.engine.record import command_line
from polykv_proxy.errors import EngineStartError
from polykv_proxy.settings import Settings


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """An engine with a model and adapters, which is about to be started in its folder."""
    for name in ("m.gguf", "l.gguf", "p.gguf", "s.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    args = ["--lora", "l.gguf", "--mmproj=p.gguf", "--lora-scaled", "s.gguf:0.5,none.gguf:1"]
    engine = {"binary": "/opt/llama-server", "model": str(tmp_path / "m.gguf"), "args": args}
    (tmp_path / "run").mkdir()
    return spec_from(Settings(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", engine=engine))


def record(spec):
    """What is written of it."""
    started.write(spec, [spec.model])
    found = started.read(started.record_file(spec.socket))
    assert not isinstance(found, str)
    return found


def test_all_that_matters_is_written_down(spec, tmp_path):
    """Of this process, since it becomes the engine; for its own user alone, and whole or not at all."""
    told = record(spec)
    assert told.process.pid == os.getpid()
    assert told.process.socket == str(spec.socket)
    assert told.command == ("/opt/llama-server", *spec.argv)
    assert (told.cwd, told.model, told.slot_dir) == (
        str(tmp_path),
        str(tmp_path / "m.gguf"),
        str(tmp_path / "state" / "slots-0"),
    )
    (file,) = (tmp_path / "run").iterdir()
    assert file.name == "engine-0.sock.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    started.write(spec, [])  # over the one of an earlier engine


def test_what_the_engine_loads_is_marked(spec, tmp_path):
    """Its model, and every file that its arguments name, however they are written."""
    files = record(spec).files
    names = {"m.gguf", "l.gguf", "p.gguf", "s.gguf"}
    assert {str(tmp_path / name) for name in names} == set(files)
    found = (tmp_path / "l.gguf").stat()
    assert files[str(tmp_path / "l.gguf")] == (found.st_ino, 6, found.st_mtime_ns)


def test_shards_are_marked_that_no_argument_names(spec, tmp_path):
    """The engine finds them itself."""
    shard = tmp_path / "m-00002-of-00002.gguf"
    shard.touch()
    started.write(spec, [shard])
    assert str(shard) in started.read(started.record_file(spec.socket)).files


def test_a_record_that_cannot_be_written(spec, tmp_path):
    """Then the socket could not be made either."""
    (tmp_path / "run").rmdir()
    with pytest.raises(EngineStartError, match=r"engine-0.sock.json: No such file"):
        started.write(spec, [])


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"version": 1}'])
def test_what_makes_no_sense_is_no_record(tmp_path, raw):
    """It says so."""
    (tmp_path / "e.json").write_bytes(raw)
    assert started.read(tmp_path / "e.json") == "the record beside the engine's socket cannot be read"


def test_a_record_of_another_version_or_user_is_not_believed(spec, tmp_path, monkeypatch):
    """Nor is one that is not there."""
    file = started.record_file(spec.socket)
    assert started.read(file) == started.NOT_OURS
    told = record(spec)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, version=2)))
    assert started.read(file).endswith("of version 2, not 1")
    file.write_bytes(msgspec.json.encode(told))
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert started.read(file) == "the record beside the engine's socket is another user's"


def test_the_engine_must_say_what_the_record_says(spec):
    """Of the model that it has loaded."""
    told = record(spec)
    assert told.disagrees({"model_path": str(spec.model)}) is None
    assert "another model" in told.disagrees({"model_path": "/srv/other.gguf"})
    assert "another model" in told.disagrees({})


def test_options_are_those_of_the_same_engine_started_by_a_proxy(spec):
    """So that what either saved is of one model: words of the profile are none that change KV."""
    from polykv_proxy.durable import identity  # noqa: PLC0415

    more = ("--rope-scale", "2", "-fa", "on", "--swa-full", "--override-kv", "a=int:1")
    own = replace(spec, argv=(*spec.argv, *more))
    told = record(own)
    assert identity.options_of(told.command[1:]) == identity.options_of(more)


def test_the_kernel_says_who_listens(tmp_path):
    """Whoever called ``listen``; nobody where the socket is a dead one's, or none."""
    path = tmp_path / "e.sock"
    assert started.listener(path) is None
    program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    command = [sys.executable, "-c", program + "print(flush=True); input()", str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert started.listener(path) == (child.pid, os.getuid())
    assert command_line(child.pid) == command
    child.communicate(b"\n")
    assert path.exists()
    assert started.listener(path) is None
    assert command_line(child.pid) == []


def test_a_full_queue_keeps_nobody_waiting(tmp_path):
    """Of an engine that accepts nothing any more it is not known who it is."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "e.sock"))
        server.listen(1)
        seen = [started.listener(tmp_path / "e.sock") for _ in range(8)]  # each leaves a connection there
    assert seen[0] == (os.getpid(), os.getuid())
    assert seen[-1] is None
