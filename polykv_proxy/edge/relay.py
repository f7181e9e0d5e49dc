"""An engine's answer for a client: its head, a framing that the client understands, and its body.

Rule 1: the head is the engine's, without what is hop-by-hop; fields of ours come last. It leaves at once,
whether or not the body has begun.
Rule 2: where both sides can frame alike they do, and the body passes as it is; one table (``_plan``) says
how it is framed otherwise. How it passes is ``splice``'s.
Rule 3: an answer that cannot begin gives the engine's up.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from polykv_proxy.edge.head import response_bytes
from polykv_proxy.edge.splice import RelayResult, Splice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.splice import Transform
    from polykv_proxy.edge.upstream_response import UpstreamResponse
    from polykv_proxy.errors import EngineGoneError


async def relay(  # noqa: PLR0913 - one place for all that can be done to an answer
    exchange: Exchange,
    response: UpstreamResponse,
    *,
    add_headers: Iterable[tuple[bytes, bytes]] = (),
    drop_headers: Iterable[bytes] = (),
    observer: Callable[[bytes], object] | None = None,
    transform: Transform | None = None,
    on_truncated: Callable[[EngineGoneError], bytes | None] | None = None,
    mend: Callable[[bytes], bytes] | None = None,
) -> RelayResult:
    """Answer an exchange with an engine's answer.

    Args:
        exchange: not answered yet.
        response: its body not listened to yet.
        add_headers: fields put behind the engine's.
        drop_headers: lower-case names of fields to leave out, on top of the hop-by-hop ones.
        observer: called with each piece of payload, synchronously; must be cheap.
        transform: changes the payload; framing is made anew then.
        on_truncated: called when an event stream breaks off; returns payload that ends the stream
            properly (a last event), or None to break the client's transfer off too. While it is set,
            an event is passed on when it is complete.
        mend: gets the complete events of a stream among which the word "error" stands, and returns what
            goes out in their place; only together with ``on_truncated``.

    Returns:
        What happened. A broken answer is not an exception here: the client has its share already.
    """
    drop = frozenset(drop_headers)
    plan = _plan(exchange, response, transformed=transform is not None)
    if plan.length_goes and response.head.content_length is not None:
        drop |= {b"content-length"}
    try:
        framing = plan.framing + exchange.start(delimited=plan.delimited)
        head = response_bytes(response.head, add=add_headers, drop=drop, framing=framing)
    except BaseException:
        response.abort()
        raise
    exchange.chunked = plan.chunked
    if plan.raw and (body := response.take_whole(observer)) is not None:
        return await _relay_whole(exchange, head, body, sse=response.head.event_stream)
    splice = Splice(
        exchange, response, observer=observer, transform=transform, on_truncated=on_truncated, mend=mend
    )
    splice.prefix = head
    return await splice.run(raw=plan.raw)


async def relay_into_open_stream(  # noqa: PLR0913 - as in ``relay``
    exchange: Exchange,
    response: UpstreamResponse,
    *,
    observer: Callable[[bytes], object] | None = None,
    transform: Transform | None = None,
    on_truncated: Callable[[EngineGoneError], bytes | None] | None = None,
    mend: Callable[[bytes], bytes] | None = None,
) -> RelayResult:
    """Put an engine's body into a stream that was opened earlier, and end it.

    For requests that were held with keep-alive comments: status and headers went out long ago, so the
    engine's are not passed on (the caller looks at ``response.head`` first). Arguments as in ``relay``.
    """
    if not exchange.started or exchange.responded:
        response.abort()
        raise RuntimeError("the exchange has no open stream")
    splice = Splice(
        exchange, response, observer=observer, transform=transform, on_truncated=on_truncated, mend=mend
    )
    return await splice.run(raw=exchange.chunked and response.head.chunked and transform is None)


async def _relay_whole(exchange: Exchange, head: bytes, body: bytes, *, sse: bool) -> RelayResult:
    """Most answers that are no streams are here with their heads: one write, and done."""
    exchange.connection.write(head + body)
    exchange.finish()
    now = monotonic() if body else None
    if exchange.connection.write_paused:
        await exchange.connection.drain()
    events = body.count(b"\n\n") if sse else 0
    return RelayResult(bytes=len(body), completed=True, first_byte_at=now, last_byte_at=now, events=events)


@dataclass(slots=True, frozen=True)
class _Plan:
    """How a body is framed for the client."""

    raw: bool
    chunked: bool
    delimited: bool
    framing: bytes
    length_goes: bool


_AS_IS = _Plan(raw=True, chunked=False, delimited=True, framing=b"", length_goes=False)
_NO_BODY = _Plan(raw=True, chunked=False, delimited=True, framing=b"", length_goes=True)
_CLOSE = _Plan(raw=False, chunked=False, delimited=False, framing=b"", length_goes=True)
_TE = b"Transfer-Encoding: chunked\r\n"
_CHUNKS_AS_THEY_ARE = _Plan(raw=True, chunked=True, delimited=True, framing=_TE, length_goes=True)
_CHUNKS = _Plan(raw=False, chunked=True, delimited=True, framing=_TE, length_goes=True)


def _plan(exchange: Exchange, response: UpstreamResponse, *, transformed: bool) -> _Plan:
    """Choose the client's framing.

    1. no body: none; a length stays where it describes what GET would give (RFC 9110 section 8.6)
    2. known length, payload untouched: the length
    3. HTTP/1.0, which has no chunks: payload until the close
    4. chunks, payload untouched: the chunks themselves
    5. else: chunks of ours
    """
    head, request = response.head, exchange.head
    if head.bodiless(request.method):
        return _AS_IS if request.method == "HEAD" or head.status == 304 else _NO_BODY
    if head.content_length is not None and not transformed:
        return _AS_IS
    if request.http_1_0:
        return _CLOSE
    return _CHUNKS_AS_THEY_ARE if head.chunked and not transformed else _CHUNKS
