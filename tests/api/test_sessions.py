"""Claims about ``api.sessions``: what clients see of conversations."""

from urllib.parse import quote

import pytest

from api.rig import CHAT, chat

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
