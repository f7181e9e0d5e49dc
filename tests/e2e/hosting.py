"""A proxy for tests that block: it is looked after by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.harness import PATIENCE_S, Served, serve

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Hosted:
    """A running proxy and the loop that reads its log."""

    served: Served
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.served.http.base

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine of the harness returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def cells(self) -> int:
        """Used KV cells of the idle engine, from the engine."""
        return int(self.run(self.served.quiet())["kv"]["n_used"])

    def computed(self) -> int:
        """Prompt tokens that the engine has computed so far."""
        return int(self.run(self.served.computed()))

    def listing(self, key: str | None = None) -> dict[str, Any]:
        """``GET /polykv/pools`` of the idle engine."""
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        return self.run(self.served.listing(headers))

    def clear(self, key: str | None = None) -> None:
        """No pool of this key, and nothing in the slots."""
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        self.run(self.served.clear(headers))


@contextmanager
def hosting(folder: Path, *args: str) -> Iterator[Hosted]:
    """Run `polykv-proxy serve` beside the test, until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy")
    thread.start()
    context = serve(folder, *args)

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(2 * PATIENCE_S)

    try:
        served = run(context.__aenter__())
        try:
            yield Hosted(served, loop)
        finally:
            run(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
