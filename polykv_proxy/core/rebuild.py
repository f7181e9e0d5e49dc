"""How the pools that an engine lost come back, in which order and below which parents.

Rule 1: parents before children; among those whose parents are there, what was used last comes first, and what
is pinned before that.
Rule 2: where a parent is gone or stays away, the next ancestor that comes back takes its place, up to the
nearer branch position.
Rule 3: what was not resident when the engine went stays away: somebody gave its cells back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.types import PoolState

if TYPE_CHECKING:
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.tree import PoolTree
    from polykv_proxy.core.types import PoolId


@dataclass(frozen=True, slots=True)
class Rebuild:
    """One pool to bring back."""

    pool: PrefixPool
    parent: PrefixPool | None
    """Comes back before it."""
    branch_pos: int


def rebuilds(tree: PoolTree) -> list[Rebuild]:
    """The lost pools that are to come back, in order."""
    wanted = {pool.pool_id: pool for pool in tree if pool.state is PoolState.LOST and pool.lost_resident}
    steps: dict[PoolId, Rebuild] = {}
    for pool in wanted.values():
        parent, branch_pos = _home(tree, pool, wanted)
        steps[pool.pool_id] = Rebuild(pool, parent, branch_pos)
    use = {pool_id: _use(pool) for pool_id, pool in wanted.items()}
    for step in steps.values():  # an ancestor is as much in use as what needs it
        above = step.parent
        while above is not None and above.pool_id in use:
            use[above.pool_id] = max(use[above.pool_id], use[step.pool.pool_id])
            above = steps[above.pool_id].parent
    ordered: list[Rebuild] = []
    done: set[PoolId] = set()

    def add(step: Rebuild) -> None:
        if step.pool.pool_id in done:
            return
        done.add(step.pool.pool_id)
        if step.parent is not None and step.parent.pool_id in steps:
            add(steps[step.parent.pool_id])
        ordered.append(step)

    for step in sorted(steps.values(), key=lambda step: use[step.pool.pool_id], reverse=True):
        add(step)
    return ordered


def _use(pool: PrefixPool) -> tuple[bool, float]:
    return pool.pinned, pool.last_access_ts


def _home(
    tree: PoolTree, pool: PrefixPool, wanted: dict[PoolId, PrefixPool]
) -> tuple[PrefixPool | None, int]:
    """The nearest ancestor that is there or comes back, and the leading tokens that are its (rule 2)."""
    home, seen = pool.home, {pool.pool_id}
    branch_pos = pool.prefix_len
    while home is not None and home[0] not in seen:
        seen.add(home[0])
        branch_pos = min(branch_pos, home[1])
        above = tree.get(home[0])
        if above is None:
            return None, 0
        if above.resident or above.pool_id in wanted:
            shared = min(branch_pos, above.match(pool.tokens))
            return (above, shared) if shared else (None, 0)
        home = above.home
    return None, 0
