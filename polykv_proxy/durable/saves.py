"""States on their way to the disk: the engine writes a file, then it is made to count.

Rule 1: the engine writes one file at a time; it does no more anyway. Whoever wanted that waits for it, and
for nothing else: what is left to do with the file (digest, sync, sidecar) goes on by itself, in the order in
which the files came, so that two of one identity cannot cross.
Rule 2: what comes is in use, and so is what it replaces: neither is swept or deleted.
Rule 3: a disk that is behind is not given more: beyond ``MAX_COMING`` nothing is saved.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Kind, Reason, SavedState
from polykv_proxy.core.types import as_tokens, common_prefix
from polykv_proxy.core.worth import goes_on
from polykv_proxy.durable.names import is_of, temporary_name
from polykv_proxy.durable.store import StoreError
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from polykv_proxy.core.catalogue import Entry, PoolRecord
    from polykv_proxy.core.types import Scope
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.engine.wire import SlotFile

log = structlog.get_logger(__name__)

MAX_COMING = 8
"""Files that the engine wrote and that do not count yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a state is saved as."""

    kind: Kind
    key: str
    scope: Scope
    config: Mapping[str, str]
    pool: PoolRecord | None = None
    used_ts: float | None = None
    """Epoch seconds; None: now."""


@dataclass(slots=True, eq=False)
class Coming:
    """A state on its way; a handle on it."""

    state: SavedState
    """Its key may still become another, its tokens are not known."""
    label: Label
    file: str
    """What the engine writes."""
    owner: object
    """Whoever it is of, if that is known."""
    others: Callable[[str], bool] | None
    """Whether a key is another's; see ``Saves.begin``."""
    then: Callable[[Entry | None], None]
    """Told in the same step in which it counts, or that it does not."""
    since: int
    """See ``Shelf.worked``."""
    wanted: bool = True
    """Whether it is still to count; where not, nothing of it stays."""
    over: asyncio.Future[Entry | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """What it became; None: nothing."""

    def under(self, key: str) -> None:
        """Its owner saves under that key by now, and what is there is his."""
        self.state, self.others = replace(self.state, key=key), None


class Saves:
    """Those of one shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._writing = asyncio.Lock()
        self._coming: dict[Coming, None] = {}

    def __iter__(self) -> Iterator[Coming]:
        return iter(list(self._coming))

    def __len__(self) -> int:
        return len(self._coming)

    def of(self, owner: object) -> list[Coming]:
        """Those of somebody."""
        return [coming for coming in self if coming.owner is owner]

    def brings_session(self, scope: Scope) -> bool:
        """Whether a session's state of a scope is among them."""
        return any(coming.label.kind is Kind.SESSION and coming.label.scope == scope for coming in self)

    async def save(
        self, label: Label, n_tokens: int, write: Callable[[str], Awaitable[SlotFile]]
    ) -> Entry | None:
        """``begin``, and wait until it counts; None where it does not."""
        coming = await self.begin(label, n_tokens, write)
        if coming is None:
            return None
        with suppress(PolyKVError):  # the disk hangs, and the status says so
            return await self._shelf.disk.in_time(coming.over)
        return None

    async def begin(  # noqa: PLR0913 - what a save is
        self,
        label: Label,
        n_tokens: int,
        write: Callable[[str], Awaitable[SlotFile]],
        *,
        owner: object = None,
        others: Callable[[str], bool] | None = None,
        still: Callable[[], bool] = lambda: True,
        then: Callable[[Entry | None], None] = lambda _: None,
    ) -> Coming | None:
        """Let the engine write a state; returns when it has. None where that failed, which is no error.

        Args:
            label: what it is.
            n_tokens: about how many it has.
            write: lets the engine write a file of that name.
            owner: whoever it is of, see ``of``.
            others: whether a key is another's; given by who has no state under its key yet. What is there is
                replaced only if this goes on from it; else this is saved under the next key, as ``key#2``.
            still: whether it is still wanted, when it is its turn.
            then: see ``Coming``.
        """
        async with self._writing:
            if not still():
                return None
            state = self._shelf.draft(label)
            name = temporary_name(state.identity)
            coming = Coming(state, label, name, owner, others, then, self._shelf.failures)
            self._coming[coming] = None
            written: SlotFile | None = None
            try:
                await self._require_room(n_tokens * self._shelf.bytes_per_token)
                written = await write(coming.file)
            except PolyKVError as error:
                self._shelf.failed("save", error.message, key=label.key)
                return None
            finally:
                if written is None:
                    self._shelf.discard(coming.file)
                    self._ended(coming, None)
            self._shelf.tasks.spawn(self._settle(coming, written))
            return coming

    async def _require_room(self, n_bytes: int) -> None:
        shelf = self._shelf
        if len(self._coming) > MAX_COMING:
            raise StoreError(f"the disk is behind by {MAX_COMING} states")
        if n_bytes > shelf.limits.max_bytes:
            raise StoreError(f"it would take {n_bytes} bytes, more than may be saved at all")
        free = await shelf.disk.run(shelf.store.free_bytes)
        if free is not None and free - n_bytes < shelf.limits.min_free_bytes:
            shelf.sweeps.wants(n_bytes)
            raise StoreError(f"the disk has {free} bytes left, and {shelf.limits.min_free_bytes} stay free")

    def _ended(self, coming: Coming, entry: Entry | None) -> None:
        self._coming.pop(coming, None)
        coming.then(entry)
        coming.over.set_result(entry)

    async def _settle(self, coming: Coming, written: SlotFile) -> None:
        """Make it count (rule 1)."""
        entry = None
        try:
            async with self._shelf.changing:
                entry = await self._commit(coming, written)
        except PolyKVError as error:
            self._shelf.failed("save", error.message, key=coming.label.key)
        except Exception as error:  # nobody above would notice
            log.exception("kv_save_failed", key=coming.label.key)
            self._shelf.failed("save", repr(error), key=coming.label.key)
        finally:
            if entry is None:
                self._shelf.discard(coming.file)
            self._ended(coming, entry)
        if entry is None:
            return
        self._shelf.worked(coming.since)
        log.info(
            "kv_saved",
            kind=entry.state.kind.value,
            key=entry.state.key,
            tokens=len(entry.tokens),
            bytes=entry.state.file_bytes,
        )
        if not coming.wanted:
            with suppress(PolyKVError):
                await self._shelf.remove(entry, Reason.DELETED)

    async def _commit(self, coming: Coming, written: SlotFile) -> Entry | None:
        shelf = self._shelf
        if not coming.wanted:
            return None
        before = shelf.catalogue.get(coming.state.identity)
        if before is not None and coming.others is not None:
            tokens = await shelf.disk.begin(0, shelf.store.tokens, coming.file)
            if not goes_on(common_prefix(before.tokens, tokens), len(before.tokens)):
                coming.state, before = self._beside(coming.state, coming.others), None
        identity = coming.state.identity
        if not is_of(coming.file, identity):
            coming.file = await shelf.disk.begin(0, shelf.store.rename, coming.file, identity)
        draft = replace(
            coming.state,
            file=coming.file,
            file_bytes=written.n_bytes,
            tokens=as_tokens([0]) * written.n_tokens,
        )
        used_ts, uses = coming.label.used_ts, 0 if before is None else before.uses
        used_ts = draft.created_ts if used_ts is None else used_ts
        async with shelf.holding(before):
            state = await shelf.disk.begin(
                written.n_bytes, shelf.store.commit, draft, used_ts=used_ts, uses=uses
            )
            return shelf.catalogue.add(state, used_ts=used_ts)

    def _beside(self, state: SavedState, others: Callable[[str], bool]) -> SavedState:
        """It under the first key after its own that nobody has."""
        number = 2
        while True:
            beside = replace(state, key=f"{state.key}#{number}")
            if self._shelf.catalogue.get(beside.identity) is None and not others(beside.key):
                return beside
            number += 1
