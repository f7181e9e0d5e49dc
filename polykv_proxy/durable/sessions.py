"""Conversations that come back: saved when they lose their slot, restored when their next turn comes.

Rule 1: a slot is read and written only while it is idle and kept from others, until the engine is done: a
save that ran on when the slot was another's would be of another's conversation. That it is not is the
engine's word: the slot has the tag of the session's last request, before the file is written and after. What
is then left to do with the file needs no slot, and nobody waits for it with one.
Rule 2: only what an answer that went out whole left behind is saved. What failed or was cancelled changes
nothing on disk.
Rule 3: a state is restored only if that spares more than what pools hold anyway, and the answer has to prove
it; one that did not help goes.
Rule 4: what a session saves takes the place of the state that it went on from, and of no other: who only
begins like a state, or has another name, leaves it alone.
Rule 5: a save makes the engine stand still for all who are answered. It is left out where it would spare
little (``core.worth``), unless it was asked for or there is no other time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Kind, Reason
from polykv_proxy.core.media import has_media
from polykv_proxy.core.types import PoolId, common_prefix
from polykv_proxy.core.worth import goes_on, is_worth_a_file, pays
from polykv_proxy.durable.adapters import has_adapters
from polykv_proxy.durable.identity import config_of
from polykv_proxy.durable.savers import Savers, is_named
from polykv_proxy.durable.saves import Label
from polykv_proxy.durable.shelf import part_of
from polykv_proxy.errors import EngineGoneError, PolyKVError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import EngineSample, LeaseId, SlotId, SlotSample, Tokens
    from polykv_proxy.durable.saves import Coming
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.engine.wire import SlotFile
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

MAX_CONFIGS = 256
"""Configurations whose digests are remembered."""

RETRY_S = 300.0
"""Seconds after which an idle conversation that was not saved is looked at again."""

ROOM_TOKENS = 16
"""A slot that runs may take so many cells while a state is restored."""


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
        self._savers = Savers(runtime.plane.sessions, run)
        self._min_tokens = min_tokens
        self._template = ""
        self._configs: dict[tuple[int, str], dict[str, str]] = {}
        self._one = asyncio.Lock()

    def meet(self, template: str) -> None:
        """An engine is up, with this chat template."""
        self._template = template

    # -- saving ------------------------------------------------------------------------------------------

    def on_delivered(self, lease: Lease, body: bytes) -> None:
        """An answer went out whole (rule 2)."""
        session = lease.session
        if session is None or lease.ended:
            return
        if has_adapters(body) or self._has_media(body):
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
                await self._moves(lease, self._save(slot, session))

    async def keep_resident(self, number: SlotId) -> None:
        """Save what a slot holds that is about to be emptied; whoever calls keeps others off it."""
        slot = self._plane.board.slots[number]
        session = slot.before[0] if slot.session is None or slot.session.running else slot.session
        if session is not None:
            await self._to_the_end(self._save(slot, session))

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
            await self._to_the_end(self._save(slot, session, whole=whole))
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
        """Save a session from its slot, if there is more in it than on disk, and enough (rule 5)."""
        shelf = self._shelf
        if not shelf.on or not self._has_news(session):
            return
        delivered = session.delivered
        sample = await self._runtime.client.counters()
        held = _seen(sample, slot.slot)
        if held is None or held.tag != delivered:
            return
        session.refused, session.refused_at = delivered, monotonic()  # unless it is, in the end
        label, least = self._label(session), self._min_tokens
        own, kept = held.tokens - held.shared_tokens, self._kept(session, label)
        if own < least or not (whole or is_worth_a_file(held=held.tokens, own=own, kept=kept, least=least)):
            return

        async def write(name: str) -> SlotFile:
            written = await self._runtime.client.save_slot(slot.slot, name)
            after = await self._runtime.client.counters()
            now = _seen(after, slot.slot)
            if after.epoch != sample.epoch or now is None or now.tag != delivered:
                raise EngineGoneError("the slot was another's while it was saved")
            if written.n_tokens < self._min_tokens:
                raise EngineGoneError(f"the slot was emptied: {written.n_tokens} tokens were saved")
            return written

        others = None if session.saved_as is not None else partial(self._savers.is_anothers, session)
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
        self._savers.save_as(session, entry.state.key)
        for later in self._shelf.saves.of(session):
            later.under(entry.state.key)

    def _kept(self, session: Session, label: Label) -> int:
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

    def _label(self, session: Session) -> Label:
        key, config = self._savers.key(session), dict(session.config)
        return Label(kind=Kind.SESSION, key=key, scope=session.scope, config=config)

    # -- restoring ---------------------------------------------------------------------------------------

    async def bring_back(self, lease: Lease, tokens: Tokens, held: int) -> None:
        """Fill a request's slot from the state that has most of its prompt, if that pays.

        Args:
            lease: its hold on its slot, which it does not go on in.
            tokens: its prompt.
            held: leading tokens that a pool holds.
        """
        session = lease.session
        if session is None or lease.continues or len(lease.slots) > 1:
            return
        for coming in self._on_the_way(session):  # perhaps what it goes on with
            with suppress(UnavailableError):
                await self._shelf.disk.in_time(coming.over)
        found = self._shelf.catalogue.best(tokens, session.scope, self._shelf.model_id)
        if found is None:
            return
        entry, matched = found
        held = max(held, self._left_there(lease.slots[0], tokens))
        if matched - held < self._min_tokens:
            return
        async with self._shelf.holding(entry):
            if await self._shelf.check(entry) and await self._pays(lease, tokens, held, entry, matched):
                await self._moves(lease, self._restore(lease, session, entry, matched))

    async def _pays(self, lease: Lease, tokens: Tokens, held: int, entry: Entry, matched: int) -> bool:
        """Whether it is worth restoring a state, as the engine is now."""
        facts = self._plane.facts
        sample = await self._runtime.readings.take(max_age_s=0.0)
        seen = None if sample is None else _seen(sample, lease.slots[0])
        if facts is None or sample is None or seen is None or lease.ended:
            return False
        free = sample.cells_free + seen.tokens - seen.shared_tokens  # what the slot has of its own goes first
        if (ledger := self._plane.cells.ledger) is not None:  # who runs keeps what is his
            free = min(free, ledger.figures().admissible + ledger.reserved(lease.lease_id))
        margin = ROOM_TOKENS * len(self._plane.board.slots)
        why_not = pays(
            matched=min(matched, len(tokens) - 1),
            held=held,
            saved=len(entry.tokens),
            free_cells=free - margin,
            window=facts.ctx_tokens,
            min_gain=self._min_tokens,
        )
        if why_not is not None:
            log.debug("kv_not_restored", key=entry.state.key, matched=matched, held=held, reason=why_not)
        return why_not is None

    def _left_there(self, number: SlotId, tokens: Tokens) -> int:
        """Leading tokens of a prompt that its slot holds of the conversation before, as far as is known."""
        session = self._plane.board.slots[number].before[0]
        if session is None or session.delivered not in (session.saved, session.refused):
            return 0
        label = self._label(session)
        entry = self._shelf.saved(label)
        return 0 if entry is None else min(common_prefix(entry.tokens, tokens), self._kept(session, label))

    async def _restore(self, lease: Lease, session: Session, entry: Entry, matched: int) -> None:
        slot, runtime = lease.slots[0], self._runtime
        if lease.ended or not self._plane.serving:
            return
        self._plane.board.forget_before(slot)  # gone from now on, also if this fails
        async with self._shelf.holding(entry):  # whoever waits for it may leave
            try:
                moved = await runtime.client.restore_slot(slot, entry.state.file)
                if moved.n_tokens != len(entry.tokens):
                    raise part_of(entry, moved.n_tokens)
            except PolyKVError as error:
                runtime.readings.changed()
                self._shelf.not_restored(entry, error, await runtime.readings.take(max_age_s=0.0))
                return
            finally:
                runtime.backend.forget([slot])
                runtime.readings.changed()
        lease.restored, lease.restored_tokens = entry, matched
        key, session.kept = entry.state.key, (entry.state.file, matched)
        if self._goes_on_from(session, entry, matched) and not self._savers.is_anothers(session, key):
            self._savers.save_as(session, key)
        log.info("kv_restored", session_id=session.session_id, key=entry.state.key, slot=slot, tokens=matched)

    def _on_the_way(self, session: Session) -> list[Coming]:
        """What is on its way to the disk under a session's name."""
        return [
            each
            for each in self._shelf.saves
            if each.label.kind is Kind.SESSION
            and each.label.scope == session.scope
            and is_named(session, each.state.key)
        ]

    @staticmethod
    def _goes_on_from(session: Session, entry: Entry, matched: int) -> bool:
        """Whether a state is of this conversation, by its name and by its tokens (rule 4)."""
        return is_named(session, entry.state.key) and goes_on(matched, len(entry.tokens))

    async def on_answer(self, lease: Lease, cached_tokens: int | None) -> None:
        """What an answer reused proves the state that its slot was filled from, or not (rule 3)."""
        session = lease.session
        if session is not None and session.kept is not None:
            session.kept = (session.kept[0], min(session.kept[1], cached_tokens or 0))
        entry, lease.restored = lease.restored, None
        if entry is None or cached_tokens is None:
            return
        metrics = self._shelf.metrics
        if cached_tokens >= lease.restored_tokens - 1:
            metrics.restores["effective"] += 1
            metrics.restored_tokens += cached_tokens
            if self._shelf.catalogue.has(entry):
                self._shelf.used(entry)
            return
        metrics.restores["ineffective"] += 1
        log.warning(
            "kv_restore_ineffective",
            key=entry.state.key,
            restored_tokens=lease.restored_tokens,
            cached_tokens=cached_tokens,
        )
        self._shelf.take_out(entry, Reason.INEFFECTIVE)

    def busy(self, entry: Entry) -> bool:
        """Whether the session whose state it is runs now, or the pool is there: it would be saved again."""
        if entry.state.kind is Kind.POOL:
            pool = self._plane.tree.get(PoolId(entry.state.key))
            return pool is not None and pool.resident
        return any(each.running for each in self._savers.of(entry.scope, entry.state.key))

    def forget(self, entry: Entry) -> None:
        """A state is deleted: what its session left is not saved again before it goes on."""
        for session in self._savers.of(entry.scope, entry.state.key):
            session.saved = session.delivered

    async def on_close(self, session: Session, *, keep: bool) -> bool:
        """A session ends: its state stays on disk, or goes from there, too; returns whether it stays."""
        slot = None if session.slot is None else self._plane.board.slots[session.slot]
        if keep and slot is not None:
            await self._keep_borrowed(slot, session, whole=True)
        if not keep:
            session.delivered = None  # who waits to save it does not
            for coming in self._shelf.saves.of(session):
                coming.wanted = False
        key = self._savers.key(session)
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

    async def _moves(self, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
        """Do it all: whoever leaves is gone at once, and his slots are kept until it is done (rule 1)."""
        going = self._runtime.background(work)
        self._runtime.moves(lease, going)
        await asyncio.wait([going])
        _tell(going)

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it all whoever leaves (rule 1), and only then go on, or leave."""
        going = self._runtime.background(work)
        left: asyncio.CancelledError | None = None
        while not going.done():
            try:
                await asyncio.wait([going])
            except asyncio.CancelledError as cancelled:
                left = cancelled
        if left is not None:
            raise left
        _tell(going)


def _tell(over: asyncio.Future[None]) -> None:
    """Where it failed, nobody's request does."""
    if not over.cancelled() and (error := over.exception()) is not None:
        log.info("kv_not_moved", reason=str(error))


def _seen(sample: EngineSample, number: SlotId) -> SlotSample | None:
    return next((each for each in sample.slots if each.slot == number), None)
