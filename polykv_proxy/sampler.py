"""The polling loop: the engine's counters become the published picture.

1. A session decodes whose rate is not known yet: ten times a second.
2. The engine works: four times a second.
3. It does not: once a second.
4. An engine without the patch, unless every slot that works streams to a client of ours: at the moments of
   ``QUIET_S``, so that it notices when a client leaves that gets nothing for now.

A request that starts or ends is looked at at once, in the last case only the first one that starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.types import Capability
from polykv_proxy.readings import QUIET_S, next_moment_s

if TYPE_CHECKING:
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.readings import Readings

log = structlog.get_logger(__name__)

WARMING_S = 0.1
BUSY_S = 0.25
IDLE_S = 1.0
SHORTEST_S = 0.1
"""Least time between two readings, however many requests start and end."""


async def run(readings: Readings) -> None:
    """Sample until cancelled."""
    while True:
        try:
            await readings.look(max_age_s=SHORTEST_S / 2)
        except Exception:  # a fault of ours: nothing above would notice, and nobody look again
            log.exception("sampling_failed")
        interval_s, at_once = pace(readings.plane)
        if at_once:
            await asyncio.sleep(SHORTEST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s - SHORTEST_S):
                    await readings.due.wait()
        else:
            await asyncio.sleep(next_moment_s(monotonic(), interval_s))
        readings.due.clear()


def pace(plane: ControlPlane) -> tuple[float, bool]:
    """Seconds to the next reading, and whether a request that starts or ends cuts them short."""
    book, running = plane.experience.book, plane.leases.running_count
    stock = plane.capability is not Capability.ZERO_COPY
    if stock and (not running or plane.leases.silent or book.decoding_count != running):
        return QUIET_S, not running  # 4
    if book.warming:
        return WARMING_S, True  # 1
    if running or book.decoding_count:
        return BUSY_S, True  # 2
    return IDLE_S, True  # 3
