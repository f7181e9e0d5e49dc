"""Sharing unasked: waits for a request that computes what another one needs too, then snapshots it."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.types import PoolOrigin
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.pooling.room import Room
    from polykv_proxy.pooling.snapshot import Snapshots
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

IDLE_POLL_S = 0.05
"""Between two looks at a request that is waited for."""

NO_PROGRESS_S = 10.0
"""A request whose prefill does not advance for so long is not waited for."""


class Sharing:
    """Makes pools of what several requests have in common.

    Args:
        runtime: the engine's control plane at work.
        room: keeps such pools to their share.
        snapshots: takes them.
    """

    def __init__(self, runtime: Runtime, room: Room, snapshots: Snapshots) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._client = runtime.client
        self._room = room
        self._snapshots = snapshots
        self._going: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Snapshots that are waited for, by slot and lease."""

    @property
    def waiting(self) -> int:
        """How many requests are being waited for."""
        return len(self._going)

    async def from_slot(self, slot: Slot, n_tokens: int) -> bool:
        """Make a pool of a slot's first tokens, once the engine has passed them; whether there is one now.

        All who want to share from the same request wait for the same snapshot. False when that request
        ended before it came so far, or no progress is seen: whoever waits goes on without.
        """
        session = slot.session
        if session is None:
            return False
        key = (slot.slot, slot.lease or 0)
        going = self._going.get(key)
        if going is None:
            going = self._going[key] = asyncio.get_running_loop().create_future()
            self._runtime.spawn(self._share(key, slot, session, n_tokens, going))
        return await asyncio.shield(going)

    async def _share(
        self, key: tuple[int, int], slot: Slot, session: Session, n_tokens: int, result: asyncio.Future[bool]
    ) -> None:
        made = False
        try:
            made = await self._has_passed(slot, session, n_tokens) and await self._room.for_automatic()
            if made:
                await self._snapshots.of_slot(
                    slot, session, n_tokens=n_tokens, label=None, pin=False, origin=PoolOrigin.AUTO
                )
        except PolyKVError as error:
            made = False
            log.info("auto_pool_not_made", tokens=n_tokens, reason=error.message)
        finally:
            self._going.pop(key, None)
            result.set_result(made)

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
