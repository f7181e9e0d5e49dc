"""Conversations that stay: saved when they lose their slot, or when nobody went on with them for a while.

Rule 1: a slot is read and written only while it is idle and kept from others, until the engine is done: a
save that ran on when the slot was another's would be of another's conversation. That it is not is the
engine's word: the slot has the tag of the session's last request, before the file is written and after. What
is then left to do with the file needs no slot, and nobody waits for it with one.
Rule 2: only what an answer that went out whole left behind is saved. What failed or was cancelled changes
nothing on disk.
Rule 3: what a session saves takes the place of the state that it went on from, and of no other: who only
begins like a state, or has another name, leaves it alone.
Rule 4: a save makes the engine stand still for all who are answered. It is left out where it would spare
little (``core.worth``), unless it was asked for or there is no other time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Kind
from polykv_proxy.core.media import has_media
from polykv_proxy.core.types import PoolId
from polykv_proxy.core.worth import is_worth_a_file
from polykv_proxy.durable.identity import config_of
from polykv_proxy.durable.moving import as_seen, moves, to_the_end
from polykv_proxy.durable.savers import Savers
from polykv_proxy.durable.saves import Label
from polykv_proxy.errors import EngineGoneError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import LeaseId, SlotId
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.engine.wire import SlotFile
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

MAX_CONFIGS = 256
"""Configurations whose digests are remembered."""

RETRY_S = 300.0
"""Seconds after which an idle conversation that was not saved is looked at again."""


class SavedSessions:
    """The saved conversations of one engine.

    Args:
        runtime: the engine's control plane at work.
        shelf: its saved states.
        run: tells this run of the proxy from others: unnamed sessions are counted anew in each.
        min_tokens: tokens that are worth a file, and worth reading one.
    """

    def __init__(self, runtime: Runtime, shelf: Shelf, run: str, *, min_tokens: int) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._shelf = shelf
        self.savers = Savers(runtime.plane.sessions, run)
        self._min_tokens = min_tokens
        self._template = ""
        self._configs: dict[tuple[int, str], dict[str, str]] = {}
        self._one = asyncio.Lock()

    def meet(self, template: str) -> None:
        """An engine is up, with this chat template."""
        self._template = template

    # -- saving ------------------------------------------------------------------------------------------

    def on_delivered(self, lease: Lease, body: bytes, *, adapters: bool) -> None:
        """An answer went out whole (rule 2)."""
        session = lease.session
        if session is None or lease.ended:
            return
        if adapters or self._has_media(body):
            session.delivered = None
            return
        if lease.restored is None and not (lease.continues and session.delivered == lease.before):
            session.kept = None  # nobody knows what it went on from
        session.delivered = lease.lease_id
        chain = self._plane.board.slots[lease.slots[0]].chain
        key = (chain[0] if chain else 0, self._template)
        config = self._configs.pop(key, None) if chain else None
        if config is None:
            config = config_of(body, self._template)
        self._configs[key] = config
        if len(self._configs) > MAX_CONFIGS:
            del self._configs[next(iter(self._configs))]
        session.config = config

    def _has_media(self, body: bytes) -> bool:
        """Whether there is more than text in a conversation: no tokens would find its state again."""
        facts = self._plane.facts
        return facts is not None and facts.media and has_media(body)

    async def keep_displaced(self, lease: Lease) -> None:
        """Save what a request displaces from its slots, before it is sent."""
        for number in lease.slots:
            if lease.ended:
                return
            slot = self._plane.board.slots[number]
            session = slot.before[0]
            if session is not None and session is not lease.session:
                await moves(self._runtime, lease, self._save(slot, session))

    async def keep_resident(self, number: SlotId) -> None:
        """Save what a slot holds that is about to be emptied; whoever calls keeps others off it."""
        slot = self._plane.board.slots[number]
        session = slot.before[0] if slot.session is None or slot.session.running else slot.session
        if session is not None:
            await to_the_end(self._runtime, self._save(slot, session))

    async def keep_idle(self, idle_s: float, *, last: bool = False) -> None:
        """Save the conversations that nobody went on with for so long; 0: all.

        Args:
            idle_s: seconds.
            last: whether there is no other time: also those that were not saved a moment ago.
        """
        now = monotonic()
        for slot in list(self._plane.board):
            session = slot.session
            if (
                session is None
                or not slot.idle
                or not self._has_news(session)
                or now - slot.last_used < idle_s
                or (not last and session.refused == session.delivered and now - session.refused_at < RETRY_S)
            ):
                continue
            await self._keep_borrowed(slot, session, whole=last)

    async def _keep_borrowed(self, slot: Slot, session: Session, *, whole: bool) -> None:
        """Save an idle slot, which nobody gets meanwhile; returns when it is on disk, if the disk answers."""
        lease = self._runtime.borrow(slot.slot)
        if lease is None:
            return
        try:
            await to_the_end(self._runtime, self._save(slot, session, whole=whole))
        finally:
            if not lease.ended:
                self._runtime.returned(lease)
        await self._arrived(session)

    async def _arrived(self, session: Session) -> None:
        """Wait until what a session left is on disk, or is not going to be."""
        for coming in self._shelf.saves.of(session):
            with suppress(UnavailableError):
                await self._shelf.disk.in_time(coming.over)

    async def _save(self, slot: Slot, session: Session, *, whole: bool = False) -> None:
        """``_save_now``, one at a time: who waited finds what the one before saved."""
        if not self._has_news(session):
            return  # nothing to wait for
        async with self._one:
            await self._save_now(slot, session, whole=whole)

    async def _save_now(self, slot: Slot, session: Session, *, whole: bool) -> None:
        """Save a session from its slot, if there is more in it than on disk, and enough (rule 4)."""
        shelf = self._shelf
        if not shelf.on or not self._has_news(session):
            return
        delivered = session.delivered
        sample = await self._runtime.client.counters()
        held = as_seen(sample, slot.slot)
        if held is None or delivered is None or held.tag != delivered:
            return
        session.refused, session.refused_at = delivered, monotonic()  # unless it is, in the end
        label, least = self.label(session), self._min_tokens
        own, kept = held.tokens - held.shared_tokens, self.kept(session, label)
        if own < least or not (whole or is_worth_a_file(held=held.tokens, own=own, kept=kept, least=least)):
            return

        async def write(name: str) -> SlotFile:
            written = await self._runtime.client.save_slot(slot.slot, name)
            after = await self._runtime.client.counters()
            now = as_seen(after, slot.slot)
            if after.epoch != sample.epoch or now is None or now.tag != delivered:
                raise EngineGoneError("the slot was another's while it was saved")
            if written.n_tokens < self._min_tokens:
                raise EngineGoneError(f"the slot was emptied: {written.n_tokens} tokens were saved")
            return written

        others = None if session.saved_as is not None else partial(self.savers.is_anothers, session)
        coming = await shelf.saves.begin(
            label,
            held.tokens,
            write,
            owner=session,
            others=others,
            still=partial(self._has_news, session),
            then=partial(self._saved, session, delivered),
        )
        if coming is not None and not coming.over.done():
            session.coming = delivered

    def _saved(self, session: Session, delivered: LeaseId, entry: Entry | None) -> None:
        """What a session left after that request is on disk, or will not be; it may have gone on since."""
        if session.coming == delivered:
            session.coming = None
        if entry is None:
            return
        session.saved = delivered
        still = session.delivered == delivered and (session.running or session.lease == delivered)
        session.kept = (entry.state.file, len(entry.tokens)) if still else None
        self.savers.save_as(session, entry.state.key)
        for later in self._shelf.saves.of(session):
            later.under(entry.state.key)

    def kept(self, session: Session, label: Label) -> int:
        """Leading tokens of what a session's slot holds that are on disk, as far as is known."""
        entry = self._shelf.saved(label)
        if entry is None or session.kept is None or session.kept[0] != entry.state.file:
            return 0
        return session.kept[1]

    def _has_news(self, session: Session) -> bool:
        """Whether a whole answer left more of it in its last slot than is on disk."""
        last = session.lease
        if session.running:  # its next turn has begun elsewhere
            now = self._plane.leases.running_lease(session)
            last = None if now is None else now.before
        return session.delivered not in (None, session.saved, session.coming) and session.delivered == last

    def label(self, session: Session) -> Label:
        """What a session's state is saved as."""
        key, config = self.savers.key(session), dict(session.config)
        return Label(kind=Kind.SESSION, key=key, scope=session.scope, config=config)

    # -- ends ------------------------------------------------------------------------------------------------

    def busy(self, entry: Entry) -> bool:
        """Whether the session whose state it is runs now, or the pool is there: it would be saved again."""
        if entry.state.kind is Kind.POOL:
            pool = self._plane.tree.get(PoolId(entry.state.key))
            return pool is not None and pool.resident
        return any(each.running for each in self.savers.of(entry.scope, entry.state.key))

    def forget(self, entry: Entry) -> None:
        """A state is deleted: what its session left is not saved again before it goes on."""
        for session in self.savers.of(entry.scope, entry.state.key):
            session.saved = session.delivered

    async def on_close(self, session: Session, *, keep: bool) -> bool:
        """A session ends: its state stays on disk, or goes from there, too; returns whether it stays."""
        slot = None if session.slot is None else self._plane.board.slots[session.slot]
        if keep and slot is not None:
            await self._runtime.not_borrowed(slot.slot)  # to be saved idle, perhaps, and not as a whole
            await self._keep_borrowed(slot, session, whole=True)
        if not keep:
            session.delivered = None  # who waits to save it does not
            for coming in self._shelf.saves.of(session):
                coming.wanted = False
        key = self.savers.key(session)
        saved = [
            entry
            for entry in self._shelf.catalogue.under(key, session.scope)
            if entry.state.kind is Kind.SESSION and entry.state.key == key
        ]
        if not keep:  # nobody finds it from now on; who reads it does so to the end
            going = self._shelf.delete(saved)
            await self._arrived(session)
            for each in going:
                with suppress(UnavailableError):
                    await self._shelf.disk.in_time(each)
        return keep and bool(saved)
