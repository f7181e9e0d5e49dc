"""Sockets for tests: scripted servers, an edge in front of them, and clients that see every byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from polykv_proxy.edge import Edge, Limits, RelayResult, Upstream, relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.edge import Exchange

LIVENESS_S = 20.0
"""Generous: a test that waits this long hangs."""

GET_1_0 = b"GET / HTTP/1.0\r\n\r\n"

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""How the engine begins a stream."""

ERROR_EVENT = b'data: {"error":{"message":"gone"}}\n\n'


@dataclass
class Message:
    """A message as read from a socket."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        """Status of a response."""
        return int(self.head.split(b" ", 2)[1])

    @property
    def first_line(self) -> bytes:
        """Request or status line."""
        return self.head.split(b"\r\n", 1)[0]

    def field(self, name: bytes) -> bytes | None:
        """First value of a field; ``name`` in any case."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name.lower():
                return value.strip()
        return None


class Peer:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write bytes and let them go."""
        self.writer.write(data)
        await self.writer.drain()

    async def read_head(self) -> bytes:
        """Everything up to the empty line."""
        return await _alive(self.reader.readuntil(b"\r\n\r\n"))

    async def read_exactly(self, size: int) -> bytes:
        """That many bytes."""
        return await _alive(self.reader.readexactly(size))

    async def read_until(self, mark: bytes) -> bytes:
        """Everything up to ``mark``, included."""
        return await _alive(self.reader.readuntil(mark))

    async def read_some(self) -> bytes:
        """What comes next; empty at the end."""
        return await _alive(self.reader.read(65536))

    async def read_all(self) -> bytes:
        """Everything until the peer closes."""
        return await _alive(self.reader.read(-1))

    async def read_message(self, *, bodiless: bool = False) -> Message:
        """A whole message; chunks are taken apart, a body without a length runs to the close."""
        message = Message(await self.read_head(), b"")
        if bodiless or message.first_line.endswith(b" 204 No Content"):
            return message
        if (length := message.field(b"content-length")) is not None:
            message.body = await self.read_exactly(int(length))
        elif message.field(b"transfer-encoding") == b"chunked":
            message.body = await self.read_chunks()
        elif message.head.startswith(b"HTTP/"):
            message.body = await self.read_all()
        return message

    async def read_chunks(self) -> bytes:
        """A chunked body without its framing."""
        payload = b""
        while size := int(await self.read_until(b"\r\n"), 16):
            payload += (await self.read_exactly(size + 2))[:-2]
        assert await self.read_exactly(2) == b"\r\n"
        return payload

    async def closed(self) -> None:
        """Wait until the other end is gone, in whatever way."""
        with contextlib.suppress(ConnectionError):
            while await self.read_some():
                pass

    def close(self) -> None:
        """Close in an orderly way."""
        self.writer.close()

    def reset(self) -> None:
        """Close with a reset (on TCP)."""
        sock = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def _alive(awaitable):
    async with asyncio.timeout(LIVENESS_S):
        return await awaitable


class Rig:
    """Starts scripted servers, edges and clients, and closes all of them.

    Attributes:
        results: what each relay of ``proxy`` returned.
        cancelled: exchanges whose handler was cancelled.
        problems: what reached the loop's exception handler.
    """

    def __init__(self) -> None:
        self.results: list[RelayResult] = []
        self.cancelled: list[Exchange] = []
        self.problems: list[dict] = []
        self.connections = 0
        self._stack = contextlib.AsyncExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="edge-"))

    async def __aenter__(self) -> Self:
        """Watch the loop's exception handler."""
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: self.problems.append(context))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close everything, last first."""
        await self._stack.aclose()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    async def server(self, conversation: Callable[[Peer], Awaitable[None]], *, tcp: bool = False) -> Upstream:
        """An upstream whose every connection runs ``conversation`` and is closed after it."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            try:
                await conversation(Peer(reader, writer))
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        if tcp:
            server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 26)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        else:
            path = self._folder / f"upstream-{len(list(self._folder.iterdir()))}.sock"
            server = await asyncio.start_unix_server(connected, str(path), limit=1 << 26)
            address = f"unix:{path}"
        self._stack.callback(server.close)
        return self.upstream(address)

    def upstream(self, address) -> Upstream:
        """An upstream, closed with the rig."""
        upstream = Upstream(address)
        self._stack.callback(upstream.close)
        return upstream

    async def edge(self, handler, *, limits: Limits | None = None) -> int:
        """An edge; returns its port."""

        async def watched(exchange: Exchange) -> None:
            try:
                await handler(exchange)
            except asyncio.CancelledError:
                self.cancelled.append(exchange)
                raise

        edge = Edge(watched, limits=limits)
        port = await edge.listen("127.0.0.1", 0)
        self._stack.push_async_callback(edge.close, 0.0)
        return port

    async def proxy(self, upstream: Upstream, *, stream_body=False, limits=None, **relay_options) -> int:
        """An edge that relays everything to ``upstream``; returns its port."""

        async def handler(exchange: Exchange) -> None:
            head = exchange.head
            body = exchange.body if stream_body else await exchange.read_body(1 << 30)
            response = await upstream.send(
                head.method,
                head.target,
                head.headers,
                body,
                named=head.connection_named(),
                on_interim=exchange.interim,
            )
            self.results.append(await relay(exchange, response, **relay_options))

        return await self.edge(handler, limits=limits)

    async def client(self, port: int, *, slow: bool = False) -> Peer:
        """A connection to an edge; a slow one buffers next to nothing that was not asked for."""
        sock = socket.socket()
        if slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14 if slow else 1 << 26)
        self._stack.callback(writer.close)
        return Peer(reader, writer)


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens soon."""
    async with asyncio.timeout(LIVENESS_S):
        while not condition():
            await asyncio.sleep(0.005)


def get(target: bytes = b"/", *fields: bytes) -> bytes:
    """A GET request."""
    return b"\r\n".join([b"GET " + target + b" HTTP/1.1", b"Host: test", *fields, b"", b""])


def post(body: bytes, *fields: bytes, target: bytes = b"/") -> bytes:
    """A POST request with a length."""
    head = [b"POST " + target + b" HTTP/1.1", b"Host: test", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join([*head, b"", body])


def chunked(*payloads: bytes) -> bytes:
    """A chunked body, ended."""
    return b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads) + b"0\r\n\r\n"


def answering(*pieces: bytes, pause_s: float = 0.0, then=None):
    """A conversation that answers every request with these pieces."""

    async def conversation(peer):
        while True:
            await peer.read_message()
            for piece in pieces:
                await peer.send(piece)
                if pause_s:
                    await asyncio.sleep(pause_s)
            if then is not None:
                await then(peer)
                return

    return conversation


async def close(_peer):
    """The engine dies."""
