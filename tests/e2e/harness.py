"""Real processes for tests: `polykv-proxy serve` and bare engines, each in folders of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from polykv_proxy.readings import FRESH_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATIENCE_S = 120.0
"""Liveness bound for anything that must happen at all on a loaded two-core machine."""

LOOK_S = 0.01
"""Between two looks at something that is waited for."""

ONE_THREAD = ("--threads", "1")
"""Of an engine that is tested: the test, the proxy and other tests beside it work, too, and several threads
that wait for each other are far slower than one where cores are short."""

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


@dataclass(slots=True)
class Answer:
    """One HTTP answer, read to its end."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of an event stream, ``[DONE]`` left out."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


@dataclass(slots=True)
class Http:
    """A client of one server, by port or Unix socket."""

    base: str
    unix: str | None = None
    kept: aiohttp.ClientSession | None = None
    """Connections that are used again, of a client that wants them."""

    def session(self) -> aiohttp.ClientSession:
        """A session without kept-alive connections, so that tests do not influence each other."""
        connector = (
            aiohttp.UnixConnector(self.unix, force_close=True)
            if self.unix
            else aiohttp.TCPConnector(force_close=True)
        )
        return aiohttp.ClientSession(self.base, connector=connector, timeout=NO_TIMEOUT)

    async def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request; ``body`` is sent as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with asyncio.timeout(PATIENCE_S):
            if self.kept is not None:
                return await _ask(self.kept, method, path, data, sent)
            async with self.session() as session:
                return await _ask(session, method, path, data, sent)

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[Http]:
        """The same server over connections that are kept alive, for clients with much to ask."""
        connector = aiohttp.UnixConnector(self.unix) if self.unix else aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.base, connector=connector, timeout=NO_TIMEOUT) as session:
            yield replace(self, kept=session)

    async def get(self, path: str, **kw: Any) -> Answer:
        """GET."""
        return await self("GET", path, **kw)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """POST of JSON."""
        return await self("POST", path, body, headers)


async def _ask(
    session: aiohttp.ClientSession, method: str, path: str, data: bytes | None, headers: dict[str, str]
) -> Answer:
    async with session.request(method, path, data=data, headers=headers) as answer:
        return Answer(answer.status, answer.headers, await answer.read())


@dataclass(slots=True)
class Served:
    """A running `polykv-proxy serve`."""

    http: Http
    engine: Http
    process: asyncio.subprocess.Process
    folder: Path
    port: int
    log: list[dict[str, Any]] = field(default_factory=list)

    async def counters(self) -> dict[str, Any]:
        """The engine's counters, read directly."""
        return (await self.engine.get("/polykv/engine/counters")).json

    async def cells_used(self) -> int:
        """Used KV cells, from the engine."""
        return int((await self.counters())["kv"]["n_used"])

    async def quiet(self) -> dict[str, Any]:
        """Counters once the engine is idle and the proxy's picture agrees that it is."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                counters = await self.counters()
                sessions = (await self.http.get("/polykv/sessions")).json["sessions"]
                running = any(each["state"] == "running" for each in sessions)
                if not running and all(slot["state"] == "idle" for slot in counters["slots"]):
                    return counters
                await asyncio.sleep(LOOK_S)

    async def listing(self, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """``GET /polykv/pools`` of an idle engine, read after this call began."""
        await self.quiet()
        await asyncio.sleep(FRESH_S)  # no older than this is what is published from now on
        return (await self.http.get("/polykv/pools", headers=headers)).json

    async def empty_slots(self) -> None:
        """Erase every slot through the proxy, so that only pools hold cells."""
        for slot in (await self.quiet())["slots"]:
            await self.until(lambda slot=slot: self._erased(slot["id"]))

    async def computed(self) -> int:
        """Prompt tokens that the engine has computed so far."""
        return sum(slot["n_prompt_total"] for slot in (await self.quiet())["slots"])

    async def clear(self, headers: dict[str, str] | None = None) -> None:
        """Empty the slots, and release every pool of a key, none unless given."""
        await self.empty_slots()  # first: what is released while it is in use has a grace
        for pool in (await self.http.get("/polykv/pools", headers=headers)).json["pools"]:
            await self.http("DELETE", f"/polykv/pools/{pool['pool_id']}?recursive=1", headers=headers)

    async def _erased(self, slot: int) -> bool:
        return (await self.http.post(f"/slots/{slot}?action=erase", {})).status == 200

    async def until(self, condition: Any) -> None:
        """Wait until an async condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                await asyncio.sleep(LOOK_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event so far."""
        return [line for line in self.log if line.get("event") == name]

    @property
    def engine_pid(self) -> int:
        """Process id of the engine that serves."""
        return self.pid_of("engine-0")

    def pid_of(self, engine: str) -> int:
        """Process id of one engine of several."""
        states = [line for line in self.events("engine_state") if line["engine"] == engine]
        return [line["pid"] for line in states if line["state"] == "ready"][-1]

    def engine_at(self, number: int) -> Http:
        """One engine of several, directly."""
        return Http("http://localhost", str(self.folder / "run" / f"engine-{number}.sock"))


@asynccontextmanager
async def serve(
    folder: Path,
    *args: str,
    env: dict[str, str] | None = None,
    engines: int = 1,
    ready: bool = True,
    stop: bool = True,
) -> AsyncIterator[Served]:
    """Run `polykv-proxy serve` with these arguments until the block ends; it must end well.

    Args:
        folder: for its state and sockets.
        *args: of the command line.
        env: further environment variables.
        engines: how many are configured.
        ready: whether to wait until all of them serve.
        stop: whether to stop it at the end.
    """
    if not {"--engine-url", "--config"} & set(args):
        args += tuple(f"--engine-arg={word}" for word in ONE_THREAD)
    environment = {
        **os.environ,
        "POLYKV_STATE_DIR": str(folder / "state"),
        "POLYKV_RUNTIME_DIR": str(folder / "run"),
        "POLYKV_LOG__FORMAT": "json",
        "POLYKV_LOG__LEVEL": "debug",
        "POLYKV_DRAIN_S": "2",
        "POLYKV_ENGINE__RESTART_BACKOFF_S": "0.1",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "polykv_proxy",
        "serve",
        "--listen",
        "127.0.0.1:0",
        *args,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    log: list[dict[str, Any]] = []
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reader = asyncio.create_task(_read_log(process, log, port))
    try:
        async with asyncio.timeout(PATIENCE_S):
            number = await port
        engine = Http("http://localhost", str(folder / "run" / "engine-0.sock"))
        served = Served(Http(f"http://127.0.0.1:{number}"), engine, process, folder, number, log)
        if ready:
            await served.until(lambda: _ready(served, engines))
        yield served
    finally:
        if process.returncode is None and stop:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        reader.cancel()
    if stop:
        assert process.returncode in (0, -signal.SIGKILL), f"exit {process.returncode}: {log[-5:]}"


async def _ready(served: Served, engines: int) -> bool:
    assert served.process.returncode is None, f"the proxy ended: {served.log[-5:]}"
    if len({event["engine"] for event in served.events("engine_ready")}) != engines:
        return False
    return (await served.http.get("/health")).status == 200  # what was logged is in force a moment later


async def _read_log(
    process: asyncio.subprocess.Process, log: list[dict[str, Any]], port: asyncio.Future[int]
) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = {"event": "text", "text": line.decode(errors="replace").rstrip()}
        log.append(entry)
        if entry.get("event") == "listening" and not port.done():
            port.set_result(int(entry["address"].rpartition(":")[2]))
    if not port.done():
        port.set_exception(RuntimeError(f"the proxy did not start: {log[-5:]}"))


@asynccontextmanager
async def bare_engine(binary: Path, model: Path, folder: Path, *args: str) -> AsyncIterator[Http]:
    """llama-server alone, on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "engine.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            "-m",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *ONE_THREAD,
            *args,
            stdout=log,
            stderr=log,
            stdin=asyncio.subprocess.DEVNULL,
        )
        http = Http(f"http://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await _healthy(http):
                    assert process.returncode is None, (folder / "engine.log").read_text()[-500:]
                    await asyncio.sleep(0.1)
            yield http
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def _healthy(http: Http) -> bool:
    try:
        return (await http.get("/health")).status == 200
    except aiohttp.ClientError:
        return False
