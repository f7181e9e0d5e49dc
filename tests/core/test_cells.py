"""What requests, slots and pools hold of the cells."""

from core.planes import SCOPE, facts, finish, pool, sample, serving
from polykv_proxy.core.cells import Need, need_of_pool
from polykv_proxy.core.costs import Asked
from polykv_proxy.core.decisions import Admit, Never, Queue, Reclaim, StopRunning, WakeQueued
from polykv_proxy.core.policies import CellPolicy
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Capability, PoolOrigin, PoolUid, SlotId, SlotSample, SlotState, as_tokens

CELLS = 1000
TIGHT = CellPolicy(watermark_ratio=0.0, growth_tokens=1)


def plane(**options):
    """One with 1,000 cells, sampled once."""
    made = serving(cells=CELLS, ctx=CELLS, slots=4, **options)
    made.cells.adopt(TIGHT)
    made.on_sample(sample())
    return made


def need(prompt, new, *, pool=None, shared=0, body=0):
    """A request's size."""
    size = Asked(kind="k", body_bytes=body, max_tokens=new)
    return Need(asked=size, prompt=prompt, shared=shared, pool=pool)


def ask(plane, prompt, new, *chain, now=0.0, **options):
    """A request of so many tokens; the decision."""
    wish = Ask(scope=SCOPE, chain=chain, need=need(prompt, new, **options))
    return plane.leases.on_request(wish, now, now_ts=0.0)


def lease_of(decision):
    """What an admitted one got."""
    assert isinstance(decision, Admit)
    return decision.lease


def seen(slot, tokens, *, lease=0, generated=0, state=SlotState.IDLE, shared=0, uid=0):
    """A slot as the engine reports it."""
    return SlotSample(SlotId(slot), state, 1, lease, generated, 0, 0, tokens, shared, PoolUid(uid), CELLS)


def keys(commands):
    """What is to be taken back."""
    return [command.key for command in commands if isinstance(command, Reclaim)]


def test_who_does_not_fit_waits_in_line_and_comes_in_when_there_is_room():
    """Rule 1: the cells come back with the slots."""
    at = plane()
    first = lease_of(ask(at, 100, 700))
    assert isinstance(second := ask(at, 100, 700), Queue)
    assert isinstance(ask(at, 1, 1), Queue)  # though it would fit: it may not starve the one before it
    woken = [each for each in finish(at, first, content=Content.NOTHING) if isinstance(each, WakeQueued)]
    assert woken[0].ticket is second.ticket
    assert second.ticket.lease is not None


def test_what_those_in_line_will_take_is_known():
    """Prompt and expected answer; of who does not say, and who waits before the line, only that they wait."""
    at = plane()
    first = lease_of(ask(at, 100, 700))
    assert at.leases.wanted == (0, 0)
    ask(at, 100, 700)
    ask(at, 40, 2)
    assert at.leases.wanted == (842, 0)
    at.leases.on_request(Ask(scope=SCOPE), 0.0, now_ts=0.0)
    at.leases.on_held()
    assert at.leases.wanted == (842, 2)
    finish(at, first, content=Content.NOTHING)
    assert at.leases.wanted[0] == 0


def test_what_can_never_fit_is_told_so_at_once_also_in_line():
    """A prompt for which the cells beside what is pinned are too few."""
    at = plane()
    assert ask(at, 1000, 1) == Never(1000, 1000)
    lease_of(ask(at, 100, 700))
    waiting = ask(at, 995, 1)
    assert isinstance(waiting, Queue)
    pool(at, pin=True)
    assert at.on_sample(sample(used=10)) == [WakeQueued(waiting.ticket)]
    assert (waiting.ticket.lease, waiting.ticket.never) == (None, Never(995, 990))
    assert at.leases.waiting == 0


def test_an_idle_conversation_makes_room_before_the_next_is_sent():
    """It is named, and who needs its cells waits until it is gone."""
    at = plane()
    first = lease_of(ask(at, 100, 700, 1, 2))
    at.cells.begins(first)
    finish(at, first)
    at.on_sample(sample(used=800, slots=(seen(0, 800, lease=first.lease_id),)))
    second = lease_of(ask(at, 500, 10, 7, 8))
    assert keys(at.cells.reclaim()) == [("slot", 0)]
    assert at.cells.awaits_room(second)
    at.on_reclaimed(("slot", 0), 0.0, gone=True)
    assert not at.cells.awaits_room(second)


def test_a_conversation_that_is_saved_before_it_goes_stops_nobody():
    """Its slot is kept from others meanwhile; its cells were counted on when those who run were let in."""
    at = plane()
    first = lease_of(ask(at, 100, 300, 1, 2))
    at.cells.begins(first)
    finish(at, first)
    held = seen(0, 400, lease=first.lease_id)
    at.on_sample(sample(used=400, slots=(held,)))
    second = lease_of(ask(at, 700, 250, 7, 8))
    assert keys(at.cells.reclaim()) == [("slot", 0)]
    saving = at.leases.borrow(SlotId(0), 0.0)
    assert at.on_sample(sample(used=400, slots=(held,))) == []
    assert at.cells.ledger.figures().protected == 0
    assert at.cells.reclaim() == []  # it is going already
    at.leases.returned(saving, 0.0)
    at.on_reclaimed(("slot", 0), 0.0, gone=True)
    assert not at.cells.awaits_room(second)


def test_what_a_request_replaces_stops_nobody():
    """It is in the books until the engine is seen to work on the request, and goes before that grows."""
    at = plane()
    at.cells.adopt(CellPolicy(watermark_ratio=0.0, growth_tokens=150))
    first = lease_of(ask(at, 50, 150, 1, 2))
    at.cells.begins(first)
    finish(at, first)
    others = [lease_of(ask(at, 100, 150, number, 9)) for number in range(3)]
    at.on_sample(sample(used=200, slots=(seen(0, 200, lease=first.lease_id),)))
    last = lease_of(ask(at, 100, 150, 7, 8))
    for lease in (*others, last):
        at.cells.begins(lease)
    assert last.slots == first.slots
    assert at.on_sample(sample(used=200, slots=(seen(0, 200, lease=first.lease_id),))) == []


def test_what_does_not_go_is_not_asked_again_until_the_next_sample():
    """It stays in the books."""
    at = plane()
    first = lease_of(ask(at, 100, 700, 1, 2))
    finish(at, first)
    at.on_sample(sample(used=800, slots=(seen(0, 800),)))
    lease_of(ask(at, 100, 10, 7, 8))
    lease_of(ask(at, 100, 10, 9, 10))
    assert keys(at.cells.reclaim()) == [("slot", 0)]
    assert keys(at.on_reclaimed(("slot", 0), 0.0, gone=False)) == []
    assert at.cells.ledger.residents.cells_of(("slot", 0)) == 800


def test_a_conversation_that_goes_on_has_its_cells_already():
    """Rule 2: they are the request's from the start, and the slot's again if it never begins."""
    at = plane()
    first = lease_of(ask(at, 100, 700, 1, 2))
    finish(at, first)
    at.on_sample(sample(used=800, slots=(seen(0, 800),)))
    again = lease_of(ask(at, 820, 50, 1, 2, 3))
    assert (again.continues, at.cells.ledger.residents.cells_of(("slot", 0))) == (True, 0)
    assert at.cells.reclaim() == []
    finish(at, again, content=Content.OLD)
    assert at.cells.ledger.residents.cells_of(("slot", 0)) == 800


def test_the_engine_counts_a_prompt_that_nobody_counted():
    """Once it generates, the bound gives way to what is there."""
    at = plane()
    lease = lease_of(ask(at, None, 10, body=500))
    bound = at.cells.ledger.reserved(lease.lease_id)
    running = seen(0, 61, lease=lease.lease_id, generated=1, state=SlotState.GEN)
    at.on_sample(sample(slots=(seen(0, 0),)))
    at.on_sample(sample(used=61, slots=(running,)))
    assert bound == 1000 - 1
    assert at.cells.ledger.reserved(lease.lease_id) < 100


def test_a_bound_that_could_not_run_is_a_reason_to_count():
    """Also where others wait: a shorter one would come in sooner."""
    at = plane()
    assert at.leases.must_count(need(None, 10, body=2000), 0.0)
    at.cells.meet(facts(cells=100_000, ctx=8000), counts=True)
    at.cells.ledger.on_sample(0, {}, 0.0)
    assert not at.leases.must_count(need(None, 10, body=2000), 0.0)
    assert at.cells.must_count(need(None, 10, body=2000), 0.0, in_line=True)


def test_the_last_to_begin_is_stopped_before_the_cells_are_used_up():
    """Both became longer than their kind was expected to."""
    at = plane()
    at.cells.adopt(CellPolicy(watermark_ratio=0.0, growth_tokens=10, assumed_tokens=100))
    first, second = (lease_of(ask(at, 100, 800, number)) for number in (1, 2))
    slots = tuple(
        seen(slot, 498, lease=each.lease_id, generated=398, state=SlotState.GEN)
        for slot, each in enumerate((first, second))
    )
    commands = at.on_sample(sample(used=996, slots=slots))
    assert [each for each in commands if isinstance(each, StopRunning)] == [StopRunning(second.lease_id)]


def test_answers_that_ended_by_themselves_teach_how_long_their_kind_is():
    """One that was cut at its bound says nothing."""
    at = plane()
    for _ in range(20):
        lease = lease_of(ask(at, 10, 500))
        at.cells.on_answer(lease, 40)
        at.cells.on_answer(lease, 500)
        finish(at, lease, content=Content.NOTHING)
    assert at.cells.lengths.expected("k", 500) < 60


def test_a_pool_has_its_cells_as_soon_as_it_was_computed():
    """They go from the request that computed it to the pool, without a sample between."""
    at = plane()
    wish = Ask(scope=SCOPE, need=need_of_pool(10, None, 0))
    lease = lease_of(at.leases.on_request(wish, 0.0, now_ts=0.0, conversation=False))
    made = pool(at)
    finish(at, lease, content=Content.NOTHING)
    assert at.cells.ledger.residents.cells_of(("pool", made.pool_id)) == made.own_len
    assert lease.lease_id not in at.cells.ledger


def test_a_pool_more_does_not_make_others_look_just_used():
    """What could be taken back before can be taken back then."""
    at = plane()
    figures = at.cells.ledger.figures
    pool(at, as_tokens([7] * 40), uid=7).origin = PoolOrigin.AUTO
    wish = Ask(scope=SCOPE, need=need_of_pool(10, None, 0))
    lease = lease_of(at.leases.on_request(wish, 0.0, now_ts=1000.0, conversation=False))
    at.on_sample(sample(used=40), now_ts=1000.0)
    assert figures().reclaimable == 40
    pool(at, uid=9)
    finish(at, lease, content=Content.NOTHING)
    assert figures().reclaimable == 40


def test_an_engine_without_counters_has_no_ledger():
    """Rule 3: everything fits that has a slot."""
    at = serving(cells=CELLS, capability=Capability.RELAY, slots=4)
    assert at.cells.ledger is None
    lease_of(ask(at, 5000, 5000))
    lease_of(ask(at, 5000, 5000))


def test_margins_follow_the_speed_of_the_engine():
    """Three looks of the fastest slot's growth, within a share of the cache; slowly forgotten."""
    at = plane()
    lease = lease_of(ask(at, 100, 800))
    ledger = at.cells.ledger

    def look(generated):
        running = seen(0, 100 + generated, lease=lease.lease_id, generated=generated, state=SlotState.GEN)
        at.on_sample(sample(used=100 + generated, slots=(running, *(seen(slot, 0) for slot in (1, 2, 3)))))
        return ledger._growth

    assert look(0) == 1
    assert look(6) == 18
    assert look(7) == 17
    assert look(107) == 1000 // 8 // 5


def test_several_answers_grow_at_once():
    """Each of them fills cells between two looks."""
    at = plane()
    at.cells.adopt(CellPolicy(watermark_ratio=0.0, growth_tokens=10, assumed_tokens=50))
    size = Asked(kind="k", body_bytes=0, max_tokens=100, answers=3)
    lease_of(
        at.leases.on_request(Ask(scope=SCOPE, slots=3, need=Need(asked=size, prompt=10)), 0.0, now_ts=0.0)
    )
    assert at.cells.ledger.margin == 30


# -- what was granted or given up -------------------------------------------------------------------------


def _look(at, used, *slots):
    """A reading with all slots in it."""
    empty = (seen(number, 0) for number in range(len(slots), len(at.board.slots)))
    return sample(used=used, slots=(*slots, *empty))


def test_a_conversation_that_was_just_granted_its_slot_is_not_emptied():
    """It was named to be taken back before that."""
    at = serving(cells=4096, ctx=4096, slots=3)
    at.on_sample(_look(at, 0))
    first = lease_of(ask(at, 2000, 10, 1, 2, 3))
    first.context_tokens = 2000
    finish(at, first)
    lease_of(ask(at, 2040, 10, 7, 8, 9))
    assert keys(at.cells.reclaim()) == [("slot", 0)]
    again = ask(at, 2001, 1, 1, 2, 3, 4)
    assert not isinstance(again, Admit) or not at.leases.is_reclaimable(SlotId(0))


def test_an_aborted_request_leaves_what_it_was_seen_to_fill():
    """Not what was reserved for it: nobody's idle conversation is taken back for that."""
    at = serving(cells=4096, ctx=4096, slots=3)
    at.on_sample(_look(at, 0))
    idle = lease_of(ask(at, 1540, 10, 1, 2, 3))
    idle.context_tokens = 1540
    finish(at, idle)
    one = lease_of(ask(at, 1500, 2000, 7, 8, 9))
    begun = seen(1, 100, lease=one.lease_id, state=SlotState.PROMPT)
    at.on_sample(_look(at, 1640, seen(0, 1540, lease=idle.lease_id), begun))
    finish(at, one, clean=False)
    assert at.leases.on_slots_idle(one, 3.0, Content.NEW) == []
    assert at.cells.ledger.empty_now == 4096 - 1540 - 100 - at.cells.ledger.growth
