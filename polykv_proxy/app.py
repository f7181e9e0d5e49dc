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
from typing import TYPE_CHECKING, Self

import structlog
import uvloop

from polykv_proxy import __version__
from polykv_proxy.api import openapi
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
from polykv_proxy.edge.inproc import InProcess
from polykv_proxy.edge.server import Edge
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.errors import ConfigError, EngineStartError
from polykv_proxy.fleet import Fleet
from polykv_proxy.hosting import drain, prepare, stop
from polykv_proxy.metrics import Exposition
from polykv_proxy.policy import PolicyFile
from polykv_proxy.runtime import Runtime
from polykv_proxy.telemetry import configure_logging

if TYPE_CHECKING:
    from aiohttp import web

    from polykv_proxy.edge.upstream import Upstream
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
            hosted = [
                await prepare(settings, number, tasks, stack, self._on_hopeless, policies=policies)
                for number in range(len(settings.fleet))
            ]
            stack.push_async_callback(tasks.cancel, 5.0)  # before what they use is closed
            self.fleet = fleet = Fleet([each.engine for each in hosted])

            guard = Guard(_admin_key(settings), (*settings.allowed_hosts, settings.listen_host))
            control = ControlApi(fleet, guard, shared=settings.share_across_keys, hold_s=POOL_HOLD_S)
            advice = Advice(fleet.first.plane.policy)
            journal = Journal(settings.requests.keep, Runtime.now_ts)
            tps = TpsApi(fleet, control.sees, interval_s=settings.telemetry.tps_interval_s)
            further = further_routes(fleet, control, advice, journal, tps)
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
            edge = Edge(routes.handle, render_error=render_error)
            await self._listen(edge)  # a port that is taken is to load no model
            for each in hosted:
                each.begin(tasks)
            tasks.spawn(self._watch_policies())
            stack.push_async_callback(stop, hosted)
            stack.push_async_callback(drain, hosted, settings.durable.drain_s + DRAIN_GRACE_S)
            stack.push_async_callback(edge.close, settings.drain_s)
            stack.callback(tps.close)
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
        """Read the policy file again; whoever asked for it sees in the log what came of it."""
        self._policy_error = None
        changed = self._policies.reload()
        self._report_policies(changed)
        if not changed and self._policies.error is None:
            log.info("policy_unchanged")

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
            await edge.close(0.0)  # a name may have several addresses, and others be free
            raise ConfigError(
                f"listen: cannot serve on {self._settings.listen}: {error.strerror or error}"
            ) from None
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("listening", address=self.address, version=__version__)


def further_routes(
    fleet: Fleet, control: ControlApi, advice: Advice, journal: Journal, tps: TpsApi
) -> list[web.RouteDef]:
    """The control routes that are not about pools."""
    return [
        *openapi.routes(),
        *advice.routes(control.sees),
        *RequestsApi(journal.book, control.sees).routes(),
        *tps.routes(),
        *AdmissionApi(fleet, control.sees).routes(),
        *CacheApi(fleet, control.sees).routes(),
    ]


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


def _admin_key(settings: Settings) -> str | None:
    """What the control routes demand: the admin key, else the first key that an engine demands."""
    keys = (settings.admin_api_key, *(engine.api_key for engine in settings.fleet))
    return next((key.get_secret_value() for key in keys if key is not None), None)


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
        elif not stop.is_set():
            log.info("told_to_stop", hint="running requests may end; a second signal cuts them off")
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
