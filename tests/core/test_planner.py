"""Claims about ``core.planner``: pools enter the tree, are found, and are attached to."""

from dataclasses import replace

import pytest

from core.planes import (
    SCOPE,
    TOKENS,
    attached_turn,
    facts,
    policed,
    pool,
    ready,
    sample,
    serving,
    slot_sample,
    turn,
)
from polykv_proxy.core.decisions import AttachPlan
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Taken, Wanted
from polykv_proxy.core.types import Capability, PoolOrigin, PoolState, PoolUid, Scope, as_tokens
from polykv_proxy.errors import (
    BadRequestError,
    DisabledError,
    NotFoundError,
    PoolCapacityError,
    PrefixMismatchError,
    UnavailableError,
)

# -- pools ------------------------------------------------------------------------------------------------


def test_pools_need_an_engine_that_has_them():
    """Before the first engine nobody can tell; on one without pools the reason is given."""
    plane = ControlPlane(max_waiting=1)
    with pytest.raises(UnavailableError) as caught:
        plane.pools.require()
    assert caught.value.code == "engine_loading"
    ready(plane, capability=Capability.RELAY, reason="because")
    with pytest.raises(DisabledError, match="because"):
        plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=1.0)


def test_the_same_content_is_the_same_pool():
    """Asking again computes nothing; a pin and a label are added, never taken away."""
    plane = serving()
    made = pool(plane, label="x")
    again, compute = plane.pools.enter(TOKENS, SCOPE, Wanted(pin=True), now_ts=9.0)
    assert (again, compute) == (made, False)
    assert (made.pinned, made.label, made.last_access_ts) == (True, "x", 9.0)
    plane.pools.enter(TOKENS, SCOPE, Wanted(label="y"), now_ts=9.0)
    assert (made.pinned, made.label) == (True, "y")


def test_a_pool_that_can_never_fit_is_refused():
    """Neither the window nor the cells may be filled by a prefix alone."""
    plane = serving(ctx=10)
    with pytest.raises(BadRequestError) as caught:
        pool(plane)
    assert caught.value.details == {"prefix_len": 10, "ctx_size": 10}
    with pytest.raises(BadRequestError):
        pool(serving(cells=5))


def test_pools_are_seen_within_their_key():
    """Another key's id does not exist; an administrator sees all."""
    plane = serving()
    made = pool(plane)
    assert plane.pools.find(made.pool_id, Scope("t")) is None
    assert plane.pools.find(made.pool_id, None) is plane.pools.need(made.pool_id, SCOPE) is made
    with pytest.raises(NotFoundError) as caught:
        plane.pools.need(made.pool_id, Scope("t"))
    assert (caught.value.code, caught.value.param) == ("pool_not_found", "pool_id")
    assert pool(plane, scope=Scope("t")).pool_id != made.pool_id


def test_a_pool_that_failed_can_be_tried_again():
    """It leaves no trace; a resident one does not fail any more."""
    plane = serving(max_pools=1)
    made, _ = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=1.0)
    plane.pools.on_failed(made)
    assert plane.pools.find(made.pool_id, SCOPE) is None
    again = pool(plane)
    plane.pools.on_failed(again)
    assert again.resident


def test_a_pool_that_may_have_been_computed_keeps_its_number():
    """Until the engine was told to release it."""
    plane = serving(max_pools=1)
    made, _ = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=1.0)
    plane.pools.on_failed(made, retire=True)
    with pytest.raises(PoolCapacityError):
        pool(plane)
    plane.tree.retire(made.number)
    assert pool(plane).number == made.number


def test_a_pool_of_an_engine_that_is_gone_does_not_become_resident():
    """Its computation ended after a restart: the new engine knows nothing of it."""
    plane = serving()
    made, _ = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=1.0)
    assert plane.pools.is_awaited(made)
    ready(plane, "e2")
    assert not plane.pools.is_awaited(made)
    plane.pools.on_ready(made, PoolUid(1))
    plane.pools.on_failed(made, retire=True)
    assert made.state is PoolState.LOST
    assert plane.tree.sequences_used == 0


# -- attaching --------------------------------------------------------------------------------------------


def plan(plane, made, tokens, *, cap=None, strict=False):
    """An attachment to ``made``."""
    return plane.pools.plan_attach(made, as_tokens(tokens), cap=cap, strict=strict, now_ts=77.0)


def test_a_request_rides_as_far_as_the_tokens_agree():
    """A cap lowers P and nothing else."""
    plane = serving()
    made = pool(plane)
    assert plan(plane, made, [0, 1, 2, 9]) == AttachPlan(made, 3, 3)
    assert plan(plane, made, [0, 1, 2, 9], cap=2) == AttachPlan(made, 2, 3)
    assert plan(plane, made, [0, 1, 2, 9], cap=8) == AttachPlan(made, 3, 3)
    assert plan(plane, made, []) == AttachPlan(made, 0, 0)
    assert made.last_access_ts == 77.0


def test_a_strict_cap_beyond_the_match_is_refused():
    """With both numbers in it; at the match it is fine."""
    plane = serving()
    made = pool(plane)
    with pytest.raises(BadRequestError) as caught:
        plan(plane, made, [0, 1, 9], cap=3, strict=True)
    assert caught.value.param == "shared_prefix_n_tokens"
    assert caught.value.details == {"matched_tokens": 2, "prefix_len": 10}
    assert plan(plane, made, [0, 1, 9], cap=2, strict=True).tokens == 2


def test_nothing_attaches_to_a_pool_that_is_not_resident():
    """No plan, no error."""
    plane = serving()
    made, _ = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=1.0)
    assert plan(plane, made, [0, 1]) is None


def test_an_attached_answer_proves_itself():
    """Less than planned is a shortfall, but for the one token that is always computed; silence is none."""
    plane = serving()
    made = pool(plane)
    planned = plan(plane, made, range(10))
    session = attached_turn(plane, made, 1, 2)
    made.hits = 0
    assert [plane.pools.on_attached(planned, session, cached) for cached in (10, 9, 8, None)] == [
        False,
        False,
        True,
        False,
    ]
    assert (plane.pools.shortfalls, made.hits, session.pool) == (1, 4, made.pool_id)
    plane.pools.on_attached(planned, None, 10)
    assert made.hits == 5
    plane.pools.on_attached(planned, session, 0)
    assert session.pool is None  # the engine attached it to nothing


def test_a_plan_for_no_token_is_no_hit():
    """A request that has nothing in common with its pool does not count as attached."""
    plane = serving()
    made = pool(plane)
    session = turn(plane, 1, 2)
    assert not plane.pools.on_attached(plan(plane, made, [99]), session, 0)
    assert (made.hits, session.pool) == (0, None)


# -- forks ------------------------------------------------------------------------------------------------


def test_a_child_branches_where_it_leaves_its_parent():
    """As far as both agree, or where it was asked for, which may be earlier."""
    plane = serving()
    root = pool(plane)
    assert plane.pools.branch_point(root, as_tokens([*range(10), 77]), None) == 10
    assert plane.pools.branch_point(root, as_tokens([0, 1, 2, 77]), None) == 3
    assert plane.pools.branch_point(root, as_tokens([0, 1, 2]), None) == 3
    assert plane.pools.branch_point(root, as_tokens([*range(10), 77]), 4) == 4


@pytest.mark.parametrize("branch_pos", [-1, 0, 4, 11])
def test_a_branch_is_within_both(branch_pos):
    """Neither before the first token nor behind the last one of the shorter."""
    plane = serving()
    with pytest.raises(BadRequestError) as caught:
        plane.pools.branch_point(pool(plane), as_tokens([0, 1, 2]), branch_pos)
    assert (caught.value.param, caught.value.details) == ("branch_pos", {"parent_len": 10})


@pytest.mark.parametrize(
    ("tokens", "branch_pos", "mismatch", "expected", "got"),
    [([5, 6], None, 0, 0, 5), ([0, 1, 9, 3], 4, 2, 2, 9), ([], None, 0, 0, None)],
)
def test_a_broken_contract_says_where(tokens, branch_pos, mismatch, expected, got):
    """The first token that differs, on both sides; nothing in common looks like a suffix."""
    plane = serving()
    with pytest.raises(PrefixMismatchError) as caught:
        plane.pools.branch_point(pool(plane), as_tokens(tokens), branch_pos)
    details = caught.value.details
    assert (details["first_mismatch"], details["expected_token"]) == (mismatch, expected)
    assert (details["got_token"], details["parent_len"]) == (got, 10)
    assert details["suffix_only"] is (mismatch == 0)
    assert set(details["next_moves"]) == {"re_root", "full_prefill"}


def test_an_evicted_pool_goes_back_to_its_place():
    """Asked for without a parent it keeps the one it had; with another one it moves there."""
    plane = serving(max_pools=4)
    root = pool(plane)
    longer = as_tokens(range(15))
    child, _ = plane.pools.enter(longer, SCOPE, Wanted(), now_ts=5.0, parent=root, branch_pos=10)
    plane.pools.on_ready(child, PoolUid(8))
    plane.tree.evict(child)
    back, compute = plane.pools.enter(longer, SCOPE, Wanted(), now_ts=6.0)
    assert (compute, back.parent, back.branch_pos) == (True, root, 10)


def test_an_automatic_pool_that_is_asked_for_is_kept():
    """Whoever creates it does not lose it silently; one that only comes back stays automatic."""
    plane = serving()
    made = pool(plane)
    made.origin = PoolOrigin.AUTO
    auto = Wanted(origin=PoolOrigin.AUTO)
    assert plane.pools.enter(TOKENS, SCOPE, auto, now_ts=5.0) == (made, False)
    assert made.origin is PoolOrigin.AUTO
    plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=5.0)
    assert made.origin is PoolOrigin.EXPLICIT
    plane.pools.enter(TOKENS, SCOPE, auto, now_ts=5.0)
    assert made.origin is PoolOrigin.EXPLICIT


# -- snapshots --------------------------------------------------------------------------------------------


def test_a_snapshot_belongs_where_its_cells_are():
    """Below the pool that its slot rides on, unless the one that was asked for agrees with all of that."""
    plane = serving(max_pools=4)
    root = pool(plane, uid=1)
    child = pool(plane, as_tokens(range(8)), uid=2)
    other = pool(plane, as_tokens([0, 1, 2, 9, 9]), uid=3)
    plain, riding = slot_sample(), slot_sample(shared=6, uid=2)
    assert plane.pools.snapshot_parent(plain, None) is None
    assert plane.pools.snapshot_parent(plain, other) is other
    assert plane.pools.snapshot_parent(riding, None) is child
    assert plane.pools.snapshot_parent(riding, child) is child
    assert plane.pools.snapshot_parent(riding, root) is root  # it holds the same six tokens
    assert plane.pools.snapshot_parent(riding, other) is child  # it holds three of them
    assert plane.pools.snapshot_parent(slot_sample(shared=3, uid=2), other) is other
    gone = plane.tree.evict(other)
    assert plane.pools.snapshot_parent(plain, gone) is None
    below, _ = plane.pools.enter(as_tokens(range(9)), SCOPE, Wanted(), now_ts=1.0, parent=root, branch_pos=9)
    plane.pools.on_ready(below, PoolUid(4))
    assert plane.pools.snapshot_parent(slot_sample(shared=9, uid=4), root) is below


def adopt(plane, tokens, *, uid=9, label=None, pin=False, parent=None, branch_pos=0):
    """Enter a snapshot."""
    taken = Taken(plane.tree.reserve(SCOPE), PoolUid(uid))
    wanted = Wanted(label=label, pin=pin, origin=PoolOrigin.SNAPSHOT)
    return plane.pools.enter(
        as_tokens(tokens), SCOPE, wanted, now_ts=5.0, parent=parent, branch_pos=branch_pos, taken=taken
    )


def test_a_snapshot_is_resident_at_once():
    """In its place, with the number that was reserved."""
    plane = serving()
    root = pool(plane)
    made, kept = adopt(plane, range(12), label="x", pin=True, parent=root, branch_pos=10)
    assert (kept, made.resident, made.origin, made.uid) == (True, True, PoolOrigin.SNAPSHOT, 9)
    assert (made.parent, made.own_len, made.label, made.pinned) == (root, 2, "x", True)
    assert plane.tree.sequences_used == 2


def test_a_superfluous_snapshot_leaves_a_ghost():
    """The pool that is there is it; its slot lives on cells under a name that has to be known."""
    plane = serving()
    root = pool(plane)
    same, kept = adopt(plane, TOKENS, label="x", pin=True)
    assert (same, kept, root.label, root.pinned) == (root, False, "x", True)
    ghost = plane.tree.node(PoolUid(9))
    assert (ghost.pool_id, ghost.released) == (root.pool_id, True)
    plane.on_sample(sample(used=20, slots=(slot_sample(tokens=10, shared=10, uid=9),)))
    assert plane.ownership.unattributed == 0


# -- finding pools ----------------------------------------------------------------------------------------


def test_a_match_is_the_longest_that_is_worth_it():
    """Within the key, and used from then on."""
    plane = policed()
    made = pool(plane)
    assert plane.pools.match(as_tokens([0, 1, 2, 3, 9]), SCOPE, now_ts=9.0) == AttachPlan(made, 4, 4)
    assert made.last_access_ts == 9.0
    assert plane.pools.match(as_tokens([0, 1, 2, 9]), SCOPE, now_ts=9.0) is None
    assert plane.pools.match(TOKENS, Scope("t"), now_ts=9.0) is None


def test_automatic_pools_have_a_share():
    """Of the sequence ids, at least one; those that are evicted hold none."""
    plane = policed(auto_share=0.5)
    assert not plane.pools.too_many_automatic()
    for number in range(2):
        made = pool(plane, as_tokens([number] * 5), uid=number + 1)
        made.origin = PoolOrigin.AUTO
    assert plane.pools.too_many_automatic()
    plane.tree.evict(made)
    assert not plane.pools.too_many_automatic()
    assert not policed(auto_share=0.0).pools.too_many_automatic()


def test_what_saved_nothing_yet_keeps_to_a_share_of_the_cells():
    """With all that came by itself before; what was asked for does not count."""
    plane = policed(auto_share=0.5)
    half = facts().cells // 2
    assert plane.pools.may_keep(half)
    assert not plane.pools.may_keep(half + 1)
    pool(plane, as_tokens([1] * 5))
    assert plane.pools.may_keep(half)
    made = pool(plane, as_tokens([2] * 7), uid=2)
    made.origin = PoolOrigin.AUTO
    assert plane.pools.may_keep(half - 7)
    assert not plane.pools.may_keep(half - 6)
    plane.tree.evict(made)
    assert plane.pools.may_keep(half)
    assert not policed(auto_pools=False).pools.may_keep(1)
    assert not serving(capability=Capability.COPY).pools.may_keep(1)
    assert not ControlPlane(max_waiting=1).pools.may_keep(1)


# -- states without parts -----------------------------------------------------------------------------------


@pytest.fixture
def whole():
    """A plane whose engine goes on from the end of a pool only; pools of the first 40 and 60 tokens."""
    plane = ControlPlane(max_waiting=1)
    known = replace(facts(max_pools=4, cells=1000, ctx=1000), partial_match=False)
    plane.on_engine_ready(known, Capability.COPY, None, "m", 0.0)
    return plane, pool(plane, as_tokens(range(40))), pool(plane, as_tokens(range(60)))


def test_a_whole_pool_is_attached_or_nothing(whole):
    """Part of it, a cap below its end, or a prompt that ends with it are planned as nothing."""
    plane, _, long = whole

    def planned(tokens, cap=None):
        plan = plane.pools.plan_attach(long, as_tokens(tokens), cap=cap, strict=False, now_ts=1.0)
        return plan.tokens, plan.matched

    assert planned(range(70)) == (60, 60)
    assert planned(range(70), cap=50) == (0, 60)
    assert planned(range(60)) == (0, 60)
    assert planned([*range(50), 99]) == (0, 50)


def test_the_longest_whole_pool_is_found(whole):
    """Not the one that has most in common."""
    plane, short, long = whole

    def found(tokens, scope=SCOPE):
        plan = plane.pools.match(as_tokens(tokens), scope, now_ts=1.0)
        return None if plan is None else (plan.pool, plan.tokens)

    assert found([*range(55), 99]) == (short, 40)
    assert found(range(70)) == (long, 60)
    assert found([*range(35), 99]) is None
    assert found(range(70), Scope("t")) is None
