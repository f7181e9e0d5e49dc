"""The supervisor against a scripted engine: every way an engine can start, fail and end."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from polykv_proxy.engine import claims, health, logfile
from polykv_proxy.engine import supervisor as supervisor_module
from polykv_proxy.engine.filelock import try_lock
from polykv_proxy.engine.launch import EngineSpec
from polykv_proxy.engine.record import EngineRecord
from polykv_proxy.engine.state import Backoff, EngineState
from polykv_proxy.engine.supervisor import Supervisor
from polykv_proxy.errors import ConfigError

SCRIPTED = Path(__file__).with_name("scripted_server.py")
AT_ONCE = Backoff(first_s=0.01, max_s=0.01)
LONG_S = 60.0


class Log:
    """Collects reports and lets a test wait for the one it needs."""

    def __init__(self):
        self.all = []
        self._news = asyncio.Condition()
        self._pending = set()

    def __call__(self, status):
        """Take one report."""
        self.all.append(status)
        task = asyncio.get_running_loop().create_task(self._wake())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _wake(self):
        async with self._news:
            self._news.notify_all()

    @property
    def states(self):
        """States in order, repeats dropped."""
        names = [status.state for status in self.all]
        return [name for at, name in enumerate(names) if at == 0 or names[at - 1] is not name]

    async def until(self, state, count=1):
        """The ``count``-th report of a state that follows a different one."""
        async with asyncio.timeout(LONG_S), self._news:
            await self._news.wait_for(lambda: self.states.count(state) >= count)
        return next(status for status in reversed(self.all) if status.state is state)


class Case:
    """One supervisor with its scripted engine."""

    def __init__(self, folder):
        self.script = folder / "script"
        self.script.mkdir()
        self.log = Log()
        self.spec = EngineSpec(
            index=0,
            binary=SCRIPTED,
            model=folder / "m.gguf",
            argv=("--host", str(folder / "run" / "engine-0.sock")),
            env={"PATH": os.environ["PATH"], "SCRIPT_DIR": str(self.script)},
            socket=folder / "run" / "engine-0.sock",
            slot_dir=folder / "state" / "slots-0",
            state_dir=folder / "state",
            log_dir=folder / "log",
            ready_timeout_s=LONG_S,
            stop_deadline_s=LONG_S,
            backoff=AT_ONCE,
        )

    @property
    def record(self):
        """The file that describes the running engine."""
        return self.spec.state_dir / "engine-0.json"

    def put(self, name, text=""):
        """Write a file of the script."""
        (self.script / name).write_text(text)

    def lines(self, name):
        """Lines that the scripted engine noted."""
        file = self.script / name
        return file.read_text().split() if file.exists() else []

    @asynccontextmanager
    async def running(self, **changes):
        """A supervisor that runs inside the block, with these changes to its spec."""
        supervisor = Supervisor(replace(self.spec, **changes), self.log)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(supervisor.run())
            try:
                yield supervisor
            finally:
                await supervisor.stop(LONG_S)


@pytest.fixture
def case(tmp_path):
    """One supervisor with its scripted engine."""
    return Case(tmp_path)


def gone(pid):
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_start_reports_loading_then_ready_then_stops_with_one_signal(case):
    """A slow model shows as loading; stop sends one SIGTERM and leaves no process, record or claim."""
    case.put("hold")
    async with case.running() as supervisor:
        await case.log.until(EngineState.LOADING)
        (case.script / "hold").unlink()
        ready = await case.log.until(EngineState.READY)
        assert EngineRecord.read(case.record) == EngineRecord.take(ready.pid, case.spec.socket)
        await supervisor.stop(LONG_S)
    assert case.log.states == [
        EngineState.STARTING,
        EngineState.LOADING,
        EngineState.READY,
        EngineState.STOPPING,
        EngineState.DOWN,
    ]
    assert case.lines("terms") == ["term"]
    assert gone(ready.pid)
    assert not case.record.exists()
    assert try_lock(case.spec.state_dir / "engine-0.lock") is not None


async def test_engine_has_a_session_of_its_own(case):
    """Ctrl-C at the terminal goes to the proxy's group only."""
    async with case.running():
        ready = await case.log.until(EngineState.READY)
        assert os.getpgid(ready.pid) == ready.pid
        assert os.getsid(ready.pid) != os.getsid(0)


async def test_boot_failure_carries_the_reason_from_the_log(case):
    """The first and the last telling error line end up in the report; it keeps trying."""
    case.put(
        "boot_error",
        "0.00.006.211 E gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such file)\n"
        "0.00.006.376 I srv    operator(): operator(): cleaning up before exit...\n"
        "0.00.006.375 E srv    load_model: failed to load model, 'x.gguf'\n"
        "0.00.009.164 E srv  llama_server: exiting due to model loading error\n",
    )
    async with case.running():
        down = await case.log.until(EngineState.DOWN)
        assert down.reason == (
            "exited with status 1: failed to open GGUF file 'x.gguf' (No such file); "
            "failed to load model, 'x.gguf'"
        )
        await case.log.until(EngineState.DOWN, count=5)
        (case.script / "boot_error").unlink()
        ready = await case.log.until(EngineState.READY)
        assert ready.restarts >= 5


async def test_third_quick_failure_waits_long_and_stop_ends_the_wait(case):
    """Backoff grows to its cap, and a proxy that stops does not sit it out."""
    case.put("boot_error", "error: invalid argument: --frob")
    backoff = Backoff(first_s=0.01, max_s=3600)
    async with case.running(backoff=backoff) as supervisor:
        await case.log.until(EngineState.DOWN, count=3)
        await supervisor.stop(LONG_S)
    waits = [status.retry_in_s for status in case.log.all if status.state is EngineState.DOWN]
    assert waits[:3] == [0.01, 0.02, 3600]
    assert len(case.lines("starts")) == 3


async def test_crash_later_is_reported_and_the_engine_returns(case):
    """A killed engine comes back with another pid, and its socket is replaced."""
    async with case.running():
        first = await case.log.until(EngineState.READY)
        os.kill(first.pid, signal.SIGKILL)
        down = await case.log.until(EngineState.DOWN)
        assert down.reason == "killed by SIGKILL"
        second = await case.log.until(EngineState.READY, count=2)
        assert second.pid != first.pid
        assert second.restarts == 1


async def test_engine_that_ignores_sigterm_is_killed_after_the_deadline(case):
    """The deadline ends in SIGKILL, after exactly one SIGTERM, however often stop is called."""
    case.put("ignore_term")
    async with case.running() as supervisor:
        ready = await case.log.until(EngineState.READY)
        await asyncio.gather(supervisor.stop(0.2), supervisor.stop(0.2))
    assert gone(ready.pid)
    assert case.lines("terms") == ["term"]


async def test_engine_that_never_gets_ready_is_ended_and_tried_again(case):
    """A load that outlasts its limit counts as a failure."""
    case.put("hold")
    async with case.running(ready_timeout_s=2.0):
        down = await case.log.until(EngineState.DOWN)
        assert down.reason == "exited with status 0: not ready within 2 s"
        (case.script / "hold").unlink()
        await case.log.until(EngineState.READY)


async def test_stop_while_loading(case):
    """Stopping does not wait for the model."""
    case.put("hold")
    async with case.running() as supervisor:
        await case.log.until(EngineState.LOADING)
        await supervisor.stop(LONG_S)
    assert EngineState.READY not in case.log.states
    assert case.lines("terms") == ["term"]


async def test_cancelled_run_leaves_no_engine(case):
    """When the caller's task group falls apart the engine goes with it."""
    supervisor = Supervisor(case.spec, case.log)
    task = asyncio.get_running_loop().create_task(supervisor.run())
    ready = await case.log.until(EngineState.READY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(ready.pid)
    assert case.lines("terms") == ["term"]


async def test_missing_binary_is_a_reason_not_a_crash(case, tmp_path):
    """A binary that is being replaced is waited for."""
    late = tmp_path / "late-server"
    async with case.running(binary=late):
        down = await case.log.until(EngineState.DOWN)
        assert down.reason == f"cannot start {late}: No such file or directory"
        late.symlink_to(SCRIPTED)
        await case.log.until(EngineState.READY)


async def start_and_abandon(case):
    """What a killed proxy leaves behind: a running engine and its record."""
    supervisor = Supervisor(case.spec, case.log)
    supervisor.prepare()
    child = await supervisor._spawn()
    claims.drop(supervisor._claims)
    while not case.spec.socket.exists():
        await asyncio.sleep(0.01)
    return child


async def test_engine_left_by_a_killed_proxy_is_stopped_before_a_new_one_starts(case):
    """Recognised by pid, start time and command line; asked once."""
    old = await start_and_abandon(case)
    async with case.running():
        ready = await case.log.until(EngineState.READY)
        assert not old.running or await old.wait() == 0
        assert ready.pid != old.pid
    assert case.lines("terms") == ["term", "term"]


async def test_left_over_engine_that_ignores_sigterm_is_killed(case):
    """Never two engines, even when the old one does not listen."""
    case.put("ignore_term")
    old = await start_and_abandon(case)
    async with case.running(stop_deadline_s=0.3):
        await case.log.until(EngineState.READY)
        assert await old.wait() == -signal.SIGKILL
        (case.script / "ignore_term").unlink()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "other"}, {"socket": "/other.sock"}])
async def test_process_that_only_shares_the_pid_is_left_alone(case, change):
    """A recorded pid that belongs to somebody else by now gets no signal."""
    bystander = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    case.spec.state_dir.mkdir(parents=True)
    replace(EngineRecord.take(bystander.pid, case.spec.socket), **change).write(case.record)
    async with case.running():
        await case.log.until(EngineState.READY)
        assert bystander.returncode is None
    bystander.stdin.write(b"\n")
    assert await bystander.wait() == 0


async def test_unrecorded_engine_blocks_a_second_one(case):
    """A proxy killed between start and record leaves an engine that only its lock shows."""
    old = await start_and_abandon(case)
    case.record.unlink()
    async with case.running():
        down = await case.log.until(EngineState.DOWN)
        assert "engine-0.alive" in down.reason
        await old.end(LONG_S)
        await case.log.until(EngineState.READY)


async def test_second_proxy_on_the_same_state_folder_is_refused(case):
    """Two proxies must not fight over one engine."""
    async with case.running():
        ready = await case.log.until(EngineState.READY)
        with pytest.raises(ConfigError, match="in use by another polykv-proxy"):
            Supervisor(case.spec, case.log).prepare()
        assert not gone(ready.pid)


async def test_second_proxy_on_the_same_runtime_folder_is_refused(case, tmp_path):
    """Its engine's socket would replace the one that the first proxy's engine listens on."""
    async with case.running():
        await case.log.until(EngineState.READY)
        other = Supervisor(replace(case.spec, state_dir=tmp_path / "other"), case.log)
        for _ in range(2):  # what it had claimed before it was refused is free again
            with pytest.raises(ConfigError, match=r"runtime_dir: .* is in use by another polykv-proxy"):
                other.prepare()
        assert case.spec.socket.exists()


def test_socket_path_too_long_for_the_kernel_is_refused(case, tmp_path):
    """Found before the engine is started, with the key that changes it."""
    long = tmp_path / ("x" * 120) / "engine-0.sock"
    with pytest.raises(ConfigError, match=r"^runtime_dir: "):
        Supervisor(replace(case.spec, socket=long), print)


async def test_stop_before_run_makes_run_return(case):
    """A proxy that is told to stop during its own start starts no engine."""
    supervisor = Supervisor(case.spec, case.log)
    await supervisor.stop(LONG_S)
    await supervisor.run()
    assert case.lines("starts") == []


async def test_an_engine_that_hangs_is_started_again(case, monkeypatch):
    """It is ready, its process lives, but it answers nobody."""
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.05)
    async with case.running(hang_timeout_s=0.2, watch_s=0.01):
        await case.log.until(EngineState.READY)
        case.put("hang")
        down = await case.log.until(EngineState.DOWN)
        assert "not answering for" in down.reason
        assert "no answer within" in down.reason
        (case.script / "hang").unlink()
        await case.log.until(EngineState.READY, count=2)
    assert len(case.lines("starts")) == 2


async def test_an_engine_may_be_silent_for_a_while(case, monkeypatch):
    """All its HTTP threads may be taken; 0 means that it may be silent for ever."""
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.02)
    async with case.running(hang_timeout_s=0.0, watch_s=0.01):
        await case.log.until(EngineState.READY)
        case.put("hang")
        await asyncio.sleep(0.3)
        (case.script / "hang").unlink()
        assert case.log.all[-1].state is EngineState.READY
    assert len(case.lines("starts")) == 1


async def test_an_engine_whose_socket_is_gone_is_started_again(case):
    """Nobody will ever reach that process."""
    async with case.running(hang_timeout_s=0.0, watch_s=0.01):
        await case.log.until(EngineState.READY)
        case.spec.socket.unlink()
        down = await case.log.until(EngineState.DOWN)
        assert "cannot be reached" in down.reason
        await case.log.until(EngineState.READY, count=2)


async def test_a_running_engines_log_stays_short(case, monkeypatch):
    """It is put aside while the engine goes on; a failure to do so hurts nobody."""
    monkeypatch.setattr(supervisor_module, "_LOG_LOOK_S", 0.01)
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 10)
    case.put("speak", "a line that is long enough")
    file = case.spec.log_dir / "engine-0.log"
    old = file.with_name("engine-0.log.1")
    old.parent.mkdir()
    file.with_name("engine-0.log.0").mkdir()  # in the way
    async with case.running(), asyncio.timeout(LONG_S):
        await case.log.until(EngineState.READY)
        await asyncio.sleep(0.1)
        assert not old.exists()
        file.with_name("engine-0.log.0").rmdir()
        while not old.exists():
            await asyncio.sleep(0.01)
        assert case.log.all[-1].state is EngineState.READY
    assert "long enough" in old.read_text()
    assert len(case.lines("starts")) == 1


async def test_an_engine_that_was_never_ready_is_hopeless_after_some_failures(case):
    """And goes on being tried; one that was ready once never is."""
    case.put("boot_error", "error: invalid argument: --nonsense")
    async with case.running():
        async with asyncio.timeout(LONG_S):
            while not case.log.all or not case.log.all[-1].hopeless:
                await asyncio.sleep(0.01)
        assert len([each for each in case.log.all if each.state is EngineState.DOWN]) == 3
        assert "invalid argument: --nonsense" in case.log.all[-1].reason
        (case.script / "boot_error").unlink()
        await case.log.until(EngineState.READY)
        case.put("boot_error", "error: gone")
        os.kill(int(case.lines("starts")[-1]), signal.SIGKILL)
        await case.log.until(EngineState.DOWN, count=8)
        assert not case.log.all[-1].hopeless
