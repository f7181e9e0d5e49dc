"""The whole proxy but for its process: edge, routes and runtimes in front of fake patched engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from fake_polykv import FakePolykv
from yarl import URL

from api import contract
from polykv_proxy import sampler
from polykv_proxy.api.advice import Advice
from polykv_proxy.api.control import ControlApi
from polykv_proxy.api.guard import Guard
from polykv_proxy.api.journal import Journal
from polykv_proxy.api.routes import render_error
from polykv_proxy.api.tps import TpsApi
from polykv_proxy.app import assemble, further_routes
from polykv_proxy.core.decisions import Lease, PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.service import Durable
from polykv_proxy.edge import Edge, InProcess, Upstream
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.origin import Fixed, Origin, Start
from polykv_proxy.engine.poolfiles import CopyLimits
from polykv_proxy.engine.state import EngineState, EngineStatus
from polykv_proxy.fleet import Engine, Fleet
from polykv_proxy.policy import PolicyFile
from polykv_proxy.pooling import Pooling
from polykv_proxy.runtime import Runtime
from polykv_proxy.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fake_durable import FakeDurable

LIVENESS_S = 20.0
"""Generous: a test that waits this long hangs."""

PATIENT = {"hold_grace_s": 0.02, "keepalive_s": 0.01}
"""Streams open soon and then wait."""

CHAT = "/v1/chat/completions"
SYSTEM = "You are a helper with a long system prompt. " * 4

POOL = {"messages": [{"role": "system", "content": SYSTEM}]}
TOKENS = {"tokens": list(range(1, 41))}
"""Pools that are asked for."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens soon."""
    async with asyncio.timeout(LIVENESS_S):
        while not condition():
            await asyncio.sleep(0.002)


async def held_open(answer: aiohttp.ClientResponse) -> bytes:
    """What a held stream sent until it had sent three comments."""
    seen = b""
    async with asyncio.timeout(20.0):
        while seen.count(b":\n\n") < 3:
            seen += await answer.content.readany()
    return seen


async def occupied(proxies: Any, **queue: Any) -> tuple[Rig, asyncio.Task[Answer]]:
    """A proxy whose only slot is at work, and the request that runs there."""
    rig = await proxies(slots=1, queue=queue)
    rig.engine.gate.clear()
    running = rig.start(CHAT, chat("running"))
    await until(lambda: rig.engine.running == 1)
    return rig, running


def attached(engine: FakePolykv, **more: Any) -> Settings:
    """Settings that attach to an engine."""
    return Settings(listen="127.0.0.1:0", drain_s=5.0, engine={"url": engine.address, **more})


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A chat body: the common system prompt, then turns."""
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": "user", "content": content} for content in contents]
    return {"messages": messages, **more}


class Answer:
    """A complete answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        return self.json["error"]

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """Events of a stream, comments left out: name and document."""
        found = []
        for block in self.body.decode().split("\n\n"):
            name, document = None, None
            for line in block.split("\n"):
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and line != "data: [DONE]":
                    document = json.loads(line[6:])
            if document is not None:
                found.append((name, document))
        return found


class Rig:
    """A running proxy, with one engine for each of ``models``.

    Attributes:
        engines: the fake ones.
        engine: the first of them.
        fleet: what works for them.
        handlers: what answers for each of them.
        runtime: the first one's control plane at work.
        control: the application of the control routes.
        problems: what reached the loop's exception handler.
    """

    def __init__(
        self,
        *,
        slots: int = 2,
        max_pools: int = 2,
        admin: str | None = None,
        hold_s: float = 0.05,
        models: tuple[str, ...] = ("fake",),
        stock: FakePolykv | None = None,
        copies: CopyLimits | None = None,
        cells: int | None = None,
        saving: FakeDurable | tuple[FakeDurable, ...] | None = None,
        origin: Origin | None = None,
        **settings: Any,
    ) -> None:
        self.engines = (
            [FakePolykv(slots=slots, max_pools=max_pools) for _ in models] if stock is None else [stock]
        )
        self.saves = saving is not None
        self._origin = origin
        if saving is not None:
            self.engines = list(saving) if isinstance(saving, tuple) else [saving]
        self._copies = copies
        for engine, model in zip(self.engines, models, strict=True):
            engine.model = model
            engine.props |= {"model_path": f"{model}.gguf"}
        self.engine = self.engines[0]
        if cells is not None:
            self.engine.cells = cells
        self.settings = Settings(**settings)
        self.problems: list[dict[str, Any]] = []
        self._admin = admin
        self._hold_s = hold_s
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start everything; the engine is ready."""
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: self.problems.append(context))
        stack = self._stack
        tasks = TaskSet()
        self.policies = PolicyFile(self.settings.policy_file)
        engines = [await self._engine(each, number, tasks) for number, each in enumerate(self.engines)]
        stack.push_async_callback(tasks.cancel, 5.0)
        self.fleet = Fleet(engines)
        self.runtime, self.pooling = engines[0].runtime, engines[0].pooling
        guard = Guard(self._admin, self.settings.allowed_hosts)
        control = ControlApi(self.fleet, guard, shared=self.settings.share_across_keys, hold_s=self._hold_s)
        advice = Advice(self.fleet.first.plane.policy)
        self.journal = Journal(self.settings.requests.keep, Runtime.now_ts)
        self.tps = TpsApi(self.fleet, control.sees, interval_s=self.settings.telemetry.tps_interval_s)
        further = further_routes(self.fleet, control, advice, self.journal, self.tps)
        self.control = control.application(1 << 20, further)
        inside = await stack.enter_async_context(InProcess(self.control))
        routes = assemble(
            self.fleet,
            inside.upstream,
            guard,
            self.settings,
            advice=advice,
            journal=self.journal,
            hold_s=self._hold_s,
        )
        self.handlers = routes._handlers
        for engine in engines:
            tasks.spawn(sampler.run(engine.runtime.readings))
            tasks.spawn(engine.pooling.tender.run())
        self.edge = edge = Edge(routes.handle, render_error=render_error)
        port = await edge.listen("127.0.0.1", 0)
        stack.push_async_callback(edge.close, 0.0)
        stack.callback(self.tps.close)
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )
        await self.up()
        return self

    async def _engine(self, fake: FakePolykv, number: int, tasks: TaskSet) -> Engine:
        """Everything that works for one engine."""
        await self._stack.enter_async_context(fake)
        address = EngineAddress.parse(fake.address)
        client = await self._stack.enter_async_context(EngineClient(address, None))
        policy = PoolPolicy(**self.settings.pools.model_dump())
        plane = ControlPlane(max_waiting=self.settings.queue.max_depth, policy=policy, number=number)
        runtime = Runtime(
            plane, client, tasks, f"engine-{number}", copies=self._copies, policies=self.policies
        )
        upstream = Upstream(fake.address)
        self._stack.callback(upstream.close)
        key = self.settings.engine.api_key
        pooling = Pooling(runtime)
        durable = None
        if self.saves:
            saving: Any = fake
            runtime.saver = durable = Durable(
                runtime,
                pooling,
                self.settings.durable,
                self._origin or Fixed(Start(folder=saving.folder, model=saving.model_file)),
            )
        return Engine(
            number,
            f"engine-{number}",
            runtime,
            pooling,
            upstream,
            None if key is None else key.get_secret_value(),
            patch="p1",
            durable=durable,
        )

    @property
    def durable(self) -> Durable:
        """The first engine's."""
        durable = self.fleet.first.durable
        assert durable is not None
        return durable

    async def __aexit__(self, *_: object) -> None:
        """Stop everything, last first."""
        for engine in self.engines:
            engine.gate.set()
            engine.pool_gate.set()
        await self._stack.aclose()

    # -- the engine's life -------------------------------------------------------------------------------

    def down(self) -> None:
        """The supervisor reports that there is no engine, of several the first."""
        self.runtime.on_engine_status(EngineStatus(state=EngineState.DOWN, reason="test"))

    def loading(self) -> None:
        """The supervisor reports that the first engine is not ready yet."""
        self.runtime.on_engine_status(EngineStatus(state=EngineState.LOADING))

    async def up(self) -> None:
        """The supervisors report their engines; returns when requests can be sent to all."""
        for engine in self.fleet:
            engine.runtime.on_engine_status(EngineStatus(state=EngineState.READY))
            await until(engine.runtime.serving.is_set)

    # -- requests ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def open(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer is not read yet; keywords are headers with dashes for underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        method = method or ("GET" if body is None else "POST")
        data = body
        if body is not None and not isinstance(body, bytes):
            data = json.dumps(body).encode()
            named = {"Content-Type": "application/json"} | named
        target = self.url + path
        async with self.session.request(
            method, URL(target, encoded=True), data=data, headers=named
        ) as answer:
            yield answer

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        """A request and its whole answer, which is what the OpenAPI document says it is."""
        async with asyncio.timeout(LIVENESS_S), self.open(path, body, **options) as answer:
            whole = Answer(answer.status, answer.headers, await answer.read())
        contract.check(answer.method, path, whole)
        return whole

    def start(self, path: str, body: Any = None, **options: Any) -> asyncio.Task[Answer]:
        """``ask`` on the side; cancel it to leave."""
        return asyncio.get_running_loop().create_task(self.ask(path, body, **options))

    async def pool(self, body: Any = None, **headers: str) -> dict[str, Any]:
        """A pool of the common system prompt, or of ``body``."""
        answer = await self.ask("/polykv/pools", body or POOL, **headers)
        assert answer.status in (200, 201), answer.body
        return answer.json

    # -- the state ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.runtime.plane.leases._waiting)

    def take_all(self) -> list[Lease]:
        """Leases on every slot."""
        ask = Ask(scope=Scope(""))
        return [self.runtime.line.request(ask, conversation=False).lease for _ in self.engine.sequences]

    @property
    def idle(self) -> int:
        """Slots that may be given away."""
        return self.runtime.plane.board.idle_count

    async def quiet(self) -> None:
        """Wait until every slot is free; then nobody holds a lease."""
        await until(lambda: self.idle == len(self.engine.sequences))
        assert not self.runtime.plane.leases._running
