"""Work on files that may never end: a disk that hangs costs whoever waits for it a bounded time, once.

Rule 1: each piece of work has a thread of its own, which nobody waits for at the end of the process: the
event loop's threads are few, and its shutdown waits for all of them.
Rule 2: work that made no progress for ``patience_s`` makes the disk stuck. From then on nobody waits for any
work, until all that is overdue came to its end after all.
Rule 3: work that was begun goes on whoever waits for it, or does not any more.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog

from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger(__name__)

SLOWEST = 20e6
"""Bytes a second that a disk which works writes or reads at least."""

PATIENCE_S = 20.0
"""Seconds that a disk may take, if nobody says so."""

T = TypeVar("T")
P = ParamSpec("P")

_here = threading.local()


class StuckError(UnavailableError):
    """The disk does not answer; serving goes on without."""

    code = "slot_file"


class _Work:
    """One piece of it."""

    __slots__ = ("moved_at",)

    def __init__(self) -> None:
        self.moved_at = monotonic()


def progress() -> None:
    """Called by work between its steps: it takes long, and is not stuck (rule 2)."""
    work: _Work | None = getattr(_here, "work", None)
    if work is not None:
        work.moved_at = monotonic()


class Disk:
    """Where the files of one engine are.

    Args:
        patience_s: seconds without progress after which it is stuck.
        on_change: told when it is stuck, and when it is not any more.
    """

    def __init__(self, patience_s: float = PATIENCE_S, on_change: Callable[[], None] = lambda: None) -> None:
        self._patience_s = patience_s
        self._on_change = on_change
        self._overdue: set[_Work] = set()
        self._stuck = False
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def reason(self) -> str | None:
        """Why nobody waits for it; None: it answers."""
        if not self._stuck:
            return None
        return f"the disk did not answer within {self._patience_s:g} s"

    async def run(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Have it done, and wait for it.

        Raises:
            StuckError: the disk is, or came to be.
        """
        self._require()
        return await self.in_time(self.begin(0, call, *args, **named))

    async def in_time(self, going: asyncio.Future[T]) -> T:
        """The outcome of what was begun.

        Raises:
            StuckError: there is none, and the disk is stuck; it goes on (rule 3).
        """
        while not going.done():
            self._require()
            woken = asyncio.get_running_loop().create_future()

            def wake(_: object, woken: asyncio.Future[None] = woken) -> None:
                if not woken.done():
                    woken.set_result(None)

            going.add_done_callback(wake)
            self._waiting.add(woken)
            try:
                await woken
            finally:
                going.remove_done_callback(wake)
                self._waiting.discard(woken)
        return await going

    def _require(self) -> None:
        if (reason := self.reason) is not None:
            raise StuckError(reason)

    def begin(
        self, n_bytes: int, call: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> asyncio.Future[T]:
        """Have it done.

        Args:
            n_bytes: that it moves in one step, at most.
            call: what is to be done; it may tell its ``progress``.
            args: its arguments.
            named: and those with names.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        outcome.add_done_callback(_seen)
        work, bound = _Work(), self._patience_s + n_bytes / SLOWEST
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            left = work.moved_at + bound - monotonic()
            if left > 0:
                timer = loop.call_later(left, look)
            elif not outcome.done():
                self._is_late(work)

        timer = loop.call_later(bound, look)

        def ended(result: T | None, error: BaseException | None) -> None:
            timer.cancel()
            self._is_over(work)
            if outcome.done():
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            _here.work = work
            result, error = None, None
            try:
                result = call(*args, **named)
            except BaseException as raised:  # noqa: BLE001 - it is raised where it is waited for
                error = raised
            with suppress(RuntimeError):  # the loop is closed: the proxy has stopped
                loop.call_soon_threadsafe(ended, result, error)

        threading.Thread(target=run, name="polykv-disk", daemon=True).start()
        return outcome

    def _is_late(self, work: _Work) -> None:
        self._overdue.add(work)
        if not self._stuck:
            self._stuck = True
            for woken in self._waiting:
                if not woken.done():
                    woken.set_result(None)
            log.error("disk_stuck", reason=self.reason)
            self._on_change()

    def _is_over(self, work: _Work) -> None:
        self._overdue.discard(work)
        if self._stuck and not self._overdue:
            self._stuck = False
            log.warning("disk_answers_again")
            self._on_change()


def _seen(outcome: asyncio.Future[T]) -> None:
    """Nobody may be waiting for it any more."""
    if not outcome.cancelled():
        outcome.exception()
