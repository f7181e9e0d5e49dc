"""Rules of pools that no other file is about, on the real engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import Served, bare_engine, serve
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTING = (b"/v1/chat/completions/input_tokens", b"/tokenize", b"/apply-template")
"""Of the engine's routes those that tell tokens of a chat."""


def text(seed: int, count: int) -> list[int]:
    """Tokens of some text."""
    dice = random.Random(seed)
    return [dice.randrange(100, 1000) for _ in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Served]:
    """A tiny model in small batches, so that pools take a while."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp("rules")
    llama(folder / "llama.gguf", smollm)
    sizes = ("--parallel", "3", "--ctx-size", "8192", "--max-pools", "4")
    words = [part for word in ("-b", "32", "-ub", "32") for part in ("--engine-arg", word)]
    env = {"POLYKV_POOLS__GRACE_S": "0", "POLYKV_POOLS__AUTO_POOLS": "false"}
    async with serve(folder, "--model", str(folder / "llama.gguf"), *sizes, *words, env=env) as proxy:
        yield proxy


async def write(served: Served, prompt: list[int], headers: dict[str, str] | None = None, **more: Any) -> Any:
    """A completion of two tokens."""
    body = {"prompt": prompt, "n_predict": 2, "ignore_eos": True, "temperature": 0, **more}
    answer = await served.http.post("/completion", body, headers)
    assert answer.status == 200, answer.body
    return answer


async def test_a_pool_is_whole_before_anybody_attaches(clean: Served) -> None:
    """POOL-3: who names it while it is computed waits, and rides on all of it; nothing is computed twice."""
    prefix = text(1, 1900)
    pool_id = (await clean.http.post("/polykv/tokenize", {"tokens": prefix})).json["pool_id"]
    done = await clean.computed()
    creating = asyncio.create_task(clean.http.post("/polykv/pools", {"tokens": prefix}))
    states = set()

    async def begun() -> bool:
        answer = await clean.http.get(f"/polykv/pools/{pool_id}")
        states.update([answer.json["residency"]] if answer.status == 200 else [])
        return bool(states)

    await clean.until(begun)
    riders = [write(clean, [*prefix, *text(2 + number, 20)], pool_id=pool_id) for number in range(3)]
    answers = await asyncio.gather(*riders)
    assert (await creating).status == 201
    assert states == {"materializing"}
    assert [answer.json["opencoti"]["n_pool_shared"] for answer in answers] == [len(prefix)] * 3
    assert await clean.computed() - done == len(prefix) + 3 * 20


async def test_a_longer_prefix_is_another_pool(clean: Served) -> None:
    """POOL-3: a tool more is a child, and those who ride on the old one do not notice."""
    prefix, tools = text(1, 300), text(2, 100)
    old = (await clean.http.post("/polykv/pools", {"tokens": prefix})).json
    first = await write(clean, [*prefix, *text(3, 20)], pool_id=old["pool_id"], session_id="old")
    new = (await clean.http.post(f"/polykv/pools/{old['pool_id']}/fork", {"tokens": [*prefix, *tools]})).json
    assert new["pool_id"] != old["pool_id"]
    await write(clean, [*prefix, *tools, 5], pool_id=new["pool_id"], session_id="new")
    shown = (await clean.http.get(f"/polykv/pools/{old['pool_id']}")).json
    assert (shown["prefix_len"], shown["residency"]) == (len(prefix), "resident")
    again = await write(clean, [*prefix, *text(3, 20), 7], pool_id=old["pool_id"], session_id="old")
    assert first.json["timings"]["prompt_n"] == 20
    assert again.json["timings"]["prompt_n"] == 1


@asynccontextmanager
async def overheard(base: str) -> AsyncIterator[tuple[str, bytearray]]:
    """A way to an engine on which all that is asked is kept: its address, and what was said."""
    host, _, port = base.removeprefix("http://").partition(":")
    said = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if keep:
                    said.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, back, keep=True), pump(there, writer, keep=False))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", said
    finally:
        server.close()


async def test_a_conversation_that_goes_on_is_not_tokenized(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """POOL-13: a message chain that its slot holds is enough; only a new conversation is counted."""
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--kv-unified", "-c", "4096", "--polykv-max-pools", "2")
    args = (*sizes, "--cache-ram", "0", "--slots", "--no-ui", "--slot-save-path", str(tmp_path))
    long = " ".join(f"Rule {number}." for number in range(80))
    messages = [{"role": "system", "content": long}, {"role": "user", "content": "One."}]
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    async with (
        bare_engine(patched, tmp_path / "llama.gguf", tmp_path / "engine", *args) as engine,
        overheard(engine.base) as (address, said),
        serve(tmp_path, "--engine-url", address) as served,
    ):

        async def turn() -> tuple[Any, int]:
            before = len(said)
            answer = await served.http.post("/v1/chat/completions", {"messages": messages, **body})
            heard = bytes(said[before:])
            assert heard.count(b"POST /v1/chat/completions HTTP/1.1") == 1
            return answer.json, sum(heard.count(b"POST " + path) for path in COUNTING)

        answer, counted = await turn()
        assert counted > 0
        for question in ("Two.", "Three."):
            messages += [answer["choices"][0]["message"], {"role": "user", "content": question}]
            answer, counted = await turn()
            assert answer["timings"]["cache_n"] > 300
            assert counted == 0


async def test_a_slot_is_the_proxys(clean: Served) -> None:
    """POOL-16: neither a header nor a member of a client's reaches a slot or a pool; nor do its orders."""
    prefix = text(1, 200)
    made = (await clean.http.post("/polykv/pools", {"tokens": prefix})).json
    plain = {"opencoti": {"auto_match": False, "session_id": "mine"}}
    answer = await write(clean, [*prefix, 5], {"X-PolyKV-Attach": "0", "X-PolyKV-Slot": "2"}, **plain)
    assert answer.json["timings"]["cache_n"] == 0
    (mine,) = [
        each for each in (await clean.http.get("/polykv/sessions")).json["sessions"] if each["resident"]
    ]
    other = (mine["slot"] + 1) % 3
    again = await write(clean, [*prefix, 5, 6], id_slot=other, **plain)
    assert again.json["opencoti"]["id_slot_ignored"] is True
    assert again.json["id_slot"] == mine["slot"]
    for path in ("/polykv/engine", "/polykv/engine/counters"):
        assert (await clean.http.get(path)).status == 404
    gone = await clean.http.post("/polykv/engine/pools/0?action=release", {})
    assert gone.status == 404
    assert (await clean.http.get(f"/polykv/pools/{made['pool_id']}")).json["residency"] == "resident"


async def test_a_client_that_asked_for_nothing_gets_nothing_in_its_body(clean: Served) -> None:
    """POOL-18: headers tell, and a record; the answer is what the engine says."""
    prefix = text(1, 200)
    made = (await clean.http.post("/polykv/pools", {"tokens": prefix})).json
    for stream in (False, True):
        answer = await write(clean, [*prefix, *text(2 + stream, 20)], stream=stream)
        assert b"opencoti" not in answer.body
        assert answer.headers["x-pool-id"] == made["pool_id"]
        assert answer.headers["x-cached-prefix-tokens"] == str(len(prefix))
        last = answer.events[-1] if stream else answer.json
        assert last["timings"]["cache_n"] == len(prefix)
        (record, *_) = (await clean.http.get("/polykv/requests?limit=1")).json["requests"]
        assert (record["pool_id"], record["planned_tokens"]) == (made["pool_id"], len(prefix))
        assert record["session_id"] == answer.headers["x-session-id"]
    mine = await write(clean, [*prefix, *text(4, 20)], pool_id=made["pool_id"], opencoti={"report": False})
    assert b"opencoti" not in mine.body


async def test_every_answer_proves_what_it_shared(clean: Served) -> None:
    """POOL-14: the plan is compared with what the engine says; what was emptied behind us falls short."""
    prefix = text(1, 200)
    made = (await clean.http.post("/polykv/pools", {"tokens": prefix})).json
    whole = await write(clean, [*prefix, *text(2, 20)], pool_id=made["pool_id"], session_id="one")
    assert whole.json["opencoti"]["n_pool_shared"] == len(prefix)
    assert (await clean.http.get("/props")).json["opencoti"]["attach_shortfall_total"] == 0
    assert (await clean.engine.post("/polykv/engine/pools/0?action=release", {})).status == 200
    short = await write(clean, [*prefix, *text(3, 20)], pool_id=made["pool_id"], session_id="two")
    assert short.json["opencoti"]["n_pool_shared"] == 0
    assert (await clean.http.get("/props")).json["opencoti"]["attach_shortfall_total"] == 1
    (told,) = clean.events("attach_shortfall")
    assert (told["planned_tokens"], told["cached_tokens"]) == (len(prefix), 0)
