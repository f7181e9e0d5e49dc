"""Clients that leave: only their own request stops, and their slot comes back."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import pytest_asyncio

from e2e.harness import Served, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = " ".join(f"Chapter {number} tells of the wind." for number in range(330))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: Any, patched: Any, smollm: Any) -> Any:
    """A proxy with two slots."""
    folder = tmp_path_factory.mktemp("pair")
    async with serve(folder, "--parallel", "2", "--ctx-size", "8192", "--max-pools", "2") as proxy:
        yield proxy


def body_of(path: str, text: str, *, stream: bool, tokens: int) -> dict[str, Any]:
    """A request that generates exactly ``tokens`` tokens unless stopped."""
    body: dict[str, Any] = {"stream": stream, "ignore_eos": True, "temperature": 0}
    if path == "/completion":
        return {**body, "prompt": text, "n_predict": tokens}
    return {**body, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}


async def state_of(served: Served, state: str) -> bool:
    """Whether a slot of the engine is in this state."""
    return any(slot["state"] == state for slot in (await served.counters())["slots"])


async def count_stream(served: Served, tokens: int) -> int:
    """Run a bystander's stream to its end; tokens it got."""
    body = body_of("/v1/chat/completions", "Count for ever.", stream=True, tokens=tokens)
    got = 0
    async with served.http.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                got += any(choice["delta"].get("content") for choice in json.loads(line[6:])["choices"])
    return got


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/v1/messages"])
@pytest.mark.parametrize("phase", ["prompt", "gen"])
async def test_leaving_stops_only_the_own_request(
    pair: Served, phase: str, path: str, *, stream: bool
) -> None:
    """A client that leaves in prefill or while tokens come is noticed although another slot streams."""
    bystander = asyncio.create_task(count_stream(pair, 150))
    await pair.until(lambda: state_of(pair, "gen"))
    before = await pair.counters()
    text = f"{LONG} {path} {phase} {stream}" if phase == "prompt" else f"Hi from {path} {stream}"

    async def leave_later() -> None:
        async with pair.http.session() as session:
            async with session.post(path, json=body_of(path, text, stream=stream, tokens=2000)) as answer:
                await answer.read()

    leaver = asyncio.create_task(leave_later())

    async def under_way() -> bool:
        states = [slot["state"] for slot in (await pair.counters())["slots"]]
        return phase in states if phase == "prompt" else states.count("gen") == 2

    await pair.until(under_way)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)

    async def its_slot_is_idle() -> bool:
        return any(slot["state"] == "idle" for slot in (await pair.counters())["slots"])

    await pair.until(its_slot_is_idle)
    assert not bystander.done(), "the other stream must still be running when the leaver's slot is free"
    assert await bystander >= 140  # a few tokens carry no text
    after = await pair.quiet()
    generated = sum(slot["n_gen_total"] for slot in after["slots"]) - sum(
        slot["n_gen_total"] for slot in before["slots"]
    )
    assert generated < 150 + 2000
    if phase == "prompt":
        computed = sum(slot["n_prompt_total"] for slot in after["slots"]) - sum(
            slot["n_prompt_total"] for slot in before["slots"]
        )
        assert computed < len(LONG.split()), "the prefill did not stop"


async def test_leaving_the_queue_never_reaches_the_engine(pair: Served) -> None:
    """A request that waits for a slot and whose client leaves is never sent."""
    streams = [asyncio.create_task(count_stream(pair, 120)) for _ in range(2)]

    async def both_run() -> bool:
        return [slot["state"] for slot in (await pair.counters())["slots"]].count("gen") == 2

    await pair.until(both_run)
    tasks = sum(slot["n_tasks"] for slot in (await pair.counters())["slots"])

    async def wait_in_line() -> None:
        body = body_of("/v1/chat/completions", "I wait", stream=False, tokens=5)
        await pair.http.post("/v1/chat/completions", body)

    waiter = asyncio.create_task(wait_in_line())
    await asyncio.sleep(0.5)
    assert (await pair.counters())["n_deferred"] == 0, "the engine must never queue"
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert all(got >= 110 for got in await asyncio.gather(*streams))
    after = await pair.quiet()
    assert sum(slot["n_tasks"] for slot in after["slots"]) == tasks


async def test_a_burst_beyond_the_slots_waits_in_the_proxy(pair: Served) -> None:
    """POOL-16: twelve requests on two slots all succeed and the engine's own queue stays empty."""
    deferred: list[int] = []

    async def watch() -> None:
        while True:
            deferred.append((await pair.counters())["n_deferred"])
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    bodies = [body_of("/v1/chat/completions", f"Number {n}", stream=False, tokens=6) for n in range(12)]
    answers = await asyncio.gather(*(pair.http.post("/v1/chat/completions", body) for body in bodies))
    watcher.cancel()
    assert [answer.status for answer in answers] == [200] * 12
    assert len(deferred) > 3
    assert max(deferred) == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/completion"])
async def test_retries_never_start_over(pair: Served, path: str) -> None:
    """ADM-11: however often a client leaves in prefill and comes again, each token is computed once."""
    await pair.clear()
    before = sum(slot["n_prompt_total"] for slot in (await pair.quiet())["slots"])
    body = body_of(path, f"Retried on {path}. {LONG[: len(LONG) // 2]}", stream=True, tokens=4)

    async def computed() -> int:
        return sum(slot["n_prompt_total"] for slot in (await pair.counters())["slots"]) - before

    for attempt in range(2):
        trying = asyncio.create_task(pair.http.post(path, body))

        async def got_on(least: int = 300 * (attempt + 1)) -> bool:
            return await computed() >= least

        await pair.until(got_on)
        assert not trying.done(), "it was to be left in its prefill"
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
    answer = await pair.http.post(path, {**body, "stream": False})
    assert answer.status == 200
    timings = (await pair.counters())["slots"]
    prompt = max(slot["n_tokens"] for slot in timings) - 4
    assert await computed() <= 1.05 * prompt


async def test_a_stock_engine_notices_clients_that_leave(stock: Any, smollm: Any, tmp_path: Any) -> None:
    """Whoever reads its slots while they leave, one by one, leaves it the second of silence that it needs."""
    env = {"POLYKV_ENGINE__BINARY": str(stock)}
    sizes = ("--parallel", "2", "--ctx-size", "16384", "--max-pools", "0")
    async with serve(tmp_path, *sizes, env=env) as served:
        body = body_of("/completion", "The sea", stream=False, tokens=4000)
        leavers = [asyncio.create_task(served.http.post("/completion", body)) for _ in range(2)]

        async def both_run() -> bool:
            slots = (await served.engine.get("/slots")).json
            return all(slot["is_processing"] and slot["next_token"][0]["n_decoded"] for slot in slots)

        await served.until(both_run)
        for leaver in leavers:
            leaver.cancel()
            await asyncio.sleep(0.75)
        await asyncio.gather(*leavers, return_exceptions=True)

        async def held() -> list[int]:
            """Tokens that each slot held when its request ended, as the engine logged it: nobody is asked."""
            text = (tmp_path / "state" / "engine-0.log").read_text()
            return [int(found) for found in re.findall(r"stop processing: n_tokens = (\d+)", text)]

        async def both_stopped() -> bool:
            return len(await held()) == 2

        await served.until(both_stopped)
        assert max(await held()) < 2000, "they ran on for nobody"
