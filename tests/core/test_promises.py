"""Claims about ``core.promises``: a place is open until it ends, once."""

from polykv_proxy.core import promises
from polykv_proxy.core.promises import MAX_TTL_S, Promises, Wish
from polykv_proxy.core.types import Scope

ONE, OTHER = Scope("one"), Scope("other")


def wish(*leases, key="k", scope=ONE, ttl_s=60.0):
    """A wish for these places."""
    return Wish(leases=leases, scope=scope, key=key, ttl_s=ttl_s)


def test_a_place_is_taken_once_and_by_whose_it_is():
    """Another key's lease is an unknown one."""
    book = Promises()
    book.add(wish("a", "b"), 0.0)
    assert len(book) == 2
    assert not book.close("a", OTHER)
    assert book.close("a", ONE)
    assert not book.close("a", ONE)
    assert not book.close("unknown", ONE)
    assert len(book) == 1


def test_the_same_key_names_the_same_promise():
    """Within its scope, as long as its time runs."""
    book = Promises()
    promise = book.add(wish("a"), 0.0)
    assert book.find(wish("b")) is promise
    assert book.find(wish("b", scope=OTHER)) is None
    assert book.find(wish("b", key="other")) is None
    book.close("a", ONE)
    assert book.find(wish("b")) is promise
    book.expire(60.0)
    assert book.find(wish("b")) is None


def test_what_nobody_took_is_open_again_when_the_time_is_over():
    """And only that."""
    book = Promises()
    book.add(wish("a", "b", ttl_s=10.0), 0.0)
    book.add(wish("c", key="later", ttl_s=1e9), 0.0)
    book.close("b", ONE)
    assert book.expire(9.9) == []
    assert book.expire(10.0) == ["a"]
    assert not book.close("a", ONE)
    assert book.expire(MAX_TTL_S) == ["c"]
    assert len(book) == 0


def test_promises_are_bounded(monkeypatch):
    """In number and in places."""
    monkeypatch.setattr(promises, "MAX_PROMISES", 2)
    monkeypatch.setattr(promises, "MAX_PLACES", 5)
    book = Promises()
    book.add(wish("a", "b", "c"), 0.0)
    assert book.has_room(2)
    assert not book.has_room(3)
    book.add(wish("d", key="l"), 0.0)
    assert not book.has_room(1)
