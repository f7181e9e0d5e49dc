"""Claims about ``core.leases``: who gets slots, who waits, and how that ends, without an engine."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.leases_model import ROOMY, LeasesAgainstModel
from core.planes import (
    SCOPE,
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
    turn,
)
from polykv_proxy.core import sessions as sessions_module
from polykv_proxy.core.cells import Need
from polykv_proxy.core.costs import Asked
from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Queue,
    Reject,
    WakeQueued,
)
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import (
    Capability,
    Scope,
    SlotId,
    as_tokens,
)

# -- the line ---------------------------------------------------------------------------------------------


def test_nobody_is_let_in_before_an_engine_serves():
    """A request waits, and is woken by the engine that becomes ready."""
    plane = ControlPlane(max_waiting=1)
    assert not plane.serving
    decision = request(plane)
    assert isinstance(decision, Queue)
    assert ready(plane) == [WakeQueued(decision.ticket)]
    assert decision.ticket.lease.slots == (0,)
    assert plane.serving


def test_a_queue_has_an_end():
    """One request too many is rejected before anything happens."""
    plane = serving(slots=1, max_waiting=1)
    admitted(plane)
    assert isinstance(request(plane), Queue)
    decision = request(plane)
    assert isinstance(decision, Reject)
    assert decision.code == "queue_full"


def test_who_waits_before_the_line_has_a_place_in_it():
    """Both are bounded together; who is let go makes room."""
    plane = serving(slots=1, max_waiting=2)
    admitted(plane)
    place = plane.leases.on_held()
    assert isinstance(request(plane), Queue)
    assert plane.leases.waiting == 2
    for refused in (plane.leases.on_held(), request(plane)):
        assert isinstance(refused, Reject)
        assert refused.code == "queue_full"
    for _ in range(2):
        plane.leases.on_let_go(place)
    assert plane.leases.waiting == 1
    assert isinstance(request(plane), Queue)
    assert isinstance(request(plane), Reject)


def test_who_waited_before_the_line_asks_from_his_place_in_it():
    """However many came meanwhile: he is not refused, and those who came later are served later."""
    plane = serving(slots=1, max_waiting=3)
    running, place = admitted(plane), plane.leases.on_held()
    others = [request(plane).ticket, request(plane).ticket]
    mine = request(plane, place=place).ticket
    assert isinstance(request(plane), Reject)
    for ticket in (mine, *others):
        assert finish(plane, running) == [WakeQueued(ticket)]
        running = ticket.lease
    assert plane.leases.waiting == 0


def test_who_waited_before_the_line_does_not_wait_behind_those_who_came_later():
    """The first of them needs all slots, and holds back only those behind it."""
    plane = serving(slots=2)
    place = plane.leases.on_held()
    admitted(plane)
    assert isinstance(request(plane, exclusive=True), Queue)
    assert isinstance(request(plane), Queue)
    assert isinstance(request(plane, place=place), Admit)


def test_a_place_that_was_given_up_is_taken_again():
    """Who had slots and has to wait before the line once more is nobody's newcomer."""
    plane = serving(slots=1, max_waiting=1)
    place = plane.leases.on_held()
    lease = request(plane, place=place).lease
    later = request(plane).ticket
    assert plane.leases.on_held(place) is place
    assert plane.leases.waiting == 2
    mine = request(plane, place=place).ticket
    assert finish(plane, lease) == [WakeQueued(mine)]
    assert finish(plane, mine.lease) == [WakeQueued(later)]


def test_those_who_wait_are_served_in_order():
    """Each freed slot wakes the one who came first; a newcomer does not pass."""
    plane = serving(slots=1)
    running = admitted(plane)
    first, second = request(plane).ticket, request(plane).ticket
    assert finish(plane, running) == [WakeQueued(first)]
    assert isinstance(request(plane), Queue)
    assert finish(plane, first.lease) == [WakeQueued(second)]


def test_a_request_that_cannot_be_placed_holds_back_those_behind_it():
    """Who needs all slots is not starved by those who need one."""
    plane = serving(slots=2)
    one, two = admitted(plane), admitted(plane)
    everything, behind = request(plane, exclusive=True).ticket, request(plane).ticket
    assert finish(plane, one) == []
    assert isinstance(request(plane), Queue)
    assert finish(plane, two) == [WakeQueued(everything)]
    assert finish(plane, everything.lease)[0] == WakeQueued(behind)


def test_giving_up_lets_the_next_one_in():
    """When the first in line leaves, whoever stood behind it and fits goes on."""
    plane = serving(slots=2)
    admitted(plane)
    everything, behind = request(plane, exclusive=True).ticket, request(plane).ticket
    assert plane.leases.on_gave_up(everything, 2.0) == [WakeQueued(behind)]


def test_a_lease_that_nobody_took_is_passed_on():
    """Who gave up in the moment of being woken leaves the slot to the next, and its former content in it."""
    plane = serving(slots=1)
    mine = turn(plane, 1, 2, name="a")
    running = admitted(plane, 1, 2, 3, name="a")
    first, second = request(plane, 7, 8, name="b").ticket, request(plane, 1, 2, 3, 4, name="a").ticket
    finish(plane, running)
    assert plane.leases.on_gave_up(first, 3.0) == [WakeQueued(second)]
    assert second.lease.continues
    assert second.lease.session is mine


def test_giving_up_twice_changes_nothing():
    """A ticket that is gone frees no second slot."""
    plane = serving(slots=1)
    running = admitted(plane)
    first, second = request(plane).ticket, request(plane).ticket
    finish(plane, running)
    assert plane.leases.on_gave_up(first, 3.0) == [WakeQueued(second)]
    assert plane.leases.on_gave_up(first, 3.0) == []


@pytest.mark.parametrize("content", Content)
def test_a_session_that_ends_while_its_request_is_stopped_leaves_nothing(content):
    """Nobody goes on from what its slot held, before or after that request."""
    plane = serving(slots=2)
    session = turn(plane, 1, 2, name="a")
    stopped = left(plane, 1, 2, 3, name="a")
    again = request(plane, 1, 2, 3, name="a").ticket
    assert plane.end_session(session.session_id, SCOPE, 3.0) == (0, [WakeQueued(again)])
    assert again.lease.slots == (1,)
    assert plane.leases.left_in(SlotId(0)) == stopped.lease_id
    plane.leases.on_slots_idle(stopped, 4.0, content)
    third = admitted(plane, 1, 2, 3, 4, name="a")
    assert not third.continues
    assert session not in (again.lease.session, third.session)


def test_a_request_that_came_to_nothing_begins_no_session():
    """The engine refused it. One that had a turn before goes on, also when its next one is refused."""
    plane = serving(slots=2)
    finish(plane, admitted(plane, 7, 8, name="stranger"), content=Content.OLD)
    assert list(plane.sessions) == []
    session = turn(plane, 1, 2, name="a")
    finish(plane, admitted(plane, 1, 2, 3, name="a"), content=Content.OLD)
    assert list(plane.sessions) == [session]


def test_a_session_that_ends_while_another_has_its_slot_does_not_come_back():
    """The other one was never sent: its slot holds what it held, but that belongs to nobody."""
    plane = serving(slots=1)
    session = turn(plane, 1, 2, name="a")
    other = admitted(plane, 7, 8, name="b")
    assert plane.end_session(session.session_id, SCOPE, 2.0) == (None, [])
    finish(plane, other, content=Content.OLD)
    assert plane.board.slots[0].session is None
    assert not admitted(plane, 1, 2, 3, name="a").continues


# -- leases -----------------------------------------------------------------------------------------------


def test_a_lease_ends_once():
    """Ending it again frees nothing that belongs to somebody else by now."""
    plane = serving(slots=1)
    lease = admitted(plane)
    finish(plane, lease)
    other = admitted(plane)
    assert finish(plane, lease) == []
    assert plane.board.slots[0].lease == other.lease_id
    assert other.lease_id != lease.lease_id


def test_an_unclean_end_keeps_the_slot_until_the_engine_is_idle():
    """The engine may still work for a client that left."""
    plane = serving(slots=1)
    lease = admitted(plane)
    waiting = request(plane).ticket
    assert plane.leases.on_finished(lease, 2.0, clean=False, content=Content.NEW, stop=False) == [
        AwaitIdle(lease, stop=False)
    ]
    assert waiting.lease is None
    assert plane.leases.on_slots_idle(lease, 3.0, Content.NEW) == [WakeQueued(waiting)]
    assert plane.leases.on_slots_idle(lease, 3.0, Content.NEW) == []


def test_further_slots_of_a_request_hold_nothing():
    """Only the first slot keeps the conversation."""
    plane = serving(slots=2)
    lease = admitted(plane, 1, 2, slots=2)
    finish(plane, lease)
    assert [slot.chain for slot in plane.board] == [(1, 2), ()]


def test_a_pool_in_use_is_counted():
    """From the sending to the end of the request, so that nobody evicts it meanwhile."""
    plane = policed()
    made = pool(plane)
    lease = admitted(plane, 1, 2, name="a")
    plane.leases.on_dispatch(lease, AttachPlan(made, 4, 4))
    assert (made.attached, lease.pool) == (1, made)
    finish(plane, lease)
    finish(plane, lease)
    assert made.attached == 0


def test_a_session_is_on_the_pool_that_its_request_was_sent_to():
    """Before any answer proves it; a turn that goes on stays, a refused one was never there."""
    plane = policed()
    one, two = pool(plane), pool(plane, as_tokens(range(20)), uid=8)

    def sent(*chain, to=None):
        lease = admitted(plane, *chain, name="a")
        plane.leases.on_dispatch(lease, None if to is None else AttachPlan(to, 4, 4))
        return lease, lease.session.pool

    lease, seen = sent(1, 2, to=one)
    assert seen == one.pool_id
    finish(plane, lease)
    lease, seen = sent(1, 2, 3)
    assert (lease.continues, seen) == (True, one.pool_id)
    finish(plane, lease)
    lease, seen = sent(1, 2, 3, 4, to=two)
    assert (seen, one.attached, two.attached) == (two.pool_id, 0, 1)
    finish(plane, lease, content=Content.OLD)
    assert lease.session.pool == one.pool_id
    plane.board.forget(lease.session.slot)
    lease, seen = sent(1, 2, 3)
    assert (lease.continues, seen) == (False, None)


def test_a_lease_says_that_its_session_was_evicted():
    """Once: the session has a slot again from then on."""
    plane = serving(slots=1)
    for name, evicted in (("a", False), ("b", False), ("a", True), ("a", False)):
        lease = request(plane, hash(name), 2, name=name).lease
        assert lease.evicted is evicted
        plane.leases.on_finished(lease, 1.0, clean=True, content=Content.NEW)


def test_how_much_is_at_work():
    """Slots, those whose clients get nothing yet, and those who wait."""
    plane = serving(slots=3)
    assert (plane.leases.running_count, plane.leases.silent, plane.leases.waiting) == (0, False, 0)
    one = request(plane, 1, slots=2).lease
    two = request(plane, 2).lease
    one.streams = True
    request(plane, 3)
    assert (plane.leases.running_count, plane.leases.silent, plane.leases.waiting) == (3, True, 1)
    two.streams = True
    assert not plane.leases.silent


# -- sessions ---------------------------------------------------------------------------------------------


def test_a_conversation_that_ran_when_the_engine_died_goes_on_under_its_name():
    """Its session is not taken to be running for ever, so it is neither doubled nor kept from ending."""
    plane = serving()
    lease = admitted(plane, 1, 2, name="a")
    ready(plane, "e2")
    assert turn(plane, 1, 2, 3, name="a") is lease.session
    turn(plane, 5, 6, name="b", now=5000.0)
    ready(plane, "e3")
    turn(plane, 8, now=10_000.0)
    turn(plane, 9, now=10_001.0)
    assert "a" not in {session.session_id for session in plane.sessions}


def test_a_named_conversation_is_one_session():
    """The next turn has the same session, and its record counts on."""
    plane = serving()
    first = turn(plane, 1, 2, name="a", now=1.0)
    again = admitted(plane, 1, 2, 3, name="a", now=9.0)
    assert again.session is first
    assert (first.session_id, first.turns, first.last_seen, first.running) == ("a", 2, 9.0, True)
    plane.leases.on_first_byte(again, 0.25)
    finish(plane, again)
    assert (first.ttft_s, first.running, first.started_ts) == (0.25, False, 1001.0)


def test_concurrent_conversations_under_one_name_get_a_number():
    """A name is a namespace; the second conversation is ``a#2``."""
    plane = serving()
    one = admitted(plane, 1, 2, name="a")
    two = admitted(plane, 1, 2, name="a")
    assert (one.session.session_id, two.session.session_id) == ("a", "a#2")


def test_a_displaced_conversation_goes_on_under_its_id():
    """Its state is resident nowhere, so the name finds the session in any slot."""
    plane = serving(slots=1)
    mine = turn(plane, 1, 2, name="a")
    turn(plane, 8, 9, name="b")
    assert mine.slot is None
    lease = admitted(plane, 1, 2, 3, name="a")
    assert lease.session is mine
    assert not lease.continues
    assert mine.slot == 0


def test_a_diverging_request_under_a_resident_name_is_another_conversation():
    """The resident one keeps its id and its slot."""
    plane = serving()
    mine = turn(plane, 1, 2, name="a")
    assert turn(plane, 7, 8, name="a").session_id == "a#2"
    assert mine.slot == 0


def test_the_same_name_of_another_key_is_another_session():
    """Each key has its own of that name, and a forged name opens nothing."""
    plane = serving()
    mine = turn(plane, 1, 2, name="a")
    other = turn(plane, 1, 2, 3, name="a", scope=Scope("t"))
    assert (other.session_id, other is mine) == ("a", False)
    assert (mine.turns, other.turns) == (1, 1)


def test_unnamed_conversations_get_ids_that_nobody_else_has():
    """A client that calls its session ``auto-2`` keeps it."""
    plane = serving()
    assert turn(plane, 1, 2).session_id == "auto-1"
    named = turn(plane, 5, 6, name="auto-2")
    other = turn(plane, 7, 8)
    assert (named.session_id, other.session_id) == ("auto-2", "auto-2#2")
    assert named in list(plane.sessions)


def test_work_without_a_conversation_has_no_session():
    """Computing a pool appears nowhere in the sessions; its first byte is nobody's."""
    plane = serving()
    lease = admitted(plane, conversation=False)
    plane.leases.on_first_byte(lease, 1.0)
    finish(plane, lease)
    assert lease.session is None
    assert list(plane.sessions) == []


def test_sessions_end_when_they_are_idle_and_resident_nowhere():
    """One that still has a slot stays; so does one that runs."""
    plane = serving(slots=1)
    turn(plane, 1, 2, name="a", now=1.0)
    turn(plane, 8, 9, name="b", now=2.0)
    admitted(plane, 8, 9, 10, name="b", now=1000.0)
    assert [session.session_id for session in plane.sessions] == ["b"]


def test_a_session_forgotten_during_a_refused_request_starts_anew():
    """Its slot came back to it after it had ended; the conversation goes on in that slot as a new session."""
    plane = serving(slots=1)
    mine = turn(plane, 1, 2, name="a", now=1.0)
    refused = admitted(plane, 8, 9, name="b", now=500.0)
    request(plane, 5, name="c", now=501.0)  # ends the session of "a"
    assert mine not in list(plane.sessions)
    commands = finish(plane, refused, now=502.0, content=Content.OLD)
    plane.leases.on_gave_up(commands[0].ticket, 503.0)
    lease = admitted(plane, 1, 2, 3, name="a", now=504.0)
    assert lease.continues
    assert lease.session is not mine
    assert lease.session in list(plane.sessions)


def test_sessions_are_bounded(monkeypatch):
    """The oldest is forgotten, with what its slot holds, but never one that runs."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 1)
    plane = serving(slots=4)
    old = turn(plane, 1, 2, name="a")
    turn(plane, 3, 4, name="b")
    running = admitted(plane, 5, 6, name="c")
    assert [session.session_id for session in plane.sessions] == ["b", "c"]
    assert old.slot is None
    assert plane.board.slots[0].chain == ()
    finish(plane, admitted(plane, 7, 8, name="d"))
    admitted(plane, 7, 8, name="e")
    assert running.session in list(plane.sessions)


def test_a_conversation_on_a_new_root_has_no_known_length():
    """CTX-7: from the move to the first turn that is completed there, however it moved."""
    plane = policed()
    old, new = pool(plane), pool(plane, as_tokens(range(20)), uid=8)
    session = attached_turn(plane, old, 1, 2)
    session.context_tokens = 90
    assert not session.re_rooted
    attached_turn(plane, new, 1, 2, 3)  # it goes on in its slot: the same tokens and more
    assert not session.re_rooted
    session.context_tokens = 95
    plane.board.forget(session.slot)
    plane.sessions.on_migrated(session, 5.0)
    assert (session.re_rooted, session.context_tokens) == (True, None)
    assert attached_turn(plane, new, 7, 8, content=Content.OLD) is session
    assert session.re_rooted  # the engine refused it
    assert attached_turn(plane, new, 7, 8, clean=False) is session
    assert session.re_rooted  # its client left
    assert session.pool == new.pool_id
    plane.leases.on_slots_idle(plane.leases._running[session.lease], 3.0, Content.NOTHING)
    assert attached_turn(plane, new, 7, 8) is session
    assert not session.re_rooted
    plane.board.forget(session.slot)
    attached_turn(plane, old, 4, 5, content=Content.OLD)  # its client names another pool
    assert session.re_rooted


def test_the_lease_of_a_session_that_runs():
    """And none of one that does not."""
    plane = serving()
    lease = admitted(plane, 1, 2, name="me")
    assert plane.leases.running_lease(lease.session) is lease
    finish(plane, lease)
    assert plane.leases.running_lease(lease.session) is None


# -- clients that come again ------------------------------------------------------------------------------


def left(plane, *chain, **options):
    """A request whose client left; the engine is being stopped."""
    lease = admitted(plane, *chain, **options)
    finish(plane, lease, clean=False)
    return lease


def test_a_retry_waits_for_its_slot_and_goes_on_there():
    """Though another one is empty: what was computed is in that one (ADM-11)."""
    plane = serving(slots=3)
    first = left(plane, 1, 2)
    again = request(plane, 1, 2)
    assert isinstance(again, Queue)
    assert plane.leases.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
    lease = again.ticket.lease
    assert (lease.slots, lease.continues, lease.session) == (first.slots, True, first.session)


def test_what_a_client_left_outlives_what_was_used_later():
    """Until the time for a retry is over, others make room first (ADM-11)."""
    plane = serving(slots=2)
    gone = left(plane, 1, 2)
    other = admitted(plane, 5, 6, name="other")
    plane.leases.on_slots_idle(gone, 3.0, Content.NEW)
    finish(plane, other, now=9.0)
    newcomer = admitted(plane, 7, 8, name="newcomer")
    assert newcomer.slots != gone.slots
    again = admitted(plane, 1, 2)
    assert (again.slots, again.continues) == (gone.slots, True)


def test_a_retry_that_waits_is_in_nobodys_way():
    """Others, in line before and behind it, get the slots that are idle."""
    plane = serving(slots=2)
    first = left(plane, 1, 2)
    again = request(plane, 1, 2, 3)
    other = admitted(plane, 7, 8)
    behind = request(plane, 9, 10)
    assert isinstance(behind, Queue)
    assert finish(plane, other) == [WakeQueued(behind.ticket)]
    assert plane.leases.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]


def test_a_retry_waits_for_its_slot_though_its_session_was_forgotten(monkeypatch):
    """It goes on where it was computed, as a new session; else it would wait beside an idle slot."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 0)
    plane = serving(slots=2)
    first = left(plane, 1, 2, name="a")
    again = request(plane, 1, 2, name="a")
    assert list(plane.sessions) == []
    assert plane.leases.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
    lease = again.ticket.lease
    assert (lease.slots, lease.continues) == (first.slots, True)
    assert lease.session is not first.session
    assert list(plane.sessions) == [lease.session]


def test_who_stands_behind_one_that_waits_for_its_slot_comes_in_at_once():
    """The one before it had no room, and held it back; now it waits for the slot that its client left."""
    plane = serving(slots=3)
    plane.cells.adopt(ROOMY)
    plane.on_sample(sample())
    large = Need(asked=Asked(kind="k", body_bytes=0, max_tokens=1), prompt=600)
    first = admitted(plane, 1, 2, need=large)
    again, behind = request(plane, 1, 2, 3, need=large), request(plane, 7, 8)
    assert isinstance(again, Queue)
    assert isinstance(behind, Queue)
    assert finish(plane, first, clean=False) == [AwaitIdle(first, stop=True), WakeQueued(behind.ticket)]
    assert again.ticket.lease is None


def test_a_retry_whose_first_attempt_never_began_runs_wherever_there_is_room():
    """The engine had not touched it: there is nothing to go on with."""
    plane = serving(slots=2)
    first = left(plane, 1, 2)
    again = request(plane, 1, 2)
    plane.leases.on_slots_idle(first, 3.0, Content.OLD)
    assert not again.ticket.lease.continues


@pytest.mark.parametrize(
    ("chain", "options"),
    [((1,), {}), ((1, 3), {}), ((1, 2), {"scope": "theirs"}), ((1, 2), {"name": "another"})],
    ids=["no message in common", "another message", "another key", "another session"],
)
def test_other_conversations_do_not_wait_for_it(chain, options):
    """They take what is idle."""
    plane = serving(slots=2)
    left(plane, 1, 2)
    admitted(plane, *chain, **options)


def test_what_goes_on_for_a_client_to_come_back_is_not_waited_for():
    """A resumable stream runs to its end."""
    plane = serving(slots=2)
    lease = admitted(plane, 1, 2)
    plane.leases.on_finished(lease, 2.0, clean=False, content=Content.NEW, stop=False)
    admitted(plane, 1, 2)


def test_who_is_back_for_a_slot_gets_it_before_those_in_line():
    """Else what was computed there would be lost, and computed again, time after time (ADM-11)."""
    plane = serving(slots=1)
    first = admitted(plane, 1, 2)
    earlier = request(plane, 7, 8)
    finish(plane, first, clean=False)
    again = request(plane, 1, 2)
    assert plane.leases.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
    assert again.ticket.lease.continues
    assert finish(plane, again.ticket.lease) == [WakeQueued(earlier.ticket)]


# -- slots of an engine that chooses for itself -----------------------------------------------------------


def test_a_request_is_where_the_engine_put_it():
    """Its lease and its session; the slot that it was given is free, and somebody may wait for it."""
    plane = copying()
    lease = admitted(plane, 1, 2, name="me")
    other = admitted(plane, 3, 4, name="other")
    finish(plane, other)
    assert plane.leases.on_slot_learnt(lease, SlotId(1), 3.0) == []
    assert (lease.slots, lease.session.slot, other.session.slot) == ((1,), 1, None)
    assert plane.board.idle_count == 1
    finish(plane, lease)
    assert plane.board.idle_count == 2


def test_a_slot_that_came_free_that_way_is_given_away():
    """To whoever is next in line."""
    plane = copying(slots=3)
    one, two, three = (admitted(plane, number, 9, name=f"n{number}") for number in range(3))
    waiting = request(plane, 7, 8, name="waiting")
    assert isinstance(waiting, Queue)
    plane.board.free(SlotId(2), 2.0, Content.NEW)  # idle, and nobody was told yet
    del plane.leases._running[three.lease_id]
    (woken,) = plane.leases.on_slot_learnt(one, SlotId(2), 3.0)
    assert woken.ticket.lease.slots == (0,)
    assert two.slots == (1,)


def test_two_change_places():
    """One that was to have that slot and has not been sent gets the other one."""
    plane = copying()
    lease, waiting = admitted(plane, 1, 2, name="me"), admitted(plane, 3, 4, name="waiting")
    plane.leases.on_slot_learnt(lease, SlotId(1), 3.0)
    assert (lease.slots, waiting.slots) == ((1,), (0,))
    assert (lease.session.slot, waiting.session.slot) == (1, 0)
    for each in (lease, waiting):
        finish(plane, each)
    assert plane.board.idle_count == 2


def test_who_borrowed_the_slot_finds_it_empty():
    """What it wanted of the slot is gone, and the session with it."""
    plane = copying()
    owner = admitted(plane, 1, 2, name="owner")
    finish(plane, owner)
    borrowed = plane.leases.borrow(SlotId(0), 3.0)
    lease = admitted(plane, 5, 6, name="me")
    assert lease.slots == (1,)
    plane.leases.on_slot_learnt(lease, SlotId(0), 4.0)
    assert (borrowed.slots, owner.session.slot) == ((1,), None)
    plane.leases.returned(borrowed, 5.0)
    finish(plane, lease)
    assert plane.board.idle_count == 2


def test_what_is_learnt_too_late_changes_nothing():
    """The request is over, the engine another one, or there is no such slot."""
    plane = copying()
    lease = admitted(plane, 1, 2, name="me")
    assert plane.leases.on_slot_learnt(lease, SlotId(7), 2.0) == []
    assert plane.leases.on_slot_learnt(lease, SlotId(0), 2.0) == []
    finish(plane, lease)
    plane.leases.on_slot_learnt(lease, SlotId(1), 3.0)
    assert lease.slots == (0,)
    assert plane.board.idle_count == 2


def test_a_borrowed_slot_comes_back_with_what_it_held():
    """Those who wait for a slot wait for that one, too."""
    plane = copying(slots=1)
    owner = admitted(plane, 1, 2, name="owner")
    assert plane.leases.borrow(SlotId(0), 2.0) is None
    finish(plane, owner)
    borrowed = plane.leases.borrow(SlotId(0), 3.0)
    assert owner.session.slot == 0
    assert isinstance(request(plane, 1, 2, 3, name="owner"), Queue)
    (woken,) = plane.leases.returned(borrowed, 4.0)
    assert woken.ticket.lease.continues
    assert plane.leases.returned(borrowed, 5.0) == []


def test_a_borrowed_slot_of_an_engine_that_is_gone_is_not_given_back():
    """Its board is another one by then."""
    plane = copying()
    borrowed = plane.leases.borrow(SlotId(0), 2.0)
    ready(plane, "e2", capability=Capability.COPY)
    assert borrowed.ended
    assert plane.leases.returned(borrowed, 3.0) == []
    assert plane.board.idle_count == 2


# -- against chance ---------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(0))
def test_leases_live_as_its_model_does(seed):
    """Requests, ends, departures, retries, loans and restarts in any order."""
    LeasesAgainstModel(random.Random(seed)).live_on()


def test_the_model_lets_everything_happen():
    """A step that never does anything shows nothing."""
    done = Counter()
    for seed in range(60):
        model = LeasesAgainstModel(random.Random(seed))
        model.live_on()
        done += model.done
    assert set(done) == {
        "admitted",
        "attached",
        "borrowed",
        "changed places",
        "continues",
        "elsewhere",
        "ended",
        "gave up",
        "gave up, lets in",
        "idle",
        "idle, lets in",
        "lost",
        "never",
        "over clean new",
        "over clean nothing",
        "over clean old",
        "over left new",
        "over left nothing",
        "over left old",
        "read",
        "rejected",
        "released",
        "restarted",
        "retry waits",
        "returned",
        "taken",
        "taken back",
        "waits",
    }
