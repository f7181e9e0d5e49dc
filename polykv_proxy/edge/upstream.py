"""The engine side: where an engine is, and the connections that are kept to it.

Rule 1: a keep-alive race is ours to lose, never the client's. A connection is not reused near the end of
its advertised idle time, and a request whose reused connection was closed under it is sent once more, on
a fresh one (RFC 9112 section 9.3.1).
Rule 2: a request that went out on a fresh connection is never repeated: the engine may have died of it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from polykv_proxy.edge.head import request_bytes
from polykv_proxy.edge.tasks import TaskSet
from polykv_proxy.edge.upstream_connection import StaleConnectionError, UpstreamConnection
from polykv_proxy.errors import ConfigError, EngineGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.edge.exchange import BodySource
    from polykv_proxy.edge.head import Headers, ResponseHead
    from polykv_proxy.edge.upstream_response import UpstreamResponse

_CONNECT_TIMEOUT_S = 5.0
_MAX_IDLE = 64
_FULL_QUEUE_WAIT_S = 0.005
_REAP_INTERVAL_S = 0.5  # well below the margin by which idle connections are closed early
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class Dialer(Protocol):
    """Opens sockets to one place."""

    @property
    def prefix(self) -> bytes:
        """Path that is put in front of every target; empty or ``/…`` without a slash at its end."""

    async def dial(self) -> socket.socket:
        """A connected, non-blocking stream socket.

        Raises:
            OSError: nobody listens there.
        """


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens: a Unix socket, or host and port; with an optional path prefix.

    Written ``unix:/run/engine.sock``, ``/run/engine.sock``, ``127.0.0.1:8080`` or
    ``http://127.0.0.1:8080/prefix``; a prefix on a Unix socket follows a second colon:
    ``unix:/run/engine.sock:/prefix``.
    """

    unix_path: str | None
    host: str
    port: int
    prefix: bytes = b""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read one of the forms above.

        Raises:
            ConfigError: it is none of them.
        """
        if text.startswith(("unix:", "/")):
            path, _, prefix = text.removeprefix("unix:").partition(":")
            return cls(path, "", 0, _prefix(prefix))
        if text.startswith("https://"):
            raise ConfigError(f"engine address {text!r}: TLS to an engine is not supported")
        place, slash, prefix = text.removeprefix("http://").partition("/")
        host, colon, port = place.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"engine address {text!r}: expected HOST:PORT or unix:PATH")
        return cls(None, host.strip("[]"), int(port), _prefix(slash + prefix))

    def __str__(self) -> str:
        """The written form."""
        prefix = self.prefix.decode("latin-1")
        if self.unix_path is not None:
            return f"unix:{self.unix_path}:{prefix}" if prefix else f"unix:{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}{prefix}"

    async def dial(self) -> socket.socket:
        """See ``Dialer.dial``."""
        if self.unix_path is not None:
            return await _dial_unix(self.unix_path)
        return await _dial_tcp(self.host, self.port)


def _prefix(text: str) -> bytes:
    return text.rstrip("/").encode("latin-1")


async def _dial_unix(path: str) -> socket.socket:
    """Connect by hand: at a full accept queue (EAGAIN) asyncio reports success and uvloop a failure."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    wait_s = _FULL_QUEUE_WAIT_S
    try:
        while True:
            try:
                connection.connect(path)  # never blocks on a Unix socket
            except BlockingIOError:
                await asyncio.sleep(wait_s)
                wait_s *= 2  # the caller's timeout ends this
            else:
                return connection
    except BaseException:
        connection.close()
        raise


async def _dial_tcp(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError = ConnectionRefusedError(f"no address for {host}")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(connection, address)
        except OSError as exc:
            connection.close()
            failure = exc
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


class Upstream:
    """An engine, reached over kept-alive connections.

    Args:
        address: where it is, as text or as anything that dials.
        max_idle: connections kept for later; more are closed after their answer.
        connect_timeout_s: seconds for a new connection.
    """

    def __init__(
        self,
        address: Dialer | str,
        *,
        max_idle: int = _MAX_IDLE,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        self.address: Dialer = Address.parse(address) if isinstance(address, str) else address
        self.tasks = TaskSet()
        self._max_idle = max_idle
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(  # noqa: PLR0913 - the parts of a request
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | BodySource = b"",
        *,
        named: frozenset[bytes] = frozenset(),
        on_interim: Callable[[ResponseHead], object] | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait, without a limit, for the head of the answer.

        Cancelling this closes the connection, so the engine stops working on the request. The answer must
        be relayed, read or aborted; one that nobody claims is aborted after a minute.

        Args:
            method: request method.
            target: origin-form target; the address's prefix is put in front.
            headers: fields to send. Hop-by-hop ones, ``Expect`` and ``Content-Length`` are replaced.
            body: all bytes, or a source to pass on while it arrives (on a fresh connection, since what
                was passed on cannot be sent again, unless all of it is here already).
            named: further fields to leave out, lower case; those a client's ``Connection`` named.
            on_interim: gets heads with a 1xx status other than 101.

        Raises:
            EngineGoneError: nobody listens, or the connection ended without an answer.
        """
        framing, body = _framing(method, body, headers)
        if target != b"*":
            target = self.address.prefix + target
        head = request_bytes(method, target, headers, named=named, framing=framing)
        if isinstance(body, bytes) and (connection := self._pop_idle()) is not None:
            try:
                return await connection.request(method, head, body, on_interim)
            except StaleConnectionError:
                pass  # rule 1
        connection = await self._connect()
        return await connection.request(method, head, body, on_interim)

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._all)

    def close(self) -> None:
        """Close every connection; answers under way break off."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()

    # -- ConnectionOwner ---------------------------------------------------------------------------------

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if self._closed or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _pop_idle(self) -> UpstreamConnection | None:
        """The connection used last: it has the most of its idle time left."""
        now = monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(now):
                return connection
            connection.abort()
        return None

    def _reap(self) -> None:
        """Close what idled too long or was forgotten: each connection holds a thread of the engine."""
        now = monotonic()
        for connection in [idle for idle in self._idle if not idle.usable(now)]:
            connection.abort()
        for connection in [one for one in self._all if one.unclaimed(now)]:
            connection.abort()
        self._reaper = None
        self._watch()

    def _watch(self) -> None:
        if self._all and self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(_REAP_INTERVAL_S, self._reap)

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                sock = await self.address.dial()
        except (OSError, TimeoutError) as exc:
            raise EngineGoneError(f"the engine does not answer at {self.address}: {exc}") from exc
        try:
            if sock.family == socket.AF_UNIX:
                _, connection = await loop.create_unix_connection(self._make, sock=sock)
            else:
                _, connection = await loop.create_connection(self._make, sock=sock)
        except BaseException:
            sock.close()
            raise
        self._all.add(connection)
        self._watch()
        return connection

    def _make(self) -> UpstreamConnection:
        return UpstreamConnection(self)


def _framing(method: str, body: bytes | BodySource, headers: Headers) -> tuple[bytes, bytes | BodySource]:
    """The field line that frames a request body; a source that has arrived becomes its bytes."""
    if not isinstance(body, bytes):
        whole = body.take_whole()
        if whole is None:
            if body.content_length is None:
                return b"Transfer-Encoding: chunked\r\n", body
            return b"Content-Length: %d\r\n" % body.content_length, body
        body = whole
    # Without a body a length is sent where one is expected or was sent to us (RFC 9110 section 8.6).
    if body or method in _BODY_METHODS or any(name.lower() == b"content-length" for name, _ in headers):
        return b"Content-Length: %d\r\n" % len(body), body
    return b"", body
