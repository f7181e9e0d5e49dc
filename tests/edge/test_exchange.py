"""Claims about ``edge.exchange``: how a handler reads a body and answers."""

import asyncio
import json

import pytest

from edge.wire import chunked, get, post
from polykv_proxy.edge import BodyTooLargeError, MalformedRequestError
from polykv_proxy.errors import BadRequestError, UnavailableError

TYPE = [(b"Content-Type", b"text/plain")]


async def test_respond_in_one_piece(rig):
    """``respond`` sends status, fields in order, a length and the body, and the connection goes on."""

    async def handler(exchange):
        await exchange.respond(201, TYPE, b"hello")

    client = await rig.client(await rig.edge(handler))
    for _ in range(2):
        await client.send(get())
        head = await client.read_head()
        assert head == b"HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n"
        assert await client.read_exactly(5) == b"hello"


async def test_exchange_tells_who_and_when(rig):
    """Peer address and arrival time are there before anything is awaited."""
    seen = []

    async def handler(exchange):
        seen.append((exchange.peer, exchange.arrived_at, exchange.head.get_text(b"x-n")))
        await exchange.respond(200)

    client = await rig.client(await rig.edge(handler))
    for number in (b"1", b"2"):
        await client.send(get(b"/", b"X-N: " + number))
        await client.read_message()
    assert [item[0] for item in seen] == ["127.0.0.1"] * 2
    assert [item[2] for item in seen] == ["1", "2"]
    assert seen[0][1] < seen[1][1]


async def test_head_and_204_have_no_body(rig):
    """HEAD keeps the length and loses the body; 204 has neither (RFC 9110 section 8.6)."""

    async def handler(exchange):
        await exchange.respond(204 if exchange.head.path == "/none" else 200, (), b"abc")

    client = await rig.client(await rig.edge(handler))
    await client.send(get().replace(b"GET", b"HEAD") + get(b"/none") + get())
    assert (await client.read_head()).endswith(b"Content-Length: 3\r\n\r\n")
    assert await client.read_head() == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert (await client.read_message()).body == b"abc"


async def test_stream_is_chunked(rig):
    """An open stream sends its head at once, each piece as a chunk, and a proper end."""
    gate = asyncio.Event()

    async def handler(exchange):
        await exchange.open_stream(200, TYPE)
        await gate.wait()
        await exchange.write(b"one")
        await exchange.write(b"")
        await exchange.write(b"two")
        await exchange.end_stream()
        await exchange.end_stream()

    client = await rig.client(await rig.edge(handler))
    await client.send(get() * 2)
    assert b"Transfer-Encoding: chunked" in await client.read_head()
    gate.set()
    assert await client.read_exactly(21) == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert (await client.read_message()).body == b"onetwo"


async def test_stream_for_http_1_0_ends_with_the_close(rig):
    """HTTP/1.0 knows no chunks: payload until the connection closes."""

    async def handler(exchange):
        await exchange.open_stream(200)
        await exchange.write(b"one")
        await exchange.end_stream()

    client = await rig.client(await rig.edge(handler))
    await client.send(b"GET / HTTP/1.0\r\n\r\n")
    assert await client.read_all() == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\none"


async def test_stream_for_head_is_only_a_head(rig):
    """A HEAD request gets no stream payload, and the connection goes on."""

    async def handler(exchange):
        await exchange.open_stream(200)
        await exchange.write(b"one")
        await exchange.end_stream()

    client = await rig.client(await rig.edge(handler))
    await client.send(get().replace(b"GET", b"HEAD") + get())
    await client.read_head()
    assert (await client.read_message()).body == b"one"


async def test_http_1_0_keep_alive(rig):
    """An HTTP/1.0 client that asks for it keeps its connection when the length is known."""

    async def handler(exchange):
        await exchange.respond(200, (), b"abc")

    client = await rig.client(await rig.edge(handler))
    for _ in range(2):
        await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        message = await client.read_message()
        assert message.field(b"connection") == b"keep-alive"


@pytest.mark.parametrize("framed", ["length", "chunked"])
async def test_read_body(rig, framed):
    """A 12 MB body arrives whole, whatever its framing and its pieces."""
    body = bytes(range(256)) * 48 * 1024
    got = []

    async def handler(exchange):
        got.append(await exchange.read_body(len(body)))
        await exchange.respond(200)

    client = await rig.client(await rig.edge(handler))
    if framed == "length":
        await client.send(post(body))
    else:
        pieces = [body[start : start + 100_001] for start in range(0, len(body), 100_001)]
        await client.send(
            b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(*pieces)
        )
    assert (await client.read_message()).status == 200
    assert got == [body]


@pytest.mark.parametrize("announced", [True, False])
async def test_body_beyond_the_limit(rig, announced):
    """A body over its reader's limit is a 413, before it is read where its length is announced."""

    async def handler(exchange):
        await exchange.read_body(1000)

    client = await rig.client(await rig.edge(handler))
    if announced:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n")
    else:
        head = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head + b"3e9\r\n" + b"x" * 1001)
    message = await client.read_message()
    assert message.status == 413
    assert message.field(b"connection") == b"close"
    assert json.loads(message.body)["error"]["code"] == "body_too_large"
    await client.closed()


async def test_expect_100_continue(rig):
    """A client that waits gets its 100 when the body is wanted, not before, and only once."""
    gate = asyncio.Event()

    async def handler(exchange):
        await gate.wait()
        await exchange.respond(200, (), await exchange.read_body(100))

    client = await rig.client(await rig.edge(handler))
    await client.send(post(b"", b"Expect: 100-continue").replace(b"Content-Length: 0", b"Content-Length: 4"))
    await asyncio.sleep(0.05)
    assert not client.reader._buffer
    gate.set()
    assert await client.read_head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(b"bo")
    await asyncio.sleep(0.02)
    await client.send(b"dy")
    message = await client.read_message()
    assert (message.status, message.body) == (200, b"body")


async def test_expectation_that_is_refused(rig):
    """Without a 100 the final answer closes: the client may or may not send the body (RFC 9110 10.1.1)."""

    async def handler(exchange):
        await exchange.respond(401)

    client = await rig.client(await rig.edge(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
    message = await client.read_message()
    assert message.status == 401
    assert message.field(b"connection") == b"close"
    await client.closed()


async def test_broken_body_reaches_its_reader(rig):
    """Framing that breaks in mid-body raises where the body is read, and answers 400."""
    caught, begun = [], asyncio.Event()

    async def handler(exchange):
        begun.set()
        try:
            await exchange.read_body(100)
        except MalformedRequestError as exc:
            caught.append(exc)
            raise

    client = await rig.client(await rig.edge(handler))
    await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await begun.wait()
    await client.send(b"zz\r\n")
    message = await client.read_message()
    assert message.status == 400
    assert len(caught) == 1


async def test_body_that_has_arrived_can_be_taken(rig):
    """``take_whole`` gives a body that is here, once, and nothing while it is arriving or half read."""
    taken = []

    async def handler(exchange):
        taken.append(exchange.body.take_whole())
        taken.append(await exchange.body.read_chunk())
        taken.append(exchange.body.take_whole())
        await exchange.respond(200)

    client = await rig.client(await rig.edge(handler))
    await client.send(post(b"here"))
    await client.read_message()
    await client.send(post(b"late").removesuffix(b"late"))
    await asyncio.sleep(0.02)
    await client.send(b"late")
    await client.read_message()
    assert taken == [b"here", b"", None, None, b"late", None]


async def test_unread_body_is_bounded(rig):
    """A body that nobody reads is held back in the kernel, and read on when somebody does."""
    gate = asyncio.Event()
    sizes = []

    async def handler(exchange):
        await gate.wait()
        sizes.append(exchange.body._size)
        while piece := await exchange.body.read_chunk():
            sizes.append(len(piece))
        await exchange.respond(200)

    client = await rig.client(await rig.edge(handler))
    total = 64 << 20
    sending = asyncio.get_running_loop().create_task(client.send(post(bytes(total))))
    await asyncio.sleep(0.2)
    assert not sending.done()
    gate.set()
    assert (await client.read_message()).status == 200
    await sending
    assert sizes[0] < 1 << 20
    assert max(sizes[1:]) < 1 << 20
    assert sum(sizes[1:]) == total


async def test_errors_become_envelopes(rig):
    """A PolyKVError raised before the answer began is the answer, with Retry-After where it has one."""
    errors = {
        "/bad": BadRequestError("no such field", param="pool_id"),
        "/busy": UnavailableError("loading", retry_after_s=7),
        "/large": BodyTooLargeError("too large"),
    }

    async def handler(exchange):
        raise errors[exchange.head.path]

    client = await rig.client(await rig.edge(handler))
    answers = {}
    for path in errors:
        await client.send(get(path.encode()))
        answers[path] = await client.read_message()
    assert [answer.status for answer in answers.values()] == [400, 503, 413]
    assert answers["/busy"].field(b"retry-after") == b"7"
    assert json.loads(answers["/bad"].body)["error"]["param"] == "pool_id"


async def test_bugs_become_a_500_and_are_reported(rig):
    """Any other exception is answered with 500 and reaches the loop's exception handler; no text leaks."""

    async def handler(exchange):
        raise LookupError("secret")

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    message = await client.read_message()
    assert message.status == 500
    assert b"secret" not in message.body
    assert isinstance(rig.problems[0]["exception"], LookupError)


async def test_handler_without_an_answer(rig):
    """A handler that forgets to answer is a bug, and a 500."""

    async def handler(exchange):
        pass

    client = await rig.client(await rig.edge(handler))
    await client.send(get())
    assert (await client.read_message()).status == 500
    assert len(rig.problems) == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_stream_left_open_is_broken_off(rig, version):
    """A handler that fails in mid-stream gives the client a broken transfer, never a proper end."""

    async def handler(exchange):
        await exchange.open_stream(200)
        await exchange.write(b"partial")
        raise BadRequestError("too late")

    client = await rig.client(await rig.edge(handler))
    await client.send(b"GET / HTTP/" + version + b"\r\nHost: t\r\n\r\n")
    try:
        data = await client.read_all()
    except ConnectionResetError:
        assert version == b"1.0"  # a close would look like the end of the body
    else:
        assert version == b"1.1"
        assert data.endswith(b"7\r\npartial\r\n")


async def test_answering_twice_is_a_bug(rig):
    """The second answer of an exchange raises, and nothing of it is sent."""
    caught = []

    async def handler(exchange):
        await exchange.respond(200)
        try:
            await exchange.respond(200)
        except RuntimeError as exc:
            caught.append(exc)

    client = await rig.client(await rig.edge(handler))
    await client.send(get(b"/", b"Connection: close"))
    assert (await client.read_all()).count(b"HTTP/1.1") == 1
    assert len(caught) == 1


async def test_write_waits_for_a_slow_client(rig):
    """``write`` stops the handler while the client does not read, and lets it go on afterwards."""
    written = []

    async def handler(exchange):
        await exchange.open_stream(200)
        for number in range(150):
            await exchange.write(bytes(100_000))
            written.append(number)
        await exchange.end_stream()

    client = await rig.client(await rig.edge(handler), slow=True)
    await client.send(get())
    await client.read_head()
    await asyncio.sleep(0.3)
    stopped_at = len(written)
    assert stopped_at < 120
    assert len(await client.read_chunks()) == 150 * 100_000
