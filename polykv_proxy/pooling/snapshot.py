"""Snapshots: pools of what slots hold already. Nothing is copied or computed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.planner import Taken, Wanted
from polykv_proxy.core.types import PoolOrigin, PoolUid, as_tokens, text_prefix
from polykv_proxy.errors import (
    BadRequestError,
    ConflictError,
    EngineGoneError,
    NotFoundError,
    PrefixMismatchError,
    SessionNotResidentError,
)

if TYPE_CHECKING:
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import PoolNumber, Scope, SessionId, SlotSample, Tokens
    from polykv_proxy.pooling.room import Room
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)


class Snapshots:
    """Takes snapshots of the slots of one engine.

    Args:
        runtime: the engine's control plane at work.
        room: makes it, and takes back what came of nothing.
    """

    def __init__(self, runtime: Runtime, room: Room) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._room = room

    async def of_session(  # noqa: PLR0913 - the facts of a pool
        self,
        session_id: SessionId,
        scope: Scope | None,
        *,
        n_tokens: int | None,
        label: str | None,
        pin: bool,
        ttl_s: float | None = None,
        parent: PrefixPool | None = None,
    ) -> tuple[PrefixPool, bool]:
        """A pool of what the slot of a session holds now; nothing is copied or computed.

        Raises:
            NotFoundError, SessionNotResidentError: no such session, or its slot is another's.
            PoolCapacityError: no sequence id is free.
            PrefixMismatchError: ``parent`` has nothing in common with it.
        """
        slot = self._plane.resident_slot(session_id, scope)
        session = slot.session
        assert session is not None
        return await self.of_slot(
            slot,
            session,
            n_tokens=n_tokens,
            label=label,
            pin=pin,
            ttl_s=ttl_s,
            origin=PoolOrigin.SNAPSHOT,
            parent=parent,
        )

    async def of_slot(  # noqa: PLR0913 - the facts of a pool
        self,
        slot: Slot,
        session: Session,
        *,
        n_tokens: int | None,
        label: str | None,
        pin: bool,
        ttl_s: float | None = None,
        origin: PoolOrigin,
        parent: PrefixPool | None = None,
    ) -> tuple[PrefixPool, bool]:
        """A pool of a slot's leading tokens, while it is the session's; see ``of_session``."""
        wanted = Wanted(label=label, pin=pin, ttl_s=ttl_s, origin=origin)

        async def go() -> tuple[PrefixPool, bool]:
            return await self._take(slot, session, wanted, n_tokens=n_tokens, parent=parent)

        # to the end whoever leaves: the slot lives on a pool that has to be known from then on
        return await asyncio.shield(self._runtime.background(go()))

    async def _take(
        self, slot: Slot, session: Session, wanted: Wanted, *, n_tokens: int | None, parent: PrefixPool | None
    ) -> tuple[PrefixPool, bool]:
        plane, epoch, backend = self._plane, self._runtime.epoch, self._runtime.backend
        n_tokens = _text_only(slot, n_tokens)
        number = await self._room.for_one(partial(plane.tree.reserve, session.scope))
        kept = False
        lease: Lease | None = None
        try:
            async with self._runtime.stillness.of(slot.slot):
                held = await backend.shared(slot.slot)
                if not backend.snapshots_running:
                    await self._runtime.not_borrowed(slot.slot)
                if slot.session is not session:
                    raise SessionNotResidentError("another conversation took the slot", param="from_session")
                lease = None if backend.snapshots_running else self._borrow(slot)
                taken, tokens, below, branch_pos = await self._picture(
                    number, slot, held, n_tokens=n_tokens, parent=parent, lease=lease
                )
            try:
                self._check(slot, session, tokens, parent, below)
            except ConflictError:
                plane.pools.reject_snapshot(taken, tokens, session.scope, parent=below, branch_pos=branch_pos)
                raise
            pool, kept = plane.pools.enter(
                tokens,
                session.scope,
                wanted,
                now_ts=self._runtime.now_ts(),
                parent=below,
                branch_pos=branch_pos,
                taken=taken,
            )
            log.info(
                "pool_snapshot",
                pool_id=pool.pool_id,
                tokens=len(tokens),
                origin=wanted.origin.value,
                new=kept,
            )
            return pool, kept
        finally:
            if lease is not None:
                self._runtime.returned(lease)
            if not kept and self._runtime.epoch == epoch:
                # nothing came of it, but the engine may have a pool under it all the same
                self._runtime.spawn(self._room.take_back(number, epoch))

    def _borrow(self, slot: Slot) -> Lease:
        """Keep others off a slot that must not work while the engine saves it."""
        lease = self._runtime.borrow(slot.slot)
        if lease is None:
            raise ConflictError(
                f"slot {slot.slot} is at work, and this engine saves idle slots only; ask again",
                code="slot_busy",
                param="from_session",
            )
        return lease

    async def _picture(  # noqa: PLR0913 - what a snapshot is taken of, and how
        self,
        number: PoolNumber,
        slot: Slot,
        held: SlotSample | None,
        *,
        n_tokens: int | None,
        parent: PrefixPool | None,
        lease: Lease | None,
    ) -> tuple[Taken, Tokens, PrefixPool | None, int]:
        """Let the engine snapshot a slot that is still: what it took, and what that stands on up to where.

        What the slot shared before cannot be read any more afterwards, so it has to be the same task's.
        """
        epoch = self._runtime.epoch
        if held is not None and lease is None and slot.lease is not None and held.tag != slot.lease:
            raise SessionNotResidentError(
                "its next request is about to begin; ask again", param="from_session"
            )
        below = self._plane.pools.snapshot_parent(held, parent)
        live = below is not None and below.resident
        above = below.number if below is not None and live else None
        try:
            made = await self._runtime.backend.snapshot(number, slot.slot, n_tokens, above, lease)
        except NotFoundError as error:
            raise ConflictError(f"{error.message}; ask again", code="pool_lost") from None
        self._runtime.readings.changed()
        if self._runtime.epoch != epoch:
            raise EngineGoneError("the engine was restarted")
        tokens = as_tokens(made.tokens)
        shared = 0 if held is None else held.shared_tokens
        branch_pos = made.n_parent if live else min(shared, len(tokens))
        taken = Taken(number, PoolUid(made.uid), made.file_bytes)
        return taken, tokens, below if branch_pos else None, branch_pos

    @staticmethod
    def _check(
        slot: Slot, session: Session, tokens: Tokens, parent: PrefixPool | None, below: PrefixPool | None
    ) -> None:
        """Raise unless the engine took what was meant, and it fits below the parent that was asked for."""
        if slot.session is not session:
            raise SessionNotResidentError("another conversation took the slot", param="from_session")
        if parent is None:
            return
        if parent.match(tokens) == 0:
            raise PrefixMismatchError(
                f"the session and pool {parent.pool_id} have nothing in common",
                first_mismatch=0,
                parent_len=parent.prefix_len,
            )
        if below is None:
            raise ConflictError(f"pool {parent.pool_id} is not resident any more", code="pool_lost")


def _text_only(slot: Slot, n_tokens: int | None) -> int | None:
    """A cap that leaves out an image or sound in a slot's prompt, and what follows it; None: all is text.

    Raises:
        BadRequestError: there is no text before it.
    """
    known = slot.tokens
    if known is None or (text := text_prefix(known)) == len(known):
        return n_tokens
    if text == 0:
        raise BadRequestError("the session begins with media, and a pool holds text", param="from_session")
    return text if n_tokens is None else min(n_tokens, text)
