"""What a gate sees of its engine: the last look at it, the pace that was learned, what a session takes.

Rule 1: a look says how the engine is until it is older than may be: then nobody can tell. Where nobody
looks, nothing is stale.
Rule 2: what was learned of a model outlives its engine; the last look does not.
Rule 3: what a session takes is the mean of those whose requests came to an end: of all while they are few, of
the recent ones from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polykv_proxy.core.curve import Bias, TpotCurve, Windows

if TYPE_CHECKING:
    from polykv_proxy.core.headroom import Picture

MARGINAL_ANSWERS = 32
"""Requests that the mean of what a session takes goes back, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a sample says about the pace and the room."""

    taken_at: float
    """Monotonic seconds."""
    decoding: int
    """Sessions that decode."""
    mean_tps: float | None
    """Mean of those of them whose rate is known."""
    tokens: int = 0
    """Generated since the last look, first tokens of answers left out."""
    seconds: float = 0.0
    """That they took, summed over sessions."""
    window: int | None = None
    pressure: float | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None


_NOTHING = Look(taken_at=0.0, decoding=0, mean_tps=None)


class Sight:
    """Of one engine.

    Args:
        stale_after_s: age from which a look says nothing; None where nobody looks.
    """

    def __init__(self, stale_after_s: float | None = None) -> None:
        self._stale_after_s = stale_after_s
        self.curve = TpotCurve()
        self.bias = Bias()
        self._windows = Windows(self.curve, self.bias)
        self._look: Look | None = None
        self._marginal: float | None = None
        self._answers = 0
        """That the mean is of, as long as there are few."""

    def on_look(self, look: Look) -> None:
        """A sample came."""
        before = self._look
        if before is not None and look.taken_at > before.taken_at:
            self._windows.add(look.decoding, look.taken_at - before.taken_at, look.tokens, look.seconds)
        self._look = look

    def on_over(self, cells: int) -> None:
        """A request came to its end, and took so many cells beyond what it shared."""
        self._answers = min(self._answers + 1, MARGINAL_ANSWERS)
        mean = self._marginal or 0.0
        self._marginal = mean + (cells - mean) / self._answers

    def on_engine_ready(self, *, same_model: bool, stale_after_s: float | None) -> None:
        """Another engine is there; another model has another curve."""
        self._stale_after_s = stale_after_s
        self._look = None
        if not same_model:
            self.curve, self.bias = TpotCurve(), Bias()
        self._windows = Windows(self.curve, self.bias)

    def is_stale(self, now: float) -> bool:
        """Whether the last look is too old to tell."""
        if self._stale_after_s is None:
            return False
        return self._look is None or now - self._look.taken_at > self._stale_after_s

    def complete(self, picture: Picture, now: float) -> Picture:
        """What is seen of the engine goes into a picture of who is inside and who waits."""
        look = self._look or _NOTHING
        return replace(
            picture,
            decoding=look.decoding,
            mean_tps=look.mean_tps,
            fit=self.curve.fit(),
            reach=self.curve.reach,
            bias=self.bias.ratio,
            margin_ratio=self.bias.margin_ratio,
            marginal_tokens=self._marginal,
            pressure=look.pressure,
            window=look.window,
            seq_ids_used=look.seq_ids_used,
            seq_ids_max=look.seq_ids_max,
            stale=self.is_stale(now),
        )
