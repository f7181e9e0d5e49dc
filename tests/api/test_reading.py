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


@pytest.fixture
async def rig(proxies, monkeypatch):
    """Prompts whose messages begin with a special token; pools do not come by themselves."""
    monkeypatch.setattr(reading, "MIN_BYTES", 450)
    started = await proxies(slots=3, pools={"auto_pools": False})
    started.engine.special = MARK
    started.engine.renders = lambda body: "".join(
        f"{MARK}{message['role']}: {message['content']}" for message in body["messages"]
    )
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
    assert rig.engine.of(COUNT) == []


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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("short")),
        ("/v1/messages", {"messages": [{"role": "user", "content": TURN * 9}]}),
        ("/v1/responses", {"input": TURN * 9}),
    ],
)
async def test_the_rest_is_counted_by_the_engine(rig, path, body):
    """Short prompts, and APIs whose bodies cannot be rendered alone."""
    pool = await rig.pool()
    before = len(tokenized(rig))
    await rig.ask(path, body | {"pool_id": pool["pool_id"]})
    assert len(tokenized(rig)) == before


async def test_a_model_whose_text_has_no_seams_is_read_whole(rig):
    """It is looked for once a load, and again when the engine has loaded its model again."""
    rig.engine.special = ""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    for end in ("one", "two", "three"):
        await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
        assert tokenized(rig)[-1] == rendered(rig, talk(4, end))
    assert len(rig.engine.of("/apply-template")) == 4
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
    pool = await rig.pool()
    rig.engine.broken["/apply-template"] = (400, b'{"error":{"message":"no"}}')
    answer = await rig.ask(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    assert answer.json["opencoti"]["unpooled_reason"] == "not_tokenizable"


@pytest.mark.parametrize(("status", "again"), [(503, True), (500, True), (400, False), (404, False)])
async def test_an_engine_that_was_busy_is_asked_again_for_its_seam(rig, status, again):
    """One that refuses to show it is not: its prompts are read whole."""
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    rig.engine.broken["/tokenize"] = (status, b"{}")
    await rig.ask(CHAT, talk(4, "none", pool_id=pool["pool_id"]))
    rig.engine.broken.clear()
    for end in ("one", "two"):
        await rig.ask(CHAT, talk(4, end, pool_id=pool["pool_id"]))
    assert (tokenized(rig)[-1] != rendered(rig, talk(4, "two"))) == again


async def test_nobody_waits_for_others_who_look_for_the_seam(rig, monkeypatch):
    """While one finds out, the next one's prompt is read whole."""
    found = asyncio.Event()
    look = reading.Reader._seam

    async def slowly(self):
        await found.wait()
        return await look(self)

    monkeypatch.setattr(reading.Reader, "_seam", slowly)
    pool = await rig.pool({"tokens": rig.engine.tokens_of(rendered(rig, talk(4)))})
    first = rig.start(CHAT, talk(4, "one", pool_id=pool["pool_id"]))
    await until(lambda: rig.engine.of("/apply-template"))
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
    render = rig.runtime.client.render

    async def late(body):
        text = await render(body)
        rig.runtime.plane._engine.model_identity = "another"
        return text

    monkeypatch.setattr(rig.runtime.client, "render", late)
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
