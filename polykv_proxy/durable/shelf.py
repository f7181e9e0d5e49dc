"""One engine's saved states at work: the catalogue and the files behind it, kept in step.

Rule 1: what changes in the folder changes in one order, the catalogue's: each file is written, replaced or
removed before the next is. What is gone is found by nobody from then on; its file goes when it is its turn.
Rule 2: whoever is going to read a file holds its state from the moment he decides to. A state may go
meanwhile, or be saved anew; the file goes when the last who holds it lets go.
Rule 3: what goes wrong on disk is counted, told once in the log and shown in the status; no request fails.
Rule 4: nobody waits for a disk that hangs (``Disk``): nothing is saved or restored then; the status says why.
Rule 5: what somebody works with is neither swept nor deleted by its key: whose file is read, what is on its
way to the disk and what that replaces, and what ``busy`` says.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
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
    variant_of,
)
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.durable.saves import Saves
from polykv_proxy.durable.store import Store
from polykv_proxy.durable.sweeps import AT_ONCE, Sweeps
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.engine.disk import PATIENCE_S, Disk, StuckError
from polykv_proxy.errors import ConflictError, PolyKVError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from polykv_proxy.core.catalogue import Entry, PoolRecord
    from polykv_proxy.core.types import EngineSample
    from polykv_proxy.durable.saves import Label
    from polykv_proxy.metrics import Metrics

log = structlog.get_logger(__name__)

_VERDICTS = ("engine_refused", "engine_failed")
"""Codes of errors in which an engine answers, and will answer the same again unless it lacked cells."""


def part_of(entry: Entry, n_tokens: int) -> UnavailableError:
    """The error for a state of which only so many tokens came back."""
    return UnavailableError(f"{n_tokens} of {len(entry.tokens)} tokens came back", code="engine_failed")


class Shelf:
    """The saved states of one engine.

    Args:
        folder: where its engine saves; None: that is found later, or never.
        limits: how much may stay.
        metrics: counts.
        now_ts: epoch seconds.
        on_step: see ``Store``.
        patience_s: see ``Disk``.

    Attributes:
        changing: held by whoever changes what is in the folder (rule 1).
        busy: whether somebody works with what a state is of; set by who knows.
        gone: whether the engine has ended that was met last; set by who knows.
    """

    def __init__(  # noqa: PLR0913 - what it works with
        self,
        folder: Path | None,
        limits: Retention,
        metrics: Metrics,
        now_ts: Callable[[], float],
        on_step: Callable[[str], None] = lambda _: None,
        *,
        patience_s: float = PATIENCE_S,
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
        self.failures = 0
        """So far."""
        self._folder = folder
        self.tasks = TaskSet()
        self.disk = Disk(patience_s, self._show)
        self.changing = asyncio.Lock()
        self.saves = Saves(self)
        self.sweeps = Sweeps(self)
        self.busy: Callable[[Entry], bool] = lambda _: False
        self.gone: Callable[[], bool] = lambda: False
        self._opened = False
        self.held: dict[Entry, None] = {}
        """States that somebody holds, also such as are gone."""
        self._used: dict[Entry, None] = {}
        """States whose use the disk was not told of."""
        self._written = 0
        """Which tombstones are on disk, see ``Catalogue.burials``."""
        self._told: str | None = None

    @property
    def on(self) -> bool:
        """Whether states are saved and restored."""
        return self.reason is None and self.disk.reason is None and not self.gone()

    async def open(self, folder: Path | None = None) -> str | None:
        """Read what is there, once; returns why it cannot be used, or None.

        Args:
            folder: where its engine saves; None: where it was said to.
        """
        if self._opened:
            return None
        if folder is not None:
            self._folder = self.store.folder = folder
        if self._folder is None:
            return "nobody knows where the engine saves"
        try:
            seen = await self.disk.run(self.store.open)
            stones = await self.disk.run(self.store.tombstones)
        except UnavailableError as error:
            return error.message
        catalogue, now_ts = self.catalogue, self.now_ts()
        catalogue.bury(*stones)
        self._written = catalogue.burials
        for told in seen.wrong:
            kind, scope = Kind(told.kind), Scope(told.scope)
            count, file, which = told.n_tokens, told.file, variant_of(told.model_id, told.config)
            gone = Tombstone(kind, told.key, scope, count, Reason.IDENTITY_CHANGED, now_ts, file, which)
            catalogue.bury(gone)
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

    def draft(self, label: Label) -> SavedState:
        """A state that nothing is known of but what it is to be."""
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
        return self.catalogue.get(self.draft(label).identity)

    async def restate(self, entry: Entry, pool: PoolRecord | None) -> None:
        """What is said of a saved pool changed."""
        with suppress(StuckError):
            await self.disk.in_time(self.tasks.spawn(self._restate(entry, pool)))

    async def _restate(self, entry: Entry, pool: PoolRecord | None) -> None:
        state = replace(entry.state, pool=pool)
        async with self.changing:
            if not self.catalogue.has(entry):
                return
            try:
                await self.disk.begin(0, self.store.restate, state, used_ts=entry.used_ts, uses=entry.uses)
            except UnavailableError as error:
                self.failed("save", error.message, key=state.key)
                return
            entry.state = state

    def worked(self, since: int) -> None:
        """A state was saved; that says nothing of what failed since it was begun.

        Args:
            since: ``failures`` then.
        """
        self.metrics.saves["saved"] += 1
        if since == self.failures:
            self.last_error = self._told = None
        self._show()

    def failed(self, what: str, reason: str, **fields: object) -> None:
        """Something did not work; the log tells the same reason once in a row."""
        counts = self.metrics.saves if what == "save" else self.metrics.restores
        counts["failed"] += 1
        self.failures += 1
        self.last_error = reason
        report = log.debug if self._told == reason else log.warning
        self._told = reason
        report(f"kv_{what}_failed", reason=reason, **fields)

    def not_restored(self, entry: Entry, error: PolyKVError, sample: EngineSample | None) -> None:
        """The engine did not take a state; it goes if that is its verdict, which it will be again.

        Args:
            entry: which.
            error: what it said.
            sample: the engine as it is now; None if nobody knows: then it may have lacked cells.
        """
        self.failed("restore", error.message, key=entry.state.key)
        if error.code in _VERDICTS and sample is not None and sample.cells_free >= len(entry.tokens):
            self.take_out(entry, Reason.INEFFECTIVE)

    # -- use ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def holding(self, entry: Entry | None) -> AsyncIterator[None]:
        """The state's file, if there is one, stays what it is and where it is meanwhile (rule 2)."""
        if entry is None:
            yield
            return
        entry.holds += 1
        self.held[entry] = None
        try:
            yield
        finally:
            entry.holds -= 1
            if not entry.holds:
                del self.held[entry]
            if not entry.holds and not self.catalogue.has(entry):
                going = self.discard(entry.state.file)
                with suppress(StuckError):
                    await self.disk.in_time(going)

    def discard(self, name: str) -> asyncio.Future[None]:
        """A file that no state has any more goes."""
        return self.disk.begin(0, self.store.discard, name)

    async def check(self, entry: Entry) -> bool:
        """Whether a state's file is what was saved; one that is not goes."""
        try:
            wrong = await self.disk.run(self.store.check, entry.state)
        except UnavailableError as error:
            self.failed("restore", error.message, key=entry.state.key)
            return False
        if wrong is None:
            return True
        log.warning("saved_state_refused", key=entry.state.key, file=entry.state.file, reason=wrong)
        self.last_error = f"{entry.state.file}: {wrong}"
        self.metrics.restores["refused"] += 1
        with suppress(UnavailableError):
            await self.remove(entry, Reason.IDENTITY_CHANGED)
        return False

    def used(self, entry: Entry) -> None:
        """A state was of use; the disk is told later (``remember``)."""
        entry.uses += 1
        self.used_at(entry, self.now_ts())

    def used_at(self, entry: Entry, used_ts: float) -> None:
        """What a state is of was used then, epoch seconds; the disk is told later."""
        if used_ts > entry.used_ts:
            entry.used_ts = used_ts
            self._used[entry] = None

    async def remove(self, entry: Entry, reason: Reason) -> bool:
        """A state goes, and its files; False if that is not for now (``Catalogue.remove``), or it is gone.

        Raises:
            UnavailableError: nobody finds it any more, but its files are still there.
        """
        going = self.take_out(entry, reason)
        if going is None:
            return False
        await self.disk.in_time(going)
        return True

    def take_out(self, entry: Entry, reason: Reason) -> asyncio.Future[None] | None:
        """``remove`` in one step: what is left is over when its files are gone."""
        if not self.catalogue.remove(entry, reason, self.now_ts()):
            return None
        self._show()
        log.info("saved_state_gone", kind=entry.state.kind.value, key=entry.state.key, reason=reason.value)
        going = self.tasks.spawn(self._unlink(entry))
        going.add_done_callback(lambda over: over.cancelled() or over.exception())  # it is told there
        return going

    async def all_over(self) -> None:
        """Wait until what was begun is on disk, or gone from there.

        Raises:
            StuckError: see ``Disk``.
        """
        await self.disk.in_time(self.tasks.spawn(self._passed()))

    async def _passed(self) -> None:
        async with self.changing:  # who waited before had it before
            pass

    async def _unlink(self, entry: Entry) -> None:
        async with self.changing:
            replaced = self.catalogue.get(entry.state.identity) is not None
            try:
                await self.disk.begin(
                    0, self.store.delete, entry.state, read=entry.holds > 0, replaced=replaced
                )
            except UnavailableError as error:
                self.last_error = error.message
                log.warning("saved_state_not_deleted", key=entry.state.key, reason=error.message)
                raise

    def is_in_use(self, entry: Entry) -> bool:
        """Whether somebody works with it (rule 5)."""
        if entry.holds or self.busy(entry):
            return True
        return any(coming.state.identity == entry.state.identity for coming in self.saves)

    def deletable(self, key: str, scope: Scope | None) -> list[Entry] | None:
        """A key's states and those of all keys below it, if all may go now; None where there is none.

        Args:
            key: see ``Catalogue.under``.
            scope: who asks; None sees all.

        Raises:
            ConflictError: one of them is in use.
        """
        entries = self.catalogue.under(key, scope)
        coming = any(
            scope in (None, each.state.scope) and is_under(each.state.key, key) for each in self.saves
        )
        if coming or any(map(self.is_in_use, entries)):
            raise ConflictError(f"what is saved under {key} is in use", code="cache_in_use", param="key")
        return entries or None

    def delete(self, entries: list[Entry]) -> list[asyncio.Future[None]]:
        """Take out what ``deletable`` found, in the same step; returns a future each."""
        going = [self.take_out(entry, Reason.DELETED) for entry in entries]
        return [each for each in going if each is not None]

    async def remember(self) -> None:
        """Tell the disk which states were used, and why others are gone, if it does not know that yet."""
        if self.disk.reason is not None:
            return
        used, self._used = [entry for entry in self._used if self.catalogue.has(entry)], {}
        if used:
            await self.disk.run(self.store.touch, *used)
        burials = self.catalogue.burials
        if not self._opened or burials == self._written:
            return
        gone = self.catalogue.tombstones(None)[::-1]
        if await self.disk.run(self.store.keep_tombstones, gone):
            self._written = burials

    def _show(self) -> None:
        self.metrics.saved_bytes = self.catalogue.total_bytes
        self.metrics.saved_entries = len(self.catalogue)
        self.metrics.disk_stuck = int(self.disk.reason is not None)

    def status(self) -> dict[str, Any]:
        """For ``/props`` and the listing."""
        return {
            "state": "on" if self.on else "off",
            "reason": self._why_off(),
            "entries": len(self.catalogue),
            "bytes": self.catalogue.total_bytes,
            "max_bytes": self.limits.max_bytes,
            "last_error": self.last_error,
        }

    def _why_off(self) -> str | None:
        why = self.disk.reason if self.reason is None else self.reason
        return "the engine has ended" if why is None and self.gone() else why
