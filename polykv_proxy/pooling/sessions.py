"""Ending conversations and moving them, with what their slots hold."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.slots import Content
from polykv_proxy.errors import ConflictError, PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.types import Scope, SessionId, SlotId
    from polykv_proxy.pooling.materialize import Materializer
    from polykv_proxy.pooling.room import Room
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)


class Sessions:
    """What is done to the sessions of one engine.

    Args:
        runtime: the engine's control plane at work.
        room: empties slots.
        materializer: brings a pool back that a session is to move to.
    """

    def __init__(self, runtime: Runtime, room: Room, materializer: Materializer) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._room = room
        self._materializer = materializer

    async def close(
        self, session_id: SessionId, scope: Scope | None, *, keep: bool = False
    ) -> tuple[int, bool]:
        """End a session.

        Returns the cells that only it held, 0 if somebody else got its slot first or the engine is still at
        a request that its client left, and whether its state stays on disk.

        Args:
            session_id: which.
            scope: who asks.
            keep: whether its state is to stay on disk; otherwise it goes from there, too.

        Raises:
            NotFoundError: there is none.
            ConflictError: it runs.
        """
        session = self._plane.sessions.idle(session_id, scope)
        kept = await self._runtime.saver.on_close(session, keep=keep)
        slot = self._runtime.end_session(session_id, scope)
        self._runtime.gatekeeper.gate.on_close(session.key, monotonic())
        self._runtime.gatekeeper.wake()
        log.info("session_closed", session_id=session_id)
        if slot is None:
            return 0, kept
        if (left := self._plane.leases.left_in(slot)) is not None:
            self._runtime.after_idle[left] = partial(self._erase, slot, self._runtime.epoch)
            return 0, kept
        try:  # to the end whoever leaves; whoever gets the slot first overwrites what is in it
            freed = await asyncio.shield(self._runtime.background(self._empty(slot)))
        except PolyKVError as error:
            log.info("slot_not_emptied", slot=slot, reason=error.message)
            freed = 0
        return freed or 0, kept

    async def _empty(self, slot: SlotId) -> int | None:
        """Empty a slot whose session is over, unless another one has got it."""
        await self._runtime.not_borrowed(slot)
        if self._plane.board.slots[slot].session is not None:
            return None
        return await self._room.empty(slot)

    async def _erase(self, slot: SlotId, epoch: str) -> None:
        """Take from a slot what a request left there whose session was closed; nobody has it yet."""
        if self._runtime.epoch != epoch or not self._plane.serving:
            return
        try:
            await self._runtime.client.erase_slot(slot)
            self._runtime.backend.forget((slot,))
        except PolyKVError as error:
            log.info("slot_not_emptied", slot=slot, reason=error.message)

    async def migrate(self, session_id: SessionId, scope: Scope | None, pool: PrefixPool) -> int:
        """Let a session's next request attach to another pool; returns the cells that it gave up.

        The session keeps its id, but not what its slot held. It is all done or nothing.

        Raises:
            NotFoundError: there is no such session.
            ConflictError: it runs, its slot is not to be had, or the pool is lost.
            PolyKVError: the pool cannot be had, or the engine does not empty the slot.
        """
        self._plane.sessions.idle(session_id, scope)
        pool = await self._materializer.ensure_resident(pool)
        return await asyncio.shield(self._runtime.background(self._migrate(session_id, scope, pool)))

    async def _migrate(self, session_id: SessionId, scope: Scope | None, pool: PrefixPool) -> int:
        session = self._plane.sessions.idle(session_id, scope)  # again: the pool may have taken long
        if session.slot is not None:
            await self._runtime.not_borrowed(session.slot)
            session = self._plane.sessions.idle(session_id, scope)
        if not pool.resident:
            raise ConflictError(f"pool {pool.pool_id} is not resident any more", code="pool_lost")
        before, session.moves_to = session.moves_to, pool.pool_id  # no request of it comes between
        freed: int | None = 0
        try:
            if session.slot is not None:
                # a name finds its session wherever it comes to, also if its next request begins differently;
                # without one, what it was made of is all that tells
                content = Content.OLD if session.name is None else Content.NOTHING
                freed = await self._room.empty(session.slot, content)
            if freed is None:
                raise ConflictError("the session's slot is wanted by others; ask again", code="slot_busy")
        except PolyKVError:
            session.moves_to = before
            raise
        self._plane.sessions.on_migrated(session, monotonic())
        log.info("session_migrates", session_id=session_id, pool_id=pool.pool_id)
        return freed
