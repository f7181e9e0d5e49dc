"""Claims about ``api.hold``: waiting is silent, then kept alive, and a refusal comes in the right form."""

import asyncio
import json

import pytest

from api.bodies import APIS
from api.rig import CHAT, PATIENT, chat, held_open, occupied, until
from polykv_proxy.core.decisions import StopRunning
from polykv_proxy.core.types import SlotId

HASTY = {"hold_grace_s": 30.0, "max_wait_s": 0.05}
"""Refusals come before a stream opens."""


# -- streams that wait ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_waits_is_kept_alive(proxies, path):
    """Comments come first, then the engine's events, with the block where it belongs."""
    rig, running = await occupied(proxies, **PATIENT)
    async with rig.open(path, APIS[path] | {"stream": True, "session_id": "me"}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        seen = await held_open(answer)
        assert seen.replace(b":\n\n", b"") == b""
        rig.engine.gate.set()
        rest = await answer.content.read()
    assert rest.count(b'"opencoti":') == 1
    assert b"token" in rest
    assert (await running).status == 200
    await rig.quiet()


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_that_waited_too_long_ends_with_an_error_event(proxies, path):
    """The status is spent, so the refusal is the last event, in the wording of its API."""
    rig, running = await occupied(proxies, **PATIENT, max_wait_s=0.1)
    answer = await rig.ask(path, APIS[path] | {"stream": True})
    assert answer.status == 200
    ((name, event),) = answer.events
    assert event["error"]["code"] == "queue_timeout"
    if path == "/v1/messages":
        assert (name, event["type"]) == ("error", "error")
    elif path == "/v1/responses":
        assert (name, event["type"], event["code"]) == ("error", "error", "queue_timeout")
    else:
        assert (name, list(event)) == (None, ["error"])
    rig.engine.gate.set()
    await running
    await rig.quiet()


async def test_a_client_that_leaves_a_held_stream_leaves_the_queue(proxies):
    """The slot goes to the next, and the engine never hears of the one who left."""
    rig, running = await occupied(proxies, **PATIENT)
    async with rig.open(CHAT, chat("leaver", stream=True)) as answer:
        await held_open(answer)
    await until(lambda: rig.waiting == 0)
    rig.engine.gate.set()
    await running
    await rig.quiet()
    assert not any(b"leaver" in request.body for request in rig.engine.work)


async def test_a_stream_may_open_before_there_is_an_engine(proxies):
    """A pooled request waits for one like any other, and a refusal then is an event."""
    rig = await proxies(queue=PATIENT)
    made = await rig.pool()
    wanted = {"pool_id": made["pool_id"], "shared_prefix_n_tokens": 9999, "strict": True}
    rig.down()
    async with rig.open(CHAT, chat("hi", stream=True, opencoti=wanted)) as answer:
        await held_open(answer)
        await rig.up()
        rest = await answer.content.read()
    assert b'"code":"shared_prefix_too_long"' in rest
    await rig.quiet()


# -- what is no wait in line -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_nobody_waits_for_a_slot_that_is_free(proxies, path, stream):
    """With no time at all to wait in line, a request that finds a slot runs."""
    rig = await proxies(slots=2, queue={"max_wait_s": 0.0})
    assert (await rig.ask(path, APIS[path] | {"stream": stream})).status == 200
    await rig.quiet()


async def test_a_body_that_comes_slowly_uses_up_no_time(proxies):
    """The time that a request may wait is not that of its upload."""
    rig, running = await occupied(proxies, max_wait_s=0.3)
    body = json.dumps(chat("slow")).encode()

    async def slowly():
        yield body[:10]
        await asyncio.sleep(0.4)
        yield body[10:]

    asking = asyncio.ensure_future(rig.session.post(rig.url + CHAT, data=slowly()))
    await until(lambda: rig.waiting == 1)
    rig.engine.gate.set()
    assert (await asking).status == (await running).status == 200
    await rig.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_done_in_a_slot_uses_up_no_time(proxies, stream):
    """It has its slot, and is kept alive until that may be used; then it runs."""
    rig = await proxies(slots=1, queue=PATIENT | {"max_wait_s": 0.05})
    async with rig.runtime.stillness.of(SlotId(0)):
        asking = rig.start(CHAT, chat("hi", stream=stream))
        await until(lambda: rig.idle == 0)
        await asyncio.sleep(0.2)  # several times what it may wait in line
        assert not asking.done()
    answer = await asking
    assert answer.status == 200
    assert "error" not in answer.body.decode()
    await rig.quiet()


async def test_who_starts_over_has_the_time_left_that_he_did_not_wait(proxies):
    """It ran for longer than it may wait; stopped for its cells, it gets a slot again."""
    rig = await proxies(slots=1, queue={"max_wait_s": 1.0})
    rig.engine.gate.clear()
    asking = rig.start(CHAT, chat("a"))
    await until(lambda: rig.engine.running == 1)
    await asyncio.sleep(1.2)
    (lease,) = rig.runtime.plane.leases
    rig.runtime._perform([StopRunning(lease.lease_id)])
    await until(lambda: len(rig.engine.work) == 2)
    rig.engine.gate.set()
    assert (await asking).status == 200
    await rig.quiet()


async def test_waits_in_line_add_up(proxies):
    """For the engine, then for a slot: together no longer than a request may wait."""
    rig, running = await occupied(proxies, hold_grace_s=30.0, max_wait_s=2.0)
    rig.down()
    asking = rig.start(CHAT, chat("hi", pool_id="p"))
    await until(lambda: rig.runtime.plane.leases.waiting == 1)
    await asyncio.sleep(0.2)
    await rig.up()
    answer = await asking
    assert (answer.status, answer.error["code"]) == (429, "queue_timeout")
    rig.engine.gate.set()
    await running
    await rig.quiet()


async def test_a_pool_that_takes_too_long_to_come_back_is_done_without(proxies):
    """Its request waits no longer than for a slot, and is not refused for the pool's sake."""
    rig = await proxies(slots=2, queue={"max_wait_s": 0.1})
    made = await rig.pool()
    await rig.ask(f"/polykv/pools/{made['pool_id']}/evict", {})
    rig.engine.pool_gate.clear()
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]))
    assert answer.status == 200
    assert answer.json["opencoti"]["pool_unknown"]
    rig.engine.pool_gate.set()
    await rig.quiet()


async def test_who_waited_for_the_engine_keeps_his_place(proxies, monkeypatch):
    """His prompt is read when it is there; who comes meanwhile finds the line full, not he."""
    rig = await proxies(slots=1, queue={"max_depth": 1})
    made = await rig.pool()
    rig.down()
    mine = rig.start(CHAT, chat("mine", pool_id=made["pool_id"]))
    await until(lambda: rig.runtime.plane.leases.waiting == 1)
    read, count = asyncio.Event(), type(rig.runtime.backend).prompt_tokens

    async def slowly(self, *args):
        await read.wait()
        return await count(self, *args)

    monkeypatch.setattr(type(rig.runtime.backend), "prompt_tokens", slowly)
    await rig.up()
    rig.engine.gate.clear()
    running = rig.start("/completion", {"prompt": "x", "cache_prompt": False})
    await until(lambda: rig.engine.running == 1)
    refused = await rig.ask("/completion", {"prompt": "y", "cache_prompt": False})
    assert refused.error["code"] == "queue_full"
    read.set()
    await until(lambda: rig.waiting == 1)
    rig.engine.gate.set()
    assert (await mine).status == (await running).status == 200
    await rig.quiet()


# -- refusals with a status -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_within_the_grace_is_a_status(proxies, stream):
    """429 with Retry-After for want of a slot."""
    rig, running = await occupied(proxies, **HASTY)
    answer = await rig.ask(CHAT, chat("hi", stream=stream))
    assert (answer.status, answer.error["code"]) == (429, "queue_timeout")
    assert int(answer.headers["Retry-After"]) >= 1
    rig.engine.gate.set()
    await running
    await rig.quiet()


@pytest.mark.parametrize("pool", [{}, {"pool_id": "p"}])
async def test_without_an_engine_it_is_503(proxies, pool):
    """With Retry-After, whether the request waited for a slot or, for its pool, for an engine."""
    rig = await proxies(queue=HASTY)
    rig.down()
    answer = await rig.ask(CHAT, chat("hi", stream=True) | pool)
    assert (answer.status, answer.error["code"]) == (503, "engine_down")
    assert int(answer.headers["Retry-After"]) >= 1


async def test_a_full_queue_refuses_at_once(proxies):
    """429 for one too many, in Anthropic's envelope on its route; those who wait are not touched."""
    rig, running = await occupied(proxies, max_depth=1)
    waiting = rig.start(CHAT, chat("waiting"))
    await until(lambda: rig.waiting == 1)
    answer = await rig.ask(CHAT, chat("hi", stream=True))
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        429,
        "queue_full",
        "pool_saturated",
    )
    assert int(answer.headers["Retry-After"]) >= 1
    anthropic = await rig.ask("/v1/messages", APIS["/v1/messages"])
    assert (anthropic.status, anthropic.json["type"], anthropic.error["code"]) == (429, "error", "queue_full")
    rig.engine.gate.set()
    assert [(await task).status for task in (running, waiting)] == [200, 200]
    await rig.quiet()


async def test_a_whole_answer_gets_no_comments(proxies):
    """However long it waits: its body is one JSON document."""
    rig, running = await occupied(proxies, **PATIENT)
    waiting = rig.start(CHAT, chat("hi"))
    await until(lambda: rig.waiting == 1)
    await asyncio.sleep(0.1)  # several keepalive times
    rig.engine.gate.set()
    answer = await waiting
    assert answer.json["object"] == "chat.completion"
    await running
