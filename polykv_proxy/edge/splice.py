"""The splice: an engine's body goes to the client in the very call that delivers it.

Rule 1: bytes are not touched. Where both sides frame alike, chunk framing included, what was read is what
is written: no task wakes up, nothing is queued, nothing is framed anew. The payload is looked at on the
side.
Rule 2: a slow client slows its engine connection down; a few reads at most wait in between.
Rule 3: an answer that broke off looks broken. Either the connection ends without a proper end of the
body, or the caller's ``on_truncated`` supplies a last event that says so, which is only ever put behind a
complete event.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from polykv_proxy.edge.framing import COMMON_SIZES, LAST_CHUNK, ChunkedBody, chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.upstream_response import UpstreamResponse
    from polykv_proxy.errors import EngineGoneError

HOLD_LIMIT_BYTES = 256 * 1024
"""Most bytes of an incomplete event kept back while ``on_truncated`` is set; a longer one is passed on."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

_ERROR = b"error"
"""Stands in every error event, of whichever API, and seldom elsewhere."""


class Transform(Protocol):
    """Changes a payload on its way, piece by piece."""

    def feed(self, data: bytes) -> bytes:
        """Take a piece; returns what can go out now."""

    def finish(self) -> bytes:
        """The payload is complete; returns what is left to go out."""


@dataclass(slots=True)
class RelayResult:
    """What was relayed.

    Attributes:
        bytes: payload bytes received from the engine, without framing.
        completed: the engine's body was complete.
        first_byte_at: monotonic seconds of the first body byte; None when there was none.
        last_byte_at: monotonic seconds of the end of the body, proper or not; None when it had no byte.
        events: SSE blocks that ended with an empty line (LF LF), comments included; 0 for other bodies.
        error: why the body is incomplete.
    """

    bytes: int = 0
    completed: bool = False
    first_byte_at: float | None = None
    last_byte_at: float | None = None
    events: int = 0
    error: EngineGoneError | None = None


class Splice:
    """One body on its way."""

    __slots__ = (
        "_body",
        "_exchange",
        "_held",
        "_is_raw",
        "_mend",
        "_observer",
        "_on_truncated",
        "_pieces",
        "_response",
        "_result",
        "_sse",
        "_tail",
        "_torn",
        "_transform",
        "_unsettled",
        "_waiter",
        "_write",
        "prefix",
    )

    def __init__(  # noqa: PLR0913 - as in ``relay``
        self,
        exchange: Exchange,
        response: UpstreamResponse,
        *,
        observer: Callable[[bytes], object] | None,
        transform: Transform | None,
        on_truncated: Callable[[EngineGoneError], bytes | None] | None,
        mend: Callable[[bytes], bytes] | None,
    ) -> None:
        self._exchange = exchange
        self._response = response
        self._body = response.body
        self._observer = observer
        self._transform = transform
        self._sse = response.head.event_stream
        self._on_truncated = on_truncated if self._sse else None
        self._mend = mend if self._sse else None
        self._result = RelayResult()
        # The transport itself: the connection aborts us before its transport is unusable.
        self._write = exchange.connection.transport.write
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held = b""
        self._tail = b""  # last payload bytes, to know whether an event is complete
        self._is_raw = True
        self._torn = False  # a part of an event went out already
        self._unsettled = False  # torn, or something is held
        self.prefix = b""

    async def run(self, *, raw: bool) -> RelayResult:
        """Splice until the end of the body.

        Args:
            raw: the engine's framing is the client's.
        """
        connection = self._exchange.connection
        listener: Callable[[bytes], None]
        if not raw:
            listener = self._reframed
        elif self._on_truncated is None:
            listener = self._raw
        else:
            listener = self._raw_events
        self._is_raw = raw
        if not raw:
            self._body.sink = self._collect
        elif self._on_truncated is not None:
            self._body.sink = self._remember
        else:
            self._body.sink = self._observer
        connection.splice(self._response)
        try:
            self._response.listen(listener, self._end)
            if not self._exchange.responded:
                if self.prefix:  # no body byte is here yet; the head does not wait for one
                    self._out(b"")
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if connection.write_paused:
                await connection.drain()
        except BaseException:
            self._response.abort()
            raise
        finally:
            connection.splice(None)
        return self._result

    # -- what was read -----------------------------------------------------------------------------------

    def _remember(self, payload: bytes) -> None:
        """Keep the last bytes, which tell whether an event is complete."""
        self._tail = payload[-4:] if len(payload) > 3 else (self._tail + payload)[-4:]
        if self._observer is not None:
            self._observer(payload)

    def _collect(self, payload: bytes) -> None:
        self._pieces.append(payload)
        if self._observer is not None:
            self._observer(payload)

    def _raw(self, data: bytes) -> None:
        """Pass raw bytes on."""
        result = self._result
        if self._sse:
            result.events += data.count(b"\n\n")
        if result.first_byte_at is None:
            result.first_byte_at = monotonic()
            data = self.prefix + data
            self.prefix = b""
            if self._is_raw and self._sse and isinstance(self._body, ChunkedBody):
                self._response.shortcut(self._shortcut(self._body))
        self._write(data)

    def _shortcut(self, body: ChunkedBody) -> Callable[[bytes], None]:
        """The hot path, one call for most events: a read that is one chunk goes out as it is.

        It repeats in a few operations what ``ChunkedBody.feed`` and the listeners do with such a read.
        At 5,000 events a second each call and each attribute less is seen in the CPU time of the proxy.
        """
        response, result, observer, write = self._response, self._result, self._observer, self._write
        feed, sizes, mends = response.feed, COMMON_SIZES, self._mend is not None
        ending = b"\r\n" if self._on_truncated is None else b"\n\n\r\n"

        def forward(data: bytes) -> None:
            start = data.find(b"\r\n") + 2
            size = sizes.get(data[: start - 2])
            if (
                size is None
                or start + size + 2 != len(data)
                or not data.endswith(ending)
                or not body.between_chunks
                or self._unsettled
                or (mends and _ERROR in data)
            ):
                feed(data)
                return
            body.payload_bytes += size
            result.events += data.count(b"\n\n")
            if observer is not None:
                try:
                    observer(data[start:-2])
                except Exception:
                    response.abort()
                    raise
            write(data)

        return forward

    def _raw_events(self, data: bytes) -> None:
        """Raw bytes too, but only up to where a complete chunk ends a complete event."""
        data = self._held + data if self._held else data
        body = self._body
        whole = body.done or (
            isinstance(body, ChunkedBody) and body.between_chunks and self._tail.endswith(_EVENT_ENDS)
        )
        if whole or len(data) > HOLD_LIMIT_BYTES:
            begun, held, self._held = self._torn, bool(self._held), b""
            self._torn = self._unsettled = not whole
            chunks = whole and not begun and isinstance(body, ChunkedBody)
            # what came in several pieces may have chunk sizes within the word
            if chunks and self._mend is not None and (held or _ERROR in data):
                data = _mended(data, self._mend, last=body.done)
            self._raw(data)
        else:
            self._held = data
            self._unsettled = True

    def _reframed(self, _data: bytes) -> None:
        """Payload in frames of ours."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._transform is not None:
            data = self._transform.feed(data)
        if self._on_truncated is not None:
            data = self._held + data
            whole = self._body.done or data.endswith(_EVENT_ENDS)
            if not whole and len(data) <= HOLD_LIMIT_BYTES:
                self._held = data
                return
            begun, self._held = self._torn, b""
            self._torn = not whole
            if whole and not begun and self._mend is not None and _ERROR in data:
                data = self._mend(data)
        if data:
            self._raw(chunk(data) if self._exchange.chunked else data)

    def _out(self, data: bytes) -> None:
        """Write what is not the engine's, behind the head if that is still here."""
        data = self.prefix + data
        self.prefix = b""
        if data:
            self._write(data)

    # -- the end -----------------------------------------------------------------------------------------

    def _end(self, error: EngineGoneError | None) -> None:
        exchange = self._exchange
        result = self._result
        result.bytes = self._body.payload_bytes
        result.error = error
        result.completed = error is None
        if result.first_byte_at is not None:
            result.last_byte_at = monotonic()
        if not exchange.responded and not exchange.is_gone:
            if error is None:
                self._complete()
            else:
                self._truncate(error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _complete(self) -> None:
        rest = self._held + (self._transform.finish() if self._transform is not None else b"")
        if not self._is_raw:
            self._close_body(rest)
        elif self.prefix:
            self._out(b"")
        self._exchange.finish()

    def _truncate(self, error: EngineGoneError) -> None:
        last = None
        if self._on_truncated is not None and not self._torn:
            last = self._on_truncated(error)
        if last is None or (self._exchange.delimited and not self._exchange.chunked):
            if self.prefix:
                self._out(b"")
            self._exchange.abort()
            return
        self._close_body(last)
        self._exchange.finish()

    def _close_body(self, payload: bytes) -> None:
        if self._exchange.chunked:
            payload = chunk(payload) + LAST_CHUNK
        self._out(payload)


def _mended(data: bytes, mend: Callable[[bytes], bytes], *, last: bool) -> bytes:
    """Whole chunks with their payload mended.

    Args:
        data: the chunks.
        mend: see ``relay``.
        last: whether the last chunk, which has no payload, is among them.
    """
    pieces: list[bytes] = []
    body = ChunkedBody()
    body.sink = pieces.append
    body.feed(data)
    payload = b"".join(pieces)
    mended = mend(payload)
    if mended == payload:
        return data
    return chunk(mended) + (LAST_CHUNK if last else b"")
