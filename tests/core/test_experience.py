"""Claims about ``core.experience``: tokens go to whose they are, and context is what is left."""

from dataclasses import replace

import pytest

from polykv_proxy.core.decisions import Lease
from polykv_proxy.core.experience import (
    Context,
    Experience,
    compaction_pressure,
    context_of,
    fresh,
    headroom,
    pressure,
    reading_of,
)
from polykv_proxy.core.rates import STALE_S, Reading, SlotReading
from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.slots import SlotBoard
from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import (
    EngineFacts,
    EngineSample,
    LeaseId,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
)

FACTS = EngineFacts("e", slots=2, max_pools=2, cells=1000, ctx_tokens=400, bytes_per_cell=1, build="b")


def slot_sample(number=0, tag=0, generated=0, at=0.0, tokens=0, state=SlotState.GEN):
    """One slot's counters."""
    return SlotSample(SlotId(number), state, tag, tag, generated, 0, 0, tokens, 0, 0, 400, last_token_s=at)


def sample(*slots, clock=0.0, used=100):
    """An engine's counters."""
    return EngineSample("e", clock + 50.0, used, 1000, 0, slots, (), clock_s=clock)


@pytest.fixture
def session():
    """A session in slot 0, whose last request is lease 5."""
    session = SessionBook().begin(Scope("s"), "agent", now_ts=0.0)
    session.slot, session.lease = SlotId(0), LeaseId(5)
    return session


@pytest.fixture
def board(session):
    """Where it lives."""
    board = SlotBoard(2)
    board.slots[0].session = session
    return board


def test_tokens_of_its_own_request_are_a_sessions(session, board):
    """And those of the request that the slot ran before are not."""
    experience = Experience()
    for step in range(4):
        experience.on_sample(
            sample(slot_sample(tag=4, generated=20 * step, at=float(step)), clock=float(step)), board
        )
    assert session.rate.tps is None
    for step in range(4):
        reading = sample(slot_sample(tag=5, generated=60 + 30 * step, at=9.0 + step), clock=9.0 + step)
        experience.on_sample(reading, board)
    assert session.rate.tps == pytest.approx(30.0)
    assert experience.book.generated_total == 150
    experience.reset()
    assert experience.book.taken_at is None


def test_counters_as_a_reading():
    """With the engine's own clock where it tells it, else with the proxy's, by which no token came."""
    slot = SlotSample(SlotId(0), SlotState.GEN, 7, 3, 40, 100, 20, 150, 0, 0, 1024, last_token_s=8.5)
    told = EngineSample("e", 50.0, 1, 2, 0, (slot,), (), clock_s=9.0)
    assert reading_of(told) == Reading(50.0, 9.0, (SlotReading(SlotId(0), 7, 3, True, 40, 100, 20, 8.5),))
    untold = reading_of(replace(told, slots=(replace(slot, last_token_s=None),), clock_s=None))
    assert (untold.clock_s, untold.slots[0].last_token_at, untold.exact) == (50.0, 50.0, False)


def test_an_answer_tells_what_it_took(session, board):
    """In the slot that it is pinned to; without a session it is nobody's."""
    experience = Experience()
    lease = Lease(LeaseId(5), (SlotId(0),), session, continues=False, granted_at=0.0)
    experience.on_answer(lease, 41, 2.0, pinned=True)
    experience.on_answer(lease, 41, 2.0, pinned=True)
    assert session.rate.tps == pytest.approx(20.0)
    nobody = Lease(LeaseId(6), (SlotId(1),), None, continues=False, granted_at=0.0)
    experience.on_answer(nobody, 41, 1.0, pinned=True)
    experience.on_answer(Lease(LeaseId(7), (SlotId(1),), session, False, 0.0), 1, 0.5, pinned=True)
    assert session.rate.tps == pytest.approx(20.0), "one token is no interval"


def test_without_the_patch(session):
    """The only request is the only task's; an answer in an unknown slot still tells its own rate."""
    experience = Experience()
    lease = Lease(LeaseId(5), (SlotId(0),), session, continues=False, granted_at=0.5)

    def look(now, *slots):
        return experience.on_stock_slots(slots, [lease], now)

    look(0.0, SlotLook(slot=SlotId(0), working=False))
    for step in range(3):
        look(1.0 + step, SlotLook(slot=SlotId(0), working=True, task=3, generated=1 + 25 * step))
    assert session.rate.tps == pytest.approx(25.0)
    experience.on_answer(lease, 76, 3.0, pinned=False)
    assert session.rate.tps == pytest.approx(25.0)
    assert look(4.0, SlotLook(slot=SlotId(0), working=False, task=3)).generated == 25
    unknown = Lease(LeaseId(6), (SlotId(0),), session, continues=False, granted_at=5.0)
    experience.on_answer(unknown, 1001, 10.0, pinned=False)
    assert session.rate.tps == pytest.approx(100.0, rel=0.01)
    before = session.rate.tps
    experience.on_answer(unknown, 0, 10.0, pinned=False)
    assert session.rate.tps == before


def test_an_answer_that_does_not_say_how_long_it_took_counts_all_the_same(session):
    """It says nothing of a rate."""
    experience = Experience()
    idle = SlotLook(slot=SlotId(0), working=False)
    experience.on_stock_slots([idle], [], 0.0)
    lease = Lease(LeaseId(5), (SlotId(0),), session, continues=False, granted_at=0.5)
    experience.on_answer(lease, 9, None, pinned=False)
    assert experience.on_stock_slots([idle], [lease], 1.0).generated == 9
    assert (session.rate.warm, experience.book.generated_total) == (False, 9)
    experience.reset()
    experience.on_stock_slots([idle], [], 2.0)
    assert experience.book.generated_total == 9, "totals go on"


def test_what_an_answer_tells_of_a_stock_engine_has_no_gaps(session):
    """Tokens that came after the last look are counted; how long after one another nobody saw."""
    experience = Experience()
    lease = Lease(LeaseId(5), (SlotId(0),), session, continues=False, granted_at=0.5)

    def look(now, **shown):
        return experience.on_stock_slots([SlotLook(slot=SlotId(0), **shown)], [lease], now)

    look(0.0, working=False)
    look(1.0, working=True, task=3, generated=10)
    assert look(2.0, working=True, task=3, generated=35).gaps == ((25, pytest.approx(0.04)),)
    experience.on_answer(lease, 60, 3.0, pinned=False)
    progress = look(4.0, working=False, task=3)
    assert (progress.generated, progress.gaps) == (25, ())


def test_a_stock_engine_that_was_looked_at_late_is_believed_at_the_end(session):
    """It answers late when it is starved, and with it come the times of its tokens: 20 a second all along."""
    experience = Experience()
    lease = Lease(LeaseId(5), (SlotId(0),), session, continues=False, granted_at=0.1)
    for now, generated in ((0.0, 0), (1.0, 10), (3.9, 55)):
        look = SlotLook(
            slot=SlotId(0), working=generated > 0, task=3 if generated else -1, generated=generated
        )
        experience.on_stock_slots([look], [lease], now)
    assert session.rate.tps == pytest.approx(45 / 2.9)
    experience.on_answer(lease, 61, 3.0, pinned=False)
    assert 45 / 2.9 < session.rate.tps < 20.0


def test_context_is_of_the_sessions_own_request(session):
    """The window or the free cells, whichever is nearer; null while the slot shows somebody else's."""
    shown = sample(slot_sample(tag=5, tokens=150), used=100)
    assert context_of(session, shown, FACTS) == Context(150, 400, 250)
    assert context_of(session, sample(slot_sample(tag=5, tokens=150), used=900), FACTS).headroom == 100
    assert context_of(session, sample(slot_sample(tag=4, tokens=150)), FACTS) == Context(None, 400, None)
    session.slot = None
    assert context_of(session, shown, FACTS) == Context(None, 400, None)


def test_context_without_counters(session):
    """As of the last answer, if that told."""
    assert context_of(session, None, FACTS) == Context(None, 400, None)
    session.context_tokens = 390
    assert context_of(session, None, FACTS) == Context(390, 400, 10)
    assert context_of(session, None, None) == Context(390, None, None)


def test_a_context_is_unknown_after_a_new_root(session):
    """CTX-7: neither the last answer nor what a slot holds says how full it is."""
    session.context_tokens = 390
    seen = sample(slot_sample(tag=5, tokens=300), slot_sample(1))
    assert context_of(session, seen, FACTS).used == 300
    session.re_rooted = True
    assert context_of(session, seen, FACTS) == context_of(session, None, FACTS) == Context(None, 400, None)


def test_headroom_is_never_negative():
    """A conversation at its end has none left."""
    assert headroom(400, 400, None) == 0
    assert headroom(410, 400, sample(used=1000)) == 0
    assert headroom(None, 400, None) is headroom(4, None, None) is None


@pytest.mark.parametrize(
    ("used", "tokens", "use", "advisable"),
    [(0, 0, 0.0, 0.0), (700, 0, 0.7, 0.0), (850, 40, 0.85, 0.5), (100, 400, 1.0, 1.0), (1000, 0, 1.0, 1.0)],
)
def test_pressure_is_the_nearest_wall(used, tokens, use, advisable):
    """Cells, or the window of the largest session; advice starts at 0.7."""
    found = pressure(sample(slot_sample(tokens=tokens), slot_sample(1), used=used))
    assert found == pytest.approx(use)
    assert compaction_pressure(found) == pytest.approx(advisable)


def test_an_old_sample_says_nothing_about_now():
    """The engine may be gone."""
    known = sample(slot_sample())
    assert fresh(known, known.taken_at + STALE_S) is known
    assert fresh(known, known.taken_at + STALE_S + 0.1) is fresh(None, 0.0) is None


def test_pressure_of_an_unknown_engine():
    """Nobody knows."""
    assert pressure(None) is compaction_pressure(None) is None
