"""Hints of real clients on the real engine: marks, groups, and prefixes that change with every request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import openai

from e2e.harness import Served, serve
from e2e.test_pools import OTHER, SYSTEM

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")
AGENTS = ("Alice", "Bob", "Carol", "Dave")
SHORT = SYSTEM[:420]
"""A system prompt of fewer tokens than a prefix needs to become a pool by itself."""
BEARER = {"Authorization": "Bearer none"}
X_API_KEY = {"X-Api-Key": "none"}
HEADER = "x-anthropic-billing-header: cc_version=2.1.101.{0}; cc_entrypoint=cli; cch=a51{1};"
MASK = {"POLYKV_POOLS__MASK_BILLING_HEADER": "true"}


def anthropic_client(served: Served) -> anthropic.AsyncAnthropic:
    """The anthropic SDK on our port."""
    return anthropic.AsyncAnthropic(base_url=served.http.base, api_key="none", max_retries=0)


def openai_client(served: Served) -> openai.AsyncOpenAI:
    """The openai SDK on our port."""
    return openai.AsyncOpenAI(base_url=f"{served.http.base}/v1", api_key="none", max_retries=0)


async def marked(client: anthropic.AsyncAnthropic, system: str, name: str) -> Any:
    """An agent that marks its system prompt, as Claude Code and LangChain do."""
    return await client.messages.create(
        model="any",
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": f"{name} is my name. What can you do for me?"}],
        max_tokens=4,
    )


async def take_all_slots(served: Served) -> None:
    """Others run in every slot: whatever the slots held is gone."""
    for number in range(4):
        messages = [{"role": "user", "content": f"{AGENTS[number]} asks something else entirely."}]
        body = {"messages": messages, "max_tokens": 1}
        assert (await served.http.post("/v1/chat/completions", body)).status == 200
    await served.quiet()


async def only_pool(served: Served, headers: dict[str, str]) -> dict[str, Any]:
    """The one pool of this key, once it is there."""
    found: list[dict[str, Any]] = []

    async def is_there() -> bool:
        found[:] = (await served.http.get("/polykv/pools", headers=headers)).json["pools"]
        return bool(found)

    await served.until(is_there)
    (pool,) = found
    return pool


async def test_agents_behind_a_mark_share_though_the_leaders_slot_was_reused(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """POOL-15: four plain SDK agents in a row compute ≤ 1.10 x the ideal; the pool ends at the mark."""
    async with serve(tmp_path, *SIZES) as served, anthropic_client(served) as client:
        computed = prompts = 0
        for name in AGENTS:
            before = await served.computed()
            answer = await marked(client, SHORT, name)
            computed += await served.computed() - before
            usage = answer.usage
            prompts += usage.input_tokens + (usage.cache_read_input_tokens or 0)
            await take_all_slots(served)
        pool = await only_pool(served, X_API_KEY)
        length = pool["prefix_len"]
        assert (pool["origin"], pool["hits"]) == ("auto", len(AGENTS) - 1)
        assert 32 <= length < 256
        ideal = length + prompts - len(AGENTS) * length
        assert computed <= 1.10 * ideal
        # it is exactly what every chat with this system prompt begins with
        body = {"messages": [{"role": "system", "content": SHORT}]}
        same = (await served.http.post("/polykv/pools", body, X_API_KEY)).json
        assert (same["pool_id"], same["created"]) == (pool["pool_id"], False)
        listed = (await served.http.get("/polykv/pools", headers=X_API_KEY)).json
        assert listed["unattributed_cells"] == 0


async def test_a_first_wave_behind_a_mark_costs_about_one_prefill(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """POOL-15: agents that start at once wait for the marked prefix, however short, and ride on it."""
    async with serve(tmp_path, *SIZES) as served, anthropic_client(served) as client:
        base = await served.computed()
        answers = await asyncio.gather(*(marked(client, SHORT, name) for name in AGENTS))
        length = (await only_pool(served, X_API_KEY))["prefix_len"]
        private = sum(
            each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) - length for each in answers
        )
        assert await served.computed() - base <= 1.10 * (length + private)


async def test_a_mark_within_a_message_ends_the_pool_there(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """A document that many questions are asked about: its tokens are shared, and no token of a question."""
    async with serve(tmp_path, *SIZES) as served, anthropic_client(served) as client:
        cached = []
        for question in ("What is it about?", "What else is in it?"):
            document = {"type": "text", "text": OTHER, "cache_control": {"type": "ephemeral"}}
            content = [document, {"type": "text", "text": f"\n\n{question}"}]
            answer = await client.messages.create(
                model="any", messages=[{"role": "user", "content": content}], max_tokens=2
            )
            cached.append(answer.usage.cache_read_input_tokens or 0)
            await take_all_slots(served)
        pool = await only_pool(served, X_API_KEY)
        assert cached[0] == 0
        # a slot that was not quite emptied may agree on the first word of the question, too
        assert 0 <= cached[1] - pool["prefix_len"] <= 4
        body = {"messages": [{"role": "user", "content": OTHER}], "max_tokens": 1}
        counted = (await served.http.post("/v1/messages/count_tokens", body)).json["input_tokens"]
        assert counted - 12 <= pool["prefix_len"] <= counted  # but for the template's end of the turn


async def test_a_group_keeps_what_its_second_conversation_shows_to_be_common(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """POOL-15: with ``prompt_cache_key`` alone, two conversations compute the common part, others ride."""
    async with serve(tmp_path, *SIZES) as served, openai_client(served) as client:
        cached, prompts, base = [], 0, 0
        computed = 0
        for name in AGENTS:
            base = await served.computed()
            answer = await client.chat.completions.create(
                model="any",
                messages=[
                    {"role": "system", "content": SHORT},
                    {"role": "user", "content": f"{name} is my name. What can you do for me?"},
                ],
                max_tokens=4,
                prompt_cache_key="agents",
            )
            computed += await served.computed() - base
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            prompts += answer.usage.prompt_tokens
            await take_all_slots(served)
        length = (await only_pool(served, BEARER))["prefix_len"]
        assert length < 256
        assert cached[2] == cached[3] == length
        assert computed <= 1.10 * (2 * length + prompts - len(AGENTS) * length)


async def chats_with_headers(served: Served) -> list[Any]:
    """Two chats that differ in their billing header and their question: Claude Code behind a gateway."""
    answers = []
    async with openai_client(served) as client:
        for number in range(2):
            system = HEADER.format(f"e5{number}", f"4{number}") + SYSTEM
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{AGENTS[number]} is my name."},
            ]
            answers.append(
                await client.chat.completions.create(
                    model="any", messages=messages, max_tokens=2, extra_body={"opencoti": {}}
                )
            )
            await served.quiet()
    return answers


async def test_a_masked_billing_header_lets_two_chats_share(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """The policy on: all of the system prompt is shared, and every answer with a block says what was done."""
    async with serve(tmp_path, *SIZES, env=MASK) as served:
        first, second = await chats_with_headers(served)
        assert second.usage.prompt_tokens_details.cached_tokens >= 0.9 * first.usage.prompt_tokens
        assert [each.model_extra["opencoti"]["billing_header_masked"] for each in (first, second)] == [
            True
        ] * 2
        advice = (await served.http.get("/polykv/advice", headers=BEARER)).json
        assert advice == {"volatile": [], "billing_header": {"masked": True, "requests_masked": 2}}
        assert len(served.events("billing_header_masked")) == 1


async def test_an_unmasked_billing_header_is_named(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """As shipped: the chats share nothing of the prompt behind it, and the advice says which part it is."""
    async with serve(tmp_path, *SIZES) as served:
        _, second = await chats_with_headers(served)
        assert second.usage.prompt_tokens_details.cached_tokens < 64
        assert "billing_header_masked" not in second.model_extra["opencoti"]
        (found,) = (await served.http.get("/polykv/advice", headers=BEARER)).json["volatile"]
        assert (found["kind"], found["section"]) == ("billing_header", "system")
        assert (found["old"], found["new"]) == ("cc_version=2.1.101.e50", "cc_version=2.1.101.e51")
        (event,) = served.events("volatile_prefix")
        assert event["remedy"] == found["remedy"]


async def messages_with_headers(served: Served) -> int:
    """Two conversations as Claude Code sends them; tokens that the second did not compute."""
    cached = 0
    async with anthropic_client(served) as client:
        for number in range(2):
            header = HEADER.format(f"e5{number}", f"4{number}")
            answer = await client.messages.create(
                model="any",
                system=[{"type": "text", "text": header}, {"type": "text", "text": SYSTEM}],
                messages=[{"role": "user", "content": f"{AGENTS[number]} is my name."}],
                max_tokens=2,
            )
            cached = answer.usage.cache_read_input_tokens or 0
            await served.quiet()
    return cached


async def test_on_messages_the_mask_takes_what_the_engine_leaves(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """The engine masks the stamp itself; the version's last part keeps conversations apart all the same."""
    async with serve(tmp_path / "off", *SIZES) as served:
        assert await messages_with_headers(served) < 64
    async with serve(tmp_path / "on", *SIZES, env=MASK) as served:
        assert await messages_with_headers(served) > 300
