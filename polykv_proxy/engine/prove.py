"""Proving a binary: boot it on a small model, decode a few tokens, stop it.

A build that links is not yet an engine that runs: a CPU may advertise an instruction and trap on it
at the first matrix product.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polykv_proxy.engine.logfile import failure_reason
from polykv_proxy.engine.profile import child_environment
from polykv_proxy.errors import BuildError

_BOOT_S = 120.0
"""Seconds for a small model to load; cold disks and emulated CPUs are slow."""
_REQUEST_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.05
_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Proof:
    """What the engine did."""

    tokens: int
    """Tokens decoded."""
    decode_tps: float
    """Tokens per second of that."""


class EngineCrashedError(BuildError):
    """The engine was ended by a signal while it was being proven."""

    code = "engine_crashed"


def prove(binary: Path, model: Path) -> Proof:
    """Run the engine once.

    Raises:
        EngineCrashedError: a signal ended it, as an illegal instruction does.
        BuildError: it cannot be started, does not get ready or does not decode.
    """
    # /tmp rather than the cache: a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="polykv-check-") as scratch:
        folder = Path(scratch)
        address, log = folder / "engine.sock", folder / "log"
        argv = [str(binary), "--model", str(model), "--host", str(address)]
        env = child_environment(os.environ, {}, api_key=None)
        env.pop("LLAMA_API_KEY", None)
        try:
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: S603 (our own binary, no shell)
                    [*argv, "--ctx-size", "512", "--parallel", "1"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=env,
                )
        except OSError as error:
            raise BuildError(f"{binary} cannot be started: {error.strerror}") from None
        try:
            _wait_until_ready(process, address, log)
            return _decode(process, address, log)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    deadline = time.monotonic() + _BOOT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _ended(process, log)
        try:
            if _request(address, "GET", "/health")[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet; an engine that died is found above
        time.sleep(_POLL_S)
    raise BuildError(f"the engine was not ready after {_BOOT_S:.0f} s")


def _decode(process: subprocess.Popen[bytes], address: Path, log: Path) -> Proof:
    wanted = {"prompt": "Once upon a time", "n_predict": _TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        status, body = _request(address, "POST", "/completion", wanted)
    except (OSError, http.client.HTTPException) as error:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise BuildError(f"the engine does not answer: {error}") from None
        raise _ended(process, log) from None
    try:
        answer = json.loads(body)
        tokens, decode_tps = answer["tokens_predicted"], answer["timings"]["predicted_per_second"]
    except (ValueError, LookupError, TypeError):
        raise BuildError(f"the engine's answer makes no sense (status {status}): {body[:200]!r}") from None
    if tokens != _TOKENS:
        raise BuildError(f"the engine decoded {tokens} tokens where {_TOKENS} were asked for")
    return Proof(tokens, float(decode_tps))


def _request(address: Path, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    connection = _UnixConnection(address)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _ended(process: subprocess.Popen[bytes], log: Path) -> BuildError:
    code = process.returncode
    if code < 0:
        return EngineCrashedError(f"the engine was killed by {signal.Signals(-code).name}")
    return BuildError(
        f"the engine exited with status {code}: {failure_reason(log, 0, was_ready=False) or 'no output'}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, address: Path) -> None:
        super().__init__("localhost", timeout=_REQUEST_S)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address))
