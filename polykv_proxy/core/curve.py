"""How the time for a token grows with the number of sessions that decode: learned while they do.

An engine computes one token for each of n sessions in a step. While reading the weights takes longer than
computing, a step takes as long for many as for one; beyond that knee each session adds its share:
TPOT(n) = max(t0, a + b n).

Rule 1: only steady windows count: the number of those who decode hardly changed.
Rule 2: recent windows count more, so that longer contexts or another load are noticed.
Rule 3: nobody knows what lies far beyond what was seen. Past its reach a prediction is not to be trusted.
Rule 4: the difference between what was predicted and what came is measured all the time: its mean corrects
the prediction, its spread is the margin that a promise needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1

MAX_POINTS = 1024
"""Numbers of sessions that are remembered; beyond them the largest one stands for all."""

FORGET = 0.997
"""What a window weighs once the next one came."""

ENOUGH = 3
"""Windows with the same number of sessions that make it known."""

WINDOW_S = 0.5
"""Length of a window."""

WINDOW_TOKENS = 8
"""Tokens for each session in a window."""

REACH = 8
"""Predictions are trusted up to one more than was seen, or an eighth."""

BIAS_WINDOWS = 40
"""Windows that the mean and the spread of the error go back, about."""

EXPERIENCED_S = 2.0
"""Seconds that a session's rate is a mean over."""

MARGIN_STRAYS = 2.0
"""Mean distances from what is foreseen that a promise allows for. With less, a floor is missed more often
than once in a hundred seconds where many sessions decode; with more, room is wasted."""


@dataclass(frozen=True, slots=True)
class Fit:
    """TPOT(n) = max(t0, a + b n), in seconds."""

    t0: float
    a: float
    b: float

    def tpot_s(self, n: float) -> float:
        """Seconds for a token while n sessions decode."""
        return max(self.t0, self.a + self.b * n)


@dataclass(slots=True)
class _Point:
    weight: float = 0.0
    mean: float = 0.0
    windows: int = 0


class TpotCurve:
    """Learns from windows and predicts."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._scale = 1.0
        self._fit: Fit | None = None
        self._seen = 0
        self._dirty = False

    def add(self, n: int, tpot_s: float) -> None:
        """A steady window: n sessions decoded, a token took each of them so long."""
        point = self._points.setdefault(min(n, MAX_POINTS), _Point())
        point.weight += self._scale
        point.mean += (tpot_s - point.mean) * self._scale / point.weight
        point.windows += 1
        self._scale /= FORGET
        if self._scale > 1e9:
            for each in self._points.values():
                each.weight /= self._scale
            self._scale = 1.0
        self._dirty = True

    def fit(self) -> Fit | None:
        """The curve; None until enough windows were seen with two different numbers of sessions."""
        if self._dirty:
            self._dirty = False
            known = sorted(
                (n, point.weight, point.mean) for n, point in self._points.items() if point.windows >= ENOUGH
            )
            self._fit = _fitted(known) if len(known) >= 2 else None
            self._seen = known[-1][0] if known else 0
        return self._fit

    @property
    def reach(self) -> int:
        """Number of sessions up to which a prediction may be trusted; 0 if none may."""
        if self.fit() is None:
            return 0
        return self._seen + max(1, self._seen // REACH)


def _fitted(points: list[tuple[int, float, float]]) -> Fit:
    """Least squares over every place of the knee; of equals the steepest, which promises least.

    Args:
        points: number of sessions (ascending), weight, seconds for a token; two at least.
    """
    w = sum(weight for _, weight, _ in points)
    sums = [0.0] * 6  # of the points right of the knee: w, wx, wy, wxx, wxy, wyy
    for n, weight, y in points:
        for at, value in enumerate((1.0, n, y, n * n, n * y, y * y)):
            sums[at] += weight * value
    best: tuple[float, float, Fit] | None = None
    left = [0.0, 0.0, 0.0]  # of those left of it: w, wy, wyy
    for at, (n, weight, y) in enumerate(points):
        if len(points) - at >= 2:
            a, b, error = _line(sums)
            if left[0] > 0.0:
                t0 = left[1] / left[0]
                error += max(0.0, left[2] - left[1] * t0)
            else:  # nobody alone is faster than the fewest that were seen, all of them together
                t0 = points[0][2] / points[0][0]
            found = (error / w, -b, Fit(t0, a, b))
            if best is None or found[:2] < (best[0] * (1 - 1e-9) - 1e-18, best[1]):
                best = found
        for index, value in enumerate((1.0, n, y, n * n, n * y, y * y)):
            sums[index] -= weight * value
        for index, value in enumerate((1.0, y, y * y)):
            left[index] += weight * value
    assert best is not None
    return best[2]


def _line(sums: list[float]) -> tuple[float, float, float]:
    """The line through weighted points that does not fall, and the sum of its squared errors."""
    w, wx, wy, wxx, wxy, wyy = sums
    spread = w * wxx - wx * wx
    b = max(0.0, (w * wxy - wx * wy) / spread) if spread > 1e-9 * w * wxx else 0.0
    a = (wy - b * wx) / w
    error = wyy - 2 * (a * wy + b * wxy) + w * a * a + 2 * a * b * wx + b * b * wxx
    return a, b, max(0.0, error)


class Bias:
    """Measured over predicted: its mean, and how far what a session experiences strays from it.

    What a session experiences is a mean over some seconds itself, so single windows may stray further.
    """

    def __init__(self) -> None:
        self._windows = 0
        self._mean = 1.0
        self._experienced = 1.0
        self._stray = 0.0
        """Mean distance of what is experienced from the mean. Unlike a deviation, it soon forgets the errors
        of a curve that was still being learned."""

    @property
    def ratio(self) -> float | None:
        """Mean of measured over predicted; None before there was anything to compare."""
        return self._mean if self._windows else None

    @property
    def margin_ratio(self) -> float:
        """Share of a prediction by which what is experienced may fall short of it."""
        return min(0.5, MARGIN_STRAYS * self._stray) if self._windows > ENOUGH else 0.0

    def add(self, measured: float, predicted: float, span_s: float) -> None:
        """One window of so many seconds."""
        ratio = measured / predicted
        self._windows += 1
        known = min(self._windows, BIAS_WINDOWS)
        self._mean += (ratio - self._mean) / known
        if self._windows == 1:
            self._experienced = ratio
            return
        self._experienced += (ratio - self._experienced) * -expm1(-span_s / EXPERIENCED_S)
        self._stray += (abs(self._experienced - self._mean) - self._stray) / known


class Windows:
    """Cuts what samples report into steady windows, and feeds the curve and its bias."""

    def __init__(self, curve: TpotCurve, bias: Bias) -> None:
        self._curve = curve
        self._bias = bias
        self._clear()

    def _clear(self) -> None:
        self._low = self._high = 0
        self._tokens = 0
        self._seconds = 0.0
        self._span = 0.0
        self._weighted = 0.0

    def add(self, n: int, span_s: float, tokens: int, seconds: float) -> None:
        """What happened between two samples.

        1. Nobody decoded, or the number of those who did changed too much: the window starts anew.
        2. It is not long enough yet: go on.
        3. It is: the curve learns it, and what the curve had said is compared with it.

        Args:
            n: sessions that decoded.
            span_s: seconds between the samples.
            tokens: that came, all sessions together.
            seconds: that they took, summed over the sessions; a session's tokens take the time from its
                last one before to its last one now.
        """
        low, high = min(self._low or n, n), max(self._high, n)
        if n <= 0 or high - low > low // 16:  # 1
            self._clear()
            if n <= 0:
                return
            low = high = n
        self._low, self._high = low, high
        self._tokens += tokens
        self._seconds += seconds
        self._span += span_s
        self._weighted += n * span_s
        if self._span < WINDOW_S or self._tokens < WINDOW_TOKENS * low or self._seconds <= 0.0:
            return  # 2
        n, tpot_s = round(self._weighted / self._span), self._seconds / self._tokens
        fit = self._curve.fit()
        if fit is not None and n <= self._curve.reach:
            self._bias.add(1.0 / tpot_s, 1.0 / fit.tpot_s(n), self._span)
        self._curve.add(n, tpot_s)
        self._clear()
