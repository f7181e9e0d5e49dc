"""A conversation is compacted by re-fork, and what is told of it on the way, on the real engine."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import Served, serve
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 4
"""Tokens that each answer has."""


def text(seed: int, count: int) -> list[int]:
    """Tokens of some text."""
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


SYSTEM, BRIEF = text(1, 200), text(2, 40)
ASK, SUMMARY, TAIL = text(3, 12), text(4, 60), text(5, 50)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Served]:
    """A tiny model with windows of 2,048 tokens."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp("compaction")
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "4")
    env = {"POLYKV_POOLS__AUTO_POOLS": "false"}
    async with serve(folder, "--model", str(folder / "llama.gguf"), *sizes, env=env) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module")
async def clean(served: Served) -> Served:
    """No pool, no session, nothing in the slots."""
    for session in (await served.http.get("/polykv/sessions")).json["sessions"]:
        name = session["session_id"].replace("#", "%23")
        await served.http.post(f"/polykv/sessions/{name}/close", {})
    await served.clear()
    assert await served.cells_used() == 0
    return served


async def turn(served: Served, prompt: list[int], **more: Any) -> dict[str, Any]:
    """A turn of the session; with ``return_tokens`` its answer is part of the next prompt."""
    body = {"prompt": prompt, "n_predict": NEW, "ignore_eos": True, "temperature": 0, "return_tokens": True}
    answer = await served.http.post("/completion", {"session_id": "worker", **body, **more})
    assert answer.status == 200, answer.json
    return answer.json


async def worker(served: Served) -> dict[str, Any]:
    """The session as it is listed."""
    await served.listing()
    (found,) = (await served.http.get("/polykv/sessions")).json["sessions"]
    return dict(found)


async def grown(served: Served) -> tuple[str, str, list[int]]:
    """A root, a branch, and a long conversation on it: their ids and its history."""
    root = (await served.http.post("/polykv/pools", {"tokens": SYSTEM, "pin": True})).json["pool_id"]
    made = await served.http.post(f"/polykv/pools/{root}/fork", {"tokens": [*SYSTEM, *BRIEF]})
    history = [*SYSTEM, *BRIEF]
    for number in range(6):
        history += text(10 + number, 120)
        said = await turn(served, history, pool_id=made.json["pool_id"])
        history += said["tokens"]
    return root, made.json["pool_id"], history


async def test_compaction_gives_back_what_the_summary_replaces(clean: Served) -> None:
    """CTX-6, POOL-12: nothing is computed but an instruction, a summary, a tail, and what is new."""
    root, branch, history = await grown(clean)
    before = await clean.cells_used()

    done = await clean.computed()
    await turn(clean, [*history, *ASK])
    # the last token that was generated is in no cell yet
    assert await clean.computed() - done == len(ASK) + 1

    short = [*SYSTEM, *SUMMARY, *TAIL]
    done = await clean.computed()
    new = (await clean.http.post(f"/polykv/pools/{root}/fork", {"tokens": short})).json
    assert (new["branch_pos"], await clean.computed() - done) == (len(SYSTEM), len(SUMMARY) + len(TAIL))
    moved = await clean.http.post("/polykv/sessions/worker/migrate", {"pool_id": new["pool_id"]})
    assert moved.status == 200, moved.json
    gone = await clean.http("DELETE", f"/polykv/pools/{branch}")
    assert (gone.json["cells_freed"], gone.json["cells_draining"]) == (len(BRIEF), 0)
    assert await clean.cells_used() == len(short) < before

    done = await clean.computed()
    said = await turn(clean, [*short, *text(6, 20)])
    assert said["opencoti"]["pool_id"] == new["pool_id"]
    assert await clean.computed() - done == 20
    assert await clean.cells_used() == len(short) + 20 + NEW - 1
    listed = await clean.listing()
    assert listed["unattributed_cells"] == 0
    assert {pool["pool_id"] for pool in listed["pools"]} == {root, new["pool_id"]}


async def test_a_compaction_may_free_before_it_forks(clean: Served) -> None:
    """CTX-6: to the root first: the fork is computed in cells that the old context had."""
    root, branch, _ = await grown(clean)
    before = await clean.cells_used()
    await clean.http.post("/polykv/sessions/worker/migrate", {"pool_id": root})
    await clean.http("DELETE", f"/polykv/pools/{branch}")
    assert await clean.cells_used() == len(SYSTEM)
    short = [*SYSTEM, *SUMMARY, *TAIL]
    new = (await clean.http.post(f"/polykv/pools/{root}/fork", {"tokens": short})).json["pool_id"]
    assert await clean.cells_used() == len(short) < before
    assert (await clean.http.post("/polykv/sessions/worker/migrate", {"pool_id": new})).status == 200
    done = await clean.computed()
    await turn(clean, [*short, *text(6, 20)])
    assert await clean.computed() - done == 20


async def test_nobody_knows_how_full_a_new_root_is_before_a_turn_is_complete_there(clean: Served) -> None:
    """CTX-7: null from the move on, refused and broken turns included, to the first one that is whole."""
    root, _, history = await grown(clean)
    assert (await worker(clean))["ctx_used"] == len(history) - 1
    short = [*SYSTEM, *SUMMARY, *TAIL]
    new = (await clean.http.post(f"/polykv/pools/{root}/fork", {"tokens": short})).json["pool_id"]
    await clean.http.post("/polykv/sessions/worker/migrate", {"pool_id": new})
    seen = await worker(clean)
    assert (seen["ctx_used"], seen["ctx_headroom_tokens"]) == (None, None)

    beyond = {"prompt": [*short, *text(7, 2048)], "n_predict": 1, "session_id": "worker"}
    refused = await clean.http.post("/completion", beyond)
    assert refused.json["error"]["type"] == "exceed_context_size_error"
    assert (await worker(clean))["ctx_used"] is None

    async with clean.http.session() as session:
        asked = {"prompt": short, "n_predict": 1500, "ignore_eos": True, "stream": True}
        async with session.post("/completion", json={**asked, "session_id": "worker"}) as running:
            assert await running.content.readline()
            (seen,) = (await clean.http.get("/polykv/sessions")).json["sessions"]
            assert (seen["state"], seen["pool_id"], seen["ctx_used"]) == ("running", new, None)
    await clean.quiet()
    assert (await worker(clean))["ctx_used"] is None

    said = await turn(clean, [*short, *text(6, 20)])
    seen = await worker(clean)
    assert (seen["pool_id"], seen["ctx_used"]) == (new, len(short) + 20 + NEW - 1)
    assert said["opencoti"]["ctx_used"] == len(short) + 20 + NEW


async def test_orphans_are_listed_and_stay_unless_a_policy_says_otherwise(clean: Served) -> None:
    """CTX-8: pinned, without sessions and children; seen in the listing, the metrics and the log."""
    root, branch, _ = await grown(clean)

    async def orphans() -> list[str]:
        await clean.listing()
        listed = (await clean.http.get("/polykv/pools?orphans=1")).json
        assert all(pool["orphaned_pin"] for pool in listed["pools"])
        assert listed["kv_cells_used"] == await clean.cells_used()
        return [pool["pool_id"] for pool in listed["pools"]]

    assert await orphans() == []  # a child, and a session on that
    await clean.http.post("/polykv/sessions/worker/close", {})
    await clean.http("DELETE", f"/polykv/pools/{branch}")
    assert await orphans() == [root]
    metrics = (await clean.http.get("/metrics")).body
    assert b"opencoti_polykv:orphaned_pins 1.0\n" in metrics

    async def told() -> bool:
        return root in [event["pool_id"] for event in clean.events("orphaned_pin")]

    await clean.until(told)
    await turn(clean, [*SYSTEM, *text(8, 10)], pool_id=root)
    assert await orphans() == []


async def test_orphans_are_swept_after_their_time(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-8: cells and sequence ids come back, from the leaf up; what a session rests on stays."""
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "4")
    env = {"POLYKV_POOLS__ORPHAN_TTL_S": "1", "POLYKV_POOLS__AUTO_POOLS": "false"}
    async with serve(tmp_path, "--model", str(tmp_path / "llama.gguf"), *sizes, env=env) as served:
        root = (await served.http.post("/polykv/pools", {"tokens": SYSTEM, "pin": True})).json["pool_id"]
        wanted = {"tokens": [*SYSTEM, *BRIEF], "pin": True}
        leaf = (await served.http.post(f"/polykv/pools/{root}/fork", wanted)).json["pool_id"]
        other = (await served.http.post("/polykv/pools", {"tokens": text(9, 100), "pin": True})).json[
            "pool_id"
        ]
        await turn(served, [*text(9, 100), *text(8, 10)], pool_id=other)

        async def left() -> list[str]:
            return [pool["pool_id"] for pool in (await served.http.get("/polykv/pools")).json["pools"]]

        async def swept() -> bool:
            return await left() == [other]

        await served.until(swept)
        released = [event["pool_id"] for event in served.events("orphan_released")]
        assert released == [leaf, root]
        await served.listing()
        counters = await served.counters()
        assert [pool["n_tokens"] for pool in counters["pools"]] == [100]
        assert counters["kv"]["n_used"] == 100 + 10 + NEW - 1
        assert b"orphans_released_total 2.0\n" in (await served.http.get("/metrics")).body
        await asyncio.sleep(0)
        assert other in await left()
