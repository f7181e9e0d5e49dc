"""The polling loop: the engine's counters become the published picture.

Often while the engine works, seldom while it does not, and at once when a request starts or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polykv_proxy.runtime import Runtime

BUSY_S = 0.25
IDLE_S = 1.0
SHORTEST_S = 0.1
"""Least time between two readings, however many requests start and end."""


async def run(runtime: Runtime) -> None:
    """Sample until cancelled."""
    while True:
        sample = await runtime.sample(max_age_s=SHORTEST_S / 2)
        interval = BUSY_S if sample is not None and sample.busy else IDLE_S
        await asyncio.sleep(SHORTEST_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval - SHORTEST_S):
                await runtime.sampled.wait()
        runtime.sampled.clear()
