"""A proxy in front of an engine that saves."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from api.rig import Rig
from fake_durable import FakeDurable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

QUICK = {"min_tokens": 8, "min_free_bytes": 0, "idle_save_s": 0.0, "pools_every_s": 0.0}


@pytest_asyncio.fixture
async def proxies(tmp_path: Path) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Rig]]]:
    """Starts proxies, each with an engine of its own, over the same folder."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            slots: int = 1,
            max_pools: int = 3,
            prepare: Any = None,
            queue: Any = None,
            origin: Any = None,
            **durable: Any,
        ) -> Rig:
            fake = FakeDurable(tmp_path, slots=slots, max_pools=max_pools)
            if prepare is not None:
                prepare(fake)
            rig = Rig(
                saving=fake,
                pools={"auto_pools": False},
                durable=QUICK | durable,
                queue=queue or {},
                origin=origin,
            )
            return await stack.enter_async_context(rig)

        yield start
