"""All that makes KV durable on one engine, for its runtime and for those who serve requests (``saver``).

Rule 1: nobody's request fails because something cannot be saved or restored; the status says why.
Rule 2: nothing is saved before the canary went on from a file, on this load of the engine.
Rule 3: while lost pools come back requests are held, or served without them, as the policy says.
"""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic
from typing import TYPE_CHECKING, Any

import structlog

from polykv_proxy.core.types import Capability
from polykv_proxy.durable import canary, gguf, identity
from polykv_proxy.durable.pools import SavedPools
from polykv_proxy.durable.restores import Restores
from polykv_proxy.durable.sessions import SavedSessions
from polykv_proxy.durable.shelf import Shelf
from polykv_proxy.engine.disk import StuckError
from polykv_proxy.errors import (
    BadRequestError,
    EngineGoneError,
    NotFoundError,
    PolyKVError,
    UnavailableError,
)
from polykv_proxy.saver import model_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import EngineFacts, Scope, SlotId, Tokens
    from polykv_proxy.engine.origin import Origin, Start
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime
    from polykv_proxy.settings import DurableSettings

log = structlog.get_logger(__name__)

ROUND_S = 1.0
"""Between two looks for what is to be saved."""

MAX_TRIES = 3
"""Of one load of the engine, while it does not answer."""


_UNREAD = "the model's file cannot be read here, so nobody can tell which model it is"


class _ChangedError(Exception):
    """A file is not what the engine loaded."""


class Durable:
    """Saves and restores for one engine.

    Args:
        runtime: the engine's control plane at work.
        pooling: computes pools that are not on disk.
        settings: how much, how long, when.
        origin: where it is known from what the engine was started with.
    """

    def __init__(self, runtime: Runtime, pooling: Pooling, settings: DurableSettings, origin: Origin) -> None:
        self._runtime = runtime
        self._settings = settings
        self._origin = origin
        self.shelf = Shelf(
            origin.folder,
            settings.retention,
            runtime.metrics,
            runtime.now_ts,
            patience_s=settings.disk_wait_s,
        )
        self.sessions = SavedSessions(
            runtime, self.shelf, secrets.token_hex(3), min_tokens=settings.min_tokens
        )
        self.restores = Restores(runtime, self.shelf, self.sessions, min_tokens=settings.min_tokens)
        self.shelf.busy = self.sessions.busy
        self.shelf.gone = lambda: origin.gone
        self.pools = SavedPools(runtime, pooling, self.shelf, recent_s=settings.pool_recent_s)
        self._epoch = ""
        self._tried, self._tries = "", 0
        """Load of the engine that was tried last, and how often."""
        self._adapters: list[tuple[str, float]] = []
        self._files: dict[tuple[str, int, int], gguf.Gguf] = {}
        """By name, size and time."""
        self._settled = asyncio.Event()
        self._generation = 0
        self._pools_at = 0.0
        folder = origin.folder
        if not origin.hopeful and (folder is None or not any(folder.glob("kv-*.json"))):
            self._settled.set()  # nothing can come back

    # -- the engine's life -------------------------------------------------------------------------------

    async def meet(self, facts: EngineFacts, capability: Capability, reported: Mapping[str, str]) -> str:
        """Find out which model this is, and whether it goes on from files; see ``Saver``.

        Raises:
            PolyKVError: nothing is known yet; it is tried again.
        """
        try:
            return await self._meet(facts, capability, reported)
        except PolyKVError:
            raise
        except Exception as error:  # a fault of ours; the engine is used without (rule 1)
            log.exception("durable_kv_failed", engine=self._runtime.name)
            self.shelf.model_id, self.shelf.reason = model_digest(reported), f"it failed: {error!r}"
            return self.shelf.model_id

    async def _meet(self, facts: EngineFacts, capability: Capability, reported: Mapping[str, str]) -> str:
        shelf = self.shelf
        self.sessions.meet(reported.get("chat_template", ""))
        if facts.epoch and facts.epoch == self._epoch:  # what it loaded is what it was
            if shelf.reason is None and await self._lora() != self._adapters:
                self._adapters_changed()
            return shelf.model_id
        start = self._origin.find(reported)
        parts, window = await self._parts(start, reported)
        known = model_digest(reported) if isinstance(parts, str) else identity.model_id(parts)
        self._epoch, shelf.reason = "", "the engine was not tried yet"  # if this comes to nothing
        shelf.model_id, shelf.bytes_per_token = known, facts.bytes_per_cell
        if not self._settings.enabled:
            shelf.reason = "durable.enabled is false"
        elif capability is not Capability.ZERO_COPY:
            shelf.reason = "the engine has no prefix pools"
        elif isinstance(start, str):
            shelf.reason = start
        elif (wrong := self._origin.claim(start.folder) or await shelf.open(start.folder)) is not None:
            shelf.reason = wrong
        elif isinstance(parts, str):
            shelf.reason = parts
        elif identity.has_control_vector(start.arguments):
            shelf.reason = "a control vector changes KV, and no saved state says which it was"
        else:
            shelf.reason = await self._try(facts, window)
        self._epoch = facts.epoch
        report = log.info if shelf.on or not self._settings.enabled else log.warning
        report("durable_kv", engine=self._runtime.name, on=shelf.on, reason=shelf.reason)
        return known

    async def _try(self, facts: EngineFacts, window: int | None) -> str | None:
        """See ``canary.sings``; an engine that never answers it in time is used without (rule 1)."""
        seen = await self._runtime.client.counters()
        if seen.epoch != facts.epoch:  # nobody looked at the one that answers by now
            raise EngineGoneError("the engine was restarted while it was looked at")
        if seen.busy:
            return "others were at work in the engine when it was to be tried"
        if facts.epoch != self._tried:
            self._tried, self._tries = facts.epoch, 0
        self._tries += 1
        try:
            return await canary.sings(self._runtime.client, self.shelf, facts, window)
        except UnavailableError as error:
            if self._tries < MAX_TRIES:
                raise
            return f"the engine does not save and restore: {error.message}"

    async def _lora(self) -> list[tuple[str, float]]:
        """The engine's adapters and their scales."""
        try:
            return [(each.path, each.scale) for each in await self._runtime.client.adapters()]
        except (NotFoundError, BadRequestError):
            return []  # an engine that has none

    async def _parts(
        self, start: Start | str, reported: Mapping[str, str]
    ) -> tuple[dict[str, Any] | str, int | None]:
        """The parts of the model's id, or why nobody knows them; and its window, if it has one."""
        if isinstance(start, str) or start.model is None:
            return _UNREAD, None
        self._adapters = await self._lora()
        try:
            files = [await self._read(start, path) for path in gguf.shards(start.model)]
            projector = identity.projector_of(start.arguments)
            lora = [
                [(await self._read(start, path)).identity.plain(), scale] for path, scale in self._adapters
            ]
            parts = identity.parts_of_model(
                gguf=[file.identity.plain() for file in files],
                projector=None
                if projector is None
                else (await self._read(start, projector)).identity.plain(),
                lora=lora,
                reported=reported,
                arguments=start.arguments,
            )
        except (OSError, gguf.NotGgufError, StuckError, _ChangedError) as error:
            log.warning("model_not_identified", engine=self._runtime.name, reason=str(error))
            return (str(error) if isinstance(error, _ChangedError) else _UNREAD), None
        return parts, max((file.window or 0 for file in files), default=0) or None

    async def _read(self, start: Start, path: Path | str) -> gguf.Gguf:
        """What a file of the engine's is; read again only if it changed.

        Raises:
            OSError, NotGgufError: see ``gguf.read``.
            StuckError: see ``Disk``.
            _ChangedError: it is not what the engine loaded, as far as is known.
        """
        path, disk = start.file(path), self.shelf.disk
        found = await disk.run(path.stat)
        if (changed := start.changed(path, found)) is not None:
            raise _ChangedError(changed)
        known = (str(path), found.st_size, found.st_mtime_ns)
        if known not in self._files:
            self._files[known] = await disk.run(gguf.read, path)
        return self._files[known]

    def on_ready(self) -> None:
        """What was lost, by this engine or with an earlier proxy, comes back."""
        self._generation += 1
        if self.shelf.on:
            try:
                self.pools.recall()
            except Exception:  # a fault of ours: the engine serves, without those of earlier runs
                log.exception("pools_not_recalled", engine=self._runtime.name)
        self._runtime.spawn(self._rebuild(self._generation))
        if self._settings.while_rebuilding == "plain":
            self._settled.set()

    def on_down(self) -> None:
        """Requests wait for what comes back with the next engine."""
        self._generation += 1
        if self._settings.while_rebuilding == "hold" and any(
            pool.resident for pool in self._runtime.plane.tree
        ):
            self._settled.clear()

    async def _rebuild(self, generation: int) -> None:
        try:
            if self._runtime.plane.capability.shares_cells:
                await self.pools.rebuild()
        except Exception:  # a fault of ours: what is not back is computed when somebody asks for it
            log.exception("pools_not_rebuilt", engine=self._runtime.name)
        finally:
            if generation == self._generation:
                self._settled.set()

    @property
    def is_settled(self) -> bool:
        """Whether requests should run now (rule 3)."""
        return self._settled.is_set()

    async def settled(self, timeout_s: float) -> bool | None:
        """See ``Saver``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._settled.wait()
        except TimeoutError:
            return None

    # -- requests ----------------------------------------------------------------------------------------

    def may_help(self, scope: Scope, *, adapters: bool) -> bool:
        """See ``Saver``."""
        shelf = self.shelf
        if not shelf.on or adapters:
            return False
        return shelf.catalogue.holds_sessions(scope, shelf.model_id) or shelf.saves.brings_session(scope)

    async def before_request(self, lease: Lease, tokens: Tokens | None, held: int) -> None:
        """See ``Saver``."""
        if not self.shelf.on or lease.ended or not await self._same_adapters() or lease.ended:
            return
        await self.sessions.keep_displaced(lease)
        if tokens is not None and not lease.ended:
            await self.restores.bring_back(lease, tokens, held)

    async def before_loss(self, slot: SlotId) -> None:
        """See ``Saver``."""
        if self.shelf.on and await self._same_adapters():
            await self.sessions.keep_resident(slot)

    def on_delivered(self, lease: Lease, body: bytes, *, adapters: bool) -> None:
        """See ``Saver``."""
        if self.shelf.on:
            self.sessions.on_delivered(lease, body, adapters=adapters)

    async def on_answer(self, lease: Lease, cached_tokens: int | None) -> None:
        """See ``Saver``."""
        await self.restores.on_answer(lease, cached_tokens)

    async def on_close(self, session: Session, *, keep: bool) -> bool:
        """See ``Saver``."""
        if keep and not self.shelf.on:
            return False
        return await self.sessions.on_close(session, keep=keep)  # what is to go does, also while it is off

    def deletable(self, key: str, scope: Scope | None) -> list[Entry] | None:
        """See ``Shelf.deletable``."""
        return self.shelf.deletable(key, scope)

    def delete(self, entries: list[Entry]) -> list[asyncio.Future[None]]:
        """See ``Shelf.delete``; what their sessions left is not saved again."""
        for entry in entries:
            self.sessions.forget(entry)
        return self.shelf.delete(entries)

    async def _same_adapters(self) -> bool:
        """Whether the LoRA set is what the model's id says; once it is not, saved KV could be either's."""
        if not self._adapters:
            return True
        try:
            now = [(each.path, each.scale) for each in await self._runtime.client.adapters()]
        except PolyKVError:
            return False
        if now != self._adapters:
            self._adapters_changed()
        return self.shelf.on

    def _adapters_changed(self) -> None:
        self.shelf.reason = "the LoRA adapters were changed while the engine ran"
        log.warning("durable_kv", engine=self._runtime.name, on=False, reason=self.shelf.reason)

    # -- now and then ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Save what is idle, look after the files, until cancelled."""
        told: str | None = None
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.round()
                told = None
            except PolyKVError as error:
                log.info("durable_round_failed", reason=error.message)
            except Exception as error:  # a fault of ours, and no end to saving
                self.shelf.last_error = repr(error)
                if told != self.shelf.last_error:
                    log.exception("durable_round_failed")
                told = self.shelf.last_error

    async def round(self) -> None:
        """One look at everything."""
        await self.shelf.remember()
        if not self.shelf.on or not self._runtime.plane.serving:
            return
        await self.pools.drop_released()
        if await self._same_adapters():
            await self.sessions.keep_idle(self._settings.idle_save_s)
            if monotonic() - self._pools_at >= self._settings.pools_every_s:
                self._pools_at = monotonic()
                await self.pools.keep()
        await self.shelf.sweeps.sweep(monotonic())

    async def drain(self) -> None:
        """The proxy stops: save all that is worth it, as far as time allows."""
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self.pools.drop_released()
                self.pools.note_use()
                await self.shelf.remember()
                if self.shelf.on and self._runtime.plane.serving and await self._same_adapters():
                    await self.pools.keep()
                    await self.sessions.keep_idle(0.0, last=True)
                await self.shelf.all_over()
                await self.shelf.remember()
        except TimeoutError:
            log.warning("durable_drain_cut_short", engine=self._runtime.name)
        except PolyKVError as error:
            log.warning("durable_drain_failed", engine=self._runtime.name, reason=error.message)

    def status(self) -> dict[str, Any]:
        """Whether KV is saved, how much is, and why not."""
        return self.shelf.status()
