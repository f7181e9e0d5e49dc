"""Claims about ``core.pools``: ids by content, places, and what stands in the way of an end."""

from dataclasses import replace

import pytest

from core.trees import add, content_id, evicted
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import PoolOrigin, PoolState, PoolUid, Scope, as_tokens
from polykv_proxy.errors import PoolInUseError

# -- ids --------------------------------------------------------------------------------------------------


def test_the_edge_of_a_pool_leads_to_an_ancestor_that_has_an_id():
    """Over parents that were released and still hold cells, as far down as all of them go; else to none."""
    tree = PoolTree(10)
    root = add(tree, [1] * 10, uid=1)
    middle = add(tree, [1] * 4 + [2] * 6, parent=root, branch_pos=4, uid=2)
    leaf = add(tree, [1] * 4 + [2] * 6 + [3], parent=middle, branch_pos=10, uid=3)
    assert leaf.edge == (middle, 10)
    middle.released = True
    assert leaf.edge == (root, 4)
    root.released = True
    assert (leaf.edge, root.edge) == ((None, 0), (None, 0))
    assert leaf.own_len == 1


def test_the_same_content_has_the_same_id():
    """An id is a digest: equal for equal content, whoever computes it."""
    assert content_id([1, 2, 3]) == content_id([1, 2, 3])
    assert len(content_id([1])) == 32


def test_everything_that_changes_kv_changes_the_id():
    """Tokens, model, adapters and scope each count, and cannot run into one another."""
    ids = {
        content_id([1, 2]),
        content_id([1, 2, 3]),
        content_id([2, 1]),
        content_id([1, 2], model="ma"),
        content_id([1, 2], model="", adapters="m"),
        content_id([1, 2], adapters="x"),
        content_id([1, 2], scope=Scope("x")),
        content_id([1, 2], adapters="xs", scope=Scope("")),
    }
    assert len(ids) == 8


# -- one pool ---------------------------------------------------------------------------------------------


def test_a_pool_knows_its_lengths():
    """Own tokens are those behind the branch; a match is the common start."""
    tree = PoolTree(3)
    root = add(tree, [1, 2, 3])
    child = add(tree, [1, 2, 9, 9, 9], parent=root, branch_pos=2)
    assert (root.prefix_len, root.own_len, root.depth()) == (3, 3, 1)
    assert (child.prefix_len, child.own_len, child.depth()) == (5, 3, 2)
    assert child.match(as_tokens([1, 2, 9, 1])) == 3
    assert list(root.subtree()) == [root, child]
    assert list(tree) == [root, child]


def test_a_parent_knows_its_children_once():
    """Joining again changes nothing, nor does leaving again; a root has nobody to tell."""
    tree = PoolTree(3)
    root = add(tree, [1, 2, 3])
    child = add(tree, [1, 2, 9], parent=root, branch_pos=2)
    for pool in (root, child):
        pool.join()
    assert root.children == [child]
    for pool in (root, child, child):
        pool.leave()
    assert root.children == []


def test_content_that_is_known_lives_on():
    """What was given anew counts, the rest stays; who asks for an automatic pool makes it one of his."""
    tree = PoolTree(4)
    old = add(tree, [1, 2, 3], label="a", ttl_s=9.0, pinned=True, origin=PoolOrigin.SNAPSHOT)
    child = add(tree, [1, 2, 9], parent=old, branch_pos=2)
    old.hits = 7
    new = replace(old, origin=PoolOrigin.EXPLICIT, label="b", ttl_s=None, pinned=False, hits=0, children=[])
    new.live_on(old)
    assert (new.origin, new.label, new.ttl_s) == (PoolOrigin.SNAPSHOT, "b", 9.0)
    assert (new.pinned, new.hits, new.before) == (True, 7, PoolState.RESIDENT)
    assert (new.children, child.parent) == ([child], new)
    old.origin, asked = PoolOrigin.AUTO, replace(old, origin=PoolOrigin.EXPLICIT)
    asked.live_on(old)
    assert asked.origin is PoolOrigin.EXPLICIT


# -- what stands in the way ---------------------------------------------------------------------------------


def test_release_with_children_has_to_be_recursive():
    """The refusal names the children; recursive goes leaves first."""
    tree = PoolTree(3)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    leaf = add(tree, [1, 2, 3], parent=child, branch_pos=2)
    with pytest.raises(PoolInUseError) as caught:
        root.check_release(recursive=False)
    assert caught.value.code == "pool_has_children"
    assert caught.value.details == {"children": [child.pool_id]}
    assert root.check_release(recursive=True) == [leaf, child, root]


def test_a_pool_being_computed_is_not_released():
    """Not alone, and not as part of a subtree."""
    tree = PoolTree(2)
    root = add(tree, [1])
    add(tree, [1, 2], parent=root, branch_pos=1, ready=False)
    with pytest.raises(PoolInUseError) as caught:
        root.check_release(recursive=True)
    assert caught.value.code == "pool_materializing"


def test_pins_resident_children_and_unfinished_work_stand_in_the_way_of_an_eviction():
    """Each refusal has its code; a flush takes children, leaves first, and only what is resident."""
    tree = PoolTree(4)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    leaf = add(tree, [1, 2, 3], parent=child, branch_pos=2, ready=False)

    def code(pool, *, flush):
        with pytest.raises(PoolInUseError) as caught:
            pool.check_evict(flush=flush)
        return caught.value.code

    assert code(root, flush=False) == "pool_has_children"
    assert code(root, flush=True) == "pool_materializing"
    tree.ready(leaf, PoolUid(7))
    leaf.pinned = True
    assert code(root, flush=True) == "pool_pinned"
    leaf.pinned = False
    assert root.check_evict(flush=True) == [leaf, child, root]
    gone = evicted(tree, leaf)
    assert child.check_evict(flush=False) == [child]
    assert root.check_evict(flush=True) == [child, root]
    assert gone.check_evict(flush=False) == []
