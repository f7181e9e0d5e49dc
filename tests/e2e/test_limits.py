"""What happens at the ends of a context and of the cells: shared cells stay as they are."""

from __future__ import annotations

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

WINDOW = 2048
"""A slot's context: what the tiny model was made for."""
CELLS = 3 * WINDOW


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shifting(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """A proxy whose engine may shift contexts."""
    folder = tmp_path_factory.mktemp("shifting")
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", str(CELLS), "--max-pools", "4")
    words = ("--context-shift", "--threads", "1")
    args = [part for word in words for part in ("--engine-arg", word)]
    async with serve(folder, "--model", str(folder / "llama.gguf"), *sizes, *args) as proxy:
        yield proxy


def text(seed: int, count: int) -> list[int]:
    """Tokens of some text."""
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


async def write(served: Served, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    """Have so many tokens generated, if the engine can."""
    body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
    answer = await served.http.post("/completion", {**body, **more})
    assert answer.status == 200, answer.body
    return answer.json


async def test_only_a_context_without_shared_cells_shifts(shifting: Served) -> None:
    """ENG-7: riders end at the window, and so does who was snapshot; the pool is the same afterwards."""
    await shifting.clear()
    prefix, question = text(1, WINDOW - 100), text(2, 40)
    pool = (await shifting.http.post("/polykv/pools", {"tokens": prefix})).json["pool_id"]
    fresh = await write(shifting, prefix + question, 8, pool_id=pool, session_id="before")

    rider = await write(shifting, prefix + question, 200, pool_id=pool, session_id="rider")
    assert (rider["stop_type"], rider["truncated"]) == ("limit", True)
    assert rider["tokens_evaluated"] + rider["tokens_predicted"] <= WINDOW

    own = {"opencoti": {"auto_match": False}, "session_id": "alone"}
    alone = await write(shifting, text(3, WINDOW - 60), 200, **own)
    assert alone["tokens_predicted"] == 200  # it went on beyond the window

    source = text(4, WINDOW - 60)
    await write(shifting, source, 1, **{**own, "session_id": "source"})
    made = await shifting.http.post("/polykv/pools", {"from_session": "source"})
    assert made.status == 201, made.json
    goes_on = await write(shifting, source, 200, **{**own, "session_id": "source"})
    assert (goes_on["stop_type"], goes_on["truncated"]) == ("limit", True)

    again = await write(shifting, prefix + question, 8, pool_id=pool, session_id="after")
    assert again["timings"]["cache_n"] == len(prefix)
    assert again["content"] == fresh["content"]
    assert (await shifting.listing())["unattributed_cells"] == 0


async def test_a_pool_that_does_not_fit_is_refused_before_it_is_computed(shifting: Served) -> None:
    """ENG-4: nobody else loses a cell, the number comes back, and there is room again after a release."""
    await shifting.clear()
    made = [await shifting.http.post("/polykv/pools", {"tokens": text(seed, 2000)}) for seed in (5, 6, 7)]
    assert [answer.status for answer in made] == [201, 201, 201]
    assert await shifting.cells_used() == 6000
    await shifting.http("DELETE", f"/polykv/pools/{made[2].json['pool_id']}")
    small = await shifting.http.post("/polykv/pools", {"tokens": text(8, 300)})
    assert small.status == 201
    before = await shifting.computed()
    refused = await shifting.http.post("/polykv/pools", {"tokens": text(9, 2000)})
    assert refused.status == 400, refused.body
    assert refused.json["error"]["opencoti"]["ctx_kind"] == "cells"
    assert await shifting.computed() == before
    listed = await shifting.listing()
    assert (len(listed["pools"]), listed["pool_seq_ids_used"]) == (3, 3)
    assert listed["kv_cells_used"] == 4300
    await shifting.http("DELETE", f"/polykv/pools/{made[1].json['pool_id']}")
    assert (await shifting.http.post("/polykv/pools", {"tokens": text(9, 2000)})).status == 201
