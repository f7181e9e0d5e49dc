"""Claims about ``edge.client_connection``: requests in order, clients that leave, deadlines, hygiene."""

import asyncio
import json

import pytest

from edge.wire import chunked, get, post, until
from polykv_proxy.edge import Limits


async def echo(exchange):
    """Answers with method, target and body."""
    body = await exchange.read_body(1 << 20)
    await exchange.respond(200, (), exchange.head.method.encode() + b" " + exchange.head.target + b" " + body)


class Held:
    """A handler that waits until it is let go."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gone = []

    async def __call__(self, exchange):
        """Wait, except on /free."""
        if exchange.head.path == "/free":
            await exchange.respond(200, (), b"free")
            return
        await exchange.read_body(1 << 20)
        self.begun.set()
        try:
            await self.gate.wait()
        finally:
            self.gone.append(exchange.client_gone.is_set())
        await exchange.respond(200, (), b"late")


async def test_pipelined_requests_are_answered_in_order(rig):
    """Requests that arrive in one piece, with and without bodies, are answered one after another."""
    client = await rig.client(await rig.edge(echo))
    chunks = b"POST /c HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"xy", b"z")
    await client.send(get(b"/a") + post(b"body", target=b"/b") + chunks + get(b"/d"))
    bodies = [(await client.read_message()).body for _ in range(4)]
    assert bodies == [b"GET /a ", b"POST /b body", b"POST /c xyz", b"GET /d "]


async def test_requests_byte_by_byte(rig):
    """The smallest possible reads change nothing."""
    client = await rig.client(await rig.edge(echo))
    for value in b"\r\n" + post(b"body") + get(b"/x"):
        await client.send(bytes([value]))
    assert (await client.read_message()).body == b"POST / body"
    assert (await client.read_message()).body == b"GET /x "


async def test_pipeline_is_bounded(rig):
    """Bytes of later requests are kept up to a bound; the rest waits in the kernel and is not lost."""
    held = Held()
    port = await rig.edge(held, limits=Limits(pipeline_bytes=4096))
    client = await rig.client(port)
    count = 3_000
    sending = asyncio.get_running_loop().create_task(client.send(get(b"/wait") + get(b"/free") * count))
    await held.begun.wait()
    await asyncio.sleep(0.1)
    held.gate.set()
    assert (await client.read_message()).body == b"late"
    for _ in range(count):
        assert (await client.read_message()).body == b"free"
    await sending


@pytest.mark.parametrize("way", ["close", "reset", "half-close", "crash with bytes unread"])
async def test_client_that_leaves_cancels_its_handler(rig, way):
    """A handler that waits is cancelled at once, however its client left, and only that one."""
    held = Held()
    port = await rig.edge(held, limits=Limits(pipeline_bytes=1024))
    leaver, stayer = await rig.client(port), await rig.client(port)
    await stayer.send(post(b"{}", target=b"/stay"))
    await held.begun.wait()
    held.begun.clear()
    await leaver.send(post(b"{}", target=b"/leave"))
    await held.begun.wait()
    if way == "close":
        leaver.close()
    elif way == "reset":
        leaver.reset()
    elif way == "half-close":
        leaver.writer.write_eof()
    else:
        # More than the edge keeps: it stopped reading, so only the kernel knows of the close.
        await leaver.send(get(b"/never") * 200)
        await asyncio.sleep(0.05)
        leaver.close()
    await until(lambda: rig.cancelled)
    assert [exchange.head.path for exchange in rig.cancelled] == ["/leave"]
    assert held.gone == [True]
    held.gate.set()
    assert (await stayer.read_message()).body == b"late"
    assert rig.problems == []


async def test_client_that_leaves_in_mid_upload(rig):
    """A handler that waits for a body is cancelled when the rest will not come."""
    begun = asyncio.Event()

    async def handler(exchange):
        begun.set()
        await exchange.read_body(1 << 20)

    client = await rig.client(await rig.edge(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nabc")
    await begun.wait()
    client.close()
    await until(lambda: rig.cancelled)


async def test_client_that_leaves_after_its_answer(rig):
    """Work that a handler does behind a complete answer is not cancelled by the client's close."""
    steps = []

    async def handler(exchange):
        await exchange.respond(200, (), b"done")
        await asyncio.sleep(0.1)
        steps.append(exchange.client_gone.is_set())

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    assert (await client.read_message()).body == b"done"
    client.close()
    await until(lambda: steps)
    assert steps == [False]
    assert rig.cancelled == []


async def test_next_request_waits_for_the_handlers_end(rig):
    """One connection never has two handlers at work."""
    running, peak = 0, []

    async def handler(exchange):
        nonlocal running
        running += 1
        peak.append(running)
        await exchange.respond(200)
        await asyncio.sleep(0.01)
        running -= 1

    client = await rig.client(await rig.edge(handler))
    await client.send(get() * 5)
    for _ in range(5):
        await client.read_message()
    await until(lambda: running == 0)
    assert peak == [1] * 5


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"complete nonsense\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "malformed_http"),
        (b"GET / HTTP/1.1\n\n", 400, "malformed_http"),
        (get(b"/", b"X: " + b"y" * 70_000), 431, "head_too_large"),
        (b"GET /" + b"y" * 70_000, 431, "head_too_large"),
        (b"GET / HTTP/3.0\r\nHost: t\r\n\r\n", 400, "malformed_http"),
        (post(b"abc", b"Transfer-Encoding: chunked"), 400, "malformed_http"),
        (post(b"abc", b"Content-Length: 4"), 400, "malformed_http"),
        (post(b"abc").replace(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "malformed_http"),
    ],
)
async def test_what_is_no_request_is_refused(rig, raw, status, code):
    """Bytes that are no request get an error envelope and the end of the connection; no handler runs."""
    ran = []
    client = await rig.client(await rig.edge(ran.append))
    # What could be smuggled behind the refused request must never be read as one.
    await client.send(raw + get(b"/smuggled"))
    message = await client.read_message()
    assert message.status == status
    assert message.field(b"connection") == b"close"
    error = json.loads(message.body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] == code
    assert await client.read_all() == b""
    assert ran == []


async def test_smuggled_request_behind_a_chunked_body(rig):
    """A length that hides in front of chunks (CL.TE, TE.CL) never yields a second request."""
    ran = []

    async def handler(exchange):
        ran.append(exchange.head.path)
        await echo(exchange)

    port = await rig.edge(handler)
    for fields in (
        b"Content-Length: 6\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 6",
        b"Transfer-Encoding: chunked\r\nTransfer-encoding: identity",
        b"Transfer-Encoding:\tchunked\r\nTransfer-Encoding : x",
    ):
        client = await rig.client(port)
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\n" + fields + b"\r\n\r\n0\r\n\r\nG" + get(b"/evil"))
        assert (await client.read_message()).status in (400, 501)
        assert await client.read_all() == b""
    assert ran == []


async def test_refused_upload_gets_its_answer(rig):
    """A client that keeps sending after it was refused still reads the answer: no reset overtakes it."""

    async def handler(exchange):
        await exchange.respond(403, (), b"no")

    client = await rig.client(await rig.edge(handler))
    head = b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\n"
    await client.send(head)
    message = await client.read_message()
    for _ in range(10):
        await client.send(bytes(100_000))
    assert (message.status, message.body) == (403, b"no")
    assert await client.read_all() == b""


async def test_slow_head_times_out(rig):
    """A head that drips in gets 408 when its time is over, whatever drips (slowloris)."""
    client = await rig.client(await rig.edge(echo, limits=Limits(head_s=0.2)))
    await client.send(b"GET / HTTP/1.1\r\n")

    async def drip():
        while True:
            await client.send(b"X: y\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.get_running_loop().create_task(drip())
    assert (await client.read_message()).status == 408
    dripping.cancel()
    await client.closed()


async def test_idle_connection_is_closed(rig):
    """A connection without a request is closed without a word."""
    port = await rig.edge(echo, limits=Limits(idle_s=0.1))
    fresh, used = await rig.client(port), await rig.client(port)
    await used.send(get())
    await used.read_message()
    assert await fresh.read_all() == b""
    assert await used.read_all() == b""


async def test_stalled_body_times_out(rig):
    """A body that stops arriving while somebody waits for it gets 408."""
    client = await rig.client(await rig.edge(echo, limits=Limits(body_stall_s=0.2)))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nabc")
    message = await client.read_message()
    assert message.status == 408
    await client.closed()


async def test_body_that_is_asked_for_late(rig):
    """The time for a body runs from when it is waited for, not from when its head came."""

    async def handler(exchange):
        await asyncio.sleep(1.0)
        await exchange.respond(200, (), await exchange.read_body(100))

    client = await rig.client(await rig.edge(handler, limits=Limits(body_stall_s=0.7)))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
    await client.read_head()
    await asyncio.sleep(0.35)
    await client.send(b"body")
    assert (await client.read_message()).body == b"body"


async def test_waiting_is_not_stalling(rig):
    """A complete request may wait for its answer longer than any of these limits."""

    async def handler(exchange):
        await exchange.read_body(100)
        await asyncio.sleep(1.0)
        await exchange.respond(200)

    limits = Limits(head_s=0.1, idle_s=0.1, body_stall_s=0.1, write_stall_s=0.1)
    client = await rig.client(await rig.edge(handler, limits=limits))
    await client.send(post(b"abc"))
    assert (await client.read_message()).status == 200


async def test_client_that_never_reads_is_given_up(rig):
    """A client that takes no byte for long counts as gone: its handler is cancelled."""

    async def handler(exchange):
        await exchange.open_stream(200)
        while True:
            await exchange.write(bytes(100_000))

    client = await rig.client(await rig.edge(handler, limits=Limits(write_stall_s=0.3)), slow=True)
    await client.send(get())
    await until(lambda: rig.cancelled)


async def test_an_exchange_may_have_less_patience(rig):
    """What it sets counts instead of the connection's limit."""

    async def handler(exchange):
        exchange.write_stall_s = 0.3
        await exchange.open_stream(200)
        while True:
            await exchange.write(bytes(100_000))

    client = await rig.client(await rig.edge(handler, limits=Limits(write_stall_s=3600.0)), slow=True)
    await client.send(get())
    await until(lambda: rig.cancelled)


async def test_slow_reader_that_moves_is_kept(rig):
    """A client that reads slowly but does read is never given up."""

    async def handler(exchange):
        await exchange.open_stream(200)
        for _ in range(60):
            await exchange.write(bytes(100_000))
        await exchange.end_stream()

    client = await rig.client(await rig.edge(handler, limits=Limits(write_stall_s=1.5)), slow=True)
    await client.send(get())
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        tail = (tail + await client.read_some())[-16:]
        await asyncio.sleep(0.005)
    assert rig.cancelled == []


async def test_client_that_never_takes_its_last_bytes(rig):
    """A closed connection whose client does not read its last bytes is not kept for ever."""
    connections = []

    async def handler(exchange):
        connections.append(exchange.connection)
        await exchange.respond(200, (), bytes(5_000_000))

    limits = Limits(write_stall_s=0.3)
    client = await rig.client(await rig.edge(handler, limits=limits), slow=True)
    await client.send(get(b"/", b"Connection: close"))
    await until(lambda: connections and connections[0]._lost)
