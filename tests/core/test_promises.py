"""Claims about ``core.promises``: a place is open until it ends, once."""

from dataclasses import replace

import pytest

from polykv_proxy.core import promises
from polykv_proxy.core.headroom import Arm, Picture, Reason
from polykv_proxy.core.ledger import CellLedger
from polykv_proxy.core.policies import Mode, Policy
from polykv_proxy.core.promises import MAX_TTL_S, Promises, Wish
from polykv_proxy.core.types import Scope

ONE, OTHER = Scope("one"), Scope("other")


def wish(*leases, key="k", scope=ONE, ttl_s=60.0, cells_each=0):
    """A wish for these places."""
    return Wish(leases=leases, scope=scope, key=key, ttl_s=ttl_s, cells_each=cells_each)


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


def test_who_waits_at_the_gate_comes_before_a_promise():
    """Where the floor would not be kept with both, that is what is said."""
    book, picture = Promises(), Picture(working=1, live=1.0, decoding=1, mean_tps=90.0)
    policy = Policy(target_tps_per_session=20.0, mode=Mode.ENFORCED)
    assert book.why_not(wish("a", "b"), picture, policy) is None
    refused = book.why_not(wish("a", "b"), replace(picture, at_gate=2), policy)
    assert (refused.arm, refused.reason) == (Arm.TPS, Reason.TPS_FLOOR)


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


def test_the_cells_of_a_place_are_set_aside_while_it_is_open():
    """Taken, or over: they are free again, once. A new load of the model has a ledger of its own."""
    ledger = CellLedger(1000, growth=0)
    book = Promises(ledger)
    book.add(wish("a", "b", ttl_s=10.0, cells_each=300), 0.0)
    assert ledger.figures().free == 400
    book.close("a", ONE)
    assert ledger.figures().free == 700
    book.expire(10.0)
    assert ledger.figures().free == 1000
    book.add(wish("c", cells_each=300), 20.0)
    book.ledger = CellLedger(1000, growth=0)
    book.close("c", ONE)
    assert book.ledger.figures().free == 1000


FLOOR = Policy(target_tps_per_session=20.0, mode=Mode.ENFORCED)
BUSY = Picture(
    working=3,
    live=3.0,
    decoding=3,
    mean_tps=100 / 3,
    cells=CellLedger(1000, growth=0).figures(),
    marginal_tokens=300.0,
)


@pytest.mark.parametrize(
    ("changes", "policy", "cells_each", "arm", "reason"),
    [
        ({}, Policy(), 501, Arm.CELLS, Reason.CELLS),
        ({"stale": True}, FLOOR, 0, Arm.TPS, Reason.STALE),
        ({"working": 4, "live": 4.0, "decoding": 4, "mean_tps": 25.0}, FLOOR, 0, Arm.TPS, Reason.TPS_FLOOR),
        ({"marginal_tokens": 501.0}, FLOOR, 0, Arm.CELLS, Reason.CELLS),
    ],
)
def test_what_speaks_against_a_promise(changes, policy, cells_each, arm, reason):
    """Cells that are not there under any policy; the rest under one that is enforced."""
    book, two = Promises(), wish("a", "b", cells_each=cells_each)
    assert book.why_not(replace(two, cells_each=0), BUSY, FLOOR) is None
    fails = book.why_not(two, replace(BUSY, **changes), policy)
    assert (fails.arm, fails.reason) == (arm, reason)
    if policy.enforced:
        assert book.why_not(two, replace(BUSY, **changes), Policy()) is None


def test_too_many_promises_speak_against_another(monkeypatch):
    """Whatever the policy."""
    monkeypatch.setattr(promises, "MAX_PLACES", 1)
    assert Promises().why_not(wish("a"), BUSY, Policy()) is None
    assert Promises().why_not(wish("a", "b"), BUSY, Policy()).reason is Reason.QUEUE_FULL
