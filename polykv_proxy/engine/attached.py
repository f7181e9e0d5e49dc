"""Watching an engine that somebody else runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from polykv_proxy.engine.health import open_session, probe
from polykv_proxy.engine.state import EngineState, EngineStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.engine.address import EngineAddress

POLL_S = 1.0
"""Seconds between looks."""
SILENT_PROBES = 3
"""Unanswered looks in a row before an engine that accepts connections counts as down."""


class Attached:
    """Reports an engine's state; never starts or stops it."""

    def __init__(self, address: EngineAddress, on_state: Callable[[EngineStatus], None]) -> None:
        self.address = address
        self.status = EngineStatus(state=EngineState.STARTING)
        self._on_state = on_state
        self._running = False
        self._stop_asked = asyncio.Event()
        self._stopped = asyncio.Event()

    def prepare(self) -> None:
        """Nothing to claim."""

    async def run(self) -> None:
        """Report the engine's state whenever it changes, until :meth:`stop`."""
        self._running = True
        silent = 0
        try:
            async with open_session(self.address) as session:
                while not self._stop_asked.is_set():
                    seen = await probe(session, self.address)
                    silent = silent + 1 if seen.silent else 0
                    if not seen.silent or silent >= SILENT_PROBES:
                        self._report(EngineStatus(state=seen.state, reason=seen.reason))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._stop_asked.wait()
        finally:
            self._report(EngineStatus(state=EngineState.DOWN, reason="detached"))
            self._running = False
            self._stopped.set()

    async def stop(self, deadline_s: float) -> None:  # noqa: ARG002 (there is nothing to wait for)
        """Stop watching; the engine itself is left alone."""
        self._stop_asked.set()
        if self._running:
            await self._stopped.wait()

    def _report(self, status: EngineStatus) -> None:
        if status != self.status:
            self.status = status
            self._on_state(status)
