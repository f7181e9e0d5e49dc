"""KV on disk, on the real engine: conversations that come back to a slot, engines and proxies that die."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from e2e.harness import serve
from e2e.tiny_models import llama, sliding_window

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.harness import Served

WORDS = [
    "harbour",
    "letter",
    "winter",
    "copper",
    "garden",
    "signal",
    "marble",
    "engine",
    "paper",
    "river",
    "stone",
    "cloud",
]
QUICK = {"POLYKV_DURABLE__POOLS_EVERY_S": "0.2", "POLYKV_DURABLE__IDLE_SAVE_S": "0.2"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm: Path) -> Path:
    """A model of thousands of tokens a second."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    llama(path, smollm)
    return path


def sizes(model: Path, *, slots: int = 2, cells: int = 16_384, pools: int = 8) -> tuple[str, ...]:
    """Arguments of a proxy with the tiny model."""
    return (
        *("--model", str(model), "--parallel", str(slots), "--ctx-size", str(cells)),
        *("--max-pools", str(pools)),
    )


def text(seed: int, words: int) -> str:
    """Text that no other seed begins with."""
    return " ".join(
        f"{WORDS[(seed * 7 + at * at) % len(WORDS)]}{(seed * 31 + at) % 97}" for at in range(words)
    )


async def ask(served: Served, session: str, prompt: str, **more: Any) -> dict[str, Any]:
    """A turn of a conversation in plain text."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "session_id": session}
    answer = await served.http.post("/v1/completions", body | more)
    assert answer.status == 200, answer.body
    return answer.json


async def tokens_of(served: Served, prompt: str) -> list[int]:
    """A prompt's ids."""
    return (await served.http.post("/polykv/tokenize", {"prompt": prompt})).json["tokens"]


async def saved(served: Served) -> dict[str, dict[str, Any]]:
    """What is on disk, by key."""
    entries = (await served.http.get("/polykv/cache")).json["entries"]
    return {entry["key"]: entry for entry in entries}


async def state(served: Served) -> dict[str, Any]:
    """What ``/props`` says of saved KV."""
    return (await served.http.get("/props")).json["opencoti"]["durable_kv"]


async def test_conversations_without_a_slot_come_back_from_disk(
    patched: Path, tiny: Path, tmp_path: Path
) -> None:
    """DUR-3, DUR-4: 32 conversations in turn on four slots; nobody computes his past again."""
    async with serve(tmp_path, *sizes(tiny, slots=4)) as served:
        assert (await state(served))["state"] == "on"
        prompts = {f"s{number}": text(number, 60) for number in range(32)}
        for name, prompt in prompts.items():
            await ask(served, name, prompt)
        computed = await served.computed()
        for name, prompt in list(prompts.items()):
            longer = f"{prompt} {text(99, 3)}"
            past = len(await tokens_of(served, prompt))
            answer = await ask(served, name, longer)
            assert answer["timings"]["cache_n"] >= past - 1, name
            prompts[name] = longer
        # of the second round only what is new was computed
        whole = sum([len(await tokens_of(served, prompt)) for prompt in prompts.values()])
        assert await served.computed() - computed < whole / 5
        listing = await served.listing()
        assert listing["unattributed_cells"] == 0
        assert set(await saved(served)) <= set(prompts)


async def test_a_model_with_a_window_is_served_without(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """DUR-4: with ``--swa-full`` pools work, but a file has only the last window: the canary notices."""
    sliding_window(tmp_path / "w.gguf", smollm)
    more = ("--engine-arg", "--swa-full")
    async with serve(tmp_path, *sizes(tmp_path / "w.gguf", slots=1), *more, env=QUICK) as served:
        told = await state(served)
        assert (told["state"], told["reason"]) == (
            "off",
            "the model goes on from a saved state only near its end",
        )
        await tree(served)
        before = shape(await served.listing())
        await ask(served, "mine", text(1, 120))
        await ask(served, "other", text(2, 120))
        assert await saved(served) == {}
        os.kill(served.engine_pid, signal.SIGKILL)
        await served.until(lambda: _lost(served))
        # its pools come back all the same, and can be left anywhere
        half = " ".join(text(1, 260).split()[:100])
        root = next(pool for pool in before if pool[1] is None)[0]
        answer = await ask(served, "mine", f"{half} otherwise", pool_id=root)
        assert answer["timings"]["cache_n"] >= len(await tokens_of(served, half)) - 2
        assert shape(await served.listing()) == before
        assert {event["source"] for event in served.events("pool_rebuilt")} == {"prefill"}


async def test_a_restored_conversation_stands_on_its_pool(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """DUR-4: cells afterwards are the pool's and the suffix, not a second copy."""
    async with serve(tmp_path, *sizes(tiny, slots=1)) as served:
        shared = text(1, 150)
        pool = (await served.http.post("/polykv/pools", {"prompt": shared, "pin": True})).json
        mine = f"{shared} {text(2, 60)}"
        await ask(served, "mine", mine, pool_id=pool["pool_id"])
        await ask(served, "other", f"{shared} {text(3, 60)}", pool_id=pool["pool_id"])
        answer = await ask(served, "mine", f"{mine} and on", pool_id=pool["pool_id"])
        tokens = await tokens_of(served, mine)
        assert answer["timings"]["cache_n"] >= len(tokens) - 1
        slot = (await served.quiet())["slots"][0]
        assert slot["n_pool_shared"] == pool["prefix_len"]
        assert await served.cells_used() == slot["n_tokens"]  # the pool's cells are the slot's first
        assert (await served.listing())["unattributed_cells"] == 0


async def read_stream(served: Served, body: dict[str, Any]) -> bytes:
    """A stream to its end."""
    async with served.http.session() as session, session.post("/v1/completions", json=body) as answer:
        return await answer.content.read()


async def tree(served: Served) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Three pools, two below one: ids by name, and what the two are."""
    root = text(1, 260)
    texts = {"root": root, "left": f"{root} {text(2, 40)}", "right": f"{root} {text(3, 40)}"}
    made = (await served.http.post("/polykv/pools", {"prompt": root, "pin": True})).json
    ids = {"root": made["pool_id"]}
    for name in ("left", "right"):
        fork = {"prompt": texts[name], "pin": name == "left"}
        made = await served.http.post(f"/polykv/pools/{ids['root']}/fork", fork)
        assert made.status == 201, made.body
        ids[name] = made.json["pool_id"]
    return ids, [{"pool_id": ids[name], "prompt": texts[name]} for name in ("left", "right")]


def shape(listing: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What of a tree has to come back."""
    return sorted(
        (
            pool["pool_id"],
            pool["parent"],
            pool["branch_pos"],
            pool["prefix_len"],
            pool["residency"],
            pool["pinned"],
        )
        for pool in listing["pools"]
    )


async def test_an_engine_that_is_killed_while_eight_stream(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """OPS-4, DUR-6: error events, the same tree, and next turns that compute what is new."""
    async with serve(tmp_path, *sizes(tiny, slots=8), env=QUICK) as served:
        ids, leaves = await tree(served)
        prompts = {
            f"s{number}": (
                f"{leaves[number % 2]['prompt']} {text(10 + number, 8)}",
                leaves[number % 2]["pool_id"],
            )
            for number in range(7)
        }
        # one has much of its own, so that it is worth a file
        prompts["s7"] = (f"{leaves[1]['prompt']} {text(50, 60)}", leaves[1]["pool_id"])
        for name, (prompt, pool_id) in prompts.items():
            await ask(served, name, prompt, pool_id=pool_id)

        async def on_disk() -> bool:
            return {"s7", *ids.values()} <= set(await saved(served))

        await served.until(on_disk)
        before = shape(await served.listing())
        streams = [
            asyncio.create_task(
                read_stream(
                    served,
                    {
                        "prompt": prompt,
                        "pool_id": pool_id,
                        "session_id": name,
                        "max_tokens": 1200,
                        "ignore_eos": True,
                        "stream": True,
                    },
                )
            )
            for name, (prompt, pool_id) in prompts.items()
        ]

        async def all_generate() -> bool:
            return [slot["state"] for slot in (await served.counters())["slots"]].count("gen") == 8

        await served.until(all_generate)
        os.kill(served.engine_pid, signal.SIGKILL)
        for raw in await asyncio.gather(*streams):
            last = raw.rstrip().split(b"\n\n")[-1]
            assert last.startswith(b'data: {"error":')
            assert b"engine_gone" in last
            assert b"[DONE]" not in raw

        async def noticed() -> bool:
            return any(event["state"] == "down" for event in served.events("engine_state"))

        await served.until(noticed)
        # held until the tree is back
        answers = await asyncio.gather(
            *(
                ask(served, name, f"{prompt} {text(70, 2)}", pool_id=pool_id)
                for name, (prompt, pool_id) in prompts.items()
            )
        )
        listing = await served.listing()
        assert shape(listing) == before
        lengths = {pool["pool_id"]: pool["prefix_len"] for pool in listing["pools"]}
        assert {event["source"] for event in served.events("pool_rebuilt")} == {"disk"}
        for (name, (prompt, pool_id)), answer in zip(prompts.items(), answers, strict=True):
            cached = answer["timings"]["cache_n"]
            whole = cached + answer["timings"]["prompt_n"]
            longest = len(await tokens_of(served, prompt)) if name == "s7" else lengths[pool_id]
            assert cached >= longest - 1, name
            assert cached >= 0.95 * whole, name
            assert "opencoti" not in answer or "pool_unknown" not in answer["opencoti"]
        assert listing["unattributed_cells"] == 0
        assert len(served.events("engine_ready")) == 2


async def test_a_tree_that_was_never_saved_is_computed_again(
    patched: Path, tiny: Path, tmp_path: Path
) -> None:
    """DUR-6: from disk where there is a file, by prefill otherwise."""
    env = {"POLYKV_DURABLE__POOLS_EVERY_S": "3600"}
    async with serve(tmp_path, *sizes(tiny), env=env) as served:
        await served.until(lambda: _rounds(served))
        await tree(served)
        before = shape(await served.listing())
        os.kill(served.engine_pid, signal.SIGKILL)
        await served.until(lambda: _lost(served))
        await ask(served, "held", text(5, 40))
        assert shape(await served.listing()) == before
        assert [event["source"] for event in served.events("pool_rebuilt")] == ["prefill"] * 3


async def _rounds(served: Served) -> bool:
    await asyncio.sleep(1.5)  # the first look for pools is over
    return True


async def _lost(served: Served) -> bool:
    return len(served.events("engine_ready")) == 2


async def test_a_proxy_that_is_killed_finds_pools_and_conversations(
    patched: Path, tiny: Path, tmp_path: Path
) -> None:
    """DUR-6: another process, another engine; the same ids and the same past."""
    async with serve(tmp_path, *sizes(tiny), env=QUICK, stop=False) as served:
        ids, leaves = await tree(served)
        mine = text(30, 80)
        await ask(served, "mine", mine)

        async def on_disk() -> bool:
            return {"mine", *ids.values()} <= set(await saved(served))

        await served.until(on_disk)
        before = shape(await served.listing())
        served.process.kill()
        await served.process.wait()
    async with serve(tmp_path, *sizes(tiny), env=QUICK) as served:
        past = len(await tokens_of(served, mine))
        answer = await ask(served, "mine", f"{mine} on we go")
        assert answer["timings"]["cache_n"] >= past - 1
        rides = await ask(served, "new", leaves[0]["prompt"] + " x", pool_id=leaves[0]["pool_id"])
        assert rides["timings"]["cache_n"] >= len(await tokens_of(served, leaves[0]["prompt"])) - 1
        assert shape(await served.listing()) == before


async def test_a_proxy_that_is_stopped_saves_what_it_has(patched: Path, tiny: Path, tmp_path: Path) -> None:
    """OPS-3: SIGTERM, and the next one goes on; unnamed conversations, too."""
    mine = text(30, 80)
    async with serve(tmp_path, *sizes(tiny)) as served:
        ids, _ = await tree(served)
        body = {"prompt": mine, "max_tokens": 4, "temperature": 0}
        assert (await served.http.post("/v1/completions", body)).status == 200
        before = shape(await served.listing())
        # far from idle for long enough
        assert all(entry["kind"] == "pool" for entry in (await saved(served)).values())
    async with serve(tmp_path, *sizes(tiny)) as served:
        past = len(await tokens_of(served, mine))
        answer = (await served.http.post("/v1/completions", body | {"prompt": mine + " on"})).json
        assert answer["timings"]["cache_n"] >= past - 1
        assert shape(await served.listing()) == before
        assert set(ids.values()) <= set(await saved(served))
