"""Claims about ``edge.upstream``: addresses, kept connections, what is sent again and what never is."""

import asyncio
import socket

import pytest

from edge.wire import Peer, chunked, until
from polykv_proxy.edge import Address
from polykv_proxy.edge.upstream_connection import UpstreamConnection
from polykv_proxy.errors import ConfigError, EngineGoneError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/e.sock", Address("/run/e.sock", "", 0)),
        ("/run/e.sock", Address("/run/e.sock", "", 0)),
        ("unix:/run/e.sock:/v2/", Address("/run/e.sock", "", 0, b"/v2")),
        ("127.0.0.1:8080", Address(None, "127.0.0.1", 8080)),
        ("http://localhost:80/", Address(None, "localhost", 80)),
        ("http://localhost:80/a/b/", Address(None, "localhost", 80, b"/a/b")),
        ("http://[::1]:80", Address(None, "::1", 80)),
    ],
)
def test_address_forms(text, address):
    """Every documented form is read, and its written form is read as the same."""
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "localhost", "host:port", "host:0", "host:70000", ":80", "https://h:1"])
def test_addresses_that_cannot_work(text):
    """Anything else is a configuration error that repeats what was written."""
    with pytest.raises(ConfigError):
        Address.parse(text)


async def test_requests_share_a_connection(rig):
    """One request after another goes over one connection; two at once take two."""
    gate = asyncio.Event()

    async def conversation(peer):
        while True:
            message = await peer.read_message()
            if b"/wait" in message.first_line:
                await gate.wait()
            await peer.send(OK)

    upstream = await rig.server(conversation)
    for _ in range(5):
        assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"
    assert rig.connections == 1
    waiting = asyncio.get_running_loop().create_task(upstream.send("GET", b"/wait", []))
    await asyncio.sleep(0.02)
    await (await upstream.send("GET", b"/", [])).read(10)
    gate.set()
    await (await waiting).read(10)
    assert rig.connections == upstream.connections == 2


@pytest.mark.parametrize("tcp", [True, False])
async def test_keep_alive_race_never_shows(rig, tcp):
    """A server that closes reused connections just when the request arrives costs no request."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(OK)
        if rig.connections % 2:
            return  # closes at once: mostly noticed before the next request
        await peer.read_exactly(1)  # the next request is on its way: close under it

    upstream = await rig.server(conversation, tcp=tcp)
    for number in range(200):
        body = b"x" * (number * 37 % 2000)
        response = await upstream.send("POST", b"/", [], body)
        assert await response.read(10) == b"ok"
    assert rig.connections == 200


async def test_fresh_connection_is_never_retried(rig):
    """A request that died on a fresh connection was perhaps worked on: it is not sent again."""

    async def conversation(peer):
        await peer.read_message()

    upstream = await rig.server(conversation)
    with pytest.raises(EngineGoneError):
        await upstream.send("POST", b"/", [], b"abc")
    assert rig.connections == 1


async def test_retry_happens_once(rig):
    """When the fresh connection dies as well, the error is the answer."""

    async def conversation(peer):
        await peer.read_message()
        if rig.connections == 1:
            await peer.send(OK)
            await peer.read_message()

    upstream = await rig.server(conversation)
    await (await upstream.send("GET", b"/", [])).read(10)
    with pytest.raises(EngineGoneError):
        await upstream.send("GET", b"/", [])
    assert rig.connections == 2


async def test_no_retry_after_a_byte_of_the_answer(rig):
    """Once the answer began, however little of it, a request is not repeated."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(OK)
        await peer.read_message()
        await peer.send(b"HTTP/1.1 2")

    upstream = await rig.server(conversation)
    await (await upstream.send("GET", b"/", [])).read(10)
    with pytest.raises(EngineGoneError):
        await upstream.send("GET", b"/", [])
    assert rig.connections == 1


async def test_no_retry_once_it_cannot_be_a_race(rig, monkeypatch):
    """A reused connection that dies long after the request went out died under its work."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=0\r\nContent-Length: 2\r\n\r\nok")
        await peer.read_message()
        await asyncio.sleep(0.05)

    monkeypatch.setattr("polykv_proxy.edge.upstream_connection._IDLE_MARGIN_S", 0.01)
    monkeypatch.setattr(UpstreamConnection, "usable", lambda _self, _now: True)
    upstream = await rig.server(conversation)
    await (await upstream.send("GET", b"/", [])).read(10)
    with pytest.raises(EngineGoneError):
        await upstream.send("GET", b"/", [])
    assert rig.connections == 1


async def test_idle_time_is_honoured(rig):
    """A connection whose advertised idle time is nearly over is closed by us, not raced for."""
    closed = asyncio.Event()

    async def conversation(peer):
        while True:
            await peer.read_message()
            await peer.send(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok")
            if await peer.read_some() == b"":
                closed.set()

    upstream = await rig.server(conversation)
    await (await upstream.send("GET", b"/", [])).read(10)
    await closed.wait()
    assert upstream.connections == 0


async def test_request_count_is_honoured(rig):
    """``max`` of Keep-Alive is not exhausted: the server's own close would be a race."""

    async def conversation(peer):
        while True:
            await peer.read_message()
            await peer.send(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=5\r\nContent-Length: 2\r\n\r\nok")

    upstream = await rig.server(conversation)
    for _ in range(8):
        await (await upstream.send("GET", b"/", [])).read(10)
    assert rig.connections == 2


async def test_connection_close_is_honoured(rig):
    """An answer that announces the close is the connection's last."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
        await peer.read_some()

    upstream = await rig.server(conversation)
    for _ in range(3):
        response = await upstream.send("GET", b"/", [])
        assert (response.head.status, await response.read(10)) == (400, b"ok")
    assert rig.connections == 3


async def test_idle_connections_are_bounded(rig):
    """No more than ``max_idle`` connections are kept after a burst."""

    async def conversation(peer):
        while True:
            await peer.read_message()
            await asyncio.sleep(0.05)
            await peer.send(OK)

    upstream = await rig.server(conversation)
    upstream._max_idle = 3

    async def one():
        await (await upstream.send("GET", b"/", [])).read(10)

    await asyncio.gather(*(one() for _ in range(10)))
    await until(lambda: upstream.connections == 3)


async def test_bytes_on_an_idle_connection(rig):
    """Bytes that nobody asked for end their connection; they never become an answer."""
    said = asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        await peer.send(OK)
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        said.set()
        await peer.read_some()

    upstream = await rig.server(conversation)
    for _ in range(3):
        assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"
        await said.wait()
        said.clear()
        await until(lambda: upstream.connections == 0)


@pytest.mark.parametrize("address", ["unix:/nonexistent/engine.sock", "127.0.0.1:1"])
async def test_nobody_listens(rig, address):
    """A refused connection means the engine is gone; the message says where."""
    with pytest.raises(EngineGoneError, match=address.removeprefix("unix:")):
        await rig.upstream(address).send("GET", b"/", [])


async def test_full_accept_queue_is_waited_for(rig, tmp_path):
    """A listener that is slow to accept is neither taken for dead nor for connected."""
    path = str(tmp_path / "full.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    listener.setblocking(False)
    upstream = rig.upstream(f"unix:{path}")
    loop = asyncio.get_running_loop()

    async def one():
        return await (await upstream.send("GET", b"/", [])).read(10)

    async def serve():
        accepted = [(await loop.sock_accept(listener))[0] for _ in range(6)]
        for sock in accepted:
            peer = Peer(*await asyncio.open_unix_connection(sock=sock))
            await peer.read_message()
            await peer.send(OK)

    requests = [loop.create_task(one()) for _ in range(6)]
    await asyncio.sleep(0.1)
    serving = loop.create_task(serve())
    assert await asyncio.gather(*requests) == [b"ok"] * 6
    await serving
    listener.close()


async def test_answer_that_nobody_claims(rig, monkeypatch):
    """An answer that its caller forgot is given up, so that the engine does not work for nobody."""
    monkeypatch.setattr("polykv_proxy.edge.upstream_connection.UNCLAIMED_S", 0.1)
    closed = asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await peer.closed()
        closed.set()

    upstream = await rig.server(conversation)
    forgotten = await upstream.send("GET", b"/", [])
    reading = asyncio.get_running_loop().create_task((await upstream.send("GET", b"/", [])).read(100))
    await closed.wait()
    with pytest.raises(EngineGoneError):
        await forgotten.read(100)
    assert not reading.done()
    reading.cancel()


async def test_prefix_and_fields(rig):
    """The address's prefix precedes every target; hop-by-hop fields are replaced, the rest is as given."""
    heads = []

    async def conversation(peer):
        while True:
            heads.append((await peer.read_message()).head)
            await peer.send(OK)

    upstream = await rig.server(conversation)
    prefixed = rig.upstream(f"{upstream.address}:/engine/1")
    fields = [(b"Host", b"h"), (b"Connection", b"close"), (b"X-A", b"1"), (b"x-hop", b"2")]
    await (await prefixed.send("GET", b"/v1/models?x", fields, named=frozenset({b"x-hop"}))).read(10)
    await (await prefixed.send("DELETE", b"/", [])).read(10)
    await (await prefixed.send("POST", b"/", [])).read(10)
    await (await prefixed.send("OPTIONS", b"*", [])).read(10)
    assert heads == [
        b"GET /engine/1/v1/models?x HTTP/1.1\r\nHost: h\r\nX-A: 1\r\n\r\n",
        b"DELETE /engine/1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /engine/1/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]


class Source:
    """A body in pieces."""

    def __init__(self, pieces, length=None, error=None):
        self.pieces = list(pieces)
        self.content_length = length
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()

    def take_whole(self):
        """Only an empty body is here from the start."""
        return b"" if self.content_length == 0 else None

    async def read_chunk(self):
        """One piece."""
        await self.gate.wait()
        if not self.pieces and self.error:
            raise self.error
        return self.pieces.pop(0) if self.pieces else b""


@pytest.mark.parametrize("length", [None, 6])
async def test_streamed_body(rig, length):
    """A body of unknown length goes in chunks, one of known length as it is."""
    seen = []

    async def conversation(peer):
        while True:
            seen.append(await peer.read_message())
            await peer.send(OK)

    upstream = await rig.server(conversation)
    response = await upstream.send("POST", b"/", [], Source([b"abc", b"def"], length))
    assert await response.read(10) == b"ok"
    assert seen[0].body == b"abcdef"
    assert (seen[0].field(b"transfer-encoding") == b"chunked") is (length is None)


async def test_streamed_body_takes_a_fresh_connection(rig):
    """What was passed on cannot be sent again, so no reused connection is risked for it."""

    async def conversation(peer):
        while True:
            await peer.read_message()
            await peer.send(OK)

    upstream = await rig.server(conversation)
    await (await upstream.send("GET", b"/", [])).read(10)
    await (await upstream.send("POST", b"/", [], Source([b"abc"]))).read(10)
    assert rig.connections == 2


async def test_empty_source_is_just_an_empty_body(rig):
    """A source that is known to be empty costs nothing and may use a kept connection."""

    async def conversation(peer):
        while True:
            await peer.read_message()
            await peer.send(OK)

    upstream = await rig.server(conversation)
    for _ in range(2):
        await (await upstream.send("GET", b"/", [], Source([], 0))).read(10)
    assert rig.connections == 1


async def test_answer_before_the_upload_ended(rig):
    """An early answer is delivered; the rest of the upload is dropped and the connection not reused."""

    async def conversation(peer):
        await peer.read_head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await peer.read_all()

    upstream = await rig.server(conversation)
    source = Source([b"abc"], 1000)
    source.gate.clear()
    response = await upstream.send("POST", b"/", [], source)
    assert (response.head.status, await response.read(10)) == (413, b"no")
    await until(lambda: upstream.connections == 0 and not len(upstream.tasks))


async def test_upload_that_fails(rig):
    """An error of the source is the caller's; the engine sees a broken request."""
    broken = asyncio.Event()

    async def conversation(peer):
        try:
            await peer.read_message()
        finally:
            broken.set()

    upstream = await rig.server(conversation)
    with pytest.raises(ValueError, match="client left"):
        await upstream.send("POST", b"/", [], Source([b"abc"], error=ValueError("client left")))
    await broken.wait()


async def test_upload_waits_for_a_slow_engine(rig):
    """An engine that does not read holds the source back."""
    gate = asyncio.Event()

    async def conversation(peer):
        await peer.read_head()
        peer.writer.transport.pause_reading()
        await gate.wait()
        peer.writer.transport.resume_reading()
        await peer.read_chunks()
        await peer.send(OK)

    upstream = await rig.server(conversation)
    source = Source([bytes(50_000)] * 100)
    sending = asyncio.get_running_loop().create_task(upstream.send("POST", b"/", [], source))
    await asyncio.sleep(0.3)
    assert len(source.pieces) > 50
    gate.set()
    assert await (await sending).read(10) == b"ok"


async def test_cancelled_request_closes_its_connection(rig):
    """Cancelling a wait for the answer shows the engine a closed connection, at once."""
    gone, begun = asyncio.Event(), asyncio.Event()

    async def conversation(peer):
        await peer.read_message()
        begun.set()
        await peer.closed()
        gone.set()

    upstream = await rig.server(conversation)
    waiting = asyncio.get_running_loop().create_task(upstream.send("POST", b"/", [], b"{}"))
    await begun.wait()
    waiting.cancel()
    await gone.wait()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert upstream.connections == 0


async def test_close_ends_everything(rig):
    """Closing an upstream breaks running answers off and keeps no connection."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        await peer.closed()

    upstream = await rig.server(conversation)
    response = await upstream.send("GET", b"/", [])
    upstream.close()
    with pytest.raises(EngineGoneError):
        await response.read(10)
    assert upstream.connections == 0


async def test_chunked_helper_is_understood(rig):
    """The tests' own chunked bodies are read back by the code under test."""

    async def conversation(peer):
        await peer.read_message()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"o", b"k"))

    upstream = await rig.server(conversation)
    assert await (await upstream.send("GET", b"/", [])).read(10) == b"ok"
