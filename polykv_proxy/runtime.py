"""Carries out what the control plane decides.

The runtime owns the plane of one engine, gives it the time, and turns its commands into calls. It is the
only module that touches both. The event loop is the lock: between two awaits nothing else runs, so a
decision and the state it was made on cannot drift apart. Where a step must not be torn, a comment says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import structlog

from polykv_proxy.core.plane import (
    Admit,
    AwaitIdle,
    Command,
    ControlPlane,
    Lease,
    Queue,
    Reject,
    Ticket,
    WakeQueued,
)
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import (
    Capability,
    PoolNumber,
    PoolOrigin,
    PoolState,
    PoolUid,
    Scope,
    SlotState,
    as_tokens,
)
from polykv_proxy.engine.state import EngineState
from polykv_proxy.errors import (
    EngineGoneError,
    PolyKVError,
    PoolCapacityError,
    PrefixMismatchError,
    SaturatedError,
    SessionNotResidentError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.slots import Session, Slot
    from polykv_proxy.core.types import EngineSample, LeaseId, SessionId, Tokens
    from polykv_proxy.edge.tasks import TaskSet
    from polykv_proxy.engine.client import EngineClient
    from polykv_proxy.engine.state import EngineStatus
    from polykv_proxy.engine.wire import Materialized

log = structlog.get_logger(__name__)

LAUNCH_GRACE_S = 3.0
"""An abandoned request that the engine has not started by then will not start: the engine looks at a
closed connection at least once a second."""

IDLE_POLL_S = 0.05
"""Between two looks at an abandoned request's slot."""

SELF_TEST_TOKENS = 48
FRESH_S = 0.1
"""Age up to which a sample serves readers who want the present; bounds polling whatever they do."""

RETRY_READY_S = 1.0

NO_PROGRESS_S = 10.0
"""A request whose prefill does not advance for so long is not waited for."""

GRACE_S = 60.0
"""Seconds out of use after which a pool that came by itself may make room."""

T = TypeVar("T")

_ANSWERED = frozenset({"engine_refused", "engine_failed", "engine_auth", "not_found"})
"""Codes of the client's errors after which the engine is known to be done with a call."""


class Pending:
    """A request's wait for its slots."""

    def __init__(self, runtime: Runtime, ticket: Ticket | None, lease: Lease | None) -> None:
        self._runtime = runtime
        self._ticket = ticket
        self.lease = lease
        self.woken: asyncio.Future[Lease] | None = None

    async def wait(self, timeout_s: float) -> Lease | None:
        """The lease, or None when ``timeout_s`` seconds pass without one; wait again or give up then."""
        if self.lease is None:
            assert self.woken is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self.lease = await asyncio.shield(self.woken)
        return self.lease

    def give_up(self) -> None:
        """Leave the queue; a lease that came in the meantime goes to the next in line."""
        if self._ticket is not None and self.lease is None:
            self._runtime.gave_up(self._ticket)


class _Materialization:
    """A pool that is being computed, and those who wait for it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Materialized] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None


class Runtime:
    """One engine's control plane at work.

    Args:
        plane: its state.
        client: the way to the engine.
        tasks: where background work is kept.
    """

    def __init__(self, plane: ControlPlane, client: EngineClient, tasks: TaskSet) -> None:
        self.plane = plane
        self.client = client
        self.status: EngineStatus | None = None
        self.serving = asyncio.Event()
        """Set while requests can be sent to the engine."""
        self.sampled = asyncio.Event()
        """Set, then cleared, whenever a request starts or ends: the sampler looks at once."""
        self._tasks = tasks
        self._waiters: dict[int, Pending] = {}
        self._jobs: dict[int, _Materialization] = {}
        self._unsure: dict[LeaseId, tuple[PrefixPool, str]] = {}
        """Pools that were given up, by the lease under which the engine of that epoch may have computed them
        nevertheless."""
        self._sharing: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Snapshots that are waited for, by slot and lease."""
        self._sampling: asyncio.Future[EngineSample] | None = None
        self._ended_at = 0.0
        self._ready_task: asyncio.Task[None] | None = None

    @staticmethod
    def now_ts() -> float:
        """Epoch seconds: the one place where wall time enters."""
        return time.time()  # noqa: TID251 - this is that place

    # -- the engine's life -------------------------------------------------------------------------------

    def on_engine_status(self, status: EngineStatus) -> None:
        """The supervisor's report."""
        before, self.status = self.status, status
        if before is None or (before.state, before.reason) != (status.state, status.reason):
            log.info("engine_state", state=status.state.value, reason=status.reason, pid=status.pid)
        if self._ready_task is not None:
            self._ready_task.cancel()
            self._ready_task = None
        if status.state is EngineState.READY:
            self._ready_task = self._spawn(self._become_ready())
        else:
            self.plane.on_engine_down()
            self.serving.clear()

    def _meet_again(self) -> None:
        """Another engine answers, and nobody noticed the change: it was restarted between two looks."""
        if self._ready_task is None or self._ready_task.done():
            log.warning("engine_changed_unnoticed")
            self.plane.on_engine_down()
            self.serving.clear()
            self._ready_task = self._spawn(self._become_ready())

    async def _become_ready(self) -> None:
        """Find out what the engine can do, then let requests in; tried again while it stays up."""
        while True:
            try:
                facts, patched, identity = await self.client.describe()
                capability, reason = await self._find_capability(patched=patched)
            except PolyKVError as error:
                log.warning("engine_not_understood", reason=error.message)
                await asyncio.sleep(RETRY_READY_S)
                continue
            digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
            log.info(
                "engine_ready",
                capability=capability.value,
                reason=reason,
                slots=facts.slots,
                cells=facts.cells,
            )
            self._perform(self.plane.on_engine_ready(facts, capability, reason, digest, monotonic()))
            self.serving.set()
            return

    async def _find_capability(self, *, patched: bool) -> tuple[Capability, str | None]:
        """Claim only what was seen to work on the loaded model."""
        if not patched:
            return Capability.RELAY, "the engine has no prefix pools: it is not patched, or they are off"
        sample = await self.client.counters()
        if self.plane.facts is not None and self.plane.facts.epoch == sample.epoch:
            return self.plane.capability, self.plane.capability_reason  # tested already
        for pool in sample.pools:
            await self.client.release(pool.number)  # left by a proxy that is gone: nobody knows their ids
        if sample.busy:
            return Capability.ZERO_COPY, None  # in use by others: a test would disturb them
        reason = await self._self_test()
        return (Capability.ZERO_COPY, None) if reason is None else (Capability.RELAY, reason)

    async def _self_test(self) -> str | None:
        """Compute a pool, attach to it, release it; returns what went wrong, or None."""
        words = await self.client.tokenize("The quick brown fox jumps over the lazy dog. " * 12)
        tokens, number = words[:SELF_TEST_TOKENS], PoolNumber(0)
        before = await self.client.counters()
        slot = before.slots[0].slot
        await self.client.materialize(number, tokens, slot, 0)
        headers = {"X-PolyKV-Slot": str(slot), "X-PolyKV-Attach": str(number)}
        answer = await self.client.complete(words[: SELF_TEST_TOKENS + 8], headers)
        attached = await self.client.counters()
        await self.client.release(number)
        await self.client.slot_action(
            slot, "action=erase", b"{}"
        )  # not every engine may; the sum holds anyway
        after = await self.client.counters()
        cached = answer.get("timings", {}).get("cache_n")
        if cached != len(tokens):
            return f"self-test: an attached request reused {cached} of {len(tokens)} tokens"
        if attached.slots[0].shared_tokens != len(tokens):
            return f"self-test: the slot shares {attached.slots[0].shared_tokens} of {len(tokens)} cells"
        held = sum(one.tokens for one in after.slots) - sum(one.tokens for one in before.slots)
        if after.cells_used - before.cells_used != held:
            return f"self-test: {after.cells_used - before.cells_used - held} cells did not come back"
        return None

    # -- requests ----------------------------------------------------------------------------------------

    def request(self, ask: Ask, *, conversation: bool = True) -> Pending:
        """Ask for slots.

        Raises:
            SaturatedError: too many wait already.
        """
        decision = self.plane.on_request(ask, monotonic(), now_ts=self.now_ts(), conversation=conversation)
        match decision:
            case Admit(lease):
                self.sampled.set()
                return Pending(self, None, lease)
            case Queue(ticket):
                pending = Pending(self, ticket, None)
                pending.woken = asyncio.get_running_loop().create_future()
                self._waiters[id(ticket)] = pending
                return pending
            case Reject(code, message):
                raise SaturatedError(message, code=code, retry_after_s=2)

    def gave_up(self, ticket: Ticket) -> None:
        """See ``Pending.give_up``."""
        self._waiters.pop(id(ticket), None)
        self._perform(self.plane.on_gave_up(ticket, monotonic()))

    def finish(self, lease: Lease, *, clean: bool, content: Content, stop: bool = True) -> None:
        """End a lease; see ``ControlPlane.on_finished``."""
        self._ended_at = monotonic()  # a sample from before shows the request at work
        self._perform(self.plane.on_finished(lease, monotonic(), clean=clean, content=content, stop=stop))
        self.sampled.set()

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case WakeQueued(ticket):
                    pending = self._waiters.pop(id(ticket), None)
                    if pending is None or pending.woken is None or ticket.lease is None:
                        self._perform(self.plane.on_gave_up(ticket, monotonic()))
                    else:
                        pending.woken.set_result(ticket.lease)
                case AwaitIdle(lease, stop):
                    self._spawn(self._await_idle(lease, stop=stop))

    async def _await_idle(self, lease: Lease, *, stop: bool) -> None:
        """A client left: stop what the engine does for it, then give the slots away."""
        deadline = monotonic() + LAUNCH_GRACE_S
        while self.plane.serving:
            try:
                if self.plane.capability is Capability.RELAY:
                    if await self._quiet_enough(lease, deadline):
                        break
                elif await self._is_over(lease, deadline, stop=stop):
                    break
            except PolyKVError as error:
                log.debug("abandoned_request_poll_failed", reason=error.message)
                if self.plane.capability is Capability.RELAY and monotonic() > deadline + LAUNCH_GRACE_S:
                    break  # its /slots may be switched off: nothing will ever tell
            await asyncio.sleep(IDLE_POLL_S)
        if (unsure := self._unsure.pop(lease.lease_id, None)) is not None:
            await self._give_back(*unsure)
        self._perform(self.plane.on_slots_idle(lease, monotonic(), Content.NEW))
        self.sampled.set()

    async def _is_over(self, lease: Lease, deadline: float, *, stop: bool) -> bool:
        """One look at a patched engine; returns whether the lease's slots are idle for good."""
        sample = await self.client.counters()
        slots = [slot for slot in sample.slots if slot.slot in lease.slots]
        if not any(slot.tag == lease.lease_id for slot in slots):
            return monotonic() > deadline  # not started yet, or refused before it started
        busy = [slot for slot in slots if slot.state is not SlotState.IDLE]
        for slot in busy:
            if stop and slot.tag == lease.lease_id:
                await self.client.cancel(slot.slot, slot.task)
        return not busy

    async def _quiet_enough(self, lease: Lease, deadline: float) -> bool:
        """One look at an engine that does not tell whose task is where: no more busy slots than we run."""
        others = sum(slot.lease is not None for slot in self.plane.board) - len(lease.slots)
        return await self.client.busy_slots() <= others or monotonic() > deadline + LAUNCH_GRACE_S

    # -- samples -----------------------------------------------------------------------------------------

    async def sample(self, max_age_s: float = FRESH_S) -> EngineSample | None:
        """A reading no older than ``max_age_s`` seconds; one call to the engine serves all who ask.

        None on an engine without counters, or when it does not answer; the last one stays published.
        """
        if self.plane.capability is not Capability.ZERO_COPY or not self.plane.serving:
            return self.plane.sample
        last = self.plane.sample
        if last is not None and last.taken_at > self._ended_at and monotonic() - last.taken_at <= max_age_s:
            return last
        if self._sampling is None:
            self._sampling = asyncio.get_running_loop().create_future()
            self._spawn(self._take_sample(self._sampling))
        try:
            return await asyncio.shield(self._sampling)
        except PolyKVError:
            return self.plane.sample

    async def _take_sample(self, result: asyncio.Future[EngineSample]) -> None:
        try:
            sample = await self.client.counters()
            self.plane.on_sample(sample)
            result.set_result(sample)
            if sample.epoch != self._epoch:
                self._meet_again()
        except PolyKVError as error:
            result.set_exception(error)
            result.exception()  # nobody may be waiting any more
        finally:
            self._sampling = None
            if not result.done():
                result.set_exception(UnavailableError("no reading was taken"))
                result.exception()

    # -- pools -------------------------------------------------------------------------------------------

    async def create_pool(  # noqa: PLR0913 - the facts of a pool
        self,
        tokens: Tokens,
        scope: Scope,
        *,
        label: str | None,
        pin: bool,
        parent: PrefixPool | None = None,
        branch_pos: int = 0,
    ) -> tuple[PrefixPool, bool, Materialized | None]:
        """The resident pool of this content; whether it was created now, and what that took.

        Those who ask for the same content at the same time share one prefill; it stops when the last of
        them leaves. Pools that came by themselves make room if need be.

        Raises:
            BadRequestError, PoolCapacityError, DisabledError, UnavailableError: see
                ``ControlPlane.begin_pool``; the engine's refusals.
        """

        def begin() -> tuple[PrefixPool, bool]:
            return self.plane.begin_pool(
                tokens,
                scope,
                label=label,
                pin=pin,
                now_ts=self.now_ts(),
                parent=parent,
                branch_pos=branch_pos,
            )

        pool, compute = await self._with_room(begin)
        if not compute and pool.state is not PoolState.MATERIALIZING:
            return pool, False, None
        job = self._jobs.get(id(pool))
        if job is None:
            job = self._jobs[id(pool)] = _Materialization()
            job.task = self._spawn(self._materialize(pool, job))
        job.waiters += 1
        try:
            return pool, compute, await asyncio.shield(job.result)
        finally:
            job.waiters -= 1
            if job.waiters == 0 and job.task is not None and not job.result.done():
                job.task.cancel()

    async def _materialize(self, pool: PrefixPool, job: _Materialization) -> None:
        clean = True
        lease: Lease | None = None
        pending: Pending | None = None
        try:
            pending = self.request(Ask(scope=pool.scope), conversation=False)
            while lease is None:
                lease = await pending.wait(60.0)
            if lease.ended or not self.plane.is_awaited(pool):
                raise EngineGoneError("the engine was restarted before the pool was computed")
            clean = False
            if pool.parent is not None and not pool.parent.resident:
                self.plane.tree.detach(pool)
            done = await self.client.materialize(
                pool.number,
                pool.tokens,
                lease.slots[0],
                lease.lease_id,
                parent=None if pool.parent is None else pool.parent.number,
                branch_pos=pool.branch_pos,
            )
            clean = True
            self.plane.on_pool_ready(pool, PoolUid(done.uid))
            job.result.set_result(done)
            log.info(
                "pool_created", pool_id=pool.pool_id, tokens=pool.prefix_len, computed=done.timings.prompt_n
            )
        except PolyKVError as error:
            clean = clean or error.code in _ANSWERED
            job.result.set_exception(error)
            job.result.exception()  # the last waiter may be gone
            log.info("pool_failed", pool_id=pool.pool_id, tokens=pool.prefix_len, reason=error.message)
        finally:
            self._jobs.pop(id(pool), None)
            if not job.result.done():
                # somebody may have joined since the last one left; a cancelled future would cancel them too
                job.result.set_exception(UnavailableError("the pool was given up", code="pool_given_up"))
                job.result.exception()
            if pending is not None:
                pending.give_up()
            if lease is not None and not clean and self.plane.is_awaited(pool):
                # the engine may be done with it this very moment, and nobody knows that pool
                self._unsure[lease.lease_id] = (pool, self._epoch)
            self.plane.on_pool_failed(pool, retire=not clean)  # no effect on one that is resident
            if lease is not None:
                self.finish(lease, clean=clean, content=Content.NOTHING)

    async def _give_back(self, pool: PrefixPool, epoch: str) -> int:
        """Release a pool in the engine if it has it; returns the cells that were freed."""
        try:
            return await self.client.release(pool.number) if self._epoch == epoch else 0
        except PolyKVError as error:
            log.warning("pool_release_failed", pool_id=pool.pool_id, reason=error.message)
            return 0
        finally:
            if self._epoch == epoch:  # else its number may be another's by now
                self.plane.tree.retired(pool)

    @property
    def _epoch(self) -> str:
        return "" if self.plane.facts is None else self.plane.facts.epoch

    async def release_pool(self, pool: PrefixPool, *, recursive: bool) -> tuple[list[PrefixPool], int]:
        """Release a pool, with its subtree if asked; returns what went and how many cells were freed.

        Raises:
            PoolInUseError: children, or it is being computed.
        """
        doomed = self.plane.tree.check_release(pool, recursive=recursive)
        resident = [each for each in doomed if each.resident]
        for each in doomed:
            self.plane.tree.release(each)  # no await since the check: the ids go together
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # a task, because it has to go on to the end when the client that asked for it leaves
        self._spawn(self._give_all_back(resident, done))
        freed = await asyncio.shield(done)
        log.info("pool_released", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

    async def evict_pool(self, pool: PrefixPool, *, flush: bool) -> tuple[list[PrefixPool], int]:
        """Give a pool's cells back, with those of its subtree if asked; ids and tokens stay.

        Raises:
            PoolInUseError: a pin, resident children, or one is being computed.
        """
        doomed = self.plane.tree.check_evict(pool, flush=flush)
        for each in doomed:
            self.plane.tree.evict(each)  # no await since the check
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawn(self._give_all_back(doomed, done))
        freed = await asyncio.shield(done)
        log.info("pool_evicted", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

    async def ensure_resident(self, pool: PrefixPool) -> PrefixPool | None:
        """Compute an evicted pool again, its parents first; None if it cannot be had."""
        try:
            parent = pool.parent
            if parent is not None and parent.state is PoolState.EVICTED:
                parent = await self.ensure_resident(parent)
            if pool.state in (PoolState.EVICTED, PoolState.MATERIALIZING):
                pool, _, _ = await self.create_pool(pool.tokens, pool.scope, label=None, pin=False)
        except PolyKVError as error:
            log.info("pool_not_revived", pool_id=pool.pool_id, reason=error.message)
            return None
        return pool if pool.resident else None

    async def share_from(self, slot: Slot, n_tokens: int) -> bool:
        """Make a pool of a slot's first tokens, once the engine has passed them; whether there is one now.

        All who want to share from the same request wait for the same snapshot. False when that request
        ended before it came so far, or no progress is seen: whoever waits goes on without.
        """
        session = slot.session
        if session is None:
            return False
        key = (slot.slot, slot.lease or 0)
        going = self._sharing.get(key)
        if going is None:
            going = self._sharing[key] = asyncio.get_running_loop().create_future()
            self._spawn(self._share(key, slot, session, n_tokens, going))
        return await asyncio.shield(going)

    async def _share(
        self, key: tuple[int, int], slot: Slot, session: Session, n_tokens: int, result: asyncio.Future[bool]
    ) -> None:
        made = False
        try:
            made = await self._has_passed(slot, session, n_tokens) and await self._automatic_fits()
            if made:
                await self.snapshot_slot(
                    slot, session, n_tokens=n_tokens, label=None, pin=False, origin=PoolOrigin.AUTO
                )
        except PolyKVError as error:
            made = False
            log.info("auto_pool_not_made", tokens=n_tokens, reason=error.message)
        finally:
            self._sharing.pop(key, None)
            result.set_result(made)

    async def _automatic_fits(self) -> bool:
        """Make room within the share of sequence ids that pools may take which come by themselves."""
        while self.plane.too_many_automatic():
            idle = self.plane.tree.evictable(self.now_ts(), GRACE_S)
            if not idle:
                return False
            await self.evict_pool(idle[0], flush=False)
        return True

    async def _has_passed(self, slot: Slot, session: Session, n_tokens: int) -> bool:
        """Wait until the session's slot holds so many tokens; False when it never will."""
        seen, since, lease = -1, monotonic(), slot.lease
        while slot.session is session and self.plane.serving:
            now = (await self.client.counters()).slots[slot.slot]
            started = lease is None or now.tag == lease
            if started and now.tokens >= n_tokens:
                return True
            if lease is None or slot.lease != lease:
                return False  # it is over, and did not come so far
            progress = now.tokens if started else -1
            if progress > seen:
                seen, since = progress, monotonic()
            elif monotonic() - since > NO_PROGRESS_S:
                return False
            await asyncio.sleep(IDLE_POLL_S)
        return False

    async def snapshot_session(  # noqa: PLR0913 - the facts of a pool
        self,
        session_id: SessionId,
        scope: Scope | None,
        *,
        n_tokens: int | None,
        label: str | None,
        pin: bool,
        parent: PrefixPool | None = None,
    ) -> tuple[PrefixPool, bool]:
        """A pool of what the slot of a session holds now; nothing is copied or computed.

        Raises:
            NotFoundError, SessionNotResidentError: no such session, or its slot is another's.
            PoolCapacityError: no sequence id is free.
            PrefixMismatchError: ``parent`` has nothing in common with it.
        """
        slot = self.plane.resident_slot(session_id, scope)
        session = slot.session
        assert session is not None
        return await self.snapshot_slot(
            slot, session, n_tokens=n_tokens, label=label, pin=pin, origin=PoolOrigin.SNAPSHOT, parent=parent
        )

    async def snapshot_slot(  # noqa: PLR0913 - the facts of a pool
        self,
        slot: Slot,
        session: Session,
        *,
        n_tokens: int | None,
        label: str | None,
        pin: bool,
        origin: PoolOrigin,
        parent: PrefixPool | None = None,
    ) -> tuple[PrefixPool, bool]:
        """A pool of a slot's leading tokens, while it is the session's; see ``snapshot_session``."""
        number = await self._with_room(self.plane.tree.reserve)
        epoch = self._epoch
        kept = False
        try:
            sample = await self.client.counters()
            before = sample.slots[slot.slot]
            # whose cells it holds already decides the place in the tree; else the parent that was named
            node = self.plane.tree.node(before.pool_uid) if before.shared_tokens else None
            if parent is not None and (node is None or not node.is_below(parent)):
                node = parent
            live = node is not None and node.resident
            if slot.session is not session:
                raise SessionNotResidentError("another conversation took the slot", param="from_session")
            taken = await self.client.snapshot(
                number, slot.slot, n_tokens, node.number if node and live else None
            )
            if slot.session is not session or self._epoch != epoch:
                raise SessionNotResidentError("another conversation took the slot", param="from_session")
            tokens = as_tokens(taken.tokens)
            if parent is not None and taken.n_parent == 0:
                raise PrefixMismatchError(
                    f"the session and pool {parent.pool_id} have nothing in common",
                    first_mismatch=0,
                    parent_len=parent.prefix_len,
                )
            branch_pos = taken.n_parent if live else min(before.shared_tokens, len(tokens))
            pool, kept = self.plane.adopt_snapshot(
                number,
                PoolUid(taken.uid),
                tokens,
                session.scope,
                origin=origin,
                label=label,
                pin=pin,
                now_ts=self.now_ts(),
                parent=node,
                branch_pos=0 if node is None else branch_pos,
            )
            log.info("pool_snapshot", pool_id=pool.pool_id, tokens=len(tokens), origin=origin.value, new=kept)
            return pool, kept
        finally:
            if not kept and self._epoch == epoch:
                self._spawn(self._return_number(number, epoch))

    async def _return_number(self, number: PoolNumber, epoch: str) -> None:
        """Nothing came of a reserved number; the engine may have a pool under it all the same."""
        try:
            if self._epoch == epoch:
                await self.client.release(number)
        except PolyKVError as error:
            log.warning("pool_release_failed", number=number, reason=error.message)
        finally:
            if self._epoch == epoch:
                self.plane.tree.retire(number)

    async def _with_room(self, begin: Callable[[], T]) -> T:
        """Do what needs a sequence id; pools that came by themselves and are out of use make room."""
        while True:
            try:
                return begin()
            except PoolCapacityError:
                idle = self.plane.tree.evictable(self.now_ts(), GRACE_S)
                if not idle:
                    raise
                await self.evict_pool(idle[0], flush=False)

    async def _give_all_back(self, pools: list[PrefixPool], done: asyncio.Future[int]) -> None:
        freed, epoch = 0, self._epoch
        try:
            for pool in pools:
                freed += await self._give_back(pool, epoch)
        finally:
            done.set_result(freed)

    def background(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run something to its end whatever becomes of those who wait for it."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result.set_result(await coroutine)
            except PolyKVError as error:
                result.set_exception(error)
                result.exception()  # nobody may be waiting any more
            finally:
                if not result.done():
                    result.cancel()

        self._spawn(run())
        return result

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(coroutine)
