"""Claims about ``api.reading``: prompts are tokenized from where they are new, if that pays."""

from __future__ import annotations

import json

import pytest

from api.rig import CHAT, chat
from polykv_proxy.api import reading

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
