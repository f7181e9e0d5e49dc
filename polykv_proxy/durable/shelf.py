"""One engine's saved states at work: the catalogue and the files behind it, kept in step.

Rule 1: one save at a time, so that two of the same identity cannot cross; the engine does no more anyway. No
removal crosses a save: what is being saved is in use, and so is what it replaces.
Rule 2: whoever is going to read a file holds its state from the moment he decides to. A state may go
meanwhile, or be saved anew; the file goes when the last who holds it lets go.
Rule 3: what goes wrong on disk is counted, told once in the log and shown in the status; no request fails.
Rule 4: a sweep comes at most every ``SWEEP_S`` seconds, with one more between them where the disk had no room
for a save, and on no request's way.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from polykv_proxy.core.catalogue import (
    Catalogue,
    Kind,
    Reason,
    Retention,
    SavedState,
    Tombstone,
    is_under,
)
from polykv_proxy.core.types import Scope, as_tokens, common_prefix
from polykv_proxy.core.worth import goes_on
from polykv_proxy.durable.store import Store, StoreError
from polykv_proxy.errors import ConflictError, PolyKVError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from polykv_proxy.core.catalogue import Entry, PoolRecord
    from polykv_proxy.engine.wire import SlotFile
    from polykv_proxy.metrics import Metrics

log = structlog.get_logger(__name__)

SWEEP_S = 300.0

AT_ONCE = 64
"""States that are entered or looked at before others get their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a state is saved as."""

    kind: Kind
    key: str
    scope: Scope
    config: Mapping[str, str]
    pool: PoolRecord | None = None


class Shelf:
    """The saved states of one engine.

    Args:
        folder: where its engine saves, on this host; None: somewhere else.
        limits: how much may stay.
        metrics: counts.
        now_ts: epoch seconds.
        on_step: see ``Store``.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: Retention,
        metrics: Metrics,
        now_ts: Callable[[], float],
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store = Store(folder or Path(), on_step)
        self.catalogue = Catalogue()
        self.limits = limits
        self.metrics = metrics
        self.now_ts = now_ts
        self.model_id = ""
        self.bytes_per_token = 0
        self.reason: str | None = "the engine is not ready yet"
        """Why nothing is saved or restored; None: it is."""
        self.last_error: str | None = None
        self._on_this_host = folder is not None
        self.saving = asyncio.Lock()
        self._coming: SavedState | None = None
        """What is being saved."""
        self._opened = False
        self._used: dict[Entry, None] = {}
        """States whose use the disk was not told of."""
        self._written = 0
        """Which tombstones are on disk, see ``Catalogue.burials``."""
        self._told: str | None = None
        self._swept_at = 0.0
        self._hurried_at: float | None = None
        self._wanted: int | None = None
        """Bytes that the disk had no room for."""

    @property
    def coming(self) -> SavedState | None:
        """What is being saved; its tokens are not known yet."""
        return self._coming

    @property
    def on(self) -> bool:
        """Whether states are saved and restored."""
        return self.reason is None

    async def open(self) -> str | None:
        """Read what is there, once; returns why it cannot be used, or None."""
        if not self._on_this_host:
            return "the engine saves on another host"
        if self._opened:
            return None
        try:
            seen = await asyncio.to_thread(self.store.open)
        except StoreError as error:
            return error.message
        catalogue, now_ts = self.catalogue, self.now_ts()
        catalogue.bury(*await asyncio.to_thread(self.store.tombstones))
        self._written = catalogue.burials
        for told in seen.wrong:
            kind, scope = Kind(told.kind), Scope(told.scope)
            count, file = told.n_tokens, told.file
            catalogue.bury(Tombstone(kind, told.key, scope, count, Reason.IDENTITY_CHANGED, now_ts, file))
        for number, one in enumerate(seen.found, 1):
            catalogue.add(one.state, used_ts=one.used_ts, uses=one.uses)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._opened = True
        for problem in seen.problems:
            log.warning("saved_state_refused", reason=problem)
        self._show()
        log.info("saved_states_found", entries=len(self.catalogue), bytes=self.catalogue.total_bytes)
        return None

    # -- coming ------------------------------------------------------------------------------------------

    async def save(
        self,
        label: Label,
        n_tokens: int,
        write: Callable[[str], Awaitable[SlotFile]],
        others: Callable[[str], bool] | None = None,
    ) -> Entry | None:
        """Let the engine write a state and make it count; None where that failed, which is no error (rule 3).

        Args:
            label: what it is.
            n_tokens: about how many it has.
            write: lets the engine write a file of that name.
            others: whether a key is another's; given by who has no state under its key yet. What is there is
                replaced only if this goes on from it; else this is saved under the next key, as ``key#2``.
        """
        async with self.saving:
            try:
                entry = await self._save(label, n_tokens, write, others)
            except PolyKVError as error:
                self.failed("save", error.message, key=label.key)
                return None
        self.metrics.saves["saved"] += 1
        self.last_error = self._told = None
        self._show()
        log.info(
            "kv_saved",
            kind=label.kind.value,
            key=entry.state.key,
            tokens=len(entry.tokens),
            bytes=entry.state.file_bytes,
        )
        return entry

    def _draft(self, label: Label) -> SavedState:
        return SavedState(
            kind=label.kind,
            key=label.key,
            scope=label.scope,
            model_id=self.model_id,
            config=label.config,
            tokens=as_tokens(()),
            file="",
            file_bytes=0,
            file_digest="",
            created_ts=self.now_ts(),
            pool=label.pool,
        )

    def saved(self, label: Label) -> Entry | None:
        """What is there under a label, of this model."""
        return self.catalogue.get(self._draft(label).identity)

    async def _save(
        self,
        label: Label,
        n_tokens: int,
        write: Callable[[str], Awaitable[SlotFile]],
        others: Callable[[str], bool] | None,
    ) -> Entry:
        state = self._draft(label)
        await self._require_room(n_tokens * self.bytes_per_token)
        before = self.catalogue.get(state.identity)
        self._coming = state
        name = self.store.temporary(state.identity)
        done = False
        try:
            async with nullcontext() if before is None else self.holding(before):
                written = await write(name)
                if before is not None and others is not None:
                    tokens = await asyncio.to_thread(self.store.tokens, name)
                    if not goes_on(common_prefix(before.tokens, tokens), len(before.tokens)):
                        self._coming = state = self._beside(state, others)
                        before = None
                        name = await asyncio.to_thread(self.store.rename, name, state.identity)
                draft = replace(
                    state, file=name, file_bytes=written.n_bytes, tokens=as_tokens([0]) * written.n_tokens
                )
                saved = await self._commit(draft, before)
                done = True
        finally:
            self._coming = None
            if not done:
                await asyncio.to_thread(self.store.discard, name)
        return saved

    def _beside(self, state: SavedState, others: Callable[[str], bool]) -> SavedState:
        """It under the first key after its own that nobody has."""
        number = 2
        while True:
            beside = replace(state, key=f"{state.key}#{number}")
            if self.catalogue.get(beside.identity) is None and not others(beside.key):
                return beside
            number += 1

    async def _commit(self, draft: SavedState, before: Entry | None) -> Entry:
        uses = 0 if before is None else before.uses
        state = await asyncio.to_thread(self.store.commit, draft, used_ts=draft.created_ts, uses=uses)
        return self.catalogue.add(state, used_ts=state.created_ts)

    async def _require_room(self, n_bytes: int) -> None:
        if n_bytes > self.limits.max_bytes:
            raise StoreError(f"it would take {n_bytes} bytes, more than may be saved at all")
        free = await asyncio.to_thread(self.store.free_bytes)
        if free is not None and free - n_bytes < self.limits.min_free_bytes:
            self._wanted = n_bytes  # the next round makes room
            raise StoreError(f"the disk has {free} bytes left, and {self.limits.min_free_bytes} stay free")

    async def restate(self, entry: Entry, pool: PoolRecord | None) -> None:
        """What is said of a saved pool changed."""
        state = replace(entry.state, pool=pool)
        async with self.saving:
            if not self.catalogue.has(entry):
                return
            try:
                await asyncio.to_thread(self.store.restate, state, used_ts=entry.used_ts, uses=entry.uses)
            except StoreError as error:
                self.failed("save", error.message, key=state.key)
                return
            entry.state = state

    def failed(self, what: str, reason: str, **fields: object) -> None:
        """Something did not work; the log tells the same reason once in a row."""
        counts = self.metrics.saves if what == "save" else self.metrics.restores
        counts["failed"] += 1
        self.last_error = reason
        report = log.debug if self._told == reason else log.warning
        self._told = reason
        report(f"kv_{what}_failed", reason=reason, **fields)

    # -- use ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def holding(self, entry: Entry) -> AsyncIterator[None]:
        """The state's file stays what it is and where it is meanwhile (rule 2)."""
        entry.holds += 1
        try:
            yield
        finally:
            entry.holds -= 1
            if not entry.holds and not self.catalogue.has(entry):
                await asyncio.to_thread(self.store.discard, entry.state.file)

    async def check(self, entry: Entry) -> bool:
        """Whether a state's file is what was saved; one that is not goes."""
        try:
            wrong = await asyncio.to_thread(self.store.check, entry.state)
        except StoreError as error:
            self.failed("restore", error.message, key=entry.state.key)
            return False
        if wrong is None:
            return True
        log.warning("saved_state_refused", key=entry.state.key, file=entry.state.file, reason=wrong)
        self.last_error = f"{entry.state.file}: {wrong}"
        self.metrics.restores["refused"] += 1
        await self.remove(entry, Reason.IDENTITY_CHANGED)
        return False

    def used(self, entry: Entry) -> None:
        """A state was of use; the disk is told later (``remember``)."""
        entry.used_ts, entry.uses = self.now_ts(), entry.uses + 1
        self._used[entry] = None

    async def remove(self, entry: Entry, reason: Reason) -> bool:
        """A state goes; False if that is not for now (``Catalogue.remove``), or it is gone already."""
        async with self.saving:
            if not self.catalogue.remove(entry, reason, self.now_ts()):
                return False
            await asyncio.to_thread(self.store.delete, entry.state, read=entry.holds > 0)
        self._show()
        log.info("saved_state_gone", kind=entry.state.kind.value, key=entry.state.key, reason=reason.value)
        return True

    async def delete(
        self,
        key: str,
        scope: Scope | None,
        busy: Callable[[Entry], bool],
        forget: Callable[[Entry], None] = lambda _: None,
    ) -> int | None:
        """Delete a key's states and those of all keys below it; how many, None where there is none.

        Args:
            key: see ``Catalogue.under``.
            scope: who asks; None sees all.
            busy: whether somebody works with what a state is of.
            forget: called with each, before it goes.

        Raises:
            ConflictError: one of them is in use; then nothing is deleted.
        """
        entries = self.catalogue.under(key, scope)
        state = self._coming
        comes = state is not None and scope in (None, state.scope) and is_under(state.key, key)
        if not entries and not comes:
            return None
        in_use = comes
        for number, entry in enumerate(entries, 1):
            in_use = in_use or entry.holds > 0 or busy(entry)
            if in_use:
                break
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if in_use:
            raise ConflictError(f"what is saved under {key} is in use", code="cache_in_use", param="key")
        count = 0
        for entry in entries:
            now = self.catalogue.get(entry.state.identity)  # it may have been saved anew meanwhile
            if now is not None:
                forget(now)
                count += await self.remove(now, Reason.DELETED)
        return count

    async def sweep(self, now: float, *, due: bool = False) -> int:
        """Remove what has to go, if it is time; returns how many states went.

        Args:
            now: monotonic seconds.
            due: whether it is time anyway.
        """
        if self._wanted is not None and (self._hurried_at is None or now - self._hurried_at >= SWEEP_S):
            self._hurried_at = now
        elif not due and self._swept_at and now - self._swept_at < SWEEP_S:
            return 0
        self._swept_at = now
        wanted, self._wanted = self._wanted or 0, None
        free = await asyncio.to_thread(self.store.free_bytes)
        if free is not None:
            free -= wanted
        gone = 0
        for entry in await asyncio.to_thread(self.catalogue.overdue, self.limits, self.now_ts(), free):
            gone += await self.remove(entry, Reason.SWEPT)
        return gone

    async def remember(self) -> None:
        """Tell the disk which states were used, and why others are gone, if it does not know that yet."""
        used, self._used = [entry for entry in self._used if self.catalogue.has(entry)], {}
        if used:
            await asyncio.to_thread(self.store.touch, *used)
        burials = self.catalogue.burials
        if not self._opened or burials == self._written:
            return
        gone = self.catalogue.tombstones(None)[::-1]
        if await asyncio.to_thread(self.store.keep_tombstones, gone):
            self._written = burials

    def _show(self) -> None:
        self.metrics.saved_bytes = self.catalogue.total_bytes
        self.metrics.saved_entries = len(self.catalogue)

    def status(self) -> dict[str, Any]:
        """For ``/props`` and the listing."""
        return {
            "state": "on" if self.on else "off",
            "reason": self.reason,
            "entries": len(self.catalogue),
            "bytes": self.catalogue.total_bytes,
            "max_bytes": self.limits.max_bytes,
            "last_error": self.last_error,
        }
