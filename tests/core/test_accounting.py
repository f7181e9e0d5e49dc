"""Claims about ``core.accounting``: every used cell has one owner, checked against sets of cells."""

from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.core.accounting import Draining, Unpooled, attribute
from polykv_proxy.core.pools import PoolTree
from polykv_proxy.core.types import (
    EngineSample,
    PoolId,
    PoolOrigin,
    PoolUid,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)


def add(tree, name, length, *, uid, parent=None, branch_pos=0):
    """A resident pool of ``length`` tokens."""
    pool = tree.add(
        PoolId(name),
        as_tokens(range(length)),
        scope=Scope(""),
        origin=PoolOrigin.EXPLICIT,
        now_ts=0.0,
        parent=parent,
        branch_pos=branch_pos,
    )
    tree.ready(pool, PoolUid(uid))
    return pool


def slot(number, tokens, *, shared=0, uid=0, state=SlotState.IDLE):
    """A slot of a sample."""
    return SlotSample(SlotId(number), state, 1, 0, 0, 0, 0, tokens, shared, PoolUid(uid), 1000)


def sample(used, *slots):
    """A sample with so many used cells."""
    return EngineSample("e", 0.0, used, 1000, 0, slots, ())


def test_an_empty_engine_owes_nothing():
    """No pools and empty slots: nothing is listed."""
    owned = attribute([], sample(0, slot(0, 0)))
    assert (owned.own, owned.suffix, owned.unpooled, owned.draining) == ({}, {}, (), ())
    assert (owned.dead, owned.unattributed) == (frozenset(), 0)


def test_a_shared_cell_counts_once():
    """Two slots on one pool: the pool owns the prefix, each slot its suffix."""
    tree = PoolTree(1)
    pool = add(tree, "a", 100, uid=5)
    owned = attribute(
        tree.nodes(), sample(117, slot(0, 110, shared=100, uid=5), slot(1, 87, shared=80, uid=5))
    )
    assert owned.own == {pool.pool_id: 100}
    assert owned.suffix == {0: 10, 1: 7}
    assert owned.unattributed == 0


def test_slots_that_share_nothing_are_listed():
    """A slot without a pool, or with one that nobody knows, owns all of its tokens."""
    owned = attribute(
        [], sample(70, slot(0, 40, state=SlotState.GEN), slot(1, 30, shared=20, uid=9), slot(2, 0))
    )
    assert owned.unpooled == (Unpooled(0, 40, SlotState.GEN), Unpooled(1, 30, SlotState.IDLE))
    assert owned.unattributed == 0


def test_what_nobody_explains_is_published():
    """Used cells beyond the picture are a number of their own, not somebody's."""
    assert attribute([], sample(12, slot(0, 5))).unattributed == 7


def test_a_released_pool_drains_as_far_as_it_is_held():
    """Children hold up to their branch, slots up to what they share; the furthest counts."""
    tree = PoolTree(2)
    root = add(tree, "root", 100, uid=1)
    child = add(tree, "child", 130, uid=2, parent=root, branch_pos=60)
    tree.release(root)
    owned = attribute(tree.nodes(), sample(160, slot(0, 100, shared=90, uid=1)))
    assert owned.own == {child.pool_id: 70}
    assert owned.draining == (Draining(root.pool_id, 90, 2),)
    assert owned.suffix == {0: 10}
    assert owned.unattributed == 10 + 160 - 180


def test_a_released_pool_that_nobody_holds_is_dead():
    """Its uid is reported, and it owns nothing."""
    tree = PoolTree(1)
    pool = add(tree, "a", 10, uid=3)
    tree.release(pool)
    owned = attribute(tree.nodes(), sample(0))
    assert owned.dead == {3}
    assert not owned.draining


def test_a_dead_child_lets_go_of_its_dead_parent():
    """Reach travels up from the leaves: nobody below, nobody there."""
    tree = PoolTree(2)
    root = add(tree, "root", 10, uid=1)
    child = add(tree, "child", 20, uid=2, parent=root, branch_pos=10)
    tree.release(child)
    tree.release(root)
    assert attribute(tree.nodes(), sample(0)).dead == {1, 2}


@st.composite
def worlds(draw):
    """A tree with some pools released, slots on any of them, and the cells that each sequence holds."""
    tree, pools, held = PoolTree(8), [], {}
    for number in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([None, *pools]))
        branch = 0 if parent is None else draw(st.integers(1, parent.prefix_len))
        length = branch + draw(st.integers(0 if branch else 1, 8))
        pool = add(tree, f"p{number}", length, uid=number + 1, parent=parent, branch_pos=branch)
        pools.append(pool)
        above = [] if parent is None else held[parent.pool_id][:branch]
        held[pool.pool_id] = above + [(pool.pool_id, at) for at in range(branch, length)]
    sequences = dict(held)
    slots = []
    for number in range(draw(st.integers(0, 4))):
        pool = draw(st.sampled_from([None, *pools]))
        shared = 0 if pool is None else draw(st.integers(1, pool.prefix_len))
        tokens = shared + draw(st.integers(0, 6))
        above = [] if pool is None else held[pool.pool_id][:shared]
        sequences[number] = above + [(number, at) for at in range(shared, tokens)]
        slots.append(slot(number, tokens, shared=shared, uid=0 if pool is None else pool.uid))
    for pool in draw(st.permutations(pools)):
        if draw(st.booleans()) and not any(not child.released for child in pool.children):
            tree.release(pool)
            del sequences[pool.pool_id]
    return tree, slots, sequences


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_every_cell_has_the_owner_that_computed_it(world):
    """Own, suffix, unpooled and draining are the sets of living cells by owner, and nothing is left over."""
    tree, slots, sequences = world
    cells = {cell for sequence in sequences.values() for cell in sequence}
    by_owner = {}
    for owner, _ in cells:
        by_owner[owner] = by_owner.get(owner, 0) + 1
    owned = attribute(tree.nodes(), sample(len(cells), *slots))
    assert owned.unattributed == 0
    assert owned.own == {pool.pool_id: by_owner.get(pool.pool_id, 0) for pool in tree}
    private = dict(owned.suffix) | {rest.slot: rest.cells for rest in owned.unpooled}
    assert {number: count for number, count in private.items() if count} == {
        number: count for number, count in by_owner.items() if isinstance(number, int)
    }
    resident = {pool.pool_id for pool in tree}
    assert {rest.pool_id: rest.cells for rest in owned.draining} == {
        owner: count for owner, count in by_owner.items() if owner not in resident and isinstance(owner, str)
    }
    assert all(rest.holders for rest in owned.draining)
    # what is called dead is held by nobody, so that its uid can be forgotten
    dead = {node.pool_id for node in tree.nodes() if node.uid in owned.dead}
    assert not any(owner in dead for owner in by_owner)
