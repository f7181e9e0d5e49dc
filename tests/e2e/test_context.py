"""The end of a context on the real engine: one typed error, nothing lost, a mark where the wall was hit."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from e2e.harness import Answer, bare_engine, serve
from e2e.tiny_models import llama
from polykv_proxy.engine.overflow import recognise

if TYPE_CHECKING:
    from pathlib import Path

LONG = "This sentence is one of very many. " * 400
APIS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 4}),
]


async def test_a_prompt_beyond_the_window(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-4, CTX-5: the same error on three APIs, streaming or not; what was resident stays."""
    async with serve(tmp_path, "--parallel", "2", "--ctx-size", "1024", "--max-pools", "1") as served:
        first = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 8, "session_id": "s"}
        said = (await served.http.post("/v1/chat/completions", first)).json
        for path, body in APIS:
            for stream in (False, True):
                answer = await served.http.post(path, {**body, "stream": stream})
                assert answer.status == 400, answer.body
                error = answer.json["error"]
                assert (error["type"], error["code"], error["n_ctx"]) == (
                    "exceed_context_size_error",
                    400,
                    1024,
                )
                figures = error["opencoti"]
                assert figures["required_tokens"] == error["n_prompt_tokens"] > 1024
                assert (figures["ctx_size"], figures["ctx_kind"]) == (1024, "window")

        messages = [*first["messages"], said["choices"][0]["message"], {"role": "user", "content": "On."}]  # type: ignore[misc]
        again = await served.http.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "session_id": "s"}
        )
        kept = said["usage"]["prompt_tokens"]
        assert again.json["timings"]["cache_n"] >= kept

        url = served.http.base
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="any", **APIS[0][1])
            assert caught.value.type == "exceed_context_size_error"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await claude.messages.create(model="any", **APIS[1][1])
            body = refused.value.body
            assert isinstance(body, dict)
            assert body["error"]["opencoti"]["ctx_kind"] == "window"


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("max_tokens", {"messages": [{"role": "user", "content": "Count."}]}),
    "/v1/completions": ("max_tokens", {"prompt": "One two three"}),
    "/completion": ("n_predict", {"prompt": "One two three"}),
    "/v1/messages": ("max_tokens", {"messages": [{"role": "user", "content": "Count."}]}),
    "/v1/responses": ("max_output_tokens", {"input": "Count."}),
}


def block_of(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """The proxy's block, of whatever API, there once."""
    documents = answer.events if stream else [answer.json]
    (found,) = [document["opencoti"] for document in documents if "opencoti" in document]
    return dict(found)


async def test_an_answer_that_fills_the_window_says_so(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-3: it ended for want of room, not because its client had asked for no more; on every API."""
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "1", "--ctx-size", "512", "--max-pools", "1")
    async with serve(tmp_path, "--model", str(tmp_path / "llama.gguf"), *sizes) as served:
        for path, (bound, body) in ASKED.items():
            # one API drops what it does not know; there this model goes on by itself
            asked = {**body, "ignore_eos": True, "temperature": 0, "session_id": "s"}
            for stream in (False, True):
                short = await served.http.post(path, {**asked, bound: 8, "stream": stream})
                assert "context_full" not in block_of(short, stream=stream), path
                long = await served.http.post(path, {**asked, bound: 1000, "stream": stream})
                full = block_of(long, stream=stream)
                assert full["context_full"] is True, (path, full)
                assert full["ctx_headroom_tokens"] <= 1
                assert full["ctx_used"] >= 511


async def test_pressure_rises_to_the_wall(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-3: use of the nearest wall, its ramp, and the context arm of capacity."""
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "1")
    async with serve(tmp_path, "--model", str(tmp_path / "llama.gguf"), *sizes) as served:

        async def read() -> tuple[dict[str, Any], dict[str, Any]]:
            await served.listing()

            async def fresh() -> bool:
                used = (await served.counters())["kv"]["n_used"] / 2048
                seen = (await served.http.get("/polykv/tps?once=1")).json["pressure"]
                return seen is not None and abs(seen - used) < 0.002

            await served.until(fresh)
            return (
                (await served.http.get("/polykv/tps?once=1")).json,
                (await served.http.get("/polykv/capacity")).json,
            )

        rates, capacity = await read()
        assert (rates["pressure"], rates["compaction_pressure"]) == (0.0, 0.0)
        assert (capacity["pressure"], capacity["compaction_pressure"]) == (0.0, 0.0)
        for length, ramp in ((1000, 0.0), (1740, 0.5), (2046, 1.0)):
            body = {"prompt": [100 + at % 800 for at in range(length)], "n_predict": 1, "session_id": "s"}
            assert (await served.http.post("/completion", body)).status == 200
            for told in await read():
                assert told["pressure"] == pytest.approx(length / 2048, abs=0.002)
                assert told["compaction_pressure"] == pytest.approx(ramp, abs=0.01)
            (session,) = (await served.http.get("/polykv/sessions")).json["sessions"]
            assert (session["ctx_used"], session["ctx_total"]) == (length, 2048)
            assert session["ctx_headroom_tokens"] == 2048 - length
        await served.empty_slots()
        fits = (await served.http.get("/polykv/capacity?expected_tokens=1000")).json
        assert fits["can_admit"] is True
        never = (await served.http.get("/polykv/capacity?expected_tokens=2049")).json
        assert (never["can_admit"], never["reason"]) == (False, "context headroom exhausted")


async def test_odd_message_lists_are_reported_and_go_through(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """CTX-10: the engine gets what the client sent; what is odd about it is said."""
    odd = [
        {"role": "user", "content": "Hi."},
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "nobody", "content": "42"},
        {"role": "assistant", "content": "Well,"},
    ]
    body = {"messages": odd, "max_tokens": 2}
    async with serve(tmp_path, "--parallel", "1", "--ctx-size", "512", "--max-pools", "1") as served:
        said = await served.http.post("/v1/chat/completions", {**body, "session_id": "s"})
        assert said.json["opencoti"]["lint"] == [
            {"rule": "system_first", "message_index": 1},
            {"rule": "tool_after_caller", "message_index": 2},
            {"rule": "last_is_user_or_tool", "message_index": 3},
        ]
        direct = await served.engine.post("/v1/chat/completions", body)
        assert said.json["usage"]["prompt_tokens"] == direct.json["usage"]["prompt_tokens"]


KNOWN = {
    "request (%d tokens) exceeds the available context size (%d tokens), try increasing it",
    "input (%d tokens) is larger than the max context size (%d tokens). skipping",
    "context shift is disabled",
    "context shift cannot be used for shared prompt",
    "Context size has been exceeded.",
    "the KV cache is full: the prompt needs %d cells, pools and kept slots leave %d",
}
"""What the pinned engine and its patch say when a conversation does not fit: for good, and as an error."""
OTHERS = (
    "too large to process",  # a batch
    "may be about to shift",  # a snapshot
    "other requests need the cells",  # this passes
)
"""Of other errors with such words."""
SPOKEN = re.compile(
    r"(?i)exceeds the available context|max context size|context shift (is disabled|cannot be used)"
    r"|context size has been exceeded|kv cache is full|too large to process|about to shift"
)


def test_every_wording_of_the_engine_is_known(patched: Path) -> None:
    """CTX-4: its files are searched for words of this kind; a new version that has others fails here."""
    files = [patched, *patched.parent.glob("*.so*"), *(patched.parent.parent / "lib").glob("*.so*")]
    found = set()
    for file in files:
        for raw in re.findall(rb"[\x20-\x7e]{16,}", file.read_bytes()):
            wording = raw.decode()
            if SPOKEN.search(wording) and not any(other in wording for other in OTHERS):
                found.add(wording)
    said = {wording.replace("%lld", "%d").replace("%zu", "%d").replace("%i", "%d") for wording in found}
    assert said == KNOWN
    for wording in said:
        recognised = recognise({"message": wording.replace("%d", "7"), "type": "server_error"})
        assert recognised is not None, wording
        assert (recognised.required_tokens == 7) == ("%d" in wording)


async def test_cells_that_run_out_on_a_stock_engine(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """Stock lets everybody die of it with status 500, also in mid-stream; clients get the typed error."""
    sizes = ("-c", "256", "-np", "2", "-kvu", "--no-webui")
    async with (
        bare_engine(stock, smollm, tmp_path / "engine", *sizes) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        asked = {"prompt": "Once upon a time", "n_predict": 180, "ignore_eos": True, "stream": True}
        async with served.http.session() as session:

            async def run() -> list[dict[str, Any]]:
                async with session.post("/completion", json=asked) as answer:
                    body = await answer.read()
                    assert answer.status == 200
                blocks = [block for block in body.split(b"\n\n") if block.startswith(b"data: {")]
                return [json.loads(block[6:]) for block in blocks]

            ends = [events[-1] for events in await asyncio.gather(run(), run())]
        overflows = [event["error"] for event in ends if "error" in event]
        assert overflows
        for error in overflows:
            assert (error["type"], error["message"]) == (
                "exceed_context_size_error",
                "Context size has been exceeded.",
            )
            assert error["opencoti"]["ctx_kind"] == "cells"
