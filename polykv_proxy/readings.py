"""Readings of one engine's counters: taken once for all who ask, and told to those who count.

Rule 1: reading changes nothing. Only ``look``, which the sampler calls at a pace of its own, feeds the rates.
Rule 2: a reading from before something changed is old, however short ago it was taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

import structlog

from polykv_proxy.core.types import Capability, EngineSample
from polykv_proxy.errors import PolyKVError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.stock import SlotLook
    from polykv_proxy.edge.tasks import TaskSet
    from polykv_proxy.engine.client import EngineClient
    from polykv_proxy.gatekeeper import Gatekeeper
    from polykv_proxy.metrics import Metrics

log = structlog.get_logger(__name__)

FRESH_S = 0.1
"""Age up to which a sample serves readers who want the present; bounds polling whatever they do."""

QUIET_S = 1.5
"""Between two moments at which an engine without the patch is asked while it works for a client that gets
nothing for now: it looks at a closed connection only after a second in which it told nobody anything."""

GLANCE_S = 2.0
"""For a reading that is only to be shown: the last one shows as much as there is to know, and an engine that
hangs must not keep what is known of the others."""

SILENCE_S = 0.25
"""Without an answer to a look after which the engine counts as starved."""

Counts: TypeAlias = "EngineSample | list[SlotLook] | None"
"""What an engine says it has done; None: nothing."""


def next_moment_s(now: float, every_s: float) -> float:
    """Seconds to the next of the moments that are ``every_s`` apart; all who wait for one wait for the same.

    Two who asked every 1.5 seconds, each at a time of his own, would leave the engine hardly a second.
    """
    return every_s - now % every_s


class Readings:
    """Reads one engine.

    Args:
        plane: its state.
        client: the way to it.
        tasks: where background work is kept.
        metrics: told of progress.
        gatekeeper: told of progress.
        on_sample: what a reading means for the plane is done there, in the step in which it is taken.
    """

    def __init__(  # noqa: PLR0913 - who is told
        self,
        plane: ControlPlane,
        client: EngineClient,
        tasks: TaskSet,
        *,
        metrics: Metrics,
        gatekeeper: Gatekeeper,
        on_sample: Callable[[EngineSample], None],
    ) -> None:
        self.plane = plane
        self._client = client
        self._metrics = metrics
        self._gatekeeper = gatekeeper
        self._tasks = tasks
        self._on_sample = on_sample
        self.due = asyncio.Event()
        """Set whenever a request starts or ends: the sampler looks at once, and clears it."""
        self._sampling: asyncio.Future[EngineSample] | None = None
        self._changed_at = 0.0
        self._looked_at = 0.0
        self._silence: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        """What the engine holds is not what the last reading showed: the next who asks gets a new one."""
        self._changed_at = monotonic()
        self.due.set()

    async def take(self, max_age_s: float = FRESH_S) -> EngineSample | None:
        """A reading no older than ``max_age_s`` seconds; one call to the engine serves all who ask.

        None on an engine without counters, or when it does not answer; the last one stays published.
        """
        if not self.plane.capability.shares_cells or not self.plane.serving:
            return self.plane.sample
        last = self.plane.sample
        if last is not None and last.taken_at > self._changed_at and monotonic() - last.taken_at <= max_age_s:
            return last
        if self._sampling is None:
            self._sampling = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._take_sample(self._sampling))
        try:
            return await asyncio.shield(self._sampling)
        except PolyKVError:
            return self.plane.sample

    async def glance(self) -> None:
        """A fresh reading for whoever only shows it, if the engine gives one soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GLANCE_S):
                await self.take()

    async def look(self, max_age_s: float) -> None:
        """The sampler's look: what came since the last one goes into the rates.

        Only this counts for them: whoever else reads the engine, and how often, changes no rate.
        """
        plane = self.plane
        if not plane.serving:
            return
        counts: Counts
        self._notice_silence()
        try:
            if plane.capability is Capability.ZERO_COPY:
                counts = await self.take(max_age_s)
                if counts is not None and counts.taken_at <= self._looked_at:
                    counts = None  # the last one, still published
            else:
                counts = await self.counts(plane.capability)
        finally:
            if self._silence is not None:
                self._silence.cancel()
        if counts is None:
            self._metrics.on_stale_sample()
        else:
            self.count(counts)

    def _notice_silence(self) -> None:
        """Tell the rates, again and again, that the engine has not answered yet."""

        def still() -> None:
            self.plane.experience.book.on_silence(monotonic())
            self._notice_silence()

        self._silence = asyncio.get_running_loop().call_later(SILENCE_S, still)

    async def counts(self, capability: Capability) -> Counts:
        """What an engine says it has done; None when it says nothing."""
        try:
            if capability is Capability.ZERO_COPY:
                return await self._client.counters()
            return await self._client.stock_slots()
        except PolyKVError as error:
            log.debug("no_counters", reason=error.message)
            return None

    def count(self, counts: Counts) -> None:
        """What came since the last time goes into the rates."""
        now = monotonic()
        if counts is not None:
            if isinstance(counts, EngineSample):
                progress = self.plane.on_counters(counts)
            else:
                progress = self.plane.on_stock_slots(counts, now)
            self._metrics.on_progress(progress)
            self._gatekeeper.on_look(progress, counts, now)
        self._looked_at = monotonic()

    async def _take_sample(self, result: asyncio.Future[EngineSample]) -> None:
        try:
            sample = await self._client.counters()
            self._on_sample(sample)
            result.set_result(sample)
        except PolyKVError as error:
            result.set_exception(error)
            result.exception()  # nobody may be waiting any more
        finally:
            self._sampling = None
            if not result.done():
                result.set_exception(UnavailableError("no reading was taken"))
                result.exception()
