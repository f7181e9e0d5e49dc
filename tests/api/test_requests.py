"""Claims about ``api.requests``: the routes, and what whose key may see."""

import asyncio
from time import monotonic

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from api.rig import CHAT, chat, occupied, until

KEYS = {"Authorization": "Bearer mine"}
MEMBERS = {
    "request_id",
    "x_request_id",
    "trace_id",
    "session_id",
    "scope",
    "path",
    "engine",
    "slot",
    "state",
    "error_code",
    "started_ts",
    "waited_ms",
    "ttft_ms",
    "duration_ms",
    "pool_id",
    "pool_unknown",
    "continued",
    "planned_tokens",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "generated_tokens",
    "divergence",
}


async def listed(rig, query="", **headers):
    """The records that this caller sees."""
    answer = await rig.ask(f"/polykv/requests{query}", **headers)
    assert answer.status == 200, answer.body
    return answer.json["requests"]


async def test_the_last_requests(rig):
    """Latest first, each as it is under its own id."""
    assert await listed(rig) == []
    for session in ("a", "b", "a"):
        await rig.ask(CHAT, chat("hi", session_id=session))
    found = await listed(rig)
    assert [record["session_id"] for record in found] == ["a", "b", "a"]
    assert set(found[0]) == MEMBERS
    assert len({record["request_id"] for record in found}) == 3
    for record in found:
        assert (await rig.ask(f"/polykv/requests/{record['request_id']}")).json == record
    assert found[-1]["divergence"]["cause"] == "new_session"
    assert found[0]["divergence"]["section"] is None
    assert (found[0]["ttft_ms"], 0 < found[0]["waited_ms"] <= found[0]["duration_ms"]) == (None, True)


async def test_how_long_a_request_waited(proxies):
    """Until it was sent: not known before, and no more of its time is in it than that; so in the log."""
    rig, running = await occupied(proxies)
    since = monotonic()
    with capture_logs() as logged:
        waiting = rig.start(CHAT, chat("next", stream=True))
        await until(lambda: rig.waiting == 1)
        assert (await listed(rig))[0]["waited_ms"] is None
        arrived = monotonic()
        await asyncio.sleep(0.1)
        ended = monotonic()
        rig.engine.gate.set()
        await asyncio.gather(running, waiting)
    record = (await listed(rig))[0]
    assert (
        1000 * (ended - arrived) <= record["waited_ms"] <= record["ttft_ms"] <= 1000 * (monotonic() - since)
    )
    assert record["waited_ms"] in [line.get("waited_ms") for line in logged if line["event"] == "request"]


async def test_who_has_another_key_is_told_that_there_are_requests(rig):
    """How many, and nothing of them: whoever looks for a session learns no more."""
    await rig.ask(CHAT, chat("hi", session_id="a"), **KEYS)
    await rig.ask(CHAT, chat("hi", session_id="b"), **KEYS)
    for query in ("", "?session_id=a", "?session_id=none&limit=1"):
        assert (await rig.ask(f"/polykv/requests{query}")).json == {"requests": [], "other_keys_requests": 2}
    assert (await rig.ask("/polykv/requests", **KEYS)).json["other_keys_requests"] == 0
    for path in ("/polykv/sessions", "/polykv/tps"):
        found = (await rig.ask(path)).json
        assert (found["sessions"], found["other_keys_sessions"]) == ([], 2)
        assert (await rig.ask(path, **KEYS)).json["other_keys_sessions"] == 0


async def test_of_one_session_and_not_too_many(rig):
    """Both can be asked for."""
    for session in ("a", "b", "a"):
        await rig.ask(CHAT, chat("hi", session_id=session))
    everything = [record["request_id"] for record in await listed(rig)]
    assert [record["request_id"] for record in await listed(rig, "?session_id=a")] == everything[::2]
    assert [record["request_id"] for record in await listed(rig, "?limit=2")] == everything[:2]
    assert await listed(rig, "?session_id=c") == []


async def test_from_an_answer_to_its_record(rig):
    """By the id in the answer's block, or by the one that the client gave it; both in one filter."""
    block = (await rig.ask(CHAT, chat("hi", session_id="a"), X_Request_Id="mine-1")).json["opencoti"]
    streamed = (await rig.ask(CHAT, chat("hi", session_id="b", stream=True), X_Request_Id="mine-1")).body
    await rig.ask(CHAT, chat("hi"), X_Request_Id="mine-2")
    await rig.ask(CHAT, chat("hi"))
    named = await listed(rig, "?request_id=mine-1")
    assert [record["session_id"] for record in named] == ["b", "a"]
    assert {record["x_request_id"] for record in named} == {"mine-1"}
    assert named[0]["request_id"].encode() in streamed
    assert named[1]["request_id"] == block["request_id"]
    assert await listed(rig, f"?request_id={block['request_id']}") == [named[1]]
    assert (await listed(rig))[0]["x_request_id"] is None
    assert await listed(rig, "?request_id=other") == []


async def test_a_trace_leads_to_its_records(rig):
    """By its id in ``traceparent``; that field goes on to the engine."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await rig.ask(CHAT, chat("hi"), traceparent=f"00-{trace}-00f067aa0ba902b7-01")
    await rig.ask(CHAT, chat("hi"))
    (record,) = await listed(rig, f"?request_id={trace}")
    assert record["trace_id"] == trace
    assert record == (await listed(rig))[1]


async def test_every_request_is_a_line_of_the_log(rig):
    """With its ids and what became of it, but nothing that was said; no line has another request's ids."""
    with capture_logs([merge_contextvars]) as lines:
        await rig.ask(CHAT, chat("a secret", session_id="a"), X_Request_Id="mine")
        assert (await rig.ask(CHAT, chat("a secret", shared_prefix_n_tokens="x"))).status == 400
        rig.engine.gate.clear()
        leaver = rig.start(CHAT, chat("a secret", session_id="b"))
        await until(lambda: rig.engine.running == 1)
        leaver.cancel()
        await until(lambda: len([line for line in lines if line["event"] == "request"]) == 3)
        rig.engine.gate.set()
    done, refused, left = (line for line in lines if line["event"] == "request")
    records = [record["request_id"] for record in reversed(await listed(rig))]
    assert [line["request_id"] for line in (done, refused, left)] == records
    assert (done["x_request_id"], done["session_id"], done["state"], done["slot"]) == ("mine", "a", "done", 0)
    first = (await listed(rig))[-1]
    for member in ("prompt_tokens", "cached_tokens", "generated_tokens", "duration_ms"):
        assert done[member] == first[member] is not None
    assert done["divergence"] == "new_session"
    assert (refused["state"], refused["error_code"], refused["log_level"]) == (
        "failed",
        "invalid_request",
        "info",
    )
    assert (left["state"], left["session_id"]) == ("cancelled", "b")
    for line in (refused, left):
        assert not {"x_request_id", "trace_id", "generated_tokens"} & line.keys()
    assert "a secret" not in str(lines)


async def test_what_is_no_name_is_not_kept(rig):
    """Too long for a record: it runs all the same."""
    await rig.ask(CHAT, chat("hi"), X_Request_Id="x" * 300)
    assert (await listed(rig))[0]["x_request_id"] is None


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "9999999999"])
async def test_a_limit_is_a_number(rig, limit):
    """A wrong one is refused by name."""
    answer = await rig.ask(f"/polykv/requests?limit={limit}")
    assert (answer.status, answer.error["param"]) == (400, "limit")


async def test_an_id_that_is_not_known(rig):
    """Never seen, or too long ago."""
    answer = await rig.ask("/polykv/requests/req-0-1")
    assert (answer.status, answer.error["code"]) == (404, "request_not_found")


async def test_requests_are_seen_by_the_key_that_sent_them(rig):
    """Other keys see nothing of them, not even that they exist."""
    await rig.ask(CHAT, chat("hi"), **KEYS)
    (record,) = await listed(rig, **KEYS)
    assert await listed(rig) == []
    path = f"/polykv/requests/{record['request_id']}"
    assert (await rig.ask(path, **KEYS)).status == 200
    assert (await rig.ask(path)).status == 404


async def test_an_administrator_sees_all(proxies):
    """With the admin key, which is demanded where one is set."""
    rig = await proxies(admin="secret")
    await rig.ask(CHAT, chat("hi"), **KEYS)
    assert (await rig.ask("/polykv/requests")).status == 401
    assert len(await listed(rig, X_PolyKV_Admin_Key="secret")) == 1


async def test_so_many_are_kept_as_the_settings_say(proxies):
    """None, if that is what they say."""
    rig = await proxies(requests={"keep": 2})
    for _ in range(3):
        await rig.ask(CHAT, chat("hi"))
    assert [record["request_id"].rpartition("-")[2] for record in await listed(rig)] == ["3", "2"]
    rig = await proxies(requests={"keep": 0})
    await rig.ask(CHAT, chat("hi"))
    assert await listed(rig) == []
