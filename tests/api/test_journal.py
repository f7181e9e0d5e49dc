"""Claims about ``api.journal``: what requests' records say, from their arrival to their end."""

import json

import pytest
from fake_engine import Script

from api.prefills import ALONE, COUNT, HISTORY, agreed, explained, last, plain, twice
from api.rig import CHAT, SYSTEM, chat, until
from polykv_proxy.core.divergence import Cause


@pytest.fixture
async def rig(proxies):
    """Three slots, no pools by themselves: what is reused is the slot's own."""
    started = await proxies(slots=3, pools=ALONE)
    started.engine.reuses = True
    return started


async def test_a_request_from_arrival_to_end(rig):
    """It runs until its answer is through; then its record says what it took."""
    rig.engine.gate.clear()
    asking = rig.start(CHAT, chat("hi", session_id="me"))
    await until(lambda: rig.engine.running)
    record = last(rig)
    assert (record.state, record.session_id, record.continued) == ("running", "me", False)
    assert record.prompt_tokens is None
    rig.engine.gate.set()
    await asking
    assert (record.state, record.generated_tokens, record.cached_tokens) == ("done", 8, 0)
    assert record.computed_tokens == record.prompt_tokens == len(rig.engine.renders(chat("hi")))
    assert record.ttft_s is None, "an answer in one piece has no first token"
    assert record.duration_s > 0
    assert record.divergence.cause is Cause.NEW_SESSION


async def test_a_conversation_that_goes_on_diverges_from_nothing(rig):
    """The answer comes back, and one question more; nobody is asked for tokens."""
    # what the fake generates is not in its slots: as if nothing had been generated but the end
    rig.engine.script = Script(tokens=1)
    await explained(rig, chat(*HISTORY[:1], session_id="me"))
    assert await explained(rig, chat(*HISTORY[:2], session_id="me")) is None
    assert last(rig).continued is True
    assert last(rig).cached_tokens == len(rig.engine.renders(chat(*HISTORY[:1])))
    assert rig.engine.of(COUNT) == []


async def test_an_edited_history_is_told_at_once(rig):
    """In the block and in the record; the engine's count is exact, so it is asked for nothing."""
    one, other = (chat(*HISTORY[:2], text, session_id="me") for text in ("And a third.", "And a fourth."))
    await rig.ask(CHAT, one)
    answer = await rig.ask(CHAT, other)
    found = answer.json["opencoti"]["divergence"]
    assert found == {
        "token_index": agreed(rig, plain(one), plain(other)),
        "message_index": 3,
        "section": "messages",
        "expected_text": "And a third.",
        "got_text": "And a fourth.",
        "cause": "history_edited",
    }
    assert rig.engine.of(COUNT) == []


async def test_tools(rig):
    """Another order, other tools."""
    one = chat(*HISTORY, session_id="me", tools=[{"name": "a"}, {"name": "b"}])
    other = chat(*HISTORY, session_id="me", tools=[{"name": "b"}, {"name": "a"}])
    assert (await twice(rig, one, other)).cause is Cause.TOOLS_REORDERED
    assert (await explained(rig, chat(*HISTORY, session_id="me"))).cause is Cause.TOOLS_CHANGED


async def test_a_volatile_header(rig):
    """In Anthropic's system member; streams tell as well as plain answers."""
    bodies = [
        {
            "system": f"x-anthropic-billing-header: cc_version={version}; cch=ab;\n{SYSTEM}",
            "messages": [{"role": "user", "content": "hi"}],
            "session_id": "code",
            "stream": True,
        }
        for version in (1, 2)
    ]
    found = await twice(rig, *bodies, path="/v1/messages")
    assert found.cause is Cause.VOLATILE_HEADER
    assert "cc_version=2" in found.got_text


async def test_cache_disabled(rig):
    """By the client's own wish."""
    body = chat("hi", session_id="me")
    assert (await twice(rig, body, body | {"cache_prompt": False})).cause is Cause.CACHE_DISABLED


async def test_restarted(rig):
    """The engine loaded its model again."""
    body = chat("hi", session_id="me")
    await explained(rig, body)
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert (await explained(rig, body)).cause is Cause.RESTARTED


async def test_an_answer_that_comes_back_otherwise(rig):
    """As the fake's always do: they are not in its slots. What was generated is known from the stream."""
    reply = {"role": "assistant", "content": " token" * 8}
    for content, cause in ((" token" * 8, Cause.TEMPLATE_REWROTE_HISTORY), ("Else.", Cause.HISTORY_EDITED)):
        name = {"session_id": content}
        one = chat("hi", stream=True, **name)
        other = {"messages": [*one["messages"], reply | {"content": content}], **name}
        found = await twice(rig, one, other)
        assert (found.cause, found.message_index) == (cause, 2)
        assert found.token_index == len(rig.engine.renders(chat("hi")))
        assert found.got_text.startswith(content[:20] if cause is Cause.HISTORY_EDITED else "<|assistant|>")


async def test_plain_prompts(rig):
    """They go on, or are edited."""
    text = "Once upon a time there was a proxy. " * 20
    rig.engine.script = Script(tokens=1)
    body = {"prompt": text, "session_id": "me"}
    assert (await twice(rig, body, body | {"prompt": text + "And then"}, "/completion")) is None
    edited = text[:600] + "XYZ" + text[603:] + "And then"
    found = await explained(rig, body | {"prompt": edited}, "/completion")
    assert found.cause is Cause.HISTORY_EDITED


async def test_refusals_and_faults(rig):
    """The engine's and ours, before and after the answer began; a client that leaves has no error."""
    rig.engine.script = Script(fault="error", status=400)
    await rig.ask(CHAT, chat("hi"))
    assert (last(rig).state, last(rig).error_code) == ("failed", "engine_status_400")
    await rig.ask(CHAT, {**chat("hi"), "session_id": 5})
    assert (last(rig).state, last(rig).error_code, last(rig).continued) == (
        "failed",
        "invalid_request",
        None,
    )
    rig.engine.script = Script(fault="die_mid_stream")
    answer = await rig.ask(CHAT, chat("hi", stream=True))
    assert b"engine_gone" in answer.body
    assert (last(rig).state, last(rig).error_code) == ("failed", "engine_gone")
    rig.engine.script = Script()
    rig.engine.gate.clear()
    leaving = rig.start(CHAT, chat("hi"))
    await until(lambda: rig.engine.running)
    leaving.cancel()
    await until(lambda: last(rig).state != "running")
    assert (last(rig).state, last(rig).error_code) == ("cancelled", None)
    rig.engine.gate.set()
    await rig.quiet()


async def test_a_stream_whose_client_leaves_keeps_what_is_known(rig):
    """How long he waited, and what the engine did for him until it was stopped."""
    await rig.ask(CHAT, chat("before", stream=True))
    await rig.runtime.readings.take(max_age_s=0.0)
    slots = [rig.engine.sequences[number] for number in range(3)]
    earlier = sum(slot.gen_total for slot in slots)
    rig.engine.script = Script(tokens=100, token_delay_s=0.02)
    async with rig.open(CHAT, chat("hi", stream=True)) as answer:
        while b"token" not in await answer.content.readany():
            pass
    await until(lambda: last(rig).generated_tokens is not None)
    record = last(rig)
    assert (record.state, record.error_code) == ("cancelled", None)
    assert 0 < record.ttft_s < record.duration_s
    assert 0 < record.generated_tokens == sum(slot.gen_total for slot in slots) - earlier < 100
    assert record.prompt_tokens == len(rig.engine.renders(chat("hi")))
    assert record.computed_tokens == record.prompt_tokens - record.cached_tokens


async def test_an_overflow_is_named_with_its_tokens(rig):
    """As its client gets it: with its type as code, and how long the prompt was."""
    error = {
        "message": "too long",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 9031,
        "n_ctx": 8192,
    }
    rig.engine.broken[CHAT] = (400, json.dumps({"error": {"code": 400, **error}}).encode())
    await rig.ask(CHAT, chat("hi"))
    record = last(rig)
    assert (record.state, record.error_code) == ("failed", "exceed_context_size_error")
    assert (record.prompt_tokens, record.cached_tokens) == (9031, None)


async def test_a_stream_that_was_opened_before_its_refusal(proxies):
    """Its record says what its last event said."""
    rig = await proxies(slots=1, queue={"hold_grace_s": 0.01, "max_wait_s": 0.1})
    rig.engine.gate.clear()
    first = rig.start(CHAT, chat("hi"))
    await until(lambda: rig.engine.running)
    late = await rig.ask(CHAT, chat("me too", stream=True))
    assert b"queue_timeout" in late.body
    assert (last(rig).state, last(rig).error_code) == ("failed", "queue_timeout")
    rig.engine.gate.set()
    await first


async def test_other_kinds_of_work_have_records_without_a_session(rig):
    """Infill, and what the engine spreads by itself."""
    await rig.ask("/infill", {"input_prefix": "a"})
    record = last(rig)
    assert (record.path, record.session_id, record.divergence) == ("/infill", None, None)
    assert record.generated_tokens == 8


async def test_a_pool_is_named_with_what_was_planned(proxies):
    """What was asked for and what was found without asking; one that is gone is not named."""
    rig = await proxies()
    pool = await rig.pool()
    for body in (chat("hi", pool_id=pool["pool_id"]), chat("again")):
        await rig.ask(CHAT, body)
        record = last(rig)
        assert (record.pool_id, record.planned_tokens) == (pool["pool_id"], pool["prefix_len"])
        assert record.cached_tokens == pool["prefix_len"]
        assert record.pool_unknown is False
    await rig.ask(CHAT, chat("hi", pool_id="0" * 32, opencoti={"auto_match": False}))
    assert (last(rig).pool_id, last(rig).planned_tokens, last(rig).pool_unknown) == (None, None, True)
