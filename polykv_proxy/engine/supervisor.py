"""Keeping an engine of ours alive: start, wait for health, watch, restart, stop.

Rules:

1. One engine per state folder, ever. Our own claim on the folder, the engine's claim (a lock it
   inherits and drops only by ending) and the record of an earlier engine are settled before a start.
2. One SIGTERM, a deadline, SIGKILL. llama-server takes a second SIGTERM as "at once", so it gets
   none; it runs in a session of its own, so that Ctrl-C at a terminal reaches the proxy alone and
   streams can drain. Under systemd this is ``KillMode=mixed``.
3. Never give up. After three quick failures in a row waiting is long, but a GPU or a file that comes
   back is found without anybody's help. An engine that was never ready by then is reported as hopeless;
   what to do about that is the caller's business.
4. A ready engine that does not answer any more is ended and started again.
5. Constructors start nothing. ``run()`` is one task of the caller's task group; it ends after
   ``stop()``, or with the cancellation of that group.

State changes are reported through a callback, in order, from the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.engine import claims, logfile
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.disk import Disk
from polykv_proxy.engine.filelock import try_lock
from polykv_proxy.engine.health import open_session, probe
from polykv_proxy.engine.record import EngineRecord, stop_recorded
from polykv_proxy.engine.state import EngineState, EngineStatus
from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from polykv_proxy.engine.launch import EngineSpec

log = structlog.get_logger(__name__)

_FIRST_POLL_S = 0.05
_LAST_POLL_S = 0.5

_UNREACHABLE_LOOKS = 3
"""Looks in a row that were refused, its socket gone perhaps, after which a ready engine is ended."""

_LOG_LOOK_S = 10.0
"""Between two looks at the size of a running engine's log."""


@dataclass(frozen=True, slots=True)
class _End:
    """How one life of an engine ended."""

    reason: str
    was_steady: bool = False


class _Child:
    """A started engine that is asked to end at most once."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, deadline_s: float) -> None:
        if self.running and not self._asked:
            self._asked = True
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class Supervisor:
    """Runs one engine of ours as a child process."""

    def __init__(self, spec: EngineSpec, on_state: Callable[[EngineStatus], None]) -> None:
        self.spec = spec
        self.address = EngineAddress.of_socket(spec.socket)
        self.status = EngineStatus(state=EngineState.STARTING, restarts=0)
        self._on_state = on_state
        self._record_file = spec.state_dir / f"engine-{spec.index}.json"
        self._alive_file = spec.state_dir / f"engine-{spec.index}.alive"
        self._log_file = spec.log_dir / f"engine-{spec.index}.log"
        self._disk = Disk()
        self._claims: list[int] = []
        self._running = False
        self._stop_asked = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stop_deadline_s = spec.stop_deadline_s
        self._starts = 0
        self._was_ready = False
        self._ready_since: float | None = None
        self._complaint: str | None = None

    def prepare(self) -> None:
        """Make the folders and claim them for this process; again is a no-op.

        Raises:
            ConfigError: a folder cannot be made or belongs to another running proxy.
        """
        if not self._claims:
            self._claims = claims.claim_folders(self.spec)

    async def run(self) -> None:
        """Keep the engine running until :meth:`stop`.

        Raises:
            ConfigError: as :meth:`prepare`.
        """
        self.prepare()
        self._running = True
        try:
            failures = 0
            while not self._stop_asked.is_set():
                end = await self._live_once()
                if self._stop_asked.is_set():
                    break
                failures = 1 if end.was_steady else failures + 1
                delay_s = self.spec.backoff.delay_s(failures)
                hopeless = not self._was_ready and failures >= self.spec.backoff.quick_failures
                self._report(EngineState.DOWN, end.reason, retry_in_s=delay_s, hopeless=hopeless)
                await self._pause(delay_s)
        finally:
            self._report(EngineState.DOWN, "stopped")
            self._running = False
            self._stopped.set()
            claims.drop(self._claims)

    async def stop(self, deadline_s: float) -> None:
        """Ask the engine to end and return when it has; kill it after ``deadline_s`` seconds."""
        self._stop_deadline_s = deadline_s
        self._stop_asked.set()
        if self._running:
            await self._stopped.wait()

    async def _stop_leftover(self) -> None:
        """Stop the engine of an earlier run; its record stays until its lock shows that it is gone."""
        record = EngineRecord.read(self._record_file)
        if record is not None:
            self._report(EngineState.STARTING, f"stopping the engine of an earlier run (pid {record.pid})")
            await stop_recorded(record, self.spec.stop_deadline_s)

    async def _live_once(self) -> _End:
        """Start the engine and stay with it until it has ended."""
        self._ready_since = self._complaint = None
        await self._stop_leftover()
        logfile.rotate(self._log_file)
        log_offset = self._log_file.stat().st_size if self._log_file.exists() else 0
        self._report(EngineState.STARTING)
        try:
            child = await self._spawn()
        except OSError as error:
            return _End(f"cannot start {self.spec.binary}: {error.strerror or error}")
        self._report(EngineState.STARTING, pid=child.pid)
        try:
            async with asyncio.TaskGroup() as tasks:
                health = tasks.create_task(self._look_after(child))
                asked = tasks.create_task(self._end_when_asked(child))
                trimming = tasks.create_task(self._keep_log_short())
                code = await child.wait()
                for task in (health, asked, trimming):
                    task.cancel()
        finally:
            # only a cancelled run() comes here with the engine still running
            await child.end(self._stop_deadline_s)
            self._record_file.unlink(missing_ok=True)
            self.spec.socket.unlink(missing_ok=True)
        return self._ended(code, log_offset)

    async def _spawn(self) -> _Child:
        spec = self.spec
        alive = try_lock(self._alive_file)
        if alive is None:
            raise OSError(
                f"an engine of an earlier run holds {self._alive_file} and was not recorded; "
                f"`fuser {self._alive_file}` names its process"
            )
        try:
            self._record_file.unlink(missing_ok=True)
            spec.socket.unlink(missing_ok=True)  # llama-server does not replace an existing one
            with self._log_file.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    spec.binary,
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(spec.env),
                    pass_fds=(alive,),
                    start_new_session=True,
                )
        finally:
            os.close(alive)  # the child's copy keeps the lock
        record = EngineRecord.take(process.pid, spec.socket)
        if record is not None:
            record.write(self._record_file)
        self._starts += 1
        return _Child(process)

    async def _look_after(self, child: _Child) -> None:
        """Report loading and ready; end an engine that takes too long, or that is lost."""
        async with open_session(self.address) as session:
            if await self._await_health(session, child):
                await self._watch(session)
            await child.end(self.spec.stop_deadline_s)

    async def _await_health(self, session: aiohttp.ClientSession, child: _Child) -> bool:
        """Wait until the engine is ready; False if that takes too long."""
        try:
            async with asyncio.timeout(self.spec.ready_timeout_s):
                wait_s = _FIRST_POLL_S
                while (state := (await probe(session, self.address)).state) is not EngineState.READY:
                    if state is EngineState.LOADING and self.status.state is EngineState.STARTING:
                        self._report(EngineState.LOADING, pid=child.pid)
                    await asyncio.sleep(wait_s)
                    wait_s = min(_LAST_POLL_S, wait_s * 1.5)
        except TimeoutError:
            self._complaint = f"not ready within {self.spec.ready_timeout_s:g} s"
            return False
        if not self._stop_asked.is_set():
            self._ready_since = asyncio.get_running_loop().time()
            self._was_ready = True
            self._report(EngineState.READY, pid=child.pid)
        return True

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Returns when the ready engine is lost: silent for too long, or not to be reached.

        It answers beside a running decode, but its few HTTP threads may all be taken for a while.
        """
        loop = asyncio.get_running_loop()
        answered, refused = loop.time(), 0
        while True:
            await asyncio.sleep(self.spec.watch_s)
            seen = await probe(session, self.address)
            if seen.state is not EngineState.DOWN:
                answered, refused = loop.time(), 0
                continue
            refused = 0 if seen.silent else refused + 1
            silent_s = loop.time() - answered
            hung = bool(self.spec.hang_timeout_s) and silent_s >= self.spec.hang_timeout_s
            if hung or refused >= _UNREACHABLE_LOOKS:
                self._complaint = f"not answering for {silent_s:.0f} s: {seen.reason}"
                return

    async def _keep_log_short(self) -> None:
        """A run may last for months, and the engine writes some lines for each request."""
        told = ""
        while True:
            await asyncio.sleep(_LOG_LOOK_S)
            try:
                await self._disk.run(partial(logfile.rotate, self._log_file, in_use=True))
                reason = ""
            except (OSError, UnavailableError) as error:
                reason = str(error)
            if reason and reason != told:
                log.warning("engine_log_not_rotated", file=str(self._log_file), reason=reason)
            told = reason

    async def _end_when_asked(self, child: _Child) -> None:
        await self._stop_asked.wait()
        self._report(EngineState.STOPPING, pid=child.pid)
        await child.end(self._stop_deadline_s)

    def _ended(self, code: int, log_offset: int) -> _End:
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        was_ready = self._ready_since is not None
        said = self._complaint or logfile.failure_reason(self._log_file, log_offset, was_ready=was_ready)
        reason = f"{how}: {said}" if said else how
        if self._ready_since is None:
            return _End(reason)
        ready_s = asyncio.get_running_loop().time() - self._ready_since
        return _End(reason, was_steady=ready_s >= self.spec.backoff.steady_s)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_asked.wait()

    def _report(
        self,
        state: EngineState,
        reason: str | None = None,
        *,
        pid: int | None = None,
        retry_in_s: float | None = None,
        hopeless: bool = False,
    ) -> None:
        restarts = max(0, self._starts - 1)
        self.status = EngineStatus(
            state=state,
            reason=reason,
            pid=pid,
            restarts=restarts,
            retry_in_s=retry_in_s,
            hopeless=hopeless,
        )
        self._on_state(self.status)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
