"""Claims about ``edge.upstream_response``: one listener, nothing lost, nothing endless."""

import asyncio

import pytest

from edge.wire import chunked, until
from polykv_proxy.edge.upstream_response import PENDING_LIMIT_BYTES
from polykv_proxy.errors import EngineGoneError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_read_whole_bodies(rig):
    """A 12 MB answer is read whole."""
    body = bytes(range(256)) * 48 * 1024

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    upstream = await rig.server(conversation)
    assert await (await upstream.send("GET", b"/", [])).read(len(body)) == body


async def test_read_has_a_limit(rig):
    """An answer beyond the limit is given up, and the engine sees its connection close."""
    closed = asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        await peer.send(CHUNKED + b"400\r\n" + bytes(1024) + b"\r\n")
        await peer.closed()
        closed.set()

    upstream = await rig.server(conversation)
    with pytest.raises(EngineGoneError, match="larger than 1000"):
        await (await upstream.send("GET", b"/", [])).read(1000)
    await closed.wait()


@pytest.mark.parametrize("complete", [True, False])
async def test_engine_that_closes_before_anyone_listens(rig, complete):
    """What arrived before the close is delivered, and judged complete or not, when it is asked for."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(CHUNKED + (chunked(b"ok") if complete else b"2\r\nok\r\n"))

    upstream = await rig.server(conversation)
    response = await upstream.send("GET", b"/", [])
    await until(lambda: upstream.connections == 0)
    if complete:
        assert await response.read(10) == b"ok"
        assert response.complete
    else:
        with pytest.raises(EngineGoneError, match="mid-answer"):
            await response.read(10)


async def test_close_delimited_body_that_ended_before_anyone_listens(rig):
    """A body without framing is complete when its connection closed in order, early or late."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nall")

    upstream = await rig.server(conversation)
    response = await upstream.send("GET", b"/", [])
    await until(lambda: upstream.connections == 0)
    assert await response.read(10) == b"all"


async def test_nothing_endless_before_anyone_listens(rig):
    """An engine that sends faster than anyone listens is held back."""
    sent = []

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(500):
            await peer.send(bytes(100_000))
            sent.append(1)

    upstream = await rig.server(conversation)
    response = await upstream.send("GET", b"/", [])
    await asyncio.sleep(0.2)
    assert len(sent) < 100
    assert response._pending_bytes < PENDING_LIMIT_BYTES + 300_000
    assert len(await response.read(50_000_000)) == 50_000_000


async def test_malformed_body(rig):
    """Chunks that are none end the answer with an error, and the connection."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(CHUNKED + b"2\r\nokX")
        await peer.closed()

    upstream = await rig.server(conversation)
    with pytest.raises(EngineGoneError, match="malformed"):
        await (await upstream.send("GET", b"/", [])).read(10)
    assert upstream.connections == 0


async def test_cancelled_read_closes(rig):
    """Cancelling a read shows the engine a closed connection."""
    closed = asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        await peer.send(CHUNKED + b"2\r\nok\r\n")
        await peer.closed()
        closed.set()

    upstream = await rig.server(conversation)
    response = await upstream.send("GET", b"/", [])
    reading = asyncio.get_running_loop().create_task(response.read(10))
    await asyncio.sleep(0.02)
    reading.cancel()
    await closed.wait()
