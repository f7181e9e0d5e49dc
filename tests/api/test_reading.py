"""Claims about ``api.reading``: prompts are tokenized from where they are new, if that pays."""

from __future__ import annotations

import asyncio
import json

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy.api import asked as asking
from polykv_proxy.api import reading
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.core.types import Scope

COUNT = f"{CHAT}/input_tokens"
MARK = "\x02"
TURN = "It goes on and on. " * 5


MEDIA = "\x03"
"""What a picture is in a prompt's text."""
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


def render(body):
    """A prompt whose messages begin with a special token, whatever the API."""
    first = body.get("system", body.get("instructions"))
    messages = [] if first is None else [{"role": "system", "content": first}]
    messages += body.get("messages", body.get("input", []))
    return "".join(f"{MARK}{one['role']}: {said(one['content'])}" for one in messages)


def said(content):
    """A message's text."""
    return content if isinstance(content, str) else "".join(part.get("text", MEDIA) for part in content)


@pytest.fixture
async def rig(proxies, monkeypatch):
    """An engine with such prompts, which takes pictures; pools do not come by themselves."""
    monkeypatch.setattr(reading, "MIN_BYTES", 450)
    started = await proxies(slots=3, pools={"auto_pools": False})
    started.engine.special = MARK
    started.engine.renders = render
    plain = started.engine.tokens_of
    started.engine.tokens_of = lambda text: [-1 if one == ord(MEDIA) else one for one in plain(text)]
    return started


def tokenized(rig):
    """Texts that the engine was asked to tokenize."""
    return [json.loads(one.body)["content"] for one in rig.engine.of("/tokenize")]


def talk(turns, *contents, **more):
    """A conversation."""
    return chat(*[f"{number} {TURN}" for number in range(turns)], *contents, **more)


def rendered(rig, body):
    """Its prompt."""
    return rig.engine.renders(body)


async def test_only_the_end_of_a_prompt_is_tokenized_again(rig):
    """POOL-13: what was read before is known, message by message; the plan is of the whole prompt."""
    prompt = rendered(rig, talk(4))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(prompt)})
    first = await rig.ask(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    assert tokenized(rig)[-1] == rendered(rig, talk(4, "one"))
    second = await rig.ask(CHAT, talk(4, "two", pool_id=pool["pool_id"]))
    end = tokenized(rig)[-1]
    assert rendered(rig, talk(4, "two")).endswith(end)
    assert end.startswith(MARK)
    assert len(end) < 2 * len(TURN)
    for answer in (first, second):
        assert answer.json["opencoti"]["pool_match"] == pool["prefix_len"] == len(prompt)


def other(path, body):
    """The same conversation in another API."""
    first, *rest = body.pop("messages")
    if path == "/v1/messages":
        return {**body, "system": first["content"], "messages": rest}
    return {**body, "instructions": first["content"], "input": rest}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_apis_are_read_in_parts_too(rig, path):
    """POOL-13: the engine makes the text; a conversation has the same text in each of them."""
    prompt = rendered(rig, talk(4))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(prompt)})
    for end in ("one", "two"):
        answer = await rig.ask(path, other(path, talk(4, end, pool_id=pool["pool_id"])))
        assert answer.json["opencoti"]["pool_match"] == len(prompt)
    assert prompt.endswith(tokenized(rig)[-1].removesuffix(f"{MARK}user: two"))
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)
    await rig.ask(CHAT, talk(4, "three", pool_id=pool["pool_id"]))
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)


async def test_the_text_before_a_picture_is_read_in_parts(rig):
    """POOL-19: what it is from there on, the engine says; it tokenizes that each time."""
    prompt = rendered(rig, talk(4))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(prompt)})
    for end in ("one", "two"):
        body = talk(4, end, "", "and this?", pool_id=pool["pool_id"], session_id=end)
        body["messages"][-2]["content"] = [PICTURE]
        answer = await rig.ask(CHAT, body)
        assert answer.json["opencoti"]["pool_match"] == len(prompt)
        slot = rig.runtime.plane.resident_slot(end, None)
        assert list(slot.tokens) == rig.engine.tokens_of(rendered(rig, body))
    assert tokenized(rig)[-1].endswith("two" + f"{MARK}user: ")
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)


async def test_a_plain_prompt_with_a_picture_is_the_engines_to_read(rig):
    """POOL-19: as far as it is text it is shared like any other, and read in parts."""
    text = MARK.join(f"{number} {TURN}" for number in range(5))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(text)[:300]})
    for end in ("one", "two"):
        prompt = {"prompt_string": text + end + MEDIA + "?", "multimodal_data": [""]}
        answer = await rig.ask("/completion", {"prompt": [prompt], "pool_id": pool["pool_id"]})
        assert answer.json["opencoti"]["pool_match"] == 300
        assert rig.engine.of(COUNT)[-1].json == {"prompt": prompt}
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)


async def test_plain_prompts_are_not_rendered(rig):
    """Their text is at hand."""
    text = MARK.join(f"{number} {TURN}" for number in range(5))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(text)[:300]})
    rendered_before = len(rig.engine.of("/apply-template"))
    for end in ("one", "two"):
        body = {"prompt": text + end, "pool_id": pool["pool_id"]}
        assert (await rig.ask("/completion", body)).json["opencoti"]["pool_match"] == 300
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)
    assert len(rig.engine.of("/apply-template")) - rendered_before == 1  # to find the seam


async def test_another_keys_prompts_are_not_known(rig):
    """Nor is how long it takes to read them told to others."""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    await rig.ask(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    other = {"Authorization": "Bearer other"}
    body = {"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))}
    pool = (await rig.ask("/polykv/pools", body, **other)).json
    await rig.ask(CHAT, talk(4, "two", pool_id=pool["pool_id"]), **other)
    assert tokenized(rig)[-1] == rendered(rig, talk(4, "two"))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_short_prompts_are_counted(rig, path):
    """In one step, also where the body is long."""
    pool = await rig.pool()
    for more in ({}, {"metadata": {"user": "x" * 450}}):
        body = talk(1, pool_id=pool["pool_id"], **more)
        before = len(rig.engine.of("/tokenize"))
        await rig.ask(path, body if path == CHAT else other(path, body))
        assert "one" not in "".join(tokenized(rig)[before:])


async def test_an_engine_that_does_not_show_text_is_asked_for_tokens(rig):
    """One with an older patch."""
    rig.engine.shows_text = False
    prompt = rendered(rig, talk(4))
    pool = await rig.pool({"tokens": rig.engine.tokens_of(prompt)})
    for end in ("one", "two"):
        answer = await rig.ask("/v1/messages", other("/v1/messages", talk(4, end, pool_id=pool["pool_id"])))
        assert answer.json["opencoti"]["pool_match"] == len(prompt)
    assert not [text for text in tokenized(rig) if TURN in text]


async def test_a_model_whose_text_has_no_seams_is_read_whole(rig):
    """It is looked for once a load, and again when the engine has loaded its model again."""
    rig.engine.special = ""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    for end in ("one", "two", "three"):
        before = len(rig.engine.of(COUNT))
        answer = await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
        assert answer.json["opencoti"]["pool_match"] == pool["prefix_len"]
        assert TURN in rig.engine.of(COUNT)[-1].json["messages"][-2]["content"]
    assert len(rig.engine.of(COUNT)) == before + 1
    assert len(rig.engine.of("/apply-template")) == 1
    assert not [text for text in tokenized(rig) if TURN in text]
    rig.engine.special = MARK
    rig.down()
    rig.engine.restart()
    await rig.up()
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    for end in ("one", "two"):
        await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)


async def test_a_body_that_the_engine_refuses_is_its_to_refuse(rig):
    """In its own words; nothing is remembered of it."""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    answer = await rig.ask(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    assert answer.json["opencoti"]["pool_match"] == pool["prefix_len"]
    rig.engine.broken[COUNT] = (400, b'{"error":{"message":"no"}}')
    answer = await rig.ask(CHAT, talk(4, "two", pool_id=pool["pool_id"]))
    assert answer.json["opencoti"]["unpooled_reason"] == "not_tokenizable"


@pytest.mark.parametrize(("status", "again"), [(503, True), (500, True), (400, False), (404, False)])
async def test_an_engine_that_was_busy_is_asked_again_for_its_seam(rig, status, again):
    """One that refuses to show it is not: its prompts are counted."""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    rig.engine.broken["/tokenize"] = (status, b"{}")
    await rig.ask(CHAT, talk(4, "none", pool_id=pool["pool_id"]))
    rig.engine.broken.clear()
    for end in ("one", "two"):
        await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
    assert bool([text for text in tokenized(rig) if text == rendered(rig, talk(4, "one"))]) == again


async def test_a_model_that_counts_otherwise_than_it_tokenizes_is_not_read_in_parts(rig, monkeypatch):
    """What the engine counts is what it computes."""

    def tokens_of(text):
        tokens = [ord(one) for one in text]
        return [*tokens, 1] if rig.engine.requests[-1].path == COUNT else tokens

    monkeypatch.setattr(rig.engine, "tokens_of", tokens_of)
    pool = await rig.pool({"tokens": [ord(one) for one in rendered(rig, talk(4))]})
    for end in ("one", "two"):
        await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
    assert not [text for text in tokenized(rig) if TURN in text]


async def test_nobody_waits_for_others_who_look_for_the_seam(rig, monkeypatch):
    """While one finds out, the next one's prompt is counted."""
    looking, found = asyncio.Event(), asyncio.Event()
    look = reading.Reader._seam

    async def slowly(self):
        looking.set()
        await found.wait()
        return await look(self)

    monkeypatch.setattr(reading.Reader, "_seam", slowly)
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    first = rig.start(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    await looking.wait()
    second = await rig.ask(CHAT, talk(4, "two", pool_id=pool["pool_id"]))
    assert second.json["opencoti"]["pool_match"] == pool["prefix_len"]
    assert not first.done()
    found.set()
    assert (await first).json["opencoti"]["pool_match"] == pool["prefix_len"]
    await rig.ask(CHAT, talk(4, "two", pool_id=pool["pool_id"]))
    assert len(tokenized(rig)[-1]) < 2 * len(TURN)


async def test_what_is_read_while_the_model_changes_is_not_believed(rig, monkeypatch):
    """A text of one model, in tokens of the next; nor is it remembered for either."""
    family = INFERENCE[CHAT]
    asked = asking.read(json.dumps(talk(4, "one")).encode(), family, {})
    reader = reading.Reader(rig.runtime)
    assert await reader.tokens(family, asked, Scope("")) is not None
    prompt = rig.runtime.client.prompt

    async def late(*args, **more):
        shown = await prompt(*args, **more)
        rig.runtime.plane._engine.model_identity = "another"
        return shown

    monkeypatch.setattr(rig.runtime.client, "prompt", late)
    assert await reader.tokens(family, asked, Scope("")) is None
    tokens = await reader.tokens(family, asked, Scope(""))
    assert list(tokens) == rig.engine.tokens_of(rendered(rig, talk(4, "one")))


async def test_what_a_prompt_was_for_the_model_before_is_forgotten(rig):
    """What it was for the model before is nothing that its slot holds."""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    rig.take_all()
    waiting = rig.start(CHAT, talk(4, "one", pool_id=pool["pool_id"], session_id="me"))
    await until(lambda: rig.waiting)
    assert tokenized(rig)[-1] == rendered(rig, talk(4, "one"))
    rig.down()
    rig.engine.restart()
    rig.engine.props["model_path"] = "another.gguf"
    rig.engine.tokens_of = lambda text: [1000 + ord(char) for char in text]
    await rig.up()
    assert (await waiting).status == 200
    (session,) = rig.runtime.plane.sessions
    assert not rig.runtime.plane.board.slots[session.slot].tokens
