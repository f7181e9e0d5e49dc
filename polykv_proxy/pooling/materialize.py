"""Computing pools: create them, and have them again after an eviction."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.cells import need_of_pool
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import PoolOrigin, PoolState, PoolUid
from polykv_proxy.errors import ConflictError, EngineGoneError, PolyKVError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.types import Scope, SlotId, Tokens
    from polykv_proxy.engine.patched import Materialized
    from polykv_proxy.line import Pending
    from polykv_proxy.pooling.room import Room
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

_REFUSED = frozenset({"cells_exhausted", "engine_refused"})
"""Codes of the backend's refusals."""

_ANSWERED = _REFUSED | {"engine_failed", "engine_loading", "engine_auth", "not_found", "copy_ineffective"}
"""Codes of the backend's errors after which the engine is known to be done with a call."""


class _Materialization:
    """A pool that is being computed, and those who wait for it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Materialized] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None
        self.clean = True
        """Whether the engine is done with its slot."""
        self.content = Content.OLD
        """What the slot holds."""


class Materializer:
    """Computes the pools of one engine.

    Args:
        runtime: the engine's control plane at work.
        room: makes it, and takes back what came of nothing.
    """

    def __init__(self, runtime: Runtime, room: Room) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._client = runtime.client
        self._room = room
        self._jobs: dict[int, _Materialization] = {}

    @property
    def waiting(self) -> int:
        """How many wait for pools that are being computed."""
        return sum(job.waiters for job in self._jobs.values())

    async def create(  # noqa: PLR0913 - the facts of a pool
        self,
        tokens: Tokens,
        scope: Scope,
        *,
        label: str | None,
        pin: bool,
        ttl_s: float | None = None,
        origin: PoolOrigin = PoolOrigin.EXPLICIT,
        parent: PrefixPool | None = None,
        branch_pos: int = 0,
    ) -> tuple[PrefixPool, bool, Materialized | None]:
        """The resident pool of this content; whether it was created now, and what that took.

        Those who ask for the same content at the same time share one prefill; it stops when the last of
        them leaves. Pools that came by themselves make room if need be.

        Raises:
            BadRequestError, PoolCapacityError, DisabledError, UnavailableError: see
                ``PoolPlanner.enter``; the engine's refusals.
        """
        wanted = Wanted(label=label, pin=pin, ttl_s=ttl_s, origin=origin)

        def begin() -> tuple[PrefixPool, bool]:
            return self._plane.pools.enter(
                tokens, scope, wanted, now_ts=self._runtime.now_ts(), parent=parent, branch_pos=branch_pos
            )

        pool, compute = await self._room.for_one(begin)
        if not compute and pool.state is not PoolState.MATERIALIZING:
            return pool, False, None
        job = self._jobs.get(id(pool))
        if job is None:
            job = self._jobs[id(pool)] = _Materialization()
            job.task = self._runtime.spawn(self._materialize(pool, job))
        job.waiters += 1
        try:
            return pool, compute, await asyncio.shield(job.result)
        finally:
            job.waiters -= 1
            if job.waiters == 0 and job.task is not None and not job.result.done():
                job.task.cancel()

    async def _materialize(self, pool: PrefixPool, job: _Materialization) -> None:
        lease: Lease | None = None
        pending: Pending | None = None
        try:
            need = need_of_pool(pool.prefix_len, pool.parent, pool.branch_pos)
            pending = self._runtime.line.request(Ask(scope=pool.scope, need=need), conversation=False)
            while lease is None:
                lease = await pending.wait(60.0)
            if lease.ended or not self._plane.pools.is_awaited(pool):
                raise EngineGoneError("the engine was restarted before the pool was computed")
            done = await self._compute(pool, lease, job)
            self._plane.pools.on_ready(pool, PoolUid(done.uid), done.file_bytes)
            job.result.set_result(done)
            log.info(
                "pool_created", pool_id=pool.pool_id, tokens=pool.prefix_len, computed=done.timings.prompt_n
            )
        except PolyKVError as error:
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
            if lease is not None and not job.clean and self._plane.pools.is_awaited(pool):
                # the engine may be done with it this very moment, and nobody knows that pool
                self._runtime.after_idle[lease.lease_id] = partial(
                    self._room.give_back, pool.number, self._runtime.epoch
                )
            self._plane.pools.on_failed(pool, retire=not job.clean)  # no effect on one that is resident
            if lease is not None:
                self._runtime.finish(lease, clean=job.clean, content=job.content)

    async def _compute(self, pool: PrefixPool, lease: Lease, job: _Materialization) -> Materialized:
        """Have a pool computed in a slot; the job says what became of the slot."""
        await self._runtime.stillness.may_begin(lease)  # what has to go for it is gone
        await self._runtime.saver.before_request(lease, None, 0)
        while True:
            if pool.parent is not None and not pool.parent.resident:
                self._plane.tree.detach(
                    pool
                )  # before the slot is judged: what it may share is not the same then
            if await self._make_own(lease.slots[0], pool):
                job.content = Content.NOTHING
            await self._runtime.stillness.may_begin(lease)
            if pool.parent is None or pool.parent.resident:
                break  # no await from here to the call
        before = job.content
        job.clean, job.content = False, Content.NOTHING
        try:
            done = await self._runtime.backend.materialize(
                pool.number,
                pool.tokens,
                lease,
                parent=None if pool.parent is None else pool.parent.number,
                branch_pos=pool.branch_pos,
            )
        except PolyKVError as error:
            job.clean = error.code in _ANSWERED
            if error.code in _REFUSED and await self._is_untouched(lease):
                job.content = before
            raise
        job.clean = True
        return done

    async def _make_own(self, slot: SlotId, pool: PrefixPool) -> bool:
        """Empty a slot that would lend a pool cells which are neither its own nor its parent's.

        The engine goes on from what a slot holds. Where that is another pool's, the new one would hold cells
        that the tree knows nothing of. Returns whether that was so.
        """
        held = await self._runtime.backend.shared(slot)
        if held is None or held.shared_tokens <= pool.branch_pos:
            return False
        await self._client.slot_action(slot, "action=erase", b"{}")
        return True

    async def _is_untouched(self, lease: Lease) -> bool:
        """Whether the engine refused to compute a pool before it did anything to the slot."""
        try:
            held = await self._runtime.backend.shared(lease.slots[0])
        except PolyKVError:
            return False
        return held is not None and held.tag != lease.lease_id

    async def ensure_resident(self, pool: PrefixPool) -> PrefixPool:
        """The pool, computed again if it was evicted, its parents first.

        Raises:
            ConflictError: it was lost with an engine, and is to be created again.
            PolyKVError: see ``create``.
        """
        parent = pool.parent
        if parent is not None and not parent.released and parent.comes_back:
            await self.ensure_resident(parent)
        if pool.comes_back:
            pool, _, _ = await self.create(pool.tokens, pool.scope, label=None, pin=False, origin=pool.origin)
        if not pool.resident:
            raise ConflictError(
                f"pool {pool.pool_id} is {pool.state.value}; create it again", code="pool_lost"
            )
        return pool

    async def revive(self, pool: PrefixPool) -> PrefixPool | None:
        """``ensure_resident`` for those who go on without: None if it cannot be had."""
        try:
            return await self.ensure_resident(pool)
        except PolyKVError as error:
            log.info("pool_not_revived", pool_id=pool.pool_id, reason=error.message)
            return None
