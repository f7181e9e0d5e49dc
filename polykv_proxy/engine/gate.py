"""The order in which requests reach an engine that puts some of them into a slot of its own choice.

Most requests are pinned to a slot. One that cannot be goes to any slot that the engine has idle; and for the
engine a slot is idle until a request runs in it, also when the proxy has given it away.

Rule 1: a request without a pin is sent only when every pinned one that was sent is seen to run.
Rule 2: nothing is sent after it until it is known which slot it took, or that it took none.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from polykv_proxy.core.types import SlotId
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from typing import Any

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.engine.wire import StockSlot

LOOK_S = 0.02
"""Between two looks at the engine's slots."""

LAUNCH_S = 3.0
"""A request whose client left and that no slot shows by then will not run: the engine looks at a closed
connection at least once a second."""

T = TypeVar("T")


class Gate:
    """All requests to one engine pass it, one way or the other.

    Args:
        look: shows the engine's slots.
        spawn: runs something to its end.
        on_taken: told which slot a request without a pin runs in.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[list[StockSlot]]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_taken: Callable[[Lease, SlotId], None],
    ) -> None:
        self._look = look
        self._spawn = spawn
        self._on_taken = on_taken
        self._alone = asyncio.Lock()
        self._coming: dict[int, Lease] = {}
        """Leases whose request was begun and has not been answered."""
        self._stepping: set[int] = set()
        """Leases whose slot is idle again and again until their work is over."""

    @asynccontextmanager
    async def beside(self, lease: Lease, *, steps: bool = False) -> AsyncIterator[None]:
        """For work in the lease's own slot, beside all others of the kind.

        Its slot may be another one once this is entered: one without a pin may have taken it.

        Args:
            lease: its hold on the slot.
            steps: more than one request; otherwise what is done in the slot before its request runs.
        """
        async with self._alone:
            self._coming[lease.lease_id] = lease
            if steps:
                self._stepping.add(lease.lease_id)
        try:
            yield
        finally:
            self._coming.pop(lease.lease_id, None)
            self._stepping.discard(lease.lease_id)

    async def alone(self, lease: Lease, send: Callable[[], Awaitable[T]]) -> T:
        """Send what the engine chooses a slot for, and find out which.

        Args:
            lease: its slot is right when this returns.
            send: sends it and returns when the answer begins.
        """
        await self._alone.acquire()
        try:
            before = await self._all_run()
        except BaseException:
            self._alone.release()
            raise
        answered, left = asyncio.Event(), asyncio.Event()
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spawn(self._learn(lease, before, answered, left, known))
        try:
            answer = await send()
            answered.set()
            await asyncio.shield(known)
        finally:
            left.set()
        return answer

    async def _all_run(self) -> dict[int, int | None]:
        """Wait until each slot with work on its way shows it; returns the last task of every slot."""
        while True:
            slots = {slot.id: slot for slot in await self._look()}
            runs = {number for number, slot in slots.items() if slot.is_processing}
            if not self._stepping and all(lease.slots[0] in runs for lease in self._coming.values()):
                return {number: slot.id_task for number, slot in slots.items()}
            await asyncio.sleep(LOOK_S)

    async def _learn(
        self,
        lease: Lease,
        before: dict[int, int | None],
        answered: asyncio.Event,
        left: asyncio.Event,
        known: asyncio.Future[None],
    ) -> None:
        """Look until a slot shows another task than before; then let others pass.

        1. A slot does: that is the one.
        2. The answer had begun before a look that shows none: the engine refused it.
        3. Nobody waits for the answer any more, and it had time to start: it will not.
        """
        expires_at: float | None = None
        try:
            while True:
                last_look = answered.is_set()
                taken: list[int] = []
                with suppress(PolyKVError):  # an engine that is gone runs nothing: 2 or 3
                    slots = await self._look()
                    taken = [slot.id for slot in slots if slot.id_task != before.get(slot.id)]
                if taken:  # 1
                    if not set(taken) & set(lease.slots):
                        self._on_taken(lease, SlotId(taken[0]))
                    return
                if last_look:  # 2
                    return
                if left.is_set() and not answered.is_set():  # 3
                    expires_at = expires_at or monotonic() + LAUNCH_S
                    if monotonic() > expires_at:
                        return
                await asyncio.sleep(LOOK_S)
        finally:
            self._alone.release()
            if not known.done():
                known.set_result(None)
