"""Pools as slot files on the stock llama-server: the same API, with a copy for everyone who attaches."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import Http, Served, bare_engine, serve
from e2e.test_correctness import QUESTION, SECRET, differs, likeliest
from e2e.test_pools import OTHER, SYSTEM
from e2e.tiny_models import llama, mamba, sliding_window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")


def stock_engine(stock: Path) -> dict[str, str]:
    """Settings for a binary without the patch."""
    return {"POLYKV_ENGINE__BINARY": str(stock), "POLYKV_ENGINE__STOCK": "true"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def copying(
    tmp_path_factory: pytest.TempPathFactory, stock: Path, smollm: Path
) -> AsyncIterator[Served]:
    """A proxy whose engine is not patched, with a model that computes precisely: 4 slots, up to 6 pools."""
    folder = tmp_path_factory.mktemp("copying")
    llama(folder / "llama.gguf", smollm)
    model = ("--model", str(folder / "llama.gguf"))
    async with serve(folder, *model, *SIZES, env=stock_engine(stock)) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module")
async def clean(copying: Served) -> Served:
    """No pool and nothing in the slots."""
    for pool in (await copying.http.get("/polykv/pools")).json["pools"]:
        await copying.http("DELETE", f"/polykv/pools/{pool['pool_id']}?recursive=1")
    await empty_slots(copying)
    assert not files(copying)
    return copying


async def slots(served: Served) -> list[dict[str, Any]]:
    """The engine's slots, read directly."""
    return (await served.engine.get("/slots")).json


async def empty_slots(served: Served) -> None:
    """Erase every slot through the proxy."""
    for slot in await slots(served):

        async def erased(number: int = slot["id"]) -> bool:
            return (await served.http.post(f"/slots/{number}?action=erase", {})).status == 200

        await served.until(erased)


def files(served: Served) -> list[Path]:
    """Slot files in the engine's folder."""
    return sorted((served.folder / "state" / "slots-0").iterdir())


async def created(served: Served, path: str = "/polykv/pools", **body: Any) -> dict[str, Any]:
    """A new pool."""
    answer = await served.http.post(path, body)
    assert answer.status == 201, answer.body
    return answer.json


async def tokens_of(http: Http, text: str) -> list[int]:
    """Tokens of a text."""
    return (await http.post("/tokenize", {"content": text, "add_special": False})).json["tokens"]


async def ask(served: Served, prompt: list[int], **more: Any) -> dict[str, Any]:
    """One greedy token with its likeliest alternatives."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 10, "temperature": 0, "ignore_eos": True, **more}
    answer = await served.http.post("/completion", body)
    assert answer.status == 200, answer.body
    return answer.json


MESSAGES = [{"role": "system", "content": SYSTEM}]
QUESTIONS = [{"role": "user", "content": "Where is my parcel?"}]
APIS = {
    "/v1/chat/completions": {"messages": MESSAGES + QUESTIONS, "max_tokens": 4},
    "/v1/completions": {"prompt": SYSTEM + QUESTION, "max_tokens": 4},
    "/completion": {"prompt": SYSTEM + QUESTION, "n_predict": 4},
    "/v1/responses": {"instructions": SYSTEM, "input": "Where is my parcel?", "max_output_tokens": 4},
}


async def test_the_level_is_found_and_reported(copying: Served) -> None:
    """PROD-3: claimed after it was seen to work, with the reason why it is not more."""
    ours = (await copying.http.get("/props")).json["opencoti"]
    assert ours["capability"] == "copy"
    assert "not patched" in ours["capability_reason"]
    assert "polykv_pools_v1" in ours["features"]
    assert ours["engine_epoch"]
    assert ours["max_pools"] == 6
    listing = (await copying.http.get("/polykv/pools")).json
    assert listing["kv_cells_used"] is None
    assert not files(copying)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
async def test_a_request_attaches_on_every_api_that_can_be_pinned(
    clean: Served, path: str, stream: bool
) -> None:
    """POOL-8, POOL-14: the whole prefix is reused, in a slot that never saw it; the engine says so."""
    prefix = {"prompt": SYSTEM} if "prompt" in APIS[path] else {"messages": MESSAGES}
    pool = await created(clean, **prefix)
    assert pool["prompt_tokens_computed"] == pool["prefix_len"]
    body = APIS[path] | {"pool_id": pool["pool_id"], "session_id": f"new-{path}", "stream": stream}
    answer = await clean.http.post(path, body)
    assert answer.status == 200, answer.body
    carrying = [event for event in answer.events if "opencoti" in event] if stream else [answer.json]
    block = carrying[-1]["opencoti"]
    assert block["n_pool_shared"] == block["pool_match"] == pool["prefix_len"]
    assert answer.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
    assert not clean.events("attach_shortfall")


async def test_a_request_that_cannot_be_pinned_runs_without(clean: Served) -> None:
    """POOL-16: ``/v1/messages`` keeps no ``id_slot``; it says why, and its slot is learnt."""
    pool = await created(clean, messages=MESSAGES)
    body = {"system": SYSTEM, "messages": QUESTIONS, "max_tokens": 4, "pool_id": pool["pool_id"]}
    before = {slot["id"]: slot.get("id_task") for slot in await slots(clean)}
    answer = await clean.http.post("/v1/messages", body | {"session_id": "claude"})
    assert answer.status == 200, answer.body
    block = answer.json["opencoti"]
    assert block["unpooled_reason"] == "not_pinnable"
    assert block["n_pool_shared"] is None
    assert "pool_unknown" not in block
    ran_in = [slot["id"] for slot in await slots(clean) if slot.get("id_task") != before[slot["id"]]]
    sessions = (await clean.http.get("/polykv/sessions")).json["sessions"]
    assert [each["slot"] for each in sessions if each["session_id"] == "claude"] == ran_in
    (record,) = (await clean.http.get("/polykv/requests?session_id=claude")).json["requests"]
    assert [record["slot"]] == ran_in


async def test_four_sessions_have_a_copy_each(clean: Served) -> None:
    """The prefix is computed once; its cells exist five times over, and each answer proves its reuse."""
    pool = await created(clean, messages=MESSAGES)
    length = pool["prefix_len"]

    def turn(number: int) -> dict[str, Any]:
        question = [{"role": "user", "content": f"Parcel {number}?"}]
        return {"messages": MESSAGES + question, "max_tokens": 6, "session_id": f"agent-{number}"}

    answers = await asyncio.gather(
        *(
            clean.http.post("/v1/chat/completions", turn(number) | {"pool_id": pool["pool_id"]})
            for number in range(4)
        )
    )
    timings = [answer.json["timings"] for answer in answers]
    assert [each["cache_n"] for each in timings] == [length] * 4
    assert all(each["prompt_n"] < 40 for each in timings)
    assert len({each["slot"] for each in (await sessions(clean)).values()}) == 4
    assert all(slot["n_prompt_tokens"] > length for slot in await slots(clean))
    shown = (await clean.http.get(f"/polykv/pools/{pool['pool_id']}")).json
    assert shown["own_kv_bytes"] == 0
    assert shown["file_bytes"] == files(clean)[0].stat().st_size
    assert {each["session_id"] for each in shown["sessions"]} == {f"agent-{number}" for number in range(4)}


async def sessions(served: Served) -> dict[str, dict[str, Any]]:
    """Sessions that some slot holds, by id."""
    listed = (await served.http.get("/polykv/sessions")).json["sessions"]
    return {each["session_id"]: each for each in listed if each["resident"]}


async def test_a_conversation_goes_on_from_its_own_slot(clean: Served) -> None:
    """Its second turn reuses more than the pool: the slot is not filled from the file again."""
    pool = await created(clean, messages=MESSAGES)
    ours = {"pool_id": pool["pool_id"], "session_id": "talk", "max_tokens": 6, "temperature": 0}
    one = await clean.http.post("/v1/chat/completions", {"messages": MESSAGES + QUESTIONS, **ours})
    said = [one.json["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    two = await clean.http.post("/v1/chat/completions", {"messages": MESSAGES + QUESTIONS + said, **ours})
    before = one.json["timings"]["cache_n"] + one.json["timings"]["prompt_n"]
    assert two.json["timings"]["cache_n"] >= before - 1 > pool["prefix_len"]


async def test_requests_without_a_pool_find_one(clean: Served) -> None:
    """``auto_match`` works; no pool comes by itself."""
    pool = await created(clean, messages=MESSAGES)
    body = {"messages": MESSAGES + QUESTIONS, "max_tokens": 2}
    answer = await clean.http.post("/v1/chat/completions", body)
    assert answer.headers["x-pool-id"] == pool["pool_id"]
    assert answer.json["timings"]["cache_n"] == pool["prefix_len"]
    assert "opencoti" not in answer.json
    for question in ("one", "two"):
        other = [{"role": "system", "content": OTHER * 2}, {"role": "user", "content": question}]
        await clean.http.post("/v1/chat/completions", {"messages": other, "max_tokens": 2})
    listed = (await clean.http.get("/polykv/pools")).json["pools"]
    assert [each["pool_id"] for each in listed] == [pool["pool_id"]]


async def test_requests_of_all_kinds_at_once_come_to_their_slots(clean: Served) -> None:
    """POOL-16: pinned and unpinned together: nobody's slot is taken, no session is lost to another."""
    pool = await created(clean, messages=MESSAGES)
    chats = [
        clean.http.post(
            "/v1/chat/completions",
            {
                "messages": [*MESSAGES, {"role": "user", "content": f"Chat {number}?"}],
                "max_tokens": 12,
                "pool_id": pool["pool_id"],
                "session_id": f"chat-{number}",
            },
        )
        for number in range(6)
    ]
    others = [
        clean.http.post(
            "/v1/messages",
            {"messages": [{"role": "user", "content": f"Letter {number}?"}], "max_tokens": 12},
        )
        for number in range(6)
    ]
    answers = await asyncio.gather(*(each for pair in zip(chats, others, strict=True) for each in pair))
    assert [answer.status for answer in answers] == [200] * 12
    assert all(answer.json["timings"]["cache_n"] >= pool["prefix_len"] for answer in answers[::2])
    assert not clean.events("attach_shortfall")


async def test_a_fork_goes_on_from_its_parents_file(clean: Served) -> None:
    """Only what is new is computed, whether the child extends its parent or branches off."""
    tokens = await tokens_of(clean.http, SYSTEM)
    parent = await created(clean, tokens=tokens)
    more = await tokens_of(clean.http, " " + OTHER)
    for branch_pos in (len(tokens), len(tokens) // 2):
        full = tokens[:branch_pos] + more
        child = await created(clean, f"/polykv/pools/{parent['pool_id']}/fork", tokens=full)
        assert child["branch_pos"] == branch_pos
        assert child["prompt_tokens_computed"] == len(more)
        answer = await ask(clean, [*full, 5, 6], pool_id=child["pool_id"], session_id=f"at-{branch_pos}")
        assert answer["timings"]["cache_n"] == len(full)
    assert len(files(clean)) == 3


async def test_a_released_pool_is_deleted(clean: Served) -> None:
    """The file is gone at once; those who attached have cells of their own, and go on."""
    pool = await created(clean, prompt=SYSTEM)
    body = {"prompt": SYSTEM + QUESTION, "n_predict": 2, "pool_id": pool["pool_id"], "session_id": "rider"}
    await clean.http.post("/completion", body)
    assert len(files(clean)) == 1
    gone = (await clean.http("DELETE", f"/polykv/pools/{pool['pool_id']}")).json
    assert gone["released"] == [pool["pool_id"]]
    assert (gone["cells_freed"], gone["cells_draining"], gone["pool_file_bytes"]) == (0, 0, 0)
    assert not files(clean)
    answer = (await clean.http.post("/completion", body)).json
    assert answer["opencoti"]["pool_unknown"] is True
    assert answer["timings"]["cache_n"] > pool["prefix_len"] - 2


async def test_an_evicted_pool_is_computed_again(clean: Served) -> None:
    """Id and tokens stay, the file does not; it comes back when somebody attaches."""
    pool = await created(clean, prompt=SYSTEM)
    assert (await clean.http.post(f"/polykv/pools/{pool['pool_id']}/evict", {})).status == 200
    assert not files(clean)
    body = {"prompt": SYSTEM + QUESTION, "n_predict": 1, "pool_id": pool["pool_id"]}
    answer = (await clean.http.post("/completion", body)).json
    assert answer["opencoti"]["n_pool_shared"] == answer["opencoti"]["pool_match"]
    assert len(files(clean)) == 1


@pytest.mark.parametrize("damage", ["deleted", "cut", "overwritten"])
async def test_a_pool_whose_file_is_damaged_is_computed_again(clean: Served, damage: str) -> None:
    """POOL-1: the first to attach computes its prompt, and is told; the next finds the pool as it was."""
    pool = await created(clean, prompt=SYSTEM)
    (file,) = files(clean)
    if damage == "deleted":
        file.unlink()
    else:
        whole = file.read_bytes()
        file.write_bytes(whole[:-100] if damage == "cut" else b"\0" * len(whole))
    body = {"prompt": SYSTEM + QUESTION, "n_predict": 1, "pool_id": pool["pool_id"]}
    answer = await clean.http.post("/completion", body)
    assert answer.status == 200, answer.body
    assert answer.json["opencoti"]["n_pool_shared"] == 0
    (shown,) = (await clean.http.get("/polykv/pools")).json["pools"]
    assert (shown["pool_id"], shown["residency"]) == (pool["pool_id"], "evicted")
    await empty_slots(clean)
    answer = await clean.http.post("/completion", body)
    assert answer.json["timings"]["cache_n"] == answer.json["opencoti"]["n_pool_shared"] > 0
    (shown,) = (await clean.http.get("/polykv/pools")).json["pools"]
    assert shown["residency"] == "resident"
    assert clean.process.returncode is None
    assert len(files(clean)) == 1


async def test_capacity_counts_files(clean: Served) -> None:
    """POOL-5: one too many is a 409 that names what could go."""
    for number in range(6):
        await created(clean, prompt=f"{number} {SYSTEM[:200]}")
    refused = await clean.http.post("/polykv/pools", {"prompt": OTHER})
    assert refused.status == 409
    assert refused.json["error"]["code"] == "pool_capacity_exhausted"
    assert "6 files" in refused.json["error"]["message"]
    assert len(refused.json["error"]["releasable"]) == 6


# -- snapshots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capped", [False, True])
async def test_a_session_becomes_a_pool(clean: Served, capped: bool) -> None:
    """Nothing is computed; the session keeps its slot and goes on, and a cap is honoured."""
    tokens = await tokens_of(clean.http, SYSTEM)
    told = await ask(clean, tokens, n_predict=8, session_id="teller", return_tokens=True)
    cap = {"n_tokens": len(tokens) - 30} if capped else {}
    pool = await created(clean, from_session="teller", **cap)
    held = tokens + told["tokens"]
    length = len(tokens) - 30 if capped else pool["prefix_len"]
    assert pool["prefix_len"] == length
    assert capped or len(tokens) <= length <= len(held)
    answer = await ask(clean, [*held[:length], 5, 6], pool_id=pool["pool_id"], session_id="other")
    assert answer["timings"]["cache_n"] == length
    again = await ask(clean, [*held[:-1], 7], session_id="teller")
    assert again["timings"]["cache_n"] >= len(tokens)


async def test_a_session_at_work_is_not_saved(clean: Served) -> None:
    """The engine would save it when it is done: refused at once, and nothing waits."""
    body = {"prompt": SYSTEM, "n_predict": 900, "ignore_eos": True, "session_id": "busy"}
    writer = asyncio.create_task(clean.http.post("/completion", body))

    async def works() -> bool:
        return any(slot["is_processing"] for slot in await slots(clean))

    await clean.until(works)
    refused = await clean.http.post("/polykv/pools", {"from_session": "busy"})
    assert (refused.status, refused.json["error"]["code"]) == (409, "slot_busy")
    assert not writer.done()
    writer.cancel()


# -- what is computed -------------------------------------------------------------------------------------


async def test_a_copy_answers_as_a_prompt_computed_alone(clean: Served) -> None:
    """Also in part, and after another session wrote behind the same pool: nothing of it shows."""
    tokens = await tokens_of(clean.http, SYSTEM)
    pool = await created(clean, tokens=tokens)
    secret = tokens + await tokens_of(clean.http, SECRET)
    await ask(clean, secret, n_predict=8, pool_id=pool["pool_id"], session_id="one")
    question = await tokens_of(clean.http, QUESTION)
    for cut in (len(tokens), len(tokens) - 1, 300):
        prompt = tokens[:cut] + question
        shared = await ask(clean, prompt, pool_id=pool["pool_id"], session_id=f"cut-{cut}")
        assert shared["timings"]["cache_n"] == cut
        alone = await ask(clean, prompt, cache_prompt=False, session_id="alone")
        assert alone["timings"]["cache_n"] == 0
        assert not differs(likeliest(shared), likeliest(alone))


# -- the engine's life ------------------------------------------------------------------------------------


async def test_a_killed_engine_loses_its_pools_and_files(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """A file says nothing about the weights it came from: lost with the engine, and created again."""
    llama(tmp_path / "llama.gguf", smollm)
    model = ("--model", str(tmp_path / "llama.gguf"))
    async with serve(tmp_path, *model, *SIZES, env=stock_engine(stock)) as served:
        pool = await created(served, prompt=SYSTEM)
        body = {"prompt": SYSTEM + QUESTION, "n_predict": 2, "pool_id": pool["pool_id"]}
        await served.http.post("/completion", body)
        epoch = (await served.http.get("/props")).json["opencoti"]["engine_epoch"]
        os.kill(served.engine_pid, signal.SIGKILL)

        async def back() -> bool:
            return len(served.events("engine_ready")) == 2

        await served.until(back)
        assert not files(served)
        assert (await served.http.get("/props")).json["opencoti"]["engine_epoch"] != epoch
        listed = (await served.http.get("/polykv/pools")).json["pools"]
        assert [(each["pool_id"], each["residency"]) for each in listed] == [(pool["pool_id"], "lost")]
        answer = (await served.http.post("/completion", body)).json
        assert answer["opencoti"]["pool_unknown"] is True
        again = await created(served, prompt=SYSTEM)
        assert again["pool_id"] == pool["pool_id"]
        answer = (await served.http.post("/completion", body | {"session_id": "new"})).json
        assert answer["timings"]["cache_n"] >= pool["prefix_len"] - 1


async def test_an_engine_of_somebody_else_keeps_its_files(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """Found out by URL; what the proxy cannot delete is listed, and its name is used again."""
    llama(tmp_path / "llama.gguf", smollm)
    (tmp_path / "saved").mkdir()
    args = ("--parallel", "2", "-c", "4096", "--cache-ram", "0", "--slot-save-path", str(tmp_path / "saved"))
    async with (
        bare_engine(stock, tmp_path / "llama.gguf", tmp_path / "engine", *args) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        assert (await served.http.get("/props")).json["opencoti"]["capability"] == "copy"
        pool = await created(served, prompt=SYSTEM)
        body = {"prompt": SYSTEM + QUESTION, "n_predict": 1, "pool_id": pool["pool_id"]}
        answer = (await served.http.post("/completion", body)).json
        assert answer["opencoti"]["n_pool_shared"] == answer["opencoti"]["pool_match"]
        gone = (await served.http("DELETE", f"/polykv/pools/{pool['pool_id']}")).json
        left = [path.name for path in (tmp_path / "saved").iterdir()]
        assert gone["pool_files_left"] == left
        assert len(left) == 1
        again = await created(served, prompt=OTHER)
        assert [path.name for path in (tmp_path / "saved").iterdir()] == left
        shown = (await served.http.get("/polykv/pools")).json["engines"][0]
        assert shown["pool_files_left"] == []
        snapshot = await served.http.post("/polykv/pools", {"from_session": "nobody"})
        assert snapshot.status == 404
        assert again["created"] is True


async def test_an_engine_that_clears_idle_slots_only_relays(
    stock: Path, smollm: Path, tmp_path: Path
) -> None:
    """PROD-3: its defaults empty a slot when another one runs; the self-test sees it and says so."""
    llama(tmp_path / "llama.gguf", smollm)
    (tmp_path / "saved").mkdir()
    args = ("--parallel", "2", "-c", "4096", "--kv-unified", "--slot-save-path", str(tmp_path / "saved"))
    async with (
        bare_engine(stock, tmp_path / "llama.gguf", tmp_path / "engine", *args) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        ours = (await served.http.get("/props")).json["opencoti"]
        assert ours["capability"] == "relay"
        assert "reused 0" in ours["capability_reason"]


async def test_a_recurrent_state_is_copied_whole(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """A state has no parts: who has the whole pool rides on it, who has less computes."""
    mamba(tmp_path / "m.gguf", smollm)
    async with serve(
        tmp_path, "--model", str(tmp_path / "m.gguf"), *SIZES, env=stock_engine(stock)
    ) as served:
        assert (await served.http.get("/props")).json["opencoti"]["capability"] == "copy"
        tokens = await tokens_of(served.http, SYSTEM)
        pool = await created(served, tokens=tokens)
        whole = await ask(served, [*tokens, 5, 6], pool_id=pool["pool_id"], session_id="whole")
        assert whole["timings"]["cache_n"] == whole["opencoti"]["n_pool_shared"] == len(tokens)
        part = await ask(served, [*tokens[:-9], 5, 6], pool_id=pool["pool_id"], session_id="part")
        assert part["opencoti"]["pool_match"] == len(tokens) - 9
        assert part["opencoti"]["n_pool_shared"] == 0
        found = await served.http.post("/completion", {"prompt": [*tokens, 8, 9], "n_predict": 1})
        assert found.headers["x-pool-id"] == pool["pool_id"]
        assert found.json["timings"]["cache_n"] == len(tokens)
        assert not served.events("attach_shortfall")


async def test_a_sliding_window_is_noticed(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """The engine does not go on from a file that is longer than the window: no pools, and it says why."""
    sliding_window(tmp_path / "s.gguf", smollm)
    async with serve(
        tmp_path, "--model", str(tmp_path / "s.gguf"), *SIZES, env=stock_engine(stock)
    ) as served:
        ours = (await served.http.get("/props")).json["opencoti"]
        assert ours["capability"] == "relay"
        assert "reused 0 of 144 restored tokens" in ours["capability_reason"]
        assert not files(served)
        assert (await served.http.post("/polykv/pools", {"prompt": SYSTEM})).status == 501
