"""Claims about ``core.sessions``: names, ids, and what is remembered for how long."""

import pytest

from polykv_proxy.core import sessions
from polykv_proxy.core.sessions import EXPIRY_S, SESSION_IDLE_S, SessionBook
from polykv_proxy.core.types import Scope, SlotId
from polykv_proxy.errors import AmbiguousSessionError, ConflictError, NotFoundError

ONE, OTHER = Scope("one"), Scope("other")


def begin(book, name=None, scope=ONE, now=0.0, *, running=False):
    """A session that was used at ``now``."""
    session = book.begin(scope, name, now_ts=now)
    book.touch(session, now)
    session.running = running
    return session


def test_sessions_without_a_name_are_numbered():
    """Each is one of its own, and clients cannot squat on the numbers."""
    book = SessionBook()
    begin(book, "auto-2")
    ids = [begin(book).session_id for _ in range(3)]
    assert ids == ["auto-1", "auto-2#2", "auto-3"]


def test_a_name_is_a_namespace_within_its_scope():
    """Further conversations under a name get ids of their own; those of another key are as if alone."""
    book = SessionBook()
    mine, again, foreign = begin(book, "a"), begin(book, "a"), begin(book, "a", OTHER)
    assert [each.session_id for each in (mine, again, foreign)] == ["a", "a#2", "a"]
    assert book.get("a", ONE) is mine
    assert book.get("a", OTHER) is foreign
    assert book.get("a#2", OTHER) is None
    assert list(book) == [mine, again, foreign]
    assert len({each.key for each in book}) == 3


def test_what_is_done_to_one_of_two_of_an_id_leaves_the_other():
    """Using it, forgetting it, ending it."""
    book = SessionBook()
    mine, foreign = begin(book, "a"), begin(book, "a", OTHER)
    book.note(mine, 1.0)
    assert list(book) == [foreign, mine]
    book.end(mine)
    assert book.get("a", ONE) is None
    assert book.holds(foreign)
    again = begin(book, "a", now=SESSION_IDLE_S)
    book.expire(SESSION_IDLE_S + 1.0)
    assert list(book) == [again]
    assert again.session_id == "a"


def test_an_administrator_says_whose_session_is_meant():
    """Where several keys have one of that id; it is told which."""
    book = SessionBook()
    mine = begin(book, "a")
    assert book.seen("a", None) == [mine]
    foreign = begin(book, "a", OTHER)
    assert book.seen("a", None) == [mine, foreign]
    assert book.seen("a", OTHER) == [foreign]
    for ask in (book.need, book.idle):
        with pytest.raises(AmbiguousSessionError) as caught:
            ask("a", None)
        assert (caught.value.status, caught.value.code) == (409, "session_ambiguous")
        assert caught.value.details == {"scopes": [ONE, OTHER]}
    assert book.need("a", OTHER) is foreign


def test_only_the_latest_idle_namesake_goes_on():
    """One that runs or is resident does not, nor one of another scope."""
    book = SessionBook()
    assert book.idle_namesake(ONE, None) is None
    assert book.idle_namesake(ONE, "a") is None
    older, latest = begin(book, "a", now=1.0), begin(book, "a", now=2.0)
    assert book.idle_namesake(ONE, "a") is latest
    assert book.idle_namesake(OTHER, "a") is None
    latest.running = True
    assert book.idle_namesake(ONE, "a") is None
    latest.running, latest.slot = False, SlotId(0)
    assert book.idle_namesake(ONE, "a") is None
    assert book.holds(older)


def test_out_of_use_and_held_by_no_slot_is_over():
    """One that runs or that a slot holds does not keep those behind it."""
    book = SessionBook()
    busy, held = begin(book, "busy", running=True), begin(book, "held")
    held.slot = SlotId(1)
    idle, late = begin(book, "idle"), begin(book, "late", now=SESSION_IDLE_S)
    assert book.expire(SESSION_IDLE_S + 1.0) == []
    assert list(book) == [busy, held, late]
    assert not book.holds(idle)
    assert book.idle_namesake(ONE, "idle") is None


def test_a_forgotten_namesake_leaves_the_others():
    """The list of a name shrinks by one."""
    book = SessionBook()
    begin(book, "a")
    fresh = begin(book, "a", now=SESSION_IDLE_S)
    book.expire(SESSION_IDLE_S + 1.0)
    assert book.idle_namesake(ONE, "a") is fresh


def test_looking_is_rare():
    """Between two looks nothing is walked through."""
    book = SessionBook()
    book.expire(1000.0)
    idle = begin(book, "idle", now=1000.0 - SESSION_IDLE_S)
    assert book.expire(1000.0 + EXPIRY_S / 2) == []
    assert book.holds(idle)
    book.expire(1000.0 + EXPIRY_S)
    assert not book.holds(idle)


@pytest.mark.parametrize("slot", [None, SlotId(3)])
def test_the_bound_holds_whatever_is_at_the_head(monkeypatch, slot):
    """Beyond it the oldest idle session goes at once; a slot that held it is reported."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    book = SessionBook()
    busy, oldest = begin(book, "busy", running=True), begin(book, "oldest")
    oldest.slot = slot
    book.expire(0.0)
    begin(book, "newest")
    assert book.expire(0.1) == ([oldest] if slot is not None else [])
    assert len(book) == 2
    assert book.holds(busy)


def test_a_session_is_found_by_those_who_may_see_it():
    """Its key, and an administrator; nobody else learns that it is there."""
    book = SessionBook()
    mine = begin(book, "a")
    assert book.need(mine.session_id, ONE) is book.need(mine.session_id, None) is mine
    for session_id, scope in (("a", OTHER), ("b", ONE), ("b", None)):
        with pytest.raises(NotFoundError) as caught:
            book.need(session_id, scope)
        assert caught.value.code == "session_not_found"


def test_what_cannot_be_done_to_a_session_that_runs_is_refused():
    """Until its request is over."""
    book = SessionBook()
    mine = begin(book, "a", running=True)
    with pytest.raises(ConflictError) as caught:
        book.idle(mine.session_id, ONE)
    assert caught.value.code == "session_running"
    mine.running = False
    assert book.idle(mine.session_id, ONE) is mine


def test_a_session_that_moved_is_the_latest_of_its_name():
    """Its next request finds it by that, wherever it comes to; what it held says nothing any more."""
    book = SessionBook()
    mine, other = begin(book, "a", now=1.0), begin(book, "a", now=2.0)
    mine.pool, mine.context_tokens = "pool", 90
    book.on_migrated(mine, 3.0)
    assert (mine.pool, mine.re_rooted, mine.context_tokens, mine.last_seen) == (None, True, None, 3.0)
    assert book.idle_namesake(ONE, "a") is mine
    book.end(mine)
    book.on_migrated(mine, 4.0)
    assert book.idle_namesake(ONE, "a") is other
