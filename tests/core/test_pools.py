"""Claims about ``core.pools``: ids by content, numbers, release order, and what is left of released pools."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polykv_proxy.core.pools import PoolTree, pool_id_of
from polykv_proxy.core.types import PoolId, PoolOrigin, PoolState, PoolUid, Scope, as_tokens
from polykv_proxy.errors import PoolCapacityError, PoolInUseError

SCOPE = Scope("")


def content_id(tokens, *, model="m", adapters="", scope=SCOPE):
    """The id of a content."""
    return pool_id_of(as_tokens(tokens), model=model, adapters=adapters, scope=scope)


def add(tree, tokens, *, parent=None, branch_pos=0, ready=True, uid=None, **options):
    """A pool in ``tree``, resident unless not ``ready``."""
    pool = tree.add(
        content_id(tokens),
        as_tokens(tokens),
        scope=SCOPE,
        origin=PoolOrigin.EXPLICIT,
        now_ts=10.0,
        parent=parent,
        branch_pos=branch_pos,
        **options,
    )
    if ready:
        tree.ready(pool, PoolUid(uid if uid is not None else 100 + pool.number))
    return pool


# -- ids --------------------------------------------------------------------------------------------------


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


def test_nobody_attaches_before_a_pool_is_ready():
    """It holds a sequence id while it is computed, and is resident when the engine says so."""
    tree = PoolTree(2)
    pool = add(tree, [1, 2], ready=False)
    assert (pool.resident, pool.occupies_sequence, tree.sequences_used) == (False, True, 1)
    tree.ready(pool, PoolUid(7))
    assert (pool.resident, pool.uid, tree.get(pool.pool_id)) == (True, 7, pool)
    assert len(tree) == 1


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


def test_a_failed_pool_leaves_nothing_behind():
    """Its id is unknown, its number is free, and its parent has no child."""
    tree = PoolTree(2)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1, ready=False)
    tree.failed(child)
    assert tree.get(child.pool_id) is None
    assert not root.children
    assert tree.sequences_used == 1
    tree.failed(child)  # nothing more happens
    assert tree.sequences_used == 1


def test_a_failure_that_may_have_succeeded_keeps_the_number():
    """Where the engine may hold the pool after all, its number is not given away before it was released."""
    tree = PoolTree(1)
    pool = add(tree, [1], ready=False)
    tree.failed(pool, retire=True)
    assert tree.get(pool.pool_id) is None
    with pytest.raises(PoolCapacityError):
        add(tree, [2])
    tree.retired(pool)
    assert add(tree, [2]).number == pool.number


# -- capacity ---------------------------------------------------------------------------------------------


def test_running_out_names_what_could_be_released():
    """Pinned pools and parents are not offered; the counts are."""
    tree = PoolTree(4)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    add(tree, [5], pinned=True)
    add(tree, [6], ready=False)
    with pytest.raises(PoolCapacityError) as caught:
        add(tree, [7])
    assert caught.value.details == {"seq_ids_used": 4, "seq_ids_max": 4, "releasable": [child.pool_id]}
    assert len(tree) == 4


def test_running_out_with_nothing_to_release_says_so():
    """An empty list comes with the reason."""
    tree = PoolTree(1)
    add(tree, [1], pinned=True)
    with pytest.raises(PoolCapacityError, match="pinned or has children"):
        add(tree, [2])


# -- release ----------------------------------------------------------------------------------------------


def test_release_with_children_has_to_be_recursive():
    """The refusal names the children; recursive goes leaves first."""
    tree = PoolTree(3)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    leaf = add(tree, [1, 2, 3], parent=child, branch_pos=2)
    with pytest.raises(PoolInUseError) as caught:
        tree.check_release(root, recursive=False)
    assert caught.value.code == "pool_has_children"
    assert caught.value.details == {"children": [child.pool_id]}
    assert tree.check_release(root, recursive=True) == [leaf, child, root]


def test_a_pool_being_computed_is_not_released():
    """Not alone, and not as part of a subtree."""
    tree = PoolTree(2)
    root = add(tree, [1])
    add(tree, [1, 2], parent=root, branch_pos=1, ready=False)
    with pytest.raises(PoolInUseError) as caught:
        tree.check_release(root, recursive=True)
    assert caught.value.code == "pool_materializing"


def test_a_released_number_is_taken_until_the_engine_gave_it_back():
    """The id is gone at once, the sequence id is not."""
    tree = PoolTree(1)
    pool = add(tree, [1])
    tree.release(pool)
    assert tree.get(pool.pool_id) is None
    assert tree.was_released(pool.pool_id)
    assert tree.sequences_used == 1
    with pytest.raises(PoolCapacityError):
        add(tree, [2])
    tree.retired(pool)
    assert add(tree, [2]).number == 0


def test_released_ids_are_remembered_up_to_a_bound(monkeypatch):
    """The oldest are forgotten first; content that lives again is no longer released."""
    monkeypatch.setattr(PoolTree, "_KNOWN_MAX", 2)
    tree = PoolTree(1)
    ids = []
    for token in range(3):
        pool = add(tree, [token])
        ids.append(pool.pool_id)
        tree.release(pool)
        tree.retired(pool)
    assert [tree.was_released(pool_id) for pool_id in ids] == [False, True, True]
    add(tree, [2])
    assert not tree.was_released(ids[2])


def test_ghosts_stay_until_nobody_holds_them():
    """A released pool is accounted for as a node until it is dropped, and then leaves its parent."""
    tree = PoolTree(2)
    root = add(tree, [1], uid=1)
    child = add(tree, [1, 2], uid=2, parent=root, branch_pos=1)
    tree.release(child)
    tree.retired(child)
    assert tree.nodes() == [root, child]
    assert tree.check_release(root, recursive=False) == [root]  # a ghost is no child
    tree.drop_ghosts({2})
    assert tree.nodes() == [root]
    assert not root.children


def test_a_ghost_that_the_engine_still_has_is_not_dropped():
    """A request that is on its way may attach to it until the engine was told."""
    tree = PoolTree(1)
    pool = add(tree, [1], uid=1)
    tree.release(pool)
    tree.drop_ghosts({1})
    assert tree.nodes() == [pool]
    tree.retired(pool)
    tree.drop_ghosts({1})
    assert tree.nodes() == []


# -- the engine forgot ------------------------------------------------------------------------------------


def test_lost_pools_keep_id_and_tokens_and_nothing_else():
    """No cells, no parent, no ghosts, no sequence ids."""
    tree = PoolTree(3)
    root = add(tree, [1], pinned=True, label="tools")
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    gone = add(tree, [9])
    tree.release(gone)
    tree.lose_all()
    assert tree.nodes() == []
    assert tree.sequences_used == 0
    assert (child.parent, child.branch_pos, child.uid, child.state) == (None, 0, None, PoolState.LOST)
    assert not root.children
    tree.release(root)
    assert tree.nodes() == []  # it holds no cells, so it leaves no ghost
    assert tree.sequences_used == 0


def test_lost_content_takes_up_its_old_life():
    """Created again it has its id, pin, label and birthday; a new label wins."""
    tree = PoolTree(1)
    old = add(tree, [1], pinned=True, label="tools")
    tree.lose_all()
    again = tree.add(
        old.pool_id, old.tokens, scope=SCOPE, origin=PoolOrigin.EXPLICIT, now_ts=50.0, label=None
    )
    assert (again.pinned, again.label, again.created_ts, again.last_access_ts) == (True, "tools", 10.0, 50.0)
    assert len(tree) == 1


# -- against a model --------------------------------------------------------------------------------------


class TreeAgainstModel(RuleBasedStateMachine):
    """Random lives of a tree, compared with plain sets."""

    MAX = 3
    CONTENTS = ((1,), (2,), (1, 2), (1, 3), (1, 2, 3), (2, 2))

    def __init__(self):
        super().__init__()
        self.tree = PoolTree(self.MAX)
        self.alive = {}  # content -> (state, parent content)
        self.retiring = []
        self.released = set()
        self.next_uid = 1

    def pool(self, content):
        """The pool of a content."""
        return self.tree.get(content_id(content))

    def used(self):
        """Sequence ids in use, by the model."""
        return sum(state != "lost" for state, _ in self.alive.values()) + len(self.retiring)

    def children(self, content):
        """Children of a content, by the model."""
        return [each for each, (_, parent) in self.alive.items() if parent == content]

    @rule(content=st.sampled_from(CONTENTS), as_child=st.booleans())
    def create(self, content, as_child):
        """A pool is entered, or refused for want of a number."""
        if self.alive.get(content, ("lost",))[0] != "lost":
            return
        above = content[:-1] if as_child and self.alive.get(content[:-1], ("",))[0] == "resident" else None
        parent = self.pool(above) if above else None
        if self.used() == self.MAX:
            with pytest.raises(PoolCapacityError) as caught:
                add(self.tree, content, parent=parent, branch_pos=len(above or ()), ready=False)
            for pool_id in caught.value.details["releasable"]:
                pool = self.tree.get(PoolId(pool_id))
                assert self.tree.check_release(pool, recursive=False) == [pool]
            return
        add(self.tree, content, parent=parent, branch_pos=len(above or ()), ready=False)
        self.alive.pop(content, None)
        self.alive[content] = ("materializing", above)
        self.released.discard(content)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), works=st.booleans(), unsure=st.booleans())
    def computed(self, data, works, unsure):
        """The engine is done with a pool."""
        content = data.draw(st.sampled_from(sorted(self.alive)))
        state, parent = self.alive[content]
        if state != "materializing":
            return
        pool = self.pool(content)
        if works:
            self.tree.ready(pool, PoolUid(self.next_uid))
            self.next_uid += 1
            self.alive[content] = ("resident", parent)
            return
        self.tree.failed(pool, retire=unsure)
        del self.alive[content]
        if unsure:
            self.retiring.append(pool)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), recursive=st.booleans())
    def release(self, data, recursive):
        """A pool is released, with what is below it."""
        content = data.draw(st.sampled_from(sorted(self.alive)))
        doomed, todo = [], [content]
        while todo:
            each = todo.pop()
            doomed.append(each)
            todo += self.children(each)
        refused = (len(doomed) > 1 and not recursive) or any(
            self.alive[each][0] == "materializing" for each in doomed
        )
        if refused:
            with pytest.raises(PoolInUseError):
                self.tree.check_release(self.pool(content), recursive=recursive)
            return
        going = self.tree.check_release(self.pool(content), recursive=recursive)
        assert {tuple(each.tokens) for each in going} == set(doomed)
        for pool in going:
            assert not self.children(tuple(pool.tokens))  # leaves first
            self.tree.release(pool)
            if self.alive.pop(tuple(pool.tokens))[0] == "resident":
                self.retiring.append(pool)
            self.released.add(tuple(pool.tokens))

    @precondition(lambda self: self.retiring)
    @rule(data=st.data())
    def retired(self, data):
        """The engine gave a number back."""
        pool = data.draw(st.sampled_from(self.retiring))
        self.retiring.remove(pool)
        self.tree.retired(pool)

    @rule()
    def lose_all(self):
        """The engine was restarted."""
        self.tree.lose_all()
        self.alive = dict.fromkeys(self.alive, ("lost", None))
        self.retiring = []

    @invariant()
    def same_pools(self):
        """Ids, states and edges are the model's."""
        assert {tuple(pool.tokens): pool.state.value for pool in self.tree} == {
            content: state for content, (state, _) in self.alive.items()
        }
        for pool in self.tree:
            assert pool.pool_id == content_id(pool.tokens)
            parent = self.alive[tuple(pool.tokens)][1]
            assert (None if pool.parent is None else tuple(pool.parent.tokens)) == parent
            assert {tuple(each.tokens) for each in pool.children if not each.released} == set(
                self.children(tuple(pool.tokens))
            )
        for content in self.CONTENTS:
            if content in self.released:
                assert self.tree.was_released(content_id(content))

    @invariant()
    def numbers_are_unique_and_few(self):
        """No two holders of a sequence id share it."""
        taken = [pool.number for pool in self.tree if pool.occupies_sequence]
        taken += [pool.number for pool in self.retiring]
        assert len(set(taken)) == len(taken) == self.tree.sequences_used == self.used() <= self.MAX
        assert set(taken) <= set(range(self.MAX))


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
