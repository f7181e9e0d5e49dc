"""Who owns which KV cells.

Cells are counted by ownership, never by membership: a cell that ten sequences hold is one cell. The
engine's figure of used cells is the sum of what pools own, of what each slot holds beyond its shared
prefix, and of the remains of released pools that children or slots still hold.

Rule 1: of a node's own range [D, L), the cells up to its reach are alive. Reach is L while the pool is
resident or lingers, else the furthest position at which a child branches off or a slot shares.
Rule 2: what reaches beyond D into a child's parent counts there, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.types import EngineSample, PoolId, PoolUid, SlotId, SlotState


@dataclass(frozen=True, slots=True)
class Draining:
    """What is left of a pool that has no id any more."""

    pool_id: PoolId
    cells: int
    holders: int
    """Children and slots that keep it alive."""
    slots: tuple[SlotId, ...]
    """Those of the holders that are slots."""
    lingers: bool = False
    """Whether the engine keeps all of it for a while."""
    prefix_len: int = 0
    """Tokens that it had when it had an id."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """A slot that shares nothing."""

    slot: SlotId
    cells: int
    state: SlotState


@dataclass(frozen=True, slots=True)
class Ownership:
    """Every used cell of an engine, attributed once."""

    own: dict[PoolId, int]
    """Cells of each resident pool."""
    suffix: dict[SlotId, int]
    """Private cells of each slot that shares a prefix."""
    riders: dict[PoolId, tuple[SlotId, ...]]
    """The slots that share a prefix with each resident pool."""
    unpooled: tuple[Unpooled, ...]
    draining: tuple[Draining, ...]
    dead: frozenset[int]
    """Engine uids of released pools that hold nothing any more."""
    unattributed: int
    """Used cells that this picture does not explain: 0 on an idle engine, a request's growth between
    two readings otherwise."""

    @property
    def cells(self) -> dict[PoolId, int]:
        """Cells of each resident pool, and what is left of those that have no id any more."""
        return {rest.pool_id: rest.cells for rest in self.draining} | self.own


def attribute(nodes: Iterable[PrefixPool], sample: EngineSample) -> Ownership:
    """Attribute the used cells of one sample.

    Args:
        nodes: resident pools and ghosts, parents in the same collection as their children.
        sample: the engine's counters; tree and slots must be of the same epoch.
    """
    by_uid = {node.uid: node for node in nodes if node.uid is not None}
    whole = {uid for uid, node in by_uid.items() if not node.released or node.lingers}
    reach = {uid: node.prefix_len if uid in whole else 0 for uid, node in by_uid.items()}
    holders = dict.fromkeys(by_uid, 0)
    riders: dict[PoolUid, tuple[SlotId, ...]] = dict.fromkeys(by_uid, ())
    suffix: dict[SlotId, int] = {}
    unpooled: list[Unpooled] = []
    for slot in sample.slots:
        if slot.shared_tokens > 0 and slot.pool_uid in by_uid:
            reach[slot.pool_uid] = max(reach[slot.pool_uid], slot.shared_tokens)
            holders[slot.pool_uid] += 1
            riders[slot.pool_uid] += (slot.slot,)
            suffix[slot.slot] = slot.tokens - slot.shared_tokens
        elif slot.tokens:
            unpooled.append(Unpooled(slot.slot, slot.tokens, slot.state))

    # children first: what a child reaches below its branch point is its parent's to keep
    for uid, node in sorted(by_uid.items(), key=lambda item: -item[1].depth()):
        above = None if node.parent is None else node.parent.uid
        if above is None or above not in by_uid or reach[uid] == 0:
            continue
        reach[above] = max(reach[above], min(reach[uid], node.branch_pos))
        holders[above] += 1

    own: dict[PoolId, int] = {}
    draining: list[Draining] = []
    for uid, node in by_uid.items():
        cells = max(0, reach[uid] - node.branch_pos)
        if not node.released:
            own[node.pool_id] = cells
        elif cells or riders[uid] or node.lingers:
            draining.append(
                Draining(node.pool_id, cells, holders[uid], riders[uid], node.lingers, node.prefix_len)
            )
    explained = (
        sum(own.values())
        + sum(suffix.values())
        + sum(slot.cells for slot in unpooled)
        + sum(rest.cells for rest in draining)
    )
    return Ownership(
        own=own,
        suffix=suffix,
        riders={node.pool_id: riders[uid] for uid, node in by_uid.items() if not node.released},
        unpooled=tuple(unpooled),
        draining=tuple(draining),
        dead=frozenset(uid for uid, node in by_uid.items() if node.released and reach[uid] == 0 and uid),
        unattributed=sample.cells_used - explained,
    )
