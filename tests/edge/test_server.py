"""Claims about ``edge.server``: listening, draining, stopping."""

import asyncio
import socket

import aiohttp
import pytest

from edge.wire import get
from polykv_proxy.edge import Edge


async def answer(exchange):
    """Says hello."""
    await exchange.respond(200, (), b"hello")


async def test_listens_on_a_unix_socket_twice(tmp_path):
    """A stale socket file does not keep the edge from listening; peers there have no address."""
    peers = []

    async def handler(exchange):
        peers.append(exchange.peer)
        await answer(exchange)

    path = str(tmp_path / "edge.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    edge = Edge(handler)
    await edge.listen_unix(path)
    connector = aiohttp.UnixConnector(path)
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://edge/") as reply:
        assert await reply.text() == "hello"
    assert peers == [None]
    await edge.close(0)


async def test_address_in_use():
    """A port that is taken is the caller's to know."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        edge = Edge(answer)
        with pytest.raises(OSError, match="in use"):
            await edge.listen("127.0.0.1", taken.getsockname()[1])
        await edge.close(0)


async def test_listens_on_every_address_of_a_name():
    """A name with several addresses is served on all of them, on one port."""
    edge = Edge(answer)
    port = await edge.listen("localhost", 0)
    async with aiohttp.ClientSession() as session, session.get(f"http://localhost:{port}/") as reply:
        assert reply.status == 200
    await edge.close(0)


async def test_drain_lets_running_requests_end(rig):
    """While it drains, nothing new is accepted, idle connections close, running answers end and close."""
    gate, begun = asyncio.Event(), asyncio.Event()

    async def handler(exchange):
        begun.set()
        await gate.wait()
        await answer(exchange)

    edge = Edge(handler)
    port = await edge.listen("127.0.0.1", 0)
    busy, idle = await rig.client(port), await rig.client(port)
    await busy.send(get())
    await begun.wait()
    assert edge.active == 1
    closing = asyncio.get_running_loop().create_task(edge.close(20))
    assert await idle.read_all() == b""
    with pytest.raises(ConnectionRefusedError):
        await rig.client(port)
    assert not closing.done()
    gate.set()
    message = await busy.read_message()
    assert message.body == b"hello"
    assert message.field(b"connection") == b"close"
    await closing
    assert edge.active == 0
    assert edge.connections == set()


async def test_drain_that_takes_too_long_cancels(rig):
    """What does not end in time is cancelled: 503 where nothing was sent, a broken transfer else."""
    begun = []

    async def handler(exchange):
        begun.append(exchange)
        if exchange.head.path == "/stream":
            await exchange.open_stream(200)
            await exchange.write(b"partial")
        await asyncio.Event().wait()

    edge = Edge(handler)
    port = await edge.listen("127.0.0.1", 0)
    waiting, streaming = await rig.client(port), await rig.client(port)
    await waiting.send(get())
    await streaming.send(get(b"/stream"))
    await streaming.read_until(b"partial\r\n")
    await edge.close(0.05)
    message = await waiting.read_message()
    assert message.status == 503
    assert message.field(b"retry-after") == b"1"
    assert await streaming.read_all() == b""


@pytest.mark.parametrize("read", ["read", "read_chunk"])
async def test_drain_waits_for_no_body(rig, read):
    """A request that was not sent in full is refused: it may never be, while running answers end."""
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(exchange):
        if exchange.head.path == "/running":
            begun.set()
            await gate.wait()
        elif read == "read":
            await exchange.body.read(1000)
        else:
            while await exchange.body.read_chunk():
                pass
        await answer(exchange)

    edge = Edge(handler)
    port = await edge.listen("127.0.0.1", 0)
    half, chunked, running = [await rig.client(port) for _ in range(3)]
    await half.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await chunked.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab")
    await running.send(get(b"/running"))
    await begun.wait()
    while edge.active < 3:
        await asyncio.sleep(0.01)
    closing = asyncio.get_running_loop().create_task(edge.close(1000))
    for late in (half, chunked):
        message = await late.read_message()
        assert message.status == 503
        assert b'"stopping"' in message.body
        assert message.field(b"connection") == b"close"
    assert not closing.done()
    gate.set()
    assert (await running.read_message()).body == b"hello"
    await closing


async def test_close_without_listening():
    """An edge that never listened can be closed."""
    await Edge(answer).close(0)


async def test_large_last_answer_is_sent(rig):
    """An answer that is complete but not yet taken when the edge closes still reaches its client."""

    async def handler(exchange):
        await exchange.respond(200, (), bytes(3_000_000))

    edge = Edge(handler)
    client = await rig.client(await edge.listen("127.0.0.1", 0))
    await client.send(get())
    await client.read_head()
    closing = asyncio.get_running_loop().create_task(edge.close(5))
    assert await client.read_exactly(3_000_000) == bytes(3_000_000)
    await closing


async def test_error_body_can_be_rendered_by_the_caller(rig):
    """``render_error`` makes the body of every error answer, with the head where there is one."""
    edge = Edge(answer, render_error=lambda head, error: f"{head is None} {error.code}".encode())
    client = await rig.client(await edge.listen("127.0.0.1", 0))
    await client.send(b"nonsense\r\n\r\n")
    assert (await client.read_message()).body == b"True malformed_http"
    await edge.close(0)
