"""Claims about ``edge.upstream_connection``: finding heads, and when a connection may go on."""

import asyncio

import pytest

from edge.wire import chunked
from polykv_proxy.errors import EngineGoneError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def scripted(*answers: bytes):
    """A conversation with one answer per request; the last one again and again."""
    left = list(answers)

    async def conversation(peer):
        while True:
            message = await peer.read_message()
            assert message.head
            await peer.send(left.pop(0) if len(left) > 1 else left[0])

    return conversation


async def test_interim_answers_come_first(rig):
    """1xx heads are handed to whoever asked for them, and the final answer is found behind them."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    upstream = await rig.server(scripted(interim + OK))
    seen = []
    response = await upstream.send("GET", b"/", [], on_interim=lambda head: seen.append(head.status))
    assert await response.read(10) == b"ok"
    assert seen == [100, 103]
    assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"


async def test_head_byte_by_byte(rig):
    """A head that arrives in the smallest pieces is found."""

    async def conversation(peer):
        await peer.read_message()
        for value in b"HTTP/1.1 100 Continue\r\n\r\n" + OK:
            await peer.send(bytes([value]))
            await asyncio.sleep(0)

    upstream = await rig.server(conversation)
    assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"


async def test_204_with_an_empty_chunked_body(rig):
    """An engine's 204 framed as chunked is a 204, and its stray last chunk poisons no later answer."""
    odd = b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def conversation(peer):
        while True:
            message = await peer.read_message()
            if b"/odd" not in message.first_line:
                await peer.send(OK)
                continue
            await peer.send(odd)
            if b"late" in message.first_line:
                await asyncio.sleep(0.02)
            await peer.send(b"0\r\n\r\n")

    upstream = await rig.server(conversation)
    for target in (b"/odd", b"/odd-late") * 3:
        response = await upstream.send("OPTIONS", target, [])
        assert response.head.status == 204
        assert await response.read(0) == b""
        await asyncio.sleep(0.03)
        assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"


async def test_head_request_with_a_length(rig):
    """The length of an answer to HEAD announces no bytes, and the connection goes on."""
    upstream = await rig.server(scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", OK))
    response = await upstream.send("HEAD", b"/", [])
    assert response.head.content_length == 999
    assert await response.read(0) == b""
    assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"
    assert rig.connections == 1


async def test_body_that_the_close_delimits(rig):
    """An answer without framing ends with its connection."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.0 200 OK\r\n\r\nall ")
        await asyncio.sleep(0.02)
        await peer.send(b"of it")

    upstream = await rig.server(conversation)
    assert await (await upstream.send("GET", b"/", [])).read(100) == b"all of it"


async def test_bytes_behind_an_answer(rig):
    """Bytes behind the end of an answer are not part of it and end the connection."""
    for framed in (OK, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"ok")):
        upstream = await rig.server(scripted(framed + b"HTTP/1.1 200 OK\r\n\r\n"))
        for _ in range(2):
            assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"
        assert upstream.connections == 0
    assert rig.connections == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_what_is_no_answer(rig, answer):
    """An engine that answers something else is reported as gone."""
    upstream = await rig.server(scripted(answer))
    with pytest.raises(EngineGoneError):
        await upstream.send("GET", b"/", [])


async def test_answer_to_a_half_sent_body(rig):
    """An answer that overtakes a large body is delivered, and its connection is not used again."""

    async def conversation(peer):
        await peer.read_head()
        peer.writer.transport.pause_reading()
        await peer.send(OK)
        await asyncio.sleep(0.2)

    upstream = await rig.server(conversation)
    for _ in range(2):
        assert await (await upstream.send("POST", b"/", [], bytes(8 << 20))).read(10) == b"ok"
    assert rig.connections == 2
