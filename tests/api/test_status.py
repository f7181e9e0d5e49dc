"""Claims about ``api.status``: the engine's documents with a member of ours, and slot actions."""

import asyncio
import json

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy import __version__
from polykv_proxy.api import status, views


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_the_engines(rig, path):
    """While one serves it answers itself; while it loads the client gets its words; else why it is down."""
    answer = await rig.ask(path)
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert len(rig.engine.of(path)) == 1
    rig.down()
    answer = await rig.ask(path)
    assert (answer.status, answer.error["message"]) == (503, "the engine is down: test")
    rig.loading()
    answer = await rig.ask(path)
    assert answer.status == 503
    assert answer.error == {"message": "Loading model", "type": "unavailable_error", "code": 503}
    assert "Retry-After" in answer.headers
    assert len(rig.engine.of(path)) == 1


@pytest.mark.parametrize("path", ["/props", "/slots", "/metrics"])
async def test_what_a_document_says_of_its_connection_ends_there(rig, path):
    """Every other field of the engine's reaches the client."""
    rig.engine.script.headers |= {
        "X-Engine": "kept",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=77",
        "Proxy-Authenticate": "Basic",
    }
    answer = await rig.ask(path)
    assert (answer.status, answer.headers["X-Engine"]) == (200, "kept")
    assert not {"X-Hop", "Keep-Alive", "Proxy-Authenticate"} & set(answer.headers)
    assert answer.headers.getall("Content-Length") == [str(len(answer.body))]


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


async def test_props_say_what_is_in_force(proxies, tmp_path):
    """Versions, the patches, and the policies as they are applied."""
    file = tmp_path / "policy.yaml"
    file.write_text("default: {mode: enforced, target_tps_per_session: 7}\n")
    rig = await proxies(pools={"auto_min_tokens": 99}, policy_file=file)
    ours = (await rig.ask("/props")).json["opencoti"]
    admission = ours["policy"]["admission"]
    assert (admission["mode"], admission["target_tps_per_session"]) == ("enforced", 7.0)
    assert admission["on_saturation"] == "reject"
    assert (ours["version"], ours["engine_patch"], ours["engine_build"]) == (__version__, "p1", "fake")
    assert ours["policy"]["pools"]["auto_min_tokens"] == 99


async def test_slots_have_a_member_of_ours(proxies):
    """Whose each is and how fast; without it, the engine's bytes are what they were."""
    rig = await proxies(slots=3)
    pool = await rig.pool()
    await rig.ask(CHAT, chat("a", pool_id=pool["pool_id"], session_id="one"))
    plain = await rig.runtime.client.get("/slots")
    answer = await rig.ask("/slots", Accept_Encoding="gzip")
    assert answer.status == 200
    members = [slot["opencoti"] for slot in answer.json]
    used = answer.json[1]["n_prompt_tokens"]
    nobody = {"pool_id": None, "session_id": None, "tps_ewma": None}
    assert members == [
        nobody | {"ctx_used": 0, "ctx_headroom_tokens": 1024},  # the pool was computed there
        {
            "pool_id": pool["pool_id"],
            "session_id": "one",
            "tps_ewma": None,
            "ctx_used": used,
            "ctx_headroom_tokens": 1024 - used,
        },
        nobody | {"ctx_used": None, "ctx_headroom_tokens": None},  # never used
    ]
    rest = answer.body
    for member in members:
        rest = rest.replace(b',"opencoti":' + json.dumps(member, separators=(",", ":")).encode(), b"", 1)
    assert rest == plain


async def test_slots_keep_the_engines_numbers(rig):
    """As they were written, with whatever stands between them."""
    body = b' [ {"id": 0, "n_ctx": 1024, "t": 1.50e+2, "big": 12345678901234567890123 } ,\n{"id":1}]\n'
    rig.engine.broken["/slots"] = (200, body)
    answer = (await rig.ask("/slots")).body
    first, second = (
        b"".join((b'"opencoti":{"pool_id":null,"session_id":null,"tps_ewma":null,', rest))
        for rest in (b'"ctx_used":null,"ctx_headroom_tokens":null}',) * 2
    )
    expected = body.replace(b"123 }", b"123 ," + first + b"}").replace(b'"id":1}', b'"id":1,' + second + b"}")
    assert answer == expected


@pytest.mark.parametrize(
    "broken",
    [
        (501, b'{"error":{"code":501,"message":"This server does not support slots endpoint."}}'),
        (503, b'{"error":{"message":"no slot available"}}'),
        (200, b'{"id":0}'),
        (200, b'[{"id":"zero"}]'),
        (200, b"not json"),
        (200, b"[]"),
    ],
)
async def test_slots_that_are_no_list_pass(rig, broken):
    """Errors and other documents keep their status and bytes."""
    rig.engine.broken["/slots"] = broken
    answer = await rig.ask("/slots?fail_on_no_slot=1")
    assert (answer.status, answer.body) == broken
    assert rig.engine.of("/slots")[-1].query == "fail_on_no_slot=1"


async def test_slots_name_only_ones_own_sessions(proxies):
    """Another key's session is nobody; the admin sees all."""
    rig = await proxies(admin="boss")
    await rig.ask(CHAT, chat("a", session_id="mine"), Authorization="Bearer k1")

    async def named(**headers):
        return (await rig.ask("/slots", **headers)).json[0]["opencoti"]["session_id"]

    assert await named(Authorization="Bearer k1") == "mine"
    assert await named(Authorization="Bearer k2") is None
    assert await named(X_Polykv_Admin_Key="boss") == "mine"


async def test_a_foreign_page_is_not_told_of_sessions(rig):
    """The engine opens its routes to all pages; what we add to them is for our own."""
    await rig.ask(CHAT, chat("a", session_id="mine"))
    plain = (await rig.ask("/slots", Origin="http://evil.example")).json
    assert all("opencoti" not in slot for slot in plain)
    ours = (await rig.ask("/slots", Origin=rig.url)).json
    assert ours[0]["opencoti"]["session_id"] == "mine"


async def test_slots_of_a_stock_engine(proxies):
    """The only request is in the only slot at work."""
    rig = await proxies(max_pools=0)
    rig.engine.script.tokens, rig.engine.script.token_delay_s = 600, 0.01
    await asyncio.sleep(0.2)
    running = rig.start(CHAT, chat("a", session_id="one", stream=True))
    await until(lambda: any(session.rate.warm for session in rig.runtime.plane.sessions))
    members = [slot["opencoti"] for slot in (await rig.ask("/slots")).json]
    assert [member["session_id"] for member in members] == ["one", None]
    assert members[0]["tps_ewma"] > 0
    assert members[0]["ctx_used"] + members[0]["ctx_headroom_tokens"] == 1024
    running.cancel()


@pytest.mark.parametrize("path", ["/props", "/slots"])
async def test_a_status_document_that_does_not_come(rig, monkeypatch, path):
    """Nobody waits longer than a few seconds for it."""
    monkeypatch.setattr(status, "CONTROL_TIMEOUT_S", 0.1)
    rig.engine.slow[path] = gate = asyncio.Event()
    answer = await rig.ask(path)
    assert (answer.status, answer.error["code"]) == (503, "engine_timeout")
    gate.set()


@pytest.mark.parametrize("path", ["/props", "/slots"])
async def test_a_status_document_waits_for_an_engine(proxies, path):
    """And has its member then."""
    rig = await proxies(hold_s=20.0)
    rig.down()
    waiting = rig.start(path)
    await asyncio.sleep(0.05)
    await rig.up()
    assert b'"opencoti"' in (await waiting).body


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
    assert (answer.status, answer.error["code"]) == (503, "engine_down")


async def test_an_action_that_fails_gives_the_slot_back(rig):
    """The engine's error is the client's, and what the slot holds is not trusted any more."""
    await rig.ask(CHAT, chat("a"))
    rig.engine.broken["/slots/0"] = (500, b'{"error":{"message":"disk"}}')
    answer = await rig.ask("/slots/0?action=restore", {"filename": "f"})
    assert (answer.status, answer.error["message"]) == (500, "disk")
    assert rig.runtime.plane.board.slots[0].session is None
    assert rig.idle == 2
