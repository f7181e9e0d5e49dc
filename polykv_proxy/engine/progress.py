"""What a person sees of something that takes long: one moving line on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_SPARSE_S = 30.0
"""Seconds between lines where nobody watches, in a CI log or a unit's journal."""
_TERMINAL_S = 0.2
"""Seconds between redraws of the moving line."""
_MIN_DONE_FOR_ESTIMATE = 5


class Progress:
    """Writes to one stream.

    Args:
        out: the stream; None: standard error.
        now: a clock in seconds.
        estimates: whether steps take about the same time each, so that it can say how long the rest takes.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        estimates: bool = True,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._now = now
        self._estimates = estimates
        self._moving = self._out.isatty()
        self._label = ""
        self._began_s = 0.0
        self._shown_s: float | None = None
        self._width = 0

    def note(self, text: str) -> None:
        """One finished line."""
        self._clear()
        self._out.write(f"{text}\n")
        self._out.flush()

    def begin(self, label: str) -> None:
        """Start counting the steps of ``label``."""
        self._label = label
        self._began_s = self._now()
        self._shown_s = None
        self.note(label)

    def count(self, done: int, total: int) -> None:
        """``done`` of ``total`` steps are finished."""
        now = self._now()
        pause_s = _TERMINAL_S if self._moving else _SPARSE_S
        since_s = now - (self._began_s if self._shown_s is None else self._shown_s)
        if since_s < pause_s and done < total:
            return
        self._shown_s = now
        elapsed_s = now - self._began_s
        text = f"[{done}/{total}] {_minutes(elapsed_s)} elapsed"
        if self._estimates and _MIN_DONE_FOR_ESTIMATE <= done < total:
            text += f", about {_minutes(elapsed_s * (total - done) / done)} left"
        if self._moving:
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
            self._out.flush()
        else:
            self.note(text)

    def end(self) -> None:
        """The counted steps are over; leave the last line standing."""
        if self._moving and self._width:
            self._out.write("\n")
            self._out.flush()
            self._width = 0

    def _clear(self) -> None:
        if self._moving and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60:02d}s"
