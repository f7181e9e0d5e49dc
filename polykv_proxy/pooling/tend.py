"""Looking after pools: ends lifetimes, names pins that nobody uses, takes back what nobody knows of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.keeping import note_orphans, outlived, over, strays, tend
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.core.types import PoolNumber, SlotId
    from polykv_proxy.pooling.room import Room
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

TEND_S = 1.0
"""Seconds between two rounds."""


class Tender:
    """Looks after the pools of one engine.

    Args:
        runtime: the engine's control plane at work.
        room: takes back.
    """

    def __init__(self, runtime: Runtime, room: Room) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._room = room

    async def run(self) -> None:
        """Go round until cancelled."""
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.round()
            except PolyKVError as error:
                log.info("pools_not_tended", reason=error.message)

    async def round(self) -> None:
        """One look at everything."""
        if not self._works:
            return
        await self._runtime.readings.take(max_age_s=TEND_S)
        while old := tend(self._plane.tree, self._plane.sample, self._runtime.now_ts()):
            log.info("pool_lifetime_over", pool_id=old[0].pool_id, ttl_s=old[0].ttl_s)
            await self._room.release(old[0], recursive=False, look=False)
        plane, now_ts = self._plane, self._runtime.now_ts()
        for pool in over(plane.tree, plane.sample, now_ts, plane.policy.grace_s):
            if pool.lingers:  # nobody took it up while another one went
                await self._room.end_grace(pool)
        await self._orphans()
        if self._strays() != ([], []):
            # the last one may be older than what happened since
            await self._runtime.readings.take(max_age_s=0.0)
            await self._take_back_strays()

    async def _orphans(self) -> None:
        """Tell of pins that nobody uses any more; release their pools after as long as the policy says."""
        plane, now_ts = self._plane, self._runtime.now_ts()
        names = frozenset(pool.pool_id for pool in plane.orphans())
        for pool in note_orphans(plane.tree, names, now_ts):
            log.info("orphaned_pin", pool_id=pool.pool_id, label=pool.label, tokens=pool.prefix_len)
        for pool in outlived(plane.tree, now_ts, plane.policy.orphan_ttl_s):
            if pool not in plane.orphans():
                continue  # somebody came, or another one went, while the last was released
            log.warning("orphan_released", pool_id=pool.pool_id, label=pool.label, tokens=pool.prefix_len)
            self._runtime.metrics.on_orphan_released()
            await self._room.release(pool, recursive=False, look=False)

    @property
    def _works(self) -> bool:
        return self._plane.serving and self._plane.capability.has_pools

    def _strays(self) -> tuple[list[PoolNumber], list[SlotId]]:
        sample = self._plane.sample
        return ([], []) if sample is None else strays(self._plane.tree, sample)

    async def _take_back_strays(self) -> None:
        numbers, slots = self._strays()
        for number in numbers:
            self._plane.tree.hold(number)  # no await since the look: nobody else gets it
            log.warning("stray_pool", number=number)
            self._runtime.spawn(self._room.take_back(number, self._runtime.epoch))
        for slot in slots:
            if self._plane.board.slots[slot].idle:
                log.warning("stray_cells", slot=slot)
                await self._room.empty(slot)
