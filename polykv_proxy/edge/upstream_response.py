"""An answer of the engine: its head, and a body that one listener gets.

Bodies are not copied or queued here once somebody listens: raw bytes go to the listener in the very call
that delivers them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polykv_proxy.edge.framing import Body, FramingError, LengthBody
from polykv_proxy.errors import EngineGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.edge.head import ResponseHead
    from polykv_proxy.edge.upstream_connection import UpstreamConnection

PENDING_LIMIT_BYTES = 64 * 1024
"""Body bytes kept while nobody listens yet; beyond it the engine is not read."""


class UpstreamResponse:
    """The engine's answer to one request: its head, and a body to be listened to once.

    Attributes:
        head: the response head.
        body: the framing machine; its ``sink`` gets the payload.
        complete: the last byte was seen and it was the right one.
        error: why the body will never be complete.
    """

    __slots__ = (
        "_connection",
        "_ended",
        "_listener",
        "_on_end",
        "_pending",
        "_pending_bytes",
        "_reading_paused",
        "body",
        "complete",
        "error",
        "head",
    )

    def __init__(self, connection: UpstreamConnection, head: ResponseHead, body: Body) -> None:
        self._connection = connection
        self._listener: Callable[[bytes], object] | None = None
        self._on_end: Callable[[EngineGoneError | None], object] | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._reading_paused = False
        self._ended = False
        self.head = head
        self.body = body
        self.complete = False
        self.error: EngineGoneError | None = None

    # -- for readers -------------------------------------------------------------------------------------

    def listen(
        self, listener: Callable[[bytes], object], on_end: Callable[[EngineGoneError | None], object]
    ) -> None:
        """Deliver raw body bytes from here on; what is there already is delivered before this returns.

        Args:
            listener: gets raw bytes, framing included, as they were read; ``body`` has seen them.
            on_end: called once, with None when the body is complete.
        """
        self._listener = listener
        self._on_end = on_end
        pending, self._pending = self._pending, []
        if pending:
            self.feed(pending[0] if len(pending) == 1 else b"".join(pending))
        if self.body.done:
            self._end(None)
        elif self.error is not None:
            self._end(self.error)
        else:
            self.resume_reading()

    def take_whole(self, observer: Callable[[bytes], object] | None) -> bytes | None:
        """The raw body, if all of it is here, framed by its length; it counts as listened to then.

        Args:
            observer: gets the payload.
        """
        body = self.body
        if body.done and not self._pending:
            self._end(None)
            return b""
        if not isinstance(body, LengthBody) or self._pending_bytes != body.remaining:
            return None
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        body.sink = observer
        try:
            body.feed(data)
        except Exception:
            self.abort()
            raise
        self._end(None)
        return data

    def shortcut(self, feed: Callable[[bytes], None]) -> None:
        """Let the connection call ``feed``, which must call our ``feed`` for what it does not do itself."""
        if not self._ended:
            self._connection.feed = feed

    async def read(self, limit: int) -> bytes:
        """The whole payload.

        Args:
            limit: bytes beyond which the answer is given up.

        Raises:
            EngineGoneError: the body broke off, or it is longer.
        """
        pieces: list[bytes] = []
        done = asyncio.get_running_loop().create_future()
        size = 0

        def take(payload: bytes) -> None:
            nonlocal size
            size += len(payload)
            pieces.append(payload)
            if size > limit:
                self.abort(EngineGoneError(f"the engine's answer is larger than {limit} bytes"))

        def end(error: EngineGoneError | None) -> None:
            if not done.done():
                done.set_result(error)

        self.body.sink = take
        self.listen(_ignore, end)
        try:
            error = await done
        except BaseException:
            self.abort()
            raise
        if error is not None:
            raise error
        return b"".join(pieces)

    def abort(self, error: EngineGoneError | None = None) -> None:
        """Stop here: the engine notices the closed connection and stops working on the request."""
        if not self._ended:
            self._fail(error or EngineGoneError("the answer was given up"))

    def pause_reading(self) -> None:
        """Hold the engine back."""
        if not self._ended and not self._reading_paused:
            self._reading_paused = True
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        """Let the engine go on."""
        if not self._ended and self._reading_paused:
            self._reading_paused = False
            self._connection.resume_reading()

    @property
    def claimed(self) -> bool:
        """Whether somebody listens."""
        return self._listener is not None

    # -- for the connection ------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take raw bytes of the body."""
        if self._listener is None:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes > PENDING_LIMIT_BYTES:
                self.pause_reading()
            return
        body = self.body
        try:
            used = body.feed(data)
            if used != len(data):
                self._connection.reusable = False  # bytes that nobody asked for
                data = data[:used]
            self._listener(data)
        except FramingError as exc:
            self._fail(EngineGoneError(f"the engine's answer is malformed: {exc}", code="engine_protocol"))
            return
        except Exception:
            self._fail(EngineGoneError("the answer was given up"))
            raise
        if body.done:
            self._end(None)

    def lost(self, error: EngineGoneError | None) -> None:
        """The connection closed; ``error`` tells why unless it was an orderly close."""
        if self._ended or self.error is not None:
            return
        if self._listener is None:
            # What arrived is judged when somebody listens: the body may be complete in it.
            if error is not None or not self.body.eof():
                self.error = error or EngineGoneError("the engine closed its connection in mid-answer")
        elif error is None and self.body.eof():
            self._end(None)
        else:
            self._fail(error or EngineGoneError("the engine closed its connection in mid-answer"))

    def _fail(self, error: EngineGoneError) -> None:
        self._connection.abort()
        self._end(error)

    def _end(self, error: EngineGoneError | None) -> None:
        if self._ended:
            return
        self.resume_reading()
        self._ended = True
        self.error = error
        self.complete = error is None
        if error is None:
            self._connection.answered()
        on_end, self._on_end = self._on_end, None
        self._listener = _ignore
        self.body.sink = None  # no cycle is left for the garbage collector
        if on_end is not None:
            on_end(error)


def _ignore(_data: bytes) -> None:
    """A listener for those who want only the payload, and for the time after the end."""
