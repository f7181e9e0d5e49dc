"""Conversations that come back: a request's slot is filled from the saved state that has most of its prompt.

Rule 1: a slot is filled only while it is its request's, to the end, also if its client leaves.
Rule 2: a state is restored only if that spares more than pools hold anyway, and the answer has to prove it;
one that did not help goes, and so does one that the engine will not take.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Kind, Reason
from polykv_proxy.core.types import common_prefix
from polykv_proxy.core.worth import goes_on, pays
from polykv_proxy.durable.moving import as_seen, moves
from polykv_proxy.durable.savers import is_named
from polykv_proxy.durable.shelf import part_of
from polykv_proxy.errors import PolyKVError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import SlotId, Tokens
    from polykv_proxy.durable.saves import Coming
    from polykv_proxy.durable.sessions import SavedSessions
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

ROOM_TOKENS = 16
"""A slot that runs may take so many cells while a state is restored."""


class Restores:
    """Those of one engine.

    Args:
        runtime: the engine's control plane at work.
        shelf: its saved states.
        sessions: who saves them.
        min_tokens: tokens that are worth reading a file.
    """

    def __init__(self, runtime: Runtime, shelf: Shelf, sessions: SavedSessions, *, min_tokens: int) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._shelf = shelf
        self._sessions = sessions
        self._savers = sessions.savers
        self._min_tokens = min_tokens

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
                await moves(self._runtime, lease, self._restore(lease, session, entry, matched))

    async def _pays(self, lease: Lease, tokens: Tokens, held: int, entry: Entry, matched: int) -> bool:
        """Whether it is worth restoring a state, as the engine is now."""
        facts = self._plane.facts
        sample = await self._runtime.readings.take(max_age_s=0.0)
        seen = None if sample is None else as_seen(sample, lease.slots[0])
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
        label = self._sessions.label(session)
        entry = self._shelf.saved(label)
        return (
            0
            if entry is None
            else min(common_prefix(entry.tokens, tokens), self._sessions.kept(session, label))
        )

    async def _restore(self, lease: Lease, session: Session, entry: Entry, matched: int) -> None:
        slot, runtime = lease.slots[0], self._runtime
        if lease.ended or not self._plane.serving or not self._shelf.on:
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
        """Whether a state is of this conversation, by its name and by its tokens (``sessions``, rule 3)."""
        return is_named(session, entry.state.key) and goes_on(matched, len(entry.tokens))

    async def on_answer(self, lease: Lease, cached_tokens: int | None) -> None:
        """What an answer reused proves the state that its slot was filled from, or not (rule 2)."""
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
