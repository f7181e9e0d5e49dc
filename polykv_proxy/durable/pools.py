"""Pools that outlive their engine: saved now and then, and rebuilt under the same ids.

Rule 1: what comes back comes parents first, from disk where a file is right, else by prefill.
Rule 2: a pool's id names its content on this model. What is found on disk is only believed if its tokens have
that very id.
Rule 3: who released a pool does not find it again: its file goes, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from polykv_proxy.core.catalogue import Kind, PoolRecord, Reason
from polykv_proxy.core.keeping import last_use
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.pools import PrefixPool
from polykv_proxy.core.rebuild import rebuilds
from polykv_proxy.core.types import PoolNumber, PoolOrigin, PoolState, PoolUid
from polykv_proxy.durable.saves import Label
from polykv_proxy.durable.shelf import part_of
from polykv_proxy.errors import EngineGoneError, PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.core.catalogue import Entry
    from polykv_proxy.core.rebuild import Rebuild
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.engine.wire import SlotFile
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)


class SavedPools:
    """The saved pools of one engine.

    Args:
        runtime: the engine's control plane at work.
        pooling: computes what is not on disk.
        shelf: its saved states.
        recent_s: seconds since its last use for which a pool that is not pinned is worth saving.
    """

    def __init__(self, runtime: Runtime, pooling: Pooling, shelf: Shelf, *, recent_s: float) -> None:
        self._runtime = runtime
        self._plane = runtime.plane
        self._pooling = pooling
        self._shelf = shelf
        self._recent_s = recent_s

    # -- saving ------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Save the pools that are worth it and not on disk yet, parents first."""
        if not self._shelf.on or not self._plane.capability.shares_cells:
            return
        self.note_use()
        for pool in sorted(self._plane.tree, key=lambda each: each.prefix_len):
            if self._is_worth_it(pool) and not self._is_saved(pool):
                await self._save(pool)

    def note_use(self) -> None:
        """Tell the disk when pools were used last: their lifetimes go on after a restart from there."""
        for pool in self._plane.tree:
            if pool.resident and (entry := self._entry(pool)) is not None:
                self._shelf.used_at(entry, last_use(pool))

    def _is_worth_it(self, pool: PrefixPool) -> bool:
        if not pool.resident:
            return False
        below = any(self._is_worth_it(child) for child in pool.living_children)
        return pool.pinned or below or self._runtime.now_ts() - last_use(pool) <= self._recent_s

    def _label(self, pool: PrefixPool) -> Label:
        above, branch_pos = pool.edge
        record = PoolRecord(
            pool_id=pool.pool_id,
            origin=pool.origin.value,
            label=pool.label,
            pinned=pool.pinned,
            ttl_s=pool.ttl_s,
            created_ts=pool.created_ts,
            last_access_ts=pool.last_access_ts,
            parent=None if above is None else above.pool_id,
            branch_pos=branch_pos,
        )
        key, used = pool.pool_id, last_use(pool)
        return Label(kind=Kind.POOL, key=key, scope=pool.scope, config={}, pool=record, used_ts=used)

    def _entry(self, pool: PrefixPool) -> Entry | None:
        model = self._shelf.model_id
        return self._shelf.catalogue.get((Kind.POOL.value, pool.scope, pool.pool_id, model))

    def _is_saved(self, pool: PrefixPool) -> bool:
        entry = self._entry(pool)
        if entry is None or entry.state.pool is None:
            return False
        before, now = entry.state.pool, self._label(pool).pool
        assert now is not None
        told = ("origin", "label", "pinned", "ttl_s", "parent", "branch_pos")
        return all(getattr(before, name) == getattr(now, name) for name in told)

    async def _save(self, pool: PrefixPool) -> None:
        epoch, uid = self._runtime.epoch, pool.uid
        known = self._entry(pool)
        if known is not None:
            await self._shelf.restate(known, self._label(pool).pool)
            return

        async def write(name: str) -> SlotFile:
            written = await self._runtime.client.save_pool(pool.number, name)
            if self._runtime.epoch != epoch or pool.uid != uid or not pool.resident:
                raise EngineGoneError("the pool went while it was saved")  # its number is another's, perhaps
            return written

        entry = await self._shelf.saves.save(self._label(pool), pool.prefix_len, write)
        if entry is not None and entry.tokens != pool.tokens:
            await self._shelf.remove(entry, Reason.IDENTITY_CHANGED)

    async def drop_released(self) -> None:
        """Delete the files of pools that nobody knows any more (rule 3)."""
        tree = self._plane.tree
        for entry in self._shelf.catalogue.pools(self._shelf.model_id):
            record = entry.state.pool
            if record is not None and tree.was_released(record.pool_id):
                await self._shelf.remove(entry, Reason.DELETED)

    # -- coming back -------------------------------------------------------------------------------------

    def recall(self) -> int:
        """Enter what earlier runs of the proxy saved as lost pools; returns how many are new to the tree."""
        count = 0
        for entry in self._shelf.catalogue.pools(self._shelf.model_id):
            record, state = entry.state.pool, entry.state
            if record is None or self._plane.pools.id_of(state.tokens, state.scope) != record.pool_id:
                continue  # rule 2
            if self._plane.tree.was_released(record.pool_id) or record.origin not in tuple(PoolOrigin):
                continue  # the latter: saved by a proxy that knows more kinds of pools
            pool = PrefixPool(
                pool_id=record.pool_id,
                tokens=state.tokens,
                scope=state.scope,
                number=PoolNumber(0),  # none, until it is back
                origin=PoolOrigin(record.origin),
                created_ts=record.created_ts,
                label=record.label,
                pinned=record.pinned,
                ttl_s=record.ttl_s,
                last_access_ts=max(record.last_access_ts, entry.used_ts),
                home=None if record.parent is None else (record.parent, record.branch_pos),
                lost_resident=True,
            )
            count += self._plane.tree.remember(pool)
        return count

    async def rebuild(self) -> None:
        """Bring back what the engine lost (rule 1)."""
        epoch = self._runtime.epoch
        for step in rebuilds(self._plane.tree):
            if self._runtime.epoch != epoch or not self._plane.serving:
                return
            pool = self._plane.tree.get(step.pool.pool_id)
            if pool is None or pool.state is not PoolState.LOST:
                continue  # somebody asked for it meanwhile
            try:
                source = await self._bring_back(step)
            except PolyKVError as error:
                source = "failed"
                log.warning("pool_not_rebuilt", pool_id=pool.pool_id, reason=error.message)
            self._runtime.metrics.rebuilds[source] += 1
            log.info("pool_rebuilt", pool_id=pool.pool_id, tokens=pool.prefix_len, source=source)

    async def _bring_back(self, step: Rebuild) -> str:
        pool = step.pool
        parent = None if step.parent is None else self._plane.tree.get(step.parent.pool_id)
        if parent is not None and not parent.resident:
            parent = None
        branch_pos = 0 if parent is None else step.branch_pos
        used = pool.last_access_ts
        back = await self._from_disk(pool, parent, branch_pos)
        source = "disk"
        if back is None:
            source = "prefill"
            back, _, _ = await self._pooling.create(
                pool.tokens,
                pool.scope,
                label=None,
                pin=False,
                origin=pool.origin,
                parent=parent,
                branch_pos=branch_pos,
            )
        back.last_access_ts = used  # coming back is no use
        return source

    async def _from_disk(
        self, pool: PrefixPool, parent: PrefixPool | None, branch_pos: int
    ) -> PrefixPool | None:
        entry = self._entry(pool)
        if entry is None or not self._shelf.on or entry.tokens != pool.tokens:
            return None
        async with self._shelf.holding(entry):
            if not await self._fits(pool) or not await self._shelf.check(entry) or not self._shelf.on:
                return None
            try:
                return await self._restore(pool, entry, parent, branch_pos)
            except EngineGoneError:
                raise
            except PolyKVError as error:
                self._runtime.readings.changed()
                sample = await self._runtime.readings.take(max_age_s=0.0)
                self._shelf.not_restored(entry, error, sample)
                return None

    async def _fits(self, pool: PrefixPool) -> bool:
        """Whether there are cells for all of it: for a moment it takes also those that are its parent's."""
        sample = await self._runtime.readings.take(max_age_s=0.0)
        ledger = self._plane.cells.ledger
        if sample is None or ledger is None:
            return False
        return min(sample.cells_free, ledger.figures().admissible) >= pool.prefix_len  # who runs keeps his

    async def _restore(
        self, pool: PrefixPool, entry: Entry, parent: PrefixPool | None, branch_pos: int
    ) -> PrefixPool:
        runtime, plane = self._runtime, self._plane
        wanted = Wanted(origin=pool.origin)

        def enter() -> tuple[PrefixPool, bool]:
            there = parent is not None and parent.resident  # it may have gone while the file was looked at
            return plane.pools.enter(
                pool.tokens,
                pool.scope,
                wanted,
                now_ts=runtime.now_ts(),
                parent=parent if there else None,
                branch_pos=branch_pos if there else 0,
            )

        entered, new = await self._pooling.room.for_one(enter)
        if not new:
            return entered
        epoch, done = runtime.epoch, False
        try:
            number = None if entered.parent is None else entered.parent.number
            made = await runtime.client.restore_pool(
                entered.number, entry.state.file, number, entered.branch_pos
            )
            if made.n_tokens != pool.prefix_len:
                raise part_of(entry, made.n_tokens)
            plane.pools.on_ready(entered, PoolUid(made.uid))
            done = True
        finally:
            if not done:
                plane.pools.on_failed(entered, retire=True)
                runtime.spawn(self._pooling.room.take_back(entered.number, epoch))
        runtime.readings.changed()
        entry.uses += 1  # and not its time: coming back is no use
        return entered
