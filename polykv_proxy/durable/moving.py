"""KV that moves between slots and files: to its end, whoever leaves that waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.types import EngineSample, SlotId, SlotSample
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)


async def moves(runtime: Runtime, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
    """Do it all: whoever leaves is gone at once, and his slots are kept until it is done."""
    going = runtime.background(work)
    runtime.moves(lease, going)
    await asyncio.wait([going])
    _tell(going)


async def to_the_end(runtime: Runtime, work: Coroutine[Any, Any, None]) -> None:
    """Do it all whoever leaves, and only then go on, or leave."""
    going = runtime.background(work)
    left: asyncio.CancelledError | None = None
    while not going.done():
        try:
            await asyncio.wait([going])
        except asyncio.CancelledError as cancelled:
            left = cancelled
    if left is not None:
        raise left
    _tell(going)


def as_seen(sample: EngineSample, number: SlotId) -> SlotSample | None:
    """A slot, as a reading of its engine shows it."""
    return next((each for each in sample.slots if each.slot == number), None)


def _tell(over: asyncio.Future[None]) -> None:
    """Where it failed, nobody's request does."""
    if not over.cancelled() and (error := over.exception()) is not None:
        log.info("kv_not_moved", reason=str(error))
