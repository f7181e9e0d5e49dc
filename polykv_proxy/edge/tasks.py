"""The one place that starts tasks: the event loop itself keeps only weak references to them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


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
