"""Claims about ``app``: the parts are joined, start in order and stop in order."""

import asyncio
import gc
import json
import os
import signal
import socket
import sys

import aiohttp
import pytest
import structlog
from api.rig import CHAT, attached, chat, until

from polykv_proxy import app
from polykv_proxy.app import GC_THRESHOLDS, Proxy, quieten_collector
from polykv_proxy.errors import ConfigError, EngineStartError
from polykv_proxy.settings import QueueSettings, Settings, TelemetrySettings


async def test_a_request_finds_its_way(engine):
    """It may come before the engine is known: the proxy listens first and holds it."""
    async with Proxy(attached(engine)) as proxy, aiohttp.ClientSession() as session:
        async with session.post(f"http://{proxy.address}{CHAT}", json=chat("hi")) as answer:
            assert answer.status == 200
            assert answer.headers["x-session-id"] == "auto-1"
        async with session.get(f"http://{proxy.address}/polykv/pools") as answer:
            assert (await answer.json())["pools"] == []


async def test_the_whole_face_is_there(engine):
    """Rates as a stream that the proxy's end ends, metrics, and status documents with members of ours."""
    async with aiohttp.ClientSession() as session:
        async with Proxy(attached(engine)) as proxy:
            base = f"http://{proxy.address}"
            await until(proxy.fleet.first.runtime.serving.is_set)
            for path in ("/slots", "/props"):
                async with session.get(base + path) as answer:
                    assert b'"opencoti"' in await answer.read()
            async with session.get(f"{base}/metrics") as answer:
                assert b"opencoti_polykv:engine_up 1.0" in await answer.read()
            stream = await session.get(f"{base}/polykv/tps", headers={"Accept": "text/event-stream"})
            assert (await stream.content.readline()).startswith(b"data: ")
        async with asyncio.timeout(20.0):
            await stream.read()


async def test_metrics_can_be_turned_off(engine):
    """The engine's are left."""
    quiet = attached(engine).model_copy(update={"telemetry": TelemetrySettings(metrics=False)})
    async with Proxy(quiet) as proxy, aiohttp.ClientSession() as session:
        await until(proxy.fleet.first.runtime.serving.is_set)
        async with session.get(f"http://{proxy.address}/metrics") as answer:
            assert await answer.text() == engine.metrics


async def test_the_engines_key_guards_the_control_routes(engine):
    """Who protected the engine has protected them, unless an admin key says otherwise."""
    async with Proxy(attached(engine, api_key="k")) as proxy, aiohttp.ClientSession() as session:
        async with session.get(f"http://{proxy.address}/polykv/sessions") as answer:
            assert answer.status == 401
        key = {"Authorization": "Bearer k"}
        async with session.get(f"http://{proxy.address}/polykv/sessions", headers=key) as answer:
            assert answer.status == 200


async def test_stopping_lets_running_requests_finish(engine):
    """Their answers are complete when the proxy is gone."""
    engine.gate.clear()
    async with aiohttp.ClientSession() as session:
        async with Proxy(attached(engine)) as proxy:
            url = f"http://{proxy.address}{CHAT}"
            running = asyncio.get_running_loop().create_task(session.post(url, json=chat("hi")))
            await until(lambda: engine.running)
            asyncio.get_running_loop().call_later(0.05, engine.gate.set)
        answer = await running
        assert answer.status == 200
        assert (await answer.json())["object"] == "chat.completion"


async def test_an_address_in_use_is_a_configuration_error(engine):
    """Named, before anything else runs on; what was started is stopped again."""
    async with Proxy(attached(engine)) as proxy:
        taken = attached(engine).model_copy(update={"listen": proxy.address})
        with pytest.raises(ConfigError, match="listen: cannot serve on"):
            await Proxy(taken).__aenter__()


async def test_a_signal_ends_serving(engine, monkeypatch):
    """SIGTERM stops in order; the exit status is 0."""
    started = asyncio.Event()
    listen = Proxy._listen

    async def listening(self, edge):
        await listen(self, edge)
        started.set()

    monkeypatch.setattr(Proxy, "_listen", listening)
    task = asyncio.get_running_loop().create_task(app._serve(attached(engine)))
    await started.wait()
    signal.raise_signal(signal.SIGTERM)
    async with asyncio.timeout(20.0):
        assert await task == 0


async def test_a_port_that_is_taken_starts_no_engine(tmp_path):
    """The other proxy's model may fill the card."""
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\nsleep 60\n")
    binary.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Settings(
            listen=f"127.0.0.1:{other.getsockname()[1]}",
            state_dir=tmp_path / "state",
            runtime_dir=tmp_path / "run",
            engine={"binary": binary, "model": binary},
        )
        with structlog.testing.capture_logs() as logs, pytest.raises(ConfigError, match="cannot serve on"):
            await Proxy(taken).__aenter__()
    assert [entry for entry in logs if entry["event"] == "engine_state"] == []


async def test_a_second_signal_cuts_off_what_runs(engine, monkeypatch):
    """Streams end with an event that says why, also one that still waits; the first signal told of it."""
    proxies = []
    listen = Proxy._listen

    async def listening(self, edge):
        await listen(self, edge)
        proxies.append(self)

    monkeypatch.setattr(Proxy, "_listen", listening)
    engine.token_gate.clear()
    given = attached(engine).model_copy(update={"queue": QueueSettings(hold_grace_s=0.0), "drain_s": 600.0})
    with structlog.testing.capture_logs() as logs:
        task = asyncio.get_running_loop().create_task(app._serve(given))
        await until(lambda: proxies)
        await until(proxies[0].fleet.first.runtime.serving.is_set)
        url = f"http://{proxies[0].address}{CHAT}"
        slots = len(proxies[0].fleet.first.plane.board.slots)
        async with aiohttp.ClientSession() as session:
            streams = [
                await session.post(url, json=chat("hi", stream=True, session_id=f"s{number}"))
                for number in range(slots + 1)  # the last one waits for a slot
            ]
            await until(lambda: engine.running == slots)
            signal.raise_signal(signal.SIGINT)
            await until(lambda: any(entry["event"] == "stopping" for entry in logs))
            signal.raise_signal(signal.SIGINT)
            async with asyncio.timeout(60.0):
                answers = [await stream.text() for stream in streams]
                assert await task == 0
    assert all('"code":"stopping"' in answer for answer in answers), answers
    (told,) = [entry for entry in logs if entry["event"] == "told_to_stop"]
    assert "second signal" in told["hint"]


async def test_an_engine_that_cannot_be_started_ends_the_proxy(tmp_path):
    """Nobody is to take it for a service that works; its own words say why."""
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'error: invalid argument: --nonsense' >&2\nexit 1\n")
    binary.chmod(0o700)
    engine = {"binary": binary, "model": binary, "restart_backoff_s": 0.01, "restart_backoff_max_s": 0.01}
    chosen = Settings(
        listen="127.0.0.1:0", state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", engine=engine
    )
    async with asyncio.timeout(60.0):
        with pytest.raises(
            EngineStartError, match=r"cannot be started: exited .* invalid argument: --nonsense"
        ):
            await app._serve(chosen)


async def test_an_engine_that_works_keeps_the_proxy_alive(engine, tmp_path):
    """Another one that cannot be started is tried on and on."""
    broken = {
        "name": "broken",
        "binary": tmp_path / "no",
        "model": tmp_path / "no",
        "restart_backoff_s": 0.01,
    }
    several = [broken, {"name": "works", "url": engine.address}]
    chosen = Settings(
        listen="127.0.0.1:0", state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", engines=several
    )
    async with Proxy(chosen) as proxy:
        await until(lambda: proxy.fleet[0].runtime.status and proxy.fleet[0].runtime.status.hopeless)
        await until(proxy.fleet[1].runtime.serving.is_set)
        assert not proxy.hopeless.is_set()


def test_the_collector_looks_seldom():
    """What is there at the start is out of its sight, and requests do not wake it."""
    before = gc.get_threshold()
    try:
        quieten_collector()
        assert gc.get_threshold() == GC_THRESHOLDS
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


async def test_policies_are_read_again_and_a_bad_file_changes_nothing(engine, tmp_path, monkeypatch):
    """By a signal at once, and by itself when the file changes; the log says why one is refused."""
    monkeypatch.setattr(app, "POLICY_POLL_S", 0.05)
    file = tmp_path / "policies.yaml"
    file.write_text("default: {target_tps_per_session: 5}")
    given = Settings(listen="127.0.0.1:0", engine={"url": engine.address}, policy_file=file)
    with structlog.testing.capture_logs() as logs:
        async with Proxy(given) as proxy:
            runtime = proxy.fleet.first.runtime
            await until(runtime.serving.is_set)

            def floor():
                return runtime.gatekeeper.policy(None).target_tps_per_session

            assert floor() == 5
            file.write_text("default: {target_tps_per_session: 7}")
            proxy.reload_policies()
            assert floor() == 7
            file.write_text("default: {target_tps_per_session: -1}")
            await until(lambda: any(entry["event"] == "policy_refused" for entry in logs))
            assert floor() == 7
            file.write_text("default: {target_tps_per_session: 123}")
            await until(lambda: floor() == 123)
    refused = [entry["reason"] for entry in logs if entry["event"] == "policy_refused"]
    assert len(refused) == 1
    assert "target_tps_per_session" in refused[0]


async def test_a_reload_that_was_asked_for_is_always_answered(engine, tmp_path, monkeypatch):
    """A bad file that did not change is refused again, a good one is said to be the same."""
    monkeypatch.setattr(app, "POLICY_POLL_S", 0.02)
    file = tmp_path / "policies.yaml"
    file.write_text("default: {target_tps_per_session: 5}")
    given = Settings(listen="127.0.0.1:0", engine={"url": engine.address}, policy_file=file)
    with structlog.testing.capture_logs() as logs:
        async with Proxy(given) as proxy:

            def events():
                return [entry["event"] for entry in logs if entry["event"].startswith("policy_")]

            proxy.reload_policies()
            assert events() == ["policy_unchanged"]
            file.write_text("default: {target_tps_per_session: -1}")
            await until(lambda: len(events()) == 2)
            await asyncio.sleep(0.1)  # the file is looked at, and not read again
            proxy.reload_policies()
            proxy.reload_policies()
            assert events() == ["policy_unchanged", *["policy_refused"] * 3]


async def test_sighup_reads_the_policies_again(engine, tmp_path):
    """The command's own signal handler, on a proxy in a process of its own."""
    file = tmp_path / "policies.yaml"
    file.write_text("default: {target_tps_per_session: 5}")
    command = (sys.executable, "-m", "polykv_proxy", "serve", "--listen", "127.0.0.1:0")
    environment = {**os.environ, "POLYKV_POLICY_FILE": str(file), "POLYKV_LOG__FORMAT": "json"}
    process = await asyncio.create_subprocess_exec(
        *command,
        "--engine-url",
        engine.address,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stderr is not None

    async def told(event):
        async with asyncio.timeout(60.0):
            async for line in process.stderr:
                if json.loads(line)["event"] == event:
                    return
        raise AssertionError(f"it ended without {event}")

    try:
        await told("engine_ready")
        file.write_text("default: {target_tps_per_session: 6}")
        process.send_signal(signal.SIGHUP)
        await told("policy_changed")
        assert process.returncode is None
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_a_log_that_nobody_reads_any_more_is_no_reason_to_stay(log_format):
    """Whoever collected it died: SIGTERM still ends the proxy, and well."""
    command = (sys.executable, "-m", "polykv_proxy", "serve", "--listen", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(*command, "--engine-url", "http://127.0.0.1:1"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "POLYKV_LOG__FORMAT": log_format},
    )
    try:
        async with asyncio.timeout(60.0):
            while b"engine_state" not in await process.stderr.readline():
                assert process.returncode is None
            process._transport.get_pipe_transport(2).close()
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
