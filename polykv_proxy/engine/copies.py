"""Pools as slot files, on an engine without the patch.

A pool is computed once in a slot and saved. Whoever attaches gets a copy: the file is restored into the slot
of the request before it is sent. Nothing is computed twice, but every session has all its cells for itself.

Rule 1: a pool is offered only after the engine was seen to go on from its file.
Rule 2: a file is of one load of one model. It is never used after the engine may have been restarted: a file
does not say which weights its KV came from.
Rule 3: whatever happens in a slot goes through the gate, because the engine also chooses slots for itself.
Rule 4: what a slot is believed to hold saves a restore, and is confirmed before it is relied on. The engine
compares tokens itself: a wrong belief costs speed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import Capability, PoolNumber, SlotId, common_prefix
from polykv_proxy.engine import prompts, slotfile, trial
from polykv_proxy.engine.backend import Address
from polykv_proxy.engine.gate import Gate
from polykv_proxy.engine.patched import Materialized, SnapshotTaken
from polykv_proxy.engine.poolfiles import PoolFile, PoolFiles
from polykv_proxy.errors import (
    BadRequestError,
    ConflictError,
    DisabledError,
    EngineGoneError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from polykv_proxy.core.decisions import AttachPlan, Lease
    from polykv_proxy.core.types import EngineFacts, SlotSample, Tokens
    from polykv_proxy.engine.client import EngineClient
    from polykv_proxy.engine.poolfiles import CopyLimits
    from polykv_proxy.engine.wire import Prompt, StockSlot

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Copies:
    """One load of an engine without the patch.

    Args:
        client: the way to the engine.
        limits: what is allowed.
        spawn: runs something to its end.
        on_taken: told which slot the engine chose for a request.
        empty_one: empties the idle slot that was unused for the longest time; False: there is none.
        on_file_lost: told which pool's file is not there any more, or is damaged.
    """

    capability = Capability.COPY
    pins_in_body = True
    snapshots_running = False

    def __init__(  # noqa: PLR0913 - what it needs of the others
        self,
        client: EngineClient,
        limits: CopyLimits,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_taken: Callable[[Lease, SlotId], None],
        empty_one: Callable[[], Awaitable[bool]],
        *,
        on_file_lost: Callable[[PoolNumber], None],
    ) -> None:
        self._client = client
        self._limits = limits
        self.files = PoolFiles(limits)
        self._gate = Gate(self._slots, spawn, self._taken)
        self._on_taken = on_taken
        self._empty_one = empty_one
        self._on_file_lost = on_file_lost
        self._held: dict[SlotId, Tokens] = {}
        """Leading tokens that slots are believed to hold (rule 4)."""
        self._started: set[int] = set()
        """Abandoned leases that were seen to run."""
        self._next_uid = 1
        self._last_task = -1
        self._partial = True
        self._ctx_tokens = 0
        self._media = False

    # -- can it be done ------------------------------------------------------------------------------------

    async def still_there(self) -> bool:
        """Whether this is the load of the engine that was tested: task numbers never go back."""
        before = self._last_task
        return _last_task(await self._client.slots()) >= before

    async def _slots(self) -> list[StockSlot]:
        slots = await self._client.slots()
        self._last_task = max(self._last_task, _last_task(slots))
        return slots

    async def self_test(self, facts: EngineFacts) -> tuple[EngineFacts, str | None]:
        """Try it on the loaded model, where nobody else is at work.

        Returns:
            The facts, completed by what was found out; and what went wrong, or None.
        """
        self.files.tidy()
        self._ctx_tokens, self._media = facts.ctx_tokens, facts.media
        name = self.files.name(PoolNumber(0))
        try:
            if await self._client.adapters():
                return facts, "it has LoRA adapters, and a slot file does not say which were in force"
            slots = await self._client.slots()
            if not slots:
                return facts, "it has no slots"
            if any(slot.is_processing for slot in slots):
                return facts, "others were at work in it when it was to be tried"
            ends = SlotId(slots[0].id), SlotId(slots[-1].id)
            self._partial, reason = await trial.restore_works(self._client, name, ends, facts.ctx_tokens)
            await self._slots()
        except (BadRequestError, NotFoundError, UnavailableError) as error:
            if isinstance(error, EngineGoneError) or error.code == "engine_timeout":
                raise  # it may be able to, another time
            return facts, error.message
        finally:
            await self.files.delete(name)
        epoch = facts.epoch or self.files.load
        found = replace(facts, epoch=epoch, max_pools=self._limits.max_pools, partial_match=self._partial)
        return found, reason

    # -- prompts -------------------------------------------------------------------------------------------

    async def prompt_tokens(self, count_path: str, body: bytes) -> Tokens | None:
        """See ``prompts``."""
        return await prompts.tokens_of(self._client, count_path, body, media=self._media)

    async def prompt(self, count_path: str, body: bytes, *, text_from: int) -> Prompt | None:  # noqa: ARG002
        """A chat is text, however short."""
        return await prompts.shown(self._client, count_path, body, media=self._media)

    # -- pools ---------------------------------------------------------------------------------------------

    async def shared(self, slot: SlotId) -> SlotSample | None:  # noqa: ARG002
        """A copy is not shared."""
        return None

    async def materialize(
        self,
        number: PoolNumber,
        tokens: Tokens,
        lease: Lease,
        *,
        parent: PoolNumber | None = None,
        branch_pos: int = 0,  # noqa: ARG002 - the engine finds out how much agrees
    ) -> Materialized:
        """Go on from the parent's file, if there is one, save, and see that the engine goes on from that.

        Raises:
            DisabledError: it does not.
        """
        name = self.files.name(number)
        async with self._gate.beside(lease, steps=True):
            slot = _slot_of(lease)
            self._held.pop(slot, None)
            above = self.files.get(parent)
            if above is not None and parent is not None:
                await self._restore(slot, parent, above)
            timings = await self._client.prefill(tokens, slot)
            try:
                file = await self._save(slot, name, tokens)
                await self._prove(slot, file)
                await self._client.erase_slot(slot)
            except BaseException:
                await self.files.delete(name)
                raise
        return Materialized(self._add(number, file), len(tokens), timings, file.file_bytes)

    async def _prove(self, slot: SlotId, file: PoolFile) -> None:
        """Rule 1. A window that is shorter than the pool shows here."""
        if len(file.tokens) + 2 > self._ctx_tokens:
            return  # nothing fits behind it
        await self._client.restore_slot(slot, file.name)
        reused = await trial.reused(self._client, file.tokens + file.tokens[:1], slot)
        if reused != len(file.tokens):
            raise DisabledError(
                f"the engine restored {len(file.tokens)} tokens and reused {reused}: this model does not go "
                "on from a slot file of that length, as with a sliding window",
                code="copy_ineffective",
            )

    async def snapshot(
        self,
        number: PoolNumber,
        slot: SlotId,
        n_tokens: int | None,
        parent: PoolNumber | None,
        lease: Lease | None,
    ) -> SnapshotTaken:
        """Save an idle slot as it is. A cap shortens what the pool offers, not the file.

        Raises:
            ConflictError: nobody knows which tokens it holds, or it cannot be cut.
        """
        assert lease is not None, "nobody else may have the slot"
        name = self.files.name(number)
        async with self._gate.beside(lease, steps=True):
            if _slot_of(lease) != slot:
                raise ConflictError("the slot was taken", code="session_not_resident", param="from_session")
            try:
                saved = await self._client.save_slot(slot, name)
                tokens = await self._tokens_of(slot, name, saved.n_tokens)
                kept = self._cut(tokens, n_tokens, saved.n_tokens)
            except BaseException:
                await self.files.delete(name)
                raise
        file = PoolFile(name, kept, saved.n_bytes)
        above = self.files.get(parent)
        n_parent = 0 if above is None else common_prefix(above.tokens, kept)
        return SnapshotTaken(self._add(number, file), n_parent, list(kept), file.file_bytes)

    def _cut(self, tokens: Tokens, n_tokens: int | None, n_saved: int) -> Tokens:
        """The leading tokens that a snapshot offers."""
        kept = tokens if n_tokens is None else tokens[:n_tokens]
        if not kept or (n_tokens is not None and len(kept) != n_tokens):
            raise BadRequestError(
                f"n_tokens must be between 1 and the {len(tokens)} tokens of the slot", param="n_tokens"
            )
        if len(kept) < n_saved and not self._partial:
            raise ConflictError(
                "a state of this model cannot be cut: only all that the slot holds can be a pool",
                code="state_is_whole",
                param="n_tokens",
            )
        return kept

    async def _tokens_of(self, slot: SlotId, name: str, n_saved: int) -> Tokens:
        """Which tokens were saved: all of them from the file, else as many as are known."""
        if self.files.folder is not None:
            return await self.files.disk.run(slotfile.read_file, self.files.folder / name)
        known = self._held.get(slot)
        if known is None or len(known) > n_saved:
            raise ConflictError(
                "the tokens of this session are not known, and the engine's files are not on this host",
                code="tokens_unknown",
                param="from_session",
            )
        return known

    async def release(self, number: PoolNumber) -> int:
        """Delete the file. No cells: those who attached have their own."""
        await self.files.remove(number)
        return 0

    def listing(self) -> dict[str, Any]:
        """How much is on disk, and what the proxy could not delete."""
        return self.files.listing()

    # -- requests ------------------------------------------------------------------------------------------

    async def dispatch(
        self,
        lease: Lease,
        plan: AttachPlan | None,
        prompt: Tokens | None,
        send: Callable[[Address], Awaitable[T]],
        *,
        pinnable: bool,
    ) -> T:
        """Fill the slot from the pool's file unless it holds as much already; then send."""
        if pinnable and len(lease.slots) == 1:
            async with self._gate.beside(lease):
                return await self._send(lease, plan, prompt, send)

        async def go() -> T:
            if pinnable:
                return await self._send(lease, plan, None, send)
            return await send(Address())

        self.forget(lease.slots)
        return await self._gate.alone(lease, go)

    async def _send(
        self,
        lease: Lease,
        plan: AttachPlan | None,
        prompt: Tokens | None,
        send: Callable[[Address], Awaitable[T]],
    ) -> T:
        slot = _slot_of(lease)
        if plan is not None and plan.tokens:
            await self._fill(slot, plan, prompt)
        _slot_of(lease)  # it may have been restarted meanwhile
        if prompt is None:
            self._held.pop(slot, None)
        else:
            self._held[slot] = prompt
        return await send(Address(id_slot=slot))

    async def _fill(self, slot: SlotId, plan: AttachPlan, prompt: Tokens | None) -> None:
        """Have at least the plan's tokens in the slot; never an error for the pool's sake."""
        held = self._held.get(slot)
        if held is not None and prompt is not None and common_prefix(held, prompt) >= plan.tokens:
            now = next((each for each in await self._slots() if each.id == slot), None)
            if now is not None and now.n_prompt_tokens >= plan.tokens:
                return
        file = self.files.get(plan.pool.number)
        if file is not None:
            self._held.pop(slot, None)
            await self._restore(slot, plan.pool.number, file)

    async def _restore(self, slot: SlotId, number: PoolNumber, file: PoolFile) -> None:
        """Fill a slot from a pool's file, or leave it empty where it cannot be had: then the pool is gone.

        The engine makes room when it computes, not when it restores: so idle slots are emptied here.
        """
        if not await self.files.is_whole(file):
            log.warning("pool_file_damaged", file=file.name, tokens=len(file.tokens))
            self._on_file_lost(number)
            return
        while True:
            try:
                await self._client.restore_slot(slot, file.name)
            except BadRequestError as error:
                if await self._is_full(file) and await self._empty_one():
                    continue
                log.warning("pool_not_restored", slot=slot, tokens=len(file.tokens), reason=error.message)
                if not await self._is_full(file):
                    self._on_file_lost(number)
            return

    async def _is_full(self, file: PoolFile) -> bool:
        """Whether want of cells may be why a file was not restored: the engine does not say."""
        held = sum(slot.n_prompt_tokens for slot in await self._slots())
        return held + len(file.tokens) > self._ctx_tokens

    async def remains(
        self,
        lease: Lease,
        overdue_s: float,
        *,
        others: int,  # noqa: ARG002
        stop: bool,  # noqa: ARG002
    ) -> Content | None:
        """Its slots show whether it runs; the engine stops it when it notices that the client left."""
        slots = [slot for slot in await self._slots() if slot.id in lease.slots]
        if any(slot.is_processing for slot in slots):
            self._started.add(lease.lease_id)
            return None
        if lease.lease_id not in self._started and overdue_s <= 0:
            return None  # not started yet
        self._started.discard(lease.lease_id)
        for slot in slots:  # it may not have come to its prompt's end
            held = self._held.get(SlotId(slot.id))
            if held is not None:
                self._held[SlotId(slot.id)] = held[: slot.n_prompt_tokens]
        return Content.NEW

    def forget(self, slots: Iterable[SlotId]) -> None:
        """Nothing is believed of them any more."""
        for slot in slots:
            self._held.pop(slot, None)

    def _taken(self, lease: Lease, slot: SlotId) -> None:
        self.forget([slot])
        self._on_taken(lease, slot)

    def _add(self, number: PoolNumber, file: PoolFile) -> int:
        """Enter a pool that was saved; returns its name within this load."""
        self.files.add(number, file)
        self._next_uid += 1
        return self._next_uid - 1

    async def _save(self, slot: SlotId, name: str, tokens: Tokens) -> PoolFile:
        saved = await self._client.save_slot(slot, name)
        if saved.n_tokens != len(tokens):
            raise UnavailableError(
                f"the engine saved {saved.n_tokens} of {len(tokens)} tokens", code="engine_failed"
            )
        return PoolFile(name, tokens, saved.n_bytes)


def _slot_of(lease: Lease) -> SlotId:
    """The slot of a lease that is still good.

    Raises:
        EngineGoneError: the engine it was for is gone.
    """
    if lease.ended:
        raise EngineGoneError("the engine was restarted")
    return lease.slots[0]


def _last_task(slots: Iterable[StockSlot]) -> int:
    return max((slot.id_task for slot in slots if slot.id_task is not None), default=-1)
