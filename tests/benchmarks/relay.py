"""What relaying costs: added time to first byte, CPU per relayed event, requests per second.

Run ``python tests/benchmarks/relay.py``; about six minutes with the defaults. Prints a table and writes
JSON with the facts of the machine. Everything talks over 127.0.0.1 and Unix sockets, for a bounded time.

Contestants, in turn within each round, so that a noisy moment hits all of them alike:

    direct   no proxy: the client talks to the stand-in engine
    edge     polykv_proxy.edge on uvloop; the handler reads the body, decodes a few members, relays
    nginx    proxy_pass with proxy_buffering off, one worker (left out when there is no nginx)
    aiohttp  a plain pass-through: web.Application, ClientSession, iter_any

The contestant has one core to itself; the stand-in engine and the clients share another. Figures are
medians over the rounds. CPU time is what the kernel accounted to the contestant's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop

EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" token"}}],"created":1760000000,'
    b'"id":"chatcmpl-ecQULm0WqPrftUqjPZO1CFYeDjGZNbDu","model":"smollm2","system_fingerprint":"b11434",'
    b'"object":"chat.completion.chunk"}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS = [  # of different lengths, as real ones are: nobody shall profit from knowing the head already
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
    b"Keep-Alive: timeout=5, max=1000000\r\nContent-Length: %d\r\n\r\n%b" % (size, b"x" * size)
    for size in range(400, 1400)
]
EVENT_INTERVAL_S = 0.04
CONTESTANTS = ("direct", "edge", "proxy", "nginx", "aiohttp")


def request(path: str, *, stream: bool) -> bytes:
    """A chat request of about 2 kB."""
    messages = [{"role": "user", "content": "word " * 350}]
    body = json.dumps({"model": "m", "stream": stream, "max_tokens": 8, "messages": messages}).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        b"Authorization: Bearer key\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )


# -- the stand-in engine ----------------------------------------------------------------------------------


def status_answer(path: bytes) -> bytes:
    """What the whole proxy asks an engine when it meets it: one without the patch, with many slots."""
    documents = {
        b"/health": {"status": "ok"},
        b"/props": {"total_slots": 512, "default_generation_settings": {"n_ctx": 4096}},
        b"/v1/models": {"data": []},
        b"/slots": [],
    }
    status = b"200 OK" if path in documents else b"404 Not Found"
    body = json.dumps(documents.get(path, {})).encode()
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        status,
        len(body),
    )
    return head + body


class StandIn(asyncio.Protocol):
    """Answers ``?stream`` with events at a fixed pace, ``?first`` with one event, other posts with JSON."""

    def __init__(self) -> None:
        self.timer = None
        self.left = 0
        self.answered = id(self) % len(ANSWERS)

    def connection_made(self, transport) -> None:
        """Keep the transport."""
        self.transport = transport
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """Each request fits into one read, or the rest of its body is skipped by its length."""
        if self.left:
            self.left -= len(data)
        elif data.startswith(b"GET"):
            self.transport.write(status_answer(data.split(b" ", 2)[1]))
            return
        else:
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            self.left = length - len(body)
            self.path = head.split(b" ", 2)[1]
        if self.left:
            return
        if self.path.endswith(b"?stream"):
            self.transport.write(STREAM_HEAD + CHUNK)
            self.at = self.loop.time()
            self.tick()
        elif self.path.endswith(b"?first"):
            self.transport.write(STREAM_HEAD + CHUNK + b"0\r\n\r\n")
        else:
            self.answered = (self.answered + 1) % len(ANSWERS)
            self.transport.write(ANSWERS[self.answered])

    def tick(self) -> None:
        """Send one event, on time however late the last one was."""
        self.transport.write(CHUNK)
        self.at += EVENT_INTERVAL_S
        self.timer = self.loop.call_at(self.at, self.tick)

    def connection_lost(self, _exc) -> None:
        """Stop sending."""
        if self.timer is not None:
            self.timer.cancel()


async def run_engine(args) -> None:
    """Listen on a Unix socket for proxies and on a port for direct clients."""
    loop = asyncio.get_running_loop()
    near = await loop.create_unix_server(StandIn, args.engine)
    far = await loop.create_server(StandIn, "127.0.0.1", args.port)
    async with near, far:
        await asyncio.Event().wait()


# -- contestants ------------------------------------------------------------------------------------------


async def run_edge(args) -> None:
    """Read the body, look at a few members, relay with an observer that counts."""
    import msgspec  # noqa: PLC0415 - only this contestant needs them

    from polykv_proxy.edge import Edge, Upstream, relay  # noqa: PLC0415

    members = [("model", str, ""), ("stream", bool, False), ("messages", msgspec.Raw, msgspec.Raw(b""))]
    asked = msgspec.defstruct("Asked", members)
    decode = msgspec.json.Decoder(asked).decode
    upstream = Upstream(f"unix:{args.engine}")
    tokens = 0

    def observe(_payload: bytes) -> None:
        nonlocal tokens
        tokens += 1

    async def handler(exchange) -> None:
        head = exchange.head
        body = await exchange.read_body(1 << 24)
        decode(body)
        response = await upstream.send(
            head.method, head.target, head.headers, body, named=head.connection_named()
        )
        await relay(
            exchange,
            response,
            add_headers=[(b"x-session-id", b"s-1")],
            observer=observe,
            on_truncated=lambda _error: b"data: {}\n\n",
        )

    edge = Edge(handler)
    await edge.listen("127.0.0.1", args.port)
    await asyncio.Event().wait()


async def run_proxy(args) -> None:
    """The product: routes, control plane, slots and all, attached to the stand-in."""
    from polykv_proxy.app import Proxy, quieten_collector  # noqa: PLC0415
    from polykv_proxy.settings import EngineSettings, Settings  # noqa: PLC0415
    from polykv_proxy.telemetry import configure_logging  # noqa: PLC0415

    settings = Settings(
        listen=f"127.0.0.1:{args.port}",
        engine=EngineSettings(url=f"unix:{args.engine}"),
        drain_s=0.0,
    )
    configure_logging(settings.log.model_copy(update={"level": "warning"}))
    async with Proxy(settings) as proxy:
        await proxy.fleet.first.runtime.serving.wait()
        quieten_collector()  # as the command does
        await asyncio.Event().wait()


async def run_aiohttp(args) -> None:
    """The obvious pass-through."""
    logging.disable()  # it complains about every client that leaves at the end of a load
    from aiohttp import ClientSession, ClientTimeout, UnixConnector, web  # noqa: PLC0415

    hop_by_hop = {"transfer-encoding", "content-length", "connection", "keep-alive", "host"}
    session = ClientSession(
        connector=UnixConnector(args.engine, limit=0),
        timeout=ClientTimeout(total=None),
        auto_decompress=False,
    )

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in hop_by_hop}
        async with session.request(
            request.method, f"http://engine{request.path_qs}", data=body, headers=headers
        ) as up:
            kept = {key: value for key, value in up.headers.items() if key.lower() not in hop_by_hop}
            response = web.StreamResponse(status=up.status, headers=kept)
            response.content_length = up.content_length
            await response.prepare(request)
            async for piece in up.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    await asyncio.Event().wait()


NGINX = """
daemon off; worker_processes 1; user root; pid {folder}/nginx.pid; error_log {folder}/error.log crit;
events {{ worker_connections 2048; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_body_buffer_size 1m; keepalive_requests 1000000;
  upstream engine {{ server unix:{engine}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""


@dataclass
class Contestant:
    """A process under test, pinned to a core."""

    name: str
    port: int
    process: subprocess.Popen | None

    def cpu_s(self) -> float | None:
        """CPU seconds of the process and its children so far."""
        if self.process is None:
            return None
        tree = psutil.Process(self.process.pid)
        return sum(_cpu_s(process.pid) for process in [tree, *tree.children(recursive=True)])

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(10)


def _cpu_s(pid: int) -> float:
    """Nanosecond accounting where the kernel has it; psutil's ticks else."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system


def start(command: list[str], core: int, port: int) -> subprocess.Popen:
    """Start a process on a core and wait until it listens."""
    process = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {core}))  # noqa: PLW1509
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process
        time.sleep(0.02)
    process.kill()
    raise SystemExit(f"{command[0]} does not listen")


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def contestant(name: str, folder: Path, engine: str, direct_port: int, core: int) -> Contestant:
    """Start one."""
    if name == "direct":
        return Contestant(name, direct_port, None)
    port = free_port()
    if name == "nginx":
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, engine=engine, port=port))
        command = [shutil.which("nginx") or "nginx", "-c", str(config)]
    else:
        command = [sys.executable, __file__, "--role", name, "--engine", engine, "--port", str(port)]
    return Contestant(name, port, start(command, core, port))


# -- clients ----------------------------------------------------------------------------------------------


class Listener(asyncio.Protocol):
    """A client of one stream: counts events."""

    def __init__(self, counter: list[int]) -> None:
        self.counter = counter

    def connection_made(self, transport) -> None:
        """Ask for the stream."""
        self.transport = transport
        transport.write(request("/v1/chat/completions?stream", stream=True))

    def data_received(self, data: bytes) -> None:
        """Count."""
        self.counter[0] += data.count(b"\n\n")


class Caller(asyncio.Protocol):
    """A client that asks again as soon as it was answered."""

    def __init__(self, counter: list[int]) -> None:
        self.counter = counter
        self.request = request("/v1/chat/completions", stream=False)
        self.left = 0

    def connection_made(self, transport) -> None:
        """Ask."""
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Ask again at the end of an answer."""
        if self.left:
            self.left -= len(data)
        else:
            head, _, body = data.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            self.left = length - len(body)
        if not self.left:
            self.counter[0] += 1
            self.transport.write(self.request)


async def load(target: Contestant, make, count: int, seconds: float) -> tuple[float, float | None]:
    """Run clients for a while; returns what they counted per second and CPU microseconds for each."""
    loop = asyncio.get_running_loop()
    counter = [0]
    transports = []
    for _ in range(count):
        transport, _ = await loop.create_connection(lambda: make(counter), "127.0.0.1", target.port)
        transports.append(transport)
        await asyncio.sleep(EVENT_INTERVAL_S / count)  # spread over one interval, as real streams are
    await asyncio.sleep(0.5)
    began, counted, cpu_s = time.monotonic(), counter[0], target.cpu_s()
    await asyncio.sleep(seconds)
    spent = None if cpu_s is None else target.cpu_s() - cpu_s
    counted = counter[0] - counted
    rate = counted / (time.monotonic() - began)
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0.2)
    return rate, None if spent is None else spent / max(counted, 1) * 1e6


def ttft_ms(target: Contestant, count: int) -> float:
    """Median milliseconds from sending a request to reading its first event, one at a time."""
    ask = request("/v1/chat/completions?first", stream=True)
    samples = []
    with socket.create_connection(("127.0.0.1", target.port), timeout=20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began = time.perf_counter()
            sock.sendall(ask)
            got = b""
            while EVENT not in got:
                got += (piece := sock.recv(65536))
                if not piece or not got.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"{target.name} answered {got!r}")
            samples.append((time.perf_counter() - began) * 1e3)
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(65536)
    return statistics.median(samples[count // 10 :])


# -- the run ----------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Samples of one contestant, one per round."""

    ttft_ms: list[float] = field(default_factory=list)
    requests_per_s: list[float] = field(default_factory=list)
    request_cpu_us: list[float] = field(default_factory=list)
    event_cpu_us: dict[int, list[float]] = field(default_factory=dict)
    events_per_s: dict[int, list[float]] = field(default_factory=dict)


def measure(target: Contestant, figures: Figures, args) -> None:
    """One round of one contestant."""
    figures.ttft_ms.append(ttft_ms(target, args.requests))
    for streams in args.streams:
        rate, cpu_us = uvloop.run(load(target, Listener, streams, args.seconds))
        figures.events_per_s.setdefault(streams, []).append(rate)
        if cpu_us is not None:
            figures.event_cpu_us.setdefault(streams, []).append(cpu_us)
    rate, cpu_us = uvloop.run(load(target, Caller, args.concurrency, args.seconds))
    figures.requests_per_s.append(rate)
    if cpu_us is not None:
        figures.request_cpu_us.append(cpu_us)


def machine() -> dict[str, object]:
    """What the figures depend on."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in described if "model name" in line), None)
    nginx = shutil.which("nginx")
    shown = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=False).stderr if nginx else ""
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "uvloop": version("uvloop"),
        "httptools": version("httptools"),
        "aiohttp": version("aiohttp"),
        "nginx": shown.strip().rpartition("/")[2] or None,
        "load_before": os.getloadavg()[0],
    }


def median(samples: list[float] | None) -> float | None:
    """Median, or None without samples."""
    return statistics.median(samples) if samples else None


def summary(all_figures: dict[str, Figures]) -> dict[str, dict[str, object]]:
    """Medians, and the spread of the figures that the aims are about."""
    direct = all_figures["direct"]
    table = {}
    for name, figures in all_figures.items():
        added = [mine - base for mine, base in zip(figures.ttft_ms, direct.ttft_ms, strict=True)]
        table[name] = {
            "ttft_ms": median(figures.ttft_ms),
            "added_ttft_ms": median(added),
            "event_cpu_us": {streams: median(samples) for streams, samples in figures.event_cpu_us.items()},
            "event_cpu_us_range": {
                streams: (min(samples), max(samples)) for streams, samples in figures.event_cpu_us.items()
            },
            "events_per_s": {streams: median(samples) for streams, samples in figures.events_per_s.items()},
            "requests_per_s": median(figures.requests_per_s),
            "requests_per_s_range": (min(figures.requests_per_s), max(figures.requests_per_s)),
            "request_cpu_us": median(figures.request_cpu_us),
        }
    return table


def show(table: dict[str, dict[str, object]], streams: list[int]) -> None:
    """Print the medians."""

    def cell(value: object, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    names = [
        "added TTFT ms",
        *(f"CPU us/event, {count} streams" for count in streams),
        "requests/s",
        "CPU us/request",
    ]
    print(" | ".join(["contestant".ljust(10), *names]))
    for name, row in table.items():
        cells = [cell(row["added_ttft_ms"], 3)]
        cells += [cell(row["event_cpu_us"].get(count), 1) for count in streams]
        cells += [cell(row["requests_per_s"], 0), cell(row["request_cpu_us"], 1)]
        print(
            " | ".join(
                [name.ljust(10), *(text.rjust(len(head)) for text, head in zip(cells, names, strict=True))]
            )
        )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load")
    parser.add_argument("--requests", type=int, default=300, help="for the time to first byte")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 50, 200])
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, default=Path("bench-results/relay.json"))
    parser.add_argument("--role", choices=["engine", "edge", "proxy", "aiohttp"], help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run one role, or the whole benchmark."""
    args = arguments()
    if args.role:
        uvloop.run(
            {"engine": run_engine, "edge": run_edge, "proxy": run_proxy, "aiohttp": run_aiohttp}[args.role](
                args
            )
        )
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    names = [name for name in args.only if name != "nginx" or shutil.which("nginx")]
    names = ["direct", *(name for name in names if name != "direct")]
    all_figures = {name: Figures() for name in names}
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="bench-relay-") as folder:
        engine_path, port = f"{folder}/engine.sock", free_port()
        command = [sys.executable, __file__, "--role", "engine", "--engine", engine_path, "--port", str(port)]
        engine = start(command, cores[0], port)
        try:
            for number in range(args.rounds):
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
                for name in names:
                    target = contestant(name, Path(folder), engine_path, port, cores[-1])
                    try:
                        measure(target, all_figures[name], args)
                    finally:
                        target.stop()
        finally:
            engine.terminate()
            engine.wait(10)
    table = summary(all_figures)
    show(table, args.streams)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    samples = {name: vars(figures) for name, figures in all_figures.items()}
    args.out.write_text(json.dumps({"machine": facts, "medians": table, "samples": samples}, indent=2) + "\n")
    print(f"written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
