"""What goes from disk by itself: what was out of use for long, what there is no room for, and litter.

Rule 1: a sweep comes at most every ``SWEEP_S`` seconds, with one more between them where the disk had no room
for a save, and on no request's way.
Rule 2: what somebody works with stays (``Shelf.is_in_use``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Reason

if TYPE_CHECKING:
    from polykv_proxy.durable.shelf import Shelf

log = structlog.get_logger(__name__)

SWEEP_S = 300.0

LITTER_S = 600.0
"""Seconds after which a file that nobody waits for goes: by then no call to the engine is on its way."""

AT_ONCE = 64
"""States that are entered or looked at before others get their turn."""


class Sweeps:
    """Those of one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._swept_at = 0.0
        self._hurried_at: float | None = None
        self._wanted: int | None = None
        """Bytes that the disk had no room for."""

    def wants(self, n_bytes: int) -> None:
        """The disk had no room for so many bytes: the next round makes some."""
        self._wanted = n_bytes

    async def sweep(self, now: float, *, due: bool = False) -> int:
        """Remove what has to go, if it is time; returns how many states went.

        Args:
            now: monotonic seconds.
            due: whether it is time anyway.
        """
        shelf = self._shelf
        if self._wanted is not None and (self._hurried_at is None or now - self._hurried_at >= SWEEP_S):
            self._hurried_at = now
        elif not due and self._swept_at and now - self._swept_at < SWEEP_S:
            return 0
        self._swept_at = now
        wanted, self._wanted = self._wanted or 0, None
        await self._sweep_litter()
        free = await shelf.disk.run(shelf.store.free_bytes)
        if free is not None:
            free -= wanted
        busy = set()
        for number, entry in enumerate(shelf.catalogue, 1):
            if shelf.is_in_use(entry):
                busy.add(entry)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        gone = 0
        for entry in await asyncio.to_thread(
            shelf.catalogue.overdue, shelf.limits, shelf.now_ts(), free, busy
        ):
            if not shelf.is_in_use(entry):
                gone += await shelf.remove(entry, Reason.SWEPT)
        return gone

    async def _sweep_litter(self) -> None:
        """Remove what the engine wrote after whoever wanted it had given up."""
        shelf = self._shelf
        async with shelf.changing:
            known = {coming.file for coming in shelf.saves}
            known |= {entry.state.file for entry in (*shelf.catalogue, *shelf.held)}
            count = await shelf.disk.run(shelf.store.litter, known, shelf.now_ts() - LITTER_S)
        if count:
            shelf.metrics.saves["late"] += count
            log.warning("slot_files_nobody_waits_for", removed=count)
