"""What keeps pools and what lets them go, sessions that end and move, on the real engine."""

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

SEED = 20_641
ROUNDS = 60
"""Times that turns and snapshots of one session are thrown at the engine together."""

TRUNK = list(range(100, 300))
LEFT, RIGHT = [*TRUNK, *range(300, 340)], [*TRUNK[:120], *range(400, 480)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> Path:
    """A model that computes thousands of tokens a second."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    llama(path, smollm)
    return path


def sizes(tiny: Path) -> tuple[str, ...]:
    """Four slots and four pools of the tiny model."""
    return ("--model", str(tiny), "--parallel", "4", "--ctx-size", "8192", "--max-pools", "4")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, tiny: Path
) -> AsyncIterator[Served]:
    """A proxy in front of it."""
    assert patched.exists()
    env = {"POLYKV_POOLS__AUTO_POOLS": "false", "POLYKV_POOLS__GRACE_S": "0"}
    async with serve(tmp_path_factory.mktemp("keeping"), *sizes(tiny), env=env) as proxy:
        yield proxy


async def make(served: Served, tokens: list[int], **body: Any) -> dict[str, Any]:
    """Create a pool."""
    answer = await served.http.post("/polykv/pools", {"tokens": tokens, **body})
    assert answer.status in (200, 201), answer.json
    return answer.json


async def turn(served: Served, prompt: list[int], session: str, **body: Any) -> dict[str, Any]:
    """A request of a session."""
    wanted = {"prompt": prompt, "max_tokens": 2, "session_id": session, "ignore_eos": True, **body}
    answer = await served.http.post("/v1/completions", wanted)
    assert answer.status == 200, answer.json
    return answer.json


async def accounted(served: Served) -> dict[str, Any]:
    """The listing at rest, in which every cell has its owner."""
    listed = await served.listing()
    assert listed["unattributed_cells"] == 0, (listed, await served.counters())
    return listed


async def shown(served: Served, pool: dict[str, Any]) -> dict[str, Any] | None:
    """A pool as it is listed; None once it is not."""
    answer = await served.http.get(f"/polykv/pools/{pool['pool_id']}")
    return answer.json if answer.status == 200 else None


async def close(served: Served, session: str) -> int:
    """End a session; the cells that it freed."""
    answer = await served.http.post(f"/polykv/sessions/{session}/close", {})
    assert answer.status == 200, answer.json
    return int(answer.json["cells_freed"])


async def test_lifetime_counts_from_the_last_holder(clean: Served) -> None:
    """POOL-6 ttl_s: what nobody uses is released; what a session rests on stays until that is over."""
    held = await make(clean, LEFT, ttl_s=1, pin=True)
    await turn(clean, [*LEFT, 5], "rider", pool_id=held["pool_id"])
    await accounted(clean)
    await clean.http.post(f"/polykv/pools/{held['pool_id']}/unpin", {})
    free = await make(clean, RIGHT, ttl_s=1)

    async def gone(pool: dict[str, Any]) -> bool:
        return await shown(clean, pool) is None

    await clean.until(lambda: gone(free))
    kept = await shown(clean, held)
    assert kept is not None
    assert (kept["pinned"], kept["pinned_by_descendants"], kept["expires_ts"]) == (False, True, None)
    await close(clean, "rider")
    await clean.until(lambda: gone(held))
    assert await clean.cells_used() == 0
    assert (await clean.http("DELETE", f"/polykv/pools/{held['pool_id']}")).json["already_released"]


async def test_pins_reach_up_to_the_root(clean: Served) -> None:
    """POOL-4: a session on a leaf pins the whole branch; a leaf without anybody pins what is above it."""
    root = await make(clean, TRUNK)
    answer = await clean.http.post(f"/polykv/pools/{root['pool_id']}/fork", {"tokens": LEFT})
    leaf = answer.json
    assert ((await shown(clean, root)) or {})["pinned_by_descendants"] is True
    assert ((await shown(clean, leaf)) or {})["pinned_by_descendants"] is False
    await turn(clean, [*LEFT, 5], "rider", pool_id=leaf["pool_id"])
    await accounted(clean)
    assert ((await shown(clean, leaf)) or {})["pinned_by_descendants"] is True
    await clean.http("DELETE", f"/polykv/pools/{leaf['pool_id']}")
    await accounted(clean)
    # the leaf has no id any more, and what is left of it needs the root's cells
    assert ((await shown(clean, root)) or {})["pinned_by_descendants"] is True
    await close(clean, "rider")
    await accounted(clean)
    assert ((await shown(clean, root)) or {})["pinned_by_descendants"] is False
    assert await clean.cells_used() == len(TRUNK)


async def test_grace_after_a_release_while_sessions_rest_on_it(
    tiny: Path, patched: Path, tmp_path: Path
) -> None:
    """POOL-9: the id at once, the cells after the last holder and a grace; the same content takes them up."""
    assert patched.exists()
    env = {"POLYKV_POOLS__AUTO_POOLS": "false", "POLYKV_POOLS__GRACE_S": "2"}
    async with serve(tmp_path, *sizes(tiny), env=env) as served:
        root = await make(served, TRUNK)
        answer = await served.http.post(f"/polykv/pools/{root['pool_id']}/fork", {"tokens": LEFT})
        leaf = answer.json
        await turn(served, [*TRUNK, *LEFT[len(TRUNK) :][:10], 5], "rider", pool_id=leaf["pool_id"])
        gone = (await served.http("DELETE", f"/polykv/pools/{root['pool_id']}?recursive=1")).json
        assert gone["released"] == [leaf["pool_id"], root["pool_id"]]
        assert (gone["cells_freed"], gone["cells_draining"]) == (0, len(LEFT))  # all of both
        assert await shown(served, root) is await shown(served, leaf) is None
        listed = await accounted(served)
        assert sorted((rest["lingers"], rest["prefix_len"]) for rest in listed["draining"]) == [
            (True, len(TRUNK)),
            (True, len(LEFT)),
        ]
        assert listed["pool_seq_ids_used"] == 2
        unpooled = await served.http.post(
            "/v1/completions", {"prompt": [*LEFT, 6], "max_tokens": 1, "pool_id": leaf["pool_id"]}
        )
        assert unpooled.json["opencoti"]["pool_unknown"] is True

        before = await served.computed()
        again = await make(served, LEFT)
        assert (again["pool_id"], again["created"]) == (leaf["pool_id"], False)
        assert again["prompt_tokens_computed"] == await served.computed() - before == 0
        await served.http("DELETE", f"/polykv/pools/{leaf['pool_id']}")

        # two pools more take the sequence ids of those that linger only if there is no other
        others = [await make(served, [number, *RIGHT]) for number in (7, 8, 9)]
        assert len((await accounted(served))["draining"]) >= 1
        for pool in others:
            await served.http("DELETE", f"/polykv/pools/{pool['pool_id']}")
        await served.empty_slots()

        async def empty() -> bool:
            return await served.cells_used() == 0

        await served.until(empty)
        counters = await served.counters()
        assert counters["pools"] == []
        assert (await served.listing())["pool_seq_ids_used"] == 0


@pytest.mark.parametrize("grace_s", [600, 1])
async def test_grace_before_an_automatic_pool_makes_room(
    tiny: Path, patched: Path, tmp_path: Path, grace_s: int
) -> None:
    """POOL-4: not while sessions rest on it, nor for the grace after the last of them left."""
    assert patched.exists()
    env = {
        "POLYKV_POOLS__AUTO_MIN_TOKENS": "64",
        "POLYKV_POOLS__GRACE_S": str(grace_s),
    }
    async with serve(tmp_path, *sizes(tiny), env=env) as served:
        for number in (1, 2):
            await turn(served, [*LEFT, number, number], f"s{number}")
        (auto,) = (await served.listing())["pools"]
        assert (auto["origin"], auto["pinned_by_descendants"]) == ("auto", True)
        for number in (1, 2, 3):
            await make(served, [number, *RIGHT])

        async def has_room() -> bool:
            return (await served.http.post("/polykv/pools", {"tokens": RIGHT})).status == 201

        assert not await has_room()  # whatever the grace: sessions rest on it
        assert [await close(served, f"s{number}") > 0 for number in (1, 2)] == [True, True]
        if grace_s == 600:
            assert not await has_room()
            assert ((await shown(served, auto)) or {})["residency"] == "resident"
        else:
            await served.until(has_room)
            assert ((await shown(served, auto)) or {})["residency"] == "evicted"
        await accounted(served)


async def test_closed_session_frees_exactly_what_only_it_held(clean: Served) -> None:
    """POOL-12: the pool's cells stay, the private ones go at once; a second close finds nothing."""
    root = await make(clean, LEFT)
    await turn(clean, [*LEFT, 5, 6, 7], "a", pool_id=root["pool_id"])
    await turn(clean, [*LEFT, 8], "b", pool_id=root["pool_id"])
    used = await clean.cells_used()
    freed = await close(clean, "a")
    assert freed >= 3
    assert await clean.cells_used() == used - freed
    assert {each["session_id"] for each in (await clean.http.get("/polykv/sessions")).json["sessions"]} == {
        "b"
    }
    assert (await clean.http.post("/polykv/sessions/a/close", {})).status == 404
    await accounted(clean)


async def test_session_moves_to_another_pool(clean: Served) -> None:
    """POOL-12: the next request attaches there, the old private cells are free, the id stays; or nothing."""
    old, new = await make(clean, LEFT), await make(clean, RIGHT)
    await turn(clean, [*LEFT, 5, 6], "mover", pool_id=old["pool_id"])
    used = await clean.cells_used()
    path = "/polykv/sessions/mover/migrate"
    assert (await clean.http.post(path, {"pool_id": "no"})).status == 404
    assert await clean.cells_used() == used
    moved = await clean.http.post(path, {"pool_id": new["pool_id"]})
    assert moved.status == 200, moved.json
    assert await clean.cells_used() == len(LEFT) + len(RIGHT)
    answer = await clean.http.post(
        "/v1/completions", {"prompt": [*RIGHT, 9], "max_tokens": 1, "session_id": "mover"}
    )
    assert (answer.headers["x-pool-id"], answer.headers["x-session-id"]) == (new["pool_id"], "mover")
    assert answer.json["timings"]["cache_n"] == len(RIGHT)
    await accounted(clean)


async def test_snapshots_race_with_turns(clean: Served) -> None:
    """POOL-11: whatever turn a snapshot meets, its place in the tree is where its cells are."""
    rng = random.Random(SEED)
    left, right = await make(clean, LEFT), await make(clean, RIGHT)
    seen: dict[str, int] = {}

    async def talk() -> None:
        for _ in range(3):
            base, pool = rng.choice([(LEFT, left), (RIGHT, right), (LEFT, None)])
            more = [rng.randrange(500, 600) for _ in range(rng.randrange(1, 90))]
            ride = {} if pool is None else {"pool_id": pool["pool_id"]}
            off = {"opencoti": {"auto_match": pool is not None}}
            await turn(clean, [*base, *more], "racer", max_tokens=rng.choice([1, 6]), **ride, **off)

    async def snap() -> None:
        await asyncio.sleep(rng.random() * 0.05)
        sessions = (await clean.http.get("/polykv/sessions")).json["sessions"]
        names = [each["session_id"] for each in sessions if each["resident"]]
        if not names:
            return
        wanted = {"from_session": rng.choice(names)} | ({"n_tokens": 150} if rng.random() < 0.3 else {})
        answer = await clean.http.post("/polykv/pools", wanted)
        code = "made" if answer.status in (200, 201) else answer.json["error"]["code"]
        seen[code] = seen.get(code, 0) + 1

    for _ in range(ROUNDS):
        await asyncio.gather(talk(), snap(), snap())
        listed = await accounted(clean)
        for pool in listed["pools"]:
            if pool["origin"] == "snapshot":
                await clean.http("DELETE", f"/polykv/pools/{pool['pool_id']}")
        await accounted(clean)
    assert seen.get("made", 0) > ROUNDS / 4, seen
    await clean.clear()
    assert await clean.cells_used() == 0
