"""Claims about ``core.past``: what is remembered of conversations, and what of it goes first."""

from array import array

import pytest

from polykv_proxy.core.outlines import Outline, Part, Section
from polykv_proxy.core.past import PART_BYTES, Past, PastBook
from polykv_proxy.core.sessions import Session
from polykv_proxy.core.types import Scope, SessionId, as_tokens

SCOPE = Scope("s")
SHORT = Outline((Part(section=Section.SYSTEM, digest=1, size_bytes=9),))


def session(name="a", scope=SCOPE):
    """A session."""
    return Session(SessionId(name or "auto"), name, scope, started_ts=0.0)


def past(*chain, owner=None, body=b"x" * 1000, tokens=None):
    """A conversation's last request."""
    return Past(
        session=owner or session(),
        dialect="llama",
        chain=array("Q", chain),
        epoch="e",
        body=body,
        tokens=tokens,
    )


def book(keep=10, budget=100_000):
    """An empty one."""
    return PastBook(keep, budget, lambda _past: SHORT)


def test_the_last_request_of_a_conversation_counts():
    """An earlier one is forgotten, chain and all."""
    kept, owner = book(), session()
    kept.keep(past(1, 2, owner=owner))
    later = past(1, 2, 3, 4, owner=owner)
    kept.keep(later)
    assert kept.of(owner) is later
    assert len(kept) == 1
    assert kept.continued_by(SCOPE, "a", (1, 2, 9)) is None
    assert kept.of(session()) is None


def test_a_request_finds_what_it_goes_on_with():
    """By the deepest link where a conversation ended; the first link is what many begin with."""
    kept = book()
    short, long = past(1, 2), past(1, 2, 3)
    alone = past(7)
    for each in (short, long, alone):
        kept.keep(each)
    assert kept.continued_by(SCOPE, "a", (1, 2, 3, 4)) is long
    assert kept.continued_by(SCOPE, "a", (1, 2, 9)) is short
    assert kept.continued_by(SCOPE, "a", (7, 8)) is None
    assert kept.continued_by(SCOPE, "b", (1, 2, 3)) is None
    assert kept.continued_by(Scope("t"), "a", (1, 2, 3)) is None
    assert kept.continued_by(SCOPE, "a", ()) is None


def test_namesakes_come_latest_first():
    """Of one scope and name only, and not too many."""
    kept = book()
    one, two, three = past(1), past(2), past(3)
    for each in (one, past(8, owner=session("b")), past(9, owner=session("a", Scope("t"))), two, three):
        kept.keep(each)
    assert list(kept.recent(SCOPE, "a", 2)) == [three, two]
    assert list(kept.recent(SCOPE, "a", 9)) == [three, two, one]
    assert list(kept.recent(SCOPE, None, 9)) == []


def test_beyond_the_number_the_oldest_goes():
    """Nothing of it is found any more; one whose end another one shares leaves that alone."""
    kept = book(keep=2)
    first, second, third = past(1, 2), past(1, 2), past(5, 6)
    for each in (first, second, third):
        kept.keep(each)
    assert kept.of(first.session) is None
    assert kept.continued_by(SCOPE, "a", (1, 2)) is second
    kept.keep(past(7, 8))
    assert kept.continued_by(SCOPE, "a", (1, 2)) is None
    assert len(kept) == 2
    assert len(list(kept.recent(SCOPE, "a", 9))) == 2


def test_beyond_the_budget_bodies_go_first():
    """The oldest one's; its outline stays, and its place."""
    kept = book(budget=2500)
    first, second, third = past(1, tokens=as_tokens(range(10))), past(2), past(3)
    for each in (first, second, third):
        kept.keep(each)
    assert (first.body, first.tokens, first.outline) == (None, None, SHORT)
    assert second.body is not None
    assert kept.size_bytes == sum(each.size_bytes for each in (first, second, third)) <= 2500
    assert kept.of(first.session) is first


def test_beyond_that_conversations_go():
    """What is left of the oldest is given up too; one that never fits is not kept at all."""
    kept = book(budget=PART_BYTES + 8)
    one, two = past(1), past(2)
    kept.keep(one)
    assert kept.of(one.session).body is None
    kept.keep(two)
    assert (kept.of(one.session), kept.of(two.session)) == (None, two)
    kept.keep(past(*range(100)))
    assert (len(kept), kept.size_bytes) == (0, 0)


@pytest.mark.parametrize("body", [None, b"abc"])
def test_what_a_conversation_takes(body):
    """Links, body and tokens."""
    kept = past(1, 2, body=body, tokens=as_tokens([1, 2, 3]))
    assert kept.size_bytes == 16 + len(body or b"") + 12
