"""The tree of prefix pools: which there are, under which numbers, and what is left of those that went.

Rule 1: no two pools have one number, and a number is taken until the engine gave it back.
Rule 2: an id that is gone from the tree may live on in the engine as long as children or slots hold its
cells. Such ghosts are kept for the accounting until the engine shows no holder. One that was held when its id
went may linger: the engine keeps all of it, so that the same content is there again if somebody asks for it.
Where those who attach get cells of their own, a pool's cells are its own alone, and there are no ghosts.
Rule 3: nothing here evicts what someone created explicitly; running out of room is the caller's error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from polykv_proxy.core.pools import PrefixPool
from polykv_proxy.core.prefix import PrefixIndex
from polykv_proxy.core.types import PoolOrigin, PoolState
from polykv_proxy.errors import PoolCapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polykv_proxy.core.types import PoolId, PoolNumber, PoolUid, Scope, Tokens


class PoolTree:
    """All pools of one engine.

    Args:
        max_pools: sequence ids that the engine keeps for pools.
    """

    def __init__(self, max_pools: int) -> None:
        self.max_pools = max_pools
        self.shares_cells = True
        """Whether slots and children hold cells of a pool (rule 2)."""
        self._pools: dict[PoolId, PrefixPool] = {}
        self.index: PrefixIndex[PrefixPool] = PrefixIndex()
        """Resident pools by their content."""
        self._ghosts: list[PrefixPool] = []
        self._retiring: set[PoolNumber] = set()
        """Numbers of released pools that the engine still has to give back."""
        self._known: dict[PoolId, None] = {}
        """Ids that were released: a second release is no error. Bounded, oldest forgotten first."""

    _KNOWN_MAX = 10_000
    _GONE_MAX = 64
    """Pools that came by themselves, were evicted, and are still known by their id and tokens."""

    def __iter__(self) -> Iterator[PrefixPool]:
        """Every pool that has an id, in order of creation, so parents come before children."""
        return iter(self._pools.values())

    def __len__(self) -> int:
        return len(self._pools)

    def get(self, pool_id: PoolId) -> PrefixPool | None:
        """The pool of that id, in whatever state."""
        return self._pools.get(pool_id)

    @property
    def lingering(self) -> list[PrefixPool]:
        """Released pools that the engine still has; the one that was out of use for longest first."""
        return sorted(
            (ghost for ghost in self._ghosts if ghost.lingers), key=lambda ghost: ghost.held_ts or 0.0
        )

    def was_released(self, pool_id: PoolId) -> bool:
        """Whether this id named a pool that was released."""
        return pool_id in self._known

    @property
    def sequences_used(self) -> int:
        """Sequence ids taken by pools."""
        return sum(pool.occupies_sequence for pool in self._pools.values()) + len(self._retiring)

    @property
    def sequence_ids(self) -> tuple[int, int]:
        """The engine's that pools have, and may have; none where they are files."""
        return (self.sequences_used, self.max_pools) if self.shares_cells else (0, 0)

    @property
    def numbers_taken(self) -> set[PoolNumber]:
        """Numbers that pools have, or that somebody still works with."""
        return {pool.number for pool in self._pools.values() if pool.occupies_sequence} | self._retiring

    def hold(self, number: PoolNumber) -> None:
        """Keep a number from being given away until ``retire``: the engine may have something under it."""
        self._retiring.add(number)

    def add(  # noqa: PLR0913 - the facts of a pool
        self,
        pool_id: PoolId,
        tokens: Tokens,
        *,
        scope: Scope,
        origin: PoolOrigin,
        now_ts: float,
        parent: PrefixPool | None = None,
        branch_pos: int = 0,
        label: str | None = None,
        pinned: bool = False,
        ttl_s: float | None = None,
        number: PoolNumber | None = None,
    ) -> PrefixPool:
        """Enter a pool that is about to be materialized.

        A lost or evicted pool of the same content takes up its old life (``PrefixPool.live_on``), and its
        children become the new one's.

        Args:
            pool_id: digest of the content.
            tokens: the full prefix.
            scope: whose it is.
            origin: why it exists.
            now_ts: epoch seconds.
            parent: whose [0, ``branch_pos``) it shares.
            branch_pos: D.
            label: a name for people and policies.
            pinned: whether it is pinned from the start.
            ttl_s: its lifetime out of use.
            number: one that was taken by ``reserve``.

        Raises:
            PoolCapacityError: every sequence id is taken; ``releasable`` names pools nobody needs.
        """
        taken = self._free_number(scope) if number is None else number
        self._retiring.discard(taken)
        pool = PrefixPool(
            pool_id=pool_id,
            tokens=tokens,
            scope=scope,
            number=taken,
            origin=origin,
            created_ts=now_ts,
            parent=parent,
            branch_pos=branch_pos,
            label=label,
            pinned=pinned,
            ttl_s=ttl_s,
            last_access_ts=now_ts,
        )
        old = self._pools.pop(pool_id, None)
        if old is not None:
            old.leave()
            pool.live_on(old)
        self._pools[pool_id] = pool
        self._known.pop(pool_id, None)
        pool.join()
        if number is not None:  # a snapshot: it holds its parent's cells already
            self._bring_back(parent)
        return pool

    def add_ghost(  # noqa: PLR0913 - the facts of a pool
        self,
        pool_id: PoolId,
        tokens: Tokens,
        *,
        scope: Scope,
        number: PoolNumber,
        uid: PoolUid,
        parent: PrefixPool | None,
        branch_pos: int,
    ) -> None:
        """Enter what the engine made under a reserved number and nobody is to have.

        Slots may hold its cells from the first moment (rule 2). The number stays reserved.
        """
        if not self.shares_cells:
            return
        ghost = PrefixPool(
            pool_id=pool_id,
            tokens=tokens,
            scope=scope,
            number=number,
            origin=PoolOrigin.AUTO,
            created_ts=0.0,
            parent=parent,
            branch_pos=branch_pos,
            state=PoolState.RESIDENT,
            uid=uid,
            released=True,
        )
        self._ghosts.append(ghost)
        ghost.join()
        self._bring_back(parent)

    def _bring_back(self, node: PrefixPool | None) -> None:
        """A ghost that was dropped because nobody held its cells: somebody did who became known just now."""
        while node is not None and node.released and node not in self._ghosts:
            self._ghosts.append(node)
            node.join()
            node = node.parent

    def reserve(self, scope: Scope) -> PoolNumber:
        """Take a number for a pool whose content is not known yet; ``add`` uses it, ``retire`` frees it.

        Raises:
            PoolCapacityError: see ``add``.
        """
        number = self._free_number(scope)
        self._retiring.add(number)
        return number

    def retire(self, number: PoolNumber) -> None:
        """The engine has nothing under a reserved or released number any more."""
        self._retiring.discard(number)

    def ready(self, pool: PrefixPool, uid: PoolUid, file_bytes: int | None = None) -> None:
        """It is computed: requests may attach from now on."""
        pool.state = PoolState.RESIDENT
        pool.uid = uid
        pool.file_bytes = file_bytes
        self.index.add(pool)

    def detach(self, pool: PrefixPool) -> None:
        """A pool that is being computed does without its parent, which is not resident: it owns all of it."""
        pool.leave()
        pool.parent, pool.branch_pos = None, 0

    def failed(self, pool: PrefixPool, *, retire: bool = False) -> None:
        """It could not be computed. Its sequence id is free, with ``retire`` once retired.

        A new one is forgotten; one whose id was known before this attempt is again what it was.
        """
        if retire:
            self._retiring.add(pool.number)
        if pool.before is None:
            self._pools.pop(pool.pool_id, None)
            pool.leave()
            return
        pool.state = pool.before
        if pool.state is PoolState.LOST:
            self.detach(pool)

    def release(self, pool: PrefixPool, *, lingers: bool = False) -> None:
        """Take the id away at once; the engine keeps cells that someone still holds (rule 2).

        Its number is taken until ``retire`` says that the engine gave it back.

        Args:
            pool: resident or not.
            lingers: the engine is not asked to give it back yet.
        """
        was_resident = pool.resident
        del self._pools[pool.pool_id]
        pool.released = True
        self._known[pool.pool_id] = None
        while len(self._known) > self._KNOWN_MAX:
            self._known.pop(next(iter(self._known)))
        if was_resident:
            self._haunt(pool)
            pool.lingers = lingers and self.shares_cells
        else:
            pool.leave()

    def take_up(self, pool_id: PoolId) -> PrefixPool | None:
        """Give a pool that lingers its id again, as if it were new; None: there is none of that content."""
        pool = next((ghost for ghost in self.lingering if ghost.pool_id == pool_id), None)
        if pool is None:
            return None
        pool.lingers = pool.released = pool.pinned = False
        pool.label = pool.ttl_s = pool.orphan_ts = None
        self._ghosts.remove(pool)
        self._retiring.discard(pool.number)
        self._known.pop(pool_id, None)
        self._pools[pool_id] = pool
        self.index.add(pool)
        return pool

    def evict(self, pool: PrefixPool) -> PrefixPool:
        """Give a resident pool's cells back but keep its id and tokens; returns what stands for it now.

        Its number is taken until ``retire``. The old object lives on as a ghost while slots hold cells.
        """
        # requests that run on it run on the ghost, and end there
        evicted = replace(pool, state=PoolState.EVICTED, uid=None, file_bytes=None, children=[], attached=0)
        for child in pool.living_children:
            child.parent = evicted
            evicted.children.append(child)
            pool.children.remove(child)
        if pool.parent is not None:
            pool.parent.children.append(evicted)
        self._pools[pool.pool_id] = evicted
        pool.released = True
        self._haunt(pool)
        self._forget()
        return evicted

    def _forget(self) -> None:
        """Release the ids of pools that came by themselves and are long gone: nobody ever asked for them."""
        gone = [
            pool
            for pool in self._pools.values()
            if pool.state in (PoolState.EVICTED, PoolState.LOST)
            and pool.origin is PoolOrigin.AUTO
            and not pool.pinned
            and not pool.living_children
        ]
        gone.sort(key=lambda pool: pool.last_access_ts)
        for pool in gone[: -self._GONE_MAX]:
            self.release(pool)

    def _haunt(self, pool: PrefixPool) -> None:
        if self.shares_cells:
            self._ghosts.append(pool)
        else:
            pool.leave()
        self._retiring.add(pool.number)
        self.index.remove(pool)

    def lose_all(self) -> None:
        """The engine forgot everything: ids and tokens stay, cells and ghosts are gone."""
        for ghost in self._ghosts:
            ghost.lingers = False  # who is about to end its grace finds nothing to end
        self._ghosts.clear()
        self._retiring.clear()
        self.index = PrefixIndex()
        for pool in self._pools.values():
            above, shared = pool.edge
            coming_back = pool.state is PoolState.MATERIALIZING and pool.before is PoolState.LOST
            if pool.state is not PoolState.LOST and not coming_back:  # else nothing came of it since then
                pool.home = None if above is None else (above.pool_id, shared)
                pool.lost_resident = pool.state is PoolState.RESIDENT
        for pool in self._pools.values():
            pool.children.clear()
        for pool in self._pools.values():
            pool.parent, pool.branch_pos, pool.uid, pool.file_bytes = None, 0, None, None
            pool.state, pool.attached = PoolState.LOST, 0  # what ran on it is over, and its lease with it
        self._forget()

    def remember(self, pool: PrefixPool) -> bool:
        """Enter a pool that an earlier engine had, as a lost one; False where its id is known already."""
        if pool.pool_id in self._pools:
            return False
        pool.state = PoolState.LOST
        self._pools[pool.pool_id] = pool
        return True

    def nodes(self) -> list[PrefixPool]:
        """Everything that may hold cells: resident pools and ghosts."""
        return [*(pool for pool in self._pools.values() if pool.resident), *self._ghosts]

    def node(self, uid: PoolUid) -> PrefixPool | None:
        """Who computed the cells of this engine uid: a resident pool or a ghost."""
        return next((node for node in self.nodes() if node.uid == uid), None)

    def drop_ghosts(self, uids: set[int]) -> None:
        """Forget ghosts by their engine uid.

        One that the engine still has to release stays: a request that is on its way may attach until then.
        So does everything that such a one stands on: its first cells are theirs.
        """
        for ghost in sorted(self._ghosts, key=lambda ghost: -ghost.depth()):
            stood_on = any(child.uid is not None for child in ghost.children)
            if ghost.uid in uids and ghost.number not in self._retiring and not stood_on:
                ghost.leave()
                self._ghosts.remove(ghost)

    def _free_number(self, scope: Scope) -> PoolNumber:
        taken = self.numbers_taken
        for number in range(self.max_pools):
            if number not in taken:
                return number  # type: ignore[return-value]
        releasable = [
            pool.pool_id
            for pool in self._pools.values()
            if pool.resident
            and pool.scope == scope  # others' ids are nobody's business, and could not be released
            and not pool.pinned
            and not pool.living_children
        ]
        way_out = "release one of those listed" if releasable else "none of yours could be released as it is"
        places = "sequence ids" if self.shares_cells else "files"
        raise PoolCapacityError(
            f"all {self.max_pools} {places} for pools are taken; {way_out}",
            seq_ids_used=self.sequences_used,
            seq_ids_max=self.max_pools,
            releasable=releasable,
        )
