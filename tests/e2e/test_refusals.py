"""What was there before a request that fails or is refused is there afterwards, on the real engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import Answer, Served, serve
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 2048
CELLS = 6144


def text(seed: int, count: int) -> list[int]:
    """Tokens of some text."""
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


SHARED, PINNED = text(1, 300), text(2, 100)
OWN = {"opencoti": {"auto_match": False}}
HELD = {"one": text(3, 250), "two": text(4, 260)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Served]:
    """Two slots, four pools, no patience: whoever does not come in is refused."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp("refusals")
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", str(CELLS), "--max-pools", "4")
    env = {"POLYKV_POOLS__AUTO_POOLS": "false", "POLYKV_QUEUE__MAX_DEPTH": "0"}
    async with serve(folder, "--model", str(folder / "llama.gguf"), *sizes, env=env) as proxy:
        yield proxy


async def write(served: Served, prompt: list[int], count: int = 4, **more: Any) -> Answer:
    """A completion."""
    body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0, **more}
    return await served.http.post("/completion", body)


class House:
    """Two conversations, one in each slot, and three pools: a shared one, its child, and a pinned one."""

    def __init__(self, served: Served, root: str, child: str, pinned: str) -> None:
        self.served, self.root, self.child, self.pinned = served, root, child, pinned

    async def picture(self) -> dict[str, Any]:
        """All that the engine holds, and whose it is."""
        listed = await self.served.listing()
        counters = await self.served.counters()
        sessions = (await self.served.http.get("/polykv/sessions")).json["sessions"]
        assert listed["unattributed_cells"] == 0
        return {
            "cells": counters["kv"]["n_used"],
            "slots": [(slot["n_tokens"], slot["n_pool_shared"]) for slot in counters["slots"]],
            "pools": sorted(pool["n_tokens"] for pool in counters["pools"]),
            "listed": {each["pool_id"]: (each["residency"], each["pinned"]) for each in listed["pools"]},
            "sessions": {each["session_id"]: each["slot"] for each in sessions if each["resident"]},
        }

    async def beyond_window(self) -> Answer:
        """A new conversation whose prompt does not fit, on a pool: it would displace the oldest one."""
        return await write(self.served, [*SHARED, *text(9, WINDOW)], pool_id=self.root, session_id="new")

    async def beyond_own_window(self) -> Answer:
        """A conversation that grew beyond its window."""
        return await write(self.served, [*HELD["one"], *text(9, WINDOW)], session_id="one")

    async def broken_grammar(self) -> Answer:
        """What the engine cannot sample by."""
        return await write(
            self.served, [*SHARED, 7], pool_id=self.root, session_id="new", grammar="root ::= ("
        )

    async def strange_tokens(self) -> Answer:
        """Ids that the model does not have."""
        return await write(self.served, [1 << 20] * 40, session_id="new")

    async def strict_cap(self) -> Answer:
        """More of a pool than agrees."""
        strict = {"pool_id": self.root, "shared_prefix_n_tokens": 299, "strict": True}
        return await write(self.served, text(8, 300), opencoti=strict)

    async def pool_too_long(self) -> Answer:
        """A pool beyond the context."""
        return await self.served.http.post("/polykv/pools", {"tokens": text(9, WINDOW)})

    async def pool_of_strange_tokens(self) -> Answer:
        """A pool that the engine refuses to compute, in a slot that holds a conversation."""
        return await self.served.http.post("/polykv/pools", {"tokens": [1 << 20] * 40})

    async def wrong_fork(self) -> Answer:
        """A child that does not begin as its parent."""
        return await self.served.http.post(f"/polykv/pools/{self.root}/fork", {"tokens": text(9, 400)})

    async def release_of_a_parent(self) -> Answer:
        """While its child is there."""
        return await self.served.http("DELETE", f"/polykv/pools/{self.root}")

    async def evict_of_a_pin(self) -> Answer:
        """While it is pinned."""
        return await self.served.http.post(f"/polykv/pools/{self.pinned}/evict", {})

    async def flush_of_a_parent_of_a_pin(self) -> Answer:
        """Not even what could go of the subtree."""
        await self.served.http.post(f"/polykv/pools/{self.child}/pin", {})
        answer = await self.served.http.post(f"/polykv/pools/{self.root}/flush", {})
        await self.served.http.post(f"/polykv/pools/{self.child}/unpin", {})
        return answer

    async def migrate_to_nowhere(self) -> Answer:
        """To a pool that nobody knows."""
        return await self.served.http.post("/polykv/sessions/one/migrate", {"pool_id": "nonsense"})

    async def snapshot_of_too_much(self) -> Answer:
        """More tokens than the slot holds."""
        return await self.served.http.post("/polykv/pools", {"from_session": "one", "n_tokens": 9999})

    async def queue_full(self) -> Answer:
        """Both slots work, and nobody may wait."""
        running = [
            asyncio.create_task(write(self.served, prompt, 700, session_id=name, **OWN))
            for name, prompt in HELD.items()
        ]

        async def both() -> bool:
            assert not any(task.done() for task in running), running
            sessions = (await self.served.http.get("/polykv/sessions")).json["sessions"]
            return sum(each["state"] == "running" for each in sessions) == len(HELD)

        await self.served.until(both)
        os.kill(self.served.engine_pid, signal.SIGSTOP)  # else they might be over before it is refused
        try:
            assert await both()
            answer = await write(self.served, text(9, 20), session_id="new")
        finally:
            os.kill(self.served.engine_pid, signal.SIGCONT)
        assert [(await task).status for task in running] == [200, 200]
        return answer


@pytest_asyncio.fixture(loop_scope="module")
async def house(served: Served) -> House:
    """Everything is there and idle."""
    await served.clear()
    for session in (await served.http.get("/polykv/sessions")).json["sessions"]:
        await served.http.post(f"/polykv/sessions/{session['session_id']}/close", {})
    root = (await served.http.post("/polykv/pools", {"tokens": SHARED})).json["pool_id"]
    made = await served.http.post(f"/polykv/pools/{root}/fork", {"tokens": [*SHARED, *text(5, 50)]})
    pinned = await served.http.post("/polykv/pools", {"tokens": PINNED, "pin": True})
    for name, prompt in HELD.items():
        assert (await write(served, prompt, session_id=name, **OWN)).status == 200
    return House(served, root, made.json["pool_id"], pinned.json["pool_id"])


REFUSALS: dict[Callable[[House], Awaitable[Answer]], tuple[int, str | None]] = {
    House.beyond_window: (400, "exceed_context_size_error"),
    House.beyond_own_window: (400, "exceed_context_size_error"),
    House.broken_grammar: (400, "invalid_request_error"),
    House.strange_tokens: (400, "invalid_request_error"),
    House.strict_cap: (400, "shared_prefix_too_long"),
    House.pool_too_long: (400, "pool_too_long"),
    House.pool_of_strange_tokens: (400, "engine_refused"),
    House.wrong_fork: (409, "prefix_mismatch"),
    House.release_of_a_parent: (409, "pool_has_children"),
    House.evict_of_a_pin: (409, "pool_pinned"),
    House.flush_of_a_parent_of_a_pin: (409, "pool_pinned"),
    House.migrate_to_nowhere: (404, "pool_not_found"),
    House.snapshot_of_too_much: (400, "engine_refused"),
}


@pytest.mark.parametrize("refuse", REFUSALS, ids=lambda refuse: refuse.__name__)
async def test_a_refusal_destroys_nothing(house: House, refuse: Callable[[House], Awaitable[Answer]]) -> None:
    """CTX-5: both conversations are in their slots, every pool is there, and every cell."""
    before = await house.picture()
    assert set(before["sessions"]) == set(HELD)
    answer = await refuse(house)
    status, name = REFUSALS[refuse]
    assert answer.status == status, answer.body
    assert name in (answer.json["error"]["type"], answer.json["error"]["code"]), answer.json
    assert await house.picture() == before
    for name, prompt in HELD.items():
        said = await write(house.served, [*prompt, *text(6, 10)], session_id=name, **OWN)
        # its last prompt token is what the answer was sampled from, and the answer is not in this prompt
        assert said.json["timings"]["cache_n"] == len(prompt)
    on_pool = await write(house.served, [*SHARED, *text(7, 10)], pool_id=house.root, session_id="rider")
    assert on_pool.json["timings"]["cache_n"] == len(SHARED)


async def test_who_may_not_wait_costs_nobody_anything(house: House) -> None:
    """CTX-5: those who run go on, and what they held before is what they went on from."""
    before = await house.picture()
    answer = await house.queue_full()
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    after = await house.picture()
    assert {name: after[name] for name in ("pools", "listed", "sessions")} == {
        name: before[name] for name in ("pools", "listed", "sessions")
    }


async def test_a_pool_for_which_there_is_no_number_left_costs_nobody_anything(house: House) -> None:
    """CTX-5, POOL-5: explicit pools make no room, and the conversations are not asked to."""
    made = await house.served.http.post("/polykv/pools", {"from_session": "one", "n_tokens": 60})
    assert made.status == 201, made.json
    before = await house.picture()
    for body in ({"tokens": text(9, 100)}, {"from_session": "two"}):
        refused = await house.served.http.post("/polykv/pools", body)
        assert (refused.status, refused.json["error"]["code"]) == (409, "pool_capacity_exhausted")
    assert await house.picture() == before


async def test_a_pool_for_which_there_are_no_cells_takes_nobodys(served: Served) -> None:
    """CTX-5, ENG-4: what is pinned leaves too little: refused before any conversation has to go."""
    await served.clear()
    for seed in (21, 22, 23):
        made = await served.http.post("/polykv/pools", {"tokens": text(seed, 1900), "pin": True})
        assert made.status == 201, made.json
    for name in HELD:
        assert (await write(served, text(24, 60), session_id=name, **OWN)).status == 200
    house = House(served, "", "", "")
    before = await house.picture()
    refused = await served.http.post("/polykv/pools", {"tokens": text(25, 600)})
    assert refused.status == 400, refused.json
    assert refused.json["error"]["opencoti"]["ctx_kind"] == "cells"
    assert await house.picture() == before


async def test_what_the_engine_gave_up_is_noticed(house: House) -> None:
    """CTX-5: a slot that was emptied behind the proxy's back holds nobody; its next request is told why."""
    slots = (await house.picture())["sessions"]
    assert set(slots) == set(HELD)
    assert (await house.served.engine.post(f"/slots/{slots['two']}?action=erase", {})).status == 200
    assert (await house.picture())["sessions"] == {"one": slots["one"]}
    await write(house.served, [*HELD["two"], 5], session_id="two", **OWN)
    (last, *_) = (await house.served.http.get("/polykv/requests?session_id=two")).json["requests"]
    assert last["divergence"]["cause"] == "evicted"
    assert (await house.picture())["sessions"] == slots


async def test_what_the_engine_gave_to_another_user_is_noticed(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """CTX-5, ENG-8: one conversation's slot was used by somebody else, the other's cells were needed."""
    assert patched.exists()
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", "1024", "--max-pools", "1")
    async with serve(tmp_path, "--model", str(tmp_path / "llama.gguf"), *sizes) as served:
        for name, prompt in HELD.items():
            assert (await write(served, prompt, session_id=name, **OWN)).status == 200
        house = House(served, "", "", "")
        assert set((await house.picture())["sessions"]) == set(HELD)
        body = {"prompt": text(30, 600), "n_predict": 300, "ignore_eos": True}
        answer = await served.engine.post("/completion", body, {"X-PolyKV-Slot": "0"})
        assert answer.json["tokens_predicted"] == 300
        assert (await house.picture())["sessions"] == {}
        for name, prompt in HELD.items():
            assert (await write(served, prompt, session_id=name, **OWN)).status == 200
        assert set((await house.picture())["sessions"]) == set(HELD)
