"""Claims about ``api.inference``: what clients and the engine see of requests that run in a slot."""

import asyncio
import json

import pytest
from fake_engine import Script

from api.rig import CHAT, SYSTEM, chat, until
from polykv_proxy.core.keeping import riding
from polykv_proxy.core.types import PoolOrigin
from polykv_proxy.pooling import share

PROMPT = "Once upon a time there was a proxy. " * 3


def text(**more):
    """A plain completion."""
    return {"prompt": PROMPT, **more}


APIS = {
    "/completion": text(),
    "/v1/completions": text(),
    CHAT: chat("hi"),
    "/v1/responses": {"instructions": SYSTEM, "input": "hi"},
    "/v1/messages": {"system": SYSTEM, "messages": [{"role": "user", "content": "hi"}]},
}
"""A body for every API."""

LAST = {
    "/completion": lambda name, event: event.get("stop") is True,
    "/v1/completions": lambda name, event: event["choices"] and event["choices"][0]["finish_reason"],
    CHAT: lambda name, event: event["choices"] and event["choices"][0]["finish_reason"],
    "/v1/responses": lambda name, event: name == "response.completed",
    "/v1/messages": lambda name, event: name == "message_delta",
}
"""The event that carries the block, in a stream without a usage chunk."""


async def pool_for(rig, path):
    """A pool of the start of the API's body; its id and length."""
    rendered = PROMPT if "prompt" in APIS[path] else rig.engine.renders(APIS[path])
    made = await rig.pool({"tokens": rig.engine.tokens_of(rendered)[:60]})
    return made["pool_id"]


def spy(rig):
    """The last generation that the engine saw."""
    return rig.engine.work[-1]


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


async def test_an_engines_refusal_passes_untouched(rig):
    """Status and body are the engine's."""
    rig.engine.script = Script(
        fault="error", status=400, error_body={"error": {"message": "no", "code": 400}}
    )
    answer = await rig.ask(CHAT, chat("hi"))
    assert (answer.status, answer.json) == (400, {"error": {"message": "no", "code": 400}})
    await rig.quiet()


async def test_other_kinds_of_work_run_in_a_slot_too(rig):
    """Infill gets a slot and no session; its bytes stay."""
    answer = await rig.ask("/infill", {"input_prefix": "a"})
    assert answer.status == 200
    assert spy(rig).header("x-polykv-slot") == "0"
    assert "x-session-id" not in answer.headers


# -- pools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", APIS)
async def test_a_whole_answer_reports_what_was_shared(rig, path):
    """One block at the end, with the pool and what the engine really reused; headers say what was planned."""
    pool_id = await pool_for(rig, path)
    answer = await rig.ask(path, APIS[path] | {"pool_id": pool_id, "session_id": "me"})
    block = answer.json["opencoti"]
    assert list(answer.json)[-1] == "opencoti"
    assert (block["pool_id"], block["n_pool_shared"], block["pool_match"], block["pool_len"]) == (
        pool_id,
        60,
        60,
        60,
    )
    assert (block["session_id"], block["session_tps"]) == ("me", None)
    slot = rig.engine.sequences[int(spy(rig).header("x-polykv-slot"))]
    assert block["ctx_used"] == len(slot.tokens) + 8
    assert block["ctx_headroom_tokens"] == 1024 - block["ctx_used"]
    assert answer.headers["x-pool-id"] == pool_id
    assert answer.headers["x-cached-prefix-tokens"] == "60"
    assert answer.headers["x-session-id"] == "me"
    assert spy(rig).header("x-polykv-attach") == "0:60"
    assert json.loads(spy(rig).body) == APIS[path]


@pytest.mark.parametrize("path", APIS)
async def test_a_stream_reports_in_its_last_event_once(rig, path):
    """Without a usage chunk that is the one with the finish reason, in the wording of each API."""
    pool_id = await pool_for(rig, path)
    answer = await rig.ask(path, APIS[path] | {"pool_id": pool_id, "stream": True})
    carrying = [(name, event) for name, event in answer.events if "opencoti" in event]
    assert len(carrying) == 1
    assert LAST[path](*carrying[0])
    assert carrying[0][1]["opencoti"]["pool_id"] == pool_id
    assert answer.headers["x-cached-prefix-tokens"] == "60"


async def test_a_usage_chunk_carries_the_block(rig):
    """Where the client asked for one, and only there."""
    body = chat("hi", stream=True, stream_options={"include_usage": True}, session_id="me")
    answer = await rig.ask(CHAT, body)
    carrying = [event for _, event in answer.events if "opencoti" in event]
    assert [event["choices"] for event in carrying] == [[]]
    assert carrying[0]["opencoti"]["ctx_used"] == carrying[0]["usage"]["total_tokens"]


async def test_no_block_where_none_is_wanted(rig):
    """``report: false`` keeps the answer's bytes; the pool is used, and a shortfall noticed, all the same."""
    pool_id = await pool_for(rig, CHAT)
    body = chat("hi") | {"opencoti": {"pool_id": pool_id, "report": False}}
    answer = await rig.ask(CHAT, body)
    assert "opencoti" not in answer.json
    assert answer.headers["x-pool-id"] == pool_id
    pool = rig.runtime.plane.pools.find(pool_id, "")
    assert (pool.hits, rig.runtime.plane.pools.shortfalls) == (1, 0)
    rig.engine.pools[0].tokens[10] = -5  # now the engine shares less than was planned
    await rig.ask(CHAT, body)
    assert rig.runtime.plane.pools.shortfalls == 1


async def test_an_unknown_pool_is_no_error(rig):
    """The request runs unpooled, and says so; so it is with a foreign key's pool and with a released one."""
    pool_id = await pool_for(rig, CHAT)
    foreign = await rig.ask(CHAT, chat("hi", pool_id=pool_id), Authorization="Bearer other")
    await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")
    for answer in (
        foreign,
        await rig.ask(CHAT, chat("hi", pool_id=pool_id)),
        await rig.ask(CHAT, chat("hi", pool_id="nonsense")),
        await rig.ask(CHAT, chat("hi"), X_PolyKV_Pool="nonsense"),
    ):
        assert answer.status == 200
        block = answer.json["opencoti"]
        assert (block["pool_unknown"], block["n_pool_shared"], block["pool_match"]) == (True, None, None)
        assert "x-pool-id" not in answer.headers
    assert spy(rig).header("x-polykv-attach") is None


async def test_a_cap_lowers_what_is_shared(rig):
    """Above the match it is lowered in silence, with ``strict`` it is refused before anything ran."""
    pool_id = await pool_for(rig, CHAT)
    capped = await rig.ask(CHAT, chat("hi", pool_id=pool_id, shared_prefix_n_tokens=20))
    assert capped.headers["x-cached-prefix-tokens"] == "20"
    assert capped.json["opencoti"]["pool_match"] == 60
    wanted = {"pool_id": pool_id, "shared_prefix_n_tokens": 61}
    assert (await rig.ask(CHAT, chat("hi", opencoti=wanted))).json["opencoti"]["n_pool_shared"] == 60
    before = len(rig.engine.work)
    refused = await rig.ask(CHAT, chat("hi", opencoti=wanted | {"strict": True}))
    assert (refused.status, refused.error["code"]) == (400, "shared_prefix_too_long")
    assert (refused.error["matched_tokens"], refused.error["param"]) == (60, "shared_prefix_n_tokens")
    assert len(rig.engine.work) == before


async def test_without_cache_nothing_is_attached(rig):
    """Neither a lookup nor a pin."""
    pool_id = await pool_for(rig, CHAT)
    for more in (
        {"cache_prompt": False, "pool_id": pool_id},
        {"opencoti": {"cache": False, "pool_id": pool_id}},
    ):
        answer = await rig.ask(CHAT, chat("hi") | more)
        assert answer.json["opencoti"]["pool_match"] is None
    assert spy(rig).header("x-polykv-attach") is None


async def test_a_body_that_cannot_be_counted_is_the_engines_to_refuse(rig):
    """Whatever goes wrong with its tokens, the request runs as it is."""
    pool_id = await pool_for(rig, CHAT)
    for broken in ((400, b'{"error":{"message":"no"}}'), (500, b"?"), (200, b'{"input_tokens":3}')):
        rig.engine.broken["/v1/chat/completions/input_tokens"] = broken
        answer = await rig.ask(CHAT, chat("hi", pool_id=pool_id))
        assert (answer.status, answer.json["opencoti"]["pool_match"]) == (200, None)


async def test_a_mixed_prompt_runs_unpooled(rig):
    """Text among ids is for the engine to make sense of."""
    pool_id = await pool_for(rig, "/completion")
    answer = await rig.ask("/completion", {"prompt": [1, "a"], "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] is None


async def test_a_pool_that_went_while_its_request_waited_is_not_attached(rig):
    """Its number may be another pool's by then: the other one's cells are not shared by mistake."""
    pool_id = await pool_for(rig, CHAT)
    rig.engine.gate.clear()
    running = [rig.start(CHAT, chat(name)) for name in "ab"]
    await until(lambda: rig.engine.running == 2)
    waiting = rig.start(CHAT, chat("hi", pool_id=pool_id))
    await until(lambda: rig.waiting == 1)
    assert (await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")).status == 200
    rig.engine.gate.set()
    answer = await waiting
    assert answer.json["opencoti"]["pool_unknown"] is True
    assert spy(rig).header("x-polykv-attach") is None
    await asyncio.gather(*running)


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


@pytest.mark.parametrize("path", APIS)
async def test_an_engine_that_dies_mid_stream_ends_it_with_an_error_event(rig, path):
    """In the form of each API, behind complete events."""
    rig.engine.script = Script(fault="die_mid_stream")
    answer = await rig.ask(path, APIS[path] | {"stream": True, "session_id": "me"})
    assert answer.status == 200
    name, event = answer.events[-1]
    assert event["error"]["code"] == "engine_gone"
    assert name == ("error" if path in ("/v1/messages", "/v1/responses") else None)
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


# -- pools that requests find by themselves ---------------------------------------------------------------

LONG = "The agents of this test have many words in common, and only then a question of their own. " * 4
"""Enough for a pool to come by itself."""

LEADER = text(prompt=LONG + "One", session_id="leader")
DYING = Script(fault="die_in_prompt")
FOLLOWERS = [text(prompt=LONG + end, session_id=end) for end in ("Two", "Three")]


def plain(body):
    """A body without a member of ours."""
    return {key: value for key, value in body.items() if key != "session_id"}


async def led(proxies, leads=None, **options):
    """A proxy with a request that has computed 50 tokens of its prompt and goes no further."""
    rig = await proxies(slots=3, max_pools=4, **options)
    rig.engine.prefilled = 50
    rig.engine.prefill_gate.clear()
    rig.engine.script_for = lambda request: leads if b"One" in request.body else None
    leader = rig.start("/completion", LEADER)
    await until(lambda: rig.engine.running == 1)
    return rig, leader


async def following(rig, *bodies):
    """Requests that look at what the leader computes."""
    tasks = [rig.start("/completion", body) for body in bodies or FOLLOWERS]
    await until(lambda: rig.idle == 2 - len(tasks))
    await until(lambda: rig.pooling.sharing.waiting)
    return tasks


async def test_a_request_finds_the_longest_match(rig):
    """Headers tell; the body is untouched; a pool of another key is not found."""
    short = await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:100]})
    long = await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    answer = await rig.ask("/completion", text(prompt=LONG))
    assert answer.headers["x-pool-id"] == long["pool_id"]
    assert answer.headers["x-cached-prefix-tokens"] == "200"
    assert b"opencoti" not in answer.body
    assert spy(rig).header("x-polykv-attach") == "1:200"
    partly = await rig.ask("/completion", text(prompt=LONG[:150] + "x" * 200, session_id="me"))
    assert partly.json["opencoti"]["pool_match"] == 150
    assert short["pool_id"] != partly.headers["x-pool-id"]
    theirs = await rig.ask("/completion", text(prompt=LONG), Authorization="Bearer theirs")
    assert "x-pool-id" not in theirs.headers
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


@pytest.mark.parametrize(
    "body",
    [
        text(prompt=LONG, opencoti={"auto_match": False}),
        text(prompt=LONG, opencoti={"cache": False}),
        text(prompt=LONG, cache_prompt=False),
        text(prompt=[LONG, LONG]),
        text(prompt=LONG[:100]),
        text(prompt=LONG[:20], stop=["x" * 300]),
        text(prompt="different " * 30),
    ],
    ids=["no auto_match", "no cache", "no cache_prompt", "many prompts", "short", "short text", "no match"],
)
async def test_a_request_that_finds_nothing_runs_plain(rig, body):
    """Because it is not to look, or because there is nothing to gain; no header says otherwise."""
    await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    answer = await rig.ask("/completion", body)
    assert answer.status == 200
    assert "x-pool-id" not in answer.headers
    assert spy(rig).header("x-polykv-attach") is None


async def test_matching_can_be_switched_off(proxies):
    """Then only a named pool is used."""
    rig = await proxies(pools={"auto_match": False})
    await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    assert "x-pool-id" not in (await rig.ask("/completion", text(prompt=LONG))).headers


def tokenized(rig):
    """How often the engine was asked for tokens."""
    counting = ("/tokenize", "/v1/chat/completions/input_tokens")
    return sum(request.path in counting for request in rig.engine.requests)


async def test_what_has_nothing_to_gain_is_not_tokenized(rig):
    """A conversation that goes on in its slot, a short body, one that is not to be matched."""
    await rig.ask(CHAT, chat("a" * 300))
    before = tokenized(rig)
    await rig.ask(CHAT, chat("a" * 300, "b" * 300))
    await rig.ask("/completion", text(prompt="x" * 50))
    await rig.ask("/completion", text(prompt="x" * 500, opencoti={"auto_match": False}))
    assert tokenized(rig) == before
    await rig.ask("/completion", text(prompt="y" * 500))
    assert tokenized(rig) == before + 1


# -- pools that come by themselves ------------------------------------------------------------------------


async def test_a_second_conversation_makes_a_pool_of_what_it_shares(rig):
    """It rides on it already; the cells are there once, and every one has its owner."""
    await rig.ask("/completion", plain(LEADER))
    answer = await rig.ask("/completion", FOLLOWERS[0])
    (pool,) = (await rig.ask("/polykv/pools")).json["pools"]
    assert (pool["origin"], pool["prefix_len"]) == ("auto", len(LONG))
    assert answer.json["opencoti"]["n_pool_shared"] == len(LONG)
    assert rig.engine.used == len(LONG) + len("One") + len("Two")
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


async def test_conversations_of_other_keys_are_not_shared_with(rig):
    """Neither slots nor pools of another key are looked at."""
    await rig.ask("/completion", LEADER, Authorization="Bearer mine")
    answer = await rig.ask("/completion", FOLLOWERS[0], Authorization="Bearer theirs")
    assert "x-pool-id" not in answer.headers
    assert len(rig.runtime.plane.tree) == 0


@pytest.mark.parametrize("setting", [{"auto_pools": False}, {"auto_min_tokens": 1000}])
async def test_no_pool_comes_where_none_is_wanted(proxies, setting):
    """The policy is off, or the common part is too short."""
    rig = await proxies(pools=setting)
    await rig.ask("/completion", LEADER)
    await rig.ask("/completion", FOLLOWERS[0])
    assert len(rig.runtime.plane.tree) == 0


async def test_automatic_pools_take_no_more_than_their_share(proxies):
    """One of two sequence ids; another comes only when the first is out of use: nobody rests on it."""
    rig = await proxies(slots=4, pools={"grace_s": 0.0})
    for letter in "ab":
        for end in "12":
            body = text(prompt=letter * 300 + end * 30, session_id=letter + end)
            assert (await rig.ask("/completion", body)).status == 200
    assert [pool.origin for pool in rig.runtime.plane.tree] == [PoolOrigin.AUTO]
    for name in ("a1", "a2"):
        assert (await rig.ask(f"/polykv/sessions/{name}/close", {})).status == 200
    await until(lambda: not riding(rig.runtime.plane.sample))
    answer = await rig.ask("/completion", text(prompt="b" * 300 + "3" * 30))
    assert answer.headers["x-cached-prefix-tokens"] == "300"
    assert [pool.state.value for pool in rig.runtime.plane.tree] == ["evicted", "resident"]


async def test_a_first_wave_computes_the_common_part_once(proxies):
    """Those who come while the leader computes wait until it has passed what they share, then ride on it."""
    rig, leader = await led(proxies)
    followers = await following(rig)
    assert len(rig.engine.work) == 1
    assert not rig.engine.pools
    rig.engine.prefill_gate.set()
    answers = [await task for task in (leader, *followers)]
    assert [answer.json["opencoti"]["n_pool_shared"] for answer in answers] == [None, len(LONG), len(LONG)]
    assert len(rig.engine.pools) == 1
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0
    await rig.quiet()


async def test_a_leader_that_leaves_holds_nobody_up(proxies):
    """Those who waited carry on; one of them does the work."""
    rig, leader = await led(proxies)
    followers = await following(rig)
    leader.cancel()
    await until(lambda: len(rig.engine.work) > 1)
    rig.engine.prefill_gate.set()
    assert [(await task).status for task in followers] == [200, 200]
    await rig.quiet()


async def test_a_leader_that_fails_holds_nobody_up(proxies):
    """The engine breaks off before the common part is there; its followers are answered."""
    rig, leader = await led(proxies, DYING)
    followers = await following(rig)
    rig.engine.prefill_gate.set()
    assert (await leader).status == 503
    assert [(await task).status for task in followers] == [200, 200]
    await rig.quiet()


async def test_a_leader_without_progress_is_not_waited_for(proxies, monkeypatch):
    """After a while its followers run on what there is, although it still holds its slot."""
    monkeypatch.setattr(share, "NO_PROGRESS_S", 0.1)
    rig, leader = await led(proxies)
    followers = await following(rig)
    await until(lambda: len(rig.engine.work) == 3)
    assert not rig.engine.pools
    rig.engine.prefill_gate.set()
    assert [(await task).status for task in (leader, *followers)] == [200] * 3
    await rig.quiet()


async def test_a_follower_that_leaves_disturbs_nobody(proxies):
    """The wait that it shared goes on for the others."""
    rig, leader = await led(proxies)
    one, two = await following(rig)
    one.cancel()
    await until(lambda: rig.idle == 1)
    rig.engine.prefill_gate.set()
    assert (await two).json["opencoti"]["n_pool_shared"] == len(LONG)
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_stream_that_waits_for_a_leader_is_kept_alive(proxies):
    """Comments until the common part is there, then the answer."""
    rig, leader = await led(proxies, queue={"hold_grace_s": 0.01, "keepalive_s": 0.01})
    async with rig.open("/completion", FOLLOWERS[0] | {"stream": True}) as answer:
        seen = b""
        while seen.count(b":\n\n") < 3:
            seen += await answer.content.readany()
        assert seen.replace(b":\n\n", b"") == b""
        rig.engine.prefill_gate.set()
        rest = await answer.content.read()
    assert b'"n_pool_shared":%d' % len(LONG) in rest
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_wait_for_a_leader_ends_with_the_queue_time(proxies):
    """429 like any other wait, and the slot comes back."""
    rig, leader = await led(proxies, queue={"max_wait_s": 0.3})
    answer = await rig.ask("/completion", FOLLOWERS[0])
    assert (answer.status, answer.error["code"]) == (429, "queue_timeout")
    rig.engine.prefill_gate.set()
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_pool_that_cannot_be_made_is_done_without(rig):
    """The engine refuses the snapshot: the request runs as if there were nobody to share with."""
    await rig.ask("/completion", LEADER)
    rig.engine.broken["/polykv/engine/pools/0"] = (500, b"{}")
    answer = await rig.ask("/completion", FOLLOWERS[0])
    assert (answer.status, answer.json["opencoti"]["n_pool_shared"]) == (200, None)
    rig.engine.broken.clear()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    await rig.quiet()


# -- pools that come back ---------------------------------------------------------------------------------


async def test_an_evicted_pool_comes_back_for_its_request(rig):
    """It is computed first, once for all who want it; a stream is kept alive meanwhile."""
    pool_id = await pool_for(rig, "/completion")
    await rig.ask(f"/polykv/pools/{pool_id}/evict", {})
    rig.engine.pool_gate.clear()
    tasks = [rig.start("/completion", text(pool_id=pool_id, session_id=name)) for name in "ab"]
    await until(lambda: rig.pooling.materializer.waiting == 2)
    rig.engine.pool_gate.set()
    assert [(await task).json["opencoti"]["n_pool_shared"] for task in tasks] == [60, 60]
    assert len(rig.engine.pools) == 1
    await rig.quiet()


async def test_a_pool_that_does_not_come_back_is_unknown(rig):
    """The request runs all the same; the pool stays evicted."""
    pool_id = await pool_for(rig, "/completion")
    await rig.ask(f"/polykv/pools/{pool_id}/evict", {})
    rig.engine.broken["/polykv/engine/pools/0"] = (503, b"{}")
    answer = await rig.ask("/completion", text(pool_id=pool_id))
    assert (answer.status, answer.json["opencoti"]["pool_unknown"]) == (200, True)
    assert (await rig.ask(f"/polykv/pools/{pool_id}")).json["residency"] == "evicted"
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


# -- rates ------------------------------------------------------------------------------------------------


async def test_an_answer_tells_its_sessions_speed(rig):
    """As soon as enough tokens were seen: by the engine's own timings, where nobody had time to look."""
    few = (await rig.ask(CHAT, chat("a", session_id="one"))).json["opencoti"]
    assert few["session_tps"] is None
    rig.engine.script.tokens = 101
    told = (await rig.ask(CHAT, chat("a", "b", session_id="one"))).json["opencoti"]
    assert told["session_tps"] == pytest.approx(100 / 2.02, rel=0.05)
    assert told["ctx_used"] + told["ctx_headroom_tokens"] == 1024
    (session,) = rig.runtime.plane.sessions
    assert session.context_tokens == told["ctx_used"]


async def test_a_stock_engines_answers_are_read_for_their_timings(proxies):
    """Also those that carry nothing of ours; their bytes stay, and Anthropic's have none."""
    rig = await proxies(max_pools=0)
    rig.engine.script.tokens = 101
    plain = await rig.ask(CHAT, chat("a"), X_Session_Id="plain")
    assert plain.json["timings"] == rig.engine.script.timings() | {
        "prompt_n": plain.json["timings"]["prompt_n"],
        "prompt_ms": plain.json["timings"]["prompt_ms"],
    }
    stream = chat("b", stream=True, stream_options={"include_usage": True})
    await rig.ask(CHAT, stream, X_Session_Id="stream")
    messages = {"max_tokens": 9, "messages": [{"role": "user", "content": "c"}]}
    await rig.ask("/v1/messages", messages, X_Session_Id="messages")
    rates = {session.name: session.rate.tps for session in rig.runtime.plane.sessions}
    assert rates.pop("messages") is None
    assert rates == {name: pytest.approx(100 / 2.02, rel=0.05) for name in ("plain", "stream")}


async def test_several_completions_are_nobodys_speed(rig):
    """Their timings are those of one of them."""
    rig.engine.script.tokens = 101
    await rig.ask(CHAT, chat("a", n=2, session_id="one"))
    (session,) = rig.runtime.plane.sessions
    assert session.context_tokens is None


async def test_first_tokens_are_those_of_streams(rig):
    """Counted once each; a refusal is none."""
    await rig.ask(CHAT, chat("a", stream=True))
    await rig.ask(CHAT, chat("b"))
    rig.engine.script.fault = "error"
    await rig.ask(CHAT, chat("c", stream=True))
    assert sum(rig.runtime.metrics.ttft._counts) == 1
    assert rig.runtime.metrics.queries["none"] == 2
