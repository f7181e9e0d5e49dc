"""How long answers are: learned for each class of requests.

Rule 1: bounded: so many classes, each with so many buckets. The class unused for the longest time is
forgotten.
Rule 2: recent answers count more: each new one takes a little from all before it.
Rule 3: where too few answers tell, an assumption stands in for them. It grows with what the request has
produced already, and never exceeds what the request may produce.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

MAX_CLASSES = 512
"""Classes remembered at once."""

ASSUMED_TOKENS = 1024
"""Length of an answer of a class that is not known yet."""

QUANTILE = 0.9
"""Share of a class's answers that an estimate is to cover, 0 to 1."""

MIN_WEIGHT = 8.0
"""Answers that must be known before they count for more than the assumption."""

FORGET = 0.995
"""What an answer weighs once the next one came: the last 200 or so count."""

PER_OCTAVE = 4
BUCKETS = 21 * PER_OCTAVE
"""Lengths up to 2^21 tokens, each bucket a fifth longer than the one before."""


class _Histogram:
    """Lengths of one class, as weights in buckets."""

    __slots__ = ("scale", "weights")

    def __init__(self) -> None:
        self.weights = [0.0] * BUCKETS
        self.scale = 1.0
        """What one answer weighs now; growing it is the same as shrinking all others."""

    def add(self, tokens: int) -> None:
        self.weights[_bucket(tokens)] += self.scale
        self.scale /= FORGET
        if self.scale > 1e9:
            self.weights = [weight / self.scale for weight in self.weights]
            self.scale = 1.0

    def quantile_beyond(self, tokens: int, share: float) -> int | None:
        """Upper end of the bucket in which ``share`` of the answers longer than ``tokens`` have ended."""
        first = _bucket(tokens) if tokens else 0
        beyond = sum(self.weights[first:])
        if beyond < MIN_WEIGHT * self.scale:
            return None
        left, bucket = share * beyond, first
        while bucket < BUCKETS - 1 and left > self.weights[bucket]:
            left -= self.weights[bucket]
            bucket += 1
        return max(tokens + 1, _upper(bucket))


class LengthBook:
    """Lengths of answers by class.

    Args:
        assumed_tokens: length of an answer of a class that is not known yet.
        quantile: share of the answers that an estimate is to cover.
    """

    def __init__(self, assumed_tokens: int = ASSUMED_TOKENS, quantile: float = QUANTILE) -> None:
        self._assumed = assumed_tokens
        self._quantile = quantile
        self._classes: OrderedDict[Hashable, _Histogram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._classes)

    def adopt(self, assumed_tokens: int, quantile: float) -> None:
        """Other expectations from now on; see the class. What was learned stays."""
        self._assumed, self._quantile = assumed_tokens, quantile

    def on_answer(self, kind: Hashable, tokens: int) -> None:
        """An answer came to its end by itself.

        Args:
            kind: its class, such as pool label and route.
            tokens: its length. Those cut short by their client say nothing and are left out.
        """
        known = self._classes.get(kind)
        if known is None:
            known = self._classes[kind] = _Histogram()
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        else:
            self._classes.move_to_end(kind)
        known.add(max(1, tokens))

    def expected(self, kind: Hashable, bound: int, generated: int = 0) -> int:
        """Tokens that an answer will have in all.

        1. Enough answers of its class became longer than this one is now: what most of those had.
        2. Too few did: the assumption, or twice what it has, whichever is more.
        3. Never more than it may have.

        Args:
            kind: its class.
            bound: tokens that it may have at most.
            generated: tokens that it has.
        """
        known = self._classes.get(kind)
        found = None if known is None else known.quantile_beyond(generated, self._quantile)
        if found is None:
            found = max(self._assumed, 2 * generated)
        return min(found, bound)


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, max(0, ceil(PER_OCTAVE * log2(max(1, tokens)) - 1e-9)))


def _upper(bucket: int) -> int:
    return int(2.0 ** (bucket / PER_OCTAVE) + 1e-6)
