"""Carries out what the control plane decides.

The runtime owns the plane of one engine, gives it the time, and turns its commands into calls. It is the
only module that touches both. The event loop is the lock: between two awaits nothing else runs, so a
decision and the state it was made on cannot drift apart. Where a step must not be torn, a comment says so.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import structlog

from polykv_proxy.core.decisions import (
    AwaitIdle,
    Command,
    Lease,
    Reclaim,
    StopRunning,
    WakeQueued,
)
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import (
    Capability,
    EngineSample,
    PoolId,
    PoolNumber,
    SlotId,
)
from polykv_proxy.engine.backend import LAUNCH_GRACE_S, Relaying
from polykv_proxy.engine.capability import find_backend
from polykv_proxy.engine.copies import Copies
from polykv_proxy.engine.state import EngineState
from polykv_proxy.errors import (
    PolyKVError,
    UnavailableError,
)
from polykv_proxy.gatekeeper import Gatekeeper
from polykv_proxy.line import Line
from polykv_proxy.metrics import Metrics
from polykv_proxy.policy import PolicyFile
from polykv_proxy.readings import QUIET_S, Readings, next_moment_s
from polykv_proxy.saver import NoSaver
from polykv_proxy.stillness import Stillness

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.residents import Key
    from polykv_proxy.core.types import LeaseId, Scope, SessionId
    from polykv_proxy.edge.tasks import TaskSet
    from polykv_proxy.engine.backend import Backend
    from polykv_proxy.engine.client import EngineClient
    from polykv_proxy.engine.poolfiles import CopyLimits
    from polykv_proxy.engine.state import EngineStatus
    from polykv_proxy.saver import Saver

log = structlog.get_logger(__name__)

IDLE_POLL_S = 0.05
"""Between two looks at an abandoned request's slot."""

QUIET_POLL_S = QUIET_S
"""The same on an engine without the patch."""

RETRY_READY_S = 1.0

BORROWED_WAIT_S = 60.0
"""Longest wait for a slot that is borrowed; a save waits for the batch that the engine computes."""

T = TypeVar("T")


class Runtime:
    """One engine's control plane at work.

    Args:
        plane: its state.
        client: the way to the engine.
        tasks: where background work is kept.
        name: the engine's, for the log and for clients.
        copies: what is allowed for pools as slot files, if anything is.
        policies: of admission; None: the defaults.

    Attributes:
        backend: what the engine can do for pools, at the level that was seen to work.
    """

    def __init__(  # noqa: PLR0913 - what a runtime is made of
        self,
        plane: ControlPlane,
        client: EngineClient,
        tasks: TaskSet,
        name: str = "engine-0",
        *,
        copies: CopyLimits | None = None,
        policies: PolicyFile | None = None,
    ) -> None:
        self.plane = plane
        self.client = client
        self.gatekeeper = Gatekeeper(plane, policies or PolicyFile(None), name)
        self.metrics = Metrics(plane, self.gatekeeper.gate)
        self.readings = Readings(
            plane,
            client,
            tasks,
            metrics=self.metrics,
            gatekeeper=self.gatekeeper,
            on_sample=self._on_sample,
        )
        self.line = Line(plane, self.readings, self.metrics, self._perform, self.now_ts)
        self.backend: Backend = Relaying(client)
        self._copies = copies if copies is not None and copies.max_pools else None
        self.status: EngineStatus | None = None
        self.serving = asyncio.Event()
        """Set while requests can be sent to the engine."""
        self.name = name
        self._tasks = tasks
        self.after_idle: dict[LeaseId, Callable[[], Awaitable[object]]] = {}
        """What is to be done when an abandoned request's slots are idle, before they are given away."""
        self.left: dict[LeaseId, Callable[[EngineSample], None]] = {}
        """Who wants to know what the engine shows of an abandoned request whose slots are idle."""
        self.stoppable: dict[LeaseId, asyncio.Timeout] = {}
        """Requests that can be stopped before the cells are used up: by letting their time be over."""
        self.evict_pool: Callable[[PoolId], Awaitable[bool]] | None = None
        """Gives a pool's cells back; returns whether it is gone. Set by who looks after pools."""
        self.lose_pool: Callable[[PoolNumber], None] | None = None
        """Told that a pool's file is gone. Set by the same."""
        self.saver: Saver = NoSaver()
        """Keeps KV on disk, if somebody does."""
        self.stillness = Stillness(plane.cells)
        self._given_back = asyncio.Event()
        """Set, then cleared, whenever a borrowed slot is given back."""
        self._moving: dict[LeaseId, asyncio.Future[Any]] = {}
        """Requests in whose slots KV is written or read: these stay theirs until that is over."""
        self._ready_task: asyncio.Task[None] | None = None

    @staticmethod
    def now_ts() -> float:
        """Epoch seconds: the one place where wall time enters."""
        return time.time()  # noqa: TID251 - this is that place

    @property
    def epoch(self) -> str:
        """The engine's load that the plane knows; empty before the first."""
        return "" if self.plane.facts is None else self.plane.facts.epoch

    def unavailable(self) -> UnavailableError:
        """Why nothing can be sent now: the engine loads, or is down."""
        status = self.status
        if status is None or status.state is not EngineState.DOWN:
            return UnavailableError("Loading model", code="engine_loading", retry_after_s=2)
        reason = "it does not answer" if status.reason is None else status.reason
        return UnavailableError(f"the engine is down: {reason}", code="engine_down", retry_after_s=5)

    # -- the engine's life -------------------------------------------------------------------------------

    def on_engine_status(self, status: EngineStatus) -> None:
        """The supervisor's report."""
        before, self.status = self.status, status
        if before is None or (before.state, before.reason) != (status.state, status.reason):
            failed = status.state is EngineState.DOWN and status.reason not in (None, "stopped")
            report = log.warning if failed else log.info
            report(
                "engine_state",
                engine=self.name,
                state=status.state.value,
                reason=status.reason,
                pid=status.pid,
            )
        if self._ready_task is not None:
            self._ready_task.cancel()
            self._ready_task = None
        if status.state is EngineState.READY:
            self._ready_task = self.spawn(self._become_ready())
        else:
            self._is_down()

    def _is_down(self) -> None:
        self.saver.on_down()
        self.plane.on_engine_down()
        self.serving.clear()

    def _on_sample(self, sample: EngineSample) -> None:
        """The engine was read: the plane learns of it, and does what follows, in one step."""
        self._perform(self.plane.on_sample(sample, monotonic(), self.now_ts()))
        self.stillness.emptied()  # or is seen to be empty by now
        if sample.epoch != self.epoch:
            self._meet_again()

    def _meet_again(self) -> None:
        """Another engine answers, and nobody noticed the change: it was restarted between two looks."""
        if self._ready_task is None or self._ready_task.done():
            log.warning("engine_changed_unnoticed", engine=self.name)
            self._is_down()
            self._ready_task = self.spawn(self._become_ready())

    async def _become_ready(self) -> None:
        """Find out what the engine can do, then let requests in; tried again while it stays up."""
        log.info("self_test", engine=self.name, hint="requests wait for its end")
        while True:
            try:
                await self._let_in()
            except PolyKVError as error:
                log.warning("engine_not_understood", engine=self.name, reason=error.message)
            except Exception:  # a fault of ours: nothing above would notice, and nobody be served again
                log.exception("engine_not_understood", engine=self.name)
            else:
                return
            await asyncio.sleep(RETRY_READY_S)

    async def _let_in(self) -> None:
        facts, patched, identity = await self.client.describe()
        allowed = None if self._copies is None else partial(self._new_copies, self._copies)
        backend, facts, reason = await find_backend(
            self.client, self.plane, self.backend, facts, patched=patched, make_copies=allowed
        )
        model_id = await self.saver.meet(facts, backend.capability, identity)
        capability = backend.capability
        first = await self.readings.counts(capability)  # before anybody's tokens come
        if self.plane.facts is not None and (not facts.epoch or facts.epoch != self.epoch):
            self.metrics.on_restart()
        self.backend = backend
        self._perform(self.plane.on_engine_ready(facts, capability, reason, model_id, monotonic()))
        self.saver.on_ready()
        self.gatekeeper.on_engine_ready()
        self.readings.count(first)
        if isinstance(first, EngineSample):  # nothing is sent before its cells are known
            self._perform(self.plane.on_sample(first, monotonic(), self.now_ts()))
        self.serving.set()
        log.info(
            "engine_ready",
            engine=self.name,
            capability=capability.value,
            reason=reason,
            slots=facts.slots,
            cells=facts.cells if facts.epoch else None,  # else only a bound is known
        )

    def _new_copies(self, limits: CopyLimits) -> Copies:
        return Copies(self.client, limits, self.spawn, self._took, self.empty_oldest, on_file_lost=self._lost)

    def _took(self, lease: Lease, slot: SlotId) -> None:
        """The engine put a request into a slot of its own choice."""
        self._perform(self.plane.leases.on_slot_learnt(lease, slot, monotonic()))

    def _lost(self, number: PoolNumber) -> None:
        """A pool's file is gone: it is computed again when somebody asks for it."""
        if self.lose_pool is not None:
            self.lose_pool(number)

    async def empty_oldest(self) -> bool:
        """Empty the idle slot that was unused for the longest time; False when none holds anything."""
        slot = self.plane.board.oldest()
        return slot is not None and await self._empty(slot)

    # -- requests ----------------------------------------------------------------------------------------

    def finish(self, lease: Lease, *, clean: bool, content: Content, stop: bool = True) -> None:
        """End a lease; see ``Leases.on_finished``. What moves in its slots goes to its end first."""
        moving = self._moving.pop(lease.lease_id, None)
        if moving is not None and not moving.done():
            moving.add_done_callback(lambda _: self.finish(lease, clean=clean, content=content, stop=stop))
            return
        self._perform(
            self.plane.leases.on_finished(lease, monotonic(), clean=clean, content=content, stop=stop)
        )
        self.readings.changed()

    def moves(self, lease: Lease, going: asyncio.Future[Any]) -> None:
        """KV is written or read in a request's slots: also if its client leaves, they are kept until then."""
        self._moving[lease.lease_id] = going

    def borrow(self, slot: SlotId) -> Lease | None:
        """Keep everybody off an idle slot, which keeps what it holds; None while it is at work."""
        return self.plane.leases.borrow(slot, monotonic())

    def returned(self, lease: Lease) -> None:
        """Give back what was borrowed."""
        self._perform(self.plane.leases.returned(lease, monotonic()))
        self._given_back.set()
        self._given_back.clear()

    async def not_borrowed(self, slot: SlotId) -> None:
        """Wait until nobody of us has a slot for a moment; whoever asks for one need not know of our saves.

        Look again what the slot is, and use it without another await: a request may have got it in between.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(BORROWED_WAIT_S):
                while slot < len(self.plane.board.slots) and self.plane.board.slots[slot].borrowed:
                    await self._given_back.wait()

    def end_session(self, session_id: SessionId, scope: Scope | None) -> SlotId | None:
        """A conversation is over; see ``ControlPlane.end_session``."""
        slot, commands = self.plane.end_session(session_id, scope, monotonic())
        self._perform(commands)
        return slot

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case WakeQueued(ticket):
                    self.line.wake(ticket)
                case AwaitIdle(lease, stop):
                    self.spawn(self._await_idle(lease, stop=stop))
                case Reclaim(key):
                    self.spawn(self._take_back(key))
                case StopRunning(lease_id):
                    scope = self.stoppable.get(lease_id)
                    if scope is not None and not scope.expired():
                        log.warning("request_stopped", engine=self.name, lease=lease_id)
                        scope.reschedule(asyncio.get_running_loop().time())

    async def _take_back(self, key: Key) -> None:
        """Take back what a resident of the ledger holds; those who wait for its cells go on in any case."""
        gone = False
        try:
            match key:
                case ("slot", int() as slot):
                    gone = await self._empty(SlotId(slot))
                case ("pool", str() as pool_id) if self.evict_pool is not None:
                    gone = await self.evict_pool(PoolId(pool_id))
        except PolyKVError as error:
            log.info("not_reclaimed", engine=self.name, resident=key, reason=error.message)
        finally:
            self._perform(self.plane.on_reclaimed(key, monotonic(), gone=gone))
            self.stillness.emptied()
            self.readings.changed()

    async def _empty(self, slot: SlotId) -> bool:
        """Empty a slot that is idle, or whose request waits for that; False while it is at work."""
        async with self.stillness.of(slot):
            lease = self.borrow(slot)
            if lease is None and not self.plane.leases.is_reclaimable(slot):
                return False
            epoch = self.epoch
            try:
                await self.saver.before_loss(slot)
                await self.client.erase_slot(slot)
                if self.epoch == epoch:
                    self.backend.forget([slot])
                    self.plane.leases.on_emptied(slot)
            finally:
                if lease is not None:
                    self.returned(lease)
        return True

    async def _await_idle(self, lease: Lease, *, stop: bool) -> None:
        """A client left: stop what the engine does for it, then give the slots away."""
        deadline, content = monotonic() + LAUNCH_GRACE_S, Content.NEW
        while self.plane.leases.holds(lease):
            try:
                if not self.plane.serving:  # it may be the same engine that comes back, still at work
                    await asyncio.sleep(QUIET_POLL_S)
                    continue
                others = sum(slot.lease is not None for slot in self.plane.board) - len(lease.slots)
                overdue_s = monotonic() - deadline
                left = await self.backend.remains(lease, overdue_s, others=others, stop=stop)
                if left is not None:
                    content = left
                    break
            except PolyKVError as error:
                log.debug("abandoned_request_poll_failed", reason=error.message)
            patched = self.backend.capability is Capability.ZERO_COPY
            await asyncio.sleep(IDLE_POLL_S if patched else next_moment_s(monotonic(), QUIET_POLL_S))
        if (show := self.left.pop(lease.lease_id, None)) is not None and self.plane.serving:
            counts = await self.readings.counts(self.backend.capability)
            if isinstance(counts, EngineSample):
                show(counts)
        if (act := self.after_idle.pop(lease.lease_id, None)) is not None:
            await act()
        self._perform(self.plane.leases.on_slots_idle(lease, monotonic(), content))
        self.readings.due.set()

    def background(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """See ``TaskSet.background``."""
        return self._tasks.background(coroutine)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that handles its own errors; it is cancelled when the proxy stops."""
        return self._tasks.spawn(coroutine)
