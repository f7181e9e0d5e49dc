"""Sharing unasked: waits for a request that computes what another one needs too, then snapshots it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.patience import Progress, is_worth_waiting
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


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request that is waited for."""

    result: asyncio.Future[bool]
    progress: Progress


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
        self._going: dict[tuple[int, int], _Wait] = {}
        """Snapshots that are waited for, by slot and lease."""

    @property
    def waiting(self) -> int:
        """How many requests are being waited for."""
        return len(self._going)

    async def from_slot(
        self, slot: Slot, n_tokens: int, *, own_tokens: int | None = None, since: float | None = None
    ) -> bool:
        """Make a pool of a slot's first tokens, once the engine has passed them; whether there is one now.

        All who want to share from the same request wait for the same snapshot. False when that request
        ended before it came so far, when no progress is seen, or when waiting took as long as the caller's
        own prefill would: whoever waits goes on without.

        Args:
            slot: whose request computes what is to be shared.
            n_tokens: how much of it.
            own_tokens: prompt tokens that the caller would have to compute otherwise; None: it has time.
            since: monotonic seconds at which it began to wait; None: now.
        """
        session = slot.session
        if session is None:
            return False
        key = (slot.slot, slot.lease or 0)
        wait = self._going.get(key)
        if wait is None:
            wait = self._going[key] = _Wait(asyncio.get_running_loop().create_future(), Progress())
            self._runtime.spawn(self._share(key, slot, session, n_tokens, wait))
        since = monotonic() if since is None else since
        while own_tokens is None or is_worth_waiting(
            monotonic() - since, own_tokens, wait.progress.tokens_per_s
        ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if own_tokens is None else IDLE_POLL_S):
                    return await asyncio.shield(wait.result)
        log.info("not_waited_for", slot=slot.slot, own_tokens=own_tokens)
        return False

    async def _share(
        self, key: tuple[int, int], slot: Slot, session: Session, n_tokens: int, wait: _Wait
    ) -> None:
        made = False
        try:
            made = (
                await self._has_passed(slot, session, n_tokens, wait.progress)
                and await self._room.for_automatic()
            )
            if made:
                await self._snapshots.of_slot(
                    slot, session, n_tokens=n_tokens, label=None, pin=False, origin=PoolOrigin.AUTO
                )
        except PolyKVError as error:
            made = False
            log.info("auto_pool_not_made", tokens=n_tokens, reason=error.message)
        finally:
            self._going.pop(key, None)
            wait.result.set_result(made)

    async def _has_passed(self, slot: Slot, session: Session, n_tokens: int, progress: Progress) -> bool:
        """Wait until the session's slot holds so many tokens; False when it never will."""
        since, lease = monotonic(), slot.lease
        while slot.session is session and self._plane.serving:
            now = (await self._client.counters()).slots[slot.slot]
            started = lease is None or now.tag == lease
            if started and now.tokens >= n_tokens:
                return True
            if lease is None or slot.lease != lease:
                return False  # it is over, and did not come so far
            if started and progress.seen(now.tokens, monotonic()):
                since = monotonic()
            elif monotonic() - since > NO_PROGRESS_S:
                return False
            await asyncio.sleep(IDLE_POLL_S)
        return False
