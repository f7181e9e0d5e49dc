"""The one place that starts tasks: the event loop itself keeps only weak references to them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class TaskSet:
    """Tasks that stay referenced until they end."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many run."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine that handles its own errors."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def background(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run something to its end whoever leaves that waits for it; cancel the future to stop it."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                got = await coroutine
                if not result.done():
                    result.set_result(got)
            except PolyKVError as error:
                if not result.done():
                    result.set_exception(error)
                    result.exception()  # nobody may be waiting any more
            finally:
                if not result.done():
                    result.cancel()

        task = self.spawn(run())
        result.add_done_callback(lambda done: done.cancelled() and task.cancel())
        return result

    async def wait(self, timeout_s: float) -> bool:
        """Wait for every task, started later ones included; returns whether none is left.

        Args:
            timeout_s: seconds after which to give up; no task is cancelled then.
        """
        deadline = monotonic() + timeout_s
        while self._tasks and (left := deadline - monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return not self._tasks

    async def cancel(self, grace_s: float) -> None:
        """Cancel every task and give the clean-up of each ``grace_s`` seconds in all."""
        for task in self._tasks:
            task.cancel()
        await self.wait(grace_s)
