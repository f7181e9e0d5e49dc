"""Several real engines behind one port: state is found where it is, and one engine's death is not the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import openai

from e2e.harness import serve

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.harness import Served

ENGINES = [{"name": "left"}, {"name": "right"}]
ARGS = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "2")
SYSTEM = "You answer questions about the rules of a small lending library in Ghent. " * 25


async def computed(served: Served) -> list[int]:
    """Prompt tokens that each engine has computed so far."""
    counters = [(await served.engine_at(number).get("/polykv/engine/counters")).json for number in (0, 1)]
    return [sum(slot["n_prompt_total"] for slot in each["slots"]) for each in counters]


def chat(question: str, **more: Any) -> dict[str, Any]:
    """A short chat with the long system prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **more}


async def test_two_engines_one_port(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """PROD-8: a pool lives on one engine, requests find it; health, models and listings are one."""
    env = {"POLYKV_ENGINES": json.dumps(ENGINES)}
    async with serve(tmp_path, *ARGS, env=env, engines=2) as served:
        http = served.http
        assert [each["name"] for each in (await http.get("/health")).json["engines"]] == ["left", "right"]
        models = (await http.get("/v1/models")).json["data"]
        assert [model["id"] for model in models] == [smollm.name]

        # a pool on the second engine; plain requests of another client find it there
        wanted = {"messages": [{"role": "system", "content": SYSTEM}], "engine": "right"}
        pool = (await http.post("/polykv/pools", wanted)).json
        assert pool["engine"] == "right"
        before = await computed(served)
        answers = [await http.post("/v1/chat/completions", chat(f"Question {n}?")) for n in range(3)]
        for answer in answers:
            assert answer.headers["x-pool-id"] == pool["pool_id"]
            assert answer.json["timings"]["cache_n"] >= pool["prefix_len"]
        after = await computed(served)
        assert after[0] == before[0]  # the self-test's alone
        assert after[1] - before[1] == sum(answer.json["timings"]["prompt_n"] for answer in answers)

        # conversations that share nothing spread over both, and go on where they are
        both = [
            await http.post(
                f"/v1/chat/completions?engine={name}",
                chat("Go", session_id=name),
            )
            for name in ("left", "right")
        ]
        assert [answer.headers["x-session-id"] for answer in both] == ["left", "right"]
        listed = (await http.get("/polykv/sessions")).json["sessions"]
        homes = {each["session_id"]: each["engine"] for each in listed}
        assert (homes["left"], homes["right"]) == ("left", "right")

        # the cells of both add up
        await asyncio.sleep(0.5)
        listing = (await http.get("/polykv/pools")).json
        used = [
            (await served.engine_at(number).get("/polykv/engine/counters")).json["kv"]["n_used"]
            for number in (0, 1)
        ]
        assert [part["kv_cells_used"] for part in listing["engines"]] == used
        assert listing["kv_cells_used"] == sum(used)
        assert listing["unattributed_cells"] == 0

        # one engine dies: the other serves, and the client's requests go on without an error
        os.kill(served.pid_of("right"), signal.SIGKILL)

        async def noticed() -> bool:
            return not (await http.get("/health")).json["engines"][1]["serving"]

        await served.until(noticed)
        client = openai.AsyncOpenAI(base_url=f"{http.base}/v1", api_key="none", max_retries=0)
        async with client:
            answer = await client.chat.completions.create(model="any", **chat("And now?"))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4

        async def back() -> bool:
            return all(each["serving"] for each in (await http.get("/health")).json["engines"])

        await served.until(back)
        again = (await http.post("/polykv/pools", wanted)).json
        assert (again["pool_id"], again["engine"]) == (pool["pool_id"], "right")
