"""Claims about ``core.queueing``: whose turn it is, and that nobody waits for ever."""

import random

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.queueing import FairQueue


class Item:
    """Somebody who waits; compared by identity only."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = object.__hash__


def queue_of(*waiting, max_depth=1000, line_depth=1000):
    """A queue, and those who wait in it by name; each is (name, line, since, priority)."""
    queue = FairQueue(max_depth, step_s=30.0)
    items = {}
    for name, line, since, *priority in waiting:
        items[name] = Item(name)
        queue.push(
            items[name], since, line=line, priority=priority[0] if priority else 0, max_depth=line_depth
        )
    return queue, items


def drained(queue, now=1000.0, each_s=0.1):
    """Names in the order in which they are served."""
    names = []
    while (item := queue.head()) is not None:
        names.append(item.name)
        queue.pop(item, now)
        now += each_s
    return names


def test_one_pool_is_served_in_order_of_arrival():
    """Without priorities."""
    queue, _ = queue_of(("a", "p", 1.0), ("b", "p", 2.0), ("c", "p", 2.0))
    assert drained(queue) == ["a", "b", "c"]
    assert len(queue) == queue.depth("p") == 0


def test_pools_take_turns():
    """A backlog of one does not keep the other waiting."""
    queue, _ = queue_of(*((f"p{n}", "p", n * 0.01) for n in range(5)), ("q0", "q", 9.0), ("q1", "q", 9.0))
    assert drained(queue, now=10.0) == ["p0", "q0", "p1", "q1", "p2", "p3", "p4"]


def test_a_step_of_priority_is_worth_some_waiting():
    """And no more: who has waited longer than that goes first all the same."""
    queue, _ = queue_of(("old", "p", 0.0), ("new", "p", 31.0, 1), ("urgent", "p", 29.0, 1))
    assert drained(queue) == ["urgent", "old", "new"]
    queue, _ = queue_of(("old", "p", 0.0), ("urgent", "q", 29.0, 1), ("new", "r", 31.0, 1))
    assert drained(queue) == ["urgent", "old", "new"]


def test_depth_is_bounded_for_the_pool_and_for_all():
    """A refusal changes nothing."""
    queue, _ = queue_of(("a", "p", 1.0), ("b", "p", 2.0), ("c", "q", 3.0), max_depth=4, line_depth=2)
    assert not queue.push(Item("d"), 4.0, line="p", max_depth=2)
    assert queue.push(Item("e"), 5.0, line="q", max_depth=2)
    assert not queue.push(Item("f"), 6.0, line="r", max_depth=2)
    assert (len(queue), queue.depth("p"), queue.depth("r")) == (4, 2, 0)


def test_who_leaves_is_gone_at_once():
    """First, middle or last of a line, and it takes no turn with it."""
    queue, items = queue_of(("a", "p", 1.0), ("b", "p", 2.0), ("c", "p", 3.0), ("d", "q", 4.0))
    assert queue.discard(items["b"])
    assert not queue.discard(items["b"])
    assert items["b"] not in queue
    assert queue.discard(items["a"])
    assert items["c"] in queue
    assert drained(queue) == ["c", "d"]


def test_served_out_of_turn_uses_up_the_turn():
    """The second of a line may be let in before the first, and the line goes to the back."""
    queue, items = queue_of(("a", "p", 1.0), ("b", "p", 2.0), ("c", "q", 3.0))
    queue.pop(items["b"], 5.0)
    queue.pop(Item("nobody"), 5.0)
    assert drained(queue) == ["c", "a"]


def test_heads_are_the_first_of_each_line():
    """Oldest turn first; looking changes nothing."""
    queue, items = queue_of(("a", "p", 1.0), ("b", "p", 2.0), ("c", "q", 0.5), ("d", "r", 3.0))
    for _ in range(2):
        assert [item.name for item in queue.heads()] == ["c", "a", "d"]
    queue.discard(items["a"])
    assert [item.name for item in queue.heads()] == ["c", "b", "d"]
    assert list(FairQueue(1).heads()) == []


def test_those_who_left_take_no_memory():
    """Of many that leave, whether from the front, the back or in between, hardly a trace stays."""
    queue, items = queue_of(*((f"{n}", n % 50, float(n)) for n in range(900)))
    kept = [name for number, name in enumerate(items) if number % 300 == 299]
    order = list(items.items())
    random.Random(3).shuffle(order)
    for number, (name, item) in enumerate(order):
        if name not in kept:
            queue.discard(item)
        if number % 7 == 0:
            queue.head()
    assert sum(len(line.heap) for line in queue._lines.values()) <= 3 * len(kept) + 8 * len(queue._lines)
    assert len(queue._turns) <= 2 * len(queue._lines) + 9
    assert drained(queue) == kept


STEPS = st.lists(
    st.tuples(st.sampled_from("aaabd"), st.integers(0, 3), st.integers(-1, 1), st.integers(0, 20)),
    max_size=80,
)


@given(STEPS)
def test_it_does_what_a_plain_search_does(steps):
    """Beside a list that is searched for the oldest turn; memory stays in proportion to those who wait."""
    queue = FairQueue(1000, step_s=3.0)
    waiting, served, now = [], {}, 0.0

    def key(entry):
        return entry[1] - 3.0 * entry[2]

    def firsts():
        lines = {entry[3]: None for entry in waiting}
        heads = [min((e for e in waiting if e[3] == line), key=key) for line in lines]
        return [(max(e[1], served.get(e[3], -1e9)) - 3.0 * e[2], e) for e in heads]

    for action, line, priority, choice in steps:
        now += 1.0
        if action == "a":
            item = Item(f"{now}")
            assert queue.push(item, now, line=line, priority=priority, max_depth=1000)
            waiting.append((item, now, priority, line))
        elif waiting and action == "b":
            turns = firsts()
            oldest = min(turn for turn, _ in turns)
            item = queue.head()
            entry = next(e for turn, e in turns if e[0] is item and turn == oldest)
            queue.pop(item, now)
            served[entry[3]] = now
            waiting = [each for each in waiting if each[0] is not entry[0]]
            if not any(e[3] == entry[3] for e in waiting):
                del served[entry[3]]
        elif waiting:
            entry = waiting.pop(choice % len(waiting))
            assert queue.discard(entry[0])
            if not any(e[3] == entry[3] for e in waiting):
                served.pop(entry[3], None)
        assert len(queue) == len(waiting)
        assert {id(item) for item in queue.heads()} <= {id(e[0]) for e in waiting}
        assert len(list(queue.heads())) == len({e[3] for e in waiting})
        held = sum(len(each.heap) for each in queue._lines.values())
        assert held <= 3 * len(waiting) + 8 * len(queue._lines)
        assert len(queue._turns) <= 2 * len(queue._lines) + 9


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=60))
def test_nobody_waits_for_ever(arrivals):
    """One who waits at the lowest priority is served though others keep coming before every turn."""
    queue, items = queue_of(("patient", "p", 0.0, -1))
    now, rounds = 0.0, 0
    while items["patient"] in queue:
        line, priority = arrivals[rounds % len(arrivals)]
        queue.push(Item("pushy"), now, line=line, priority=priority, max_depth=10_000)
        queue.pop(queue.head(), now)
        now += 1.0
        rounds += 1
        assert rounds <= 95  # three steps of priority, thirty seconds each, and a little
