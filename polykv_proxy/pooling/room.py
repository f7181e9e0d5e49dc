"""Taking pools back: releases and evicts them, and makes room for new ones.

Rule: a sequence id is free again only when the engine is known to hold nothing under it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import structlog

from polykv_proxy.core.keeping import evictable, is_held, riding
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope
from polykv_proxy.errors import PolyKVError, PoolCapacityError, SaturatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.types import PoolId, PoolNumber, SlotId
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

RELEASE_RETRY_S = (0.5, 30.0)
"""First and longest pause between two attempts to release what the engine did not."""

T = TypeVar("T")


class Room:
    """Sequence ids and cells that come back.

    Args:
        runtime: the engine's control plane at work.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        runtime.evict_pool = self.reclaim
        runtime.lose_pool = self.lose

    async def reclaim(self, pool_id: PoolId) -> bool:
        """Evict a pool for its cells, unless a request runs on it; returns whether it is gone."""
        pool = self._plane.tree.get(pool_id)
        if pool is None or not pool.resident:
            for ghost in self._plane.tree.lingering:
                if ghost.pool_id == pool_id:
                    await self.end_grace(ghost)
            return True
        if pool.attached:
            return False
        await self.evict(pool, flush=False)
        return True

    def lose(self, number: PoolNumber) -> None:
        """A pool's file cannot be used any more: as after an eviction it is computed when it is wanted again.

        Whoever rides on it has a copy, so neither a pin nor a request is in the way.
        """
        pool = next((each for each in self._plane.tree if each.resident and each.number == number), None)
        if pool is None:
            return
        log.warning("pool_lost_its_file", pool_id=pool.pool_id, tokens=pool.prefix_len)
        self._plane.tree.evict(pool)
        self._runtime.spawn(self.take_back(number, self._runtime.epoch))

    async def release(
        self, pool: PrefixPool, *, recursive: bool, look: bool = True
    ) -> tuple[list[PrefixPool], int]:
        """Release a pool, with its subtree if asked; returns what went and how many cells were freed.

        What is held stays in the engine for a grace after its last holder left; see ``end_grace``.

        Args:
            pool: which.
            recursive: with what is below it.
            look: first, who holds it. Otherwise the ids are gone before anything else happens.

        Raises:
            PoolInUseError: children, or it is being computed.
        """
        pool.check_release(recursive=recursive)
        if not look:
            return await self._release(pool, recursive=recursive)

        async def go() -> tuple[list[PrefixPool], int]:
            await self._runtime.readings.take(max_age_s=0.0)
            if self._plane.tree.get(pool.pool_id) is not pool:
                return [], 0  # somebody else released it meanwhile
            return await self._release(pool, recursive=recursive)

        return await asyncio.shield(self._runtime.background(go()))  # to the end whoever leaves

    async def _release(self, pool: PrefixPool, *, recursive: bool) -> tuple[list[PrefixPool], int]:
        doomed = pool.check_release(recursive=recursive)
        resident = self._take_ids(doomed)  # no await since the check: the ids go together
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # a task, because it has to go on to the end when the client that asked for it leaves
        self._runtime.spawn(self._give_all_back(resident, done))
        freed = await asyncio.shield(done)
        log.info("pool_released", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

    def _take_ids(self, doomed: list[PrefixPool]) -> list[PrefixPool]:
        """Take the ids of pools away, leaves first; returns those that the engine is to give back now."""
        tree, now_ts = self._plane.tree, self._runtime.now_ts()
        ridden, now = riding(self._plane.sample), []
        for each in doomed:
            resident = each.resident
            lingers = resident and self._plane.policy.grace_s > 0 and is_held(each, ridden)
            tree.release(each, lingers=lingers)
            if each.lingers:
                each.held_ts = now_ts
                log.info("pool_lingers", pool_id=each.pool_id, grace_s=self._plane.policy.grace_s)
            elif resident:
                now.append(each)
        return now

    async def end_grace(self, pool: PrefixPool) -> int:
        """Give back a released pool that lingers; returns the cells that nobody else held."""
        pool.lingers = False
        giving = self.give_back(pool.number, self._runtime.epoch)
        freed = await asyncio.shield(self._runtime.background(giving))  # to the end whoever leaves
        log.info("pool_gone", pool_id=pool.pool_id, cells_freed=freed)
        return freed

    async def evict(self, pool: PrefixPool, *, flush: bool) -> tuple[list[PrefixPool], int]:
        """Give a pool's cells back, with those of its subtree if asked; ids and tokens stay.

        Raises:
            PoolInUseError: a pin, resident children, or one is being computed.
        """
        doomed = pool.check_evict(flush=flush)
        for each in doomed:
            self._plane.tree.evict(each)  # no await since the check
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._runtime.spawn(self._give_all_back(doomed, done))
        freed = await asyncio.shield(done)
        log.info("pool_evicted", pool_id=pool.pool_id, pools=len(doomed), cells_freed=freed)
        return doomed, freed

    async def for_one(self, begin: Callable[[], T]) -> T:
        """Do what needs a sequence id; pools that came by themselves and are out of use make room."""
        while True:
            try:
                return begin()
            except PoolCapacityError:
                if lingering := self._plane.tree.lingering:
                    await self.end_grace(lingering[0])
                    continue
                idle = await self._evictable()
                if not idle:
                    raise
                await self.evict(idle[0], flush=False)

    async def for_automatic(self) -> bool:
        """Make room within the share of sequence ids that pools may take which come by themselves."""
        while self._plane.pools.too_many_automatic():
            idle = await self._evictable()
            if not idle:
                return False
            await self.evict(idle[0], flush=False)
        return True

    async def _evictable(self) -> list[PrefixPool]:
        """Those that may go, by a reading that is newer than whatever attached before."""
        await self._runtime.readings.take(max_age_s=0.0)
        plane = self._plane
        return evictable(plane.tree, plane.sample, self._runtime.now_ts(), plane.policy.grace_s)

    async def give_back(self, number: PoolNumber, epoch: str) -> int:
        """Free a number, with what the engine has under it; returns the cells that nobody else held.

        Where the engine does not do it now, it is asked again until it does, or is another one: what it
        may still have under a number must not become somebody else's.
        """
        freed = await self._try_to_release(number, epoch)
        if freed is None:
            self._runtime.spawn(self._insist(number, epoch))
        return freed or 0

    async def empty(self, slot: SlotId, content: Content = Content.NOTHING) -> int | None:
        """Take from an idle slot what it holds; returns the cells that were its own. None: it is at work.

        Args:
            slot: which.
            content: whose it is afterwards; ``OLD`` keeps its conversation there, with nothing computed.

        Raises:
            PolyKVError: the engine does not do it.
        """
        try:
            pending = self._runtime.line.request(Ask(scope=Scope(""), only=slot), conversation=False)
        except SaturatedError:
            return None
        if pending.lease is None:
            pending.give_up()
            return None
        after = Content.OLD  # as long as nothing was done
        try:
            held = await self._runtime.backend.shared(slot)
            await self._runtime.client.erase_slot(slot)
            self._runtime.backend.forget((slot,))
            after = content
        finally:
            self._runtime.finish(pending.lease, clean=True, content=after)
        return 0 if held is None else held.tokens - held.shared_tokens

    async def take_back(self, number: PoolNumber, epoch: str) -> None:
        """``give_back`` where nobody asks how much came back."""
        await self.give_back(number, epoch)

    async def _give_all_back(self, pools: list[PrefixPool], done: asyncio.Future[int]) -> None:
        freed, epoch = 0, self._runtime.epoch
        try:
            for pool in pools:
                freed += await self.give_back(pool.number, epoch)
        finally:
            done.set_result(freed)

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
                freed = await self._runtime.backend.release(number)
            except PolyKVError as error:
                log.warning("pool_release_failed", number=number, reason=error.message)
                return None
        self._runtime.readings.changed()
        if self._runtime.epoch == epoch:  # else it may be another's by now
            self._plane.tree.retire(number)
        return freed
