"""Pools at work: computes, snapshots, evicts and releases them in the engine.

What a pool is and where it stands in the tree is the core's; here the engine is made to agree. Rule: a
sequence id is free again only when the engine is known to hold nothing under it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import structlog

from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import PoolNumber, PoolOrigin, PoolState, PoolUid, Scope, as_tokens
from polykv_proxy.errors import (
    ConflictError,
    EngineGoneError,
    NotFoundError,
    PolyKVError,
    PoolCapacityError,
    PrefixMismatchError,
    SessionNotResidentError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import SessionId, SlotId, Tokens
    from polykv_proxy.engine.wire import Materialized
    from polykv_proxy.runtime import Pending, Runtime

log = structlog.get_logger(__name__)

IDLE_POLL_S = 0.05
"""Between two looks at a request that is waited for."""

NO_PROGRESS_S = 10.0
"""A request whose prefill does not advance for so long is not waited for."""

GRACE_S = 60.0
"""Seconds out of use after which a pool that came by itself may make room."""

RELEASE_RETRY_S = (0.5, 30.0)
"""First and longest pause between two attempts to release what the engine did not."""

_ANSWERED = frozenset({"engine_refused", "engine_failed", "engine_auth", "not_found"})
"""Codes of the client's errors after which the engine is known to be done with a call."""

T = TypeVar("T")


class _Materialization:
    """A pool that is being computed, and those who wait for it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Materialized] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None


class Pooling:
    """All that is done to the pools of one engine.

    Args:
        runtime: the engine's control plane at work.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._client = runtime.client
        self._jobs: dict[int, _Materialization] = {}
        self._sharing: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Snapshots that are waited for, by slot and lease."""

    async def create(  # noqa: PLR0913 - the facts of a pool
        self,
        tokens: Tokens,
        scope: Scope,
        *,
        label: str | None,
        pin: bool,
        origin: PoolOrigin = PoolOrigin.EXPLICIT,
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
            return self._plane.begin_pool(
                tokens,
                scope,
                label=label,
                pin=pin,
                now_ts=self._runtime.now_ts(),
                origin=origin,
                parent=parent,
                branch_pos=branch_pos,
            )

        pool, compute = await self._with_room(begin)
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
        clean = True
        lease: Lease | None = None
        pending: Pending | None = None
        try:
            pending = self._runtime.request(Ask(scope=pool.scope), conversation=False)
            while lease is None:
                lease = await pending.wait(60.0)
            if lease.ended or not self._plane.is_awaited(pool):
                raise EngineGoneError("the engine was restarted before the pool was computed")
            await self._make_own(lease.slots[0], pool)
            clean = False
            if pool.parent is not None and not pool.parent.resident:
                self._plane.tree.detach(pool)
            done = await self._client.materialize(
                pool.number,
                pool.tokens,
                lease.slots[0],
                lease.lease_id,
                parent=None if pool.parent is None else pool.parent.number,
                branch_pos=pool.branch_pos,
            )
            clean = True
            self._plane.on_pool_ready(pool, PoolUid(done.uid))
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
            if lease is not None and not clean and self._plane.is_awaited(pool):
                # the engine may be done with it this very moment, and nobody knows that pool
                self._runtime.after_idle[lease.lease_id] = partial(
                    self._give_back, pool.number, self._runtime.epoch
                )
            self._plane.on_pool_failed(pool, retire=not clean)  # no effect on one that is resident
            if lease is not None:
                self._runtime.finish(lease, clean=clean, content=Content.NOTHING)

    async def _make_own(self, slot: SlotId, pool: PrefixPool) -> None:
        """Empty a slot that would lend a pool cells which are neither its own nor its parent's.

        The engine goes on from what a slot holds. Where that is another pool's, the new one would hold cells
        that the tree knows nothing of.
        """
        held = (await self._client.counters()).slots[slot]
        if held.shared_tokens > pool.branch_pos:
            await self._client.slot_action(slot, "action=erase", b"{}")

    async def _give_back(self, number: PoolNumber, epoch: str) -> int:
        """Free a number, with what the engine has under it; returns the cells that nobody else held.

        Where the engine does not do it now, it is asked again until it does, or is another one: what it
        may still have under a number must not become somebody else's.
        """
        freed = await self._try_to_release(number, epoch)
        if freed is None:
            self._runtime.spawn(self._insist(number, epoch))
        return freed or 0

    async def _insist(self, number: PoolNumber, epoch: str) -> None:
        pause, longest = RELEASE_RETRY_S
        while True:
            await asyncio.sleep(pause)
            if await self._try_to_release(number, epoch) is not None:
                return
            pause = min(2 * pause, longest)

    async def _try_to_release(self, number: PoolNumber, epoch: str) -> int | None:
        freed = 0
        if self._runtime.epoch == epoch:
            if not self._plane.serving:
                return None  # what answers by now may be another engine, at its self-test
            try:
                freed = await self._client.release(number)
            except PolyKVError as error:
                log.warning("pool_release_failed", number=number, reason=error.message)
                return None
        if self._runtime.epoch == epoch:  # else it may be another's by now
            self._plane.tree.retire(number)
        return freed

    async def release(self, pool: PrefixPool, *, recursive: bool) -> tuple[list[PrefixPool], int]:
        """Release a pool, with its subtree if asked; returns what went and how many cells were freed.

        Raises:
            PoolInUseError: children, or it is being computed.
        """
        doomed = self._plane.tree.check_release(pool, recursive=recursive)
        resident = [each for each in doomed if each.resident]
        for each in doomed:
            self._plane.tree.release(each)  # no await since the check: the ids go together
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # a task, because it has to go on to the end when the client that asked for it leaves
        self._runtime.spawn(self._give_all_back(resident, done))
        freed = await asyncio.shield(done)
        log.info("pool_released", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

    async def evict(self, pool: PrefixPool, *, flush: bool) -> tuple[list[PrefixPool], int]:
        """Give a pool's cells back, with those of its subtree if asked; ids and tokens stay.

        Raises:
            PoolInUseError: a pin, resident children, or one is being computed.
        """
        doomed = self._plane.tree.check_evict(pool, flush=flush)
        for each in doomed:
            self._plane.tree.evict(each)  # no await since the check
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._runtime.spawn(self._give_all_back(doomed, done))
        freed = await asyncio.shield(done)
        log.info("pool_evicted", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

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
            self._runtime.spawn(self._share(key, slot, session, n_tokens, going))
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
        while self._plane.too_many_automatic():
            idle = self._plane.tree.evictable(self._runtime.now_ts(), GRACE_S)
            if not idle:
                return False
            await self.evict(idle[0], flush=False)
        return True

    async def _has_passed(self, slot: Slot, session: Session, n_tokens: int) -> bool:
        """Wait until the session's slot holds so many tokens; False when it never will."""
        seen, since, lease = -1, monotonic(), slot.lease
        while slot.session is session and self._plane.serving:
            now = (await self._client.counters()).slots[slot.slot]
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
        slot = self._plane.resident_slot(session_id, scope)
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

        async def go() -> tuple[PrefixPool, bool]:
            return await self._snapshot(
                slot, session, n_tokens=n_tokens, label=label, pin=pin, origin=origin, parent=parent
            )

        # to the end whoever leaves: the slot lives on a pool that has to be known from then on
        return await asyncio.shield(self._runtime.background(go()))

    async def _snapshot(  # noqa: PLR0913 - the facts of a pool
        self,
        slot: Slot,
        session: Session,
        *,
        n_tokens: int | None,
        label: str | None,
        pin: bool,
        origin: PoolOrigin,
        parent: PrefixPool | None,
    ) -> tuple[PrefixPool, bool]:
        plane, epoch = self._plane, self._runtime.epoch
        number = await self._with_room(partial(plane.tree.reserve, session.scope))
        kept = False
        try:
            held = (await self._client.counters()).slots[slot.slot]
            if slot.session is not session:
                raise SessionNotResidentError("another conversation took the slot", param="from_session")
            below = plane.snapshot_parent(held, parent)
            live = below is not None and below.resident
            try:
                taken = await self._client.snapshot(
                    number, slot.slot, n_tokens, below.number if below is not None and live else None
                )
            except NotFoundError as error:
                raise ConflictError(f"{error.message}; ask again", code="pool_lost") from None
            if self._runtime.epoch != epoch:
                raise EngineGoneError("the engine was restarted")
            uid, tokens = PoolUid(taken.uid), as_tokens(taken.tokens)
            branch_pos = taken.n_parent if live else min(held.shared_tokens, len(tokens))
            if branch_pos == 0:
                below = None
            try:
                self._check_snapshot(slot, session, tokens, parent, below)
            except ConflictError:
                plane.reject_snapshot(number, uid, tokens, session.scope, parent=below, branch_pos=branch_pos)
                raise
            pool, kept = plane.adopt_snapshot(
                number,
                uid,
                tokens,
                session.scope,
                origin=origin,
                label=label,
                pin=pin,
                now_ts=self._runtime.now_ts(),
                parent=below,
                branch_pos=branch_pos,
            )
            log.info("pool_snapshot", pool_id=pool.pool_id, tokens=len(tokens), origin=origin.value, new=kept)
            return pool, kept
        finally:
            if not kept and self._runtime.epoch == epoch:
                # nothing came of it, but the engine may have a pool under it all the same
                self._runtime.spawn(self._free(number, epoch))

    @staticmethod
    def _check_snapshot(
        slot: Slot, session: Session, tokens: Tokens, parent: PrefixPool | None, below: PrefixPool | None
    ) -> None:
        """Raise unless the engine took what was meant, and it fits below the parent that was asked for."""
        if slot.session is not session:
            raise SessionNotResidentError("another conversation took the slot", param="from_session")
        if parent is None:
            return
        if parent.match(tokens) == 0:
            raise PrefixMismatchError(
                f"the session and pool {parent.pool_id} have nothing in common",
                first_mismatch=0,
                parent_len=parent.prefix_len,
            )
        if below is None:
            raise ConflictError(f"pool {parent.pool_id} is not resident any more", code="pool_lost")

    async def _free(self, number: PoolNumber, epoch: str) -> None:
        await self._give_back(number, epoch)

    async def _with_room(self, begin: Callable[[], T]) -> T:
        """Do what needs a sequence id; pools that came by themselves and are out of use make room."""
        while True:
            try:
                return begin()
            except PoolCapacityError:
                idle = self._plane.tree.evictable(self._runtime.now_ts(), GRACE_S)
                if not idle:
                    raise
                await self.evict(idle[0], flush=False)

    async def _give_all_back(self, pools: list[PrefixPool], done: asyncio.Future[int]) -> None:
        freed, epoch = 0, self._runtime.epoch
        try:
            for pool in pools:
                freed += await self._give_back(pool.number, epoch)
        finally:
            done.set_result(freed)
