"""Admission on the real engine: the cells are never used up, and policies do what they say."""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from test_metrics import parsed

from e2e.harness import PATIENCE_S, Served, serve
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CELLS = 1024
PROMPT = 130
NEW = 700
"""One fits, two do not."""

LOOK_S = 0.02

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "50"))
"""Of more requests than there are cells for; a second each. Set 200 to be thorough."""


def words(seed: int, count: int) -> list[int]:
    """Tokens of some text."""
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


async def write(served: Served, seed: int, *, prompt: int = PROMPT, new: int = NEW, **more: Any) -> Any:
    """A request that generates ``new`` tokens, if the engine can."""
    body = {"prompt": words(seed, prompt), "n_predict": new, "ignore_eos": True, "temperature": 0}
    return await served.http.post("/completion", {**body, **more})


def whole(answer: Any, new: int = NEW, *, stream: bool = False) -> bool:
    """Whether an answer is as long as it was asked for."""
    if answer.status != 200:
        return False
    last = answer.events[-1] if stream else answer.json
    return "error" not in last and (last["tokens_predicted"], last["truncated"]) == (new, False)


async def peak(served: Served, until: asyncio.Future[Any]) -> int:
    """Most cells that were used until something was over."""
    most = 0
    while not until.done():
        most = max(most, await served.cells_used())
        await asyncio.sleep(LOOK_S)
    return most


async def nothing_was_lost(served: Served, *, cleared: bool = True) -> None:
    """The engine's own valve ended nobody.

    Args:
        served: the proxy.
        cleared: whether it may have cleared idle slots, which costs speed only: a model that fills the cache
            in a second is faster than the proxy can look.
    """
    counted = (await served.counters()).get("overflow")
    if counted is not None:
        ours = ("n_ended", "n_refused") if cleared else ("n_ended", "n_refused", "n_slots_cleared")
        assert {counted[name] for name in ours} == {0}, counted


def _sizes(folder: Path, vocabulary_of: Path, slots: int, cells: int) -> tuple[str, ...]:
    """Arguments of a proxy for a model that writes thousands of tokens a second."""
    llama(folder / "llama.gguf", vocabulary_of)
    return (
        "--model",
        str(folder / "llama.gguf"),
        "--parallel",
        str(slots),
        "--ctx-size",
        str(cells),
        "--max-pools",
        "2",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """Four slots, with cells for one request."""
    folder = tmp_path_factory.mktemp("small")
    async with serve(folder, *_sizes(folder, smollm, 4, CELLS)) as proxy:
        yield proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quick(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """Eight slots, with cells for seven small requests."""
    folder = tmp_path_factory.mktemp("quick")
    async with serve(folder, *_sizes(folder, smollm, 8, 2048)) as proxy:
        yield proxy


async def test_more_requests_than_there_are_cells_for_are_all_answered_whole(small: Served) -> None:
    """ADM-6: they wait for each other's cells as for a slot; nobody's context is exceeded."""
    for round_ in range(ROUNDS):
        dice = random.Random(round_)
        streams = [dice.random() < 0.3 for _ in range(dice.choice((3, 4, 4, 6)))]
        asked = (write(small, 10 * round_ + at, stream=stream) for at, stream in enumerate(streams))
        for stream, answer in zip(streams, await asyncio.gather(*asked), strict=True):
            assert whole(answer, stream=stream), (round_, answer.status, answer.body[-400:])
    await nothing_was_lost(small)


async def test_a_real_model_is_never_faster_than_its_ledger(
    tmp_path: Path, patched: Path, smollm: Path
) -> None:
    """ADM-6: on the built-in model, half as large; the proxy frees idle slots before the engine has to."""
    new = NEW // 2
    sizes = ("--parallel", "4", "--ctx-size", str(CELLS // 2), "--max-pools", "2")
    async with serve(tmp_path, *sizes) as proxy:
        for round_ in range(3):
            asked = (write(proxy, 10 * round_ + at, prompt=65, new=new, stream=at == 0) for at in range(3))
            for at, answer in enumerate(await asyncio.gather(*asked)):
                assert whole(answer, new, stream=at == 0), (round_, answer.status, answer.body[-400:])
        await nothing_was_lost(proxy, cleared=False)


async def test_many_rounds_of_overcommitment_end_nobody_early(quick: Served) -> None:
    """Long and short ones, streams and plain answers, none longer than the policy expects at most."""
    dice = random.Random(5)

    async def one(seed: int) -> None:
        new = dice.choice((10, 150, 500, 1000))
        stream = dice.random() < 0.5
        answer = await write(quick, seed, prompt=dice.choice((20, 130, 300)), new=new, stream=stream)
        assert answer.status == 200, answer.body
        last = answer.events[-1] if stream else answer.json
        assert "error" not in last, (new, last)
        assert (last["tokens_predicted"], last["stop_type"]) == (new, "limit"), last

    for round_ in range(6):
        await asyncio.gather(*(one(100 * round_ + number) for number in range(12)))
    await nothing_was_lost(quick)


async def test_the_cells_are_put_to_use(quick: Served) -> None:
    """ADM-6: small requests fill 85 % of the cells at their peak, and none is ended early."""
    await quick.clear()
    work = asyncio.gather(*(write(quick, seed, prompt=100, new=150) for seed in range(64)))
    async with asyncio.timeout(PATIENCE_S):
        most = await peak(quick, work)
    short = [(answer.status, answer.body[-300:]) for answer in await work if not whole(answer, 150)]
    assert not short
    assert most >= 0.85 * 2048
    await nothing_was_lost(quick)


async def test_a_prompt_for_which_there_are_no_cells_is_told_so(small: Served) -> None:
    """CTX-4: a pinned pool leaves too little; the figures say how little."""
    pool = (await small.http.post("/polykv/pools", {"tokens": words(50, 600), "pin": True})).json["pool_id"]
    answer = await write(small, 60, prompt=600, new=10)
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
    figures = error["opencoti"]
    assert (figures["required_tokens"], figures["ctx_kind"]) == (600, "cells")
    assert 300 < figures["ctx_size"] < CELLS - 600
    await small.http("DELETE", f"/polykv/pools/{pool}")
    assert whole(await write(small, 60, prompt=600, new=10), 10)


# -- policies ---------------------------------------------------------------------------------------------

HELD = 1300
"""Cells of a pinned pool; what it leaves is less than the policy below wants to stay free."""

POLICY = {"kv_headroom_ratio": 0.6, "settle_max_ms": 0}
KEY = {"Authorization": "Bearer none"}
"""What both SDKs send, each in its way."""

MESSAGES: Any = [{"role": "user", "content": "Say something about rivers."}]


@pytest_asyncio.fixture(loop_scope="module")
async def crowded(quick: Served) -> AsyncIterator[tuple[Served, str, str]]:
    """A proxy without room for another session of a pool; that pool, and the one that is in the way."""
    await quick.clear()
    pool = (await quick.http.post("/polykv/pools", {"tokens": words(70, 40)}, KEY)).json["pool_id"]
    large = {"tokens": words(71, HELD), "pin": True}
    held = (await quick.http.post("/polykv/pools", large, KEY)).json["pool_id"]
    yield quick, pool, held
    await quick.clear(KEY)


async def enforce(served: Served, pool: str, **keys: Any) -> None:
    """Say what holds for the pool."""
    answer = await served.http.post(f"/polykv/pools/{pool}/admission", {**POLICY, **keys}, KEY)
    assert answer.status == 200, answer.body


@asynccontextmanager
async def clients(served: Served, *, retries: int = 0) -> AsyncIterator[tuple[AsyncOpenAI, AsyncAnthropic]]:
    """The two SDKs, closed at the end: what is left open breaks some other test."""
    async with (
        AsyncOpenAI(base_url=served.http.base + "/v1", api_key="none", max_retries=retries) as chat,
        AsyncAnthropic(base_url=served.http.base, api_key="none", max_retries=retries) as messages,
    ):
        yield chat, messages


async def ask_both(served: Served, pool: str) -> list[Any]:
    """A raw answer of each SDK."""
    async with clients(served) as (chat, messages):
        one = await chat.chat.completions.with_raw_response.create(
            model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
        )
        other = await messages.messages.with_raw_response.create(
            model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
        )
    return [one, other]


async def both_refused(served: Served, pool: str) -> list[Any]:
    """What each SDK makes of a refusal."""
    async with clients(served) as (chat, messages):
        with pytest.raises(openai.RateLimitError) as one:
            await chat.chat.completions.create(
                model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
            )
        with pytest.raises(anthropic.RateLimitError) as other:
            await messages.messages.create(
                model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
            )
    return [one.value, other.value]


async def test_an_advisory_policy_refuses_nobody(crowded: tuple[Served, str, str]) -> None:
    """ADM-8: the answers of both SDKs say what would have been."""
    served, pool, _ = crowded
    await enforce(served, pool)
    answers = await ask_both(served, pool)
    assert [json.loads(answer.http_response.content)["opencoti"]["backpressure"] for answer in answers] == [
        "cells"
    ] * 2


async def test_reject_is_an_error_that_both_sdks_know(crowded: tuple[Served, str, str]) -> None:
    """ADM-8: 429 with its type, its numbers, and when to come again."""
    served, pool, _ = crowded
    await enforce(served, pool, mode="enforced")
    for caught in await both_refused(served, pool):
        error = caught.response.json()["error"]
        assert (error["type"], error["arm"]) == ("pool_saturated", "cells")
        assert int(caught.response.headers["retry-after"]) >= 1
        assert caught.response.headers["x-should-retry"] == "true"


async def test_warn_is_an_answer_with_a_header(crowded: tuple[Served, str, str]) -> None:
    """ADM-8: both SDKs get 200 and how many more may follow."""
    served, pool, _ = crowded
    await write(served, 80, prompt=20, new=10)  # so that it is known what a session takes
    await enforce(served, pool, mode="enforced", on_saturation="warn")
    answers = await ask_both(served, pool)
    assert [answer.headers["x-sessions-remaining"] for answer in answers] == ["0", "0"]


async def test_queue_holds_both_until_there_is_room(crowded: tuple[Served, str, str]) -> None:
    """ADM-8: they wait, and come in when what stood in the way is gone."""
    served, pool, held = crowded
    await enforce(served, pool, mode="enforced", on_saturation="queue")
    waiting = [asyncio.ensure_future(ask_both(served, pool)) for _ in range(2)]
    capacity = f"/polykv/pools/{pool}/capacity"

    async def queued() -> bool:
        return (await served.http.get(capacity, headers=KEY)).json["queue_depth"] == 2

    await served.until(queued)
    await served.http("DELETE", f"/polykv/pools/{held}", headers=KEY)
    async with asyncio.timeout(PATIENCE_S):
        answers = [answer for pair in await asyncio.gather(*waiting) for answer in pair]
    assert [answer.http_response.status_code for answer in answers] == [200] * 4


async def test_the_sdks_come_again_by_themselves(crowded: tuple[Served, str, str]) -> None:
    """ADM-8: with the retries that they have by default, a refusal costs a wait, and no error."""
    served, pool, held = crowded
    await enforce(served, pool, mode="enforced")
    async with clients(served, retries=10) as (chat, messages):
        one = asyncio.ensure_future(
            chat.chat.completions.create(
                model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
            )
        )
        other = asyncio.ensure_future(
            messages.messages.create(
                model="any", messages=MESSAGES, max_tokens=8, extra_body={"pool_id": pool}
            )
        )

        async def refused() -> int:
            found = parsed((await served.http.get("/metrics", headers=KEY)).body)
            return int(found["opencoti_polykv:sessions_total", ("outcome", "rejected")])

        before = await refused()

        async def both_were_refused() -> bool:
            return await refused() >= before + 2

        await served.until(both_were_refused)
        assert not one.done()
        assert not other.done()
        await served.http("DELETE", f"/polykv/pools/{held}", headers=KEY)
        async with asyncio.timeout(PATIENCE_S):
            assert (await one).choices[0].finish_reason == "length"
            assert (await other).stop_reason == "max_tokens"


# -- the floor --------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: Any, patched: Path, smollm: Path) -> AsyncIterator[Served]:
    """The built-in model, which takes long enough over an answer for others to come in the meantime."""
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "2")
    async with serve(tmp_path_factory.mktemp("real"), *sizes) as proxy:
        yield proxy


def turn(pool: str, session: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A turn of a session."""
    return {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "ignore_eos": True,
        "pool_id": pool,
        "session_id": session,
        **more,
    }


async def test_a_floor_that_one_more_would_break_is_kept(real: Served) -> None:
    """ADM-1, 3, 4, 5, 7: measured, not guessed; those inside go on, newcomers are told why they cannot."""
    await real.clear()
    pool = (await real.http.post("/polykv/pools", {"prompt": "The river is long. " * 12}, KEY)).json[
        "pool_id"
    ]
    capacity = f"/polykv/pools/{pool}/capacity"
    idle = (await real.http.get(capacity, headers=KEY)).json
    assert (idle["can_admit"], idle["projected_mean_tps_if_admitted"]) == (True, None)
    chat = "/v1/chat/completions"
    early = await real.http.post(chat, turn(pool, "early", 4), KEY)
    await enforce(real, pool, mode="enforced", target_tps_per_session=0.01, kv_headroom_ratio=0.0)
    inside = asyncio.ensure_future(real.http.post(chat, turn(pool, "inside", 250), KEY))

    async def measured() -> bool:
        return (await real.http.get(capacity, headers=KEY)).json["mean_active_tps"] is not None

    await real.until(measured)
    assert (await real.http.post(chat, turn(pool, "modest", 4), KEY)).status == 200
    await enforce(real, pool, mode="enforced", target_tps_per_session=1000.0, kv_headroom_ratio=0.0)
    seen = (await real.http.get(capacity, headers=KEY)).json
    assert (seen["can_admit"], seen["n_active_sessions"]) == (False, 1), seen
    assert seen["reason"] == "projected tps below floor"
    assert 0 < seen["projected_mean_tps_if_admitted"] < seen["mean_active_tps"] < 1000
    for caught in await both_refused(real, pool):
        error = caught.response.json()["error"]
        assert (error["type"], error["arm"]) == ("pool_saturated", "tps")
        assert error["capacity"]["projected_mean_tps_if_admitted"] < 1000
    assert not inside.done(), "it was to be at work all the time"
    said = [*MESSAGES, early.json["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    next_turn = await real.http.post(chat, turn(pool, "early", 4, messages=said), KEY)
    assert next_turn.status == 200, "who is inside is never refused"
    assert (await inside).json["usage"]["completion_tokens"] == 250


async def test_who_says_how_much_it_needs_is_told_whether_that_fits(real: Served) -> None:
    """ADM-4: the context arm, of a question and of a session that comes."""
    await real.clear()
    for tokens, fits in ((100, True), (100_000, False)):
        found = (await real.http.get(f"/polykv/capacity?expected_tokens={tokens}")).json
        assert found["can_admit"] is fits
        assert (found["reason"] == "context headroom exhausted") is not fits
