"""Claims about ``core.slots``: who gets which slot."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.core.sessions import Session
from polykv_proxy.core.slots import Ask, Content, Placement, SlotBoard
from polykv_proxy.core.types import (
    EngineSample,
    LeaseId,
    PoolId,
    PoolUid,
    Scope,
    SessionId,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)

SCOPE = Scope("s")


def session(name="a", scope=SCOPE):
    """A session that is resident nowhere."""
    return Session(SessionId(name), name, scope, started_ts=0.0)


def ask(*chain, name="a", scope=SCOPE, **options):
    """An ask with this chain."""
    return Ask(scope=scope, name=name, chain=chain, **options)


def run(board, wanted, owner=None, *, now=1.0, content=Content.NEW):
    """Place, take and free; returns the placement."""
    placement = board.place(wanted)
    board.take(placement, LeaseId(1), owner, wanted)
    for index, number in enumerate(placement.slots):
        board.free(number, now, content if index == 0 else Content.NOTHING)
    return placement


def test_a_conversation_returns_to_its_slot():
    """The slot that holds the longest common chain continues it, whatever was used last."""
    board = SlotBoard(3)
    mine = session()
    assert run(board, ask(1, 2), mine) == Placement((0,), continues=False)
    run(board, ask(1, 9, name="b"), session("b"))
    assert board.place(ask(1, 2, 3, 4)) == Placement((0,), continues=True)
    assert mine.slot == 0


def test_an_empty_slot_comes_before_anothers():
    """A new conversation displaces nobody while a slot holds nothing; then the oldest goes."""
    board = SlotBoard(2)
    one, two = session("a"), session("b")
    run(board, ask(1, 2), one, now=1.0)
    assert run(board, ask(5, 6, name="b"), two, now=2.0).slots == (1,)
    assert run(board, ask(7, 8, name="c"), session("c"), now=3.0).slots == (0,)
    assert (one.slot, two.slot) == (None, 1)


def test_a_busy_slot_is_not_given_away():
    """A conversation whose slot runs gets another one and does not continue."""
    board = SlotBoard(2)
    board.take(board.place(ask(1, 2)), LeaseId(1), session(), ask(1, 2))
    assert board.place(ask(1, 2, 3)) == Placement((1,), continues=False)
    assert board.idle_count == 1
    board.take(Placement((SlotId(1),), continues=False), LeaseId(2), None, ask())
    assert board.place(ask(1, 2, 3)) is None
    assert [slot.idle for slot in board] == [False, False]


def test_the_system_prompt_alone_is_no_conversation():
    """One common link does not make a request the continuation of another one."""
    board = SlotBoard(2)
    run(board, ask(1, 2, 3), session())
    assert board.place(ask(1, 9)).continues is False


@pytest.mark.parametrize(
    ("held", "asked", "structured", "continues"),
    [
        ((1, 2, 3), (1, 2, 3, 4), True, True),
        ((1, 2, 3, 4), (1, 2, 9), True, True),  # an edited history
        ((1, 2, 3, 4, 5), (1, 2, 9), True, False),  # little in common
        ((1, 2, 3, 4), (1, 2, 9), False, False),  # plain text has no messages
        ((1, 2, 3), (1, 2, 3, 4), False, True),
        ((1,), (1, 2), False, False),
    ],
)
def test_how_much_in_common_makes_a_continuation(held, asked, structured, continues):
    """Everything that is held, or at least two links and half of it where links are messages."""
    board = SlotBoard(2)
    run(board, ask(*held), session())
    assert board.place(ask(*asked, structured=structured)).continues is continues


@pytest.mark.parametrize("other", [ask(1, 2, 3, scope=Scope("t")), ask(1, 2, 3, name="b"), ask()])
def test_content_is_compared_within_key_and_name(other):
    """Another key, another name and work without a conversation never continue what a slot holds."""
    board = SlotBoard(1)
    run(board, ask(1, 2), session())
    assert board.place(other).continues is False


def test_several_completions_hold_several_slots():
    """The first is pinned, the rest are the lowest idle ones; more than there are is all."""
    board = SlotBoard(3)
    mine = session()
    run(board, ask(9, 9, name="b"), session("b"))
    run(board, ask(1, 2), mine)
    assert board.place(ask(1, 2, 3, slots=2)).slots == (1, 0)
    assert board.place(ask(slots=99)).slots == (2, 0, 1)
    board.take(Placement((SlotId(2),), continues=False), LeaseId(1), None, ask())
    assert board.place(ask(slots=3)) is None


def test_work_that_the_engine_spreads_waits_for_all_slots():
    """Exclusive takes every slot or none."""
    board = SlotBoard(2)
    assert board.place(ask(exclusive=True)).slots == (0, 1)
    board.take(Placement((SlotId(1),), continues=False), LeaseId(1), None, ask())
    assert board.place(ask(exclusive=True)) is None


def test_one_certain_slot_or_none():
    """``only`` takes no other slot, and a number that does not exist is never placed."""
    board = SlotBoard(2)
    assert board.place(ask(only=SlotId(1))) == Placement((1,), continues=False)
    board.take(board.place(ask(only=SlotId(1))), LeaseId(1), None, ask())
    assert board.place(ask(only=SlotId(1))) is None
    assert board.place(ask(only=SlotId(7))) is None


def test_a_refused_request_displaces_nobody():
    """When the engine touched nothing, the slot is its former conversation's again."""
    board = SlotBoard(1)
    mine = session()
    run(board, ask(1, 2), mine)
    run(board, ask(5, 6, name="b"), session("b"), content=Content.OLD)
    assert mine.slot == 0
    assert board.place(ask(1, 2, 3)).continues is True


def test_a_conversation_that_moved_on_is_not_moved_back():
    """The session is where it went meanwhile, and what the slot held is of use to nobody."""
    board = SlotBoard(2)
    mine = session()
    run(board, ask(1, 2), mine)
    board.take(Placement((SlotId(0),), continues=False), LeaseId(1), None, ask(5))
    board.take(Placement((SlotId(1),), continues=False), LeaseId(2), mine, ask(1, 2, 3))
    board.free(SlotId(0), 2.0, Content.OLD)
    assert (mine.slot, board.slots[0].session, board.slots[0].chain) == (1, None, ())


def test_nothing_of_use_makes_the_slot_empty():
    """The session is no longer resident and the slot is given away first."""
    board = SlotBoard(2)
    mine = session()
    run(board, ask(1, 2), mine, content=Content.NOTHING)
    assert mine.slot is None
    run(board, ask(5, 6, name="b"), session("b"), now=0.5)
    assert board.place(ask(7, name="c")).slots == (0,)


def test_forgetting_leaves_a_session_alone_that_lives_elsewhere():
    """Only a session whose state is in that slot loses it."""
    board = SlotBoard(1)
    mine = session()
    run(board, ask(1, 2), mine)
    mine.slot = SlotId(5)
    board.forget(SlotId(0))
    assert mine.slot == 5
    assert board.slots[0].session is None


def test_the_closest_conversation_is_the_one_with_most_tokens_in_common():
    """Of the same key, in another slot, at work or not; a slot whose tokens are not known is none."""
    board = SlotBoard(5)
    prompts = {"a": [1, 2, 3], "b": [1, 2, 9], "c": [1, 2, 3, 4], "other": [1, 2, 3, 4, 5], "silent": None}
    for name, tokens in prompts.items():
        owner = session(name, Scope("t") if name == "other" else SCOPE)
        wanted = ask(ord(name[0]), 2, name=name, scope=owner.scope)
        placement = board.place(wanted)
        board.take(placement, LeaseId(1), owner, wanted)
        board.slots[placement.slots[0]].tokens = None if tokens is None else as_tokens(tokens)
    prompt = as_tokens([1, 2, 3, 4, 5])
    assert board.closest(prompt, SCOPE, other_than=SlotId(4)) == (board.slots[2], 4)
    assert board.closest(prompt, SCOPE, other_than=SlotId(2)) == (board.slots[0], 3)
    assert board.closest(as_tokens([7]), SCOPE, other_than=SlotId(4)) is None
    board.free(SlotId(2), 2.0, Content.NEW)
    assert board.closest(prompt, SCOPE, other_than=SlotId(4)) == (board.slots[2], 4)
    board.slots[0].session = None
    assert board.closest(prompt, SCOPE, other_than=SlotId(2)) == (board.slots[1], 2)


def test_a_session_knows_whether_its_slot_was_taken():
    """By another conversation, or the engine's own work; an operator's action on that slot is neither."""
    board = SlotBoard(1)
    mine, other = session(), session("b")
    run(board, ask(1, 2), mine)
    assert mine.taken is False
    run(board, ask(5, 6, name="b"), other)
    assert (mine.slot, mine.taken) == (None, True)
    run(board, ask(1, 2, 3), mine)
    assert (mine.taken, other.taken) == (False, True)
    run(board, ask(only=SlotId(0)), content=Content.NOTHING)
    assert (mine.slot, mine.taken) == (None, False)


def test_a_session_that_gets_its_slot_back_was_not_robbed():
    """The request that displaced it never began."""
    board = SlotBoard(1)
    mine = session()
    run(board, ask(1, 2), mine)
    run(board, ask(5, 6, name="b"), session("b"), content=Content.OLD)
    assert (mine.slot, mine.taken) == (0, False)


# -- slots that are kept, and slots that the engine chose -------------------------------------------------


def begun(board, wanted, owner, lease=1):
    """A request that has its slot; returns which."""
    placement = board.place(wanted)
    board.take(placement, LeaseId(lease), owner, wanted)
    return placement.slots[0]


def test_a_held_slot_is_nobodys_and_stays_as_it_is():
    """Its conversation is resident all the while, and comes back to it."""
    board = SlotBoard(1)
    mine = session()
    run(board, ask(1, 2), mine)
    board.slots[0].tokens = as_tokens([1])
    assert board.hold(SlotId(0), LeaseId(9))
    assert not board.hold(SlotId(0), LeaseId(10))
    assert board.place(ask(1, 2, 3)) is None
    board.let_go(SlotId(0))
    assert (mine.slot, board.slots[0].tokens) == (0, as_tokens([1]))
    assert board.place(ask(1, 2, 3)) == Placement((0,), continues=True)


def test_a_slot_that_is_let_go_is_as_old_as_before():
    """The one unused for the longest time is still given away first."""
    board = SlotBoard(2)
    run(board, ask(1, 2), session("a"), now=1.0)
    run(board, ask(5, 6, name="b"), session("b"), now=2.0)
    board.hold(SlotId(0), LeaseId(9))
    board.let_go(SlotId(0))
    assert board.place(ask(7, 8, name="c")).slots == (0,)


def test_the_oldest_is_one_that_holds_something():
    """Empty ones, and those at work, do not count."""
    board = SlotBoard(3)
    assert board.oldest() is None
    run(board, ask(1, 2), session("a"), now=1.0)
    run(board, ask(5, 6, name="b"), session("b"), now=2.0)
    assert board.oldest() == 0
    begun(board, ask(1, 2, 3), session("a"))
    assert board.oldest() == 1


def test_an_empty_slot_that_is_let_go_is_empty():
    """It comes before those that hold something."""
    board = SlotBoard(2)
    run(board, ask(1, 2), session())
    board.hold(SlotId(1), LeaseId(9))
    board.let_go(SlotId(1))
    assert board.place(ask(7, 8, name="c")).slots == (1,)


def test_a_request_that_ran_elsewhere_moves_there():
    """The slot that it was given is free again, and holds what it held."""
    board = SlotBoard(2)
    old, mine = session("old"), session("me")
    run(board, ask(1, 2, name="old"), old)
    run(board, ask(3, 4, name="x"), session("x"), now=2.0)
    source = begun(board, ask(7, 8, name="me"), mine)
    assert (source, old.slot) == (0, None)
    assert board.move(source, SlotId(1), 3.0) is None
    assert (mine.slot, old.slot) == (1, 0)
    assert [slot.lease for slot in board] == [None, 1]
    board.free(SlotId(1), 4.0, Content.NEW)
    assert board.place(ask(7, 8, 9, name="me")) == Placement((1,), continues=True)
    assert board.place(ask(1, 2, 3, name="old")) == Placement((0,), continues=True)
    assert board.idle_count == 2


def test_whoever_was_there_is_not_resident_any_more():
    """The engine wrote over it."""
    board = SlotBoard(2)
    other = session("other")
    run(board, ask(5, 6, name="other"), other)
    source = begun(board, ask(7, 8, name="me"), session("me"))
    assert source == 1
    board.move(source, SlotId(0), 3.0)
    assert (other.slot, other.taken) == (None, True)
    assert board.idle_count == 1


def test_a_conversation_that_ran_elsewhere_left_its_slot():
    """What the old slot holds of it is of no use."""
    board = SlotBoard(2)
    mine = session()
    run(board, ask(1, 2), mine)
    source = begun(board, ask(1, 2, 3), mine)
    board.move(source, SlotId(1), 3.0)
    assert mine.slot == 1
    board.free(SlotId(1), 4.0, Content.NEW)
    assert board.place(ask(9, 9, name="x")).slots == (0,)


def test_one_that_waits_to_be_sent_gets_the_other_slot():
    """They change places."""
    board = SlotBoard(2)
    mine, waiting = session("me"), session("waiting")
    source = begun(board, ask(1, 2, name="me"), mine, lease=1)
    target = begun(board, ask(3, 4, name="waiting"), waiting, lease=2)
    assert board.move(source, target, 3.0) == 2
    assert (mine.slot, waiting.slot) == (target, source)
    assert [slot.lease for slot in board] == [2, 1]
    for number in (source, target):
        board.free(number, 4.0, Content.NEW)
    assert board.place(ask(3, 4, 5, name="waiting")) == Placement((source,), continues=True)


def test_a_move_into_a_held_slot_leaves_its_former_session_where_that_runs_now():
    """What the held slot keeps is an old copy; its session began again somewhere else."""
    board = SlotBoard(3)
    me, other = session("me"), session("other")
    first = begun(board, ask(1, 2, name="me"), me, lease=1)
    board.free(first, 1.0, Content.NEW)
    assert board.hold(first, LeaseId(2))
    source = begun(board, ask(3, 4, name="other"), other, lease=3)
    now_in = begun(board, ask(1, 2, 5, name="me"), me, lease=4)
    assert len({first, source, now_in}) == 3
    assert board.move(source, first, 2.0) == 2
    assert (me.slot, other.slot) == (now_in, first)
    board.forget(source)
    assert me.slot == now_in


def test_what_a_client_left_is_kept_for_its_retry():
    """Others that were used later go first while it is kept, and it goes when nothing else is left."""
    board = SlotBoard(3)
    for number, name in enumerate("abc"):
        placement = board.place(ask(number, 9, name=name))
        board.take(placement, LeaseId(1 + number), session(name), ask(number, 9, name=name))
    board.free(SlotId(0), 1.0, Content.NEW, keep_s=30.0)
    board.free(SlotId(1), 5.0, Content.NEW)
    board.free(SlotId(2), 8.0, Content.NEW)
    board.hold(SlotId(1), LeaseId(9))
    board.let_go(SlotId(1))
    assert list(board._held) == [1, 2, 0]
    assert board.place(ask(0, 9, name="a")) == Placement((0,), continues=True)
    for number, name in enumerate("de"):
        assert begun(board, ask(7, number, name=name), session(name), lease=11 + number) == 1 + number
    assert begun(board, ask(7, 8, name="f"), session("f"), lease=13) == 0


def test_what_was_used_after_it_was_kept_goes_later():
    """The time for a retry is over: it is as old as that."""
    board = SlotBoard(2)
    begun(board, ask(1, 9), session("a"), lease=1)
    begun(board, ask(2, 9, name="b"), session("b"), lease=2)
    board.free(SlotId(0), 1.0, Content.NEW, keep_s=30.0)
    board.free(SlotId(1), 40.0, Content.NEW)
    assert board.oldest() == 0


def check_books(board):
    """Each slot is in one place, the index knows what each holds, and sessions are where they think."""
    used = [board.slots[number].last_used for number in board._held]
    assert used == sorted(used)
    for slot in board:
        places = (slot.slot in board._empty, slot.slot in board._held, slot.lease is not None)
        assert sum(places) == 1
        assert (slot.slot in board._held) <= bool(slot.chain)
        if slot.session is not None:
            for link in slot.chain:
                assert slot.slot in board._links[slot.session.scope, slot.session.name, link]
    links = [(key, number) for key, holders in board._links.items() for number in holders]
    for (_, name, link), number in links:
        assert board.slots[number].session.name == name
        assert link in board.slots[number].chain


def move(board, running, held, lease, target, now):
    """The engine put a request elsewhere; the books of who runs where follow."""
    source = running[lease]
    if target == source:
        return
    displaced = board.move(source, target, now)
    running[lease] = target
    for book in (running, held):
        if displaced in book:
            book[displaced] = source
    if displaced in held:
        board.forget(source)


@settings(max_examples=200)
@given(st.data())
def test_the_books_agree_whatever_happens(data):
    """Requests come and go, slots are kept, and the engine chooses others than it was told."""
    board = SlotBoard(3)
    sessions = [session(f"s{number}") for number in range(4)]
    running, held, leases = {}, {}, iter(range(1, 1000))
    for _ in range(data.draw(st.integers(1, 30))):
        now = float(next(leases))
        match data.draw(st.sampled_from(["begin", "end", "hold", "let_go", "move"])):
            case "begin":
                owner = data.draw(st.sampled_from(sessions))
                if owner.slot in running.values():
                    continue
                wanted = ask(1, int(owner.name[1:]) + 10, 99, name=owner.name)
                placement = board.place(wanted)
                if placement is not None:
                    lease = LeaseId(next(leases))
                    board.take(placement, lease, owner, wanted)
                    running[lease] = placement.slots[0]
            case "end" if running:
                lease = data.draw(st.sampled_from(sorted(running)))
                kept = data.draw(st.sampled_from([0.0, 3.0, 10.0]))
                board.free(running.pop(lease), now, data.draw(st.sampled_from(list(Content))), keep_s=kept)
            case "hold":
                number, lease = SlotId(data.draw(st.integers(0, 2))), LeaseId(next(leases))
                free = number not in running.values() and number not in held.values()
                assert board.hold(number, lease) is free
                if free:
                    held[lease] = number
            case "let_go" if held:
                board.let_go(held.pop(data.draw(st.sampled_from(sorted(held)))))
            case "move" if running:
                lease = data.draw(st.sampled_from(sorted(running)))
                move(board, running, held, lease, SlotId(data.draw(st.integers(0, 2))), now)
        check_books(board)
        for slot in board:
            owner = slot.lease in running and slot.session
            assert not owner or owner.slot == slot.slot
    assert board.idle_count == 3 - len(running) - len(held)


def seen(number, *, tokens=0, tag=1, state=SlotState.IDLE):
    """A slot as the engine reports it."""
    return SlotSample(SlotId(number), state, 1, tag, 0, 0, 0, tokens, 0, PoolUid(0), 100)


def reading(*slots):
    """Counters."""
    return EngineSample("e1", 0.0, 0, 1000, 0, slots, ())


def test_a_conversation_that_the_engine_gave_up_is_noticed():
    """An empty, idle slot whose last task is the one that left the conversation there, or a later one."""
    board, mine = SlotBoard(2), session()
    board.take(board.place(ask(1, 2)), LeaseId(5), mine, ask(1, 2))
    assert board.lost(reading(seen(0, tag=5))) == []  # it runs
    board.free(SlotId(0), 1.0, Content.NEW)
    for one in (
        seen(0, tag=4),  # from before its end
        seen(0, tokens=9, tag=5),
        seen(0, tag=5, state=SlotState.PROMPT),
        seen(1, tag=5),
    ):
        assert board.lost(reading(one)) == []
    gone = [board.slots[0]]
    assert board.lost(reading(seen(0, tag=5), seen(1))) == gone
    other = ask(7, 8, name="b")
    board.take(Placement((SlotId(0),), continues=False), LeaseId(6), session("b"), other)
    board.free(SlotId(0), 2.0, Content.OLD)  # refused: what was there before is still there
    assert board.lost(reading(seen(0, tokens=9, tag=6))) == []
    assert board.lost(reading(seen(0, tag=6))) == gone
    mine.moves_to = PoolId("p")
    assert board.lost(reading(seen(0, tag=6))) == []  # emptied on purpose
    mine.moves_to = None
    board.hold(SlotId(0), LeaseId(7))
    assert board.lost(reading(seen(0, tag=6))) == []


def test_a_conversation_that_somebody_elses_task_displaced_is_noticed():
    """Once the engine was seen to be done with the own one: a task without a tag came after it."""
    board, mine = SlotBoard(1), session()
    board.take(board.place(ask(1, 2)), LeaseId(5), mine, ask(1, 2))
    board.free(SlotId(0), 1.0, Content.NEW)
    foreign = seen(0, tokens=9, tag=0)
    assert board.lost(reading(foreign)) == []  # from before
    assert board.lost(reading(seen(0, tokens=9, tag=5))) == []
    assert board.lost(reading(foreign)) == [board.slots[0]]
    again = ask(1, 2, 3)
    board.take(board.place(again), LeaseId(6), mine, again)
    board.free(SlotId(0), 2.0, Content.NEW)
    assert board.lost(reading(foreign)) == []
