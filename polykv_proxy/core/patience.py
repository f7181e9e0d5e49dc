"""How long it pays to wait for another request's prefill instead of computing the same.

Rule 1: nobody waits longer than its own prefill would take.
Rule 2: that is judged by what the engine was seen to do, not by what it should be able to; while nothing was
seen, nothing is judged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """A prefill as it was seen to advance."""

    _first: tuple[float, int] | None = None
    _last: tuple[float, int] | None = None

    def seen(self, tokens: int, now: float) -> bool:
        """Note how far it is; returns whether it advanced, as it did with the first look.

        Args:
            tokens: tokens that it has computed.
            now: monotonic seconds.
        """
        if self._first is None or self._last is None:
            self._first = self._last = (now, tokens)
            return True
        if tokens <= self._last[1]:
            return False
        self._last = (now, tokens)
        return True

    @property
    def tokens_per_s(self) -> float | None:
        """The speed between the first look and the last advance; None while it was not seen to advance."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def is_worth_waiting(waited_s: float, own_tokens: int, tokens_per_s: float | None) -> bool:
    """Whether somebody should wait on (rule 1).

    Args:
        waited_s: how long it did already.
        own_tokens: prompt tokens that it would have to compute itself.
        tokens_per_s: the speed at which prompts are computed; None if that is unknown.
    """
    return tokens_per_s is None or waited_s * tokens_per_s < own_tokens
