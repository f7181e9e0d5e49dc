"""Claims about ``api.recall``: what a request is compared with, and what it costs the engine to find out."""

import asyncio

import pytest

from api.prefills import ALONE, COUNT, HISTORY, agreed, explained, last, plain, twice
from api.rig import CHAT, SYSTEM, chat, until
from polykv_proxy.api import recall
from polykv_proxy.core.divergence import Cause


@pytest.fixture
async def rig(proxies):
    """Three slots, no pools by themselves: what is reused is the slot's own."""
    started = await proxies(slots=3, pools=ALONE)
    started.engine.reuses = True
    return started


async def test_a_changed_system_prompt_is_located_afterwards(rig):
    """The request ran in another slot: its token is asked for once the answer is through."""
    one = chat(*HISTORY, session_id="me")
    other = chat(*HISTORY, session_id="me")
    other["messages"][0]["content"] = SYSTEM.replace("helper", "hunter", 1)
    found = await twice(rig, one, other)
    assert (found.cause, found.message_index) == (Cause.SYSTEM_CHANGED, 0)
    assert found.token_index == agreed(rig, plain(one), plain(other))
    assert "a helper" in found.expected_text
    assert "a hunter" in found.got_text
    assert [request.finished.is_set() for request in rig.engine.of(COUNT)] == [True, True]


async def test_unnamed_conversations_are_compared_too(rig):
    """The latest ones of the same key, and only those."""
    one, other = chat(*HISTORY), chat(*HISTORY)
    other["messages"][0]["content"] = "Today is Tuesday. " + SYSTEM
    assert (await twice(rig, one, other)).cause is Cause.SYSTEM_CHANGED
    foreign = await explained(rig, one, Authorization="Bearer foreign")
    assert foreign.cause is Cause.NEW_SESSION


async def test_evicted(rig):
    """Others took the slot; so it is with an unnamed conversation, which comes back as a new session."""
    await explained(rig, chat(*HISTORY))
    for number in range(3):
        await rig.ask(CHAT, {"messages": [{"role": "user", "content": f"Other {number}"}]})
    found = await explained(rig, chat(*HISTORY, "More."))
    assert (found.cause, found.section, found.token_index) == (Cause.EVICTED, None, None)
    assert last(rig).session_id == "auto-5"


async def test_a_request_that_displaces_its_own_conversation_did_not_find_it_evicted(proxies):
    """With one slot a changed system prompt takes the slot from what it is compared with."""
    rig = await proxies(slots=1, pools=ALONE)
    rig.engine.reuses = True
    one, other = chat(*HISTORY, session_id="me"), chat(*HISTORY, session_id="me")
    other["messages"][0]["content"] = "Today is Tuesday. " + SYSTEM
    assert (await twice(rig, one, other)).cause is Cause.SYSTEM_CHANGED


async def test_slot_lost(rig):
    """Emptied through the proxy; emptied behind its back; at work for another request."""
    body = chat(*HISTORY, session_id="me")
    await explained(rig, body)
    assert (await rig.ask("/slots/0?action=erase", {})).status == 200
    assert (await explained(rig, body)).cause is Cause.SLOT_LOST
    for slot in rig.engine.sequences:
        slot.tokens, slot.cells = [], []
    assert (await explained(rig, body)).cause is Cause.SLOT_LOST
    rig.engine.gate.clear()
    more = [rig.start(CHAT, chat(*HISTORY, text, session_id="me")) for text in ("Both", "at once")]
    await until(lambda: rig.engine.running == 2)
    rig.engine.gate.set()
    await asyncio.gather(*more)
    assert Cause.SLOT_LOST in {
        record.divergence and record.divergence.cause
        for record in rig.journal.book.latest(None, session_id=None, limit=2)
    }


async def test_a_template_that_rewrites_history(rig):
    """The messages are the same, their rendering is not: tokens show where, after the answer."""

    def renders(body):
        texts = [f"<{message['role']}>{message['content']}" for message in body["messages"]]
        return SYSTEM + f"{len(texts)} messages follow." + "".join(texts[1:])

    rig.engine.renders = renders
    found = await twice(rig, chat(*HISTORY[:1], session_id="me"), chat(*HISTORY[:2], session_id="me"))
    assert (found.cause, found.section) == (Cause.TEMPLATE_REWROTE_HISTORY, "messages")
    assert found.token_index == len(SYSTEM)
    assert found.expected_text.startswith("2 messages follow.")
    assert found.got_text.startswith("3 messages follow.")


async def test_few_explanations_ask_the_engine_at_once(rig, monkeypatch):
    """Beyond that a record stays as it is; the answer never waits."""
    monkeypatch.setattr(recall, "REFINING", 0)
    one, other = chat(*HISTORY, session_id="me"), chat(*HISTORY, session_id="me")
    other["messages"][0]["content"] = "Today is Tuesday. " + SYSTEM
    found = await twice(rig, one, other)
    assert (found.cause, found.token_index) == (Cause.SYSTEM_CHANGED, None)
    assert rig.engine.of(COUNT) == []


async def test_an_engine_that_does_not_tell_tokens_is_no_error(rig):
    """What is known stays."""
    one, other = chat(*HISTORY, session_id="me"), chat(*HISTORY, session_id="me")
    other["messages"][0]["content"] = "Today is Tuesday. " + SYSTEM
    await explained(rig, one)
    rig.engine.broken[COUNT] = (500, b"{}")
    found = await explained(rig, other)
    assert (found.cause, found.token_index) == (Cause.SYSTEM_CHANGED, None)


async def test_of_a_body_too_long_to_remember_only_hashes_are_compared(rig, monkeypatch):
    """They tell a changed message from a changed beginning, and show no text."""
    monkeypatch.setattr(recall, "BODY_LIMIT_BYTES", 10)
    one, other = (chat(*HISTORY[:2], text, session_id="me") for text in ("A third.", "Another one."))
    found = await twice(rig, one, other)
    assert (found.cause, found.section, found.expected_text) == (Cause.HISTORY_EDITED, "messages", None)
    assert found.token_index == agreed(rig, plain(one), plain(other))


async def test_a_retry_after_a_client_left_is_not_explained_by_guesses(rig):
    """How far the first one came is not known; some of it was there."""
    rig.engine.gate.clear()
    leaving = rig.start(CHAT, chat(*HISTORY, session_id="me"))
    await until(lambda: rig.engine.running)
    leaving.cancel()
    await until(lambda: last(rig).state == "cancelled")
    rig.engine.gate.set()
    await rig.quiet()
    assert await explained(rig, chat(*HISTORY, session_id="me")) is None
    assert last(rig).continued is True


async def test_what_another_engine_holds_is_not_compared_with(proxies):
    """Nothing of it could have been reused here; the record says where the request ran."""
    rig = await proxies(models=("one", "two"), pools=ALONE)
    for engine in rig.engines:
        engine.reuses = True
    body = chat(*HISTORY, session_id="me")
    for name in ("engine-0", "engine-1"):
        await rig.ask(f"{CHAT}?engine={name}", body)
        assert (last(rig).engine, last(rig).divergence.cause) == (name, Cause.NEW_SESSION)
    await rig.ask(f"{CHAT}?engine=engine-0", body)
    assert (last(rig).engine, last(rig).divergence) == ("engine-0", None)
