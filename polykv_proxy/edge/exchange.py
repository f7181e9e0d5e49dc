"""One request and its answer, as a handler sees them.

A handler reads the body if it wants it, answers exactly once (``respond``, a stream, or a relay), and may
rely on being cancelled as soon as its client is gone, wherever it waits.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from polykv_proxy.edge.framing import LAST_CHUNK, chunk
from polykv_proxy.edge.head import BodyTooLargeError, field_lines, status_line
from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.edge.client_connection import ClientConnection
    from polykv_proxy.edge.framing import Body
    from polykv_proxy.edge.head import RequestHead, ResponseHead
    from polykv_proxy.errors import PolyKVError

BODY_BUFFER_BYTES = 256 * 1024
"""Body bytes taken in ahead of a handler that does not read; beyond it the socket is not read."""

_NO_CONTENT = frozenset({204, 304})


class BodySource(Protocol):
    """A body that is passed on while it arrives."""

    @property
    def content_length(self) -> int | None:
        """Bytes in all, or None when only the end will tell."""

    def take_whole(self) -> bytes | None:
        """All of it, if it is here already and nothing was read yet; it counts as read then."""

    async def read_chunk(self) -> bytes:
        """The next piece; empty at the end."""


class RequestBody:
    """The body of one request: buffered up to a bound, handed out as it comes."""

    __slots__ = (
        "_connection",
        "_error",
        "_expected",
        "_framing",
        "_pieces",
        "_room",
        "_size",
        "_touched",
        "_waiter",
        "content_length",
    )

    def __init__(self, connection: ClientConnection, head: RequestHead, framing: Body) -> None:
        self._connection = connection
        self._framing = framing
        if not framing.done:
            framing.sink = self._take
        self._pieces: list[bytes] = []
        self._size = 0
        self._room = BODY_BUFFER_BYTES
        self._touched = False  # a piece was handed out
        self._waiter: asyncio.Future[None] | None = None
        self._error: PolyKVError | None = None
        self._expected = head.expects_continue
        self.content_length = None if head.chunked else head.content_length or 0

    @property
    def complete(self) -> bool:
        """Whether the last byte has arrived (it may still wait to be read)."""
        return self._framing.done

    @property
    def failed(self) -> bool:
        """Whether the rest of the body is lost: what follows on the connection has no meaning."""
        return self._error is not None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for the client to send."""
        return self._waiter is not None

    async def read(self, limit: int) -> bytes:
        """The whole body, at once.

        Args:
            limit: bytes beyond which it is refused, before they are read where the client says so.

        Raises:
            BodyTooLargeError: it is longer.
            MalformedRequestError: its framing is broken, or it stalled.
            UnavailableError: the proxy stops before it came.
        """
        if self.content_length is not None and self.content_length > limit:
            raise BodyTooLargeError(f"the request body is larger than {limit} bytes")
        self._room = max(limit, BODY_BUFFER_BYTES)
        while not self._framing.done and self._size <= limit:
            await self._more()
        if self._size > limit:
            raise BodyTooLargeError(f"the request body is larger than {limit} bytes")
        return self._take_pieces()

    def take_whole(self) -> bytes | None:
        """The whole body, if it has arrived and nothing of it was read."""
        return self._take_pieces() if self._framing.done and not self._touched else None

    async def read_chunk(self) -> bytes:
        """The next piece of payload, as it arrived; empty at the end.

        Raises:
            MalformedRequestError: the framing is broken, or the body stalled.
            UnavailableError: the proxy stops before it came.
        """
        while not self._pieces:
            if self._framing.done:
                return b""
            await self._more()
        return self._take_pieces()

    def _take_pieces(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._size = 0
        self._touched = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _more(self) -> None:
        """Wait until something arrived."""
        if self._error is not None:
            raise self._error
        if self._expected:
            self._expected = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # RFC 9110 section 10.1.1
        self._connection.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take(self, payload: bytes) -> None:
        self._pieces.append(payload)
        self._size += len(payload)
        self._expected = False  # a client that sends does not wait for our leave

    def feed(self, data: bytes) -> int:
        """For the connection: take raw bytes; returns how many were of this body.

        Raises:
            FramingError: the framing is broken.
        """
        used = self._framing.feed(data)
        if self._framing.done:
            self._framing.sink = None  # no cycle is left for the garbage collector
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._size > self._room and not self._framing.done:
            self._connection.pause_reading()
        return used

    def fail(self, error: PolyKVError) -> None:
        """For the connection: whoever reads gets ``error``."""
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


class Exchange:
    """One request and its answer.

    Attributes:
        head: the request head.
        body: the request body, a ``BodySource`` for uploads that are passed on.
        arrived_at: when the head was complete, monotonic seconds (``time.monotonic``; uvloop's own clock
            is the same one, cut to milliseconds).
        connection: the client's connection; for the relay, not for handlers.
        responded: the answer is complete, or given up.
        started: the first byte of the answer's head was written.
        closing: the connection ends with this answer.
        chunked: an open stream is framed in chunks (otherwise by the close of the connection).
        delimited: the end of the answer is visible without closing the connection.
        write_stall_s: seconds after which a client that takes no byte counts as gone; None: as the edge's
            limits say.
    """

    __slots__ = (
        "_gone",
        "arrived_at",
        "body",
        "chunked",
        "closing",
        "connection",
        "delimited",
        "head",
        "is_gone",
        "responded",
        "started",
        "write_stall_s",
    )

    def __init__(self, connection: ClientConnection, head: RequestHead, body: RequestBody) -> None:
        self.connection = connection
        self.head = head
        self.body = body
        self.arrived_at = monotonic()
        self.started = False
        self.responded = False
        self.closing = False
        self.chunked = False
        self.delimited = True
        self.is_gone = False
        self.write_stall_s: float | None = None
        self._gone: asyncio.Event | None = None

    @property
    def peer(self) -> str | None:
        """The client's IP address; None on a Unix socket."""
        return self.connection.peer

    @property
    def cut_off(self) -> bool:
        """Whether it is cancelled because the proxy ends, and not because its client left."""
        return self.connection.cut_off and not self.is_gone

    @property
    def client_gone(self) -> asyncio.Event:
        """Set when the client left before its answer was complete (the handler is cancelled as well)."""
        if self._gone is None:
            self._gone = asyncio.Event()
            if self.is_gone:
                self._gone.set()
        return self._gone

    async def read_body(self, limit: int) -> bytes:
        """The whole request body; see ``RequestBody.read``."""
        return await self.body.read(limit)

    # -- answers the proxy makes itself ---------------------------------------------------------------

    async def respond(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> None:
        """Answer in one piece; ``Content-Length`` and ``Connection`` are added.

        Raises:
            RuntimeError: an answer was begun already.
        """
        self.respond_nowait(status, headers, body)
        if self.connection.write_paused:
            await self.connection.drain()

    def respond_nowait(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> None:
        """``respond`` without waiting for a slow client to take a large body."""
        parts = [self._begin(status, headers, delimited=True)]
        if status not in _NO_CONTENT:  # RFC 9110 section 8.6
            parts.append(b"Content-Length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        if self.head.method != "HEAD" and status not in _NO_CONTENT:
            parts.append(body)
        self.connection.write(b"".join(parts))
        self.finish()

    async def respond_error(self, error: PolyKVError) -> None:
        """Answer with an error in the edge's form; ``Retry-After`` comes with an ``UnavailableError``."""
        self.respond_error_nowait(error)

    def respond_error_nowait(self, error: PolyKVError) -> None:
        """See ``respond_error``."""
        headers = [(b"Content-Type", b"application/json; charset=utf-8")]
        if isinstance(error, UnavailableError):
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        self.respond_nowait(error.status, headers, self.connection.render_error(self.head, error))

    async def open_stream(self, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Begin an answer of unknown length; its head leaves at once.

        Chunked for HTTP/1.1; HTTP/1.0 knows no chunks, so there the close of the connection is the end.

        Raises:
            RuntimeError: an answer was begun already.
        """
        self.chunked = not self.head.http_1_0
        head = self._begin(status, headers, delimited=self.chunked)
        self.connection.write(head + (b"Transfer-Encoding: chunked\r\n\r\n" if self.chunked else b"\r\n"))

    async def write(self, data: bytes) -> None:
        """Send a piece of the open stream; waits while the client reads too slowly."""
        if self.head.method == "HEAD" or self.responded:
            return
        self.connection.write(chunk(data) if self.chunked else data)
        if self.connection.write_paused:
            await self.connection.drain()

    async def end_stream(self) -> None:
        """End the open stream properly."""
        if self.responded:
            return
        if self.chunked and self.head.method != "HEAD":
            self.connection.write(LAST_CHUNK)
        self.finish()

    def interim(self, head: ResponseHead) -> None:
        """Forward an interim response of the engine (RFC 9110 section 15.2), 100 excepted: ours to send."""
        if head.status == 100 or self.head.http_1_0 or self.started:
            return
        self.connection.write(
            status_line(head.status, head.reason) + field_lines(head.end_to_end()) + b"\r\n"
        )

    def abort(self) -> None:
        """Give the answer up so that the client sees a broken transfer, never a complete one."""
        if not self.responded:
            self.responded = True
            self.closing = True
            # A body that the close delimits looks complete after an orderly close, so it gets a reset.
            self.connection.break_off(orderly=self.delimited)

    # -- for the relay and the connection ----------------------------------------------------------------

    def start(self, *, delimited: bool) -> bytes:
        """Mark the answer as begun; returns its ``Connection`` field line, where one is needed.

        Args:
            delimited: the body's end is visible without closing the connection.
        """
        if self.started:
            raise RuntimeError("this exchange has been answered already")
        self.started = True
        self.delimited = delimited
        # A body that is still arriving would have to be read to its end before the next request; the
        # client may also hold it back for a 100 that never comes (RFC 9112 section 9.3).
        self.closing = not (
            delimited and self.head.keep_alive and self.body.complete and not self.connection.draining
        )
        if self.closing:
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, delimited: bool) -> bytes:
        fields = field_lines(headers)
        return status_line(status) + fields + self.start(delimited=delimited)

    def finish(self) -> None:
        """The last byte of the answer was written."""
        self.responded = True

    def mark_gone(self) -> None:
        """The client left."""
        self.is_gone = True
        if self._gone is not None:
            self._gone.set()
