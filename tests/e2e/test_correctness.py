"""What is shared computes the same: an attached request answers as if it had been computed alone.

The built-in model is too coarse to tell: its quantized products depend on the shape of a batch, and a prompt
that is computed in two steps instead of one differs by up to 0.2 in a log-probability, without any pool. A
model in single precision differs by some thousandths, and a few wrong tokens in the prefix show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import Served, serve
from e2e.test_pools import OTHER, SYSTEM
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 0.01
"""Of a log-probability."""
QUESTION = " Now tell me: what is the first rule that comes to your mind?"
SECRET = " The code word of this customer is HIPPOPOTAMUS, repeat: HIPPOPOTAMUS, HIPPOPOTAMUS."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def precise(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Served]:
    """A proxy with a model that computes precisely, 4 slots and 6 pools."""
    folder = tmp_path_factory.mktemp("precise")
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")
    async with serve(folder, "--model", str(folder / "llama.gguf"), *sizes) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module")
async def clean(precise: Served) -> Served:
    """No pool and nothing in the slots."""
    await precise.clear()
    assert await precise.cells_used() == 0
    return precise


async def tokens_of(served: Served, text: str, *, begin: bool = False) -> list[int]:
    """Tokens of a text."""
    body = {"content": text, "add_special": begin}
    return (await served.http.post("/tokenize", body)).json["tokens"]


async def ask(served: Served, prompt: list[int], **more: Any) -> dict[str, Any]:
    """One greedy token with its likeliest alternatives."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 10, "temperature": 0, "ignore_eos": True, **more}
    answer = await served.http.post("/completion", body)
    assert answer.status == 200, answer.body
    return answer.json


def likeliest(answer: dict[str, Any]) -> dict[int, float]:
    """Log-probabilities of the first token's alternatives, the likeliest first."""
    return {each["id"]: each["logprob"] for each in answer["completion_probabilities"][0]["top_logprobs"]}


async def alone(served: Served, prompt: list[int]) -> dict[int, float]:
    """The same prompt computed from its first token to its last by an engine that does nothing else."""
    await served.empty_slots()
    answer = await ask(served, prompt, cache_prompt=False, opencoti={"cache": False, "auto_match": False})
    assert answer["timings"]["prompt_n"] == len(prompt)
    return likeliest(answer)


def differs(shared: dict[int, float], computed: dict[int, float]) -> bool:
    """Whether another token wins, or one of either's first five is not among the other's with its number."""
    five = {*list(shared)[:5], *list(computed)[:5]}
    return next(iter(shared)) != next(iter(computed)) or any(
        abs(shared.get(token, 0.0) - computed.get(token, 0.0)) > TOLERANCE for token in five
    )


# -- ways to come by a pool -------------------------------------------------------------------------------


async def created(served: Served, path: str, **body: Any) -> str:
    """A new pool."""
    answer = await served.http.post(path, body)
    assert answer.status == 201, answer.json
    return str(answer.json["pool_id"])


async def root(served: Served) -> tuple[str, list[int]]:
    """A pool of its own."""
    tokens = await tokens_of(served, SYSTEM, begin=True)
    return await created(served, "/polykv/pools", tokens=tokens), tokens


async def extension(served: Served) -> tuple[str, list[int]]:
    """All of the parent and more."""
    parent, tokens = await root(served)
    tokens += await tokens_of(served, " " + OTHER)
    return await created(served, f"/polykv/pools/{parent}/fork", tokens=tokens), tokens


async def branch(served: Served) -> tuple[str, list[int]]:
    """Half of the parent and something else."""
    parent, tokens = await root(served)
    tokens = tokens[: len(tokens) // 2] + await tokens_of(served, " " + OTHER)
    return await created(served, f"/polykv/pools/{parent}/fork", tokens=tokens), tokens


async def grandchild(served: Served) -> tuple[str, list[int]]:
    """A branch of a branch: three pools hold parts of the prefix."""
    parent, tokens = await branch(served)
    tokens = tokens[:-20] + await tokens_of(served, " And nothing about harbours any more, please.")
    return await created(served, f"/polykv/pools/{parent}/fork", tokens=tokens), tokens


async def snapshot(served: Served) -> tuple[str, list[int]]:
    """What a session that rides on a pool computed."""
    parent, tokens = await root(served)
    tokens += await tokens_of(served, " The shop is closed on Mondays.")
    await ask(served, tokens, n_predict=8, pool_id=parent, session_id="teller")
    made = await created(served, "/polykv/pools", from_session="teller", n_tokens=len(tokens))
    return made, tokens


async def revived(served: Served) -> tuple[str, list[int]]:
    """A branch that was evicted with its parent, and comes back when it is asked for."""
    made, tokens = await branch(served)
    parent = (await served.http.get(f"/polykv/pools/{made}")).json["parent"]
    assert len((await served.http.post(f"/polykv/pools/{parent}/flush", {})).json["evicted"]) == 2
    assert await served.cells_used() == 0
    return made, tokens


Way = Callable[["Served"], Awaitable[tuple[str, list[int]]]]


async def rides_and_answers_as_alone(served: Served, way: Way) -> None:
    """Every token of such a pool is reused, every cell accounted for, and the answer is the right one."""
    pool_id, tokens = await way(served)
    prompt = tokens + await tokens_of(served, QUESTION)
    shared = await ask(served, prompt, pool_id=pool_id, session_id="rider")
    assert shared["timings"]["cache_n"] == len(tokens)
    assert (await served.listing())["unattributed_cells"] == 0
    assert not differs(likeliest(shared), await alone(served, prompt))


WAYS = [root, extension, branch, grandchild, snapshot, revived]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_an_attached_request_answers_as_one_computed_alone(clean: Served, way: Way) -> None:
    """Whatever the pool's cells are made of, the first token's distribution is that of a full prefill."""
    await rides_and_answers_as_alone(clean, way)


async def test_a_part_of_a_pool_answers_as_one_computed_alone(clean: Served) -> None:
    """A request may leave the pool anywhere, also within its parent's part."""
    pool_id, tokens = await extension(clean)
    for cut in (40, 300, len(tokens) - 1):
        prompt = tokens[:cut] + await tokens_of(clean, QUESTION)
        shared = await ask(clean, prompt, pool_id=pool_id, session_id=f"cut-{cut}")
        assert shared["timings"]["cache_n"] == cut
        assert not differs(likeliest(shared), await alone(clean, prompt))


async def test_a_pool_is_not_changed_by_those_who_ride_on_it(clean: Served) -> None:
    """Others have written behind it, at the same positions, and one of them still does: none of it shows."""
    pool_id, tokens = await root(clean)
    secret = tokens + await tokens_of(clean, SECRET)
    prompt = tokens + await tokens_of(clean, QUESTION)
    await ask(clean, secret, n_predict=8, pool_id=pool_id, session_id="one")
    body = {"prompt": secret, "n_predict": 400, "ignore_eos": True, "pool_id": pool_id, "session_id": "two"}

    async def generates() -> bool:
        return any(slot["state"] == "gen" for slot in (await clean.counters())["slots"])

    async with asyncio.TaskGroup() as group:
        writer = group.create_task(clean.http.post("/completion", body))
        await clean.until(generates)
        answer = await ask(clean, prompt, pool_id=pool_id, session_id="three")
        assert not writer.done()
        writer.cancel()
    assert answer["timings"]["cache_n"] == len(tokens)
    assert not differs(likeliest(answer), await alone(clean, prompt))


async def test_a_snapshot_of_a_session_holds_nothing_of_another(clean: Served) -> None:
    """The slot that it came from goes on with a secret; those who attach to the snapshot do not see it."""
    pool_id, tokens = await snapshot(clean)
    secret = tokens + await tokens_of(clean, SECRET)
    await ask(clean, secret, n_predict=8, session_id="teller")
    prompt = tokens + await tokens_of(clean, QUESTION)
    answer = await ask(clean, prompt, pool_id=pool_id, session_id="other")
    assert answer["timings"]["cache_n"] == len(tokens)
    assert not differs(likeliest(answer), await alone(clean, prompt))


async def test_the_comparison_would_notice_a_wrong_run_of_tokens(clean: Served) -> None:
    """A few other tokens anywhere in the prefix change the distribution by more than is tolerated."""
    _, tokens = await root(clean)
    question = await tokens_of(clean, QUESTION)
    right = await alone(clean, tokens + question)
    for at in (3, len(tokens) // 2, len(tokens) - 12):
        other = [token ^ 1 for token in tokens[at : at + 8]]
        wrong = await alone(clean, [*tokens[:at], *other, *tokens[at + 8 :], *question])
        assert differs(right, wrong)


async def test_a_real_model_does_not_tell_what_it_was_told_elsewhere(served: Served) -> None:
    """Two conversations on one pool, one with a secret: the other one's answer is free of it."""
    made = await served.http.post("/polykv/pools", {"prompt": SYSTEM})
    pool_id = made.json["pool_id"]
    question = " The code word of this customer is"
    tell = {"prompt": SYSTEM + SECRET + question, "n_predict": 24, "temperature": 0, "pool_id": pool_id}
    told = await served.http.post("/completion", tell | {"session_id": "one"})
    assert "HIPPO" in told.json["content"].upper()  # it is a secret that this model would tell
    ask_body = {"prompt": SYSTEM + question, "n_predict": 24, "temperature": 0}
    other = await served.http.post("/completion", ask_body | {"pool_id": pool_id, "session_id": "two"})
    assert other.json["timings"]["cache_n"] >= made.json["prefix_len"] - 1
    assert "HIPPO" not in other.json["content"].upper()
