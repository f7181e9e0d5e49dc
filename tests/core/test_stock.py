"""Claims about ``core.stock``: totals from what an engine forgets, and partners that are certain."""

from polykv_proxy.core.decisions import Lease
from polykv_proxy.core.stock import SlotLook, StockCounters
from polykv_proxy.core.types import LeaseId, SlotId


def slot(number, task=-1, generated=0, *, working=True, prompt=0, cached=0):
    """What ``/slots`` shows of one."""
    return SlotLook(
        slot=SlotId(number), working=working, task=task, generated=generated, prompt=prompt, cached=cached
    )


def lease(number, *, granted_at=0.0, slots=1):
    """A request."""
    return Lease(
        LeaseId(number), tuple(map(SlotId, range(slots))), None, continues=False, granted_at=granted_at
    )


def test_totals_go_on_over_tasks():
    """A task that ends shows zero; the slot's total stays, and the next task adds to it."""
    counters = StockCounters()
    looks = [
        slot(0, working=False),
        slot(0, 5, 0, prompt=20, cached=4),
        slot(0, 5, 30, prompt=20, cached=4),
        slot(0, 5, 0, working=False),
        slot(0, 9, 12, prompt=7),
        slot(0, 11, 3, prompt=1),
    ]
    seen = [counters.look([look], [], float(now)).slots[0] for now, look in enumerate(looks)]
    assert [one.generated for one in seen] == [0, 0, 30, 30, 42, 45]
    assert [one.prompt for one in seen] == [0, 20, 20, 20, 27, 28]
    assert [one.cached for one in seen] == [0, 4, 4, 4, 4, 4]
    assert [one.decoding for one in seen] == [False, False, True, False, True, True]
    assert [one.answer for one in seen] == [-1, 5, 5, 5, 9, 11]


def test_the_last_token_came_no_later_than_it_was_seen():
    """A look without a new token moves nothing."""
    counters = StockCounters()
    for now, generated in ((1.0, 3), (2.0, 3), (3.0, 4)):
        seen = counters.look([slot(0, 5, generated)], [], now).slots[0]
        assert seen.last_token_at == {3: 1.0, 4: 3.0}[generated]


def test_the_only_request_and_the_only_task_belong_together():
    """Also once another pair has been found, and until the slot's next task."""
    counters = StockCounters()
    counters.look([slot(0, working=False), slot(1, working=False)], [], 0.0)
    one, other = lease(1, granted_at=0.5), lease(2, granted_at=1.5)
    counters.look([slot(0, working=False), slot(1, 5, 3)], [one], 1.0)
    assert counters.slot_of(one.lease_id) == 1
    seen = counters.look([slot(0, 6, 1), slot(1, 5, 9)], [one, other], 2.0)
    assert [each.tag for each in seen.slots] == [2, 1]
    seen = counters.look([slot(0, 6, 0, working=False), slot(1, 5, 10)], [one], 3.0)
    assert [each.tag for each in seen.slots] == [2, 1], "the last task's, until there is another"
    seen = counters.look([slot(0, 7, 1), slot(1, 5, 11)], [one], 4.0)
    assert [each.tag for each in seen.slots] == [0, 1]
    assert counters.tag_of(SlotId(0)) == 0
    assert counters.tag_of(SlotId(9)) == 0
    assert counters.slot_of(other.lease_id) is None


def test_nothing_is_guessed():
    """Two at once, a task that was there before, a request that takes several slots, nobody at all."""
    counters = StockCounters()
    counters.look([slot(0, 5, 3), slot(1, 6, 3)], [lease(1, granted_at=-1.0), lease(2, granted_at=-1.0)], 0.0)
    assert counters.slot_of(LeaseId(1)) is None
    counters.look([slot(0, 5, 9), slot(1, 6, 0, working=False)], [lease(3, granted_at=0.5)], 1.0)
    assert counters.slot_of(LeaseId(3)) is None, "task 5 was there before the request"
    counters.look([slot(0, 8, 1), slot(1, working=False)], [lease(4, granted_at=1.5, slots=2)], 2.0)
    assert counters.slot_of(LeaseId(4)) is None
    counters.look([slot(0, 9, 1)], [], 3.0)
    assert counters.tag_of(SlotId(0)) == 0


def test_what_an_answer_tells_is_added_once():
    """Tokens after the last look are in the total too."""
    counters = StockCounters()
    counters.look([slot(0, working=False)], [], 0.0)
    counters.look([slot(0, 5, 30)], [lease(1, granted_at=0.5)], 1.0)
    counters.on_answer(lease(1), 42)
    counters.on_answer(lease(1), 42)
    seen = counters.look([slot(0, 5, 0, working=False)], [], 2.0)
    assert (seen.slots[0].generated, seen.unseen) == (42, 0)
    counters.reset()
    assert counters.look([slot(0, 5, 1)], [], 3.0).slots[0].generated == 1


def test_an_answer_that_no_look_showed_counts_as_it_says():
    """Once, whoever looks before its request is over; and again from zero on another engine."""
    counters = StockCounters()
    counters.look([slot(0, working=False)], [], 0.0)
    short = lease(1, granted_at=0.5)
    counters.on_answer(short, 7)
    counters.on_answer(short, 7)
    seen = counters.look([slot(0, 5, 6)], [short], 1.0)
    assert (seen.slots[0].tag, seen.unseen) == (0, 7), "what runs there now is another's"
    counters.on_answer(lease(2, granted_at=1.5), 3)
    seen = counters.look([slot(0, 5, 0, working=False)], [], 2.0)
    assert seen.unseen == 10
    counters.reset()
    counters.on_answer(lease(3), 5)  # of an engine that nobody has looked at
    assert counters.look([slot(0, working=False)], [], 3.0).unseen == 0


def test_an_answer_that_may_be_a_task_that_was_seen_does_not_count_twice():
    """Two requests and two tasks: whose is which is not known, so what was seen is all that counts."""
    counters = StockCounters()
    counters.look([slot(0, working=False), slot(1, working=False)], [], 0.0)
    both = [lease(1, granted_at=0.5), lease(2, granted_at=0.5)]
    counters.look([slot(0, 5, 3), slot(1, 6, 4)], both, 1.0)
    for each in both:
        counters.on_answer(each, 9)
    seen = counters.look([slot(0, 5, 0, working=False), slot(1, 6, 0, working=False)], [], 2.0)
    assert ([one.generated for one in seen.slots], seen.unseen) == ([3, 4], 0)


def test_a_pinned_request_is_where_it_was_sent():
    """Several at once; not with a task that was there before, nor in a slot that nobody has."""
    counters = StockCounters()
    counters.look([slot(number, working=False) for number in range(3)], [], 0.0, pinned=True)
    one, other = lease(1, granted_at=0.5), lease(2, granted_at=0.5)
    other.slots = (SlotId(1),)
    looks = [slot(0, 5, 1), slot(1, 6, 1), slot(2, 7, 1)]
    seen = counters.look(looks, [one, other], 1.0, pinned=True)
    assert [each.tag for each in seen.slots] == [1, 2, 0]
    seen = counters.look(looks, [lease(3, granted_at=2.0)], 3.0, pinned=True)
    assert [each.tag for each in seen.slots] == [1, 2, 0]
    late = lease(4, granted_at=2.0)
    late.slots = (SlotId(2),)
    assert counters.look(looks, [late], 3.0, pinned=True).slots[2].tag == 0
