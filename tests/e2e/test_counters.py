"""What the patched engine counts, and when it tells."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from e2e.harness import bare_engine

if TYPE_CHECKING:
    from pathlib import Path

TEXT = " ".join(f"Chapter {number} tells of the wind." for number in range(300))
POOLS = ("--kv-unified", "--parallel", "2", "--ctx-size", "8192", "--polykv-max-pools", "2")
WHOLE_PROMPT = ("--batch-size", "4096", "--ubatch-size", "4096")


async def test_counters_are_told_while_a_batch_is_computed(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """A prompt of one batch: between its beginning and its end they are answered again and again."""
    async with bare_engine(patched, smollm, tmp_path, *POOLS, *WHOLE_PROMPT) as engine:
        body = {"prompt": TEXT, "n_predict": 1, "cache_prompt": False}
        asked = asyncio.create_task(engine.post("/completion", body))
        looks: Counter[int] = Counter()
        while not asked.done():
            counters = (await engine.get("/polykv/engine/counters")).json
            if any(slot["state"] == "prompt" for slot in counters["slots"]):
                looks[counters["kv"]["t_us"]] += 1  # the same as long as the same batch is computed
        timings = (await asked).json["timings"]
        assert timings["prompt_n"] > 2000
        assert max(looks.values()) > 5


async def test_accepted_tokens_count_and_not_drafted_ones(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """Several tokens a step, of which some were wrong: as many are counted as the client got."""
    drafts = (
        "--spec-type",
        "ngram-simple",
        "--spec-ngram-simple-size-n",
        "2",
        "--spec-ngram-simple-size-m",
        "6",
    )
    async with bare_engine(patched, smollm, tmp_path, *POOLS, *drafts) as engine:
        assert (await engine.get("/polykv/engine")).json["speculative"] is True
        seen: Counter[str] = Counter()
        for last in ("seven", "eight", "nine"):
            words = f"one two three four five six, one two three four {last} six, one two three"
            body = {"prompt": words, "n_predict": 30, "ignore_eos": True, "temperature": 0}
            seen.update((await engine.post("/completion", body)).json["timings"])
        assert seen["predicted_n"] == 90
        assert 0 < seen["draft_n_accepted"] < seen["draft_n"]
        slots = (await engine.get("/polykv/engine/counters")).json["slots"]
        assert sum(slot["n_gen_total"] for slot in slots) == 90


async def test_slots_say_how_much_they_share(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """In the engine's own document, too."""
    async with bare_engine(patched, smollm, tmp_path, *POOLS) as engine:
        tokens = (await engine.post("/tokenize", {"content": TEXT})).json["tokens"][:100]
        made = await engine.post("/polykv/engine/pools/1?action=materialize", {"tokens": tokens})
        assert made.status == 200
        body: dict[str, Any] = {"prompt": [*tokens, *tokens[:9]], "n_predict": 2}
        headers = {"X-PolyKV-Slot": "1", "X-PolyKV-Attach": "1"}
        assert (await engine.post("/completion", body, headers)).status == 200
        shared = {slot["id"]: slot["n_pool_shared"] for slot in (await engine.get("/slots")).json}
        assert shared == {0: 0, 1: 100}
