"""The composition root: builds every part, joins them, and takes them down in the right order.

Starting: listen, then the engines; requests that come before one is ready are held. Stopping: no new
requests, running ones finish within the drain time, KV is saved, then the engines, then the control planes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import structlog
import uvloop

from polykv_proxy import __version__, sampler
from polykv_proxy.api.admission import AdmissionApi
from polykv_proxy.api.advice import Advice
from polykv_proxy.api.cache import CacheApi
from polykv_proxy.api.control import ControlApi
from polykv_proxy.api.guard import Guard
from polykv_proxy.api.inference import Inference
from polykv_proxy.api.journal import Journal
from polykv_proxy.api.merged import Merged
from polykv_proxy.api.requests import RequestsApi
from polykv_proxy.api.routes import Handlers, Routes, render_error
from polykv_proxy.api.scrape import Scrape
from polykv_proxy.api.status import Status
from polykv_proxy.api.tps import TpsApi
from polykv_proxy.core.decisions import PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.durable.service import Durable
from polykv_proxy.edge.inproc import InProcess
from polykv_proxy.edge.server import Edge
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.edge.upstream import Upstream
from polykv_proxy.engine import build
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.attached import Attached
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.launch import slot_folder, spec_from
from polykv_proxy.engine.poolfiles import CopyLimits
from polykv_proxy.engine.supervisor import Supervisor
from polykv_proxy.errors import BuildError, ConfigError, EngineStartError
from polykv_proxy.fleet import Engine, Fleet
from polykv_proxy.metrics import Exposition
from polykv_proxy.policy import PolicyFile
from polykv_proxy.pooling import Pooling
from polykv_proxy.runtime import Runtime
from polykv_proxy.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.engine.state import EngineProcess, EngineStatus
    from polykv_proxy.settings import Settings

log = structlog.get_logger(__name__)

POOL_HOLD_S = 60.0
"""How long the creation of a pool waits for an engine that is starting."""

GC_THRESHOLDS = (50_000, 20, 100)
"""Objects made until the youngest generation is looked through; rounds of that until the older ones are."""

PASS_THROUGH_HOLD_S = 10.0
"""How long a request that needs no slot waits for an engine that is starting."""

DRAIN_GRACE_S = 1.0
"""Beyond its own bound a drain has so long to stop."""

POLICY_POLL_S = 2.0
"""Seconds between two looks at the policy file."""

_OURS_TO_START = ("binary", "stock", "model", "parallel", "ctx_size", "prefill_cap", "args", "env")
"""Settings of the engine that mean nothing for one that runs already."""


class Proxy:
    """A running proxy with its engines; an async context manager.

    Args:
        settings: ``binary`` and ``model`` of each engine filled in, unless it has a ``url``.

    Attributes:
        fleet: the engines and their control planes at work.
        address: ``host:port`` it listens on, once entered.
        hopeless: set when no engine was ever ready and all of them have failed several times.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.fleet: Fleet
        self.address = ""
        self.hopeless = asyncio.Event()
        self._policies: PolicyFile
        self._policy_error: str | None = None

    async def __aenter__(self) -> Self:
        """Listen, and start the engines; returns before they are ready.

        Raises:
            ConfigError: something that cannot work, found before anything was started.
        """
        settings = self._settings
        async with AsyncExitStack() as stack:
            tasks = TaskSet()
            self._policies = policies = PolicyFile(settings.policy_file)
            starts = [
                await _prepare(settings, number, tasks, stack, self._on_hopeless, policies=policies)
                for number in range(len(settings.fleet))
            ]
            stack.push_async_callback(tasks.cancel, 5.0)  # before what they use is closed
            self.fleet = fleet = Fleet([start.engine for start in starts])

            guard = Guard(_admin_key(settings), (*settings.allowed_hosts, settings.listen_host))
            control = ControlApi(fleet, guard, shared=settings.share_across_keys, hold_s=POOL_HOLD_S)
            advice = Advice(fleet.first.plane.policy)
            journal = Journal(settings.requests.keep, Runtime.now_ts)
            tps = TpsApi(fleet, control.sees, interval_s=settings.telemetry.tps_interval_s)
            further = [
                *advice.routes(control.sees),
                *RequestsApi(journal.book, control.sees).routes(),
                *tps.routes(),
                *AdmissionApi(fleet, control.sees).routes(),
                *CacheApi(fleet, control.sees).routes(),
            ]
            inside = await stack.enter_async_context(
                InProcess(control.application(settings.max_body_bytes, further))
            )
            routes = assemble(
                fleet,
                inside.upstream,
                guard,
                settings,
                advice=advice,
                journal=journal,
                hold_s=PASS_THROUGH_HOLD_S,
            )
            for start in starts:
                tasks.spawn(sampler.run(start.engine.runtime.readings))
                tasks.spawn(start.engine.pooling.tender.run())
                tasks.spawn(start.durable.run())
                tasks.spawn(_keep(start.process, start.engine.name))
            tasks.spawn(self._watch_policies())
            stack.push_async_callback(_stop, starts)
            stack.push_async_callback(_drain, starts, settings.durable.drain_s + DRAIN_GRACE_S)
            edge = Edge(routes.handle, render_error=render_error)
            stack.push_async_callback(edge.close, settings.drain_s)
            stack.callback(tps.close)
            await self._listen(edge)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drain, then stop everything."""
        log.info("stopping", drain_s=self._settings.drain_s)
        await self._stack.aclose()
        log.info("stopped")

    async def _watch_policies(self) -> None:
        """Notice when the policy file changes."""
        while True:
            await asyncio.sleep(POLICY_POLL_S)
            self._report_policies(self._policies.poll())

    def reload_policies(self) -> None:
        """Read the policy file again."""
        self._report_policies(self._policies.reload())

    def _report_policies(self, changed: bool) -> None:
        error = self._policies.error
        if error is not None and error != self._policy_error:
            log.warning("policy_refused", reason=error)
        self._policy_error = error
        if changed:
            log.info("policy_changed")
            for engine in self.fleet:
                engine.runtime.gatekeeper.refresh()

    def _on_hopeless(self) -> None:
        """An engine cannot be started; the others may do, or may have done."""
        states = [engine.runtime.status for engine in self.fleet]
        if all(status is not None and status.hopeless for status in states):
            self.hopeless.set()

    async def _listen(self, edge: Edge) -> None:
        host = self._settings.listen_host
        try:
            port = await edge.listen(host, self._settings.listen_port)
        except OSError as error:
            raise ConfigError(
                f"listen: cannot serve on {self._settings.listen}: {error.strerror or error}"
            ) from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("listening", address=self.address, version=__version__)


@dataclass(frozen=True, slots=True)
class _Start:
    """An engine that is about to be run."""

    engine: Engine
    process: EngineProcess
    stop_deadline_s: float
    durable: Durable


async def _prepare(  # noqa: PLR0913 - what an engine is made of
    settings: Settings,
    number: int,
    tasks: TaskSet,
    stack: AsyncExitStack,
    on_hopeless: Callable[[], None],
    *,
    policies: PolicyFile,
) -> _Start:
    """Everything that works for one engine; nothing is started yet."""
    name, settings = settings.fleet[number].name, settings.of_engine(number)
    runtime: Runtime

    def on_state(status: EngineStatus) -> None:
        runtime.on_engine_status(status)
        if status.hopeless:
            on_hopeless()

    process = _process(settings, number, on_state)
    process.prepare()
    key = None if settings.engine.api_key is None else settings.engine.api_key.get_secret_value()
    client = EngineClient(process.address, key)
    await stack.enter_async_context(client)
    plane = ControlPlane(
        max_waiting=settings.queue.max_depth, policy=PoolPolicy(**settings.pools.model_dump()), number=number
    )
    runtime = Runtime(plane, client, tasks, name, copies=_copies(settings, number), policies=policies)
    upstream = Upstream(_dial_text(process.address))
    stack.callback(upstream.close)
    pooling = Pooling(runtime)
    runtime.saver = durable = _durable(settings, number, runtime, pooling)
    engine = Engine(number, name, runtime, pooling, upstream, key, _patch(settings), durable)
    return _Start(engine, process, settings.engine.stop_deadline_s, durable)


def assemble(  # noqa: PLR0913 - the parts of a proxy
    fleet: Fleet,
    control: Upstream,
    guard: Guard,
    settings: Settings,
    *,
    advice: Advice,
    journal: Journal,
    hold_s: float,
) -> Routes:
    """The handlers of a fleet behind one face.

    Args:
        fleet: the engines.
        control: the way to the control application.
        guard: who may use slot actions.
        advice: what is noticed in requests.
        settings: limits and queue times.
        journal: keeps the records.
        hold_s: seconds a passed-through request waits for an engine.
    """
    handlers = [
        Handlers(
            Inference(engine.runtime, engine.pooling, engine.upstream, advice, settings),
            Status(
                engine.runtime,
                engine.upstream,
                guard,
                shared=settings.share_across_keys,
                patch=engine.patch,
            ),
        )
        for engine in fleet
    ]
    scrape = None
    if settings.telemetry.metrics:
        exposition = Exposition()
        for engine in fleet:
            exposition.add(engine.name, engine.runtime.metrics)
        scrape = Scrape(fleet, guard, exposition)
    return Routes(
        fleet,
        handlers,
        Merged(fleet),
        control,
        settings,
        advice=advice,
        journal=journal,
        hold_s=hold_s,
        scrape=scrape,
    )


def _copies(settings: Settings, number: int) -> CopyLimits:
    """What is allowed for pools as slot files; the folder of an engine of somebody else's is not ours."""
    engine = settings.engine
    return CopyLimits(engine.max_pools, None if engine.url else slot_folder(settings, number))


def _durable(settings: Settings, number: int, runtime: Runtime, pooling: Pooling) -> Durable:
    """Who saves KV; an engine of somebody else's has its folder and its model somewhere else."""
    engine = settings.engine
    ours = engine.url is None
    return Durable(
        runtime,
        pooling,
        settings.durable,
        folder=slot_folder(settings, number) if ours else None,
        model=engine.model.absolute() if ours and engine.model is not None else None,
        arguments=engine.args,
    )


def _patch(settings: Settings) -> str | None:
    """Identity of the patches in an engine, if it is one that this version built."""
    try:
        engine = build.installed(settings.cache_path)
    except BuildError:
        return None
    ours = settings.engine.url is None and settings.engine.binary == engine.binary
    return engine.manifest.series[:12] if ours else None


def _process(
    settings: Settings, number: int, on_state: Callable[[EngineStatus], None]
) -> Attached | Supervisor:
    engine = settings.engine
    if engine.url is not None:
        fields = type(engine).model_fields
        if ignored := [
            f"engine.{name}"
            for name in _OURS_TO_START
            if getattr(engine, name) != fields[name].get_default(call_default_factory=True)
        ]:
            log.warning(
                "settings_ignored", keys=ignored, reason="engine.url: that engine is not ours to start"
            )
        return Attached(EngineAddress.parse(engine.url), on_state)
    spec = spec_from(settings, number)
    for warning in spec.warnings:
        log.warning("engine_argument", reason=warning)
    return Supervisor(spec, on_state)


async def _keep(process: EngineProcess, name: str) -> None:
    try:
        await process.run()
    except Exception:
        # nothing above would notice: requests are answered with 503 from here on
        log.exception("engine_supervision_failed", engine=name)


async def _drain(starts: list[_Start], within_s: float) -> None:
    """Save the KV of all engines; each has a disk and a model of its own.

    A save goes to its end whatever becomes of who wants it, so that its time is bounded from here. One that
    is late ends with its engine, and nothing of it counts.
    """
    drains = [asyncio.get_running_loop().create_task(start.durable.drain()) for start in starts]
    if not drains:
        return
    done, late = await asyncio.wait(drains, timeout=within_s)
    for drain in done:
        if not drain.cancelled() and (error := drain.exception()) is not None:
            log.error("durable_drain_failed", reason=str(error))
    if late:
        log.warning("durable_drain_too_slow", engines=len(late), within_s=within_s)


async def _stop(starts: list[_Start]) -> None:
    """End all engines at the same time: each may need its whole deadline."""
    async with asyncio.TaskGroup() as group:
        for start in starts:
            group.create_task(start.process.stop(start.stop_deadline_s))


def _admin_key(settings: Settings) -> str | None:
    """What the control routes demand: the admin key, else the first key that an engine demands."""
    keys = (settings.admin_api_key, *(engine.api_key for engine in settings.fleet))
    return next((key.get_secret_value() for key in keys if key is not None), None)


def _dial_text(address: EngineAddress) -> str:
    return address.base_url if address.socket is None else f"unix:{address.socket}"


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops at once. Returns the exit status.

    Raises:
        EngineStartError: no engine was ever ready, and none can be started.
    """
    configure_logging(settings.log)
    return uvloop.run(_serve(settings))


def quieten_collector() -> None:
    """Make Python's garbage collector look seldom, for the life of this process.

    A request makes thousands of objects and next to no cycles; with the defaults an eighth of its CPU time
    went into looking for them among everything that is there since the start.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    serving = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and serving is not None:
            serving.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        async with Proxy(settings) as proxy:
            loop.add_signal_handler(signal.SIGHUP, proxy.reload_policies)
            quieten_collector()
            ends = [loop.create_task(event.wait()) for event in (stop, proxy.hopeless)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            status = proxy.fleet.first.runtime.status
            if proxy.hopeless.is_set() and not stop.is_set() and status is not None:
                raise EngineStartError(f"the engine cannot be started: {status.reason}")
    return 0
