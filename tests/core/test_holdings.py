"""Claims about ``core.holdings``: what a pool holds is counted, and what can go of it goes in its turn."""

import pytest

from core.planes import finish, pool, sample, serving, slot_sample
from core.test_cells import _look, ask, keys, lease_of, seen
from core.trees import add
from polykv_proxy.core.accounting import attribute
from polykv_proxy.core.holdings import PoolHoldings
from polykv_proxy.core.ledger import CellLedger
from polykv_proxy.core.slots import SlotBoard
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import LeaseId, PoolOrigin, as_tokens

GRACE_S = 60.0


class Written:
    """A tree, a board of two slots, and what of them is in a ledger."""

    def __init__(self):
        self.tree, self.board = PoolTree(8), SlotBoard(2)
        self.ledger = CellLedger(1000)
        self.holdings = PoolHoldings()

    def pool(self, tokens, uid, *, origin=PoolOrigin.AUTO, **options):
        """A resident pool, last asked for at second 10."""
        return add(self.tree, [uid] * tokens, uid=uid, origin=origin, **options)

    def write(self, *slots, now_ts=1000.0):
        """The ledger's figures, after a reading with these slots."""
        reading = sample(slots=slots)
        owned = attribute(self.tree.nodes(), reading)
        self.holdings.write(
            self.ledger,
            self.tree,
            self.board,
            sample=reading,
            owned=owned,
            grace_s=GRACE_S,
            now_ts=now_ts,
        )
        figures = self.ledger.figures()
        return figures.reclaimable, figures.protected

    def order(self):
        """What would go first, if all had to."""
        return [key[1] for key in self.ledger.residents.reclaim(10_000)]


def rides(slot, pool):
    """A slot that shares a pool's cells."""
    return slot_sample(slot, tokens=pool.prefix_len, shared=pool.prefix_len, uid=pool.uid)


def test_a_pool_holds_its_own_cells_until_it_is_gone():
    """What it shares with its parent is the parent's."""
    at = Written()
    root = add(at.tree, [1] * 50, uid=1)
    child = add(at.tree, [1] * 80, uid=2, parent=root, branch_pos=50)
    assert at.write() == (0, 80)
    assert at.ledger.residents.cells_of(("pool", child.pool_id)) == 30
    at.tree.evict(child)
    assert at.write() == (0, 50)


def test_only_pools_that_came_by_themselves_can_go_and_only_some_time_after_their_use():
    """Those that were asked for last, unless they were given a lifetime; they stay for that long."""
    at = Written()
    at.pool(10, 1)
    at.pool(20, 2, origin=PoolOrigin.EXPLICIT)
    at.pool(30, 3, pinned=True)
    at.pool(40, 4, origin=PoolOrigin.EXPLICIT, ttl_s=5.0)
    assert at.write(now_ts=10.0 + GRACE_S - 1) == (0, 100)
    assert at.write(now_ts=10.0 + GRACE_S) == (10, 90)
    assert at.ledger.residents.lasting == 50


def test_a_pool_that_running_requests_share_stays():
    """Idle conversations do not keep it; but they go before it does."""
    at = Written()
    made = at.pool(10, 1)
    assert at.write(rides(0, made)) == (10, 0)
    at.board.hold(0, LeaseId(1))
    assert at.write(rides(0, made)) == (0, 10)
    at.board.let_go(0)
    at.write(rides(0, made))
    at.ledger.residents.keep(("slot", 0), 900, value=900.0)
    assert at.order() == [0, made.pool_id]


def test_the_pool_that_would_cost_most_goes_last():
    """Longer ones, and those that were of use."""
    at = Written()
    short, long, used = at.pool(10, 1), at.pool(30, 2), at.pool(10, 3)
    used.hits = 9
    at.write()
    assert at.order() == [short.pool_id, long.pool_id, used.pool_id]


def test_a_pool_that_lingers_for_nobody_goes_first():
    """Like any other while idle conversations rest on it; not while somebody works with it."""
    at = Written()
    made, other = at.pool(10, 1), at.pool(20, 2)
    at.tree.release(made, lingers=True)
    at.board.hold(0, LeaseId(1))
    assert at.write(rides(0, made)) == (20, 10)
    at.board.let_go(0)
    assert at.write(rides(0, made)) == (30, 0)
    at.ledger.residents.keep(("slot", 1), 5, value=0.5)
    at.write()
    assert at.order() == [made.pool_id, 1, other.pool_id]


def test_what_is_left_of_pools_can_go_with_the_idle_slots_that_keep_it():
    """Not with one that works; and it is gone from the books when they are."""
    at = Written()
    made = at.pool(10, 1)
    at.tree.release(made)
    assert at.write(rides(0, made), rides(1, made)) == (10, 0)
    at.board.hold(1, LeaseId(1))
    assert at.write(rides(0, made), rides(1, made)) == (0, 0)
    at.board.let_go(1)
    assert at.write(rides(0, made)) == (10, 0)
    assert at.write() == (0, 0)


def test_nothing_is_known_of_who_rides_before_the_first_reading():
    """A pool holds what it was made of."""
    at = Written()
    at.pool(10, 1)
    at.holdings.write(at.ledger, at.tree, at.board, sample=None, owned=None, grace_s=GRACE_S, now_ts=0.0)
    assert at.ledger.figures().protected == 10


# -- as a part of the plane -------------------------------------------------------------------------------


def roomy():
    """A plane with 4,096 cells, three slots, and a pool of 3,000 on which an idle conversation rests."""
    at = serving(cells=4096, ctx=4096, slots=3, max_pools=4)
    at.on_sample(_look(at, 0))
    made = pool(at, as_tokens(range(3000)), uid=7)
    at.on_sample(_look(at, 3000))
    lease = lease_of(ask(at, 3050, 10, 1, 2, 3, pool=made, shared=3000))
    finish(at, lease)
    resting = seen(0, 3050, lease=lease.lease_id, shared=3000, uid=7)
    return at, made, resting


@pytest.mark.parametrize("way", ["released, lingers", "released", "evicted"])
def test_what_is_left_of_a_pool_goes_with_the_conversation_that_rests_on_it(way):
    """Nobody could have it otherwise: a request that fits an empty cache comes in, and the slot goes."""
    at, made, resting = roomy()
    if way == "evicted":
        at.tree.evict(made)
    else:
        at.tree.release(made, lingers=way == "released, lingers")
    if way != "released, lingers":
        at.tree.retire(made.number)
    at.on_sample(_look(at, 3050, resting))
    lease_of(ask(at, 1500, 100, 7, 8, 9))
    assert keys(at.cells.reclaim())[0] == ("slot", 0)
