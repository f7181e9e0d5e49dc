"""Token rates: what each session experiences, and what an engine does in all.

Rule 1: a rate is tokens over seconds, both forgotten alike. There is no value to start from, so a constant
rate is shown exactly.
Rule 2: the clock of an answer runs from its first token to its last, whatever stops it in between; between
answers it stands still.
Rule 3: tokens are those that the engine accepted. How many come at once, and how often anybody looks,
changes nothing.
Between two looks tokens come one by one, each as long after the last as the others, unless somebody looked
meanwhile and saw none: then they come in groups, with at least such a pause between them.
Rule 4: what is not known yet is None and takes part in no mean.
Rule 5: totals never fall. Counters that do belong to another load of the model, and start a new count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, expm1
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polykv_proxy.core.types import SlotId

WINDOW_TOKENS = 128.0
WINDOW_S = 2.0
"""The rate looks back over so many tokens or seconds, whichever is less. What it counts is on the average as
old as in a plain mean over that window: half of it, the span of an exponential average."""

WARM_TOKENS = 16
WARM_S = 2.0
"""Tokens or seconds of decoding after which a rate is shown."""

PAUSE_GAPS = 1.5
"""A pause shorter than so many of the usual gaps (rule 3) is how tokens come; a longer one slows the rate
down while it lasts. Without that, whoever looks during a stall would see the speed before it."""

STALE_S = 3.0
"""Age in seconds from which a reading says nothing about the present."""


class DecodeRate:
    """How fast tokens come to one reader, over all its answers."""

    __slots__ = ("_gap", "_gaps", "_held", "_pause", "_seconds", "_seen_seconds", "_seen_tokens", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._gaps = 0.0
        self._held = 0
        self._pause = 0.0
        self._gap = 0.0
        self._seen_tokens = 0
        self._seen_seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens came, the last one ``seconds`` after the one before the first of them."""
        self._pause = 0.0
        self._seen_tokens += tokens
        tokens += self._held
        if seconds <= 0.0:
            self._held = tokens  # came with those before; their time is known with the next
            return
        self._held = 0
        self._seen_seconds += seconds
        kept, weight = _ageing(tokens, seconds)
        self._tokens = self._tokens * kept + tokens * weight
        self._seconds = self._seconds * kept + seconds * weight
        gaps = tokens if self._gap <= 0.0 else min(float(tokens), max(1.0, seconds / self._gap))
        self._gaps = self._gaps * kept + gaps * weight
        self._gap = 0.0

    def pause(self, seconds: float, *, seen: bool = True) -> None:
        """No token came for so long; forgotten with the next one, which brings its whole time along.

        Args:
            seconds: since the last one; 0: none is waited for.
            seen: whether somebody looked; else tokens may have come, and nobody knows.
        """
        self._pause = max(0.0, seconds)
        if seen:
            self._gap = max(self._gap, seconds) if seconds > 0.0 else 0.0

    @property
    def warm(self) -> bool:
        """Whether enough was seen to tell."""
        enough = self._seen_tokens >= WARM_TOKENS or self._seen_seconds >= WARM_S
        return enough and self._seconds > 0.0

    @property
    def tps(self) -> float | None:
        """Tokens a second; None until it is warm."""
        if not self.warm:
            return None
        usual = self._seconds / self._gaps
        if self._pause <= PAUSE_GAPS * usual:
            return self._tokens / self._seconds
        over = self._pause - usual
        kept, weight = _ageing(0, over)
        return self._tokens * kept / (self._seconds * kept + over * weight)


def _ageing(tokens: int, seconds: float) -> tuple[float, float]:
    """What is left of everything before, and of what came in this interval, at its end.

    The forgetting is continuous within the interval too, so that two halves of it do what the whole does.
    """
    ages = 2.0 * max(tokens / WINDOW_TOKENS, seconds / WINDOW_S)
    return exp(-ages), -expm1(-ages) / ages


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One slot at one moment."""

    slot: SlotId
    answer: int
    """The engine's number of the current or last request."""
    tag: int
    """Lease of that request; 0 where it is not known."""
    decoding: bool
    """Whether tokens are coming: the first has come, the last has not."""
    generated: int
    """Tokens over all answers of the slot."""
    prompt: int
    """Prompt tokens computed, over all requests."""
    cached: int
    """Prompt tokens that did not have to be, over all requests."""
    last_token_at: float
    """Seconds of the engine's clock at which ``generated`` was reached, as well as it is known."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's counters at one moment."""

    taken_at: float
    """Monotonic seconds at which the proxy got it."""
    clock_s: float
    """The same moment on the clock of ``last_token_at``."""
    slots: tuple[SlotReading, ...]
    exact: bool = True
    """Whether ``last_token_at`` is when the token came, not when it was seen."""
    unseen: int = 0
    """Tokens of answers that were over before anybody looked; in no slot's ``generated``."""


RateOf: TypeAlias = "Callable[[SlotReading], DecodeRate | None]"


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened between two readings."""

    generated: int = 0
    prompt: int = 0
    cached: int = 0
    gaps: tuple[tuple[int, float], ...] = ()
    """For each slot that went on: tokens, and the mean seconds between them; without those whose time is not
    known."""


@dataclass(slots=True)
class _Slot:
    """A slot as of the last reading."""

    last: SlotReading
    rate: DecodeRate | None = None
    since: SlotReading | None = None
    """The last reading of this answer in which a token was counted; None before its first token."""
    tokens: int = 0
    seconds: float = 0.0
    """What was counted of this answer."""


@dataclass(slots=True)
class RateBook:
    """The rates of one engine."""

    generated_total: int = 0
    """Tokens seen to be generated, over all loads of the model."""
    prompt_total: int = 0
    cached_total: int = 0
    taken_at: float | None = None
    """Monotonic seconds of the last reading."""
    _exact: bool = True
    _unseen: int = 0
    """Those of the last reading."""
    _slots: dict[SlotId, _Slot] = field(default_factory=dict)
    _settled: dict[SlotId, int] = field(default_factory=dict)
    """Leases whose answers were accounted for at their ends."""
    _window: deque[tuple[float, int, int]] = field(default_factory=deque)
    """Clock, tokens generated and prompt tokens computed, of the readings that the totals' rates span."""

    def reset(self) -> None:
        """The model is loaded again; totals go on."""
        self.on_down()
        self._slots.clear()
        self._settled.clear()
        self._window.clear()
        self.taken_at, self._unseen = None, 0

    def on_down(self) -> None:
        """The engine is gone, and nobody waits for its tokens any more."""
        for slot in self._slots.values():
            _over(slot.rate)
        self._window.clear()
        self.taken_at = None

    # -- what comes in -----------------------------------------------------------------------------------

    def on_reading(self, reading: Reading, rate_of: RateOf) -> Progress:
        """Take the counters in.

        Args:
            reading: not older than the one before.
            rate_of: whose rate a slot's answer counts for; None: nobody's.
        """
        before = (self.generated_total, self.prompt_total, self.cached_total)
        gaps = []
        for now in reading.slots:
            slot = self._slots.get(now.slot)
            if slot is None or _fell(slot.last, now):
                _over(None if slot is None else slot.rate)
                slot = self._slots[now.slot] = _Slot(now)
            self.generated_total += now.generated - slot.last.generated
            self.prompt_total += now.prompt - slot.last.prompt
            self.cached_total += now.cached - slot.last.cached
            gap = self._follow(slot, now, rate_of(now), reading.clock_s)
            if gap is not None:
                gaps.append(gap)
            slot.last = now
        self.generated_total += reading.unseen - self._unseen
        self.taken_at, self._exact, self._unseen = reading.taken_at, reading.exact, reading.unseen
        self._slide(reading.clock_s)
        return Progress(
            self.generated_total - before[0],
            self.prompt_total - before[1],
            self.cached_total - before[2],
            tuple(gaps),
        )

    def _follow(
        self, slot: _Slot, now: SlotReading, rate: DecodeRate | None, clock_s: float
    ) -> tuple[int, float] | None:
        """Go on with a slot's answer; returns tokens and their mean gap, if there were more.

        1. Another answer: what the old one did after the last reading has no time of its own; start anew.
        2. Its first token was not seen yet: its clock starts when there is one. Tokens since the last reading
           are no sign of that where they may be another answer's.
        3. More tokens: they took the time since the last of those before.
        4. None: a pause, if it is still at it.
        """
        last, now_counts = slot.last, rate is not None and self._settled.get(now.slot) != now.tag
        same = (now.answer, now.tag) == (last.answer, last.tag)
        if slot.rate is not rate or not same:
            _over(slot.rate)
        slot.rate = rate
        if not same:  # 1
            slot.since, slot.tokens, slot.seconds = None, 0, 0.0
        if slot.since is None:  # 2
            if now.decoding or (same and now.generated > last.generated):
                slot.since = now
            return None
        tokens = now.generated - slot.since.generated
        pause_s = clock_s - now.last_token_at if now.decoding else 0.0
        if tokens == 0:  # 4
            if rate is not None and now_counts:
                rate.pause(pause_s)
            return None
        seconds = max(0.0, now.last_token_at - slot.since.last_token_at)  # 3
        slot.since = now
        slot.tokens += tokens
        slot.seconds += seconds
        if rate is not None and now_counts:
            rate.add(tokens, seconds)
            rate.pause(pause_s)
        return (tokens, seconds / tokens) if seconds > 0.0 else None

    def on_silence(self, now: float) -> None:
        """The engine was asked and does not answer: as far as is known, no token came since the last reading.

        It answers within a fraction of a decode step. When it does not, it is starved, and so are those who
        wait for tokens.
        """
        if self.taken_at is None or not self._window:
            return
        clock_s = self._window[-1][0] + now - self.taken_at
        for slot in self._decoding():
            if slot.rate is not None and self._settled.get(slot.last.slot) != slot.last.tag:
                slot.rate.pause(clock_s - slot.last.last_token_at, seen=False)

    def _slide(self, clock_s: float) -> None:
        """Keep the readings of the last ``WINDOW_S`` seconds, and the last one before."""
        window = self._window
        if window and clock_s < window[-1][0]:
            window.clear()
        window.append((clock_s, self.generated_total, self.prompt_total))
        while len(window) > 2 and window[1][0] <= clock_s - WINDOW_S:
            window.popleft()

    def on_answer(self, slot: SlotId, tag: int, rate: DecodeRate, tokens: int, seconds: float) -> None:
        """The engine's own account of an answer that ends; what the readings missed of it is made up for.

        Of readings that are not exact the times are no measure for what is left: it came as fast as the rest.

        Args:
            slot: where it ran.
            tag: its lease.
            rate: whose it is.
            tokens: that followed its first one.
            seconds: that they took together.
        """
        if self._settled.get(slot) == tag:
            return
        known = self._slots.get(slot)
        if known is not None and known.last.tag == tag:
            missed = tokens - known.tokens
            seconds = seconds - known.seconds if self._exact else seconds * missed / max(1, tokens)
            tokens = missed
        self._settled[slot] = tag
        if tokens > 0 and seconds > 0.0:
            rate.add(tokens, seconds)
        rate.pause(0.0)

    # -- what is shown -----------------------------------------------------------------------------------

    def stale(self, now: float) -> bool:
        """Whether the last reading, if there is any, is too old to speak of the present."""
        return self.taken_at is None or now - self.taken_at > STALE_S

    def generated_tps(self, now: float) -> float | None:
        """Tokens generated a second, all slots together, over the last ``WINDOW_S``."""
        return self._per_second(1, now)

    def prompt_tps(self, now: float) -> float | None:
        """Prompt tokens computed a second, all slots together."""
        return self._per_second(2, now)

    def _per_second(self, column: int, now: float) -> float | None:
        window = self._window
        if self.stale(now) or len(window) < 2 or window[-1][0] <= window[0][0]:
            return None
        return float(window[-1][column] - window[0][column]) / (window[-1][0] - window[0][0])

    def active_tps(self, now: float) -> list[float]:
        """Rates of the sessions that decode now and are warm."""
        if self.stale(now):
            return []
        shown = (slot.rate.tps for slot in self._decoding() if slot.rate is not None)
        return [tps for tps in shown if tps is not None]

    def mean_active_tps(self, now: float) -> float | None:
        """Their mean; None if there are none."""
        known = self.active_tps(now)
        return sum(known) / len(known) if known else None

    @property
    def decoding(self) -> frozenset[int]:
        """Leases that were decoding at the last reading."""
        return frozenset(slot.last.tag for slot in self._decoding() if slot.last.tag)

    @property
    def decoding_count(self) -> int:
        """Slots that were decoding at the last reading, whoever for."""
        return sum(1 for _ in self._decoding())

    @property
    def warming(self) -> bool:
        """Whether somebody decodes whose rate is not known yet."""
        return any(slot.rate is not None and not slot.rate.warm for slot in self._decoding())

    def _decoding(self) -> Iterator[_Slot]:
        return (slot for slot in self._slots.values() if slot.last.decoding)


def _over(rate: DecodeRate | None) -> None:
    """Whoever's rate it is waits for no token there: it was not slow, it is over."""
    if rate is not None:
        rate.pause(0.0)


def _fell(last: SlotReading, now: SlotReading) -> bool:
    """Whether a counter counts from zero again."""
    return now.generated < last.generated or now.prompt < last.prompt or now.cached < last.cached
