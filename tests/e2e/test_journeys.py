"""Journeys of agents: what they compute and store, against the least that is possible."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio

from e2e.harness import Served, serve
from e2e.test_pools import SYSTEM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VERBS = ("list", "count", "move", "weigh")
TEMPLATE = Path(__file__).parents[2] / "docs" / "tutorial-tools.jinja"
SDK_KEY = {"Authorization": "Bearer none"}
"""A pool serves the key that it was created with, and the SDK sends one."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chat(served: Served, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A greedy chat."""
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **more}
    answer = await served.http.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def asked(question: str) -> list[dict[str, str]]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def test_an_agent_hands_its_context_to_three_others(clean: Served) -> None:
    """A child pool of the main agent's session: three sub-agents at once compute only their own tasks."""
    root = await clean.http.post("/polykv/pools", {"messages": asked("")[:1]})
    pool_id = root.json["pool_id"]
    question = asked("How many parcels may you promise a day?")
    main = await chat(clean, question, pool_id=pool_id, session_id="main")
    used, before = await clean.cells_used(), await clean.computed()
    child = (await clean.http.post(f"/polykv/pools/{pool_id}/fork", {"from_session": "main"})).json
    assert (child["parent"], child["branch_pos"]) == (pool_id, root.json["prefix_len"])
    assert (await clean.cells_used(), await clean.computed()) == (used, before)

    history = [*question, main["choices"][0]["message"]]
    tasks = ("Check the first rule.", "Translate it.", "Is it strict?")
    answers = await asyncio.gather(
        *(
            chat(
                clean,
                [*history, {"role": "user", "content": task}],
                pool_id=child["pool_id"],
                session_id=f"sub-{number}",
            )
            for number, task in enumerate(tasks)
        )
    )
    # all that they were told so far is in the child, the main agent's prompt at least
    shared = [answer["timings"]["cache_n"] for answer in answers]
    assert min(shared) >= main["usage"]["prompt_tokens"]
    assert shared == [answer["opencoti"]["pool_match"] for answer in answers]
    own = [answer["usage"]["prompt_tokens"] - common for answer, common in zip(answers, shared, strict=True)]
    assert await clean.computed() - before == sum(own)
    assert max(own) < 40
    listed = await clean.listing()
    assert listed["unattributed_cells"] == 0
    written = [answer["timings"]["predicted_n"] - 1 for answer in answers]
    assert listed["kv_cells_used"] == used + sum(own) + sum(written)


def toolset(name: str) -> list[dict[str, Any]]:
    """What one group can do."""
    where = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
    return [
        {
            "type": "function",
            "function": {
                "name": f"{name}_{verb}",
                "description": f"Look at the {name} and {verb} what is there.",
                "parameters": where,
            },
        }
        for verb in VERBS
    ]


async def prompt_of(served: Served, question: str, tools: list[dict[str, Any]]) -> list[int]:
    """The exact prompt of a chat with tools."""
    body = {"messages": asked(question), "tools": tools}
    return (await served.engine.post("/v1/chat/completions/input_tokens?tokens=1", body)).json["tokens"]


def common(one: list[int], other: list[int]) -> int:
    """Leading tokens on which both agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def sdk(served: Served) -> openai.AsyncOpenAI:
    """The openai SDK on our port."""
    return openai.AsyncOpenAI(base_url=f"{served.http.base}/v1", api_key="none", max_retries=0)


async def call(
    client: openai.AsyncOpenAI, question: str, tools: list[dict[str, Any]], **more: Any
) -> tuple[int, int, int]:
    """One answer of the SDK: tokens of its prompt, those of them that were cached, and those generated."""
    answer = await client.chat.completions.create(
        model="any", messages=asked(question), tools=tools, max_tokens=6, temperature=0, extra_body=more
    )
    usage = answer.usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tooled(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """A proxy whose engine renders tools: the built-in model's own template leaves them out."""
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")
    template = ("--engine-arg", "--chat-template-file", "--engine-arg", str(TEMPLATE))
    async with serve(tmp_path_factory.mktemp("tooled"), *sizes, *template) as proxy:
        yield proxy


async def test_two_groups_share_a_preamble_and_each_its_own_tools(tooled: Served) -> None:
    """A root for all, a fork for each toolset: four SDK clients at once compute every part once."""
    await tooled.clear(SDK_KEY)
    before, groups = await tooled.computed(), {}
    root = await tooled.http.post("/polykv/pools", {"messages": asked("")[:1]}, SDK_KEY)
    for name in ("harbour", "market"):
        body = {"messages": asked("")[:1], "tools": toolset(name), "label": name}
        made = await tooled.http.post(f"/polykv/pools/{root.json['pool_id']}/fork", body, SDK_KEY)
        assert made.status == 201, made.json
        groups[name] = made.json
    # each group's prefix is all that its members' prompts have in common, and leaves the root's where it must
    for name, pool in groups.items():
        one, other = [await prompt_of(tooled, question, toolset(name)) for question in ("1?", "Two?")]
        assert pool["prefix_len"] == common(one, other)
        assert pool["branch_pos"] == common(one, await prompt_of(tooled, "1?", [])) > 300
    parts = [pool["prefix_len"] - pool["branch_pos"] for pool in groups.values()]
    whole = root.json["prefix_len"] + sum(parts)
    assert await tooled.computed() - before == whole == await tooled.cells_used()

    async with sdk(tooled) as client:
        answers = await asyncio.gather(
            *(
                call(client, f"{number} is my number.", toolset(name), pool_id=pool["pool_id"])
                for name, pool in groups.items()
                for number in range(2)
            )
        )
    lengths = [pool["prefix_len"] for pool in groups.values() for _ in range(2)]
    assert [cached for _, cached, _ in answers] == lengths
    own = sum(prompt - cached for prompt, cached, _ in answers)
    assert await tooled.computed() - before == whole + own
    listed = await tooled.listing(SDK_KEY)
    assert listed["unattributed_cells"] == 0
    assert listed["kv_cells_used"] == whole + own + sum(written - 1 for _, _, written in answers)


async def test_groups_of_plain_clients_come_by_the_same_tree(tooled: Served) -> None:
    """Nobody names a pool: still the preamble and each toolset are computed and stored once."""
    await tooled.clear(SDK_KEY)
    before = await tooled.computed()
    members = [(name, f"{number} is my number.") for name in ("harbour", "market") for number in range(2)]
    prompts = [await prompt_of(tooled, question, toolset(name)) for name, question in members]
    async with sdk(tooled) as client:
        answers = [await call(client, question, toolset(name)) for name, question in members]
    tower, first, yard = (common(prompts[one], prompts[one + 1]) for one in range(3))
    assert [cached for _, cached, _ in answers] == [0, tower, first, yard]
    computed = sum(prompt - cached for prompt, cached, _ in answers)
    assert await tooled.computed() - before == computed
    listed = await tooled.listing(SDK_KEY)
    pools = [(pool["origin"], pool["prefix_len"], pool["branch_pos"]) for pool in listed["pools"]]
    assert pools == [("auto", tower, 0), ("auto", yard, first)]
    assert listed["pools"][1]["parent"] == listed["pools"][0]["pool_id"]
    assert listed["kv_cells_used"] == computed + sum(written - 1 for _, _, written in answers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """A proxy with two slots and many pools."""
    sizes = ("--parallel", "2", "--ctx-size", "8192", "--max-pools", "10")
    async with serve(tmp_path_factory.mktemp("narrow"), *sizes) as proxy:
        yield proxy


async def test_eight_sessions_on_two_slots_compute_no_more_than_what_is_theirs(narrow: Served) -> None:
    """POOL-16: whose slot was taken, whatever the order, comes back at the price of its private tokens."""
    pool = (await narrow.http.post("/polykv/pools", {"messages": asked("")[:1]})).json
    histories = [asked(f"I am {number}. May I?") for number in range(8)]
    attached = {"pool_id": pool["pool_id"], "max_tokens": 3}

    async def turn(number: int) -> int:
        answer = await chat(narrow, histories[number], session_id=f"s{number}", **attached)
        private = answer["usage"]["prompt_tokens"] - pool["prefix_len"]
        assert answer["timings"]["prompt_n"] <= private
        histories[number] += [answer["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        return private

    for _ in range(2):
        before = await narrow.computed()
        private = [await turn(number) for number in range(8)]  # in turn
        assert await narrow.computed() - before <= sum(private)
    before = await narrow.computed()
    private = await asyncio.gather(*(turn(number) for number in range(8)))  # at once
    assert await narrow.computed() - before <= sum(private)
    listed = await narrow.listing()
    assert [each["pool_id"] for each in listed["pools"]] == [pool["pool_id"]]
    assert listed["unattributed_cells"] == 0


async def test_a_snapshot_keeps_what_a_session_would_lose_with_its_slot(narrow: Served) -> None:
    """POOL-11: seven sessions on two slots, each snapshot after its turn, compute only what is new."""
    await narrow.clear()
    root = (await narrow.http.post("/polykv/pools", {"messages": asked("")[:1]})).json["pool_id"]
    saved = []
    for number in range(7):
        history = asked(f"I am {number}, and I have a question about rule {number + 3}.")
        answer = await chat(narrow, history, session_id=f"t{number}", pool_id=root)
        path, body = f"/polykv/pools/{root}/fork", {"from_session": f"t{number}"}
        made = await narrow.http.post(path, body)
        assert (made.status, made.json["prompt_tokens_computed"]) == (201, 0)
        history += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        saved.append((history, made.json["pool_id"], answer["usage"]["prompt_tokens"]))
    for number, (history, pool_id, said) in enumerate(saved):
        before = await narrow.computed()
        answer = await chat(narrow, history, session_id=f"t{number}", pool_id=pool_id)
        assert answer["timings"]["cache_n"] >= said  # all of the first turn's prompt
        new = answer["usage"]["prompt_tokens"] - answer["timings"]["cache_n"]
        assert await narrow.computed() - before == new
    assert (await narrow.listing())["unattributed_cells"] == 0
