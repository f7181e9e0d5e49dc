"""The life of an engine as the rest of the proxy sees it: states, reports, and how often to try again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polykv_proxy.engine.address import EngineAddress


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    """Its process exists or is about to; nothing answers yet."""
    LOADING = "loading"
    """It answers, but its model is still being loaded."""
    READY = "ready"
    STOPPING = "stopping"
    """It was asked to end."""
    DOWN = "down"
    """No engine; ``reason`` says why, ``retry_in_s`` when the next start is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One report."""

    state: EngineState
    reason: str | None = None
    pid: int | None = None
    """Process id of an engine of ours."""
    restarts: int | None = None
    """Starts of this engine after its first; None: it is another's."""
    retry_in_s: float | None = None
    """Seconds until the next start, while down."""
    hopeless: bool = False
    """It was never ready and has failed several times: most likely it cannot be started like this."""


class EngineProcess(Protocol):
    """What an engine of ours (``supervisor``) and somebody else's (``attached``) have in common."""

    address: EngineAddress
    status: EngineStatus

    def prepare(self) -> None:
        """Check and claim what the engine needs; raises ConfigError. ``run`` does it otherwise."""

    async def run(self) -> None:
        """Keep the engine until ``stop``."""

    async def stop(self, deadline_s: float) -> None:
        """End it and return when it has ended, by force after ``deadline_s`` seconds."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next start."""

    first_s: float = 0.5
    max_s: float = 60.0
    steady_s: float = 30.0
    """Seconds of readiness after which a failure counts as the first one again."""
    quick_failures: int = 3
    """Failures in a row after which the wait is ``max_s``."""

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row, at least one."""
        if failures >= self.quick_failures:
            return self.max_s
        return min(self.max_s, self.first_s * 2.0 ** (failures - 1))
