"""Claims about ``api.reporting``: what answers say of pools and speed, and to whom."""

import asyncio
import json
from time import monotonic

import pytest
from fake_engine import Script

from api.bodies import APIS, LAST, pool_for, spy
from api.rig import CHAT, chat, until

# -- blocks --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("a", n=2)), ("/v1/completions", {"prompt": ["a", "b"]})]
)
async def test_several_answers_are_nobodys_speed(rig, path, body):
    """Their timings are those of one of them."""
    rig.engine.script.tokens = 101
    await rig.ask(path, {**body, "session_id": "one"})
    (session,) = rig.runtime.plane.sessions
    assert (session.context_tokens, session.rate.tps) == (None, None)


async def test_first_tokens_are_those_of_streams(rig):
    """Counted once each; a refusal is none."""
    await rig.ask(CHAT, chat("a", stream=True))
    await rig.ask(CHAT, chat("b"))
    rig.engine.script.fault = "error"
    await rig.ask(CHAT, chat("c", stream=True))
    assert sum(rig.runtime.metrics.ttft._counts) == 1
    assert rig.runtime.metrics.queries["none"] == 2


async def test_an_engines_comments_are_no_first_token(rig):
    """It sends them while it computes a long prompt; a stream that ends among them had none."""
    rig.engine.script.pings = 8
    rig.engine.token_gate.clear()
    async with rig.open(CHAT, chat("a", stream=True, session_id="one")) as answer:
        assert await answer.content.readline() == b":\n"
        pinged = monotonic()
        await asyncio.sleep(0.1)
        began = monotonic()
        rig.engine.token_gate.set()
        await answer.read()
    (session,) = rig.runtime.plane.sessions
    assert session.ttft_s >= began - pinged
    (record,) = (await rig.ask("/polykv/requests")).json["requests"]
    assert record["ttft_ms"] >= 1000 * (began - pinged)
    rig.engine.script.fault = "die_mid_stream"
    await rig.ask(CHAT, chat("b", stream=True))
    assert sum(rig.runtime.metrics.ttft._counts) == 1


async def test_a_session_is_on_its_pool_while_its_first_request_runs(rig):
    """In every listing, not only once the answer proved it; the next turn goes on there without attaching."""
    pool_id = await pool_for(rig, CHAT)
    rig.engine.token_gate.clear()
    going = rig.start(CHAT, chat("hi", stream=True, pool_id=pool_id, session_id="one"))
    await until(lambda: rig.engine.running == 1)
    (session,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    (rate,) = (await rig.ask("/polykv/tps?once=1")).json["sessions"]
    assert (session["state"], session["pool_id"], rate["pool_id"]) == ("running", pool_id, pool_id)
    rig.engine.token_gate.set()
    await going
    block = (await rig.ask(CHAT, chat("hi", "go on", session_id="one"))).json["opencoti"]
    assert block["pool_id"] is None
    (session,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert (session["turns"], session["pool_id"]) == (2, pool_id)


async def test_a_stream_that_runs_has_its_first_token(rig):
    """In its record, its session and the histogram, before it is over or its client leaves; once."""
    rig.engine.script = Script(tokens=100, token_delay_s=0.05)
    async with rig.open(CHAT, chat("a", stream=True, session_id="one")) as answer:
        while b"token" not in await answer.content.readany():
            pass
        (record,) = (await rig.ask("/polykv/requests")).json["requests"]
        (session,) = (await rig.ask("/polykv/sessions")).json["sessions"]
        assert (record["state"], session["state"]) == ("running", "running")
        assert 0 < record["ttft_ms"] == session["ttft_ms"]
        assert sum(rig.runtime.metrics.ttft._counts) == 1
    await until(lambda: rig.engine.running == 0)
    (session,) = (await rig.ask("/polykv/sessions")).json["sessions"]
    (left,) = (await rig.ask("/polykv/requests")).json["requests"]
    assert left["ttft_ms"] == session["ttft_ms"] == record["ttft_ms"]
    assert sum(rig.runtime.metrics.ttft._counts) == 1
