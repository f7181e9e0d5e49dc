"""Procedures, driven by hand: no server, no clock."""

import pytest

from client.playing import play
from polykv_proxy.client import errors, procedures
from polykv_proxy.client.procedures import SUMMARISE, History, Pause
from polykv_proxy.client.results import Capacity, Chat, Migrated, Pool

SYSTEM = {"role": "system", "content": "You help."}
TOOL = {"type": "function", "function": {"name": "f"}}
PAST = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
TAIL = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
HISTORY = History(system=[SYSTEM], past=PAST, tail=TAIL, tools=[TOOL])
ASKED = {"role": "user", "content": SUMMARISE}
TOLD = {"role": "assistant", "content": "short"}


def test_room_is_waited_for_at_the_pace_of_the_proxy():
    """Asked, told to wait, asked again."""
    full = Capacity(can_admit=False, retry_after_s=3)
    room = Capacity(can_admit=True, headroom_sessions=4)
    steps, found = play(procedures.wait_for_capacity("p", sessions=2, max_wait_s=10.0), full, None, room)
    assert found is room
    assert steps[1] == Pause(3.0)
    assert steps[0].path == steps[2].path == "/polykv/pools/p/capacity"


def test_room_for_one_is_none_for_two():
    """Headroom counts, not only the next session."""
    with pytest.raises(errors.PoolSaturatedError) as caught:
        play(
            procedures.wait_for_capacity(sessions=2, max_wait_s=0.5),
            Capacity(can_admit=True, headroom_sessions=1),
        )
    assert (caught.value.headroom_sessions, caught.value.retry_after) == (1, 1.0)


def test_a_compaction_is_summary_fork_and_migration():
    """CTX-6: in place, then from the ancestor, then the session moves."""
    chat = Chat.read({"choices": [{"message": {"content": " short \n"}}]})
    pool = Pool(pool_id="child", prefix_len=50)
    moved = Migrated(session_id="s", pool_id="child", cells_freed=300)
    steps, done = play(
        procedures.compact_by_refork("root", HISTORY, session_id="s", chat_members={"model": "m"}, label="b"),
        chat,
        pool,
        moved,
    )
    summarise, fork, migrate = steps
    assert summarise.body["messages"] == [SYSTEM, *PAST, *TAIL, ASKED]
    assert (summarise.body["tools"], summarise.body["tool_choice"]) == ([TOOL], "none")
    assert summarise.body["opencoti"] == {"session_id": "s"}
    assert summarise.body["model"] == "m"
    assert fork.path == "/polykv/pools/root/fork"
    assert fork.body == {"messages": [SYSTEM, ASKED, TOLD, *TAIL], "tools": [TOOL], "label": "b"}
    assert (migrate.path, migrate.body) == ("/polykv/sessions/s/migrate", {"pool_id": "child"})
    assert done.messages == (ASKED, TOLD, *TAIL)
    assert (done.pool, done.summary, done.migrated, done.cells_freed) == (pool, "short", True, 300)


def test_a_question_that_is_not_answered_yet_is_not_summarised():
    """Two turns of the user in a row are an error in some templates."""
    pending = History(system=[SYSTEM], past=PAST, tail=[{"role": "user", "content": "3"}])
    steps, done = play(
        procedures.compact_by_refork("root", pending),
        Chat.read({"choices": [{"message": {"content": "short"}}]}),
        Pool(pool_id="child", prefix_len=50),
    )
    assert steps[0].body["messages"] == [SYSTEM, *PAST, ASKED]
    assert (done.migrated, done.messages[-1]) == (False, {"role": "user", "content": "3"})


def test_an_ancestor_that_is_gone_is_made_again():
    """By its content, which has the same id."""
    steps, done = play(
        procedures.compact_by_refork("root", HISTORY, summary="short"),
        errors.PoolNotFoundError("gone"),
        Pool(pool_id="root", prefix_len=40),
        Pool(pool_id="child", prefix_len=50),
    )
    assert [step.path for step in steps] == [
        "/polykv/pools/root/fork",
        "/polykv/pools",
        "/polykv/pools/root/fork",
    ]
    assert steps[1].body == {"messages": [SYSTEM], "tools": [TOOL]}
    assert done.pool.pool_id == "child"


def test_a_session_that_is_not_known_need_not_move():
    """Its next request begins on the new branch anyway."""
    _, done = play(
        procedures.compact_by_refork("root", HISTORY, summary="short", session_id="s"),
        Pool(pool_id="child", prefix_len=50),
        errors.NotFoundError("never came"),
    )
    assert (done.migrated, done.cells_freed) == (False, 0)


@pytest.mark.parametrize("created", [True, False])
def test_a_session_that_cannot_move_undoes_the_fork(created):
    """All or nothing; a branch that was there before stays."""
    procedure = procedures.compact_by_refork("root", HISTORY, summary="short", session_id="s")
    next(procedure)
    procedure.send(Pool(pool_id="child", prefix_len=50, created=created))
    running = errors.ConflictError("runs", error={"code": "session_running"})
    if created:
        undo = procedure.throw(running)
        assert (undo.method, undo.path) == ("DELETE", "/polykv/pools/child")
        with pytest.raises(errors.ConflictError):
            procedure.send(None)
    else:
        with pytest.raises(errors.ConflictError):
            procedure.throw(running)


def test_a_session_whose_slot_is_busy_is_asked_to_move_again():
    """A moment later it can, and the branch that was computed for it is not given up."""
    busy = errors.ConflictError("wanted by others", error={"code": "slot_busy"})
    steps, done = play(
        procedures.compact_by_refork("root", HISTORY, summary="short", session_id="s"),
        Pool(pool_id="child", prefix_len=50, created=True),
        busy,
        None,
        busy,
        None,
        Migrated(session_id="s", pool_id="child", cells_freed=300),
    )
    assert [step.path for step in steps if not isinstance(step, Pause)][1:] == [
        "/polykv/sessions/s/migrate"
    ] * 3
    assert [step for step in steps if isinstance(step, Pause)] == [Pause(1.0), Pause(2.0)]
    assert (done.migrated, done.cells_freed) == (True, 300)


def test_a_slot_that_stays_busy_is_not_waited_for_for_ever():
    """Then nothing has changed."""
    busy = errors.ConflictError("wanted by others", error={"code": "slot_busy"})
    procedure = procedures.compact_by_refork("root", HISTORY, summary="short", session_id="s")
    next(procedure)
    step, pauses = procedure.send(Pool(pool_id="child", prefix_len=50, created=True)), 0
    while step.method != "DELETE":
        step = procedure.throw(busy)
        if isinstance(step, Pause):
            pauses += 1
            step = procedure.send(None)
    assert pauses == len(procedures.BUSY_PAUSES_S)
    with pytest.raises(errors.ConflictError):
        procedure.send(None)
