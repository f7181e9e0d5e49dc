"""Claims about ``core.waiting``: who waits, and whose turn it is."""

from types import SimpleNamespace

from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import Scope
from polykv_proxy.core.waiting import Waiting, WaitingRoom

SCOPE = Scope("s")


def waits(room, name=None, session=None):
    """One that came."""
    one = Waiting(Ask(scope=SCOPE, name=name), session, since_ts=1.0, request_id=f"req-{name}")
    room.come(one)
    return one


def test_it_waits_until_it_goes():
    """Going twice, or never having come, changes nothing; it may come again."""
    room = WaitingRoom()
    first, second = waits(room, "a"), waits(room, "b")
    assert list(room) == [first, second]
    for _ in range(2):
        room.go(first)
    room.go(None)
    assert list(room) == [second]
    room.come(first)
    assert list(room) == [second, first]


def test_who_was_given_slots_waits_no_more():
    """Though it does not know that yet; one that starts over has no ticket any more."""
    room = WaitingRoom()
    one = waits(room)
    one.ticket = SimpleNamespace(lease=None)
    assert list(room) == [one]
    one.ticket.lease = "lease"
    assert list(room) == []
    room.come(one)
    assert list(room) == [one]


def test_a_turn_of_a_session_is_no_new_one():
    """Unless it runs, waits already or was forgotten: then nobody knows what will become of the request."""
    room, book = WaitingRoom(), SessionBook()
    idle, busy, gone = (book.begin(SCOPE, name, 0.0) for name in ("idle", "busy", "gone"))
    busy.running = True
    book.end(gone)
    waits(room, "idle", idle)
    others = [waits(room, each.name, each) for each in (idle, busy, gone)]
    new = waits(room, "new")
    assert room.told(book.holds) == ({idle: "req-idle"}, [*others, new])
