"""One client connection: one exchange after another, and the deadlines of each.

Rule 1: a client that leaves cancels its handler at once, whether that waits for a place, for the engine's
first byte or for the client itself. Therefore a connection is read all the time while its request is at
work, and where flow control forbids reading, the kernel is asked about a hang-up instead.
Rule 2: nothing that a client sends is kept without a bound, nothing it may do takes for ever.
Rule 3: requests of one connection are answered in order; the next one starts when its handler ended.

A client that shuts down only its sending half counts as gone, as with most proxies: a half-closed
connection cannot be told from an abandoned one before something is written to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, cast

from polykv_proxy.edge.exchange import Exchange, RequestBody
from polykv_proxy.edge.framing import Body, ChunkedBody, FramingError, LengthBody
from polykv_proxy.edge.head import HEAD_BYTES, MalformedRequestError, status_line
from polykv_proxy.edge.parse import parse_request_head
from polykv_proxy.errors import PolyKVError, StoppingError

if TYPE_CHECKING:
    from polykv_proxy.edge.head import RequestHead
    from polykv_proxy.edge.server import Edge
    from polykv_proxy.edge.upstream_response import UpstreamResponse

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client connection may take."""

    head_bytes: int = HEAD_BYTES
    """Longest request head; beyond it 431."""
    pipeline_bytes: int = 64 * 1024
    """Bytes of later requests kept while one is at work."""
    write_buffer_bytes: int = 64 * 1024
    """Unsent bytes from which on the engine is no longer read for this client."""
    head_s: float = 20.0
    """From the first to the last byte of a head; then 408."""
    idle_s: float = 120.0
    """Without a byte between two requests, or before the first. Longer than what common clients keep, so
    that they close first."""
    body_stall_s: float = 60.0
    """Without a byte of a body that is waited for; then 408."""
    write_stall_s: float = 300.0
    """Without a byte taken by the client while some wait for it; then it counts as gone."""
    linger_s: float = 2.0
    """For the client to take a last answer while it still sends (RFC 9112 section 9.6)."""


class ClientConnection(asyncio.Protocol):
    """One connection of one client."""

    __slots__ = (
        "_buffer",
        "_edge",
        "_exchange",
        "_limits",
        "_linger_until",
        "_lost",
        "_reading_paused",
        "_since",
        "_task",
        "_unsent",
        "_write_waiter",
        "peer",
        "source",
        "transport",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._limits = edge.limits
        self._buffer = b""
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = False
        self._reading_paused = False
        self._since = monotonic()  # of the present state: waiting for a head, or the last byte read
        self._linger_until: float | None = None
        self._unsent = (0, 0.0)  # bytes that waited when write_paused was last looked at, and since when
        self._write_waiter: asyncio.Future[None] | None = None
        self.write_paused = False
        self.source: UpstreamResponse | None = None
        self.peer: str | None = None

    # -- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the edge."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else None
        self._edge.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Feed the body that is arriving, or start a request, or keep bytes for later."""
        if self._linger_until is not None:
            return
        exchange = self._exchange
        if exchange is None:
            self._next_request(self._buffer + data if self._buffer else data)
            return
        self._since = monotonic()
        body = exchange.body
        if not body.complete:
            if body.failed:
                return
            data = self._feed(body, data)
        if data:
            self._buffer += data
            if len(self._buffer) > self._limits.pipeline_bytes:
                self.pause_reading()

    def eof_received(self) -> None:
        """The client closed its side; with an answer under way it counts as gone."""
        if self._client_left():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason changes nothing
        """The connection is gone, by whoever's doing."""
        self._lost = True
        self._edge.connections.discard(self)
        self.resume_writing()
        self._client_left()

    def pause_writing(self) -> None:
        """The client reads too slowly: hold its engine connection back."""
        self.write_paused = True
        self._unsent = (self.transport.get_write_buffer_size(), monotonic())
        if self.source is not None:
            self.source.pause_reading()

    def resume_writing(self) -> None:
        """The client caught up (or is gone, and nobody must wait for it)."""
        self.write_paused = False
        if self.source is not None:
            self.source.resume_reading()
        if self._write_waiter is not None and not self._write_waiter.done():
            self._write_waiter.set_result(None)

    # -- for exchanges and the relay ---------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether the edge accepts no further requests."""
        return self._edge.draining

    @property
    def cut_off(self) -> bool:
        """Whether what still runs is cancelled because the edge ends."""
        return self._edge.cutting_off

    def render_error(self, head: RequestHead | None, error: PolyKVError) -> bytes:
        """The body of an error answer."""
        return self._edge.render_error(head, error)

    def write(self, data: bytes) -> None:
        """Send bytes as they are; dropped when the client is gone."""
        if not self._lost:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        while self.write_paused and not self._lost:
            self._write_waiter = asyncio.get_running_loop().create_future()
            await self._write_waiter

    def splice(self, source: UpstreamResponse | None) -> None:
        """Tie an engine's answer to this client's speed, or (None) untie it."""
        self.source = source
        if source is not None and self.write_paused:
            source.pause_reading()

    def pause_reading(self) -> None:
        """Stop reading; from here on the sweep asks the kernel whether the client hung up."""
        if not self._reading_paused and not self._lost:
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again; from here on the client is expected to send."""
        self._since = monotonic()
        if self._reading_paused and not self._lost:
            self._reading_paused = False
            self.transport.resume_reading()

    def break_off(self, *, orderly: bool) -> None:
        """End the connection in the middle of an answer, with a reset unless ``orderly``."""
        if self._lost:
            return
        if orderly:
            self.transport.close()
            return
        with contextlib.suppress(OSError, AttributeError):
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )
        self.transport.abort()

    # -- one request after another -----------------------------------------------------------------------

    def _next_request(self, data: bytes) -> None:
        """Start a request if its head is complete, else keep what there is of it."""
        if data[:1] in b"\r\n":
            data = data.lstrip(b"\r\n")  # empty lines before a request are ignored (RFC 9112 section 2.2)
        end = data.find(b"\r\n\r\n", 0, self._limits.head_bytes)
        if end < 0:
            self._keep_partial(data)
            return
        end += 4
        try:
            head = parse_request_head(data[:end])
            body = RequestBody(self, head, _framing(head))
            self._buffer = data[end + body.feed(data[end:]) :] if end < len(data) else b""
        except MalformedRequestError as exc:
            self._refuse(exc)
            return
        except FramingError as exc:
            self._refuse(MalformedRequestError(str(exc)))
            return
        exchange = self._exchange = Exchange(self, head, body)
        self._since = exchange.arrived_at
        self._task = self._edge.tasks.spawn(self._run(exchange))

    def _keep_partial(self, data: bytes) -> None:
        if len(data) >= self._limits.head_bytes:
            error = MalformedRequestError("the request head is too large", status=431, code="head_too_large")
            self._refuse(error)
        elif data and (not data[:1].isalpha() or b"\n\n" in data):
            # Neither can become a request: no method starts like this, lines end in CRLF.
            self._refuse(MalformedRequestError("this is not an HTTP/1.1 request"))
        else:
            if data and not self._buffer:
                self._since = monotonic()
            self._buffer = data

    def _feed(self, body: RequestBody, data: bytes) -> bytes:
        """Feed a body that is arriving; returns what is left for later requests."""
        try:
            return data[body.feed(data) :]
        except FramingError as exc:
            body.fail(MalformedRequestError(str(exc)))
            return b""

    async def _run(self, exchange: Exchange) -> None:
        """Run the handler and see to it that every exchange ends in an answer or a broken connection."""
        try:
            await self._edge.handler(exchange)
            if not exchange.started:
                raise RuntimeError("the handler ended without an answer")  # noqa: TRY301 - reported below
        except asyncio.CancelledError:
            if not exchange.started and not exchange.is_gone:
                exchange.respond_error_nowait(StoppingError())
            raise
        except PolyKVError as exc:
            if not exchange.started:
                exchange.respond_error_nowait(exc)
        except Exception as exc:  # noqa: BLE001 - the boundary: a bug of one request must stay its own
            self._edge.report(exchange, exc)
            if not exchange.started:
                exchange.respond_error_nowait(PolyKVError("the proxy failed on this request"))
        finally:
            self._finished(exchange)

    def _finished(self, exchange: Exchange) -> None:
        """The handler ended: break off what it left open, else go on with the next request."""
        self._exchange = self._task = None
        exchange.abort()  # no effect after a complete answer
        if self._lost or self.transport.is_closing():
            return
        if exchange.closing or self._edge.draining:
            self._close_gently(unread=not exchange.body.complete)
            return
        self.resume_reading()
        if self._buffer:
            self._next_request(self._buffer)

    def _refuse(self, error: MalformedRequestError) -> None:
        """Answer bytes that are no request, and close: where the next one would start is unknown."""
        body = self.render_error(None, error)
        self.write(
            status_line(error.status) + b"Content-Type: application/json; charset=utf-8\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self._close_gently(unread=True)

    def _close_gently(self, *, unread: bool) -> None:
        """Close; with bytes ``unread`` let the client take the answer first.

        Closing a socket that still receives makes the kernel send a reset, which may overtake the
        answer (RFC 9112 section 9.6). So: end our half, discard what comes, close on the client's end.
        """
        if not unread and not self._buffer:
            self.transport.close()
            return
        self._buffer = b""
        self._linger_until = monotonic() + self._limits.linger_s
        self.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _client_left(self) -> bool:
        """Cancel the exchange that is under way; returns whether there was one."""
        exchange = self._exchange
        if exchange is None or exchange.responded or exchange.is_gone:
            return False
        exchange.mark_gone()
        if self._task is not None:
            self._task.cancel()
        if self.source is not None:
            self.source.abort()  # not a byte more; the cancelled relay would do it a moment later
        return True

    # -- deadlines ---------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Enforce the deadlines; called a few times a second for every connection."""
        exchange = self._exchange
        if self.write_paused or self.transport.is_closing():
            if self._write_stalled(now):
                self.transport.abort()
        elif self._linger_until is not None:
            if now > self._linger_until:
                self.transport.abort()
        elif exchange is None:
            self._sweep_idle(now - self._since)
        elif self._reading_paused:
            if _hung_up(self.transport) and self._client_left():
                self.transport.abort()
        elif exchange.body.awaited and now - self._since > self._limits.body_stall_s:
            exchange.body.fail(MalformedRequestError("the request body stalled", status=408))

    def _sweep_idle(self, age_s: float) -> None:
        if self._buffer:
            if age_s > self._limits.head_s:
                self._refuse(MalformedRequestError("the request head took too long", status=408))
        elif age_s > self._limits.idle_s:
            self.transport.close()

    def _write_stalled(self, now: float) -> bool:
        size, since = self._unsent
        unsent = self.transport.get_write_buffer_size()
        if unsent != size:
            self._unsent = (unsent, now)
            return False
        own = None if self._exchange is None else self._exchange.write_stall_s
        return now - since > (self._limits.write_stall_s if own is None else own)

    def close_idle(self) -> None:
        """Close if no request is at work."""
        if self._exchange is None:
            self.transport.close()

    def refuse_unsent(self) -> None:
        """Refuse a request whose body is still to come, as one that comes too late."""
        exchange = self._exchange
        if exchange is not None and not exchange.started and not exchange.body.complete:
            exchange.body.fail(StoppingError())


def _framing(head: RequestHead) -> Body:
    if head.chunked:
        return ChunkedBody()
    return LengthBody(head.content_length) if head.content_length else Body()


def _hung_up(transport: asyncio.Transport) -> bool:
    """Ask the kernel whether the peer closed, without reading what it sent before."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
