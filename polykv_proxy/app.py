"""The composition root: builds every part, joins them, and takes them down in the right order.

Starting: listen, then the engine; requests that come before it is ready are held. Stopping: no new
requests, running ones finish within the drain time, then the control plane, then the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

import structlog
import uvloop

from polykv_proxy import __version__, sampler
from polykv_proxy.api.control import ControlApi
from polykv_proxy.api.guard import Guard
from polykv_proxy.api.inference import Inference
from polykv_proxy.api.routes import Routes, render_error
from polykv_proxy.api.status import Status
from polykv_proxy.core.decisions import PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.edge.inproc import InProcess
from polykv_proxy.edge.server import Edge
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.edge.upstream import Upstream
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.attached import Attached
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.engine.supervisor import Supervisor
from polykv_proxy.errors import ConfigError
from polykv_proxy.pooling import Pooling
from polykv_proxy.runtime import Runtime
from polykv_proxy.telemetry import configure_logging

if TYPE_CHECKING:
    from polykv_proxy.config import Settings
    from polykv_proxy.engine.state import EngineProcess, EngineStatus

log = structlog.get_logger(__name__)

PASS_THROUGH_HOLD_S = 10.0
"""How long a request that needs no slot waits for an engine that is starting."""

_OURS_TO_START = ("binary", "model", "parallel", "ctx_size", "max_pools", "args", "env")
"""Settings of the engine that mean nothing for one that runs already."""


class Proxy:
    """A running proxy with its engine; an async context manager.

    Args:
        settings: ``engine.binary`` and ``engine.model`` filled in, unless ``engine.url`` is set.

    Attributes:
        runtime: the control plane at work.
        address: ``host:port`` it listens on, once entered.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.runtime: Runtime
        self.address = ""

    async def __aenter__(self) -> Self:
        """Listen, and start the engine; returns before it is ready.

        Raises:
            ConfigError: something that cannot work, found before anything was started.
        """
        settings = self._settings
        async with AsyncExitStack() as stack:
            api_key = settings.engine.api_key.get_secret_value() if settings.engine.api_key else None
            process = self._process()
            process.prepare()
            client = await stack.enter_async_context(EngineClient(process.address, api_key))
            tasks = TaskSet()
            stack.push_async_callback(tasks.cancel, 5.0)
            policy = PoolPolicy(**settings.pools.model_dump())
            plane = ControlPlane(max_waiting=settings.queue.max_depth, policy=policy)
            self.runtime = Runtime(plane, client, tasks)
            pooling = Pooling(self.runtime)
            upstream = Upstream(_dial_text(process.address))
            stack.callback(upstream.close)

            admin = settings.admin_api_key.get_secret_value() if settings.admin_api_key else api_key
            guard = Guard(admin, (*settings.allowed_hosts, settings.listen_host))
            control = ControlApi(self.runtime, pooling, guard, shared=settings.share_across_keys)
            inside = await stack.enter_async_context(InProcess(control.application(settings.max_body_bytes)))
            routes = Routes(
                self.runtime,
                upstream,
                inside.upstream,
                Inference(self.runtime, pooling, upstream, settings),
                Status(self.runtime, upstream, guard),
                hold_s=PASS_THROUGH_HOLD_S,
                max_body_bytes=settings.max_body_bytes,
            )
            tasks.spawn(sampler.run(self.runtime))
            self._run_engine(process, tasks, stack)
            edge = Edge(routes.handle, render_error=render_error)
            stack.push_async_callback(edge.close, settings.drain_s)
            await self._listen(edge)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drain, then stop everything."""
        log.info("stopping", drain_s=self._settings.drain_s)
        await self._stack.aclose()
        log.info("stopped")

    def _process(self) -> EngineProcess:
        url = self._settings.engine.url

        def on_state(status: EngineStatus) -> None:
            self.runtime.on_engine_status(status)

        if url is not None:
            engine = self._settings.engine
            fields = type(engine).model_fields
            if ignored := [
                f"engine.{name}"
                for name in _OURS_TO_START
                if getattr(engine, name) != fields[name].get_default(call_default_factory=True)
            ]:
                log.warning(
                    "settings_ignored", keys=ignored, reason="engine.url: that engine is not ours to start"
                )
            return Attached(EngineAddress.parse(url), on_state)
        spec = spec_from(self._settings)
        for warning in spec.warnings:
            log.warning("engine_argument", reason=warning)
        return Supervisor(spec, on_state)

    def _run_engine(self, process: EngineProcess, tasks: TaskSet, stack: AsyncExitStack) -> None:
        async def keep() -> None:
            try:
                await process.run()
            except Exception:
                # nothing above would notice: requests are answered with 503 from here on
                log.exception("engine_supervision_failed")

        tasks.spawn(keep())
        stack.push_async_callback(process.stop, self._settings.engine.stop_deadline_s)

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


def _dial_text(address: EngineAddress) -> str:
    return address.base_url if address.socket is None else f"unix:{address.socket}"


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops at once. Returns the exit status."""
    configure_logging(settings.log)
    return uvloop.run(_serve(settings))


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
        async with Proxy(settings):
            await stop.wait()
    return 0
