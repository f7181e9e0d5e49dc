"""The end of a context on the real engine: one typed error, nothing lost, a mark where the wall was hit."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from e2e.harness import bare_engine, serve

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


async def test_an_answer_that_fills_the_window_says_so(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-3: it ended for want of room, not because its client had asked for no more."""
    async with serve(tmp_path, "--parallel", "1", "--ctx-size", "256", "--max-pools", "1") as served:
        asked = {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True, "session_id": "s"}
        short = (await served.http.post("/v1/chat/completions", {**asked, "max_tokens": 8})).json
        assert "context_full" not in short["opencoti"]
        full = (await served.http.post("/v1/chat/completions", {**asked, "max_tokens": 1000})).json
        assert full["choices"][0]["finish_reason"] == "length"
        assert full["opencoti"]["context_full"] is True
        assert full["opencoti"]["ctx_headroom_tokens"] <= 1


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
