"""When something may begin in a slot.

Rule 1: not while somebody needs the slot to be still, so that what was read of it stays true. One at a time
does; who comes second waits.
Rule 2: not before what is going to be filled is empty: what had to go for it is gone (``core.cells``).
Rule 3: it begins in the step in which that is seen: whoever is let through sends without another await.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from polykv_proxy.core.cells import Cells
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.types import SlotId


class Stillness:
    """Of the slots of one engine.

    Args:
        cells: knows who has to wait for room.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._still: dict[SlotId, asyncio.Future[None]] = {}
        """Slots in which nothing may begin until the future is done."""
        self._emptied = asyncio.Event()
        """Set, then cleared, whenever something was taken back."""

    def __contains__(self, slot: SlotId) -> bool:
        return slot in self._still

    @contextlib.asynccontextmanager
    async def of(self, slot: SlotId) -> AsyncIterator[None]:
        """Nothing begins in a slot while the block runs (rule 1)."""
        while (going := self._still.get(slot)) is not None:
            await asyncio.shield(going)
        ended = self._still[slot] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._still[slot]
            ended.set_result(None)

    def emptied(self) -> None:
        """Something was taken back: those who wait for room look again."""
        self._emptied.set()
        self._emptied.clear()

    async def may_begin(self, lease: Lease, timeout_s: float | None = None) -> bool | None:
        """Wait until a request may begin in its slots; None when ``timeout_s`` seconds pass without that.

        Send without another await (rule 3).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if going := [self._still[slot] for slot in lease.slots if slot in self._still]:
                        await asyncio.shield(going[0])
                    elif not lease.ended and self._cells.awaits_room(lease):
                        await self._emptied.wait()
                    else:
                        break
        except TimeoutError:
            return None
        self._cells.begins(lease)
        return True
