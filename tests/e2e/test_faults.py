"""Deaths of the engine and of the proxy, held requests, drains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from e2e.harness import serve

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.harness import Served

ARGS = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "2")
POOL = {"prompt": "The shop rules are long. " * 30, "pin": True}


async def stream_lines(served: Served, path: str, body: dict[str, Any]) -> list[bytes]:
    """A stream to its end, which must be a proper one."""
    async with served.http.session() as session, session.post(path, json=body) as answer:
        return [line async for line in answer.content]


@pytest.mark.parametrize(
    ("path", "body", "is_error"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go"}]}, b'data: {"error":'),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Go"}]}, b"event: error"),
        ("/v1/responses", {"input": "Go"}, b"event: error"),
    ],
)
async def test_engine_killed_mid_stream(
    patched: Path, smollm: Path, tmp_path: Path, path: str, body: dict[str, Any], is_error: bytes
) -> None:
    """OPS-4: each client gets its API's error event, the engine returns, and with it the pool."""
    async with serve(tmp_path, *ARGS) as served:
        pool = (await served.http.post("/polykv/pools", POOL)).json
        limit = "max_output_tokens" if "input" in body else "max_tokens"
        asked = {**body, limit: 3000, "stream": True, "ignore_eos": True}
        streams = [asyncio.create_task(stream_lines(served, path, asked)) for _ in range(2)]

        async def both_generate() -> bool:
            return [slot["state"] for slot in (await served.counters())["slots"]].count("gen") == 2

        await served.until(both_generate)
        os.kill(served.engine_pid, signal.SIGKILL)
        for lines in await asyncio.gather(*streams):
            tail = b"".join(lines).rstrip().split(b"\n\n")[-1]
            assert tail.startswith(is_error)
            assert b"engine_gone" in tail
            assert not any(line.startswith(b"data: [DONE]") for line in lines)

        async def back() -> bool:
            return len(served.events("engine_ready")) == 2

        await served.until(back)
        body = {"prompt": POOL["prompt"] + "What now?", "max_tokens": 2, "pool_id": pool["pool_id"]}
        answer = (await served.http.post("/v1/completions", body)).json  # held until the pool is back
        assert answer["timings"]["cache_n"] >= pool["prefix_len"] - 1
        listed = await served.listing()
        assert [(each["pool_id"], each["residency"]) for each in listed["pools"]] == [
            (pool["pool_id"], "resident")
        ]
        assert listed["unattributed_cells"] == 0
        again = await served.http.post("/polykv/pools", POOL)
        assert (again.status, again.json["pool_id"]) == (200, pool["pool_id"])


async def test_requests_before_the_engine_is_ready_are_held(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """OPS-3: the proxy answers at once; a request that comes while the model loads is served when it is."""
    async with serve(tmp_path, *ARGS, ready=False) as served:
        early = asyncio.create_task(served.http.post("/v1/completions", {"prompt": "Early", "max_tokens": 3}))
        health = await served.http.get("/health")
        assert health.status in (200, 503)
        answer = await early
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 3


async def test_held_stream_gets_comments_then_its_answer(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """ADM-8: beyond the grace time a waiting stream gets its head and comments, then the engine's events."""
    env = {"POLYKV_QUEUE__HOLD_GRACE_S": "0.2", "POLYKV_QUEUE__KEEPALIVE_S": "0.2"}
    async with serve(
        tmp_path, "--parallel", "1", "--ctx-size", "2048", "--max-pools", "1", env=env
    ) as served:
        first = {"prompt": "Go", "max_tokens": 150, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(stream_lines(served, "/v1/completions", first))

        async def busy() -> bool:
            return (await served.counters())["slots"][0]["state"] == "gen"

        await served.until(busy)
        messages = [{"role": "user", "content": "Me too"}]
        second = {"messages": messages, "max_tokens": 4, "stream": True}
        lines = await stream_lines(served, "/v1/chat/completions", second)
        assert lines[0] == b":\n"
        assert lines.count(b":\n") >= 2
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert b"data: [DONE]\n" in lines
        await running
        too_long = {"prompt": "w " * 4000, "max_tokens": 4, "stream": True}
        blocker = asyncio.create_task(stream_lines(served, "/v1/completions", first))
        await served.until(busy)
        refused = await stream_lines(served, "/v1/completions", too_long)
        assert json.loads(refused[-2][6:])["error"]["type"] == "exceed_context_size_error"
        await blocker


async def test_sigterm_lets_running_streams_finish(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """OPS-3: a drain takes no new requests, lets a stream end, stops the engine and exits with 0."""
    async with serve(tmp_path, *ARGS, env={"POLYKV_DRAIN_S": "60"}) as served:
        asked = {"prompt": "Go", "max_tokens": 60, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(stream_lines(served, "/v1/completions", asked))

        async def busy() -> bool:
            return any(slot["state"] == "gen" for slot in (await served.counters())["slots"])

        await served.until(busy)
        engine = psutil.Process(served.engine_pid)
        served.process.send_signal(signal.SIGTERM)
        lines = await running
        assert b"data: [DONE]\n" in lines
        async with asyncio.timeout(60):
            assert await served.process.wait() == 0
        assert not engine.is_running()


async def test_engine_left_by_a_killed_proxy_is_replaced(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """OPS-2: after kill -9 of the proxy the next one stops the old engine first: never two."""
    async with serve(tmp_path, *ARGS, stop=False) as first:
        old = psutil.Process(first.engine_pid)
        first.process.send_signal(signal.SIGKILL)
        await first.process.wait()
        assert old.is_running()
    async with serve(tmp_path, *ARGS) as second:
        assert second.engine_pid != old.pid
        assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
        assert (await second.http.get("/health")).status == 200


async def test_pools_off_is_501_and_everything_else_works(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """PROD-2: with --max-pools 0 the pool routes say so and requests pass as ever."""
    async with serve(tmp_path, "--parallel", "2", "--ctx-size", "1024", "--max-pools", "0") as served:
        for method, path in (
            ("GET", "/polykv/pools"),
            ("POST", "/polykv/pools"),
            ("DELETE", "/polykv/pools/x"),
        ):
            refused = await served.http(method, path, {"prompt": "x"} if method == "POST" else None)
            assert refused.status == 501
            assert refused.json["error"]["code"] == "polykv_disabled"
        answers = await asyncio.gather(
            *(served.http.post("/v1/completions", {"prompt": f"n {n}", "max_tokens": 3}) for n in range(6))
        )
        assert [answer.status for answer in answers] == [200] * 6
