"""Claims about ``core.rates``: exact where it must be, silent where it cannot know."""

import copy
from dataclasses import replace
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.rates import (
    STALE_S,
    WARM_S,
    WARM_TOKENS,
    WINDOW_S,
    WINDOW_TOKENS,
    DecodeRate,
    RateBook,
    Reading,
    SlotReading,
)
from polykv_proxy.core.types import SlotId

counts = st.integers(1, 200)
seconds = st.floats(0.001, 5.0)
speeds = st.floats(0.5, 2000.0)


def shown(rate):
    """The rate, which must be known."""
    assert rate.tps is not None
    return rate.tps


# -- one session ------------------------------------------------------------------------------------------


@given(st.lists(counts, min_size=1, max_size=40), speeds)
def test_a_constant_rate_is_exact_however_tokens_are_grouped(groups, tps):
    """From the first moment at which it is shown, with no trace of a start value."""
    rate, tokens, clock = DecodeRate(), 0, 0.0
    for group in groups:
        rate.add(group, group / tps)
        tokens, clock = tokens + group, clock + group / tps
        if tokens >= WARM_TOKENS or clock >= WARM_S:
            assert shown(rate) == pytest.approx(tps, rel=1e-9)
        else:
            assert rate.tps is None


@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=20), st.integers(2, 7))
def test_looking_more_often_changes_nothing(intervals, parts):
    """An interval seen in equal parts does what the whole one does."""
    whole, cut = DecodeRate(), DecodeRate()
    for tokens, time in intervals:
        whole.add(tokens * parts, time)
        for _ in range(parts):
            cut.add(tokens, time / parts)
    assert whole.tps == pytest.approx(cut.tps, rel=1e-6) if whole.tps is not None else cut.tps is None


@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=40))
def test_it_stays_between_the_slowest_and_the_fastest_interval(intervals):
    """A mean: never beyond what was seen."""
    rate = DecodeRate()
    for tokens, time in intervals:
        rate.add(tokens, time)
    rates = [tokens / time for tokens, time in intervals]
    if rate.tps is not None:
        assert min(rates) * (1 - 1e-9) <= rate.tps <= max(rates) * (1 + 1e-9)


@given(counts, seconds, st.integers(1, 50))
def test_tokens_without_time_of_their_own_count_with_the_next(tokens, time, more):
    """A burst read at one moment of the clock is neither lost nor infinitely fast."""
    rate, together = DecodeRate(), DecodeRate()
    rate.add(more, 0.0)
    assert rate.tps is None
    rate.add(tokens, time)
    together.add(tokens + more, time)
    assert rate.tps == together.tps


def test_the_past_is_forgotten_within_the_window():
    """After a few windows at a new rate, the old one is hardly seen; the shorter window decides."""
    rate = DecodeRate()
    rate.add(1000, 1.0)
    rate.add(60, 6.0)  # three times WINDOW_S, less than half of WINDOW_TOKENS
    slow = shown(rate)
    assert slow == pytest.approx(10.0, rel=0.6)
    rate.add(int(3 * WINDOW_TOKENS), 3 * WINDOW_TOKENS / 2000.0)  # a fifth of a second
    assert shown(rate) > 10 * slow


def test_a_stall_counts_with_its_whole_length():
    """Another's prefill stopped it for a second: that second is in the rate."""
    rate = DecodeRate()
    rate.add(40, 1.0)
    rate.add(1, 1.0)
    steady = DecodeRate()
    steady.add(40, 1.0)
    assert shown(rate) < 0.75 * shown(steady)


@given(speeds, st.floats(0.0, 10.0))
def test_a_pause_slows_the_rate_down_while_it_lasts(tps, pause):
    """Never up, less the longer it is, and not at all by the time that tokens take anyway."""
    rate = DecodeRate()
    rate.add(64, 64 / tps)
    before = shown(rate)
    rate.pause(pause)
    during = shown(rate)
    assert during <= before
    if pause <= 1.4 / tps:
        assert during == before
    rate.pause(pause + 1.0)
    assert shown(rate) <= during
    rate.pause(0.0)
    assert shown(rate) == before


@given(st.floats(0.0, 10.0), speeds)
def test_a_stall_shows_however_rarely_anybody_looked_before(pause, tps):
    """The same tokens, seen one by one, several at a time, or all at one look: the same is known of them."""
    looks = {1: [], 25: [], 500: []}
    for together in looks:
        rate = DecodeRate()
        for _ in range(500 // together):
            rate.add(together, together / tps)
        rate.pause(pause)
        looks[together] = shown(rate)
    assert looks[25] == pytest.approx(looks[1], rel=1e-6)
    assert looks[500] == pytest.approx(looks[1], rel=1e-6)
    if pause > 2.0 / tps:
        assert looks[1] < tps


def test_groups_that_come_with_pauses_are_no_stall():
    """Who looked in between saw none come: that is how they come, and a longer pause is not."""
    rate = DecodeRate()
    for _ in range(8):
        for tenth in range(1, 10):
            rate.pause(tenth / 10.0)
            assert rate.tps in (None, pytest.approx(6.0))
        rate.add(6, 1.0)
    rate.pause(2.0)
    assert shown(rate) < 5.0
    rate.pause(0.0)
    assert shown(rate) == pytest.approx(6.0)


def test_a_silence_does_not_tell_how_tokens_come():
    """Nobody saw that none came: after it, a stall shows as it did before."""
    rate, other = DecodeRate(), DecodeRate()
    for each in (rate, other):
        each.add(100, 1.0)
    rate.pause(0.9, seen=False)
    assert shown(rate) < 100.0
    for each in (rate, other):
        each.add(100, 1.0)
        each.pause(0.5)
    assert rate.tps == other.tps < 100.0


def test_a_pause_is_not_counted_twice():
    """The token that ends it brings its whole time; what was shown meanwhile leaves no trace."""
    seen, unseen = DecodeRate(), DecodeRate()
    for rate in (seen, unseen):
        rate.add(40, 1.0)
    seen.pause(1.5)
    for rate in (seen, unseen):
        rate.add(1, 2.0)
    assert seen.tps == unseen.tps


def test_slow_decoding_is_known_after_its_time():
    """Who gets a token a second need not wait for sixteen."""
    rate = DecodeRate()
    rate.add(1, 1.0)
    assert rate.tps is None
    rate.add(1, 1.0)
    assert shown(rate) == pytest.approx(1.0)


# -- an engine --------------------------------------------------------------------------------------------


class Engine:
    """Slots that are told what they did; readings of them.

    Attributes:
        clock: the engine's seconds, 100 behind the proxy's.
    """

    def __init__(self, slots=1):
        self.clock = 0.0
        self.book = RateBook()
        self.rates = {}
        self.slots = [SlotReading(SlotId(number), -1, 0, False, 0, 0, 0, 0.0) for number in range(slots)]

    def begin(self, slot, tag, prompt=0, cached=0):
        """A request starts; its prompt is computed."""
        old = self.slots[slot]
        self.slots[slot] = replace(
            old,
            answer=old.answer + 1,
            tag=tag,
            decoding=False,
            prompt=old.prompt + prompt,
            cached=old.cached + cached,
        )
        self.rates.setdefault(tag, DecodeRate())

    def decode(self, slot, tokens, time, wait=0.0):
        """Tokens come evenly over ``time`` seconds, then nothing for ``wait``."""
        self.clock += time
        old = self.slots[slot]
        self.slots[slot] = replace(
            old, decoding=True, generated=old.generated + tokens, last_token_at=self.clock
        )
        self.clock += wait

    def end(self, slot):
        """The request is over."""
        self.slots[slot] = replace(self.slots[slot], decoding=False)

    def look(self):
        """The sampler reads."""
        reading = Reading(self.clock + 100.0, self.clock, tuple(self.slots))
        return self.book.on_reading(reading, lambda slot: self.rates.get(slot.tag))

    @property
    def now(self):
        """The proxy's time."""
        return self.clock + 100.0


def test_the_clock_runs_from_the_first_token_on():
    """Neither the prompt's time nor the pause between two answers is in the rate."""
    engine = Engine()
    engine.begin(0, 1)
    engine.look()
    engine.clock += 30.0  # the prompt
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 20, 1.0)
    engine.look()
    assert engine.rates[1].tps == pytest.approx(20.0)
    engine.end(0)
    engine.look()
    engine.clock += 60.0
    engine.begin(0, 2)
    engine.rates[2] = engine.rates[1]  # the same session's next answer
    engine.look()
    engine.clock += 10.0
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 30, 1.5)
    engine.look()
    assert engine.rates[1].tps == pytest.approx(20.0)


def test_the_tail_of_an_answer_counts():
    """The reading after its end shows the last tokens, and when the last one came."""
    engine = Engine()
    engine.begin(0, 1)
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 40, 1.0)
    engine.end(0)
    engine.clock += 5.0
    progress = engine.look()
    assert engine.rates[1].tps == pytest.approx(40.0)
    assert progress.gaps == ((40, pytest.approx(0.025)),)


def test_a_slot_that_changes_hands_between_two_readings():
    """What cannot be told apart is in the total, and in nobody's rate."""
    engine = Engine()
    engine.begin(0, 1)
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 20, 1.0)
    engine.end(0)
    engine.begin(0, 2)
    engine.decode(0, 50, 0.1)
    engine.end(0)
    engine.begin(0, 3)
    engine.decode(0, 30, 1.0)
    progress = engine.look()
    assert progress.generated == 100
    assert progress.gaps == ()
    assert all(engine.rates[tag].tps is None for tag in (1, 2, 3))
    engine.decode(0, 30, 1.0)
    engine.look()
    assert engine.rates[3].tps == pytest.approx(30.0)
    assert engine.rates[1].tps is engine.rates[2].tps is None


def test_the_prompt_of_who_gets_the_slot_next_is_not_in_its_clock():
    """The old answer's last tokens and the new one's prompt are seen at the same look."""
    engine = Engine()
    engine.begin(0, 1)
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 20, 1.0)
    engine.look()
    engine.decode(0, 5, 0.1)
    engine.begin(0, 2, prompt=3000)
    progress = engine.look()
    assert (progress.generated, progress.gaps) == (5, ())
    engine.clock += 30.0  # the prompt
    engine.decode(0, 1, 0.0)
    assert engine.look().gaps == ()
    engine.decode(0, 40, 1.0)
    assert engine.look().gaps == ((40, pytest.approx(0.025)),)
    assert engine.rates[2].tps == pytest.approx(40.0)


def test_the_final_account_makes_up_for_what_readings_missed():
    """An answer between two readings; and of one that was seen in part only the rest."""
    engine = Engine()
    rate = engine.rates[1] = DecodeRate()
    engine.book.on_answer(SlotId(0), 1, rate, 49, 0.49)
    assert rate.tps == pytest.approx(100.0)
    engine.begin(0, 2)
    engine.rates[2] = DecodeRate()
    engine.decode(0, 1, 0.0)
    engine.look()
    engine.decode(0, 20, 1.0)
    engine.look()
    engine.book.on_answer(SlotId(0), 2, engine.rates[2], 60, 3.0)
    assert engine.rates[2].tps == pytest.approx(20.0)
    engine.decode(0, 40, 9.0)  # the same tokens once more, as the next reading sees them
    engine.end(0)
    progress = engine.look()
    assert engine.rates[2].tps == pytest.approx(20.0)
    assert progress.generated == 40
    engine.book.on_answer(SlotId(0), 2, engine.rates[2], 600, 3.0)
    assert engine.rates[2].tps == pytest.approx(20.0), "an answer is accounted for once"


def test_another_load_of_the_model_starts_a_new_count():
    """Totals go on, whether the book was told or the counters just fell."""
    engine = Engine()
    engine.begin(0, 1, prompt=10)
    engine.decode(0, 30, 1.0)
    engine.look()
    engine.decode(0, 30, 1.0)
    engine.look()
    assert engine.book.generated_total == 30, "what was there before the first reading is not ours to count"
    engine.slots[0] = replace(engine.slots[0], generated=5, prompt=0, answer=0)
    assert engine.look().generated == 0
    engine.decode(0, 7, 1.0)
    assert engine.look().generated == 7
    engine.book.reset()
    engine.slots[0] = replace(engine.slots[0], generated=0, decoding=False)
    engine.clock = 0.0
    assert engine.look().generated == 0
    assert engine.book.generated_tps(engine.now) is None
    assert engine.book.generated_total == 37


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.floats(0.0, 1.0)), max_size=60), st.data()
)
def test_counters_and_totals_agree_whatever_is_missed(steps, data):
    """Any interleaving of answers and looks: the total is what the counters moved."""
    engine = Engine(3)
    engine.look()
    start = sum(slot.generated for slot in engine.slots)
    for tag, (slot, tokens, time) in enumerate(steps, start=1):
        if data.draw(st.booleans()):
            engine.begin(slot, tag)
        engine.decode(slot, tokens, time)
        if data.draw(st.booleans()):
            engine.end(slot)
        if data.draw(st.booleans()):
            engine.look()
    engine.look()
    assert engine.book.generated_total == sum(slot.generated for slot in engine.slots) - start
    assert all(rate.tps is None or rate.tps >= 0.0 for rate in engine.rates.values())


# -- all together -----------------------------------------------------------------------------------------


def decoding_pair(tps=20, rounds=8):
    """Two sessions that decode side by side, each at ``tps``."""
    engine = Engine(2)
    for slot in (0, 1):
        engine.begin(slot, slot + 1)
        engine.decode(slot, 1, 0.0)
    engine.look()
    for _ in range(rounds):
        engine.decode(0, tps // 2, 0.5)
        engine.decode(1, tps // 2, 0.0)
        engine.look()
    return engine


def test_the_aggregate_is_the_sum_of_the_sessions():
    """Over the window, from counters that move with each token."""
    engine = decoding_pair()
    assert engine.book.generated_tps(engine.now) == pytest.approx(40.0)
    assert engine.book.mean_active_tps(engine.now) == pytest.approx(20.0)


def test_an_idle_engine_generates_nothing():
    """A true zero once the window is empty, and a mean of nobody."""
    engine = decoding_pair()
    for slot in (0, 1):
        engine.end(slot)
    for _ in range(4):
        engine.clock += WINDOW_S / 2
        engine.look()
    assert engine.book.generated_tps(engine.now) == 0.0
    assert engine.book.mean_active_tps(engine.now) is None
    assert engine.book.decoding_count == 0


def test_a_warming_session_is_in_no_mean():
    """A newcomer's first tokens drag nobody down."""
    engine = decoding_pair()
    engine.slots.append(SlotReading(SlotId(2), 0, 9, True, 1, 0, 0, engine.clock))
    engine.rates[9] = DecodeRate()
    engine.look()
    engine.decode(2, 1, 1.0)  # a token a second
    engine.decode(0, 20, 0.0)
    engine.decode(1, 20, 0.0)
    engine.look()
    assert engine.book.warming
    assert engine.rates[9].tps is None
    assert engine.book.mean_active_tps(engine.now) == pytest.approx(20.0)


def test_prefill_is_counted_apart():
    """Computing a prompt is no generation."""
    engine = Engine()
    engine.look()
    engine.clock += 1.0
    engine.begin(0, 1, prompt=300, cached=50)
    progress = engine.look()
    assert (progress.generated, progress.prompt, progress.cached) == (0, 300, 50)
    assert engine.book.prompt_tps(engine.now) == pytest.approx(300.0)
    assert engine.book.generated_tps(engine.now) == 0.0


def test_an_old_reading_says_nothing_about_now():
    """The engine went silent: nobody knows what it does."""
    engine = decoding_pair()
    assert not engine.book.stale(engine.now + STALE_S)
    later = engine.now + STALE_S + 0.1
    assert engine.book.stale(later)
    assert engine.book.generated_tps(later) is None
    assert engine.book.mean_active_tps(later) is None
    assert RateBook().stale(0.0)


def test_whoever_looks_changes_nothing():
    """Every figure, read a hundred times a second."""
    engine = decoding_pair()
    engine.clock += 0.7
    engine.look()
    before = copy.deepcopy(engine.book)
    values = [(rate._tokens, rate._seconds, rate._pause) for rate in engine.rates.values()]
    for step in range(100):
        now = engine.now + step / 100.0
        assert engine.book.generated_tps(now) is not None
        assert engine.book.mean_active_tps(now) is not None
        assert engine.book.prompt_tps(now) == 0.0
        assert engine.book.decoding == {1, 2}
        assert [shown(rate) for rate in engine.rates.values()]
    assert [(rate._tokens, rate._seconds, rate._pause) for rate in engine.rates.values()] == values
    for name in ("generated_total", "prompt_total", "cached_total", "taken_at", "_window", "_settled"):
        assert getattr(engine.book, name) == getattr(before, name)


def test_a_stall_is_shown_while_it_lasts():
    """Tokens stop for longer than they take: the rate falls before the next one comes."""
    engine = decoding_pair()
    before = shown(engine.rates[1])
    engine.clock += 1.0
    engine.look()
    assert shown(engine.rates[1]) < 0.8 * before
    engine.end(0)
    engine.look()
    assert shown(engine.rates[1]) == before, "it was over, not slow"


def test_a_rate_is_what_it_was_once_nobody_waits_for_tokens():
    """However the answer ended: its slot is another's at the next look, or its engine is gone."""
    engine = decoding_pair()
    before = shown(engine.rates[1])

    def stalled(tag):
        engine.clock += 1.0
        engine.look()
        return shown(engine.rates[tag]) < 0.8 * before

    assert stalled(1)
    engine.begin(0, 3, prompt=500)
    engine.look()
    assert shown(engine.rates[1]) == before
    assert stalled(2)
    engine.book.on_down()
    assert shown(engine.rates[2]) == before
    assert engine.book.stale(engine.now)
    assert engine.book.generated_tps(engine.now) is None
    engine.book.on_silence(engine.now + 5.0)  # it was being asked
    assert shown(engine.rates[2]) == before
    assert stalled(2)
    engine.book.reset()
    assert shown(engine.rates[2]) == before
    engine = decoding_pair()
    assert stalled(1)
    engine.slots[0] = replace(engine.slots[0], generated=0, answer=9, tag=9)  # another load of the model
    engine.look()
    assert shown(engine.rates[1]) == before


def test_an_engine_that_does_not_answer_brings_no_tokens():
    """Its readers' rates fall while it is asked in vain, and what comes next leaves no trace of that."""
    engine = decoding_pair()
    before = shown(engine.rates[1])
    engine.book.on_silence(engine.now + 1.0)
    during = shown(engine.rates[1])
    assert during < 0.8 * before
    engine.book.on_silence(engine.now + 2.0)
    assert shown(engine.rates[1]) < during
    engine.decode(0, 20, 1.0)
    engine.look()
    assert shown(engine.rates[1]) == pytest.approx(before)
    engine.end(1)
    engine.look()
    ended = shown(engine.rates[2])
    engine.book.on_answer(SlotId(0), 1, engine.rates[1], 1, 0.0)
    settled = shown(engine.rates[1])
    engine.book.on_silence(engine.now + 5.0)
    assert (shown(engine.rates[2]), shown(engine.rates[1])) == (ended, settled), "nobody waits for those"
    RateBook().on_silence(1.0)


def test_a_clock_that_jumps_back():
    """No rate over a negative time."""
    engine = decoding_pair()
    engine.clock = 0.0
    engine.look()
    assert engine.book.generated_tps(engine.now) is None
    engine.decode(0, 10, 1.0)
    engine.look()
    assert engine.book.generated_tps(engine.now) == pytest.approx(10.0)


# -- against the truth ------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.01, 0.05, 0.3, 1.0]), min_size=1, max_size=20),
    st.integers(150, 300),
    st.integers(1, 4),
)
def test_the_mean_of_what_is_shown_is_what_came(pattern, count, group):
    """Tokens in groups, with gaps of any unevenness that comes again: nobody is told too much or too little.

    A lasting change of speed shows up to a window late, which no mean over it can make up for.
    """
    gaps = list(islice(cycle(pattern), count))
    rate, clock, last, came, looks = DecodeRate(), 0.0, 0.0, 0, []
    arrivals = []
    for gap in gaps:
        clock += gap
        arrivals.append(clock)
    pending, now = list(arrivals), 0.0
    while pending:
        now += 0.1
        due = [at for at in pending if at <= now]
        if due:
            rate.add(group * len(due), due[-1] - last)
            last, pending = due[-1], pending[len(due) :]
        rate.pause(now - last)
        if now > arrivals[20]:
            looks.append(shown(rate))
            came += group * len(due)
    # the last seconds are not in the window yet, those before the first look are
    slack = 2 * WINDOW_S / (now - arrivals[20])
    assert sum(looks) / len(looks) == pytest.approx(came / (now - arrivals[20]), rel=0.15 + slack)
