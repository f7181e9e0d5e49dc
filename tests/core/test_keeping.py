"""Claims about ``core.keeping``: what keeps pools, which go by themselves, and what nobody knows of."""

from core.planes import SCOPE, sample, serving, slot_sample, turn
from core.planes import pool as made_in
from core.trees import add, evicted
from polykv_proxy.core.keeping import (
    evictable,
    is_held,
    is_orphan,
    last_use,
    note_orphans,
    outlived,
    over,
    resting,
    riding,
    strays,
    tend,
)
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import EngineSample, PoolNumber, PoolOrigin, PoolSample, PoolUid, as_tokens

NOBODY = frozenset()


def rider(uid, number=0):
    """A slot that shares five cells."""
    return slot_sample(number, tokens=9, shared=5, uid=uid)


def test_slots_ride_on_what_they_share_cells_with():
    """A slot that shares nothing rides on nothing, whatever it shared before."""
    assert riding(None) == NOBODY
    assert riding(sample(slots=(rider(3), slot_sample(1, uid=4)))) == {3}


def chain(tree):
    """A root, its child and its grandchild."""
    root = add(tree, [1] * 10, uid=1)
    child = add(tree, [1] * 20, parent=root, branch_pos=10, uid=2)
    return root, child, add(tree, [1] * 30, parent=child, branch_pos=20, uid=3)


def test_a_holder_holds_all_ancestors():
    """A leaf by requests and slots; those above it by the leaf as long as that is resident."""
    tree = PoolTree(10)
    root, child, leaf = chain(tree)
    assert [is_held(pool, NOBODY) for pool in (root, child, leaf)] == [True, True, False]
    assert is_held(leaf, {3})
    leaf.attached = 1
    assert is_held(leaf, NOBODY)
    leaf.attached = 0
    evicted(tree, leaf)
    assert [is_held(pool, NOBODY) for pool in (root, child)] == [True, False]
    evicted(tree, child)
    assert not is_held(root, NOBODY)


def test_what_is_left_of_a_child_holds_its_ancestors_for_its_own_holders():
    """A released leaf whose cells a slot still shares keeps them; once the slot is gone, nothing does."""
    tree = PoolTree(10)
    root, child, leaf = chain(tree)
    tree.release(leaf)
    assert is_held(child, {3})
    assert not is_held(child, NOBODY)
    tree.release(child)
    assert is_held(root, {3})
    assert is_held(root, {2})
    assert not is_held(root, NOBODY)


def test_the_last_use_is_when_it_was_asked_for_or_held():
    """Whatever came later."""
    tree = PoolTree(2)
    pool = add(tree, [1] * 10, uid=1)
    pool.last_access_ts = 50.0
    tend(tree, sample(slots=(rider(1),)), 40.0)
    assert last_use(pool) == 50.0
    tend(tree, sample(slots=(rider(1),)), 60.0)
    tend(tree, sample(), 70.0)
    assert last_use(pool) == 60.0


def test_a_lifetime_counts_from_the_last_use():
    """Held, pinned and with children it goes on; without a lifetime nothing ends."""
    tree = PoolTree(10)
    pool, other = add(tree, [1] * 10, uid=1, ttl_s=5.0), add(tree, [2] * 10, uid=2)
    pool.last_access_ts = other.last_access_ts = 100.0
    held = sample(slots=(rider(1),))
    assert tend(tree, sample(), 104.9) == []
    assert tend(tree, held, 106.0) == []
    assert tend(tree, sample(), 110.9) == []
    pool.pinned = True
    assert tend(tree, sample(), 111.0) == []
    pool.pinned = False
    assert tend(tree, sample(), 111.0) == [pool]
    child = add(tree, [1] * 20, parent=pool, branch_pos=10, uid=3)
    assert tend(tree, sample(), 200.0) == []
    evicted(tree, child)
    assert tend(tree, sample(), 300.0) == []  # still a child by its id


def test_a_lifetime_ends_for_what_is_not_resident_too():
    """Nobody came for the evicted pool either; one that is being computed is wanted."""
    tree = PoolTree(10)
    gone = evicted(tree, add(tree, [1] * 10, uid=1, ttl_s=5.0))
    add(tree, [2] * 10, ready=False, ttl_s=5.0)
    assert tend(tree, None, 1e6) == [tree.get(gone.pool_id)]


def test_the_least_valuable_of_those_that_nobody_would_miss_goes_first():
    """Automatic, idle for long, unpinned, childless; value is work and hits over idle time."""
    tree = PoolTree(10)
    auto = PoolOrigin.AUTO
    small = add(tree, [1] * 10, origin=auto)
    large = add(tree, [2] * 50, origin=auto)
    liked = add(tree, [3] * 10, origin=auto)
    liked.hits = 3
    old = add(tree, [4] * 50, origin=auto)
    old.last_access_ts = -990.0
    add(tree, [5])  # explicit
    add(tree, [6], origin=auto, pinned=True)
    add(tree, [7], origin=auto).attached = 1
    add(tree, [8], origin=auto).last_access_ts = 95.0
    parent = add(tree, [9], origin=auto)
    assert evictable(tree, None, 100.0, 60.0) == [parent, old, small, liked, large]
    child = add(tree, [9, 9], parent=parent, branch_pos=1)
    assert parent not in evictable(tree, None, 100.0, 60.0)
    evicted(tree, child)
    assert parent in evictable(tree, None, 100.0, 60.0)


def test_a_pool_that_was_held_has_its_grace():
    """It is no candidate while a slot rides on it, nor for the grace after the slot left."""
    tree = PoolTree(10)
    pool = add(tree, [1] * 10, origin=PoolOrigin.AUTO, uid=1)
    held, free = sample(slots=(rider(1),)), sample()
    assert evictable(tree, free, 1000.0, 60.0) == [pool]
    assert evictable(tree, held, 1000.0, 60.0) == []
    tend(tree, held, 1000.0)
    tend(tree, free, 1001.0)
    assert evictable(tree, free, 1059.9, 60.0) == []
    assert evictable(tree, free, 1060.0, 60.0) == [pool]


def reading(slots=(), pools=()):
    """Counters with pools by number and uid."""
    held = tuple(PoolSample(PoolNumber(number), PoolUid(uid), 10) for number, uid in pools)
    return EngineSample("e1", 0.0, 0, 1000, 0, slots, held)


def test_what_nobody_knows_of_is_found():
    """A pool under a number that is free here, and a slot on cells of a name that is not in the tree."""
    tree = PoolTree(10)
    pool = add(tree, [1] * 10, uid=1)
    at_work = tree.reserve(SCOPE)
    tree.release(ghost := add(tree, [2] * 10, uid=2))
    tree.retire(ghost.number)
    pools = ((pool.number, 1), (at_work, 7), (8, 8))
    slots = tuple(rider(uid, number) for number, uid in enumerate((1, 2, 7, 8, 9)))
    assert strays(tree, reading(slots, pools)) == ([8], [3, 4])
    assert strays(tree, reading((slot_sample(0, uid=9),), pools[:2])) == ([], [])


def test_what_ran_on_a_pool_that_went_holds_it_no_longer():
    """An eviction leaves the requests to the ghost, a restart ends them: the lifetime goes on."""
    tree = PoolTree(2)
    pool = add(tree, [1] * 10, uid=1, ttl_s=5.0)
    pool.attached = 1
    gone = evicted(tree, pool)
    assert (pool.attached, gone.attached) == (1, 0)
    assert tend(tree, None, 20.0) == [gone]
    tree.release(gone)
    other = add(tree, [2] * 10, uid=2, ttl_s=5.0)
    other.attached = 1
    tree.lose_all()
    assert other.attached == 0
    assert other in tend(tree, None, 20.0)


def test_a_pin_for_nobody_is_an_orphan():
    """CTX-8: not while a request, a slot, a session or a child needs the pool, nor while it is computed."""
    tree = PoolTree(10)
    pool = add(tree, [1] * 10, uid=1, pinned=True)
    assert is_orphan(pool, NOBODY, NOBODY)
    assert not is_orphan(pool, {1}, NOBODY)
    assert not is_orphan(pool, NOBODY, {pool.pool_id})
    pool.attached = 1
    assert not is_orphan(pool, NOBODY, NOBODY)
    pool.attached = 0
    child = add(tree, [1] * 20, parent=pool, branch_pos=10, uid=2)
    assert not is_orphan(pool, NOBODY, NOBODY)
    assert not is_orphan(child, NOBODY, NOBODY)  # nobody pinned it
    tree.release(child)
    assert is_orphan(pool, NOBODY, NOBODY)
    assert not is_orphan(pool, {2}, NOBODY)  # a slot holds what is left of the child
    assert not is_orphan(add(tree, [2] * 10, ready=False, pinned=True), NOBODY, NOBODY)


def test_sessions_rest_on_the_pool_that_their_slot_holds_or_that_they_move_to():
    """One whose slot was seen to hold something else does not, unless it runs there now."""
    plane = serving()
    first, second = made_in(plane), made_in(plane, as_tokens([5] * 10), uid=8)
    session = turn(plane, 1, 2)
    session.pool = first.pool_id
    assert resting(plane.sessions, None) == {first.pool_id}
    plane.on_sample(sample(used=20, slots=(slot_sample(session.slot),)))
    assert resting(plane.sessions, plane.ownership) == NOBODY
    session.running = True
    assert resting(plane.sessions, plane.ownership) == {first.pool_id}
    session.running, session.moves_to = False, second.pool_id
    assert resting(plane.sessions, plane.ownership) == {second.pool_id}
    session.moves_to, session.slot = None, None
    assert resting(plane.sessions, None) == NOBODY


def test_orphans_are_named_once_and_outlive_their_time():
    """Counted from when they became orphans, or from when somebody last asked for them."""
    tree = PoolTree(10)
    pool = add(tree, [1] * 10, uid=1, pinned=True)
    names = frozenset({pool.pool_id})
    assert note_orphans(tree, names, 100.0) == [pool]
    assert note_orphans(tree, names, 101.0) == []
    assert outlived(tree, 1000.0, None) == []
    assert outlived(tree, 109.9, 10.0) == []
    assert outlived(tree, 110.0, 10.0) == [pool]
    pool.last_access_ts = 105.0
    assert outlived(tree, 110.0, 10.0) == []
    assert note_orphans(tree, NOBODY, 116.0) == []
    assert outlived(tree, 1000.0, 10.0) == []
    assert note_orphans(tree, names, 200.0) == [pool]


def test_a_grace_begins_when_the_last_holder_left():
    """POOL-9: of a released pool that was held then; what is below it counts as long as it is held itself."""
    tree = PoolTree(10)
    root, child, leaf = chain(tree)
    for pool in (leaf, child, root):
        tree.release(pool, lingers=pool is not child)
        pool.held_ts = 100.0
    held, free = sample(slots=(rider(3),)), sample()
    assert over(tree, held, 200.0, 60.0) == []
    assert over(tree, free, 259.9, 60.0) == []
    assert set(over(tree, free, 260.0, 60.0)) == {root, leaf}
