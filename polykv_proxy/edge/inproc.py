"""The control plane as one more upstream: an aiohttp application behind socket pairs.

The application needs no port and no path in the file system, so nothing can reach it but the edge, and
its requests take the same way as those for an engine: the same pool, the same relay, the same
cancellation when a client leaves.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Self

from aiohttp import web

from polykv_proxy.edge.head import HEAD_BYTES
from polykv_proxy.edge.upstream import Upstream

if TYPE_CHECKING:
    from types import TracebackType


class _PairDialer:
    """Connects to a server object of this process."""

    prefix = b""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    def __str__(self) -> str:
        """Name for error messages."""
        return "the control plane"

    async def dial(self) -> socket.socket:
        """A socket whose other end the application serves."""
        server = self._runner.server
        if server is None:
            raise ConnectionRefusedError("the control plane is stopped")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(server, theirs)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return ours


class InProcess:
    """Runs an aiohttp application that only ``upstream`` leads to; an async context manager.

    Args:
        app: the application; its handlers are cancelled when their client leaves.
    """

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            # what came so far passed our own limits, and would be refused here by an answer of another form
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
            max_headers=HEAD_BYTES,
        )
        self.upstream = Upstream(_PairDialer(self._runner))

    async def start(self) -> None:
        """Run the application's start-up."""
        await self._runner.setup()

    async def close(self) -> None:
        """Close the connections, then run the application's shutdown and clean-up."""
        self.upstream.close()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        """``start``."""
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """``close``."""
        await self.close()
