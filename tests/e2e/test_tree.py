"""The tree on the real engine: fork, branch, snapshot, evict, and prefixes that are shared unasked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from e2e.harness import Served, serve
from e2e.test_pools import OTHER, SYSTEM, chat, make

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def tokens_of(served: Served, text: str) -> list[int]:
    """Exact tokens of a plain prompt."""
    return (await served.http.post("/tokenize", {"content": text, "add_special": True})).json["tokens"]


async def fork(served: Served, parent: str, **body: Any) -> dict[str, Any]:
    """Fork a pool."""
    answer = await served.http.post(f"/polykv/pools/{parent}/fork", body)
    assert answer.status in (200, 201), answer.json
    return answer.json


async def test_extension_computes_and_stores_only_what_is_new(clean: Served) -> None:
    """POOL-2: an extension's own part is L - D; the parent's cells gain a member and nothing is copied."""
    root = await make(clean, prompt=SYSTEM)
    before = await clean.computed()
    child = await fork(clean, root["pool_id"], tokens=await tokens_of(clean, f"{SYSTEM} {OTHER}"))
    own = child["prefix_len"] - child["branch_pos"]
    assert child["parent"] == root["pool_id"]
    assert child["branch_pos"] in (root["prefix_len"], root["prefix_len"] - 1)
    assert child["prompt_tokens_computed"] == own == await clean.computed() - before
    assert await clean.cells_used() == root["prefix_len"] + own
    body = {"prompt": f"{SYSTEM} {OTHER} And so on.", "max_tokens": 2, "pool_id": child["pool_id"]}
    answer = (await clean.http.post("/v1/completions", body)).json
    assert answer["timings"]["cache_n"] >= child["prefix_len"] - 1


async def test_branch_shares_up_to_where_it_leaves(clean: Served) -> None:
    """POOL-2: a branch below the parent's end shares [0, D) and owns the rest; both are intact afterwards."""
    root = await make(clean, prompt=SYSTEM)
    base = await tokens_of(clean, SYSTEM)
    branch = await fork(clean, root["pool_id"], tokens=base[:150] + await tokens_of(clean, OTHER))
    assert branch["branch_pos"] == 150
    listed = await clean.listing()
    assert listed["tree_depth"] == 2
    assert listed["unattributed_cells"] == 0
    own = {pool["pool_id"]: pool["own_len"] for pool in listed["pools"]}
    assert own == {root["pool_id"]: len(base), branch["pool_id"]: branch["prefix_len"] - 150}
    assert listed["kv_cells_used"] == sum(own.values())
    for pool, text in ((root, base), (branch, base[:150])):
        body = {
            "prompt": [*text, 1, 2],
            "max_tokens": 1,
            "pool_id": pool["pool_id"],
            "session_id": pool["pool_id"],
        }
        answer = (await clean.http.post("/v1/completions", body)).json
        assert answer["timings"]["cache_n"] == len(text)


async def test_contract_violation_says_which_token_and_what_to_do(clean: Served) -> None:
    """POOL-7: 409 with the first differing token, both texts, and the next moves."""
    root = await make(clean, prompt=SYSTEM)
    base = await tokens_of(clean, SYSTEM)
    wrong = [*base[:20], base[21], *base[21:60]]
    path = f"/polykv/pools/{root['pool_id']}/fork"
    refused = await clean.http.post(path, {"tokens": wrong, "branch_pos": 60})
    assert refused.status == 409
    error = refused.json["error"]
    assert (error["code"], error["first_mismatch"], error["parent_len"]) == ("prefix_mismatch", 20, len(base))
    pieces = (await clean.http.post("/detokenize", {"tokens": [base[20]]})).json["content"]
    assert error["expected_text"] == pieces
    assert error["got_token"] == base[21]
    assert set(error["next_moves"]) == {"re_root", "full_prefill"}
    suffix = await clean.http.post(path, {"tokens": base[5:40]})
    assert suffix.status == 409
    assert suffix.json["error"]["suffix_only"] is True
    assert (await clean.http.post(path, {"tokens": base, "branch_pos": len(base) + 1})).status == 400
    assert [pool["pool_id"] for pool in (await clean.listing())["pools"]] == [root["pool_id"]]


async def test_release_order(clean: Served) -> None:
    """POOL-9: a parent with children is kept; recursive drains leaves first; cells outlive ids."""
    root = await make(clean, prompt=SYSTEM)
    base = await tokens_of(clean, SYSTEM)
    child = await fork(clean, root["pool_id"], tokens=base[:200] + await tokens_of(clean, OTHER))
    path = f"/polykv/pools/{root['pool_id']}"
    refused = await clean.http("DELETE", path)
    assert refused.status == 409
    assert refused.json["error"]["children"] == [child["pool_id"]]
    body = {"prompt": [*base[:200], 5, 6], "max_tokens": 1, "pool_id": child["pool_id"]}
    assert (await clean.http.post("/v1/completions", body)).json["timings"]["cache_n"] == 200
    gone = (await clean.http("DELETE", f"{path}?recursive=1")).json
    assert gone["released"] == [child["pool_id"], root["pool_id"]]
    assert gone["cells_draining"] == 200
    listed = await clean.listing()
    assert listed["pools"] == []
    assert listed["unattributed_cells"] == 0
    await clean.empty_slots()
    assert await clean.cells_used() == 0


async def test_snapshot_of_a_session_copies_nothing(clean: Served) -> None:
    """POOL-11: from_session makes a pool of all that the slot holds, without a single cell."""
    answer = await clean.http.post("/v1/chat/completions", chat("Tell me more.", session_id="teller"))
    used, before = await clean.cells_used(), await clean.computed()
    pool = (await clean.http.post("/polykv/pools", {"from_session": "teller"})).json
    assert pool["prefix_len"] == used
    assert (await clean.cells_used(), await clean.computed()) == (used, before)
    listed = await clean.listing()
    assert listed["unattributed_cells"] == 0
    assert [each["own_len"] for each in listed["pools"]] == [used]
    again = chat("Tell me more.", pool_id=pool["pool_id"], session_id="listener")
    other = (await clean.http.post("/v1/chat/completions", again)).json
    assert other["timings"]["cache_n"] == answer.json["usage"]["prompt_tokens"] - 1
    missing = await clean.http.post("/polykv/pools", {"from_session": "nobody"})
    assert missing.status == 404


async def test_session_whose_slot_was_taken_cannot_be_snapshot(clean: Served) -> None:
    """POOL-11: 409 session_not_resident once other conversations took every slot."""
    await clean.http.post("/v1/chat/completions", chat("First", session_id="first"))
    for number in range(4):
        await clean.http.post(
            "/v1/completions", {"prompt": f"Other {number}", "max_tokens": 1, "session_id": f"o{number}"}
        )
    refused = await clean.http.post("/polykv/pools", {"from_session": "first"})
    assert refused.status == 409
    assert refused.json["error"]["code"] == "session_not_resident"


async def test_fork_from_a_session_takes_its_place_in_the_tree(clean: Served) -> None:
    """POOL-7: a snapshot of a session that runs on a pool is that pool's child and owns only the suffix."""
    root = await make(clean)
    await clean.http.post("/v1/chat/completions", chat("Hello", pool_id=root["pool_id"], session_id="rider"))
    used = await clean.cells_used()
    child = await fork(clean, root["pool_id"], from_session="rider")
    assert (child["parent"], child["branch_pos"]) == (root["pool_id"], root["prefix_len"])
    assert await clean.cells_used() == used
    listed = await clean.listing()
    assert listed["unattributed_cells"] == 0
    assert sum(pool["own_len"] for pool in listed["pools"]) == used


async def test_evicted_pool_comes_back_when_it_is_needed(clean: Served) -> None:
    """POOL-9: evict gives the cells back and keeps id and tokens; the next attach computes it again."""
    root = await make(clean)
    path = f"/polykv/pools/{root['pool_id']}"
    assert (await clean.http.post(f"{path}/evict", {})).json["cells_freed"] == root["prefix_len"]
    assert await clean.cells_used() == 0
    assert (await clean.http.get(path)).json["residency"] == "evicted"
    answer = await clean.http.post("/v1/chat/completions", chat("Back?", pool_id=root["pool_id"]))
    assert answer.json["timings"]["cache_n"] == root["prefix_len"]
    assert (await clean.http.get(path)).json["residency"] == "resident"
    await clean.http.post(f"{path}/pin", {})
    refused = await clean.http.post(f"{path}/evict", {})
    assert (refused.status, refused.json["error"]["code"]) == (409, "pool_pinned")


async def test_flush_evicts_the_subtree_and_children_come_back_with_their_parents(clean: Served) -> None:
    """POOL-9: flush takes leaves first; a child that is needed again brings its parent back."""
    root = await make(clean, prompt=SYSTEM)
    base = await tokens_of(clean, SYSTEM)
    child = await fork(clean, root["pool_id"], tokens=base[:180] + await tokens_of(clean, OTHER))
    path = f"/polykv/pools/{root['pool_id']}"
    assert (await clean.http.post(f"{path}/evict", {})).status == 409
    assert (await clean.http.post(f"{path}/flush", {})).json["evicted"] == [child["pool_id"], root["pool_id"]]
    assert await clean.cells_used() == 0
    body = {"prompt": [*base[:180], 5, 6], "max_tokens": 1, "pool_id": child["pool_id"]}
    answer = (await clean.http.post("/v1/completions", body)).json
    assert answer["timings"]["cache_n"] == 180
    listed = await clean.listing()
    assert {pool["residency"] for pool in listed["pools"]} == {"resident"}
    assert listed["unattributed_cells"] == 0
    assert next(p for p in listed["pools"] if p["pool_id"] == child["pool_id"])["branch_pos"] == 180


async def test_request_without_pool_id_rides_on_the_longest_match(clean: Served) -> None:
    """POOL-8: auto-match finds the deepest pool of the tree; the body stays untouched, headers tell."""
    root = await make(clean, prompt=SYSTEM)
    child = await fork(clean, root["pool_id"], tokens=await tokens_of(clean, f"{SYSTEM} {OTHER}"))
    answer = await clean.http.post("/v1/completions", {"prompt": f"{SYSTEM} {OTHER} Well?", "max_tokens": 1})
    assert answer.headers["x-pool-id"] == child["pool_id"]
    assert answer.json["timings"]["cache_n"] >= child["prefix_len"] - 1
    assert "opencoti" not in answer.json
    other = await clean.http.post("/v1/completions", {"prompt": f"{SYSTEM} But else.", "max_tokens": 1})
    assert other.json["timings"]["cache_n"] >= root["prefix_len"] - 1
    off = {
        "prompt": f"{SYSTEM} Off.",
        "max_tokens": 1,
        "opencoti": {"auto_match": False},
        "session_id": "off",
    }
    assert "x-pool-id" not in (await clean.http.post("/v1/completions", off)).headers


async def test_second_conversation_makes_a_pool_of_what_it_shares(clean: Served) -> None:
    """POOL-15: the second session itself benefits, and the cells are stored once from then on."""
    first = (await clean.http.post("/v1/chat/completions", chat("First question"))).json
    second = await clean.http.post("/v1/chat/completions", chat("Another one"))
    assert second.json["timings"]["cache_n"] >= 300
    assert second.json["timings"]["prompt_n"] < 40
    listed = await clean.listing()
    assert [pool["origin"] for pool in listed["pools"]] == ["auto"]
    assert second.headers["x-pool-id"] == listed["pools"][0]["pool_id"]
    assert listed["unattributed_cells"] == 0
    assert listed["kv_cells_used"] < first["usage"]["prompt_tokens"] + 60


async def test_first_wave_costs_about_one_prefill(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """POOL-15: eight plain SDK clients with one new system prompt at once compute ≤ 1.10 x the ideal."""
    async with serve(tmp_path, "--parallel", "8", "--ctx-size", "8192", "--max-pools", "4") as served:
        base = await served.computed()
        async with openai.AsyncOpenAI(
            base_url=f"{served.http.base}/v1", api_key="none", max_retries=0
        ) as client:

            async def agent(number: int) -> Any:
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"{number} is my number. What can you do for me?"},
                ]
                return await client.chat.completions.create(model="any", messages=messages, max_tokens=4)

            answers = await asyncio.gather(*(agent(number) for number in range(8)))
        assert (await served.listing())["unattributed_cells"] == 0
        listed = (await served.http.get("/polykv/pools", headers={"Authorization": "Bearer none"})).json
        length = listed["pools"][0]["prefix_len"]
        ideal = length + sum(answer.usage.prompt_tokens - length for answer in answers)
        assert await served.computed() - base <= 1.10 * ideal
