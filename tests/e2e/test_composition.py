"""Pools together with what else an engine may be told: shared is shared, and computes the same.

For each way to start an engine: a root and a branch are attached to up to their last token, and the first
token's distribution is that of a prompt computed alone; a wrong run of tokens would be noticed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import serve
from e2e.test_correctness import (
    QUESTION,
    alone,
    ask,
    branch,
    differs,
    likeliest,
    rides_and_answers_as_alone,
    root,
    tokens_of,
)
from e2e.tiny_models import adapter, llama, sliding_window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from e2e.harness import Served
    from e2e.test_correctness import Way

RUN = 64
"""Tokens that are wrong together; attention looks at few of them."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Engine:
    """A way to start one."""

    args: tuple[str, ...]
    """FOLDER stands for the folder with the models."""
    write: Callable[[Path, Path], None] = lambda path, vocabulary_of: llama(path, vocabulary_of, heads=2)


ENGINES = {
    "q8_0": Engine(("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")),
    "flash": Engine(("--flash-attn", "on")),
    "no-flash": Engine(("--flash-attn", "off")),
    "draft": Engine(("--spec-type", "draft-simple", "--model-draft", "FOLDER/model.gguf")),
    "lora": Engine(("--lora", "FOLDER/lora.gguf")),
    "swa-full": Engine(("--swa-full",), sliding_window),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def started(
    request: Any, tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[tuple[str, Served]]:
    """A proxy with such an engine, 4 slots and 6 pools; and the way's name."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp(request.param)
    way = ENGINES[request.param]
    way.write(folder / "model.gguf", smollm)
    adapter(folder / "lora.gguf")
    args = [f"--engine-arg={arg.replace('FOLDER', str(folder))}" for arg in way.args]
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")
    async with serve(folder, "--model", str(folder / "model.gguf"), *sizes, *args) as proxy:
        assert (await proxy.http.get("/props")).json["opencoti"]["capability"] == "zero_copy"
        yield request.param, proxy


@pytest_asyncio.fixture(loop_scope="module")
async def clean(started: tuple[str, Served]) -> Served:
    """No pool and nothing in the slots."""
    _, served = started
    await served.clear()
    assert await served.cells_used() == 0
    return served


@pytest.mark.parametrize("way", [root, branch], ids=lambda way: way.__name__)
async def test_an_attached_request_answers_as_one_computed_alone(clean: Served, way: Way) -> None:
    """Every token of the pool is reused, every cell accounted for, and the answer is the right one."""
    await rides_and_answers_as_alone(clean, way)


async def test_the_comparison_would_notice_a_wrong_run_of_tokens(clean: Served) -> None:
    """A tenth of the prefix, wherever it is, changes the distribution by more than is tolerated."""
    _, tokens = await root(clean)
    question = await tokens_of(clean, QUESTION)
    right = await alone(clean, tokens + question)
    for at in (0, len(tokens) // 2, len(tokens) - RUN):
        other = [(token + 3) % 900 + 20 for token in tokens[at : at + RUN]]
        assert differs(right, await alone(clean, [*tokens[:at], *other, *tokens[at + RUN :], *question]))


async def test_several_answers_to_one_prompt_share_what_they_can(clean: Served) -> None:
    """``n``: the prompt rides on the pool once, and each answer begins as one computed alone."""
    pool_id, tokens = await root(clean)
    prompt = tokens + await tokens_of(clean, QUESTION)
    body = {"prompt": prompt, "n": 3, "max_tokens": 1, "logprobs": 10, "temperature": 0, "pool_id": pool_id}
    answer = await clean.http.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert len(choices) == 3
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens)
    assert (await clean.listing())["unattributed_cells"] == 0
    right = await alone(clean, prompt)
    for choice in choices:
        (first,) = choice["logprobs"]["content"]
        assert not differs({each["id"]: each["logprob"] for each in first["top_logprobs"]}, right)


async def test_two_who_generate_on_one_pool_go_on_as_if_alone(
    started: tuple[str, Served], clean: Served
) -> None:
    """Also where tokens are drafted: only those that were accepted count, and all cells come back."""
    name, _ = started
    pool_id, tokens = await root(clean)
    prompt = tokens + await tokens_of(clean, QUESTION)
    new = 48
    before = sum(slot["n_gen_total"] for slot in (await clean.counters())["slots"])
    answers = await asyncio.gather(
        *(ask(clean, prompt, n_predict=new, pool_id=pool_id, session_id=each) for each in ("a", "b"))
    )
    counters = await clean.quiet()
    assert sum(slot["n_gen_total"] for slot in counters["slots"]) - before == 2 * new
    for answer in answers:
        assert answer["timings"]["cache_n"] == len(tokens)
        assert answer["timings"]["predicted_n"] == new
        assert ("draft_n" in answer["timings"]) == (name == "draft")
    assert (await clean.listing())["unattributed_cells"] == 0
    right = await alone(clean, prompt)
    assert all(not differs(likeliest(answer), right) for answer in answers)
    await clean.clear()
    assert await clean.cells_used() == 0


async def test_another_adapter_computes_for_itself(started: tuple[str, Served], clean: Served) -> None:
    """What was computed with other weights is not shared, and no error either; the next one shares again."""
    name, _ = started
    pool_id, tokens = await root(clean)
    prompt = tokens + await tokens_of(clean, QUESTION)
    off = [{"id": 0, "scale": 0.0}] if name == "lora" else []
    without = await ask(clean, prompt, pool_id=pool_id, session_id="without", lora=off)
    with_it = await ask(clean, prompt, pool_id=pool_id, session_id="with")
    assert with_it["timings"]["cache_n"] == len(tokens)
    if name == "lora":
        assert without["timings"]["cache_n"] == 0
        assert differs(likeliest(without), likeliest(with_it))
    else:
        assert not differs(likeliest(without), likeliest(with_it))
