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
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 2048
"""A slot's context: what the tiny model was made for."""
CELLS = 3 * WINDOW
TOLERANCE = 0.01
"""Of a log-probability, in a model of single precision."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shifting(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """A proxy whose engine may shift contexts."""
    folder = tmp_path_factory.mktemp("shifting")
    async with serving(folder, smollm, 2, "--context-shift") as proxy:
        yield proxy


def serving(folder: Path, smollm: Path, slots: int, *words: str) -> AbstractAsyncContextManager[Served]:
    """A proxy in front of a tiny model that computes precisely, with further arguments of the engine."""
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", str(slots), "--ctx-size", str(CELLS), "--max-pools", "4")
    args = [part for word in words for part in ("--engine-arg", word)]
    env = {"POLYKV_DURABLE__ENABLED": "false"}  # what is on disk comes back, which is not what is looked at
    return serve(folder, "--model", str(folder / "llama.gguf"), *sizes, *args, env=env)


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


async def likeliest(served: Served, prompt: list[int], **more: Any) -> tuple[dict[int, float], int]:
    """Log-probabilities of the next token, and how many tokens of the prompt were not computed for it.

    In this model every token of a prompt shows in them, so that a cell that moved, or is another's, does too.
    """
    # half a character has no probabilities; which token is taken does not change those of the others
    answer = await write(served, prompt, 1, n_probs=10, grammar="root ::= [a-z]+", **more)
    found = answer["completion_probabilities"][0]["top_logprobs"]
    return {each["id"]: each["logprob"] for each in found}, answer["timings"]["cache_n"]


def agree(one: dict[int, float], other: dict[int, float]) -> bool:
    """Whether the first five of one are among the other's, with the same numbers."""
    first = sorted(one, key=one.__getitem__)[-5:]
    return all(token in other and abs(one[token] - other[token]) < TOLERANCE for token in first)


OWN = {"opencoti": {"auto_match": False}}
"""Rides on no pool."""


async def test_only_a_context_without_shared_cells_shifts(shifting: Served) -> None:
    """CTX-1, CTX-2, ENG-7: riders end at the window, as does who was snapshot; the pool stays as it was."""
    await shifting.clear()
    assert any("--context-shift: sessions that share" in str(event) for event in shifting.log)
    prefix, question = text(1, WINDOW - 100), text(2, 40)
    pool = (await shifting.http.post("/polykv/pools", {"tokens": prefix})).json["pool_id"]
    fresh, cached = await likeliest(shifting, prefix + question, pool_id=pool, session_id="before")
    assert cached == len(prefix)

    rider = await write(shifting, prefix + question, 200, pool_id=pool, session_id="rider")
    assert (rider["stop_type"], rider["truncated"]) == ("limit", True)
    assert rider["tokens_evaluated"] + rider["tokens_predicted"] <= WINDOW
    assert rider["opencoti"]["context_full"] is True

    alone = await write(shifting, text(3, WINDOW - 60), 200, session_id="alone", **OWN)
    assert alone["tokens_predicted"] == 200  # it went on beyond the window

    source = text(4, WINDOW - 60)
    await write(shifting, source, 1, session_id="source", **OWN)
    made = await shifting.http.post("/polykv/pools", {"from_session": "source"})
    assert made.status == 201, made.json
    goes_on = await write(shifting, source, 200, session_id="source", **OWN)
    assert (goes_on["stop_type"], goes_on["truncated"]) == ("limit", True)

    again, cached = await likeliest(shifting, prefix + question, pool_id=pool, session_id="after")
    assert cached == len(prefix)
    assert agree(fresh, again)
    computed, cached = await likeliest(
        shifting, prefix + question, session_id="alone", cache_prompt=False, **OWN
    )
    assert cached == 0
    assert agree(computed, again)
    # the comparison would notice cells that have moved, or are another's
    moved = [*prefix[:300], *prefix[301:], prefix[300]]
    other, _ = await likeliest(shifting, moved + question, session_id="alone", cache_prompt=False, **OWN)
    assert not agree(other, again)
    assert (await shifting.listing())["unattributed_cells"] == 0


async def test_only_a_slot_without_shared_cells_moves_chunks(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """CTX-2, ENG-7: what follows a part that was cut out is computed again where it is shared."""
    assert patched.exists()
    head, middle, rest, new = text(1, 200), text(2, 150), text(3, 400), text(4, 20)
    whole, cut = [*head, *middle, *rest], [*head, *rest, *new]
    async with serving(tmp_path, smollm, 1, "--cache-reuse", "32") as served:
        assert any("--cache-reuse: sessions that share" in str(event) for event in served.log)
        await write(served, whole, 1, session_id="alone", **OWN)
        _, cached = await likeliest(served, cut, session_id="alone", **OWN)
        assert cached == len(head) + len(rest)  # moved over what is gone

        await served.empty_slots()
        pool = (await served.http.post("/polykv/pools", {"tokens": [*head, *middle]})).json["pool_id"]
        fresh, cached = await likeliest(served, whole, pool_id=pool, session_id="rider")
        assert cached == len(head) + len(middle)
        reference, cached = await likeliest(served, cut, session_id="rider", **OWN)
        assert cached == len(head)  # nothing moved
        alone, cached = await likeliest(served, cut, session_id="rider", cache_prompt=False, **OWN)
        assert cached == 0
        assert agree(reference, alone)
        again, cached = await likeliest(served, whole, pool_id=pool, session_id="rider")
        assert cached == len(head) + len(middle)
        assert agree(fresh, again)
        assert (await served.listing())["unattributed_cells"] == 0


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
