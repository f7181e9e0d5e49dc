"""Journeys of agents: what they compute and store, against the least that is possible."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.harness import Served
from e2e.test_pools import SYSTEM

VERBS = ("list", "count", "move", "weigh")

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


async def test_two_groups_share_a_preamble_and_each_its_own_part(clean: Served) -> None:
    """A root for all, a fork for each group: four members compute preamble and group parts once."""
    before = await clean.computed()
    root = (await clean.http.post("/polykv/pools", {"messages": asked("")[:1]})).json
    groups = {}
    for name in ("harbour", "market"):
        # in the text, because the built-in model's template leaves out ``tools``
        tools = [f"{name}_{verb}: look at the {name} and {verb} what is there." for verb in VERBS]
        beginning = [{"role": "system", "content": "\n".join([SYSTEM, "Your tools are:", *tools])}]
        body = {"messages": beginning, "label": name}
        made = await clean.http.post(f"/polykv/pools/{root['pool_id']}/fork", body)
        assert made.status == 201, made.json
        groups[name] = (made.json, beginning)
    parts = [pool["prefix_len"] - pool["branch_pos"] for pool, _ in groups.values()]
    # nearly all of the preamble: only what closes the root's own message is not the group's
    assert min(pool["branch_pos"] for pool, _ in groups.values()) > root["prefix_len"] - 10
    assert await clean.computed() - before == root["prefix_len"] + sum(parts) == await clean.cells_used()

    async def member(name: str, number: int) -> dict[str, Any]:
        pool, beginning = groups[name]
        messages = [*beginning, {"role": "user", "content": f"I am number {number}. What is there?"}]
        return await chat(clean, messages, pool_id=pool["pool_id"], session_id=f"{name}-{number}")

    # as many as there are slots, so that all of them are still there to be counted
    answers = await asyncio.gather(*(member(name, number) for name in groups for number in range(2)))
    own = 0
    for answer in answers:
        assert answer["timings"]["cache_n"] == answer["opencoti"]["pool_len"]
        own += answer["usage"]["prompt_tokens"] - answer["timings"]["cache_n"]
    assert await clean.computed() - before == root["prefix_len"] + sum(parts) + own
    listed = await clean.listing()
    assert listed["unattributed_cells"] == 0
    written = sum(answer["timings"]["predicted_n"] - 1 for answer in answers)
    assert listed["kv_cells_used"] == root["prefix_len"] + sum(parts) + own + written
