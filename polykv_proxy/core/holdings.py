"""What pools hold of an engine's cells, and what may be taken back of it, written into its ledger.

Rule 1: a pool holds its own cells, as they were last seen; a newer one has what it was made of.
Rule 2: pools that came by themselves and are ridden by nobody but idle conversations can go, a grace after
their last use. Those are taken back with it, so they go first: it is worth more than they are.
Rule 3: a pool that lingers goes like that, and before all others once nothing holds it.
Rule 4: what is left of pools that are gone goes with the idle slots that alone keep it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.keeping import is_held, last_use, riding
from polykv_proxy.core.types import PoolOrigin

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from polykv_proxy.core.accounting import Ownership
    from polykv_proxy.core.ledger import CellLedger
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.slots import SlotBoard
    from polykv_proxy.core.tree import PoolTree
    from polykv_proxy.core.types import EngineSample, PoolId, PoolUid, SlotId


class PoolHoldings:
    """What the ledger of one engine, of one load of its model, knows of pools."""

    def __init__(self) -> None:
        self._pools: set[PoolId] = set()
        self._rests: set[tuple[SlotId, ...]] = set()
        """Slots that keep what is left of pools."""

    def write(  # noqa: PLR0913 - what is seen of pools
        self,
        ledger: CellLedger,
        tree: PoolTree,
        board: SlotBoard,
        *,
        sample: EngineSample | None,
        owned: Ownership | None,
        grace_s: float,
        now_ts: float,
    ) -> None:
        """Bring the ledger up to date.

        Args:
            ledger: where it is written.
            tree: all pools.
            board: which slots are idle.
            sample: the last reading of the engine; None before the first.
            owned: whose the cells were in it.
            grace_s: seconds that an automatic pool stays after its last use.
            now_ts: epoch seconds.
        """
        own = {} if owned is None else owned.cells
        at_work = _at_work(sample, board)
        held = riding(sample)
        kept = set()
        for pool in (*tree, *tree.lingering):
            cells = own.get(pool.pool_id, pool.own_len)
            if not cells or not (pool.resident or pool.lingers):
                continue
            kept.add(pool.pool_id)
            if pool.lingers:
                value = _value_of_released(pool, held, at_work, ledger.total)
                lasting = False
            else:
                value = _value(pool, at_work, ledger.total, grace_s, now_ts)
                lasting = pool.pinned or (pool.origin is not PoolOrigin.AUTO and pool.ttl_s is None)
            ledger.residents.keep(("pool", pool.pool_id), cells, value=value, lasting=lasting)
        for gone in self._pools - kept:
            ledger.residents.drop(("pool", gone))
        self._pools = kept
        rests = _rests(owned, board)
        for left in self._rests - rests.keys():
            ledger.residents.drop(("rest", left))
        for slots, cells in rests.items():
            ledger.residents.keep(("rest", slots), cells, value=float(ledger.total))
        self._rests = set(rests)


def _value(
    pool: PrefixPool, at_work: AbstractSet[PoolUid], total: int, grace_s: float, now_ts: float
) -> float | None:
    """What is lost with a pool; None: it is not taken back (rule 2)."""
    idle_s = now_ts - last_use(pool)
    automatic = pool.origin is PoolOrigin.AUTO and not pool.pinned
    if not automatic or not pool.resident or idle_s < grace_s or is_held(pool, at_work):
        return None
    return float(total) + pool.own_len * (1 + pool.hits) / (1.0 + idle_s)


def _value_of_released(
    pool: PrefixPool, held: AbstractSet[PoolUid], at_work: AbstractSet[PoolUid], total: int
) -> float | None:
    """The same for one that lingers (rule 3)."""
    if not is_held(pool, held):
        return 0.0  # nobody is to have it any more
    return None if is_held(pool, at_work) else float(total)


def _at_work(sample: EngineSample | None, board: SlotBoard) -> AbstractSet[PoolUid]:
    """Engine uids of the pools and ghosts whose cells running requests share."""
    if sample is None:
        return frozenset()
    return {
        slot.pool_uid for slot in sample.slots if slot.shared_tokens > 0 and not board.slots[slot.slot].idle
    }


def _rests(owned: Ownership | None, board: SlotBoard) -> dict[tuple[SlotId, ...], int]:
    """Cells of pools that are gone, by the slots that alone keep them, where these are idle."""
    found: dict[tuple[SlotId, ...], int] = {}
    for rest in () if owned is None else owned.draining:
        alone = rest.holders == len(rest.slots) and not rest.lingers
        if alone and all(board.slots[slot].idle for slot in rest.slots):
            found[rest.slots] = found.get(rest.slots, 0) + rest.cells
    return found
