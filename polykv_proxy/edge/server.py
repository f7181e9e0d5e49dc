"""The listening side: accepts connections, runs a handler per exchange, sweeps deadlines, drains."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from polykv_proxy.edge.client_connection import ClientConnection, Limits
from polykv_proxy.edge.head import error_envelope
from polykv_proxy.edge.tasks import TaskSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import RequestHead
    from polykv_proxy.errors import PolyKVError

_SWEEP_S = 0.25
_CANCEL_GRACE_S = 5.0
_FLUSH_ROUNDS = 40
_BACKLOG = 1024


class Edge:
    """Listens, and runs ``handler`` once for each request.

    Args:
        handler: answers one exchange. A ``PolyKVError`` it raises before its answer began becomes an
            error answer; anything else is reported to the loop's exception handler and becomes a 500.
        limits: what one connection may take.
        render_error: makes the body of an error answer from the head (None: there is no valid one) and
            the error; an OpenAI-style envelope unless given.
    """

    def __init__(
        self,
        handler: Callable[[Exchange], Awaitable[None]],
        *,
        limits: Limits | None = None,
        render_error: Callable[[RequestHead | None, PolyKVError], bytes] | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.render_error = render_error or (lambda _head, error: error_envelope(error))
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.cutting_off = False
        self.tasks = TaskSet()
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept TCP connections; returns the port, of use when ``port`` is 0.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = self._start()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(infos):
            listener = _bind(family, address if port else (address[0], port, *address[2:]))
            port = listener.getsockname()[1]
            self._servers.append(await loop.create_server(self._accept, sock=listener, backlog=_BACKLOG))
        return port

    async def listen_unix(self, path: str) -> None:
        """Accept connections on a Unix socket; a stale socket file is replaced.

        Raises:
            OSError: the path cannot be bound.
        """
        loop = self._start()
        self._servers.append(await loop.create_unix_server(self._accept, path, backlog=_BACKLOG))

    async def close(self, drain_s: float) -> None:
        """Stop accepting, let running exchanges end for up to ``drain_s`` seconds, then cancel them.

        A request that has not arrived in full is refused at once: nobody can tell whether it ever will.
        Whoever is cancelled while this waits for them wants them cancelled at once.
        """
        self.draining = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self.connections):
            connection.close_idle()
            connection.refuse_unsent()
        try:
            if not await self.tasks.wait(drain_s):
                await self._cut_off()
        except asyncio.CancelledError:
            await self._cut_off()
            await self._see_off()
            raise
        await self._see_off()

    async def _cut_off(self) -> None:
        self.cutting_off = True
        await self.tasks.cancel(_CANCEL_GRACE_S)

    async def _see_off(self) -> None:
        """Close what is left."""
        for connection in list(self.connections):
            connection.close_idle()
        for _ in range(_FLUSH_ROUNDS):  # the last answers may still be on their way
            if not self.connections:
                break
            await asyncio.sleep(_SWEEP_S / 5)
        for connection in list(self.connections):
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def active(self) -> int:
        """Exchanges at work."""
        return len(self.tasks)

    def report(self, exchange: Exchange, error: BaseException) -> None:
        """Tell the loop's exception handler about a bug."""
        context: dict[str, Any] = {
            "message": f"unhandled error on {exchange.head.method} {exchange.head.path}",
            "exception": error,
        }
        asyncio.get_running_loop().call_exception_handler(context)

    def _accept(self) -> ClientConnection:
        return ClientConnection(self)

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(_SWEEP_S, self._sweep, loop)
        return loop

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = monotonic()
        for connection in list(self.connections):
            connection.sweep(now)
        self._timer = loop.call_later(_SWEEP_S, self._sweep, loop)


def _bind(family: int, address: tuple[Any, ...]) -> socket.socket:
    """A listening socket whose connections notice dead peers: a silent client may wait for long here."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Inherited by accepted sockets: a peer that vanished is noticed after about a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listener.setblocking(False)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
