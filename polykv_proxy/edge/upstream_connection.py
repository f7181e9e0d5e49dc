"""One connection to the engine: sends a request, finds the head of the answer, knows when to end.

The engine is cpp-httplib: one thread per connection, one write per SSE event, ``Keep-Alive: timeout=5,
max=100``, and a close at a moment of its own choosing.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

from polykv_proxy.edge.framing import LAST_CHUNK, Body, ChunkedBody, LengthBody, UntilCloseBody, chunk
from polykv_proxy.edge.parse import parse_response_head
from polykv_proxy.edge.upstream_response import UpstreamResponse
from polykv_proxy.errors import EngineGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.edge.exchange import BodySource
    from polykv_proxy.edge.head import ResponseHead
    from polykv_proxy.edge.tasks import TaskSet

HEAD_LIMIT_BYTES = 64 * 1024
"""Longest response head."""

DEFAULT_IDLE_S = 5.0
"""Keep-alive time of an engine that does not tell."""

UNCLAIMED_S = 60.0
"""An answer that nobody listens to for so long is given up, so that the engine's slot is free again."""

_IDLE_MARGIN_S = 1.0
_JOIN_BYTES = 64 * 1024
_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout=(\d{1,6})")
_KEEP_ALIVE_MAX = re.compile(rb"max=(\d{1,6})")


class StaleConnectionError(EngineGoneError):
    """A reused connection was closed while the request was on its way: nothing was worked on."""


class ConnectionOwner(Protocol):
    """Whoever keeps the connections."""

    tasks: TaskSet

    def release(self, connection: UpstreamConnection) -> None:
        """The connection may carry another request."""

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is gone."""


@lru_cache(maxsize=64)
def _keep_alive(value: bytes) -> tuple[float, int | None]:
    """Seconds a connection may idle, with a margin, and how many requests it carries."""
    timeout = _KEEP_ALIVE_TIMEOUT.search(value)
    most = _KEEP_ALIVE_MAX.search(value)
    idle_s = float(timeout[1]) if timeout else DEFAULT_IDLE_S
    return max(idle_s - _IDLE_MARGIN_S, idle_s / 2), int(most[1]) if most else None


class UpstreamConnection(asyncio.Protocol):
    """A connection to the engine that carries one request at a time.

    Attributes:
        reusable: nothing happened that makes another request unsafe.
        served: complete answers so far.
        idle_until: monotonic seconds after which it must not be used again.
        feed: takes the bytes of the body that is arriving.
    """

    __slots__ = (
        "_answered_at",
        "_buffer",
        "_drained",
        "_keep_s",
        "_lost",
        "_method",
        "_on_interim",
        "_owner",
        "_response",
        "_sent_at",
        "_upload",
        "_waiter",
        "feed",
        "idle_until",
        "reusable",
        "served",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._buffer = b""
        self._method = ""
        self._on_interim: Callable[[ResponseHead], object] | None = None
        self._waiter: asyncio.Future[UpstreamResponse] | None = None
        self._response: UpstreamResponse | None = None
        self.feed: Callable[[bytes], None] | None = None
        self._upload: asyncio.Task[None] | None = None
        self._drained: asyncio.Event | None = None
        self._sent_at = 0.0
        self._answered_at = 0.0
        self._keep_s = DEFAULT_IDLE_S
        self._lost = False
        self.reusable = True
        self.served = 0
        self.idle_until = 0.0

    async def request(
        self,
        method: str,
        head: bytes,
        body: bytes | BodySource,
        on_interim: Callable[[ResponseHead], object] | None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of its answer.

        Args:
            method: decides whether the answer has a body.
            head: serialised request head; frames the body as ``Content-Length`` if its length is known.
            body: all of it, or a source that is read while the answer is awaited.
            on_interim: gets heads with a 1xx status.

        Raises:
            StaleConnectionError: it was closed before the request reached it.
            EngineGoneError: the connection broke, or the answer is not HTTP.
        """
        self._method = method
        self._on_interim = on_interim
        self._response = self.feed = None
        self._waiter = asyncio.get_running_loop().create_future()
        self._sent_at = monotonic()
        if not isinstance(body, bytes):
            self.transport.write(head)
            self._upload = self._owner.tasks.spawn(self._send(body))
        elif len(body) < _JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        try:
            return await self._waiter
        except BaseException:
            self.abort()
            raise

    async def _send(self, source: BodySource) -> None:
        """Pass a body on while it arrives; the answer may come, and end, before this does."""
        chunked = source.content_length is None
        try:
            while piece := await source.read_chunk():
                if self._lost:
                    return
                self.transport.write(chunk(piece) if chunked else piece)
                if self._drained is not None:
                    await self._drained.wait()
            if chunked:
                self.transport.write(LAST_CHUNK)
            self._upload = None
        except Exception as exc:  # noqa: BLE001 - handed to the one who awaits the answer
            self.abort()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(exc)

    # -- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Body bytes in the common case; else a head; else nothing that may come here."""
        if self.feed is not None:
            self.feed(data)
        elif self._waiter is not None and not self._waiter.done():
            self._take_head(self._buffer + data if self._buffer else data)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self._lost = True
        self.reusable = False
        self._owner.forget(self)
        self._stop_upload()
        self.resume_writing()
        if self._response is not None:
            gone = EngineGoneError(f"the engine's connection broke: {exc}") if exc is not None else None
            self._response.lost(gone)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._no_answer())

    def pause_writing(self) -> None:
        """The engine takes an upload too slowly."""
        self._drained = asyncio.Event()

    def resume_writing(self) -> None:
        """The engine caught up."""
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    # -- heads -------------------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> None:
        """Find the final head in what arrived; interim ones may precede it."""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._buffer = data
                if len(data) > HEAD_LIMIT_BYTES:
                    self._refuse(EngineGoneError("the engine's response head is too large"))
                return
            try:
                head = parse_response_head(data[:end])
            except EngineGoneError as exc:
                self._refuse(exc)
                return
            data = data[end:]
            if not head.interim:
                break
            if self._on_interim is not None:
                self._on_interim(head)
        self._buffer = b""
        self._begin(head, data)

    def _begin(self, head: ResponseHead, rest: bytes) -> None:
        self._answered_at = monotonic()
        response = self._response = UpstreamResponse(self, head, self._framing(head))
        self.feed = response.feed
        value = head.get(b"keep-alive")
        self._keep_s, most = _keep_alive(value) if value is not None else (DEFAULT_IDLE_S - 1.0, None)
        if not head.keep_alive or (most is not None and self.served + 2 >= most):
            self.reusable = False
        if response.body.done and (rest or head.chunked):
            # cpp-httplib frames an empty 204 as chunked and sends the last chunk: those bytes belong to
            # no message, now or a moment later, so this connection ends with this answer.
            self.reusable = False
        elif rest:
            response.feed(rest)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    def _framing(self, head: ResponseHead) -> Body:
        """RFC 9112 section 6.3."""
        if head.bodiless(self._method):
            return Body()
        if head.chunked:
            return ChunkedBody()
        return UntilCloseBody() if head.content_length is None else LengthBody(head.content_length)

    def _refuse(self, error: EngineGoneError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.abort()

    def _no_answer(self) -> EngineGoneError:
        """Tell a lost race from a dead engine.

        An idle timeout that the engine began before our request ends within that timeout. A connection
        that dies later, or after a first byte, dies under the request: repeating it could do harm twice.
        """
        age_s = monotonic() - self._sent_at
        if self.served and not self._buffer and age_s < self._keep_s + _IDLE_MARGIN_S:
            return StaleConnectionError("the engine closed an idle connection")
        return EngineGoneError("the engine closed its connection without an answer")

    # -- for answers and the owner -----------------------------------------------------------------------

    def usable(self, now: float) -> bool:
        """Whether a request may be sent over it."""
        return self.reusable and now < self.idle_until and not self.transport.is_closing()

    def unclaimed(self, now: float) -> bool:
        """Whether it carries an answer that nobody has listened to for long: a caller forgot it."""
        response = self._response
        return response is not None and not response.claimed and now - self._answered_at > UNCLAIMED_S

    def answered(self) -> None:
        """The answer is complete: back to the owner, or the end."""
        self.served += 1
        self._waiter = None
        if self._upload is not None or self._lost or self.transport.get_write_buffer_size():
            self.reusable = False  # the engine answered before it had read the request
        self._response = self.feed = None
        if not self.reusable:
            self.abort()
            return
        self.idle_until = monotonic() + self._keep_s
        self._owner.release(self)

    def abort(self) -> None:
        """Close at once."""
        self.reusable = False
        self._owner.forget(self)
        self._stop_upload()
        if not self._lost:
            self.transport.abort()

    def pause_reading(self) -> None:
        """Stop reading."""
        if not self._lost and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if not self._lost and not self.transport.is_closing():
            self.transport.resume_reading()

    def _stop_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None and upload is not asyncio.current_task():
            upload.cancel()
