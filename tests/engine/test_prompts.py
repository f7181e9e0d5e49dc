"""Claims about ``engine.prompts``: tokens are the engine's own, or there are none."""

import json

import pytest
from fake_stock import FakeStock

from polykv_proxy.core.types import MEDIUM
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.prompts import shown, tokens_of
from polykv_proxy.errors import BadRequestError

CHAT = "/v1/chat/completions/input_tokens"
RESPONSES = "/v1/responses/input_tokens"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}


@pytest.fixture
async def engine():
    """One without the patch, that could take images."""
    async with FakeStock() as engine:
        engine.props |= {"modalities": {"vision": True}, "media_marker": "<m>"}
        yield engine


async def tokens(engine, body, path=CHAT, *, media=False):
    """What is found out of a body; what is shown of it says the same."""
    raw = json.dumps(body).encode()
    async with EngineClient(EngineAddress.parse(engine.address), None) as client:
        found = await tokens_of(client, path, raw, media=media)
        prompt = await shown(client, path, raw, media=media)
    assert (found is None) == (prompt is None)
    if prompt is not None:
        assert list(found) == [*ids(prompt.text or ""), *prompt.tokens]
    return None if found is None else list(found)


def ids(text):
    """As the fake engine tokenizes it."""
    return [ord(char) for char in text]


async def test_a_chat_is_rendered_and_tokenized(engine):
    """By the engine, both."""
    assert await tokens(engine, HELLO) == ids("<|user|>hello")


async def test_media_are_one_position_behind_the_text_before_them(engine):
    """Where the engine takes any; what stands for one in the rendered text is no text then."""
    engine.renders = lambda _body: "before<m>behind"
    assert await tokens(engine, PICTURE, media=True) == [*ids("before"), MEDIUM]
    assert await tokens(engine, PICTURE) == ids("before<m>behind")
    assert await tokens(engine, HELLO, media=True) == ids("before<m>behind")


async def test_a_multimodal_prompt_is_text_already(engine):
    """The engine is not asked to render it."""
    body = {"prompt": {"prompt_string": "before<m>behind", "multimodal_data": [""]}}
    assert await tokens(engine, body, media=True) == [*ids("before"), MEDIUM]
    assert not engine.of("/apply-template")


async def test_what_only_looks_like_media_is_text(engine):
    """Nothing in the rendered prompt stands for one."""
    engine.renders = lambda _body: "no picture"
    assert await tokens(engine, PICTURE, media=True) == ids("no picture")


async def test_a_responses_body_is_a_chat_if_the_engine_counts_as_many_tokens(engine):
    """Else nobody knows what the engine makes of it."""
    body = {"instructions": "Be brief.", "input": "hello"}
    assert await tokens(engine, body, RESPONSES) == ids("<|system|>Be brief.<|user|>hello")
    engine.broken[RESPONSES] = (200, b'{"input_tokens":3}')
    assert await tokens(engine, body, RESPONSES) is None
    assert await tokens(engine, body | {"tools": [{"type": "function"}]}, RESPONSES) is None


async def test_those_of_another_api_cannot_be_had(engine):
    """And the engine is not asked."""
    assert await tokens(engine, HELLO, "/v1/messages/count_tokens") is None
    assert not engine.of("/apply-template")


async def test_a_body_that_the_engine_refuses_is_refused(engine):
    """In its words."""
    engine.broken["/apply-template"] = (400, b'{"error":{"message":"no such role"}}')
    with pytest.raises(BadRequestError, match="no such role"):
        await tokens(engine, HELLO)
