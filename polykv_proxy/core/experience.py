"""Whose tokens are whose: joins an engine's counters with the sessions that its slots serve.

Rule 1: a slot's tokens are a session's when the engine says that they are of the session's last request, not
because the session has the slot by now.
Rule 2: one reading is one picture. Whoever looks at it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.rates import STALE_S, Progress, RateBook, Reading, SlotReading
from polykv_proxy.core.stock import StockCounters
from polykv_proxy.core.types import SlotState

if TYPE_CHECKING:
    from collections.abc import Collection

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.rates import DecodeRate
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import SlotBoard
    from polykv_proxy.core.stock import SlotLook
    from polykv_proxy.core.types import EngineFacts, EngineSample

PRESSURE_FROM = 0.70
"""Use, 0 to 1, from which compaction is advisable."""


@dataclass(frozen=True, slots=True)
class Context:
    """How full a session's context is; None where it is not known."""

    used: int | None
    total: int | None
    headroom: int | None
    """Tokens left: to the end of the window, or of the free cells if that is nearer."""


class Experience:
    """The rates of one engine and of its sessions."""

    def __init__(self) -> None:
        self.book = RateBook()
        self.stock = StockCounters()

    def reset(self) -> None:
        """Another load of the model."""
        self.book.reset()
        self.stock.reset()

    def on_sample(self, sample: EngineSample, board: SlotBoard) -> Progress:
        """Counters of a patched engine."""

        def rate_of(reading: SlotReading) -> DecodeRate | None:
            session = board.slots[reading.slot].session
            return session.rate if session is not None and session.lease == reading.tag else None

        return self.book.on_reading(reading_of(sample), rate_of)

    def on_stock_slots(
        self, slots: Collection[SlotLook], running: Collection[Lease], now: float, *, pinned: bool = False
    ) -> Progress:
        """A look at the slots of an engine without the patch; see ``StockCounters.look``."""
        reading = self.stock.look(slots, running, now, pinned=pinned)
        sessions: dict[int, Session | None] = {lease.lease_id: lease.session for lease in running}

        def rate_of(reading: SlotReading) -> DecodeRate | None:
            session = sessions.get(reading.tag)
            return None if session is None else session.rate

        return self.book.on_reading(reading, rate_of)

    def on_answer(self, lease: Lease, generated: int, seconds: float | None, *, pinned: bool) -> None:
        """The engine's own account of an answer, where the answer carries one.

        Args:
            lease: the request.
            generated: tokens of the answer.
            seconds: from its first to its last; None: it does not say.
            pinned: whether it runs in the lease's first slot; otherwise the engine chose one.
        """
        if lease.session is None:
            return
        self.stock.on_answer(lease, generated)
        if seconds is None:
            return
        slot = lease.slots[0] if pinned else self.stock.slot_of(lease.lease_id)
        rest = max(0, generated - 1)
        if slot is not None:
            self.book.on_answer(slot, lease.lease_id, lease.session.rate, rest, seconds)
        elif rest and seconds > 0.0:
            lease.session.rate.add(rest, seconds)


def reading_of(sample: EngineSample) -> Reading:
    """The counters of a patched engine as a reading; without the engine's clock, the proxy's must do."""
    clock_s = sample.taken_at if sample.clock_s is None else sample.clock_s
    return Reading(
        taken_at=sample.taken_at,
        clock_s=clock_s,
        slots=tuple(
            SlotReading(
                slot=slot.slot,
                answer=slot.task,
                tag=slot.tag,
                decoding=slot.state is SlotState.GEN,
                generated=slot.gen_total,
                prompt=slot.prompt_total,
                cached=slot.cached_total,
                last_token_at=clock_s if slot.last_token_s is None else slot.last_token_s,
            )
            for slot in sample.slots
        ),
        exact=sample.clock_s is not None,
    )


def context_of(session: Session, sample: EngineSample | None, facts: EngineFacts | None) -> Context:
    """A session's context as of the last sample, or, where there are none, as of its last answer."""
    total = None if facts is None else facts.ctx_tokens or None
    if session.re_rooted:
        used = None  # CTX-7: a stale reading would call for a second compaction
    elif sample is None:
        used = session.context_tokens
    else:
        held = None if session.slot is None else sample.slots[session.slot]
        used = held.tokens if held is not None and held.tag == session.lease else None
    return Context(used, total, headroom(used, total, sample))


def headroom(used: int | None, total: int | None, sample: EngineSample | None) -> int | None:
    """Tokens that a context of ``used`` can still take; None unless use and window are known."""
    if used is None or total is None:
        return None
    return max(0, total - used if sample is None else min(total - used, sample.cells_free))


def fresh(sample: EngineSample | None, now: float) -> EngineSample | None:
    """A sample, unless it is too old to speak of the present."""
    return None if sample is None or now - sample.taken_at > STALE_S else sample


def pressure(sample: EngineSample | None) -> float | None:
    """Use of what is nearest to its end, 0 to 1: the cells, or the window of the largest session."""
    if sample is None or not sample.cells_total:
        return None
    windows = [slot.tokens / slot.ctx_tokens for slot in sample.slots if slot.ctx_tokens]
    return min(1.0, max(sample.cells_used / sample.cells_total, *windows, 0.0))


def compaction_pressure(use: float | None) -> float | None:
    """How advisable compaction is at a ``pressure``: 0 up to ``PRESSURE_FROM``, 1 at the wall."""
    return None if use is None else min(1.0, max(0.0, (use - PRESSURE_FROM) / (1.0 - PRESSURE_FROM)))
