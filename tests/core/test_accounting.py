"""Claims about ``core.accounting``: every used cell has one owner, checked against sets of cells."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.core.accounting import Draining, Unpooled, attribute
from polykv_proxy.core.tree import PoolTree
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
    assert owned.draining == (Draining(root.pool_id, 90, 2, (0,), prefix_len=100),)
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


class CellsAgainstModel:
    """An engine of sets: every sequence is a list of cells, and every cell knows who computed it.

    Args:
        dice: what happens next.
    """

    SLOTS = 3

    def __init__(self, dice):
        self.dice = dice
        self.tree = PoolTree(100)
        self.owner = {}  # cell -> uid of the pool that computed or took it, or ("slot", number)
        self.pools = {}  # uid -> cells, of what the engine holds
        self.going = []  # pools that it holds and that are to go, first things first
        self.slots = {number: [] for number in range(self.SLOTS)}
        self.shared = dict.fromkeys(range(self.SLOTS), (0, 0))  # tokens, uid
        self.next_uid = 1
        self.names = 0

    # -- the engine --------------------------------------------------------------------------------------

    def cells(self, count, owner):
        """New cells."""
        made = [len(self.owner) + index for index in range(count)]
        self.owner |= dict.fromkeys(made, owner)
        return made

    def uid(self):
        """One that none had before."""
        self.next_uid += 1
        return PoolUid(self.next_uid - 1)

    def some_pool(self):
        """Resident or evicted; there is one if need be."""
        if not len(self.tree):
            self.create()
        return self.dice.choice(list(self.tree))

    def some_slot(self):
        """Its number."""
        return self.dice.randrange(self.SLOTS)

    def resident(self):
        """Pools that can be attached to."""
        return [pool for pool in self.tree if pool.resident]

    def give_back(self):
        """The engine gives the sequence of one pool back; until then requests on their way attach."""
        if self.going:
            pool = self.going.pop(0)
            del self.pools[pool.uid]
            self.tree.retire(pool.number)

    def compute(self, name, length, parent, branch_pos, uid):
        """A pool in tree and engine."""
        above = [] if parent is None else self.pools[parent.uid][:branch_pos]
        self.pools[uid] = above + self.cells(length - branch_pos, uid)
        return add(self.tree, name, length, uid=uid, parent=parent, branch_pos=branch_pos)

    # -- pools -------------------------------------------------------------------------------------------

    def create(self):
        """A root, an extension or a branch."""
        parent = self.dice.choice([None, *self.resident()])
        branch_pos = 0 if parent is None else self.dice.randint(1, parent.prefix_len)
        self.names += 1
        self.compute(
            f"p{self.names}", max(1, branch_pos + self.dice.randint(0, 8)), parent, branch_pos, self.uid()
        )

    def release(self):
        """A pool and all below it; the engine hears of it leaves first."""
        for pool in self.some_pool().check_release(recursive=True):
            resident = pool.resident
            self.tree.release(pool)
            if resident:
                self.going.append(pool)

    def evict(self):
        """A subtree."""
        for pool in self.some_pool().check_evict(flush=True):
            self.tree.evict(pool)
            self.going.append(pool)

    def revive(self):
        """An evicted pool is computed anew, below its parent if that is there."""
        pool = self.some_pool()
        if pool.resident:
            return
        there = pool.parent is not None and pool.parent.resident
        parent, branch_pos = (pool.parent, pool.branch_pos) if there else (None, 0)
        self.compute(pool.pool_id, pool.prefix_len, parent, branch_pos, self.uid())

    # -- slots -------------------------------------------------------------------------------------------

    def run(self):
        """A request, attached to any part of any pool, or to none."""
        number, (uid, held) = self.some_slot(), self.dice.choice([(0, []), *self.pools.items()])
        shared = self.dice.randint(min(1, len(held)), len(held))
        self.slots[number] = held[:shared] + self.cells(self.dice.randint(0, 6), ("slot", number))
        self.shared[number] = (shared, uid)

    def go_on(self):
        """A request that continues the first part of what its slot holds."""
        number = self.some_slot()
        keep = self.dice.randint(0, len(self.slots[number]))
        self.slots[number] = self.slots[number][:keep] + self.cells(self.dice.randint(0, 6), ("slot", number))
        shared, uid = self.shared[number]
        self.shared[number] = (min(shared, keep), uid if min(shared, keep) else 0)

    def snapshot(self):
        """The slot's first tokens become a pool, or a ghost; the slot lives on its cells from then on."""
        number = self.some_slot()
        held = self.slots[number]
        if not held:
            return
        count = self.dice.randint(1, len(held))
        shared, uid = self.shared[number]
        below = self.tree.node(uid) if shared else None
        branch_pos = min(shared, count)
        live = below is not None and below.resident
        if live:  # the tokens may agree for longer than the cells are shared
            branch_pos = self.dice.randint(branch_pos, max(branch_pos, min(count, below.prefix_len)))
        new = self.uid()
        above = self.pools[below.uid][:branch_pos] if live else held[:branch_pos]
        taken = above + held[branch_pos:count]
        self.owner |= dict.fromkeys(held[branch_pos:count], new)
        if shared < count:
            self.slots[number] = taken + held[count:]
            self.shared[number] = (count, new)
        self.names += 1
        if self.dice.random() < 0.5:
            self.pools[new] = taken
            add(self.tree, f"p{self.names}", count, uid=new, parent=below, branch_pos=branch_pos)
            return
        self.tree.add_ghost(
            PoolId(f"p{self.names}"),
            as_tokens(range(count)),
            scope=Scope(""),
            number=self.tree.reserve(Scope("")),
            uid=new,
            parent=below,
            branch_pos=branch_pos,
        )
        self.tree.retire(self.tree._ghosts[-1].number)

    # -- counting ----------------------------------------------------------------------------------------

    def look(self):
        """The attribution of this moment, and living cells by owner."""
        kept = [self.pools[pool.uid] for pool in self.resident()]
        alive = {cell for sequence in (*kept, *self.slots.values()) for cell in sequence}
        counted = {}
        for cell in alive:
            counted[self.owner[cell]] = counted.get(self.owner[cell], 0) + 1
        slots = [
            slot(number, len(held), shared=self.shared[number][0], uid=self.shared[number][1])
            for number, held in self.slots.items()
        ]
        return attribute(self.tree.nodes(), sample(len(alive), *slots)), counted

    def every_cell_has_the_owner_that_computed_it(self):
        """Own, suffix, unpooled and draining are the living cells by owner, and nothing is left over."""
        owned, counted = self.look()
        assert owned.unattributed == 0
        assert owned.own == {pool.pool_id: counted.pop(pool.uid, 0) for pool in self.resident()}
        private = dict(owned.suffix) | {rest.slot: rest.cells for rest in owned.unpooled}
        for number in self.slots:
            assert private.get(number, 0) == counted.pop(("slot", number), 0)
        assert sorted(rest.cells for rest in owned.draining if rest.cells) == sorted(counted.values())
        assert all(rest.holders for rest in owned.draining)
        assert not owned.dead & counted.keys()

    def forget_the_dead(self):
        """What nobody holds is dropped, and never missed."""
        owned, _ = self.look()
        self.tree.drop_ghosts(set(owned.dead))
        if not self.going:
            assert not self.look()[0].dead


@settings(max_examples=150)
@given(st.integers(0))
def test_every_cell_has_the_owner_that_computed_it(seed):
    """Pools and slots come and go in any order; at every moment the attribution is what counting finds."""
    model = CellsAgainstModel(random.Random(seed))
    steps = [model.create, model.create, model.run, model.run, model.go_on, model.snapshot]
    steps += [model.release, model.evict, model.revive, model.forget_the_dead, model.give_back]
    for _ in range(40):
        model.dice.choice(steps)()
        model.every_cell_has_the_owner_that_computed_it()


def test_a_pool_that_lingers_is_listed_though_every_cell_of_it_is_its_parents():
    """It has a sequence id as long as a child of it lives, which may be long; that has to be seen."""
    tree = PoolTree(3)
    root = add(tree, "root", 100, uid=1)
    part = add(tree, "part", 50, uid=2, parent=root, branch_pos=50)
    add(tree, "child", 70, uid=3, parent=part, branch_pos=30)
    tree.release(part, lingers=True)
    owned = attribute(tree.nodes(), sample(140))
    (rest,) = owned.draining
    assert (rest.pool_id, rest.cells, rest.holders, rest.lingers) == (part.pool_id, 0, 1, True)
    assert (owned.dead, owned.unattributed) == (frozenset(), 0)


def test_a_pool_that_lingers_is_whole():
    """The engine has all of it, whoever holds how much; it is no ghost that could be forgotten."""
    tree = PoolTree(2)
    root = add(tree, "root", 100, uid=1)
    tree.release(root, lingers=True)
    for slots in ((), (slot(0, 70, shared=60, uid=1),)):
        owned = attribute(tree.nodes(), sample(100 + 10 * len(slots), *slots))
        (rest,) = owned.draining
        assert (rest.cells, rest.holders, rest.lingers, rest.prefix_len) == (100, len(slots), True, 100)
        assert (owned.dead, owned.unattributed, owned.cells) == (frozenset(), 0, {root.pool_id: 100})
