"""Real clients, changed in nothing but their base URL."""

from __future__ import annotations

import anthropic
import openai
import pytest

from e2e.harness import Served
from e2e.test_pools import SYSTEM

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Say hello."}]


def openai_client(served: Served) -> openai.AsyncOpenAI:
    """The openai SDK on our port."""
    return openai.AsyncOpenAI(base_url=f"{served.http.base}/v1", api_key="none", max_retries=0)


async def pool_of(served: Served) -> tuple[str, int]:
    """A pool of the shared system prompt, of the scope that the SDKs' key has."""
    body = {"messages": MESSAGES[:1]}
    answer = (await served.http.post("/polykv/pools", body, {"Authorization": "Bearer none"})).json
    return answer["pool_id"], answer["prefix_len"]


async def test_openai_chat(served: Served) -> None:
    """The openai SDK reads plain and streamed chats, and sees the pool's tokens as cached."""
    pool_id, length = await pool_of(served)
    async with openai_client(served) as client:
        answer = await client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=5, extra_body={"pool_id": pool_id}
        )
        assert answer.choices[0].message.content
        assert answer.usage.prompt_tokens_details.cached_tokens >= length
        assert answer.model_extra["opencoti"]["pool_id"] == pool_id
        stream = await client.chat.completions.create(
            model="any",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"pool_id": pool_id},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reported = [chunk for chunk in chunks if "opencoti" in (chunk.model_extra or {})]
    assert len(reported) == 1
    assert reported[0].usage.prompt_tokens_details.cached_tokens >= length


async def test_openai_chat_without_anything_of_ours(served: Served) -> None:
    """A plain chat has no member of ours in it."""
    async with openai_client(served) as client:
        answer = await client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=3)
    assert "opencoti" not in (answer.model_extra or {})


async def test_openai_responses(served: Served) -> None:
    """The openai SDK reads Responses, plain and streamed."""
    pool_id, length = await pool_of(served)
    async with openai_client(served) as client:
        answer = await client.responses.create(
            model="any", instructions=SYSTEM, input="Hi", max_output_tokens=5, extra_body={"pool_id": pool_id}
        )
        assert answer.usage.input_tokens_details.cached_tokens >= length
        # the SDK's own accumulator wants members that the engine leaves out; its events are read as they come
        stream = await client.responses.create(
            model="any",
            instructions=SYSTEM,
            input="Hi",
            max_output_tokens=5,
            stream=True,
            extra_body={"pool_id": pool_id},
        )
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.completed"


async def test_openai_text_completion(served: Served) -> None:
    """The openai SDK reads legacy completions."""
    async with openai_client(served) as client:
        answer = await client.completions.create(model="any", prompt="The sea", max_tokens=4)
    assert answer.usage.completion_tokens == 4


async def test_openai_errors_keep_their_meaning(served: Served) -> None:
    """An engine's refusal arrives as the SDK's own exception, and so does one of ours."""
    async with openai_client(served) as client:
        with pytest.raises(openai.BadRequestError) as engine_says:
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "w " * 9000}]
            )
        assert engine_says.value.type == "exceed_context_size_error"
        with pytest.raises(openai.BadRequestError) as we_say:
            await client.chat.completions.create(model="any", messages=MESSAGES, extra_body={"pool_id": 5})
        assert we_say.value.param == "pool_id"


async def test_anthropic_messages(served: Served) -> None:
    """The anthropic SDK reads messages, plain and streamed, and sees the pool's tokens as cache reads."""
    body = {"messages": MESSAGES[:1]}
    pool = (await served.http.post("/polykv/pools", body, {"X-Api-Key": "none"})).json
    async with anthropic.AsyncAnthropic(base_url=served.http.base, api_key="none", max_retries=0) as client:
        asked = {
            "model": "any",
            "system": SYSTEM,
            "messages": MESSAGES[1:],
            "max_tokens": 5,
            "extra_body": {"pool_id": pool["pool_id"]},
        }
        answer = await client.messages.create(**asked)
        assert answer.usage.cache_read_input_tokens >= pool["prefix_len"]
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert kinds.count("message_delta") == 1
        assert final.content[0].text
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**{**asked, "extra_body": {"pool_id": 5}})
        assert refused.value.body["error"]["param"] == "pool_id"
