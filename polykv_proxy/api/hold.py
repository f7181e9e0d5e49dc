"""Waiting on a client's behalf: silent at first, then with keepalive comments where it is a stream.

A refusal within the grace time is a real status. Once a stream's head went out the status is spent, and
a refusal becomes the last event of the stream, in the form of its API.

Only waits in line use up the time that a request may wait, however often it has to: neither the upload of its
body does nor what is done for it once it has a slot.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.api.families import Family
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import Headers
    from polykv_proxy.errors import PolyKVError
    from polykv_proxy.settings import QueueSettings

T = TypeVar("T")

KEEPALIVE = b":\n\n"
"""A comment, which parsers of event streams skip; the engine's own pings look the same."""

STREAM_HEADERS: Headers = [
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
]


class Hold:
    """One request's patience.

    Args:
        exchange: the request.
        family: its API.
        stream: whether its answer is a stream, so that comments can be sent.
        settings: how long.
        expired: makes the error for waits in line that took too long together.
    """

    def __init__(
        self,
        exchange: Exchange,
        family: Family,
        settings: QueueSettings,
        *,
        stream: bool,
        expired: Callable[[], Exception],
    ) -> None:
        self.opened = False
        """Whether the stream's head went out."""
        self._exchange = exchange
        self._family = family
        self._stream = stream
        self._grace_at = monotonic() + settings.hold_grace_s
        self._left_s = settings.max_wait_s
        self._keepalive_s = settings.keepalive_s
        self._expired = expired

    async def until(self, wait: Callable[[float], Awaitable[T | None]]) -> T:
        """Wait until ``wait`` yields something: for what has an end of its own.

        Args:
            wait: waits up to so many seconds; None when there is nothing yet.
        """
        return await self._wait(wait, inf)

    async def in_line(self, wait: Callable[[float], Awaitable[T | None]]) -> T:
        """Wait for what others have, for no longer than is left of the request's time.

        Args:
            wait: see ``until``.

        Raises:
            PolyKVError: what ``expired`` makes; the time is used up.
        """
        since = monotonic()
        try:
            return await self._wait(wait, since + self._left_s)
        finally:
            self._left_s -= monotonic() - since

    async def _wait(self, wait: Callable[[float], Awaitable[T | None]], expires_at: float) -> T:
        while True:
            now = monotonic()
            pause = (
                self._keepalive_s if self.opened else (self._grace_at if self._stream else now + 60.0) - now
            )
            got = await wait(max(0.0, min(pause, expires_at - now)))
            if got is not None:
                return got
            now = monotonic()
            if now >= expires_at:
                raise self._expired()
            if self.opened:
                await self._exchange.write(KEEPALIVE)
            elif self._stream and now >= self._grace_at:
                await self._exchange.open_stream(200, STREAM_HEADERS)
                await self._exchange.write(KEEPALIVE)
                self.opened = True

    async def fail(self, error: PolyKVError) -> None:
        """End an opened stream with an error event."""
        await self.fail_with(error.members)

    async def fail_with(self, members: dict[str, object]) -> None:
        """End an opened stream with an error event of these members."""
        await self._exchange.write(self._family.error_event(members))
        await self._exchange.end_stream()


def done(going: asyncio.Future[T]) -> Callable[[float], Awaitable[tuple[T] | None]]:
    """A wait for an outcome: None while there is none."""

    async def wait(timeout_s: float) -> tuple[T] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return (await asyncio.shield(going),)
        except TimeoutError:
            return None

    return wait
