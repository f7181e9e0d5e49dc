"""What keeps a pool, and which may go by themselves.

Rule 1: a pool is held by the requests that run on it, by the slots that share its cells, and by its children:
a child's first cells are its own. So a holder holds all ancestors.
Rule 2: nothing that is held or pinned goes by itself. What somebody asks to evict or release is not asked for
here.
Rule 3: to make room only pools that came by themselves are evicted, and only a grace after their last use.
Rule 4: a pool that was given a lifetime is released when it was out of use for that long. That was asked for,
so it waits for no grace.
Rule 5: a pool that is released while something holds it loses its id at once, and its cells a grace after the
last holder left: the same content finds them. It makes room before anything else does.
Rule 6: a pin that nobody uses is an orphan: pinned, no session rests on the pool, nothing holds it, no child
has an id. It is shown, and released only where a policy says after how long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.types import PoolOrigin, PoolState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from polykv_proxy.core.accounting import Ownership
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.tree import PoolTree
    from polykv_proxy.core.types import EngineSample, PoolId, PoolNumber, PoolUid, SlotId


def riding(sample: EngineSample | None) -> frozenset[PoolUid]:
    """Engine uids of the pools and ghosts whose cells a slot shares; empty before the first reading."""
    if sample is None:
        return frozenset()
    return frozenset(slot.pool_uid for slot in sample.slots if slot.shared_tokens > 0)


def is_held(pool: PrefixPool, ridden: AbstractSet[PoolUid]) -> bool:
    """Whether a request, a slot or a child needs the pool's cells (rule 1).

    Args:
        pool: a pool, or a ghost that its ancestors keep alive for its own holders.
        ridden: see ``riding``.
    """
    if pool.attached or (pool.uid is not None and pool.uid in ridden):
        return True
    return any(
        is_held(child, ridden) if child.released else child.occupies_sequence for child in pool.children
    )


def last_use(pool: PrefixPool) -> float:
    """Epoch seconds at which it was last asked for, or seen to be held."""
    return pool.last_access_ts if pool.held_ts is None else max(pool.last_access_ts, pool.held_ts)


def is_orphan(pool: PrefixPool, ridden: AbstractSet[PoolUid], resting: AbstractSet[PoolId]) -> bool:
    """Whether the pool is pinned for nobody (rule 6).

    Args:
        pool: a pool that has an id.
        ridden: see ``riding``.
        resting: pools that sessions belong to.
    """
    return (
        pool.pinned
        and pool.state is not PoolState.MATERIALIZING
        and pool.pool_id not in resting
        and not pool.living_children
        and not is_held(pool, ridden)
    )


def holds_otherwise(owned: Ownership | None, slot: SlotId) -> bool:
    """Whether the engine was seen to hold something else in this slot: another pool's cells, or nobody's."""
    return owned is not None and (slot in owned.suffix or any(slot == one.slot for one in owned.unpooled))


def resting(sessions: Iterable[Session], owned: Ownership | None) -> frozenset[PoolId]:
    """Pools that sessions belong to: those whose slot holds them, and those that are about to move there.

    Args:
        sessions: all of them.
        owned: what was seen of the slots; None before the first reading.
    """
    found = set()
    for session in sessions:
        if session.moves_to is not None:
            found.add(session.moves_to)
        if session.pool is None or session.slot is None:
            continue
        if session.running or not holds_otherwise(owned, session.slot):
            found.add(session.pool)
    return frozenset(found)


def note_orphans(tree: PoolTree, orphans: AbstractSet[PoolId], now_ts: float) -> list[PrefixPool]:
    """Note since when pools are orphans; returns those that have become so.

    Args:
        tree: all pools.
        orphans: those that are now.
        now_ts: epoch seconds.
    """
    new = []
    for pool in tree:
        if pool.pool_id not in orphans:
            pool.orphan_ts = None
        elif pool.orphan_ts is None:
            pool.orphan_ts = now_ts
            new.append(pool)
    return new


def outlived(tree: PoolTree, now_ts: float, orphan_ttl_s: float | None) -> list[PrefixPool]:
    """Orphans that were so, and that nobody asked for, for as long as the policy grants; None: for ever."""
    if orphan_ttl_s is None:
        return []
    return [
        pool
        for pool in tree
        if pool.orphan_ts is not None and now_ts - max(pool.orphan_ts, last_use(pool)) >= orphan_ttl_s
    ]


def tend(tree: PoolTree, sample: EngineSample | None, now_ts: float) -> list[PrefixPool]:
    """Note what is held now; returns the pools whose lifetime is over (rule 4).

    Args:
        tree: all pools.
        sample: the last reading of the engine.
        now_ts: epoch seconds.
    """
    ridden = riding(sample)
    over = []
    for pool in tree:
        if is_held(pool, ridden):
            pool.held_ts = now_ts
        elif (
            pool.ttl_s is not None
            and not pool.pinned
            and not pool.living_children
            and pool.state is not PoolState.MATERIALIZING
            and now_ts - last_use(pool) >= pool.ttl_s
        ):
            over.append(pool)
    return over


def evictable(tree: PoolTree, sample: EngineSample | None, now_ts: float, grace_s: float) -> list[PrefixPool]:
    """Pools that nobody would miss (rules 2 and 3), least valuable first.

    Value is the work that evicting would undo, spread over the time since it was last of use.
    """
    ridden = riding(sample)
    idle = [
        pool
        for pool in tree
        if pool.resident
        and pool.origin is PoolOrigin.AUTO
        and not pool.pinned
        and not is_held(pool, ridden)
        and now_ts - last_use(pool) >= grace_s
    ]
    return sorted(idle, key=lambda pool: pool.own_len * (1 + pool.hits) / (1.0 + now_ts - last_use(pool)))


def over(tree: PoolTree, sample: EngineSample | None, now_ts: float, grace_s: float) -> list[PrefixPool]:
    """Released pools whose last holder left a grace ago; notes which are held now.

    Args:
        tree: all pools.
        sample: the last reading of the engine.
        now_ts: epoch seconds.
        grace_s: how long they stay.
    """
    ridden = riding(sample)
    gone = []
    for pool in tree.lingering:
        if is_held(pool, ridden):
            pool.held_ts = now_ts
        elif now_ts - last_use(pool) >= grace_s:
            gone.append(pool)
    return gone


def strays(tree: PoolTree, sample: EngineSample) -> tuple[list[PoolNumber], list[SlotId]]:
    """What the engine holds and the tree knows nothing of: an answer was lost, and with it what it named.

    Returns:
        Numbers of pools that nobody will release, and slots that share cells under a name that nobody knows.
        What is under a number that somebody works with is left to them.
    """
    taken = tree.numbers_taken
    known = {node.uid for node in tree.nodes()}
    at_work = {pool.uid for pool in sample.pools if pool.number in taken}
    numbers = [pool.number for pool in sample.pools if pool.number not in taken]
    slots = [
        slot.slot
        for slot in sample.slots
        if slot.shared_tokens > 0 and slot.pool_uid not in known and slot.pool_uid not in at_work
    ]
    return numbers, slots
