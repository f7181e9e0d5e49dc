"""Claims about ``durable.savers``: found by the key, and only while the session is remembered."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.savers import MIN_NOTED, Savers

ME, YOU = Scope(""), Scope("you")


def test_keys_of_those_with_and_without_a_name():
    """Each key has its own, and unnamed ones are counted anew in each run."""
    book = SessionBook()
    savers = Savers(book, "r1")
    named, other, unnamed = book.begin(ME, "a", 0.0), book.begin(YOU, "a", 0.0), book.begin(ME, None, 0.0)
    assert [savers.key(each) for each in (named, other, unnamed)] == ["a", "a", "auto/r1/auto-1"]
    assert savers.of(ME, "a") == [named]
    assert savers.of(YOU, "a") == [other]
    assert savers.of(YOU, "a#2") == []
    assert savers.of(ME, "auto/r1/auto-1") == [unnamed]
    assert savers.of(ME, "auto/r2/auto-1") == savers.of(ME, "auto-1") == []


def test_who_goes_on_from_a_state_saves_under_its_key():
    """And no longer under its own; another scope's key of that name is another."""
    book = SessionBook()
    savers = Savers(book, "r1")
    one, two, third = book.begin(ME, None, 0.0), book.begin(YOU, None, 0.0), book.begin(ME, None, 0.0)
    for each in (one, one, two):
        savers.save_as(each, "auto/r0/auto-7")
    assert savers.of(ME, "auto/r0/auto-7") == [one]
    assert savers.of(YOU, "auto/r0/auto-7") == [two]
    assert savers.of(ME, "auto/r1/auto-1") == []
    assert savers.is_anothers(third, "auto/r0/auto-7")
    assert not savers.is_anothers(one, "auto/r0/auto-7")
    savers.save_as(third, "auto/r0/auto-7")
    assert savers.of(ME, "auto/r0/auto-7") == [one, third]
    book.end(one)
    assert savers.of(ME, "auto/r0/auto-7") == [third]


def test_what_is_noted_is_bounded_by_the_sessions():
    """Those that are over leave nothing behind."""
    book = SessionBook()
    savers = Savers(book, "r1")
    stays = book.begin(ME, None, 0.0)
    savers.save_as(stays, "stays")
    for number in range(3 * MIN_NOTED):
        gone = book.begin(ME, None, 0.0)
        savers.save_as(gone, f"k{number}")
        book.end(gone)
    assert len(savers._noted) <= MIN_NOTED
    assert savers.of(ME, "stays") == [stays]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b", "auto/r1/auto-2", "end"]))))
def test_they_are_those_that_looking_at_all_finds(steps):
    """After anything that happens to sessions."""
    book = SessionBook()
    savers = Savers(book, "r1")
    known = []
    for which, what in steps:
        if what == "" or which >= len(known):
            known.append(book.begin([ME, YOU][which % 2], [None, "a", "b"][which % 3], 0.0))
        elif what == "end":
            book.end(known[which])
        else:
            savers.save_as(known[which], what)
    for scope in (ME, YOU):
        for key in {savers.key(each) for each in known}:
            all_of_them = [each for each in book if each.scope == scope and savers.key(each) == key]
            assert set(map(id, savers.of(scope, key))) == set(map(id, all_of_them))
