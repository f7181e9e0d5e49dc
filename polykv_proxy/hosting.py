"""The engines of one proxy, each with everything that works for it: built, run, drained and stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from polykv_proxy import sampler
from polykv_proxy.core.decisions import PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.durable.service import Durable
from polykv_proxy.edge.upstream import Upstream
from polykv_proxy.engine import build
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.attached import Attached
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.launch import slot_folder, spec_from
from polykv_proxy.engine.origin import Fixed, Origin, Recorded, Start
from polykv_proxy.engine.poolfiles import CopyLimits
from polykv_proxy.engine.supervisor import Supervisor
from polykv_proxy.errors import BuildError
from polykv_proxy.fleet import Engine
from polykv_proxy.pooling import Pooling
from polykv_proxy.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    from polykv_proxy.edge.tasks import TaskSet
    from polykv_proxy.engine.state import EngineProcess, EngineStatus
    from polykv_proxy.policy import PolicyFile
    from polykv_proxy.settings import Settings

log = structlog.get_logger(__name__)

_OURS_TO_START = ("binary", "stock", "model", "parallel", "ctx_size", "prefill_cap", "args", "env")
"""Settings of the engine that mean nothing for one that runs already."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """An engine, and what runs it."""

    engine: Engine
    process: EngineProcess
    stop_deadline_s: float
    durable: Durable

    def begin(self, tasks: TaskSet) -> None:
        """Start the engine, and all that looks after it."""
        tasks.spawn(sampler.run(self.engine.runtime.readings))
        tasks.spawn(self.engine.pooling.tender.run())
        tasks.spawn(self.durable.run())
        tasks.spawn(self._keep())

    async def _keep(self) -> None:
        try:
            await self.process.run()
        except Exception:
            # nothing above would notice: requests are answered with 503 from here on
            log.exception("engine_supervision_failed", engine=self.engine.name)


async def prepare(  # noqa: PLR0913 - what an engine is made of
    settings: Settings,
    number: int,
    tasks: TaskSet,
    stack: AsyncExitStack,
    on_hopeless: Callable[[], None],
    *,
    policies: PolicyFile,
) -> Hosted:
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
    origin = _origin(settings, number)
    stack.callback(origin.close)
    runtime.saver = durable = Durable(runtime, pooling, settings.durable, origin)
    engine = Engine(number, name, runtime, pooling, upstream, key, _patch(settings), durable)
    return Hosted(engine, process, settings.engine.stop_deadline_s, durable)


async def drain(hosted: list[Hosted], within_s: float) -> None:
    """Save the KV of all engines; each has a disk and a model of its own.

    A save goes to its end whatever becomes of who wants it, so that its time is bounded from here. One that
    is late ends with its engine, and nothing of it counts.
    """
    drains = [asyncio.get_running_loop().create_task(each.durable.drain()) for each in hosted]
    if not drains:
        return
    done, late = await asyncio.wait(drains, timeout=within_s)
    for drain in done:
        if not drain.cancelled() and (error := drain.exception()) is not None:
            log.error("durable_drain_failed", reason=str(error))
    if late:
        log.warning("durable_drain_too_slow", engines=len(late), within_s=within_s)


async def stop(hosted: list[Hosted]) -> None:
    """End all engines at the same time: each may need its whole deadline."""
    async with asyncio.TaskGroup() as group:
        for each in hosted:
            group.create_task(each.process.stop(each.stop_deadline_s))


def _copies(settings: Settings, number: int) -> CopyLimits:
    """What is allowed for pools as slot files; the folder of an engine of somebody else's is not ours."""
    engine = settings.engine
    return CopyLimits(engine.max_pools, None if engine.url else slot_folder(settings, number))


def _origin(settings: Settings, number: int) -> Origin:
    """Where it is known from what an engine was started with: nowhere, if it is at a port and not ours."""
    engine = settings.engine
    if engine.url is not None:
        address = EngineAddress.parse(engine.url)
        return Fixed(None) if address.socket is None else Recorded(address.socket)
    model = None if engine.model is None else engine.model.absolute()
    return Fixed(Start(folder=slot_folder(settings, number), model=model, arguments=engine.args))


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


def _dial_text(address: EngineAddress) -> str:
    return address.base_url if address.socket is None else f"unix:{address.socket}"
