"""Claims about ``core.rebuild``: parents first, what was used last first, nothing that was given back."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.rebuild import rebuilds
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import PoolId, PoolOrigin, PoolState, PoolUid, Scope, as_tokens


def grown(edges, used=(), pinned=()):
    """A tree of resident pools: (name, parent, branch position, own tokens)."""
    tree = PoolTree(32)
    pools = {}
    for number, (name, above, branch_pos, own) in enumerate(edges):
        parent = pools.get(above)
        shared = [] if parent is None else list(parent.tokens[:branch_pos])
        pool = tree.add(
            PoolId(name),
            as_tokens([*shared, *range(1000 * (number + 1), 1000 * (number + 1) + own)]),
            scope=Scope(""),
            origin=PoolOrigin.EXPLICIT,
            now_ts=float(number),
            parent=parent,
            branch_pos=branch_pos,
            pinned=name in pinned,
        )
        tree.ready(pool, PoolUid(number + 1))
        pools[name] = pool
    for name, at in dict(used).items():
        pools[name].last_access_ts = at
    return tree, pools


def names(steps):
    """Each step by its names."""
    return [
        (step.pool.pool_id, None if step.parent is None else step.parent.pool_id, step.branch_pos)
        for step in steps
    ]


def test_a_tree_comes_back_as_it_was():
    """The branch of the child that was used last, then the others."""
    tree, _ = grown(
        [("root", None, 0, 50), ("a", "root", 50, 20), ("b", "root", 30, 20), ("c", "a", 60, 5)],
        {"root": 1, "a": 2, "b": 9, "c": 3},
    )
    tree.lose_all()
    assert names(rebuilds(tree)) == [
        ("root", None, 0),
        ("b", "root", 30),
        ("a", "root", 50),
        ("c", "a", 60),
    ]


def test_what_is_pinned_comes_first():
    """With what it stands on."""
    tree, _ = grown(
        [("x", None, 0, 10), ("y", None, 0, 10), ("z", "y", 10, 10)], {"x": 9, "y": 1, "z": 1}, {"z"}
    )
    tree.lose_all()
    assert names(rebuilds(tree)) == [("y", None, 0), ("z", "y", 10), ("x", None, 0)]


def test_what_was_evicted_stays_away():
    """Its child goes below the next ancestor."""
    tree, pools = grown([("root", None, 0, 50), ("a", "root", 40, 20), ("b", "a", 45, 20)])
    tree.evict(pools["a"])
    tree.lose_all()
    assert names(rebuilds(tree)) == [("root", None, 0), ("b", "root", 40)]


def test_a_second_loss_before_it_is_back_forgets_nothing():
    """Neither who was to come back nor where it was."""
    tree, _ = grown([("root", None, 0, 50), ("a", "root", 50, 20)])
    tree.lose_all()
    again = tree.add(
        PoolId("root"),
        tree.get(PoolId("root")).tokens,
        scope=Scope(""),
        origin=PoolOrigin.EXPLICIT,
        now_ts=9.0,
    )
    assert again.state is PoolState.MATERIALIZING
    tree.lose_all()
    assert names(rebuilds(tree)) == [("root", None, 0), ("a", "root", 50)]


def test_a_parent_that_is_back_already_is_used():
    """And is no step any more."""
    tree, pools = grown([("root", None, 0, 50), ("a", "root", 50, 20)])
    tree.lose_all()
    pool = tree.add(
        PoolId("root"), pools["root"].tokens, scope=Scope(""), origin=PoolOrigin.EXPLICIT, now_ts=9.0
    )
    tree.ready(pool, PoolUid(77))
    assert names(rebuilds(tree)) == [("a", "root", 50)]


def test_a_parent_that_was_released_is_done_without():
    """Nobody asks for it again."""
    tree, pools = grown([("root", None, 0, 50), ("a", "root", 50, 20)])
    tree.lose_all()
    tree.release(pools["root"])
    assert names(rebuilds(tree)) == [("a", None, 0)]


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)),
        min_size=1,
        max_size=12,
    )
)
def test_parents_always_come_before_children(shape):
    """Whatever the tree and the order of use."""
    edges, used = [], {}
    for number, (above, branch_pos, own, at) in enumerate(shape):
        parent = above % (number + 1)
        if parent == number:
            edges.append((f"p{number}", None, 0, own))
        else:
            length = edges[parent][2] + edges[parent][3]
            edges.append((f"p{number}", f"p{parent}", min(branch_pos, length), own))
        used[f"p{number}"] = float(at)
    tree, pools = grown(edges, used)
    homes = {name: pool.edge for name, pool in pools.items()}
    before = {name: (None if above is None else above.pool_id, at) for name, (above, at) in homes.items()}
    tree.lose_all()
    steps = rebuilds(tree)
    assert len(steps) == len(pools)
    seen = set()
    for name, parent, branch_pos in names(steps):
        assert (parent, branch_pos) == before[name]
        assert parent is None or parent in seen
        seen.add(name)
