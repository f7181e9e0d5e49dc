"""Claims about ``api.status``: the engine's documents with a member of ours, and slot actions."""

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy.api import views


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_the_engines(rig, path):
    """While one serves it answers itself; else the client gets word by word what one says while it loads."""
    answer = await rig.ask(path)
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert len(rig.engine.of(path)) == 1
    rig.down()
    answer = await rig.ask(path)
    assert answer.status == 503
    assert answer.error == {"message": "Loading model", "type": "unavailable_error", "code": 503}
    assert "Retry-After" in answer.headers
    assert len(rig.engine.of(path)) == 1


async def test_props_have_a_member_of_ours(rig):
    """Capability and features by name; the engine's members stay; orders of clients do not arrive."""
    answer = await rig.ask("/props", X_PolyKV_Slot="1")
    document = answer.json
    ours = document.pop("opencoti")
    assert document == rig.engine.props
    assert (ours["capability"], ours["features"]) == ("zero_copy", list(views.FEATURES))
    assert (ours["max_pools"], ours["engine_epoch"], ours["attach_shortfall_total"]) == (2, "epoch-1", 0)
    assert rig.engine.of("/props")[-1].header("x-polykv-slot") is None


async def test_props_of_a_stock_engine_name_no_features(proxies):
    """And say why."""
    rig = await proxies(max_pools=0)
    ours = (await rig.ask("/props")).json["opencoti"]
    assert (ours["capability"], ours["features"], ours["engine_epoch"]) == ("relay", [], None)
    assert "not patched" in ours["capability_reason"]


@pytest.mark.parametrize("broken", [(401, b'{"error":{}}'), (200, b"[1]")])
async def test_props_that_are_no_object_pass(rig, broken):
    """An error or another document keeps its status and bytes."""
    rig.engine.broken["/props"] = broken
    answer = await rig.ask("/props")
    assert (answer.status, answer.body) == broken


async def test_a_slot_action_forgets_the_conversation(rig):
    """After an erase the slot holds nobody's state; a save leaves it."""
    await rig.ask(CHAT, chat("a"))
    saved = await rig.ask("/slots/0?action=save", {"filename": "f"}, X_PolyKV_Slot="1")
    assert rig.engine.of("/slots/0")[-1].header("x-polykv-slot") is None
    assert (saved.status, saved.json["id_slot"]) == (200, 0)
    assert rig.runtime.plane.board.slots[0].session is not None
    erased = await rig.ask("/slots/0?action=erase", {})
    assert (erased.status, erased.json["n_erased"]) == (200, 12)
    assert rig.runtime.plane.board.slots[0].session is None
    assert rig.idle == 2


async def test_a_slot_at_work_is_left_alone(rig):
    """409; its request is not disturbed."""
    rig.engine.gate.clear()
    running = rig.start(CHAT, chat("a"))
    await until(lambda: rig.engine.running == 1)
    answer = await rig.ask("/slots/0?action=erase", {})
    assert (answer.status, answer.error["code"]) == (409, "slot_busy")
    rig.engine.gate.set()
    assert (await running).status == 200
    assert not rig.engine.of("/slots/0")[1:]  # the self-test's
    await rig.quiet()


@pytest.mark.parametrize(
    "path", ["/slots/9", "/slots/0x", "/slots/+0", "/slots/0000000", "/slots/0/", "/slots/%30x"]
)
async def test_other_spellings_of_a_slot_are_refused(rig, path):
    """The engine would read most of them as slot 0."""
    answer = await rig.ask(f"{path}?action=erase", {})
    assert (answer.status, answer.error["code"]) == (400, "no_such_slot")


async def test_slot_actions_need_the_admin_key_where_there_is_one(proxies):
    """However the path is spelt."""
    rig = await proxies(admin="schlüssel")
    before = len(rig.engine.of("/slots/0"))
    for path in ("/slots/0", "/slots/%30", "/%73lots/0"):
        assert (await rig.ask(f"{path}?action=erase", {})).status == 401
    assert len(rig.engine.of("/slots/0")) == before
    assert (await rig.ask("/slots/0?action=erase", {}, X_Polykv_Admin_Key="schlüssel")).status == 200


async def test_without_an_engine_there_is_no_slot(rig):
    """503, and nothing is waited for."""
    rig.down()
    answer = await rig.ask("/slots/0?action=erase", {})
    assert (answer.status, answer.error["code"]) == (503, "engine_loading")


async def test_an_action_that_fails_gives_the_slot_back(rig):
    """The engine's error is the client's, and what the slot holds is not trusted any more."""
    await rig.ask(CHAT, chat("a"))
    rig.engine.broken["/slots/0"] = (500, b'{"error":{"message":"disk"}}')
    answer = await rig.ask("/slots/0?action=restore", {"filename": "f"})
    assert (answer.status, answer.error["message"]) == (500, "disk")
    assert rig.runtime.plane.board.slots[0].session is None
    assert rig.idle == 2
