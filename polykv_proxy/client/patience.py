"""Which requests are sent again after an error, and when. Pure.

Rule 1: a request that may have reached decode is never repeated. That is one which is not idempotent and may
have arrived, unless the answer says that it was refused before anything began.
Rule 2: ``Retry-After`` is waited for, not undercut; one beyond what is left of ``max_wait_s`` is not waited
for at all.
Rule 3: what the server says about asking again (``x-should-retry: false``) counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from polykv_proxy.client.errors import (
    ConflictError,
    ConnectionFailedError,
    PolyKVError,
    PoolSaturatedError,
    UnavailableError,
)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0

NOT_BEGUN = frozenset({"engine_loading", "cannot_tell", "stopping"})
"""Codes of 503 that are said before a request is sent to the engine."""

SLOT_BUSY = "slot_busy"
"""Code of a 409 that nothing was done for, because a request has a slot for now."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How much trouble one call puts up with.

    Attributes:
        max_retries: times that it is sent again.
        max_wait_s: seconds of pauses, all together.
    """

    max_retries: int = 2
    max_wait_s: float = 30.0

    def attempts(self) -> Attempts:
        """For one call."""
        return Attempts(self)


class Attempts:
    """The attempts of one call so far."""

    def __init__(self, patience: Patience) -> None:
        self._retries_left = patience.max_retries
        self._wait_left_s = patience.max_wait_s
        self._pause_s = FIRST_PAUSE_S

    def pause_after(self, error: PolyKVError, *, idempotent: bool) -> float | None:
        """Seconds until the call is to be sent again; None: it is not."""
        if not may_repeat(error, idempotent=idempotent) or self._retries_left <= 0:
            return None
        pause = self._pause_s if error.retry_after is None else error.retry_after
        if pause > self._wait_left_s:
            return None
        self._retries_left -= 1
        self._wait_left_s -= pause
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause


def may_repeat(error: PolyKVError, *, idempotent: bool) -> bool:
    """Whether sending the request again does no harm and may help."""
    if error.should_retry is False:
        return False
    if isinstance(error, ConnectionFailedError):
        return idempotent or not error.sent
    if isinstance(error, UnavailableError):
        return idempotent or error.code in NOT_BEGUN
    if isinstance(error, ConflictError):
        return error.code == SLOT_BUSY
    return isinstance(error, PoolSaturatedError)
