"""Claims about ``core.presence``: who is inside, who works, and who will be back."""

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core import presence
from polykv_proxy.core.policies import Mode, Policy
from polykv_proxy.core.presence import RARE, Inside, Presence, Returns, working_at_most

POLICY = Policy(target_tps_per_session=10.0, mode=Mode.ENFORCED)


def test_a_session_is_inside_until_it_pauses_too_long():
    """A request in between starts the time anew."""
    here = Presence()
    here.enter("a", POLICY, 0.0)
    here.end("a", 10.0)
    here.advance(309.0)
    assert "a" in here
    here.begin("a")
    here.end("a", 310.0)
    here.advance(609.9)
    assert "a" in here
    here.advance(610.0)
    assert "a" not in here
    assert len(here) == 0


def test_a_session_with_a_request_stays_however_long_it_takes():
    """Two at once too: it pauses when the last of them ends."""
    here = Presence()
    here.enter("a", POLICY, 0.0)
    here.begin("a")
    here.end("a", 2.0)
    here.advance(9999.0)
    assert "a" in here
    assert here.working == 1
    here.end("a", 9999.0)
    assert here.working == 0


def test_close_ends_it_at_once():
    """Its running request does not bring it back, and closing again is nothing."""
    here = Presence()
    here.enter("a", POLICY, 0.0)
    assert here.close("a", 1.0)
    assert not here.close("a", 1.0)
    here.end("a", 2.0)
    assert (len(here), here.working, here.settling, here.floor) == (0, 0, 0, None)
    here.enter("b", POLICY, 3.0)
    here.end("b", 4.0)
    here.close("b", 5.0)
    here.enter("b", POLICY, 6.0)
    here.advance(400.0)  # the pause of its first life is over long ago
    assert "b" in here


def test_who_never_was_inside_leaves_nothing():
    """Unlike one that leaves: no place came free, and its other requests keep it inside."""
    here = Presence()
    here.enter("a", Policy(target_tps_per_session=9.0, mode=Mode.ENFORCED), 0.0)
    here.begin("a")
    here.end("a", 1.0)
    here.drop("a")
    assert (len(here), here.working) == (1, 1)
    here.end("a", 2.0)
    here.drop("a")
    here.drop("a")
    assert (len(here), here.working, here.settling, here.floor, here.left) == (0, 0, 0, None, 0)
    here.advance(400.0)
    assert (here.left, here.live) == (0, 0.0)


def test_a_newcomer_settles_with_its_tokens_or_with_time():
    """Or when its request ends."""
    here = Presence()
    for name in ("tokens", "time", "end"):
        here.enter(name, POLICY, 0.0)
    assert here.settling == 3
    here.decoded("tokens", 15)
    assert here.settling == 3
    here.decoded("tokens", 1)
    here.decoded("tokens", 1)
    here.decoded("nobody", 99)
    assert here.settling == 2
    here.end("end", 0.5)
    assert here.settling == 1
    here.advance(1.9)
    assert here.settling == 1
    here.advance(2.0)
    assert here.settling == 0


def test_the_floor_is_the_highest_that_was_promised():
    """As long as one of those to whom it was is inside; advisory is no promise."""
    here = Presence()
    here.enter("a", POLICY, 0.0)
    here.enter("b", Policy(target_tps_per_session=30.0, mode=Mode.ENFORCED), 0.0)
    here.enter("c", Policy(target_tps_per_session=90.0), 0.0)
    assert here.floor == 30.0
    here.close("c", 1.0)
    here.close("b", 1.0)
    assert here.floor == 10.0
    here.close("a", 1.0)
    assert here.floor is None


def test_the_time_between_two_that_leave_is_known():
    """From the second on."""
    here = Presence()
    for number in range(3):
        here.enter(number, POLICY, 0.0)
    here.close(0, 10.0)
    assert (here.left, here.gap_s) == (1, None)
    here.close(1, 14.0)
    assert here.gap_s == 4.0
    here.close(2, 26.0)
    assert here.gap_s == 5.0


def test_those_inside_are_bounded(monkeypatch):
    """Whose pause ends next makes room; those who work stay."""
    monkeypatch.setattr(presence, "MAX_INSIDE", 3)
    here = Presence()
    for number in range(6):
        here.enter(number, POLICY, float(number))
        if number != 1:
            here.end(number, float(number))
    here.advance(6.0)
    assert [number in here for number in range(6)] == [False, True, False, False, True, True]


def test_memory_does_not_grow_with_turns():
    """A session that takes a thousand of them leaves no thousand traces."""
    here = Presence()
    here.enter("a", POLICY, 0.0)
    for turn in range(2000):
        here.end("a", turn * 0.01)
        here.begin("a")
    assert len(here._ends) <= 100
    here.advance(30.0)
    assert sum(len(each.members) for each in here._pauses._classes) <= 1


def pausing(returns, count, now):
    """So many sessions whose pause begins now."""
    there = [Inside(number, POLICY, idle_since=now) for number in range(count)]
    for one in there:
        returns.begin(one)
    return there


def test_pauses_that_end_are_expected_to_end():
    """Where everybody comes back within five seconds, those who pause will."""
    returns, now = Returns(), 0.0
    for _ in range(20):
        there = pausing(returns, 10, now)
        for _ in range(20):
            now += 0.25
            returns.advance(now)
        for one in there:
            returns.end(one, returned=True)
    pausing(returns, 10, now)
    assert len(returns) == 10
    assert returns.expected() > 9.0


def test_who_has_paused_longer_than_anybody_who_came_back_is_not_expected():
    """Where nobody does, hardly anybody is; the first minute tells."""
    returns = Returns()
    pausing(returns, 100, 0.0)
    for second in range(60):
        returns.advance(float(second))
    pausing(returns, 10, 60.0)
    assert returns.expected() < 25.0
    for second in range(60, 290):
        returns.advance(float(second))
    assert returns.expected() < 12.0


def test_a_pause_is_of_the_class_of_its_length():
    """Each moves on by itself; one that ended does not."""
    returns = Returns()
    there = pausing(returns, 2, 0.0)
    returns.advance(2.0)
    returns.end(there[0], returned=True)
    returns.end(there[0], returned=True)
    returns.advance(50.0)
    assert [each.count for each in returns._classes] == [0, 0, 0, 0, 1, 0]
    assert returns._classes[1].returns > 0.8


def test_room_is_kept_for_those_who_pause():
    """Of a hundred that work half of their time, more than half may work at once soon."""
    here = Presence()
    for number in range(100):
        here.enter(number, POLICY, 0.0)
    now = 0.0
    for _ in range(100):
        for number in range(50):
            here.end(number, now)
        now += 1.0
        here.on_look(now)
        for number in range(50):
            here.begin(number)
        for number in range(50, 100):
            here.end(number, now)
        now += 1.0
        here.on_look(now)
        for number in range(50, 100):
            here.begin(number)
    for number in range(50):
        here.end(number, now)
    assert here.working == 50
    assert 95.0 < here.live <= 100.0
    assert 56 <= working_at_most(here.live, here.duty) <= 66


def test_those_who_never_come_back_need_no_room():
    """One request each, as a script does: only those who work count."""
    here = Presence()
    for number in range(200):
        here.enter(number, POLICY, float(number))
        if number >= 5:
            here.end(number - 5, float(number))
        here.on_look(float(number))
    assert here.working == 5
    assert here.live < 6.0
    assert here.duty > 0.8


def test_of_an_empty_place_nothing_is_learned():
    """Its share of those who work is no share."""
    here = Presence()
    here.on_look(0.0)
    assert (here.live, here.duty) == (0.0, 1.0)


@pytest.mark.parametrize("live", [1, 5, 12, 39])
@pytest.mark.parametrize("duty", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_rarely_more_work_at_once(live, duty):
    """As the binomial distribution has it, counted out here."""

    def more_than(k):
        return sum(comb(live, x) * duty**x * (1 - duty) ** (live - x) for x in range(k + 1, live + 1))

    k = working_at_most(live, duty)
    assert more_than(k) <= RARE + 1e-9
    assert k == 0 or more_than(k - 1) > RARE - 1e-9


def test_part_of_a_session_is_one_that_may_come():
    """And with many it is a matter of deviations."""
    assert working_at_most(5.0, 1.0) == 5
    assert working_at_most(5.2, 1.0) == 6
    assert working_at_most(5.2, 0.98) == 6
    assert working_at_most(5.005, 0.98) == 5
    assert working_at_most(0.0, 0.5) == 0
    assert 556 <= working_at_most(1000.0, 0.52) <= 558
    assert abs(working_at_most(40.0, 0.6) - working_at_most(41.0, 0.6)) <= 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "begin", "end", "close", "time"]), st.integers(0, 4), st.floats(0, 200)
    ),
    max_size=60,
)


@given(STEPS)
def test_counts_are_what_they_count(steps):
    """Any order of everything, beside plain dictionaries."""
    here, now = Presence(), 0.0
    running, since = {}, {}
    for action, name, span in steps:
        for gone in [each for each, at in since.items() if at + 300.0 <= now]:
            del running[gone], since[gone]
        here.advance(now)
        if action == "time":
            now += span
            continue
        if action == "enter" and name not in running:
            here.enter(name, POLICY, now)
            running[name] = 1
        elif action == "begin" and name in running:
            here.begin(name)
            running[name] += 1
            since.pop(name, None)
        elif action == "end":
            here.end(name, now)
            if running.get(name):
                running[name] -= 1
                if not running[name]:
                    since[name] = now
        elif action == "close":
            assert here.close(name, now) is (name in running)
            running.pop(name, None)
            since.pop(name, None)
        assert {each for each in range(5) if each in here} == set(running)
        assert here.working == sum(1 for count in running.values() if count)
        assert len(here._pauses) == len(since)
        assert 0 <= here.settling <= here.working
        assert here.working <= here.live <= len(running)
        assert 0.0 <= here.duty <= 1.0
        assert here.floor == (10.0 if running else None)
