"""Claims about ``core.plane``: admission, leases, sessions and pools, as conversations without an engine."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.planes import (
    SCOPE,
    TOKENS,
    admitted,
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
from polykv_proxy.core import sessions as sessions_module
from polykv_proxy.core.cells import Need
from polykv_proxy.core.costs import Asked
from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Never,
    Queue,
    Reclaim,
    Reject,
    WakeQueued,
)
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.policies import CellPolicy
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import (
    Capability,
    EngineSample,
    PoolState,
    PoolUid,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)
from polykv_proxy.errors import (
    NotFoundError,
    SessionNotResidentError,
)

# -- admission --------------------------------------------------------------------------------------------


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
    assert plane.on_held() is None
    assert isinstance(request(plane), Queue)
    assert plane.waiting == 2
    for refused in (plane.on_held(), request(plane)):
        assert isinstance(refused, Reject)
        assert refused.code == "queue_full"
    plane.on_let_go()
    assert isinstance(request(plane), Queue)


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
    assert plane.on_gave_up(everything, 2.0) == [WakeQueued(behind)]


def test_a_lease_that_nobody_took_is_passed_on():
    """Who gave up in the moment of being woken leaves the slot to the next, and its former content in it."""
    plane = serving(slots=1)
    mine = turn(plane, 1, 2, name="a")
    running = admitted(plane, 1, 2, 3, name="a")
    first, second = request(plane, 7, 8, name="b").ticket, request(plane, 1, 2, 3, 4, name="a").ticket
    finish(plane, running)
    assert plane.on_gave_up(first, 3.0) == [WakeQueued(second)]
    assert second.lease.continues
    assert second.lease.session is mine


def test_giving_up_twice_changes_nothing():
    """A ticket that is gone frees no second slot."""
    plane = serving(slots=1)
    running = admitted(plane)
    first, second = request(plane).ticket, request(plane).ticket
    finish(plane, running)
    assert plane.on_gave_up(first, 3.0) == [WakeQueued(second)]
    assert plane.on_gave_up(first, 3.0) == []


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
    assert plane.on_finished(lease, 2.0, clean=False, content=Content.NEW, stop=False) == [
        AwaitIdle(lease, stop=False)
    ]
    assert waiting.lease is None
    assert plane.on_slots_idle(lease, 3.0, Content.NEW) == [WakeQueued(waiting)]
    assert plane.on_slots_idle(lease, 3.0, Content.NEW) == []


def test_further_slots_of_a_request_hold_nothing():
    """Only the first slot keeps the conversation."""
    plane = serving(slots=2)
    lease = admitted(plane, 1, 2, slots=2)
    finish(plane, lease)
    assert [slot.chain for slot in plane.board] == [(1, 2), ()]


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
    assert (finish(plane, old), plane.on_slots_idle(old, 3.0, Content.NEW)) == ([], [])
    assert plane.board.idle_count == 1
    again, compute = plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=9.0)
    assert (again.pool_id, compute) == (kept.pool_id, True)


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


# -- sessions ---------------------------------------------------------------------------------------------


def test_a_named_conversation_is_one_session():
    """The next turn has the same session, and its record counts on."""
    plane = serving()
    first = turn(plane, 1, 2, name="a", now=1.0)
    again = admitted(plane, 1, 2, 3, name="a", now=9.0)
    assert again.session is first
    assert (first.session_id, first.turns, first.last_seen, first.running) == ("a", 2, 9.0, True)
    plane.on_first_byte(again, 0.25)
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
    """Ids are unique over all keys, and a forged name opens nothing."""
    plane = serving()
    mine = turn(plane, 1, 2, name="a")
    other = turn(plane, 1, 2, 3, name="a", scope=Scope("t"))
    assert other.session_id == "a#2"
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
    plane.on_first_byte(lease, 1.0)
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
    plane.on_gave_up(commands[0].ticket, 503.0)
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


def test_a_pool_in_use_is_counted():
    """From the sending to the end of the request, so that nobody evicts it meanwhile."""
    plane = policed()
    made = pool(plane)
    lease = admitted(plane, 1, 2, name="a")
    plane.on_dispatch(lease, AttachPlan(made, 4, 4))
    assert (made.attached, lease.pool) == (1, made)
    finish(plane, lease)
    finish(plane, lease)
    assert made.attached == 0


def attached_turn(plane, made, *chain, **options):
    """A whole request that rides on a pool; returns its session."""
    lease = admitted(plane, *chain, name="a")
    plane.on_dispatch(lease, AttachPlan(made, 4, 4))
    if options.get("clean", True):
        plane.pools.on_attached(AttachPlan(made, 4, 4), lease.session, 4)
    finish(plane, lease, **options)
    return lease.session


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
    plane.on_migrated(session, 5.0)
    assert (session.re_rooted, session.context_tokens) == (True, None)
    assert attached_turn(plane, new, 7, 8, content=Content.OLD) is session
    assert session.re_rooted  # the engine refused it
    assert attached_turn(plane, new, 7, 8, clean=False) is session
    assert session.re_rooted  # its client left
    assert session.pool == new.pool_id
    plane.on_slots_idle(plane._running[session.lease], 3.0, Content.NOTHING)
    assert attached_turn(plane, new, 7, 8) is session
    assert not session.re_rooted
    plane.board.forget(session.slot)
    attached_turn(plane, old, 4, 5, content=Content.OLD)  # its client names another pool
    assert session.re_rooted


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


# -- against chance ---------------------------------------------------------------------------------------


ROOMY = CellPolicy(watermark_ratio=0.0, growth_tokens=1, stale_after_s=1e9)


def longer(chain, *messages):
    """A chain with more links; each stands for all before it."""
    for message in messages:
        chain = (*chain, hash((chain, message)))
    return chain


class PlaneAgainstModel:
    """A plane, and books of what it answered: whoever comes, leaves and comes again, they have to agree.

    The model knows what each slot was left with, so that it can tell who has to go on where.

    Args:
        dice: decides everything.
    """

    MAX_WAITING = 3
    CELLS = 200

    def __init__(self, dice):
        self.dice = dice
        self.done = Counter()  # what really happened
        self.slots = dice.randint(1, 4)
        self.plane = ControlPlane(max_waiting=self.MAX_WAITING)
        self.plane.cells.adopt(ROOMY)
        self.epoch = 0
        self.now = 0.0
        self.serving = False
        self.reading = None  # the sample that counts
        self.running = []  # leases whose owner is at work
        self.leaving = []  # leases whose owner left before the engine was idle
        self.borrowed = []
        self.waiting = []  # tickets
        self.woken = []  # tickets with a lease that its owner has not seen yet
        self.going = []  # what the plane wants to have taken back
        self.of_epoch = {}  # lease ids, and the epoch in which each was given
        self.asks = {}  # lease ids, and what each was asked for
        self.displaced = {}  # lease ids, and what their first slots held before
        self.left = {}  # slots, and the conversation that each was left with
        self.pools = {}  # the pool that each lease runs on
        self.talks = []  # conversations: scope, name and chain
        if dice.random() < 0.8:
            self.ready()

    # -- what the plane says -----------------------------------------------------------------------------

    def obey(self, commands):
        """Do what it says; those who are woken were the first in line, but for those who wait for a slot."""
        for command in commands:
            match command:
                case WakeQueued(ticket):
                    assert self.serving
                    ahead = self.waiting[: self.waiting.index(ticket)]
                    self.waiting.remove(ticket)
                    if ticket.never is not None:
                        assert ticket.lease is None
                        continue
                    in_its_way = [each for each in ahead if not self.plane.board.awaits(each.ask)]
                    assert ticket.lease.continues or not in_its_way
                    self.granted(ticket.lease, ticket.ask)
                    self.woken.append(ticket)
                case AwaitIdle(lease, _):
                    self.leaving.append(lease)
                case Reclaim(key):
                    self.going.append(key)

    def granted(self, lease, ask):
        """A lease is new, on slots that nobody has; who goes on in a slot finds there what he left."""
        assert lease.lease_id not in self.of_epoch
        held = [slot for other in self.live() for slot in other.slots]
        assert not set(lease.slots) & set(held)
        self.of_epoch[lease.lease_id] = self.epoch
        self.asks[lease.lease_id] = ask
        was = self.left.get(lease.slots[0])
        if lease.continues:
            self.done["continues"] += 1
            assert (was[0], was[1]) == (ask.scope, ask.name)
            assert was[2][:2] == ask.chain[:2]
        elif ask.slots == 1 and not ask.exclusive:
            assert not self.resident(ask, lease.slots[0])
            assert not any(self.goes_on(ask, self.asks[each.lease_id]) for each in self.leaving_now())
        self.displaced[lease.lease_id] = was
        for slot in lease.slots:
            self.left.pop(slot, None)

    def resident(self, ask, *slots):
        """Whether an idle slot, or one of these, was left with what the request goes on with."""
        idle = [slot.slot for slot in self.plane.board if slot.idle] + list(slots)
        held = [self.left[slot] for slot in idle if slot in self.left]
        return any(self.goes_on(ask, Ask(scope=each[0], name=each[1], chain=each[2])) for each in held)

    @staticmethod
    def goes_on(ask, earlier):
        """Whether a request is another turn of an earlier one, or the same again."""
        links = len(earlier.chain)
        same = (ask.scope, ask.name) == (earlier.scope, earlier.name)
        return same and links > 1 and ask.chain[:links] == earlier.chain

    def leaving_now(self):
        """Leases whose owners left, and whose requests the engine is stopping."""
        return [lease for lease in self.leaving if self.of_epoch[lease.lease_id] == self.epoch]

    def live(self):
        """Leases that hold slots of the present engine."""
        leases = [
            *self.running,
            *self.leaving,
            *self.borrowed,
            *(ticket.lease for ticket in self.woken),
        ]
        return [lease for lease in leases if self.of_epoch[lease.lease_id] == self.epoch]

    def some(self, several):
        """One of several."""
        return self.dice.choice(several)

    # -- rules -------------------------------------------------------------------------------------------

    def wish(self):
        """What somebody asks for: the next turn of a conversation, the same again, or something new."""
        kind = self.dice.random()
        if self.talks and kind < 0.8:
            scope, name, chain = self.some(self.talks[-4:])
            chain = longer(chain, self.dice.randint(1, 9)) if kind < 0.5 else chain
        else:
            scope, name = Scope(self.some("st")), self.some([None, "a", "auto-1"])
            chain = longer((), *(self.dice.randint(1, 2) for _ in range(self.dice.randint(0, 4))))
        if len(chain) > 1:
            self.talks.append((scope, name, chain))
        need = None
        if self.dice.random() < 0.5:
            asked = Asked(kind="k", body_bytes=0, max_tokens=self.dice.randint(1, 40))
            need = Need(asked=asked, prompt=self.dice.choice([5, 5, 20, 60, 60, 100, 200]))
        return Ask(
            scope=scope,
            name=name,
            chain=chain,
            slots=self.dice.choice([1] * 9 + [2, 4]),
            exclusive=self.dice.random() < 0.05,
            need=need,
        )

    def come(self):
        """Some requests come at once; it is in a crowd that things go wrong."""
        self.now += self.dice.choice([0.0, 0.0, 1.0, 400.0])
        for _ in range(self.dice.choice([1, 1, 1, 4])):
            ask, conversation = self.wish(), True
            if self.dice.random() < 0.2:
                ask, conversation = replace(ask, name=None, chain=()), False
            match self.plane.on_request(ask, self.now, now_ts=0.0, conversation=conversation):
                case Admit(lease):
                    self.done["admitted"] += 1
                    assert self.serving
                    assert all(self.plane.board.awaits(ticket.ask) for ticket in self.waiting)
                    assert (lease.session is not None) == conversation
                    self.granted(lease, ask)
                    self.running.append(lease)
                case Queue(ticket):
                    self.done["retry waits" if self.plane.board.awaits(ask) else "waits"] += 1
                    self.waiting.append(ticket)
                case Reject(code, _):
                    self.done["rejected"] += 1
                    assert code == "queue_full"
                    assert len(self.waiting) == self.MAX_WAITING
                case Never():
                    self.done["never"] += 1
                    assert ask.need.prompt + 1 > self.CELLS

    def take_lease(self):
        """Somebody who was woken goes to work."""
        if self.woken:
            self.done["taken"] += 1
            self.running.append(self.woken.pop(self.dice.randrange(len(self.woken))).lease)

    def attach(self):
        """Somebody's request goes out on a pool."""
        leases = [lease for lease in self.running if lease.pool is None and not lease.ended]
        if not leases or not self.serving:
            return
        self.done["attached"] += 1
        lease = self.some(leases)
        made, compute = self.plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=0.0)
        if compute:
            self.plane.pools.on_ready(made, PoolUid(self.epoch + 1))
        self.plane.on_dispatch(lease, AttachPlan(made, 4, 4))
        self.pools[lease.lease_id] = made

    def begin(self):
        """Somebody's request is sent."""
        if self.running:
            self.plane.cells.begins(self.some(self.running))

    def give_up(self):
        """Somebody who waits, or was just woken, leaves."""
        if not (self.waiting or self.woken):
            return
        ticket = self.some([*self.waiting, *self.woken])
        (self.waiting if ticket in self.waiting else self.woken).remove(ticket)
        if ticket.lease is not None:
            self.over(ticket.lease, Content.OLD)
        commands = self.plane.on_gave_up(ticket, self.now)
        self.done["gave up, lets in" if commands else "gave up"] += 1
        self.obey(commands)

    def over(self, lease, content):
        """What a lease leaves in its slots."""
        if self.of_epoch[lease.lease_id] != self.epoch:
            return
        first, ask = lease.slots[0], self.asks[lease.lease_id]
        was = self.displaced[lease.lease_id]
        if content is Content.NEW and ask.chain:
            self.left[first] = (ask.scope, ask.name, ask.chain, lease.session)
        if content is Content.OLD and was is not None and was[3].slot in (None, first):
            self.left[first] = was  # else it is somewhere else by now

    def finish(self):
        """A request is over, perhaps reported twice."""
        if not self.running:
            return
        lease = self.some(self.running)
        clean, content = self.dice.random() < 0.6, self.some([*Content, Content.NEW, Content.NEW])
        self.running.remove(lease)
        self.pools.pop(lease.lease_id, None)
        if clean:
            self.over(lease, content)
        commands = self.plane.on_finished(lease, self.now, clean=clean, content=content)
        if self.of_epoch[lease.lease_id] == self.epoch:
            self.done[f"over {'clean' if clean else 'left'} {content.value}"] += 1
            assert clean or commands[0] == AwaitIdle(lease, stop=True)
        else:
            assert commands == []
        self.obey(commands)
        if self.dice.random() < 0.3:
            assert self.plane.on_finished(lease, self.now, clean=True, content=content) == []

    def idle(self):
        """The engine is done with an abandoned request."""
        if not self.leaving:
            return
        lease, content = self.some(self.leaving), self.some([*Content, Content.NEW, Content.NEW])
        self.leaving.remove(lease)
        self.over(lease, content)
        commands = self.plane.on_slots_idle(lease, self.now, content)
        self.done["idle, lets in" if commands else "idle"] += 1
        self.obey(commands)

    def borrow(self):
        """Somebody keeps a slot to himself that is idle, and gives it back as it was."""
        if self.borrowed and self.dice.random() < 0.6:
            lease = self.borrowed.pop()
            commands = self.plane.returned(lease, self.now)
            self.done["returned"] += 1
            self.obey(commands)
            return
        slot = SlotId(self.dice.randrange(self.slots))
        lease = self.serving and self.plane.borrow(slot, self.now)
        if lease:
            self.done["borrowed"] += 1
            self.of_epoch[lease.lease_id] = self.epoch
            self.borrowed.append(lease)

    def learn(self):
        """A request that could not be pinned runs in another slot, whose own request has not been sent."""
        taken = {slot for lease in (*self.leaving, *self.borrowed) for slot in lease.slots}
        free = [slot for slot in range(self.slots) if slot not in taken]
        leases = [lease for lease in self.running if not lease.ended and lease.lease_id in self.alone()]
        if not leases or not free or not self.serving:
            return
        lease, slot = self.some(leases), SlotId(self.some(free))
        others = [each for each in self.live() if slot in each.slots and each is not lease]
        if any(each.lease_id not in self.alone() for each in others):
            return
        self.done["changed places" if others else "elsewhere"] += slot != lease.slots[0]
        source = lease.slots[0]
        was = self.displaced[lease.lease_id]
        commands = self.plane.on_slot_learnt(lease, slot, self.now)
        assert lease.slots == (slot,)
        if slot != source:
            self.left.pop(slot, None)
            self.displaced[lease.lease_id] = None
            for other in others:
                assert other.slots == (source,)
                self.displaced[other.lease_id] = None
            if not others and was is not None and was[3].slot in (None, source):
                self.left[source] = was
        self.obey(commands)

    def alone(self):
        """Leases of the present engine that have one slot each."""
        return {lease.lease_id for lease in self.live() if len(lease.slots) == 1}

    def end_session(self):
        """A client says that its conversation is over."""
        idle = [session for session in self.plane.sessions if not session.running]
        if idle:
            self.done["ended"] += 1
            session = self.some(idle)
            slot = self.plane.end_session(session.session_id, None)
            if not any(slot in lease.slots for lease in self.leaving_now()):
                self.left.pop(slot, None)

    def take_back(self):
        """What has to go for those who run is gone, or would not go."""
        if not self.going:
            return
        key, gone = self.going.pop(0), False
        kind, name = key
        lease = self.plane.borrow(name, self.now) if kind == "slot" else None
        if lease is not None or (kind == "slot" and self.plane.reclaimable_slot(name)):
            self.done["taken back"] += 1
            gone = True
            self.plane.on_emptied(name)
            self.left.pop(name, None)
            for each in self.live():
                if each.slots[0] == name:
                    self.displaced[each.lease_id] = None
        if lease is not None:
            self.obey(self.plane.returned(lease, self.now))
        self.obey(self.plane.on_reclaimed(key, self.now, gone=gone))

    def down(self):
        """The engine is gone."""
        self.serving = False
        self.plane.on_engine_down()

    def ready(self):
        """An engine answers, the same or another one."""
        if self.dice.random() < 0.5 and self.plane.facts is not None:
            self.done["restarted"] += 1
            self.epoch += 1
            self.slots = self.dice.randint(1, 4)
            self.reading = None
            self.pools.clear()
            self.left.clear()
            self.going.clear()
        self.serving = True
        self.obey(ready(self.plane, f"e{self.epoch}", slots=self.slots, cells=self.CELLS))
        self.sample(age=0)

    def sample(self, age=None):
        """A reading comes in, perhaps of an engine that is gone; released pools are forgotten by it.

        Now and then it shows that the engine emptied a slot.
        """
        age = self.dice.choice([0, 0, 0, 1]) if age is None else age
        counts = age == 0 and self.plane.facts is not None
        slots, lost = [], []
        for slot in self.plane.board if counts else ():
            tokens = self.dice.choice([0, 5, 20, 40, 80])
            if slot.idle and slot.slot in self.left and not tokens:
                lost.append(slot.session)
                self.left.pop(slot.slot)
            slots.append(replace(slot_sample(slot.slot, tokens=tokens), tag=slot.lease or slot.left_by or 0))
        used = sum(slot.tokens for slot in slots)
        reading = replace(sample(f"e{self.epoch - age}", used=used, slots=tuple(slots)), taken_at=self.now)
        self.obey(self.plane.on_sample(reading, self.now))
        self.done["lost"] += len(lost)
        assert all(session.slot is None and session.taken for session in lost if not session.running)
        if counts:
            self.reading = reading
            self.done["read"] += 1
            assert self.plane.tree.nodes() == [made for made in self.plane.tree if made.resident]

    def release(self):
        """A pool that nobody uses is released, and the engine has given its number back."""
        idle = [made for made in self.plane.tree if made.resident and not made.attached]
        if idle:
            self.done["released"] += 1
            self.plane.tree.release(idle[0])
            self.plane.tree.retire(idle[0].number)

    def wind_up(self):
        """When everything ended, nobody waits and all slots are idle."""
        if not self.serving:
            self.ready()
        for _ in range(2 * self.MAX_WAITING + 2):  # each round serves one who waits, at least
            while self.going:
                self.take_back()
            while self.borrowed:
                self.obey(self.plane.returned(self.borrowed.pop(), self.now))
            while self.woken:
                self.take_lease()
            while self.running:
                lease = self.running.pop()
                self.pools.pop(lease.lease_id, None)
                self.over(lease, Content.NOTHING)
                self.obey(self.plane.on_finished(lease, self.now, clean=True, content=Content.NOTHING))
            while self.leaving:
                lease = self.leaving.pop()
                self.over(lease, Content.NOTHING)
                self.obey(self.plane.on_slots_idle(lease, self.now, Content.NOTHING))
            self.sample(age=0)
        assert not self.waiting
        assert not self.woken
        assert self.plane.board.idle_count == self.slots
        assert not any(session.running for session in self.plane.sessions)

    # -- what always holds -------------------------------------------------------------------------------

    def slots_have_one_lease_each(self):
        """Taken slots are those of live leases, each once; the dead engine's leases have ended."""
        held = {slot.slot: slot.lease for slot in self.plane.board if not slot.idle}
        assert held == {number: lease.lease_id for lease in self.live() for number in lease.slots}
        assert self.plane.board.idle_count == len(self.plane.board.slots) - len(held)
        assert all(lease.ended for lease in self.running if self.of_epoch[lease.lease_id] != self.epoch)

    def a_session_is_in_one_slot(self):
        """Board and sessions agree, and ids are unique; an idle slot holds what it was left with."""
        held = [(slot.session, slot.slot) for slot in self.plane.board if slot.session is not None]
        assert all(session.slot == number for session, number in held)
        for session in self.plane.sessions:
            if session.slot is not None:
                assert self.plane.board.slots[session.slot].session is session
        ids = [session.session_id for session in self.plane.sessions]
        assert len(ids) == len(set(ids))
        for slot in self.plane.board:
            if slot.idle:
                left = self.left.get(slot.slot)
                assert slot.chain == (() if left is None else left[2])

    def a_session_runs_while_its_request_does(self):
        """From the lease to its end, and every running one is remembered."""
        leases = [lease for lease in self.live() if not lease.ended and lease.session is not None]
        assert {id(lease.session) for lease in leases} == {
            id(session) for session in self.plane.sessions if session.running
        }

    def the_queue_is_fair(self):
        """Those who wait, and nobody else; the first who waits for no certain slot cannot be let in."""
        known = list(self.plane._waiting.values())
        assert {id(ticket) for ticket in known} == {id(ticket) for ticket in self.waiting}
        assert self.plane.serving == self.serving
        anywhere = [ticket for ticket in known if not self.plane.board.awaits(ticket.ask)]
        if self.serving and anywhere:
            ask = anywhere[0].ask
            placement = self.plane.board.place(ask)
            assert placement is None or not self.plane.cells.fits(ask, placement, self.now)

    def the_picture_is_the_engine_s(self):
        """The last reading of this engine, or none."""
        assert self.plane.sample is self.reading
        assert (self.plane.ownership is None) == (self.reading is None)

    def a_pool_in_use_is_counted(self):
        """As many requests as run on it, so that nobody evicts it meanwhile."""
        for made in self.plane.tree:
            assert made.attached >= sum(pool is made for pool in self.pools.values())
        if not self.running:
            assert not any(made.attached for made in self.plane.tree if made.resident)

    def live_on(self):
        """Sixty steps, and everything ends."""
        steps = [self.come, self.finish] * 6 + [self.idle, self.take_lease] * 3
        steps += [self.attach, self.begin, self.give_up, self.borrow, self.learn, self.sample] * 2
        steps += [self.take_back] * 3 + [self.release, self.end_session]
        for _ in range(60):
            self.some(steps if self.serving else [self.ready, self.come, self.finish, self.give_up])()
            if self.dice.random() < 0.02:
                self.some([self.down, self.ready])()
            self.check()
        self.wind_up()
        self.check()

    def check(self):
        """All of it."""
        self.slots_have_one_lease_each()
        self.a_session_is_in_one_slot()
        self.a_session_runs_while_its_request_does()
        self.the_queue_is_fair()
        self.the_picture_is_the_engine_s()
        self.a_pool_in_use_is_counted()


@settings(max_examples=200, deadline=None)
@given(st.integers(0))
def test_a_plane_lives_as_its_model_does(seed):
    """Requests, ends, departures, retries, loans and restarts in any order."""
    PlaneAgainstModel(random.Random(seed)).live_on()


def test_the_model_lets_everything_happen():
    """A step that never does anything shows nothing."""
    done = Counter()
    for seed in range(60):
        model = PlaneAgainstModel(random.Random(seed))
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


def test_a_lease_says_that_its_session_was_evicted():
    """Once: the session has a slot again from then on."""
    plane = serving(slots=1)
    for name, evicted in (("a", False), ("b", False), ("a", True), ("a", False)):
        lease = request(plane, hash(name), 2, name=name).lease
        assert lease.evicted is evicted
        plane.on_finished(lease, 1.0, clean=True, content=Content.NEW)


# -- slots of an engine that chooses for itself -----------------------------------------------------------


def copying(**options):
    """A plane whose engine's pools are slot files."""
    return serving(capability=Capability.COPY, reason="not patched", **options)


def test_a_request_is_where_the_engine_put_it():
    """Its lease and its session; the slot that it was given is free, and somebody may wait for it."""
    plane = copying()
    lease = admitted(plane, 1, 2, name="me")
    other = admitted(plane, 3, 4, name="other")
    finish(plane, other)
    assert plane.on_slot_learnt(lease, SlotId(1), 3.0) == []
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
    del plane._running[three.lease_id]
    (woken,) = plane.on_slot_learnt(one, SlotId(2), 3.0)
    assert woken.ticket.lease.slots == (0,)
    assert two.slots == (1,)


def test_two_change_places():
    """One that was to have that slot and has not been sent gets the other one."""
    plane = copying()
    lease, waiting = admitted(plane, 1, 2, name="me"), admitted(plane, 3, 4, name="waiting")
    plane.on_slot_learnt(lease, SlotId(1), 3.0)
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
    borrowed = plane.borrow(SlotId(0), 3.0)
    lease = admitted(plane, 5, 6, name="me")
    assert lease.slots == (1,)
    plane.on_slot_learnt(lease, SlotId(0), 4.0)
    assert (borrowed.slots, owner.session.slot) == ((1,), None)
    plane.returned(borrowed, 5.0)
    finish(plane, lease)
    assert plane.board.idle_count == 2


def test_what_is_learnt_too_late_changes_nothing():
    """The request is over, the engine another one, or there is no such slot."""
    plane = copying()
    lease = admitted(plane, 1, 2, name="me")
    assert plane.on_slot_learnt(lease, SlotId(7), 2.0) == []
    assert plane.on_slot_learnt(lease, SlotId(0), 2.0) == []
    finish(plane, lease)
    plane.on_slot_learnt(lease, SlotId(1), 3.0)
    assert lease.slots == (0,)
    assert plane.board.idle_count == 2


def test_a_borrowed_slot_comes_back_with_what_it_held():
    """Those who wait for a slot wait for that one, too."""
    plane = copying(slots=1)
    owner = admitted(plane, 1, 2, name="owner")
    assert plane.borrow(SlotId(0), 2.0) is None
    finish(plane, owner)
    borrowed = plane.borrow(SlotId(0), 3.0)
    assert owner.session.slot == 0
    assert isinstance(request(plane, 1, 2, 3, name="owner"), Queue)
    (woken,) = plane.returned(borrowed, 4.0)
    assert woken.ticket.lease.continues
    assert plane.returned(borrowed, 5.0) == []


def test_a_borrowed_slot_of_an_engine_that_is_gone_is_not_given_back():
    """Its board is another one by then."""
    plane = copying()
    borrowed = plane.borrow(SlotId(0), 2.0)
    ready(plane, "e2", capability=Capability.COPY)
    assert borrowed.ended
    assert plane.returned(borrowed, 3.0) == []
    assert plane.board.idle_count == 2


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
    plane.on_finished(lease, 2.0, clean=True, content=Content.NEW)
    plane.on_answer(lease, 4001, 1.0)
    assert lease.session.rate.tps == pytest.approx(40.0)


def test_a_refused_turn_leaves_the_session_its_last_reading():
    """The slot holds what the turn before left, and the counters still name that one."""
    plane = serving()
    first = request(plane, 1, 2, name="a").lease
    plane.on_finished(first, 1.0, clean=True, content=Content.NEW)
    second = request(plane, 1, 2, 3, name="a").lease
    assert (second.session, second.session.lease) == (first.session, second.lease_id)
    plane.on_finished(second, 2.0, clean=True, content=Content.OLD)
    assert first.session.lease == first.lease_id
    third = request(plane, 1, 2, 3, name="a").lease
    plane.on_finished(third, 3.0, clean=True, content=Content.NEW)
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


def test_how_much_is_at_work():
    """Slots, those whose clients get nothing yet, and those who wait."""
    plane = serving(slots=3)
    assert (plane.running_count, plane.silent, plane.waiting) == (0, False, 0)
    one = request(plane, 1, slots=2).lease
    two = request(plane, 2).lease
    one.streams = True
    request(plane, 3)
    assert (plane.running_count, plane.silent, plane.waiting) == (3, True, 1)
    two.streams = True
    assert not plane.silent


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
    assert plane.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
    lease = again.ticket.lease
    assert (lease.slots, lease.continues, lease.session) == (first.slots, True, first.session)


def test_a_retry_that_waits_is_in_nobodys_way():
    """Others, in line before and behind it, get the slots that are idle."""
    plane = serving(slots=2)
    first = left(plane, 1, 2)
    again = request(plane, 1, 2, 3)
    other = admitted(plane, 7, 8)
    behind = request(plane, 9, 10)
    assert isinstance(behind, Queue)
    assert finish(plane, other) == [WakeQueued(behind.ticket)]
    assert plane.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]


def test_a_retry_waits_for_its_slot_though_its_session_ended():
    """It goes on where it was computed, as a new session; else it would wait beside an idle slot."""
    plane = serving(slots=2)
    first = left(plane, 1, 2, name="a")
    again = request(plane, 1, 2, name="a")
    plane.end_session(first.session.session_id, SCOPE)
    assert plane.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
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
    plane.on_slots_idle(first, 3.0, Content.OLD)
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
    plane.on_finished(lease, 2.0, clean=False, content=Content.NEW, stop=False)
    admitted(plane, 1, 2)


def test_the_lease_of_a_session_that_runs():
    """And none of one that does not."""
    plane = serving()
    lease = admitted(plane, 1, 2, name="me")
    assert plane.running_lease(lease.session) is lease
    finish(plane, lease)
    assert plane.running_lease(lease.session) is None


def test_who_is_back_for_a_slot_gets_it_before_those_in_line():
    """Else what was computed there would be lost, and computed again, time after time (ADM-11)."""
    plane = serving(slots=1)
    first = admitted(plane, 1, 2)
    earlier = request(plane, 7, 8)
    finish(plane, first, clean=False)
    again = request(plane, 1, 2)
    assert plane.on_slots_idle(first, 3.0, Content.NEW) == [WakeQueued(again.ticket)]
    assert again.ticket.lease.continues
    assert finish(plane, again.ticket.lease) == [WakeQueued(earlier.ticket)]
