"""``GET /polykv/tps``: what every session experiences, as a stream of documents or as one.

A document is made of the published picture; no reader makes the proxy ask the engine, and none is waited
for. Whoever does not take a document within ``STALL_S`` has lost its place: at most what the sockets hold
waits for it until then. Streams of callers who see the same share a document: many readers cost hardly more
than one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import structlog
from aiohttp import web
from aiohttp_sse import sse_response

from polykv_proxy.api import views
from polykv_proxy.api.reply import flag, json_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp_sse import EventSourceResponse

    from polykv_proxy.api import shapes
    from polykv_proxy.core.types import Scope
    from polykv_proxy.fleet import Fleet

log = structlog.get_logger(__name__)

HEARTBEAT_S = 10.0
"""Seconds between comments, which keep a stream open whose documents are far apart."""

STALL_S = 10.0
"""Seconds that a reader may leave a document untaken."""

SHARED_S = 0.1
"""Age in seconds up to which a document serves another stream, or as long as the streams' interval."""


_STREAM = "text/event-stream"


class TpsApi:
    """The route.

    Args:
        fleet: the engines.
        sees: whose sessions a caller may see; None: everybody's.
        interval_s: seconds between two documents.
    """

    def __init__(
        self, fleet: Fleet, sees: Callable[[web.Request], Scope | None], *, interval_s: float
    ) -> None:
        self._fleet = fleet
        self._sees = sees
        self._interval_s = interval_s
        self._shared_s = min(interval_s, SHARED_S)
        self._made: dict[Scope | None, tuple[float, str]] = {}
        """When the last document for these eyes was made, and its text."""
        self._closing = asyncio.Event()
        self.readers = 0
        """Streams that are open now."""

    def routes(self) -> list[web.RouteDef]:
        """What the control application serves of it."""
        return [web.get("/polykv/tps", self.show, allow_head=False)]

    def close(self) -> None:
        """End all streams: the proxy stops, and would wait for them."""
        self._closing.set()

    async def show(self, request: web.Request) -> web.StreamResponse:
        """``GET /polykv/tps``: a stream for those who ask for one, else one document."""
        once = flag(request, "once")
        if not once and _accepts_stream(request.headers.get("Accept", "")):
            return await self._stream(request)
        return json_reply(self._document(request))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.readers += 1
        try:
            async with sse_response(request, sep="\n") as stream:
                stream.ping_interval = HEARTBEAT_S
                await self._feed(stream, request)
            return stream
        finally:
            self.readers -= 1

    async def _feed(self, stream: EventSourceResponse, request: web.Request) -> None:
        """Send documents until the reader leaves, falls behind, or the proxy stops."""
        try:
            while not self._closing.is_set():
                async with asyncio.timeout(STALL_S):
                    await stream.send(self._text(request))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._closing.wait()
        except TimeoutError:
            log.info("slow_reader_dropped", path=request.path)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            pass  # it left

    def _text(self, request: web.Request) -> str:
        """A document for a stream."""
        scope, now = self._sees(request), monotonic()
        self._made = {seen: made for seen, made in self._made.items() if now - made[0] < self._shared_s}
        if scope not in self._made:
            self._made[scope] = now, msgspec.json.encode(self._document(request)).decode()
        return self._made[scope][1]

    def _document(self, request: web.Request) -> shapes.Rates:
        now_ts = self._fleet.first.runtime.now_ts()
        return views.rates(self._fleet.planes, self._sees(request), monotonic(), now_ts)


def _accepts_stream(accept: str) -> bool:
    """Whether the one of streams is among the media types; case and parameters do not matter."""
    return any(kind.partition(";")[0].strip().lower() == _STREAM for kind in accept.split(","))
