"""Claims about ``core.tree``: numbers, lives, and what is left of released pools."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.trees import SCOPE, add, content_id, evicted
from polykv_proxy.core.prefix import block_hashes
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import PoolId, PoolOrigin, PoolState, PoolUid, Scope, as_tokens
from polykv_proxy.errors import PoolCapacityError, PoolInUseError


def test_nobody_attaches_before_a_pool_is_ready():
    """It holds a sequence id while it is computed, and is resident when the engine says so."""
    tree = PoolTree(2)
    pool = add(tree, [1, 2], ready=False)
    assert (pool.resident, pool.occupies_sequence, tree.sequences_used) == (False, True, 1)
    tree.ready(pool, PoolUid(7))
    assert (pool.resident, pool.uid, tree.get(pool.pool_id)) == (True, 7, pool)
    assert len(tree) == 1


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
    tree.retire(pool.number)
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
    with pytest.raises(PoolCapacityError, match="none of yours could be released"):
        add(tree, [2])


def test_running_out_names_no_pool_of_another_key():
    """Its ids are nobody else's business, and could not be released by who asks."""
    tree = PoolTree(2)
    mine = add(tree, [1])
    add(tree, [2], scope=Scope("other"))
    for ask in (lambda: add(tree, [3]), lambda: tree.reserve(SCOPE)):
        with pytest.raises(PoolCapacityError) as caught:
            ask()
        assert caught.value.details["releasable"] == [mine.pool_id]


# -- release ----------------------------------------------------------------------------------------------


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
    tree.retire(pool.number)
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
        tree.retire(pool.number)
    assert [tree.was_released(pool_id) for pool_id in ids] == [False, True, True]
    add(tree, [2])
    assert not tree.was_released(ids[2])


def test_ghosts_stay_until_nobody_holds_them():
    """A released pool is accounted for as a node until it is dropped, and then leaves its parent."""
    tree = PoolTree(2)
    root = add(tree, [1], uid=1)
    child = add(tree, [1, 2], uid=2, parent=root, branch_pos=1)
    tree.release(child)
    tree.retire(child.number)
    assert tree.nodes() == [root, child]
    assert root.check_release(recursive=False) == [root]  # a ghost is no child
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
    tree.retire(pool.number)
    tree.drop_ghosts({1})
    assert tree.nodes() == []


def test_what_such_a_ghost_stands_on_is_not_dropped_either():
    """Whoever attaches to it holds its parent's first cells with its own."""
    tree = PoolTree(2)
    root = add(tree, [1], uid=1)
    child = add(tree, [1, 2], uid=2, parent=root, branch_pos=1)
    for pool in (child, root):
        tree.release(pool)
    tree.retire(root.number)
    tree.drop_ghosts({1, 2})
    assert tree.nodes() == [child, root]
    tree.retire(child.number)
    tree.drop_ghosts({1, 2})
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


def test_lost_content_that_cannot_be_computed_stays_lost():
    """Its pin and label survive a bad moment; it has no place in the tree, as before."""
    tree = PoolTree(2)
    old = add(tree, [1, 2], pinned=True, label="tools")
    tree.lose_all()
    root = add(tree, [1])
    again = add(tree, [1, 2], parent=root, branch_pos=1, ready=False)
    tree.failed(again)
    assert tree.get(old.pool_id) is again
    assert (again.state, again.pinned, again.label) == (PoolState.LOST, True, "tools")
    assert (again.parent, again.branch_pos, root.children) == (None, 0, [])
    assert tree.sequences_used == 1


# -- evict, revive ----------------------------------------------------------------------------------------


def test_an_evicted_pool_keeps_its_id_tokens_and_place():
    """Its number is free once the engine gave it back; it is found by id but by no prompt."""
    tree = PoolTree(2)
    root = add(tree, [1, 2])
    child = add(tree, [1, 2, 3], parent=root, branch_pos=2, label="x")
    assert child.check_evict(flush=False) == [child]
    gone = tree.evict(child)
    assert tree.get(child.pool_id) is gone
    assert (gone.state, gone.tokens, gone.label, gone.uid) == (PoolState.EVICTED, child.tokens, "x", None)
    assert (gone.parent, gone.branch_pos) == (root, 2)
    assert tree.sequences_used == 2
    assert tree.index.match(child.tokens, SCOPE) == (root, 2)
    tree.retire(child.number)
    assert tree.sequences_used == 1
    assert tree.nodes() == [root, child]  # a slot may hold its cells
    assert tree.node(child.uid) is child


def test_a_flushed_tree_comes_back_as_it_was():
    """Parents first; children find the new object of their parent."""
    tree = PoolTree(2)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    for pool in root.check_evict(flush=True):
        evicted(tree, pool)
    tree.drop_ghosts({root.uid, child.uid})
    assert tree.nodes() == []
    again = add(tree, [1])
    assert [each.parent for each in again.children] == [again]
    below = tree.get(child.pool_id)
    back = add(tree, [1, 2], parent=below.parent, branch_pos=below.branch_pos)
    assert list(again.subtree()) == [again, back]
    assert (back.is_below(again), back.is_below(child), back.depth()) == (True, False, 2)


def test_an_evicted_pool_that_cannot_be_computed_stays_evicted():
    """In its place; and a pool can do without a parent that is not there."""
    tree = PoolTree(2)
    root = add(tree, [1])
    child = add(tree, [1, 2], parent=root, branch_pos=1)
    below = evicted(tree, child)
    attempt = add(tree, [1, 2], parent=below.parent, branch_pos=1, ready=False)
    tree.failed(attempt)
    assert (attempt.state, attempt.parent, attempt.branch_pos) == (PoolState.EVICTED, root, 1)
    evicted(tree, root)
    alone = add(tree, [1, 2], parent=attempt.parent, branch_pos=1, ready=False)
    tree.detach(alone)
    tree.ready(alone, PoolUid(9))
    assert (alone.parent, alone.own_len, alone.depth()) == (None, 2, 1)
    assert not tree.get(root.pool_id).children


def test_a_released_pool_without_cells_leaves_its_parent():
    """There is no ghost that would be dropped some day."""
    tree = PoolTree(2)
    root = add(tree, [1])
    for _ in range(3):
        below = evicted(tree, add(tree, [1, 2], parent=root, branch_pos=1))
        tree.release(below)
    tree.drop_ghosts({ghost.uid for ghost in tree.nodes() if ghost.released})
    assert root.children == []


def test_pools_that_came_by_themselves_are_forgotten_some_time_after_they_are_gone():
    """The oldest first; never one that somebody asked for, that is pinned, or has children."""
    tree = PoolTree(4)
    auto = PoolOrigin.AUTO

    def leave(pool):
        evicted(tree, pool)
        tree.retire(pool.number)
        tree.drop_ghosts({pool.uid})

    asked = add(tree, [1])
    pinned = add(tree, [2], origin=auto)
    parent = add(tree, [3], origin=auto)
    child = add(tree, [3, 3], parent=parent, branch_pos=1)
    for pool in (asked, pinned, child, parent):
        leave(pool)
    tree.get(pinned.pool_id).pinned = True
    many = [content_id([9, n]) for n in range(200)]
    for n in range(200):
        leave(add(tree, [9, n], origin=auto))
    kept = {pool.pool_id for pool in tree}
    assert kept == {asked.pool_id, pinned.pool_id, parent.pool_id, child.pool_id, *many[-tree._GONE_MAX :]}
    assert tree.was_released(many[0])
    tree.lose_all()
    assert {asked.pool_id, pinned.pool_id, child.pool_id, many[-1]} <= {pool.pool_id for pool in tree}


def test_content_that_is_asked_for_is_not_automatic_any_more():
    """An automatic pool may vanish silently; one that somebody created may not."""
    tree = PoolTree(1)
    evicted(tree, add(tree, [1], origin=PoolOrigin.AUTO))
    assert add(tree, [1]).origin is PoolOrigin.EXPLICIT
    evicted(tree, tree.get(content_id([1])))
    assert add(tree, [1], origin=PoolOrigin.AUTO).origin is PoolOrigin.EXPLICIT


# -- numbers for what is not known yet --------------------------------------------------------------------


def test_a_reserved_number_is_taken_until_it_is_used_or_retired():
    """The pool that comes of it has that number, and it counts once."""
    tree = PoolTree(2)
    one, two = tree.reserve(SCOPE), tree.reserve(SCOPE)
    with pytest.raises(PoolCapacityError):
        tree.reserve(SCOPE)
    pool = add(tree, [1], number=one)
    assert (pool.number, tree.sequences_used) == (one, 2)
    tree.retire(two)
    assert (tree.reserve(SCOPE), tree.sequences_used) == (two, 2)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rejected"])
def test_a_ghost_is_a_node_again_for_whoever_turns_out_to_stand_on_it(kept):
    """It was dropped, with its own parent, because nobody was known to hold its cells."""
    tree = PoolTree(3)
    root = add(tree, [1], uid=7)
    below = add(tree, [1, 2], parent=root, branch_pos=1, uid=8)
    for pool in (below, root):
        tree.release(pool)
        tree.retire(pool.number)
    tree.drop_ghosts({7, 8})
    assert tree.nodes() == root.children == []
    number = tree.reserve(SCOPE)
    if kept:
        add(tree, [1, 2, 3], parent=below, branch_pos=2, uid=9, number=number)
    else:
        facts = {"scope": SCOPE, "number": number, "uid": PoolUid(9), "parent": below, "branch_pos": 2}
        tree.add_ghost(content_id([1, 2, 3]), as_tokens([1, 2, 3]), **facts)
    assert {node.uid for node in tree.nodes()} == {7, 8, 9}
    assert root.children == [below]
    add(tree, [1, 2, 4], parent=below, branch_pos=2, uid=10, number=tree.reserve(SCOPE))
    assert [node.uid for node in tree.nodes()].count(8) == root.children.count(below) == 1


def test_a_ghost_from_birth_is_a_node_and_nothing_else():
    """No id, no match, no child; it goes when its number is back and nobody holds it."""
    tree = PoolTree(2)
    root = add(tree, [1])
    number = tree.reserve(SCOPE)
    facts = {"scope": SCOPE, "number": number, "uid": PoolUid(9), "parent": root, "branch_pos": 1}
    tree.add_ghost(content_id([1, 2]), as_tokens([1, 2]), **facts)
    ghost = tree.node(PoolUid(9))
    assert (ghost.parent, ghost.own_len, ghost.resident) == (root, 1, False)
    assert tree.get(content_id([1, 2])) is None
    assert tree.index.match(as_tokens([1, 2]), SCOPE) == (root, 1)
    assert root.check_release(recursive=False) == root.check_evict(flush=True) == [root]
    tree.drop_ghosts({9})
    assert tree.node(PoolUid(9)) is ghost
    tree.retire(number)
    tree.drop_ghosts({9})
    assert (tree.nodes(), root.children) == ([root], [])
    tree.add_ghost(content_id([3]), as_tokens([3]), **facts | {"parent": None, "branch_pos": 0})
    assert tree.node(PoolUid(9)).depth() == 1


# -- against a model --------------------------------------------------------------------------------------


RUN = 40
"""Tokens that stand for one letter of a content: some contents have whole blocks, others none."""

CONTENTS = ("a", "b", "ab", "ac", "abc", "abd", "bb")
GHOST = "?"
"""In the model: a parent that is not in the tree any more."""


def spelled(content):
    """The tokens of a content."""
    return as_tokens([ord(letter) for letter in content for _ in range(RUN)])


class TreeAgainstModel:
    """A tree and plain tables that live the same life.

    Args:
        dice: what happens next.
    """

    MAX = 4

    def __init__(self, dice):
        self.dice = dice
        self.tree = PoolTree(self.MAX)
        self.alive = {}  # content -> (state, parent content, D)
        self.before = {}  # what those were that are computed again
        self.retiring = []  # numbers that the engine still has to give back
        self.ghosts = {}  # uid -> number at its release
        self.stands_on = {}  # uid -> uid of the parent whose first cells it holds, None for a root
        self.released = set()
        self.next_uid = 1

    # -- helpers -----------------------------------------------------------------------------------------

    def some(self, *states):
        """A content that is in the tree, in one of these states if there is one."""
        return self.dice.choice([each for each in self.alive if self.state(each) in states] or [*self.alive])

    def pool(self, content):
        """The pool of a content."""
        return self.tree.get(content_id(spelled(content)))

    def state(self, content):
        """By the model; empty if there is none."""
        return self.alive.get(content, ("", None, 0))[0]

    def holds_number(self, content):
        """Whether it has a sequence id, by the model."""
        return self.state(content) in ("materializing", "resident")

    def used(self):
        """Sequence ids in use, by the model."""
        return sum(map(self.holds_number, self.alive)) + len(self.retiring)

    def children(self, content):
        """Children of a content, by the model."""
        return [each for each, (_, parent, _) in self.alive.items() if parent == content]

    def below(self, content):
        """A content and all below it, by the model."""
        return [content, *(each for child in self.children(content) for each in self.below(child))]

    def uid(self, parent):
        """One that none had before."""
        self.next_uid += 1
        uid = PoolUid(self.next_uid - 1)
        self.stands_on[uid] = None if parent is None else parent.uid
        return uid

    def haunt(self, pool):
        """A pool's cells outlive it."""
        self.ghosts[pool.uid] = pool.number
        self.retiring.append(pool.number)

    def enter(self, content, parent, branch_pos, **options):
        """Put a pool into the tree and the model, or see it refused for want of a number."""
        full = "number" not in options and self.used() == self.MAX
        tokens = spelled(content)
        if full:
            with pytest.raises(PoolCapacityError) as caught:
                add(self.tree, tokens, parent=parent, branch_pos=branch_pos, ready=False)
            for pool_id in caught.value.details["releasable"]:
                pool = self.tree.get(PoolId(pool_id))
                assert pool.check_release(recursive=False) == [pool]
            return None
        pool = add(self.tree, tokens, parent=parent, branch_pos=branch_pos, ready=False, **options)
        self.before.pop(content, None)
        if self.state(content):
            self.before[content] = self.state(content)
        above = None if parent is None else "".join(chr(token) for token in parent.tokens[::RUN])
        if parent is not None and parent.released:
            above = GHOST
        self.alive.pop(content, None)
        self.alive[content] = ("materializing", above, branch_pos)
        self.released.discard(content)
        return pool

    # -- rules -------------------------------------------------------------------------------------------

    def create(self):
        """A root, an extension or a branch is entered."""
        content = self.dice.choice(CONTENTS)
        if self.holds_number(content):
            return
        resident = [each for each in self.alive if self.state(each) == "resident"]
        above = self.dice.choice([None, *(each for each in resident if each[0] == content[0])])
        common = 0 if above is None else self.pool(above).match(spelled(content))
        branch_pos = self.dice.randint(1, common) if common else 0
        self.enter(content, None if above is None else self.pool(above), branch_pos)

    def revive(self):
        """An evicted pool is to come back to its place; without a parent there it stands alone."""
        content = self.some("evicted")
        if self.state(content) != "evicted":
            return
        old = self.pool(content)
        pool = self.enter(content, old.parent, old.branch_pos)
        if pool is not None and pool.parent is not None and not pool.parent.resident:
            self.tree.detach(pool)
            self.alive[content] = ("materializing", None, 0)

    def computed(self):
        """The engine is done with a pool."""
        works, unsure = self.dice.random() < 0.7, self.dice.random() < 0.5
        content = self.some("materializing")
        state, parent, branch_pos = self.alive[content]
        if state != "materializing":
            return
        pool = self.pool(content)
        if works:
            self.tree.ready(pool, self.uid(pool.parent))
            self.alive[content] = ("resident", parent, branch_pos)
            return
        self.tree.failed(pool, retire=unsure)
        match self.before.pop(content, None):
            case None:
                del self.alive[content]
            case "lost":
                self.alive[content] = ("lost", None, 0)
            case "evicted":
                self.alive[content] = ("evicted", parent, branch_pos)
        if unsure:
            self.retiring.append(pool.number)

    def snapshot(self):
        """A number is reserved, and used for a pool below anything that holds cells, or for a ghost."""
        content, wanted = self.dice.choice(CONTENTS), self.dice.random() < 0.5
        if self.used() == self.MAX:
            with pytest.raises(PoolCapacityError):
                self.tree.reserve(SCOPE)
            return
        number = self.tree.reserve(SCOPE)
        nodes = [node for node in self.tree.nodes() if node.match(spelled(content))]
        below = self.dice.choice([None, *nodes])
        branch_pos = 0 if below is None else below.match(spelled(content))
        if wanted and not self.holds_number(content):
            pool = self.enter(content, below, branch_pos, number=number)
            assert pool.number == number
            self.tree.ready(pool, self.uid(pool.parent))
            self.before.pop(content, None)
            self.alive[content] = ("resident", *self.alive[content][1:])
            return
        uid = self.uid(below)
        place = {"scope": SCOPE, "number": number, "uid": uid, "parent": below, "branch_pos": branch_pos}
        self.tree.add_ghost(content_id(spelled(content)), spelled(content), **place)
        self.ghosts[uid] = number
        self.retiring.append(number)

    def pin(self):
        """Somebody holds a pool, or does not any more."""
        self.pool(self.some()).pinned = self.dice.random() < 0.3

    def evict(self):
        """Cells are given back, with those of the subtree; ids and places stay."""
        flush = self.dice.random() < 0.5
        content = self.some()
        doomed = self.below(content) if flush else [content]
        refused = (
            any(self.pool(each).pinned for each in doomed)
            or any(self.state(each) == "materializing" for each in doomed)
            or (not flush and any(map(self.holds_number, self.children(content))))
        )
        if refused:
            with pytest.raises(PoolInUseError):
                self.pool(content).check_evict(flush=flush)
            return
        going = self.pool(content).check_evict(flush=flush)
        assert {id(pool) for pool in going} == {
            id(self.pool(each)) for each in doomed if self.state(each) == "resident"
        }
        for pool in going:
            name = next(each for each in doomed if self.pool(each) is pool)
            assert not any(map(self.holds_number, self.children(name)))  # leaves first
            stand_in = self.tree.evict(pool)
            assert (stand_in.tokens, stand_in.label) == (pool.tokens, pool.label)
            self.alive[name] = ("evicted", *self.alive[name][1:])
            self.haunt(pool)

    def release(self):
        """A pool is released, with what is below it."""
        recursive = self.dice.random() < 0.5
        content = self.some()
        doomed = self.below(content)
        refused = (len(doomed) > 1 and not recursive) or any(
            self.state(each) == "materializing" for each in doomed
        )
        if refused:
            with pytest.raises(PoolInUseError):
                self.pool(content).check_release(recursive=recursive)
            return
        going = self.pool(content).check_release(recursive=recursive)
        names = {id(self.pool(each)): each for each in doomed}
        assert {id(pool) for pool in going} == set(names)
        for pool in going:
            name = names[id(pool)]
            assert not self.children(name)  # leaves first
            self.tree.release(pool)
            if self.alive.pop(name)[0] == "resident":
                self.haunt(pool)
            self.released.add(name)

    def retired(self):
        """The engine gives numbers back."""
        if not self.retiring:
            return
        number = self.dice.choice(self.retiring)
        self.retiring.remove(number)
        self.tree.retire(number)

    def nobody_holds(self):
        """The engine shows no holder of some ghosts. Those go whose numbers are back, children first."""
        uids = {uid for uid in self.ghosts if self.dice.random() < 0.5}
        self.tree.drop_ghosts(uids)
        for uid in sorted(uids, reverse=True):  # children came later than their parents
            nodes = {*self.ghosts, *(pool.uid for pool in self.tree if pool.resident)}
            if self.ghosts[uid] not in self.retiring and uid not in {self.stands_on[each] for each in nodes}:
                del self.ghosts[uid]

    def lose_all(self):
        """The engine was restarted."""
        self.tree.lose_all()
        self.alive = dict.fromkeys(self.alive, ("lost", None, 0))
        self.retiring, self.ghosts, self.before = [], {}, {}

    # -- what always holds -------------------------------------------------------------------------------

    def same_pools(self):
        """Ids, contents, states and places are the model's."""
        assert len(self.tree) == len(self.alive)
        for content, (state, parent, branch_pos) in self.alive.items():
            pool = self.pool(content)
            assert (pool.tokens, pool.state, pool.branch_pos) == (spelled(content), state, branch_pos)
            if parent == GHOST:
                assert pool.parent.released
            else:
                assert pool.parent is (None if parent is None else self.pool(parent))
        for content in self.released:
            assert self.tree.was_released(content_id(spelled(content)))

    def edges_agree(self):
        """Who has a parent is its child, once; what a child shares is the parent's, token for token."""
        everyone = [*self.tree, *(node for node in self.tree.nodes() if node.released)]
        for pool in everyone:
            for child in pool.children:
                assert child.parent is pool
                assert pool.children.count(child) == 1
                assert child in everyone
            if pool.parent is not None and pool.parent in everyone:
                assert pool in pool.parent.children
            if pool.parent is not None:
                assert pool.tokens[: pool.branch_pos] == pool.parent.tokens[: pool.branch_pos]
            if pool.resident and pool.parent is not None:
                assert pool.parent.resident or pool.parent.released

    def numbers_are_unique_and_few(self):
        """No two holders of a sequence id share it."""
        taken = [pool.number for pool in self.tree if pool.occupies_sequence]
        taken += self.retiring
        assert len(set(taken)) == len(taken) == self.tree.sequences_used == self.used() <= self.MAX
        assert set(taken) <= set(range(self.MAX))

    def nodes_are_what_may_hold_cells(self):
        """Resident pools, and ghosts until they are dropped."""
        resident = [self.pool(each).uid for each in self.alive if self.state(each) == "resident"]
        assert sorted(node.uid for node in self.tree.nodes()) == sorted([*resident, *self.ghosts])

    def the_index_holds_the_resident(self):
        """Each of them, at each of its blocks, and nobody else."""
        index = self.tree.index
        blocks = {}
        for pool in self.tree:
            if pool.resident:
                for block in block_hashes(pool.tokens, SCOPE) or ["short"]:
                    blocks.setdefault(block, set()).add(pool)
        found = {block: set(pools) for block, pools in index._blocks.items()}
        if index._short:
            found["short"] = set(index._short[SCOPE])
        assert found == blocks


@settings(max_examples=150)
@given(st.integers(0))
def test_a_tree_lives_as_its_model_does(seed):
    """Forks, snapshots, evictions, revivals, releases, failures and restarts in any order."""
    model = TreeAgainstModel(random.Random(seed))
    steps = [model.create] * 4 + [model.computed] * 4 + [model.retired] * 3 + [model.evict, model.revive] * 2
    steps += [model.snapshot, model.pin, model.release, model.nobody_holds]
    for _ in range(60):
        model.dice.choice(steps if model.alive else [model.create, model.retired])()
        if model.dice.random() < 0.02:
            model.lose_all()
        model.same_pools()
        model.edges_agree()
        model.numbers_are_unique_and_few()
        model.nodes_are_what_may_hold_cells()
        model.the_index_holds_the_resident()


# -- pools that nobody shares cells with ------------------------------------------------------------------


def test_copies_leave_no_ghosts():
    """Released, evicted or unwanted: nothing is held by anybody else, so nothing haunts."""
    tree = PoolTree(4)
    tree.shares_cells = False
    root = add(tree, [1, 2, 3])
    child = add(tree, [1, 2, 3, 4], parent=root, branch_pos=3)
    tree.add_ghost(PoolId("x"), root.tokens, scope=SCOPE, number=3, uid=PoolUid(9), parent=root, branch_pos=1)
    evicted = tree.evict(child)
    assert evicted in root.children
    assert child not in root.children
    tree.release(evicted)
    tree.release(root)
    assert tree.nodes() == []
    assert root.children == []
    for number in (root.number, child.number):
        tree.retire(number)
    assert tree.sequences_used == 0


def test_a_file_has_a_size_while_there_is_one():
    """Not while it is computed, evicted or lost."""
    tree = PoolTree(2)
    tree.shares_cells = False
    pool = add(tree, [1, 2, 3], ready=False)
    assert pool.file_bytes is None
    tree.ready(pool, PoolUid(1), 30)
    assert pool.file_bytes == 30
    assert tree.evict(pool).file_bytes is None
    again = add(tree, [1, 2, 3], ready=False)
    tree.ready(again, PoolUid(2), 30)
    tree.lose_all()
    assert again.file_bytes is None


def test_running_out_of_files_is_said_in_files():
    """What is counted has its name."""
    tree = PoolTree(1)
    assert tree.sequence_ids == (0, 1)
    tree.shares_cells = False
    add(tree, [1])
    assert (tree.sequence_ids, tree.sequences_used) == ((0, 0), 1)
    with pytest.raises(PoolCapacityError, match="all 1 files"):
        add(tree, [2])


def test_a_pool_that_lingers_can_be_taken_up():
    """Under its id, with its place and number, and with nothing that was asked of it before."""
    tree = PoolTree(2)
    root = add(tree, [1] * 10, uid=1)
    leaf = add(tree, [1] * 20, parent=root, branch_pos=10, uid=2, pinned=True, label="x", ttl_s=5.0)
    tree.release(leaf, lingers=True)
    assert tree.lingering == [leaf]
    assert tree.get(leaf.pool_id) is None
    assert tree.was_released(leaf.pool_id)
    assert tree.index.match(as_tokens([1] * 20), SCOPE)[0] is root
    assert tree.sequences_used == 2
    tree.drop_ghosts({2})
    assert tree.take_up(root.pool_id) is None
    assert tree.take_up(leaf.pool_id) is leaf
    assert (leaf.pinned, leaf.label, leaf.ttl_s, leaf.resident) == (False, None, None, True)
    assert tree.get(leaf.pool_id) is leaf
    assert not tree.was_released(leaf.pool_id)
    assert tree.index.match(as_tokens([1] * 20), SCOPE)[0] is leaf
    assert (tree.lingering, tree.sequences_used, leaf.edge) == ([], 2, (root, 10))
    tree.retire(leaf.number)
    assert tree.sequences_used == 2


def test_nothing_lingers_where_pools_are_files_or_the_engine_is_gone():
    """Who attached has a copy; and what a restart lost is lost."""
    tree = PoolTree(2)
    tree.release(add(tree, [1] * 10, uid=1), lingers=True)
    tree.lose_all()
    assert tree.lingering == []
    tree.shares_cells = False
    tree.release(add(tree, [2] * 10, uid=2), lingers=True)
    assert tree.lingering == []
