"""Claims about ``edge.splice``: the same bytes, at once, and an honest end."""

import asyncio
import gc

import pytest

from edge.wire import ERROR_EVENT, GET_1_0, SSE, answering, chunked, close, get, post, until
from polykv_proxy.edge import relay
from polykv_proxy.edge.framing import chunk


async def test_events_arrive_one_by_one(rig):
    """Each event is readable before the engine sends the next one: nothing is buffered anywhere."""
    turn = asyncio.Semaphore(0)

    async def conversation(peer):
        await peer.read_message()
        await peer.send(SSE)
        for number in range(20):
            await turn.acquire()
            await peer.send(chunk(b"data: %d\n\n" % number))
        await peer.send(b"0\r\n\r\n")

    client = await rig.client(await rig.proxy(await rig.server(conversation)))
    await client.send(get())
    await client.read_head()  # not one event was sent yet
    for number in range(20):
        turn.release()
        expected = chunk(b"data: %d\n\n" % number)
        assert await client.read_exactly(len(expected)) == expected
    assert await client.read_exactly(5) == b"0\r\n\r\n"
    await until(lambda: rig.results)
    assert rig.results[0].events == 20
    assert rig.results[0].completed


ODD_STREAM = (
    'data: {"choices":[{"delta":{"content":"👩‍💻 漢字 ünïcode"},"x_unknown":[1,{}]}]}\r\n\r\n'
    ':\n\n: ping\n\ndata: {"tool_calls":[{"function":{"arguments":"{\\"路径\\":"}}]}\n\n'
    'event: x\nid: 7\nretry: 10\ndata: a\ndata: b\n\ndata:{"choices":[],"usage":{"n":1}}\n\n'
    "data: without an end"
).encode()


@pytest.mark.parametrize("guarded", [False, True])
async def test_fragments_change_nothing(rig, guarded):
    """7-byte fragments through emoji and CJK, pings, CRLF, unknown fields: the chunks arrive as sent."""
    fragments = [ODD_STREAM[start : start + 7] for start in range(0, len(ODD_STREAM), 7)]
    seen = []
    options = {"on_truncated": lambda _error: ERROR_EVENT} if guarded else {}
    upstream = await rig.server(answering(SSE, *map(chunk, fragments), b"0\r\n\r\n", pause_s=0.0005))
    client = await rig.client(await rig.proxy(upstream, observer=seen.append, **options))
    await client.send(get())
    await client.read_head()
    raw = await client.read_until(b"\r\n0\r\n\r\n")
    assert raw == chunked(*fragments)
    assert b"".join(seen) == ODD_STREAM
    assert rig.results[0].bytes == len(ODD_STREAM)


async def test_times_and_counts(rig):
    """First and last byte are told apart; a body without bytes has neither."""
    answer = [SSE, chunk(b"data: 1\n\n"), chunk(b":\n\n"), chunk(b"data: 2\n\ndata: 3\n\n"), b"0\r\n\r\n"]
    client = await rig.client(await rig.proxy(await rig.server(answering(*answer, pause_s=0.01))))
    await client.send(get())
    await client.read_message()
    await until(lambda: rig.results)
    result = rig.results[0]
    assert (result.bytes, result.events, result.completed) == (30, 4, True)
    assert result.first_byte_at < result.last_byte_at
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    client = await rig.client(await rig.proxy(await rig.server(answering(empty))))
    await client.send(get())
    await client.read_message()
    await until(lambda: len(rig.results) == 2)
    assert rig.results[1].first_byte_at is rig.results[1].last_byte_at is None


async def test_slow_reader_holds_the_engine_back(rig):
    """A 50 MB stream to a client that does not read keeps a bounded number of bytes in the proxy."""
    sent = 0
    connections = []

    async def conversation(peer):
        nonlocal sent
        await peer.read_message()
        await peer.send(SSE)
        piece = chunk(b"data: " + b"x" * 49_990 + b"\n\n")
        for _ in range(1000):
            await peer.send(piece)
            sent += len(piece)
        await peer.send(b"0\r\n\r\n")

    upstream = await rig.server(conversation)

    async def handler(exchange):
        connections.append(exchange.connection)
        await relay(exchange, await upstream.send("GET", b"/", []))

    client = await rig.client(await rig.edge(handler), slow=True)
    await client.send(get())
    await client.read_head()
    peak = 0
    for _ in range(100):
        await asyncio.sleep(0.003)
        peak = max(peak, connections[0].transport.get_write_buffer_size())
    assert peak < 1 << 20
    assert sent < 20_000_000
    received = 0
    while not (piece := await client.read_some()).endswith(b"0\r\n\r\n"):
        received += len(piece)
        peak = max(peak, connections[0].transport.get_write_buffer_size())
    assert received + len(piece) == sent + 5
    assert peak < 1 << 20


async def test_requests_leave_no_cycles(rig):
    """What a request needed is freed when it ends, not when the garbage collector comes by."""
    body = b"x" * 1000
    streamed = SSE + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def conversation(peer):
        while True:
            message = await peer.read_message()
            await peer.send(streamed if b"/stream" in message.first_line else whole)

    upstream = await rig.server(conversation)
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: ERROR_EVENT))

    async def talk():
        for target in (b"/stream", b"/whole") * 10:
            await client.send(post(body, target=target))
            await client.read_message()

    await talk()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await talk()
        gc.collect()
        found = [thing for thing in gc.garbage if type(thing).__module__.startswith("polykv_proxy")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found == []


# -- broken answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("framed", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("request_bytes", [get(), GET_1_0])
async def test_truncated_answer_looks_truncated(rig, framed, request_bytes):
    """When the engine dies in mid-body, the client's transfer never ends properly."""
    head = b"HTTP/1.1 200 OK\r\n" + framed + b"\r\n\r\n"
    part = chunk(b"partial") if b"chunked" in framed else b"partial"
    upstream = await rig.server(answering(head, part, pause_s=0.02, then=close))
    client = await rig.client(await rig.proxy(upstream))
    await client.send(request_bytes)
    head = await client.read_head()
    try:
        rest = await client.read_all()
    except ConnectionResetError:
        # The only way to tell, where the close is the end of the body.
        assert request_bytes == GET_1_0
        assert b"Content-Length" not in head
    else:
        assert rest == (part if request_bytes != GET_1_0 or b"chunked" not in framed else b"impossible")
    await until(lambda: rig.results)
    assert not rig.results[0].completed
    assert rig.results[0].bytes == 7
    assert "mid-answer" in str(rig.results[0].error)


@pytest.mark.parametrize("cut", [b"", b"1", b"20\r\ndata: hal", b"9\r\ndata: 9\n\n", b"9\r\ndata: 9\n\n\r"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_truncated_stream_gets_an_error_event(rig, cut, version):
    """With ``on_truncated`` the stream ends properly, with our event behind complete ones only."""
    upstream = await rig.server(
        answering(SSE, chunk(b"data: 1\n\n"), chunk(b":\n\n"), cut, pause_s=0.005, then=close)
    )
    errors = []

    def last_event(error):
        errors.append(error)
        return ERROR_EVENT

    client = await rig.client(await rig.proxy(upstream, on_truncated=last_event))
    await client.send(b"GET / HTTP/" + version + b"\r\nHost: t\r\n\r\n")
    body = (await client.read_message()).body
    assert body.removeprefix(b"data: 1\n\n:\n\n") in (ERROR_EVENT, b"data: 9\n\n" + ERROR_EVENT)
    assert len(errors) == 1
    assert not rig.results[0].completed


async def test_truncated_before_the_first_event(rig):
    """An engine that dies right after its head still gives the client a proper stream with an error event."""
    upstream = await rig.server(answering(SSE, pause_s=0.02, then=close))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: ERROR_EVENT))
    await client.send(get() + get())
    assert (await client.read_message()).body == ERROR_EVENT
    assert (await client.read_message()).body == ERROR_EVENT


async def test_hook_may_decline(rig):
    """``on_truncated`` that returns None leaves the transfer broken."""
    upstream = await rig.server(answering(SSE, chunk(b"data: 1\n\n"), pause_s=0.02, then=close))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: None))
    await client.send(get())
    await client.read_head()
    assert await client.read_all() == chunk(b"data: 1\n\n")


async def test_no_event_behind_half_an_event(rig):
    """An event too large to be kept back is passed on; if it breaks off, nothing can be put behind it."""
    huge = b"data: " + b"x" * 400_000
    upstream = await rig.server(answering(SSE, chunk(huge), pause_s=0.05, then=close))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: ERROR_EVENT))
    await client.send(get())
    await client.read_head()
    assert await client.read_all() == chunk(huge)


async def test_event_behind_a_large_one(rig):
    """A large event that was passed on in parts and then completed does not spoil the proper end."""
    huge = b"data: " + b"x" * 400_000
    pieces = (chunk(huge), chunk(b"\n\n"), chunk(b"data: 2\n\n"), b"9\r\ndata:")
    upstream = await rig.server(answering(SSE, *pieces, pause_s=0.05, then=close))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: ERROR_EVENT))
    await client.send(get())
    assert (await client.read_message()).body == huge + b"\n\ndata: 2\n\n" + ERROR_EVENT


async def test_hook_is_for_event_streams(rig):
    """A JSON body that breaks off is not mended by an event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream = await rig.server(answering(head, chunk(b'{"a":'), pause_s=0.02, then=close))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _error: ERROR_EVENT))
    await client.send(get())
    await client.read_head()
    assert await client.read_all() == chunk(b'{"a":')


async def test_engine_that_sends_no_chunks(rig):
    """Malformed chunks break the client's transfer off; what follows them is not passed on."""
    upstream = await rig.server(answering(SSE, chunk(b"data: 1\n\n"), b"zz\r\nevil\r\n", pause_s=0.02))
    client = await rig.client(await rig.proxy(upstream))
    await client.send(get())
    await client.read_head()
    assert await client.read_all() == chunk(b"data: 1\n\n")


async def test_observer_that_fails(rig):
    """A bug in an observer breaks its own transfer off and is reported, and the next request is served."""

    def observer(payload):
        raise LookupError("bug")

    upstream = await rig.server(answering(SSE, chunk(b"data: 1\n\n"), b"0\r\n\r\n", pause_s=0.01))
    port = await rig.proxy(upstream, observer=observer)
    for _ in range(2):
        client = await rig.client(port)
        await client.send(get())
        assert b"0\r\n\r\n" not in await client.read_all()
    assert any(isinstance(problem.get("exception"), LookupError) for problem in rig.problems)


# -- what is mended ---------------------------------------------------------------------------------------


def louder(events):
    """Changes error events and nothing else."""
    return events.replace(b'"error"', b'"ERROR"')


TOKEN = b'data: {"text":"no fault"}\n\n'


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((SSE + chunk(TOKEN), chunk(ERROR_EVENT) + b"0\r\n\r\n"), id="with the end"),
        pytest.param((SSE + chunk(TOKEN), chunk(ERROR_EVENT), b"0\r\n\r\n"), id="before the end"),
        pytest.param((SSE, chunk(TOKEN) + chunk(ERROR_EVENT), b"0\r\n\r\n"), id="with others"),
        pytest.param(
            (SSE + chunk(TOKEN), chunk(ERROR_EVENT)[:20], chunk(ERROR_EVENT)[20:], b"0\r\n\r\n"), id="torn"
        ),
        pytest.param(
            (SSE + chunk(TOKEN), chunk(ERROR_EVENT[:9]), chunk(ERROR_EVENT[9:]), b"0\r\n\r\n"), id="in chunks"
        ),
    ],
)
async def test_error_events_can_be_mended(rig, pieces):
    """However they arrive; what is no error event is passed as it came."""
    upstream = await rig.server(answering(*pieces, pause_s=0.02))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _: None, mend=louder))
    for _ in range(2):  # the connection is good for another one
        await client.send(get())
        assert (await client.read_message()).body == TOKEN + louder(ERROR_EVENT)


async def test_error_events_can_be_mended_without_chunks(rig):
    """For a client of HTTP/1.0."""
    upstream = await rig.server(answering(SSE + chunk(TOKEN) + chunk(ERROR_EVENT) + b"0\r\n\r\n"))
    client = await rig.client(await rig.proxy(upstream, on_truncated=lambda _: None, mend=louder))
    await client.send(GET_1_0)
    assert (await client.read_all()).endswith(TOKEN + louder(ERROR_EVENT))
