"""Claims about ``api.sessions``: what clients see of conversations."""

from urllib.parse import quote

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy.api.identity import scope_of_keys

POOL = {"prompt": "x" * 40}


async def test_a_session_is_listed_until_it_is_closed(rig):
    """With what it freed; a second close finds nothing."""
    await rig.ask(CHAT, chat("hi", session_id="me"))
    (listed,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    used = listed["ctx_used"]
    closed = await rig.ask("/polykv/sessions/me/close", {})
    assert closed.json == {"session_id": "me", "closed": True, "cells_freed": used, "kept": False}
    assert (await rig.ask("/polykv/sessions")).json["sessions"] == []
    again = await rig.ask("/polykv/sessions/me/close", {})
    assert (again.status, again.error["code"]) == (404, "session_not_found")


@pytest.mark.parametrize("name", ["{}", "a{b}c", "a b", "ä/ö?#%"])
async def test_a_session_is_closed_whatever_its_name(rig, name):
    """A name may have any characters; in a path they are escaped."""
    await rig.ask(CHAT, chat("hi", session_id=name))
    closed = await rig.ask(f"/polykv/sessions/{quote(name, safe='')}/close", {})
    assert closed.json["session_id"] == name
    assert (await rig.ask("/polykv/sessions")).json["sessions"] == []


async def test_another_keys_session_does_not_exist(rig):
    """Neither to close nor to move."""
    await rig.ask(CHAT, chat("hi", session_id="me"), Authorization="Bearer mine")
    theirs = {"Authorization": "Bearer theirs"}
    made = await rig.pool(None, **theirs)
    for path, body in (("close", {}), ("migrate", {"pool_id": made["pool_id"]})):
        assert (await rig.ask(f"/polykv/sessions/me/{path}", body, **theirs)).status == 404
    mine = await rig.ask(
        "/polykv/sessions/me/migrate", {"pool_id": made["pool_id"]}, Authorization="Bearer mine"
    )
    assert mine.error["code"] == "pool_not_found"


async def test_who_waits_is_listed(proxies):
    """A session's next turn by its id; a new session by its name until it has one; others' are counted."""
    rig = await proxies(slots=1)
    await rig.ask(CHAT, chat("hi", session_id="me"))
    rig.engine.gate.clear()
    tasks = [rig.start(CHAT, chat("busy", session_id="busy"))]
    await until(lambda: rig.engine.running == 1)
    for body, key in (
        (chat("hi", "more", session_id="me"), ""),
        (chat("hi", "and more", session_id="me"), ""),
        (chat("new"), ""),
        (chat("third", session_id="me"), "other"),
    ):
        tasks.append(rig.start(CHAT, body, X_Api_Key=key))
        await until(lambda: rig.waiting == len(tasks) - 1)
    expected = [(None, None, "waiting"), (None, "me", "waiting"), ("busy", "busy", "running")]
    records = (await rig.ask("/polykv/requests")).json["requests"]
    sent = [record["request_id"] for record in reversed(records)][1:]
    for path in ("/polykv/sessions", "/polykv/tps"):
        found = (await rig.ask(path)).json
        rows = [(each["session_id"], each["name"], each["state"]) for each in found["sessions"]]
        assert rows == [*expected, ("me", "me", "waiting")]
        ids = [each["request_id"] for each in found["sessions"]]
        assert ids == [sent[3], sent[2], None, sent[1]]
        assert found["other_keys_sessions"] == 1
    (theirs,) = (await rig.ask("/polykv/sessions", X_Api_Key="other")).json["sessions"]
    assert (theirs["name"], theirs["slot"], theirs["turns"], theirs["tps_ewma"]) == ("me", None, 0, None)
    (record,) = (await rig.ask("/polykv/requests", X_Api_Key="other")).json["requests"]
    assert abs(theirs["started_ts"] - record["started_ts"]) < 1.0
    tasks.pop().cancel()  # who leaves is gone
    await until(lambda: rig.waiting == 3)
    assert (await rig.ask("/polykv/sessions", X_Api_Key="other")).json["sessions"] == []
    rig.engine.gate.set()
    assert {(await task).status for task in tasks} == {200}
    listed = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert {each["state"] for each in listed} == {"idle"}
    turns = {each["session_id"]: each["turns"] for each in listed}
    assert {name: turns[name] for name in ("me", "busy")} == {"me": 3, "busy": 1}


async def test_who_waits_for_the_engine_is_listed(proxies):
    """Before anybody asks for slots."""
    rig = await proxies(hold_s=30.0)
    made = await rig.pool()
    rig.loading()
    waiting = rig.start(CHAT, chat("hi", session_id="me", pool_id=made["pool_id"]))
    await until(lambda: rig.runtime.plane.leases.waiting)
    (listed,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert (listed["session_id"], listed["name"], listed["state"]) == (None, "me", "waiting")
    await rig.up()
    assert (await waiting).status == 200
    (listed,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert (listed["session_id"], listed["state"]) == ("me", "idle")


async def test_a_key_learns_nothing_of_anothers_names(rig):
    """Ids, heads, lists and records are those that it would have alone."""
    for key in ("one", "two"):
        answer = await rig.ask(CHAT, chat("hi", session_id="me", opencoti={}), X_Api_Key=key)
        assert (answer.headers["x-session-id"], answer.json["opencoti"]["session_id"]) == ("me", "me")
    for key in ("one", "two"):
        seen = {"X_Api_Key": key}
        (listed,) = (await rig.ask("/polykv/sessions", **seen)).json["sessions"]
        (rate,) = (await rig.ask("/polykv/tps", **seen)).json["sessions"]
        (record,) = (await rig.ask("/polykv/requests?session_id=me", **seen)).json["requests"]
        scope = scope_of_keys(key, None, shared=False)
        for each in (listed, rate, record):
            assert (each["session_id"], each["scope"]) == ("me", scope)
        slots = [slot["opencoti"]["session_id"] for slot in (await rig.ask("/slots", **seen)).json]
        assert sorted(slots, key=str) == [None, "me"]
    assert (await rig.ask("/polykv/sessions/me/close", {}, X_Api_Key="one")).status == 200
    await rig.ask(CHAT, chat("hi", "more", session_id="me"), X_Api_Key="two")
    (record,) = (await rig.ask("/polykv/requests?limit=1", X_Api_Key="two")).json["requests"]
    assert (record["session_id"], record["continued"]) == ("me", True)


async def test_an_administrator_says_whose_session_is_meant(proxies):
    """By the scope that the list shows; a name that several keys have is refused without, and lists them."""
    rig, admin = await proxies(admin="k", slots=3), {"X_Polykv_Admin_Key": "k"}
    for key in ("one", "two"):
        await rig.ask(CHAT, chat("hi", session_id="me"), X_Api_Key=key)
    listed = (await rig.ask("/polykv/sessions", **admin)).json["sessions"]
    assert [each["session_id"] for each in listed] == ["me", "me"]
    one, two = (scope_of_keys(key, None, shared=False) for key in ("one", "two"))
    made = await rig.pool(None, **admin, X_Api_Key="two")
    asked = (
        ("/polykv/sessions/me/close", {}, "session_id"),
        ("/polykv/sessions/me/migrate", {"pool_id": made["pool_id"]}, "session_id"),
        ("/polykv/pools", {"from_session": "me"}, "from_session"),
    )
    for path, body, param in asked:
        answer = await rig.ask(path, body, **admin)
        assert (answer.status, answer.error["code"]) == (409, "session_ambiguous")
        assert (answer.error["param"], answer.error["scopes"]) == (param, sorted((one, two)))
    moved = await rig.ask(f"{asked[1][0]}?scope={two}", asked[1][1], **admin)
    assert (moved.status, moved.json["session_id"]) == (200, "me")
    taken = await rig.ask(f"{asked[2][0]}?scope={one}", asked[2][1], **admin)
    assert taken.status == 201
    (pool,) = (await rig.ask(f"/polykv/pools?scope={one}", **admin)).json["pools"]
    assert (pool["pool_id"], pool["scope"]) == (taken.json["pool_id"], one)
    assert (await rig.ask(f"{asked[0][0]}?scope={one}", {}, **admin)).status == 200
    (left,) = (await rig.ask("/polykv/sessions", **admin)).json["sessions"]
    assert left["scope"] == two
    assert (await rig.ask(asked[0][0], {}, **admin)).status == 200  # now there is one


async def test_a_session_moves(rig):
    """The next request that names no pool rides on it."""
    made = await rig.pool()
    await rig.ask(CHAT, chat("hi", session_id="me", opencoti={"auto_match": False}))
    moved = await rig.ask("/polykv/sessions/me/migrate", {"pool_id": made["pool_id"]})
    assert (moved.status, moved.json["pool_id"]) == (200, made["pool_id"])
    assert moved.json["cells_freed"] > 0
    answer = await rig.ask(CHAT, chat("hi", "more", session_id="me"))
    assert answer.headers["x-pool-id"] == made["pool_id"]


async def test_a_move_needs_a_pool(rig):
    """400 names the member; an unknown pool is 404, one of another engine 409."""
    await rig.ask(CHAT, chat("hi", session_id="me"))
    for body in ({}, {"pool": "x"}, {"pool_id": 3}):
        answer = await rig.ask("/polykv/sessions/me/migrate", body)
        assert (answer.status, answer.error["param"]) == (400, "pool_id")
    assert (await rig.ask("/polykv/sessions/me/migrate", {"pool_id": "x"})).status == 404


async def test_a_session_stays_on_its_engine(proxies):
    """Cells do not travel."""
    rig = await proxies(models=("alike", "alike"))
    await rig.ask(CHAT, chat("hi", session_id="me"))
    made = await rig.pool({**POOL, "engine": "engine-1"})
    answer = await rig.ask("/polykv/sessions/me/migrate", {"pool_id": made["pool_id"]})
    assert (answer.status, answer.error["code"]) == (409, "other_engine")
