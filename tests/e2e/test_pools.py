"""Pools on the real engine: create, attach, report, release. Counts are the engine's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from e2e.harness import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = "You are a careful assistant of a small shop. " + " ".join(
    f"Rule {number}: never promise more than {number} parcels a day." for number in range(1, 25)
)
OTHER = "You translate letters. " + " ".join(
    f"Letter {number} is about the harbour." for number in range(1, 20)
)


def chat(text: str, **extra: Any) -> dict[str, Any]:
    """A short greedy chat on the shared system prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **extra}


async def make(served: Served, **body: Any) -> dict[str, Any]:
    """Create a pool, from the shared system prompt unless told otherwise."""
    if not body.keys() & {"messages", "tokens", "prompt"}:
        body["messages"] = [{"role": "system", "content": SYSTEM}]
    answer = await served.http.post("/polykv/pools", body)
    assert answer.status in (200, 201), answer.json
    return answer.json


async def drop(served: Served, pool_id: str) -> dict[str, Any]:
    """Release a pool."""
    answer = await served.http("DELETE", f"/polykv/pools/{pool_id}")
    assert answer.status == 200, answer.json
    return answer.json


@pytest_asyncio.fixture(loop_scope="module")
async def clean(served: Served) -> Served:
    """No pool and nothing in the slots."""
    for pool in (await served.http.get("/polykv/pools")).json["pools"]:
        await drop(served, pool["pool_id"])
    await served.empty_slots()
    assert await served.cells_used() == 0
    return served


async def test_exact_attach_computes_only_what_is_new(clean: Served) -> None:
    """POOL-6, 8: a chat on a pool reuses exactly the pool's tokens and adds only its own cells."""
    pool = await make(clean)
    length = pool["prefix_len"]
    assert pool["prompt_tokens_computed"] == length
    assert pool["shared_probe_tokens"] == length
    assert await clean.cells_used() == length

    answer = await clean.http.post("/v1/chat/completions", chat("Hello", pool_id=pool["pool_id"]))
    timings, block = answer.json["timings"], answer.json["opencoti"]
    assert timings["cache_n"] == length
    assert (block["n_pool_shared"], block["pool_match"], block["pool_len"]) == (length, length, length)
    assert answer.headers["x-pool-id"] == pool["pool_id"]
    assert answer.headers["x-cached-prefix-tokens"] == str(length)
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == length
    counters = await clean.quiet()
    # the last generated token is not in the cache
    assert counters["kv"]["n_used"] == length + timings["prompt_n"] + timings["predicted_n"] - 1


async def test_diverging_request_attaches_to_what_agrees(clean: Served) -> None:
    """POOL-8: a request whose prompt leaves the pool's tokens early reuses the common part only."""
    pool = await make(clean)
    messages = [
        {"role": "system", "content": SYSTEM[:300] + " But be brief."},
        {"role": "user", "content": "Hi"},
    ]
    body = {"messages": messages, "max_tokens": 2, "pool_id": pool["pool_id"]}
    answer = (await clean.http.post("/v1/chat/completions", body)).json
    assert 0 < answer["timings"]["cache_n"] < pool["prefix_len"]
    assert answer["timings"]["cache_n"] == answer["opencoti"]["pool_match"]


async def test_pool_from_prompt_and_from_tokens_is_the_same_pool(clean: Served) -> None:
    """POOL-1: the id names the content, however it was given, and creating it again computes nothing."""
    first = await make(clean, prompt=SYSTEM)
    tokens = (await clean.http.post("/tokenize", {"content": SYSTEM, "add_special": True})).json["tokens"]
    second = await make(clean, tokens=tokens)
    assert first["pool_id"] == second["pool_id"]
    assert (first["created"], second["created"]) == (True, False)
    assert second["prompt_tokens_computed"] == 0
    assert await clean.cells_used() == len(tokens)


async def test_released_id_revives_with_its_content(clean: Served) -> None:
    """POOL-1: the same content has the same id also after a release."""
    first = await make(clean)
    await drop(clean, first["pool_id"])
    again = await make(clean)
    assert again["pool_id"] == first["pool_id"]
    assert again["created"] is True


async def test_requests_on_a_released_or_unknown_pool_run_plain(clean: Served) -> None:
    """POOL-8: a handle that is gone costs speed, never the answer."""
    pool = await make(clean)
    await drop(clean, pool["pool_id"])
    for handle in (pool["pool_id"], "never-existed"):
        answer = await clean.http.post(
            "/v1/chat/completions", chat("Hi", pool_id=handle, session_id=handle[:8])
        )
        assert answer.status == 200
        assert answer.json["opencoti"]["pool_unknown"] is True
        assert "x-pool-id" not in answer.headers


async def test_exhaustion_names_what_could_be_released(clean: Served) -> None:
    """POOL-5: out of sequence ids is a 409 that lists unpinned pools; nothing is evicted silently."""
    pools = [await make(clean, prompt=f"{OTHER} Copy {number}.", pin=number == 0) for number in range(6)]
    refused = await clean.http.post("/polykv/pools", {"prompt": f"{OTHER} One too many."})
    assert refused.status == 409
    error = refused.json["error"]
    assert error["code"] == "pool_capacity_exhausted"
    assert set(error["releasable"]) == {pool["pool_id"] for pool in pools[1:]}
    listed = (await clean.http.get("/polykv/pools")).json
    assert len(listed["pools"]) == 6
    assert (listed["seq_ids_used"], listed["seq_ids_max"]) == (10, 10)
    await drop(clean, pools[3]["pool_id"])
    assert (await make(clean, prompt=f"{OTHER} One too many."))["created"] is True


async def test_release_keeps_cells_that_are_held_and_frees_the_rest(clean: Served) -> None:
    """POOL-4, 9: the id goes at once, cells when their last holder leaves, and both are accounted for."""
    pool = await make(clean)
    length = pool["prefix_len"]
    await clean.http.post("/v1/chat/completions", chat("Hi", pool_id=pool["pool_id"]))
    await clean.quiet()
    gone = await drop(clean, pool["pool_id"])
    assert (gone["cells_freed"], gone["cells_draining"], gone["holders"]) == (0, length, 1)
    listed = (await clean.http.get("/polykv/pools")).json
    assert listed["pools"] == []
    assert [rest["cells"] for rest in listed["draining"]] == [length]
    assert listed["unattributed_cells"] == 0
    await clean.empty_slots()
    assert await clean.cells_used() == 0
    assert (await clean.listing())["draining"] == []


async def test_release_is_idempotent_and_an_unknown_id_is_404(clean: Served) -> None:
    """POOL-9: a second DELETE answers 200 already_released, an id never seen 404."""
    pool = await make(clean)
    assert (await drop(clean, pool["pool_id"]))["cells_freed"] == pool["prefix_len"]
    assert (await drop(clean, pool["pool_id"]))["already_released"] is True
    assert (await clean.http("DELETE", "/polykv/pools/0123")).status == 404


async def test_pins_are_set_and_taken_away(clean: Served) -> None:
    """POOL-9: pin and unpin are idempotent and visible; a pin nobody uses is flagged."""
    pool = await make(clean)
    path = f"/polykv/pools/{pool['pool_id']}"
    for verb, pinned in (("pin", True), ("pin", True), ("unpin", False), ("unpin", False)):
        assert (await clean.http.post(f"{path}/{verb}", {})).json["pinned"] is pinned
        view = (await clean.http.get(path)).json
        assert (view["pinned"], view["orphaned_pin"]) == (pinned, pinned)


async def test_cells_by_ownership_sum_to_the_engines_figure(clean: Served) -> None:
    """POOL-10: own + private suffixes + unpooled + draining is kv_cells_used, in one document."""
    one, two = await make(clean), await make(clean, prompt=OTHER)
    for number in range(3):
        body = chat(f"Question {number}", pool_id=one["pool_id"], session_id=f"s{number}")
        assert (await clean.http.post("/v1/chat/completions", body)).status == 200
    plain = {"prompt": "Once upon a time", "max_tokens": 5}
    assert (await clean.http.post("/v1/completions", plain)).status == 200
    await drop(clean, one["pool_id"])
    listed = await clean.listing()
    assert [pool["pool_id"] for pool in listed["pools"]] == [two["pool_id"]]
    assert listed["unattributed_cells"] == 0
    per_cell = (await clean.http.get("/props")).json["opencoti"]["kv_bytes_per_cell"]
    owned = sum(pool["own_kv_bytes"] for pool in listed["pools"]) // per_cell
    unpooled = sum(slot["cells"] for slot in listed["unpooled"])
    draining = sum(rest["cells"] for rest in listed["draining"])
    slots = (await clean.counters())["slots"]
    suffixes = sum(slot["n_tokens"] - slot["n_pool_shared"] for slot in slots if slot["n_pool_shared"])
    assert unpooled > 0
    assert draining == one["prefix_len"]
    assert owned + unpooled + draining + suffixes == listed["kv_cells_used"] == await clean.cells_used()


async def test_eight_agents_on_four_slots_compute_the_prefix_once(clean: Served) -> None:
    """The main job: prompt tokens computed = prefix once + each agent's own, more agents than slots."""
    before = await clean.quiet()
    pool = await make(clean)
    bodies = [
        chat(f"I am agent {number}", pool_id=pool["pool_id"], session_id=f"agent-{number}")
        for number in range(8)
    ]
    answers = await asyncio.gather(*(clean.http.post("/v1/chat/completions", body) for body in bodies))
    assert [answer.status for answer in answers] == [200] * 8
    length = pool["prefix_len"]
    assert all(answer.json["timings"]["cache_n"] >= length for answer in answers)
    after = await clean.quiet()
    computed = sum(
        now["n_prompt_total"] - then["n_prompt_total"]
        for now, then in zip(after["slots"], before["slots"], strict=True)
    )
    own = sum(answer.json["usage"]["prompt_tokens"] - length for answer in answers)
    assert length + own >= computed >= length
    assert after["n_deferred"] == 0
    assert {answer.headers["x-session-id"] for answer in answers} == {
        f"agent-{number}" for number in range(8)
    }


async def test_same_content_created_at_once_is_computed_once(clean: Served) -> None:
    """Concurrent creators of one content share one prefill; one of them is told that it was created."""
    before = await clean.quiet()
    made = await asyncio.gather(*(make(clean) for _ in range(5)))
    assert len({pool["pool_id"] for pool in made}) == 1
    assert sum(pool["created"] for pool in made) == 1
    after = await clean.quiet()
    computed = sum(
        now["n_prompt_total"] - then["n_prompt_total"]
        for now, then in zip(after["slots"], before["slots"], strict=True)
    )
    assert computed == made[0]["prefix_len"]


async def test_creator_who_leaves_stops_the_prefill(clean: Served) -> None:
    """ENG-4: a pool that nobody waits for any more is not computed to its end; slot and cells come back."""
    prompt = " ".join(f"Line {number} of a long story about the sea." for number in range(420))

    async def create() -> None:
        await clean.http.post("/polykv/pools", {"prompt": prompt})

    async def computing() -> bool:
        return any(slot["state"] == "prompt" for slot in (await clean.counters())["slots"])

    task = asyncio.create_task(create())
    await clean.until(computing)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    counters = await clean.quiet()
    assert counters["pools"] == []

    async def nothing_left() -> bool:
        return await clean.cells_used() == 0

    await clean.until(nothing_left)
    assert (await clean.http.get("/polykv/pools")).json["pools"] == []
    assert (await make(clean))["created"] is True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("Hi")),
        ("/v1/chat/completions", chat("Hi", stream_options={"include_usage": True})),
        (
            "/v1/messages",
            {"system": SYSTEM, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        ),
        ("/v1/responses", {"instructions": SYSTEM, "input": "Hi", "max_output_tokens": 4}),
        ("/v1/completions", {"prompt": None, "max_tokens": 4}),
        ("/completion", {"prompt": None, "n_predict": 4}),
    ],
    ids=["chat", "chat+usage", "anthropic", "responses", "text", "llama"],
)
async def test_every_api_attaches_and_reports_once(
    served: Served, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    """POOL-8, 18: all five text APIs ride on a pool by pool_id and say so in exactly one block."""
    plain = "prompt" in body
    pool = await make(served, prompt=SYSTEM) if plain else await make(served)
    sent = {**body, "pool_id": pool["pool_id"], "stream": stream}
    if plain:
        sent["prompt"] = f"{SYSTEM} And now to something else: {path}"
    if not stream:
        sent.pop("stream_options", None)
    answer = await served.http.post(path, sent)
    assert answer.status == 200, answer.body
    documents = answer.events if stream else [answer.json]
    blocks = [document["opencoti"] for document in documents if "opencoti" in document]
    assert len(blocks) == 1
    assert blocks[0]["pool_id"] == pool["pool_id"]
    assert blocks[0]["n_pool_shared"] == pool["prefix_len"]
    assert blocks[0]["ctx_used"] > pool["prefix_len"]
    slot = next(
        slot for slot in (await served.quiet())["slots"] if slot["n_pool_shared"] >= pool["prefix_len"]
    )
    assert slot["n_cached_total"] >= pool["prefix_len"]
    await drop(served, pool["pool_id"])


@pytest.mark.parametrize(
    ("count", "path", "body"),
    [
        ("/v1/chat/completions/input_tokens", "/v1/chat/completions", chat("Hi")),
        (
            "/v1/messages/count_tokens",
            "/v1/messages",
            {"system": SYSTEM, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        ),
        (
            "/v1/responses/input_tokens",
            "/v1/responses",
            {"instructions": SYSTEM, "input": "Hi", "max_output_tokens": 2},
        ),
    ],
    ids=["chat", "anthropic", "responses"],
)
async def test_counting_gives_the_very_tokens_of_the_prompt(
    clean: Served, count: str, path: str, body: dict[str, Any]
) -> None:
    """ENG-11: a pool of the ids that were counted holds all of the prompt, to its last token."""
    tokens = (await clean.engine.post(f"{count}?tokens=1", body)).json["tokens"]
    pool = await make(clean, tokens=tokens)
    answer = await clean.http.post(path, {**body, "pool_id": pool["pool_id"]})
    block = answer.json["opencoti"]
    assert block["pool_match"] == len(tokens)
    assert block["n_pool_shared"] == len(tokens) - 1  # the engine computes the last one to go on from it
    assert (await clean.listing())["unattributed_cells"] == 0


async def test_several_completions_share_the_pool(clean: Served) -> None:
    """POOL-19: n=2 attaches once and answers twice, and afterwards no cell is unexplained."""
    pool = await make(clean)
    answer = await clean.http.post("/v1/chat/completions", chat("Hi", n=2, pool_id=pool["pool_id"]))
    assert answer.status == 200
    assert len(answer.json["choices"]) == 2
    assert answer.json["timings"]["cache_n"] == pool["prefix_len"]
    assert (await clean.listing())["unattributed_cells"] == 0


async def test_cap_and_strict(clean: Served) -> None:
    """POOL-8: shared_prefix_n_tokens caps the attach; above the match it is refused only in strict mode."""
    pool = await make(clean)
    capped = await clean.http.post(
        "/v1/chat/completions",
        chat("Hi", pool_id=pool["pool_id"], shared_prefix_n_tokens=100, session_id="c"),
    )
    assert capped.json["timings"]["cache_n"] == 100
    assert capped.json["opencoti"]["n_pool_shared"] == 100
    body = chat("Hi", pool_id=pool["pool_id"], shared_prefix_n_tokens=5000)
    assert (await clean.http.post("/v1/chat/completions", body)).status == 200
    refused = await clean.http.post("/v1/chat/completions", {**body, "opencoti": {"strict": True}})
    assert refused.status == 400
    assert refused.json["error"]["param"] == "shared_prefix_n_tokens"
    assert refused.json["error"]["matched_tokens"] == pool["prefix_len"]


async def test_key_of_another_caller_does_not_open_a_pool(clean: Served) -> None:
    """PROD-9: a pool serves the key that created it; to other keys its id is unknown."""
    mine, foreign = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer foreign"}
    body = {"messages": [{"role": "system", "content": SYSTEM}]}
    pool = (await clean.http.post("/polykv/pools", body, mine)).json
    own = await clean.http.post("/v1/chat/completions", chat("Hi", pool_id=pool["pool_id"]), mine)
    assert own.json["timings"]["cache_n"] == pool["prefix_len"]
    other = await clean.http.post("/v1/chat/completions", chat("Hi", pool_id=pool["pool_id"]), foreign)
    assert other.json["opencoti"]["pool_unknown"] is True
    assert other.json["timings"]["cache_n"] < pool["prefix_len"]
    assert (await clean.http.get(f"/polykv/pools/{pool['pool_id']}", headers=foreign)).status == 404
    assert (await clean.http("DELETE", f"/polykv/pools/{pool['pool_id']}", headers=foreign)).status == 404
    assert (await clean.http("DELETE", f"/polykv/pools/{pool['pool_id']}", headers=mine)).status == 200


async def test_one_keys_names_say_nothing_of_anothers(clean: Served) -> None:
    """PROD-9: two keys call a session the same; each has it under that name, with KV of its own."""
    one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    heard = {}
    for key, number in ((one, 1), (two, 2)):
        body = chat(f"I am {number}.", session_id="agent", max_tokens=4, opencoti={"auto_match": False})
        answer = await clean.http.post("/v1/chat/completions", body, key)
        assert answer.json["opencoti"]["session_id"] == answer.headers["x-session-id"] == "agent"
        assert answer.json["timings"]["cache_n"] == 0
        heard[number] = (body["messages"], answer.json)
    assert (await clean.http.post("/polykv/sessions/agent/close", {}, one)).status == 200
    assert (await clean.http.post("/polykv/sessions/agent/close", {}, one)).status == 404
    messages, told = heard[2]
    said = [told["choices"][0]["message"], {"role": "user", "content": "And?"}]
    again = chat("", session_id="agent", max_tokens=4) | {"messages": [*messages, *said]}
    answer = await clean.http.post("/v1/chat/completions", again, two)
    assert answer.json["timings"]["cache_n"] >= told["usage"]["prompt_tokens"]
    (listed,) = (await clean.http.get("/polykv/sessions", headers=two)).json["sessions"]
    assert (listed["session_id"], listed["turns"]) == ("agent", 2)


async def test_conversations_return_to_the_slot_that_holds_them(clean: Served) -> None:
    """POOL-12, 16: interleaved agents without ids compute only new tokens from turn two on."""
    histories = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"I am {n}."}] for n in range(3)
    ]
    said = [0] * 3
    for turn in range(3):
        for number, history in enumerate(histories):
            body = {"messages": history, "max_tokens": 6, "temperature": 0}
            answer = (await clean.http.post("/v1/chat/completions", body)).json
            if turn:
                # what is new: the last answer's tail and this turn's question
                assert answer["timings"]["cache_n"] >= said[number], (turn, number)
                assert answer["timings"]["prompt_n"] < 40, (turn, number)
            said[number] = answer["usage"]["prompt_tokens"]
            history.append(answer["choices"][0]["message"])
            history.append({"role": "user", "content": f"And then, in turn {turn}?"})


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_picture_is_the_engines_to_refuse(clean: Served, path: str) -> None:
    """POOL-19: this model sees none; its own refusal comes through, and nothing that was there is gone."""
    made = await make(clean)
    talk = chat("Hi.", session_id="talks", pool_id=made["pool_id"])
    assert (await clean.http.post("/v1/chat/completions", talk)).status == 200
    before = await clean.listing()

    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": PIXEL}}
    if path == "/v1/messages":
        data = PIXEL.partition(",")[2]
        part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    elif path == "/v1/responses":
        part = {"type": "input_image", "image_url": PIXEL}
    seen = [{"role": "user", "content": [part]}]
    body = {"input": seen} if path == "/v1/responses" else {"messages": seen, "max_tokens": 2}
    direct = await clean.engine.post(path, body)
    assert direct.status >= 400
    for stream in (False, True):
        asked = {**body, "pool_id": made["pool_id"], "session_id": "sees", "stream": stream}
        refused = await clean.http.post(path, asked)
        assert (refused.status, refused.json) == (direct.status, direct.json)
    after = await clean.listing()
    assert after["kv_cells_used"] == before["kv_cells_used"]
    assert after["unattributed_cells"] == 0
    assert [pool["residency"] for pool in after["pools"]] == ["resident"]
    again = await clean.http.post("/v1/chat/completions", talk)
    assert again.json["timings"]["prompt_n"] == 1
