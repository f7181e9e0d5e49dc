"""HTTP/1.1 bytes: the client side, the engine side, and the splice between them.

``head``, ``parse`` and ``framing`` are pure and decide what bytes mean. ``server`` takes connections and
runs one handler per request, which sees it as an ``Exchange``; ``upstream`` keeps connections to an
engine; ``relay`` gives the engine's answer to the client, and ``splice`` its body, byte for byte; ``inproc``
makes an aiohttp application of this process just another upstream. A handler is no more than::

    async def handler(exchange: Exchange) -> None:
        body = await exchange.read_body(limit=16 * 1024 * 1024)
        head = exchange.head
        response = await upstream.send(head.method, head.target, head.headers, body)
        await relay(exchange, response, add_headers=[(b"x-session-id", b"7")])

and it is cancelled, wherever it waits, when the client leaves; the engine then sees its connection close.

A web framework is not used here on purpose: its cost for each relayed chunk is a multiple of the two
system calls that the chunk needs.
"""

from polykv_proxy.edge.client_connection import Limits
from polykv_proxy.edge.exchange import BodySource, Exchange, RequestBody
from polykv_proxy.edge.head import (
    BodyTooLargeError,
    Headers,
    MalformedRequestError,
    RequestHead,
    ResponseHead,
    error_envelope,
)
from polykv_proxy.edge.inproc import InProcess
from polykv_proxy.edge.relay import relay, relay_into_open_stream
from polykv_proxy.edge.server import Edge
from polykv_proxy.edge.splice import RelayResult, Transform
from polykv_proxy.edge.upstream import Address, Dialer, Upstream
from polykv_proxy.edge.upstream_response import UpstreamResponse

__all__ = [
    "Address",
    "BodySource",
    "BodyTooLargeError",
    "Dialer",
    "Edge",
    "Exchange",
    "Headers",
    "InProcess",
    "Limits",
    "MalformedRequestError",
    "RelayResult",
    "RequestBody",
    "RequestHead",
    "ResponseHead",
    "Transform",
    "Upstream",
    "UpstreamResponse",
    "error_envelope",
    "relay",
    "relay_into_open_stream",
]
