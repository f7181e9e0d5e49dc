"""Claims about ``core.plane``: the engine's life, what it reports, and what its slots hold."""

from dataclasses import replace

import pytest

from core.planes import (
    SCOPE,
    TOKENS,
    admitted,
    attached_turn,
    copying,
    finish,
    policed,
    pool,
    ready,
    request,
    sample,
    serving,
    slot_sample,
    turn,
)
from polykv_proxy.core.decisions import (
    WakeQueued,
)
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.slots import Content
from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import (
    Capability,
    EngineSample,
    PoolState,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)
from polykv_proxy.errors import NotFoundError, SessionNotResidentError

# -- the engine's life ------------------------------------------------------------------------------------


def test_an_engine_that_is_down_gets_nothing():
    """Requests wait, and freed slots wake nobody, until it is ready again."""
    plane = serving(slots=1)
    lease = admitted(plane)
    plane.on_engine_down()
    waiting = request(plane).ticket
    assert finish(plane, lease) == []
    assert ready(plane, slots=1) == [WakeQueued(waiting)]


def test_the_same_engine_keeps_its_state():
    """A lost connection is no restart: leases, residency and pools are as they were."""
    plane = serving(slots=1)
    kept = pool(plane)
    mine = turn(plane, 1, 2, name="a")
    lease = admitted(plane, 1, 2, 3, name="a")
    plane.on_engine_down()
    assert ready(plane, slots=1) == []
    assert (mine.slot, kept.resident, lease.ended) == (0, True, False)
    assert finish(plane, lease) == []
    assert plane.board.idle_count == 1


def test_a_new_epoch_means_that_nothing_is_resident():
    """Old leases end without effect, sessions live on nowhere, pools are lost and revive by content."""
    plane = serving(slots=1)
    kept = pool(plane)
    mine = turn(plane, 1, 2, name="a")
    old = admitted(plane, 1, 2, 3, name="a")
    plane.on_engine_down()
    waiting = request(plane, 7).ticket
    assert ready(plane, "e2", slots=2) == [WakeQueued(waiting)]
    assert (kept.state, mine.slot, old.ended) == (PoolState.LOST, None, True)
    assert (finish(plane, old), plane.leases.on_slots_idle(old, 3.0, Content.NEW)) == ([], [])
    assert plane.board.idle_count == 1
    again, compute = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=9.0)
    assert (again.pool_id, compute) == (kept.pool_id, True)


def test_an_engine_without_epochs_that_came_back_smaller_is_another_one():
    """Stock engines have no epoch; other facts tell as much, and the board fits the engine again."""
    plane = serving(epoch="", slots=4, capability=Capability.RELAY, reason="no patch")
    admitted(plane)
    ready(plane, "", slots=1, capability=Capability.RELAY, reason="no patch")
    assert len(plane.board.slots) == plane.board.idle_count == 1


def test_another_model_forgets_all_pools():
    """Their ids can never be valid again."""
    plane = serving()
    old = pool(plane)
    ready(plane, "e2", model="other", max_pools=5)
    assert plane.pools.find(old.pool_id, SCOPE) is None
    assert plane.tree.max_pools == 5
    assert plane.pools.id_of(TOKENS, SCOPE) != old.pool_id


# -- samples ----------------------------------------------------------------------------------------------


def test_a_sample_is_published_and_clears_ghosts():
    """The newest reading and its attribution are the picture; a released pool that nobody holds is gone."""
    plane = serving()
    gone = pool(plane)
    plane.tree.release(gone)
    plane.tree.retire(gone.number)
    plane.on_sample(sample(used=0))
    assert plane.ownership.dead == {7}
    assert plane.tree.nodes() == []
    plane.on_sample(sample(used=0))
    assert not plane.ownership.dead


def test_a_sample_of_another_epoch_is_ignored():
    """It describes an engine that is gone, or one that is not understood yet."""
    plane = serving()
    plane.on_sample(sample("e0"))
    assert plane.sample is None
    early = ControlPlane(max_waiting=1)
    early.on_sample(sample())
    assert early.sample is None


# -- what slots hold --------------------------------------------------------------------------------------


def test_a_session_is_where_its_slot_is():
    """404 for none and for another key's, 409 once its slot is another's."""
    plane = serving(slots=1)
    mine = turn(plane, 1, 2, name="a")
    assert plane.resident_slot(mine.session_id, SCOPE) is plane.board.slots[0]
    assert plane.resident_slot(mine.session_id, None) is plane.board.slots[0]
    for name, scope in (("b", SCOPE), ("a", Scope("t"))):
        with pytest.raises(NotFoundError) as caught:
            plane.resident_slot(name, scope)
        assert caught.value.code == "session_not_found"
    turn(plane, 8, 9, name="b")
    with pytest.raises(SessionNotResidentError):
        plane.resident_slot(mine.session_id, SCOPE)


def holding(plane, tokens, *chain, name, **options):
    """A request whose prompt is known."""
    lease = admitted(plane, *chain, name=name, **options)
    plane.on_prompt(lease, as_tokens(tokens))
    return lease


def test_who_shares_enough_is_worth_a_pool():
    """Another conversation of the same key, with more in common than any pool has, by a margin."""
    plane = policed()
    leader = holding(plane, range(10), 1, 2, name="a")
    lease = admitted(plane, 5, 6, name="b")
    prompt = as_tokens([*range(8), 99])
    assert plane.shareable(prompt, lease, 0) == (plane.board.slots[leader.slots[0]], 8)
    assert plane.shareable(prompt, lease, 6) == (plane.board.slots[leader.slots[0]], 8)
    assert plane.shareable(prompt, lease, 7) is None
    assert plane.shareable(as_tokens([0, 1, 2, 3, 4, 99]), lease, 0) is None
    other = admitted(plane, 7, 8, name="c", scope=Scope("t"))
    assert plane.shareable(prompt, other, 0) is None


def test_a_boundary_ends_what_is_shared():
    """Exactly there, however short; once a pool reaches it, only what is worth a pool by itself counts."""
    plane = policed()
    leader = holding(plane, range(10), 1, 2, name="a")
    lease = admitted(plane, 5, 6, name="b")
    slot = plane.board.slots[leader.slots[0]]
    prompt = as_tokens([*range(8), 99])
    assert plane.shareable(prompt, lease, 0, boundary=5) == (slot, 5)
    assert plane.shareable(prompt, lease, 4, boundary=5) == (slot, 5)
    assert plane.shareable(prompt, lease, 5, boundary=5) == (slot, 8)
    assert plane.shareable(prompt, lease, 7, boundary=5) is None
    assert plane.shareable(prompt, lease, 7, boundary=8) == (slot, 8)
    assert plane.shareable(prompt, lease, 7, boundary=9) is None  # nobody has come so far
    short = as_tokens([0, 1, 2, 99])
    assert plane.shareable(short, lease, 0) is None
    assert plane.shareable(short, lease, 0, boundary=3) == (slot, 3)


def test_nobody_shares_unasked_where_that_is_off_or_there_is_no_conversation():
    """The policy says no; computing a pool is no conversation."""
    off = policed(auto_pools=False)
    holding(off, range(10), 1, 2, name="a")
    assert off.shareable(TOKENS, admitted(off, 5, 6, name="b"), 0) is None
    plane = policed()
    holding(plane, range(10), 1, 2, name="a")
    assert plane.shareable(TOKENS, admitted(plane, conversation=False), 0) is None


def test_a_lease_that_ended_says_nothing_about_its_slot():
    """It may be another's by now."""
    plane = policed()
    lease = admitted(plane, 1, 2, name="a")
    finish(plane, lease)
    plane.on_prompt(lease, TOKENS)
    assert plane.board.slots[lease.slots[0]].tokens is None


def test_a_session_whose_slot_the_engine_emptied_is_resident_nowhere():
    """CTX-5: it was evicted, and is told so; the next conversation gets an empty slot."""
    plane = policed()
    session = turn(plane, 1, 2, name="a")
    held = slot_sample(0, tokens=20)
    plane.on_sample(sample(used=20, slots=(held,)))
    assert (session.slot, session.taken) == (0, False)
    emptied = replace(held, tokens=0, tag=session.lease)
    plane.on_sample(sample(slots=(emptied,)))
    assert (session.slot, session.taken) == (None, True)
    lease = admitted(plane, 1, 2, 3, name="a")
    assert (lease.session, lease.continues, lease.evicted) == (session, False, True)


def test_orphaned_pins_are_found():
    """Pools without a pin, and pinned ones that a session rests on, are none."""
    plane = policed()
    made, other = pool(plane, pin=True), pool(plane, as_tokens(range(20)), uid=8)
    assert plane.orphans() == [made]
    attached_turn(plane, made, 1, 2)
    assert plane.orphans() == []
    other.pinned = True
    assert plane.orphans() == [other]


def test_copies_come_only_when_they_are_asked_for():
    """However much two prompts share."""
    plane = copying(cells=10_000, ctx=10_000)
    tokens = as_tokens(range(600))
    leader, other = admitted(plane, 1, 2, name="a"), admitted(plane, 3, 4, name="b")
    plane.on_prompt(leader, tokens)
    assert plane.shareable(tokens, other, 0) is None
    ready(plane, "e2", cells=10_000, ctx=10_000)
    leader, other = admitted(plane, 1, 2, name="a"), admitted(plane, 3, 4, name="b")
    plane.on_prompt(leader, tokens)
    assert plane.shareable(tokens, other, 0) is not None


def test_only_the_cells_of_a_patched_engine_are_counted():
    """Elsewhere an upper bound is all that is known."""
    assert ControlPlane(max_waiting=1).cells_total is None
    assert serving().cells_total == 1000
    assert copying().cells_total is None


# -- rates ------------------------------------------------------------------------------------------------


def counters(plane, tag, generated, at, *, epoch="e1"):
    """The sampler reads: what slot 0 has done for a lease."""
    slot = SlotSample(SlotId(0), SlotState.GEN, tag, tag, generated, 0, 0, 0, 0, 0, 100, at)
    sample = EngineSample(epoch, 50.0 + at, 0, 1000, 0, (slot,), (), at)
    plane.on_sample(sample)
    return plane.on_counters(sample)


def test_tokens_of_a_request_are_its_sessions():
    """Until another engine is there, whose counters start anew."""
    plane = serving()
    lease = request(plane, 1).lease
    for step in range(3):
        progress = counters(plane, lease.lease_id, 20 * step, float(step))
    assert progress.generated == 20
    assert lease.session.rate.tps == pytest.approx(20.0)
    assert counters(plane, lease.lease_id, 900, 3.0, epoch="other").generated == 0
    ready(plane, "e2")
    assert counters(plane, 0, 7, 0.0, epoch="e2").generated == 0
    assert plane.experience.book.generated_total == 40


def test_an_answers_own_account_counts_while_its_lease_lasts():
    """A lease that ended is of another engine, or was accounted for."""
    plane = serving()
    lease = request(plane, 1).lease
    plane.on_answer(lease, 41, 1.0)
    assert lease.session.rate.tps == pytest.approx(40.0)
    plane.leases.on_finished(lease, 2.0, clean=True, content=Content.NEW)
    plane.on_answer(lease, 4001, 1.0)
    assert lease.session.rate.tps == pytest.approx(40.0)


def test_a_refused_turn_leaves_the_session_its_last_reading():
    """The slot holds what the turn before left, and the counters still name that one."""
    plane = serving()
    first = request(plane, 1, 2, name="a").lease
    plane.leases.on_finished(first, 1.0, clean=True, content=Content.NEW)
    second = request(plane, 1, 2, 3, name="a").lease
    assert (second.session, second.session.lease) == (first.session, second.lease_id)
    plane.leases.on_finished(second, 2.0, clean=True, content=Content.OLD)
    assert first.session.lease == first.lease_id
    third = request(plane, 1, 2, 3, name="a").lease
    plane.leases.on_finished(third, 3.0, clean=True, content=Content.NEW)
    assert first.session.lease == third.lease_id


def test_whose_slot_it_is():
    """The board says so where requests are pinned; elsewhere only a certain match does."""
    plane = serving()
    lease = request(plane, 1).lease
    assert plane.session_in(SlotId(0)) is lease.session
    assert plane.session_in(SlotId(1)) is plane.session_in(SlotId(99)) is None
    stock = serving(capability=Capability.RELAY)
    lease = request(stock, 1, now=1.0).lease
    assert stock.session_in(SlotId(0)) is None
    stock.on_stock_slots([SlotLook(slot=SlotId(0), working=False)], 0.5)
    stock.on_stock_slots(
        [SlotLook(slot=SlotId(1), working=True, task=4), SlotLook(slot=SlotId(0), working=False)], 2.0
    )
    assert stock.session_in(SlotId(1)) is lease.session
    assert stock.session_in(SlotId(0)) is None
    stock.on_answer(lease, 21, 1.0)
    assert lease.session.rate.tps == pytest.approx(20.0)
