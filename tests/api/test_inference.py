"""Claims about ``api.inference``: what clients and the engine see of requests that run in a slot."""

import asyncio
import json

import pytest
from fake_engine import Script

from api.bodies import APIS, pool_for, spy
from api.rig import CHAT, chat, until

# -- what passes untouched --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_our_members_keeps_its_bytes(rig, path, stream):
    """Both ways: the engine gets the client's bytes, the client the engine's, with a session header added."""
    raw = json.dumps(APIS[path] | {"stream": stream}, indent=1).encode()
    answer = await rig.ask(path, raw, Content_Type="application/json")
    assert answer.status == 200
    assert spy(rig).body == raw
    assert b"opencoti" not in answer.body
    assert answer.headers["x-session-id"] == "auto-1"
    assert "x-pool-id" not in answer.headers


async def test_other_kinds_of_work_run_in_a_slot_too(rig):
    """Infill gets a slot and no session; its bytes stay."""
    answer = await rig.ask("/infill", {"input_prefix": "a"})
    assert answer.status == 200
    assert spy(rig).header("x-polykv-slot") == "0"
    assert "x-session-id" not in answer.headers


# -- slots ------------------------------------------------------------------------------------------------


async def test_clients_cannot_choose_slots_or_give_orders(rig):
    """Their ``X-PolyKV-*`` never arrive, a chosen slot is reported, and ours cannot be nominated away."""
    body = chat("hi", id_slot=1, session_id="me")
    answer = await rig.ask(
        CHAT,
        body,
        X_PolyKV_Slot="1",
        X_PolyKV_Attach="0",
        X_PolyKV_Tag="99",
        Connection="x-polykv-slot, close",
    )
    assert answer.json["opencoti"]["id_slot_ignored"] is True
    ours = [(name.lower(), value) for name, value in spy(rig).headers if name.lower().startswith("x-polykv")]
    assert ours == [("x-polykv-slot", "0"), ("x-polykv-tag", "1")]


async def test_a_conversation_returns_to_its_slot(rig):
    """Whatever ran meanwhile elsewhere."""
    await rig.ask(CHAT, chat("a"))
    await rig.ask(CHAT, chat("x", system="other"))
    answer = await rig.ask(CHAT, chat("a", "b"))
    assert answer.headers["x-session-id"] == "auto-1"
    assert spy(rig).header("x-polykv-slot") == "0"


async def test_several_completions_hold_several_slots(rig):
    """Nobody else is sent to a slot that the engine may take for them."""
    rig.engine.gate.clear()
    many = rig.start(CHAT, chat("a", n=2))
    await until(lambda: rig.engine.running == 1)
    assert rig.idle == 0
    rig.engine.gate.set()
    await many
    await rig.quiet()


async def test_a_list_of_prompts_waits_for_all_slots(rig):
    """The engine chooses slots for it, so all of them have to be idle."""
    rig.engine.gate.clear()
    one = rig.start(CHAT, chat("a"))
    await until(lambda: rig.engine.running == 1)
    many = rig.start("/completion", {"prompt": ["a", "b"]})
    spread = rig.start("/v1/systemone", {})
    await until(lambda: rig.waiting == 2)
    rig.engine.gate.set()
    assert [(await task).status for task in (one, many, spread)] == [200, 200, 404]
    await rig.quiet()


async def test_an_engine_failure_leaves_nothing_in_the_slot(rig):
    """After a 5xx the conversation is not taken to be resident."""
    await rig.ask(CHAT, chat("a"))
    rig.engine.script = Script(fault="error", status=500)
    assert (await rig.ask(CHAT, chat("a", "b"))).status == 500
    assert rig.runtime.plane.board.slots[0].session is None
    await rig.quiet()


async def test_a_refused_request_leaves_the_slot_as_it_was(rig):
    """After a 4xx the conversation that lived there still does."""
    await rig.ask(CHAT, chat("a"))
    rig.engine.script = Script(fault="error", status=400)
    await rig.ask(CHAT, chat("a", "b"))
    rig.engine.script = Script()
    await rig.ask(CHAT, chat("a", "c"))
    assert rig.runtime.plane.board.slots[0].session.session_id == "auto-1"
    assert spy(rig).header("x-polykv-slot") == "0"


# -- clients that leave -----------------------------------------------------------------------------------


async def test_a_client_that_leaves_the_queue_frees_nothing_else(rig):
    """Its ticket is gone, the others go on, and the engine never hears of it."""
    rig.engine.gate.clear()
    running = [rig.start(CHAT, chat(name)) for name in "ab"]
    await until(lambda: rig.engine.running == 2)
    leaver = rig.start(CHAT, chat("leaver"))
    await until(lambda: rig.waiting == 1)
    stayer = rig.start(CHAT, chat("stayer"))
    await until(lambda: rig.waiting == 2)
    leaver.cancel()
    await until(lambda: rig.waiting == 1)
    rig.engine.gate.set()
    assert [answer.status for answer in await asyncio.gather(*running, stayer)] == [200] * 3
    assert not any(b"leaver" in request.body for request in rig.engine.work)
    await rig.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_head_frees_its_slot(rig, stream):
    """Exactly its own, once the engine is done with it; the engine is told to stop."""
    rig.engine.gate.clear()
    leaver, stayer = rig.start(CHAT, chat("a", stream=stream)), rig.start(CHAT, chat("b"))
    await until(lambda: rig.engine.running == 2)
    leaver.cancel()
    await until(lambda: rig.idle == 1)
    assert rig.engine.running == 1
    rig.engine.gate.set()
    assert (await stayer).status == 200
    await rig.quiet()


async def test_a_client_that_leaves_mid_stream_frees_its_slot(rig):
    """The engine sees its connection close, and the next request gets the slot."""
    rig.engine.script = Script(tokens=100, token_delay_s=5.0)
    async with rig.open(CHAT, chat("a", stream=True)) as answer:
        await answer.content.readany()
        assert rig.idle == 1
    await rig.quiet()
    assert rig.engine.work[0].disconnected.is_set()
    rig.engine.script = Script()
    assert (await rig.ask(CHAT, chat("b"))).status == 200


async def test_a_task_that_runs_on_is_cancelled(rig):
    """An engine that does not notice the closed connection is told which task to stop."""
    rig.engine.script = Script(tokens=100, token_delay_s=5.0)
    async with rig.open(CHAT, chat("a", stream=True)) as answer:
        await answer.content.readany()
        slot = rig.engine.sequences[0]
        task, slot.task = slot.task, 77  # so that the end of the connection does not end the work
    await rig.quiet()
    assert rig.engine.cancelled == [77]
    assert task != 77


# -- engines that leave -----------------------------------------------------------------------------------


async def test_an_engine_that_dies_before_the_head_is_a_503(rig):
    """In our envelope; the slot comes back."""
    rig.engine.script = Script(fault="die_before_head")
    answer = await rig.ask(CHAT, chat("a"))
    assert (answer.status, answer.error["code"]) == (503, "engine_gone")
    assert "Retry-After" in answer.headers
    await rig.quiet()


async def test_requests_wait_for_an_engine(rig):
    """Those that come while there is none are served by the next one, pools of the old one being unknown."""
    pool_id = await pool_for(rig, CHAT)
    rig.down()
    plain, pooled = rig.start(CHAT, chat("a")), rig.start(CHAT, chat("hi", pool_id=pool_id))
    await until(lambda: rig.waiting == 1)
    rig.engine.restart()
    await rig.up()
    assert (await plain).status == 200
    assert (await pooled).json["opencoti"]["pool_unknown"] is True
    await rig.quiet()


async def test_requests_that_wait_outlive_a_restart(rig):
    """A queue is the proxy's: it is served by the new engine, and old leases disturb nobody."""
    rig.engine.gate.clear()
    running = [rig.start(CHAT, chat(name)) for name in "ab"]
    await until(lambda: rig.engine.running == 2)
    waiting = [rig.start(CHAT, chat(name)) for name in "cd"]
    await until(lambda: rig.waiting == 2)
    rig.down()
    rig.engine.restart()
    await rig.up()
    rig.engine.overlaps.clear()  # the fake's old tasks still run; a real engine's would be gone
    rig.engine.gate.set()
    assert [answer.status for answer in await asyncio.gather(*waiting, *running)] == [200] * 4
    await rig.quiet()


# -- an engine without the patch --------------------------------------------------------------------------


async def test_a_stock_engine_gets_no_orders(proxies):
    """No headers of ours, and no slot of the client's choice."""
    rig = await proxies(max_pools=0)
    body = chat("a", id_slot=1, session_id="me")
    answer = await rig.ask(CHAT, body, X_PolyKV_Slot="1")
    assert answer.json["opencoti"]["id_slot_ignored"] is True
    assert not any(name.lower().startswith("x-polykv") for name, _ in spy(rig).headers)
    assert json.loads(spy(rig).body) == chat("a")
    unknown = await rig.ask(CHAT, chat("a", pool_id="p"))
    assert unknown.json["opencoti"]["pool_unknown"] is True


async def test_on_a_stock_engine_too_a_leaver_frees_its_slot(proxies):
    """Once no more slots are busy than others use."""
    rig = await proxies(max_pools=0)
    rig.engine.gate.clear()
    leaver, stayer = rig.start(CHAT, chat("a")), rig.start(CHAT, chat("b"))
    await until(lambda: rig.engine.running == 2)
    leaver.cancel()
    await until(lambda: rig.idle == 1)
    rig.engine.gate.set()
    await stayer
    await rig.quiet()


# -- bad input --------------------------------------------------------------------------------------------


async def test_a_wrong_member_of_ours_is_refused_before_anything_runs(rig):
    """400 with the field; in Anthropic's envelope on its route."""
    openai = await rig.ask(CHAT, chat("a", pool_id=7))
    assert (openai.status, openai.error["param"]) == (400, "pool_id")
    anthropic = await rig.ask("/v1/messages", APIS["/v1/messages"] | {"session_id": ""})
    assert (anthropic.status, anthropic.json["type"], anthropic.error["param"]) == (
        400,
        "error",
        "session_id",
    )
    assert not rig.engine.work


async def test_a_body_that_is_no_json_is_the_engines_to_refuse(rig):
    """It arrives as it is."""
    await rig.ask(CHAT, b"[" * 3000, Content_Type="application/json")
    assert spy(rig).body == b"[" * 3000


async def test_a_body_that_is_too_large_is_refused(proxies):
    """413 before it is read."""
    rig = await proxies(max_body_bytes=2048)
    answer = await rig.ask(CHAT, chat("x" * 3000))
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
