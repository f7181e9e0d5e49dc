"""Places that were promised to sessions before they come.

Rule 1: a place is open until it is taken, given back, or its time is over; each ends once.
Rule 2: the same idempotency key names the same promise, as long as its time runs.
Rule 3: they belong to whoever asked for them.
Rule 4: bounded, in number and in time.
Rule 5: the cells of a place are set aside in the ledger as long as it is open, and no longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from polykv_proxy.core.headroom import Arm, Failing, Reason, headroom_sessions, keeps_floor

if TYPE_CHECKING:
    from polykv_proxy.core.headroom import Picture
    from polykv_proxy.core.ledger import CellLedger
    from polykv_proxy.core.policies import Policy
    from polykv_proxy.core.types import PoolId, Scope

MAX_PROMISES = 1024
"""Promises at once."""

MAX_PLACES = 4096
"""Open places at once, of all promises."""

MAX_TTL_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Places that somebody wants."""

    leases: tuple[str, ...]
    """A new id for each session."""
    scope: Scope
    key: str
    """Idempotency key, within the scope."""
    ttl_s: float
    """Seconds after which places that nobody took are free again."""
    pool: PoolId | None = None
    cells_each: int = 0
    """Cells to set aside for each."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Places that were reserved."""

    leases: tuple[str, ...]
    pool: PoolId | None
    expires_at: float
    """Monotonic seconds."""


class Promises:
    """All that are open.

    Args:
        ledger: of the cells that are set aside, if they are known. Replaced with each load of the model.
    """

    def __init__(self, ledger: CellLedger | None = None) -> None:
        self.ledger = ledger
        self._promises: dict[tuple[Scope, str], Promise] = {}
        self._open: dict[str, Scope] = {}
        self._ends: list[tuple[float, Scope, str]] = []

    def __len__(self) -> int:
        """Open places."""
        return len(self._open)

    def find(self, wish: Wish) -> Promise | None:
        """The promise that the same key named before."""
        return self._promises.get((wish.scope, wish.key))

    def has_room(self, places: int) -> bool:
        """Whether so many more are within the bounds."""
        return len(self._promises) < MAX_PROMISES and len(self._open) + places <= MAX_PLACES

    def why_not(self, wish: Wish, picture: Picture, policy: Policy) -> Failing | None:
        """What speaks against a promise; None if nothing does.

        1. Too many are open.
        2. The cells are not there.
        3. An enforced policy would not let so many in, or nobody can tell whether it would.

        Args:
            wish: what somebody wants.
            picture: the engine.
            policy: in force for the pool.
        """
        count = len(wish.leases)
        if not self.has_room(count):
            return Failing(Arm.QUEUE, Reason.QUEUE_FULL)  # 1
        if picture.cells is not None and count * wish.cells_each > picture.cells.admissible:
            return Failing(Arm.CELLS, Reason.CELLS)  # 2
        if not policy.enforced:
            return None
        if picture.stale:
            return Failing(Arm.TPS, Reason.STALE)  # 3
        if not keeps_floor(picture, policy, picture.at_gate + count):
            return Failing(Arm.TPS, Reason.TPS_FLOOR)
        headroom = headroom_sessions(picture, policy)
        return Failing(Arm.CELLS, Reason.CELLS) if headroom is not None and headroom < count else None

    def add(self, wish: Wish, now: float) -> Promise:
        """Promise what is wished; nothing of its key is known."""
        promise = Promise(wish.leases, wish.pool, now + min(wish.ttl_s, MAX_TTL_S))
        self._promises[wish.scope, wish.key] = promise
        heappush(self._ends, (promise.expires_at, wish.scope, wish.key))
        self._open.update(dict.fromkeys(wish.leases, wish.scope))
        for lease in wish.leases:
            self._set_aside(lease, wish.cells_each)
        return promise

    def close(self, lease: str, scope: Scope) -> bool:
        """A place is taken or given back; returns whether it was open, and this caller's."""
        if self._open.get(lease) != scope:
            return False
        del self._open[lease]
        self._set_aside(lease, 0)
        return True

    def _set_aside(self, lease: str, cells: int) -> None:
        if self.ledger is not None:
            self.ledger.earmark(("promised", lease), cells)

    def expire(self, now: float) -> list[str]:
        """Forget promises whose time is over; returns places that nobody took."""
        gone: list[str] = []
        while self._ends and self._ends[0][0] <= now:
            _, scope, key = heappop(self._ends)
            promise = self._promises.pop((scope, key))
            gone += [lease for lease in promise.leases if self.close(lease, scope)]
        return gone
