"""Claims about ``edge.relay``: the engine's head and body, in a framing that the client understands."""

import asyncio
import contextlib

import pytest

from edge.wire import ERROR_EVENT, GET_1_0, SSE, answering, chunked, close, get, post, until
from polykv_proxy.edge import relay, relay_into_open_stream
from polykv_proxy.edge.framing import chunk

# -- the same bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status_line", "body"),
    [
        (b"HTTP/1.1 200 OK", b'{"ok":true}'),
        (b"HTTP/1.1 401 Unauthorized", b'{"error":{"code":401,"message":"Invalid API Key"}}'),
        (b"HTTP/1.1 404 Not Found", b'{"error":{"code":404,"message":"File Not Found"}}'),
        (b"HTTP/1.1 503 Service Unavailable", b'{"error":{"message":"Loading model"}}'),
        (b"HTTP/1.1 299 My Own Reason", b""),
    ],
)
async def test_answers_pass_untouched(rig, status_line, body):
    """Status, reason, fields in order and case, and body are the engine's; ours come last."""
    fields = b"X-B: 1\r\nx-a: 2\r\nRetry-After: 3\r\nAccess-Control-Allow-Origin: *\r\nContent-LENGTH: %d\r\n"
    answer = status_line + b"\r\n" + fields % len(body) + b"Keep-Alive: timeout=5, max=100\r\n\r\n" + body
    upstream = await rig.server(answering(answer))
    client = await rig.client(await rig.proxy(upstream, add_headers=[(b"x-session-id", b"7")]))
    for _ in range(2):
        await client.send(get())
        head = await client.read_head()
        assert head == status_line + b"\r\n" + fields % len(body) + b"x-session-id: 7\r\n\r\n"
        assert await client.read_exactly(len(body)) == body


async def test_requests_pass_untouched(rig):
    """Method, target, Authorization and body reach the engine as sent; hop-by-hop fields do not."""
    seen = []

    async def conversation(peer):
        while True:
            seen.append(await peer.read_message())
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    client = await rig.client(await rig.proxy(await rig.server(conversation)))
    fields = (
        b"Authorization: Bearer k",
        b"Connection: keep-alive, x-hop",
        b"X-Hop: 1",
        b"TE: trailers",
        b"aCCept: */*",
    )
    await client.send(post(b'{"a": 1}', *fields, target=b"/v1/x?y=%2F&z"))
    await client.read_message()
    assert seen[0].head == (
        b"POST /v1/x?y=%2F&z HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer k\r\naCCept: */*\r\n"
        b"Content-Length: 8\r\n\r\n"
    )
    assert seen[0].body == b'{"a": 1}'


async def test_nominated_response_fields_stay_behind(rig):
    """What the engine's Connection names concerns only our connection to it."""
    answer = b"HTTP/1.1 200 OK\r\nConnection: x-hop\r\nX-Hop: 1\r\nX-End: 2\r\nContent-Length: 0\r\n\r\n"
    client = await rig.client(await rig.proxy(await rig.server(answering(answer)), drop_headers=[b"x-drop"]))
    await client.send(get())
    assert await client.read_head() == b"HTTP/1.1 200 OK\r\nX-End: 2\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_large_bodies_both_ways(rig, framing):
    """12 MB go up and come back, in either framing, buffered by the handler or passed on."""
    body = bytes(range(256)) * 48 * 1024

    async def conversation(peer):
        while True:
            got = (await peer.read_message()).body
            if framing == "length":
                await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(got) + got)
            else:
                await peer.send(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(got[:999], got[999:])
                )

    upstream = await rig.server(conversation)
    for stream_body in (False, True):
        client = await rig.client(await rig.proxy(upstream, stream_body=stream_body))
        if framing == "length":
            request = post(body)
        else:
            request = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(
                body[:7], body[7:]
            )
        sending = asyncio.get_running_loop().create_task(client.send(request))
        assert (await client.read_message()).body == body
        await sending


async def test_expect_continue_through_the_proxy(rig):
    """The edge answers the expectation itself; the engine never sees it."""
    seen = []

    async def conversation(peer):
        seen.append(await peer.read_message())
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    client = await rig.client(await rig.proxy(await rig.server(conversation), stream_body=True))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
    assert (await client.read_head()).startswith(b"HTTP/1.1 100")
    await client.send(b"body")
    assert (await client.read_message()).status == 200
    assert seen[0].field(b"expect") is None
    assert seen[0].body == b"body"


async def test_interim_answers_are_forwarded(rig):
    """103 goes to the client, 100 is ours to give, and an HTTP/1.0 client gets neither."""
    own = b"Connection: X-Hop\r\nX-Hop: 1\r\n"
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n%bLink: </x>\r\n\r\n" % own
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    port = await rig.proxy(await rig.server(answering(interim + final)))
    client = await rig.client(port)
    await client.send(get())
    assert await client.read_head() == b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    assert (await client.read_message()).body == b"ok"
    old = await rig.client(port)
    await old.send(GET_1_0)
    assert (await old.read_message()).status == 200


# -- messages without a body ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "answer", "head"),
    [
        (
            get().replace(b"GET", b"HEAD"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n",
        ),
        (
            get(),
            b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 999\r\n\r\n",
            b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 999\r\n\r\n",
        ),
        (
            get(),
            b"HTTP/1.1 204 No Content\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
        ),
        (
            get(),
            b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n",
        ),
    ],
)
async def test_answers_without_a_body(rig, request_bytes, answer, head):
    """HEAD, 304 and 204 end with their head; illegal framing is not passed on; the connection goes on."""
    client = await rig.client(await rig.proxy(await rig.server(answering(answer))))
    for _ in range(3):
        await client.send(request_bytes)
        assert await client.read_head() == head
    assert rig.problems == []


# -- framing that differs between the sides ---------------------------------------------------------------


async def test_http_1_0_gets_payload_until_the_close(rig):
    """Chunks are taken apart for a client that knows none."""
    upstream = await rig.server(answering(SSE, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n"))
    client = await rig.client(await rig.proxy(upstream))
    await client.send(GET_1_0)
    message = await client.read_message()
    assert message.field(b"transfer-encoding") is None
    assert message.body == b"data: 1\n\ndata: 2\n\n"


async def test_http_1_0_keeps_a_known_length(rig):
    """A body of known length needs no close, for HTTP/1.0 either."""
    upstream = await rig.server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    client = await rig.client(await rig.proxy(upstream))
    for _ in range(2):
        await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.read_message()).body == b"ok"


async def test_close_delimited_answers_become_chunks(rig):
    """A body that ends with the engine's connection does not cost the client's."""
    upstream = await rig.server(
        answering(b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"two", pause_s=0.01, then=close)
    )
    client = await rig.client(await rig.proxy(upstream))
    for _ in range(2):
        await client.send(get())
        assert (await client.read_message()).body == b"onetwo"


class Marker:
    """A transform that adds to the last event."""

    def __init__(self):
        self.kept = b""

    def feed(self, data):
        """Hold the last line back."""
        data = self.kept + data
        cut = data.rfind(b"data: ")
        self.kept = data[cut:]
        return data[:cut].upper()

    def finish(self):
        """Mark it."""
        return self.kept.replace(b"}", b',"polykv":1}')


@pytest.mark.parametrize(
    "answer",
    [
        SSE + chunk(b'data: {"a":1}\n\n') + chunk(b'data: {"b":2}\n\n') + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n" + b'data: {"a":1}\n\ndata: {"b":2}\n\n',
    ],
)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_transform(rig, answer, version):
    """A transform changes the payload; framing and length follow."""
    upstream = await rig.server(answering(answer))

    async def handler(exchange):
        response = await upstream.send("GET", b"/", [])
        await relay(exchange, response, transform=Marker())

    client = await rig.client(await rig.edge(handler))
    await client.send(b"GET / HTTP/" + version + b"\r\nHost: t\r\n\r\n")
    message = await client.read_message()
    assert message.field(b"content-length") is None
    assert message.body == b'DATA: {"A":1}\n\ndata: {"b":2,"polykv":1}\n\n'


async def test_second_answer_behind_the_first(rig):
    """Bytes behind the end of an engine's answer never reach a client (response splitting)."""
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    for answer in (SSE + chunked(b"data: 1\n\n"), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"):
        client = await rig.client(await rig.proxy(await rig.server(answering(answer + evil))))
        await client.send(get())
        await client.read_message()
        await client.send(get())
        assert (await client.read_message()).body != b"evil"
        assert not client.reader._buffer


# -- clients that leave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["queued", "prefill", "mid-answer"])
@pytest.mark.parametrize("way", ["close", "reset"])
async def test_client_that_leaves_stops_the_engine(rig, stream, moment, way):
    """A disconnect while queued, in prefill or in mid-answer reaches the engine at once, and only its own."""
    begun, stopped, stayed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    head = SSE if stream else b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"

    async def conversation(peer):
        message = await peer.read_message()
        if moment == "mid-answer" or b"stay" in message.first_line:
            await peer.send(head)
        begun.set()
        if b"stay" in message.first_line:
            await stayed.wait()
            await peer.send(chunked(b"data: 1\n\n") if stream else bytes(100))
            return
        await peer.closed()
        stopped.set()

    upstream = await rig.server(conversation)

    async def handler(exchange):
        body = await exchange.read_body(100)
        if moment == "queued" and exchange.head.path != "/stay":
            begun.set()
            await asyncio.Event().wait()
        response = await upstream.send("POST", exchange.head.target, exchange.head.headers, body)
        await relay(exchange, response)

    port = await rig.edge(handler)
    stayer, leaver = await rig.client(port), await rig.client(port)
    await stayer.send(post(b"{}", target=b"/stay"))
    await stayer.read_head()
    begun.clear()
    await leaver.send(post(b"{}", target=b"/leave"))
    await begun.wait()
    if moment == "mid-answer":
        await leaver.read_head()
    leaver.close() if way == "close" else leaver.reset()
    if moment != "queued":
        await stopped.wait()
    await until(lambda: rig.cancelled)
    assert [exchange.head.path for exchange in rig.cancelled] == ["/leave"]
    stayed.set()
    if stream:
        assert await stayer.read_chunks() == b"data: 1\n\n"
    else:
        assert await stayer.read_exactly(100) == bytes(100)
    await until(lambda: upstream.connections <= 1)
    assert rig.problems == []


# -- streams that were opened earlier ---------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    "answer",
    [
        SSE + chunked(b"data: 1\n\n", b"data: 2\n\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\ndata: 1\n\ndata: 2\n\n",
    ],
)
async def test_into_an_open_stream(rig, answer, version):
    """A held request's keep-alive comments and the engine's body make one stream with one end."""
    upstream = await rig.server(answering(answer))

    async def handler(exchange):
        await exchange.open_stream(200, [(b"Content-Type", b"text/event-stream")])
        await exchange.write(b": waiting\n\n")
        response = await upstream.send("GET", b"/", [])
        rig.results.append(await relay_into_open_stream(exchange, response))

    client = await rig.client(await rig.edge(handler))
    await client.send(b"GET / HTTP/" + version + b"\r\nHost: t\r\n\r\n")
    message = await client.read_message()
    assert message.body == b": waiting\n\ndata: 1\n\ndata: 2\n\n"
    assert rig.results[0].bytes == 18


async def test_into_an_open_stream_that_breaks(rig):
    """An engine that dies under a held request ends its stream with the error event."""
    upstream = await rig.server(answering(SSE, chunk(b"data: 1\n\n"), b"7\r\nda", pause_s=0.01, then=close))

    async def handler(exchange):
        await exchange.open_stream(200)
        response = await upstream.send("GET", b"/", [])
        await relay_into_open_stream(exchange, response, on_truncated=lambda _error: ERROR_EVENT)

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    assert (await client.read_message()).body == b"data: 1\n\n" + ERROR_EVENT


async def test_open_stream_must_be_open(rig):
    """Without an open stream there is nothing to relay into."""
    upstream = await rig.server(answering(SSE + chunked(b"data: 1\n\n")))
    caught = []

    async def handler(exchange):
        response = await upstream.send("GET", b"/", [])
        with contextlib.suppress(RuntimeError):
            await relay_into_open_stream(exchange, response)
            caught.append("not raised")
        response.abort()
        await exchange.respond(204)

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    assert (await client.read_message()).status == 204
    assert caught == []


async def test_relay_that_cannot_begin(rig):
    """An exchange that was answered takes no second answer, and the engine's is given up at once."""
    closed = asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        await peer.send(SSE)
        await peer.closed()
        closed.set()

    upstream = await rig.server(conversation)

    async def handler(exchange):
        response = await upstream.send("GET", b"/", [])
        await exchange.respond(200)
        with contextlib.suppress(RuntimeError):
            await relay(exchange, response)

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    await client.read_message()
    await closed.wait()
