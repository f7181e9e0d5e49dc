"""Claims about ``engine.foreground``: a process becomes the engine, and holds its folders."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from polykv_proxy.engine import claims, started
from polykv_proxy.engine.foreground import command_line
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.errors import ConfigError
from polykv_proxy.settings import Settings

BECOME = """
import json, sys
from polykv_proxy.engine import foreground, launch
from polykv_proxy.errors import PolyKVError
from polykv_proxy.settings import Settings

try:
    foreground.become(launch.spec_from(Settings(**json.loads(sys.argv[1]))), [])
except PolyKVError as error:
    sys.exit(f"{error.code}: {error.message}")
"""
ENGINE = """#!/bin/sh
echo "$@"
echo "$$ $CUDA_VISIBLE_DEVICES"
grep SigIgn /proc/self/status
[ "$WAITS" = 1 ] && read -r _
exit 7
"""


@pytest.fixture
def settings(tmp_path):
    """An engine that tells how it was started."""
    binary = tmp_path / "llama-server"
    binary.write_text(ENGINE)
    binary.chmod(0o755)
    engine = {"binary": str(binary), "model": "/srv/m.gguf", "args": ["-ngl", "9 9"]}
    return Settings(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", engine=engine)


def become(settings, **variables):
    """Start a process that becomes the engine."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "LLAMA_ARG_CTX_SIZE": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", BECOME, settings.model_dump_json()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_process_is_the_engine(settings):
    """Same id, its arguments and status; signals that Python ignores are not ignored by it."""
    process = become(settings)
    out, _ = process.communicate()
    arguments, who, ignored = out.splitlines()
    assert arguments == " ".join(spec_from(settings).argv)
    assert who == f"{process.pid} 1"
    mask = int(ignored.split()[1], 16)
    assert not any(mask >> (number - 1) & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert process.returncode == 7


def test_what_it_is_started_with_is_written_down(settings):
    """Of the process that becomes it, beside its socket; before it can answer there."""
    process = become(settings)
    process.communicate()
    spec = spec_from(settings)
    told = started.read(started.record_file(spec.socket))
    assert (told.process.pid, told.command) == (process.pid, (str(spec.binary), *spec.argv))


def test_its_folders_are_claimed_while_it_lives(settings):
    """No second one, and no proxy, takes them; the socket of an earlier one is out of its way."""
    spec = spec_from(settings)
    spec.socket.parent.mkdir(parents=True)
    spec.socket.touch()
    process = become(settings, WAITS="1")
    assert process.stdout.readline()
    assert not spec.socket.exists()
    with pytest.raises(ConfigError, match="in use"):
        claims.claim_folders(spec)
    second = become(settings)
    _, said = second.communicate()
    assert said.startswith("config_error: state_dir: ")
    process.communicate("\n")
    claims.drop(claims.claim_folders(spec))


def test_a_binary_that_cannot_be_run_is_named(settings):
    """Instead of a traceback."""
    (settings.engine.binary).chmod(0o644)
    _, said = become(settings).communicate()
    assert said.startswith(f"engine_not_started: cannot start {settings.engine.binary}: Permission denied")


def test_a_command_line_can_be_pasted(settings):
    """Words with spaces are quoted; the folder for what it saves is left out where pools need none."""
    assert "--slot-save-path" in spec_from(settings).argv
    assert "--slot-save-path" not in command_line(spec_from(settings))
    assert str(spec_from(settings).slot_dir) not in command_line(spec_from(settings))
    files = replace(spec_from(settings), argv=("--slot-save-path", "/a b"))
    assert command_line(files).endswith(" --slot-save-path '/a b'")
    assert command_line(spec_from(settings)).endswith("-ngl '9 9'")
    assert command_line(spec_from(settings)).startswith(str(settings.engine.binary))
