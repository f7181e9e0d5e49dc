"""What attaching to a pool and forking it cost, by the length of the pool, on the real engine.

Run ``python -m tests.benchmarks.attach``; about a minute. A request that attaches in a slot of another
conversation is compared with one that goes on in its own slot, both with one new token, and with one that is
computed from its beginning. A fork of 16 new tokens is compared with a pool of the same length. The model is
tiny, so that its own work hides as little as possible: what is left is looking the pool up, the engine's
comparison of tokens, and one more sequence id on each cell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from polykv_proxy import config
from polykv_proxy.engine import model
from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.rates import serving
from tests.benchmarks.relay import machine
from tests.e2e.tiny_models import VOCAB, llama

LENGTHS = (1_000, 4_000, 16_000, 32_000)
NEW = 16
"""Tokens that a fork adds."""

ENGINE = {"parallel": 2, "ctx_size": 131_072, "max_pools": 4}


class Bench:
    """One client, one request at a time."""

    def __init__(self, http: aiohttp.ClientSession, dice: random.Random) -> None:
        self._http = http
        self._dice = dice
        self._count = 0

    def tokens(self, count: int) -> list[int]:
        """So many, of no meaning."""
        return [self._dice.randrange(20, VOCAB) for _ in range(count)]

    def name(self) -> str:
        """Of a session that is new."""
        self._count += 1
        return f"s{self._count}"

    async def post(self, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Milliseconds until the whole answer is here, and the answer."""
        data = json.dumps(body)
        began = time.perf_counter()
        async with self._http.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
            document = await answer.json()
            taken = (time.perf_counter() - began) * 1e3
            assert answer.status in (200, 201), document
        return taken, document

    async def ask(self, prompt: list[int], cached: int, **more: object) -> float:
        """One token behind a prompt, of which so many have to be reused."""
        body = {"prompt": prompt, "n_predict": 1, "ignore_eos": True, "opencoti": {"auto_match": False}}
        taken, answer = await self.post("/completion", body | more)
        assert answer["timings"]["cache_n"] == cached, answer["timings"]
        return taken

    async def release(self, pool_id: str) -> None:
        """Give a pool back."""
        async with self._http.delete(f"/polykv/pools/{pool_id}?recursive=1") as answer:
            assert answer.status == 200, await answer.read()

    async def measure(self, length: int, rounds: int) -> dict[str, float]:
        """Medians for pools of a length, in milliseconds."""
        took: dict[str, list[float]] = {"attach": [], "continue": [], "compute": [], "fork": [], "create": []}
        tokens = self.tokens(length)
        _, pool = await self.post("/polykv/pools", {"tokens": tokens})
        pool_id = pool["pool_id"]
        for _ in range(rounds):
            name = self.name()
            prompt = [*tokens, *self.tokens(1)]
            took["attach"].append(await self.ask(prompt, length, pool_id=pool_id, session_id=name))
            prompt += self.tokens(2)
            took["continue"].append(await self.ask(prompt, length + 1, pool_id=pool_id, session_id=name))
            taken, child = await self.post(
                f"/polykv/pools/{pool_id}/fork", {"tokens": tokens + self.tokens(NEW)}
            )
            took["fork"].append(taken)
            await self.release(child["pool_id"])
        for _ in range(max(2, rounds // 10)):
            fresh = self.tokens(length + 1)
            took["compute"].append(await self.ask(fresh, 0, session_id=self.name()))
            taken, made = await self.post("/polykv/pools", {"tokens": self.tokens(length + NEW)})
            took["create"].append(taken)
            await self.release(made["pool_id"])
        await self.release(pool_id)
        return {name: statistics.median(values) for name, values in took.items()}


async def measured(lengths: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Figures for each length."""
    builtin = model.ensure(config.load().cache_path)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "llama.gguf"
        await asyncio.to_thread(llama, tiny, builtin, context=65_536)
        async with serving(engine=ENGINE | {"model": tiny}, durable={"enabled": False}) as proxy:
            async with aiohttp.ClientSession(f"http://{proxy.address}") as http:
                bench = Bench(http, random.Random(7))
                return {length: await bench.measure(length, rounds) for length in lengths}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--length", type=int, action="append", help="tokens of a pool; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("bench-results/attach.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="error"))
    figures = uvloop.run(measured(tuple(args.length or LENGTHS), args.rounds))
    print(f"{'tokens':>8}" + "".join(f"{name:>12}" for name in next(iter(figures.values()))) + "   in ms")
    for length, took in figures.items():
        print(f"{length:>8}" + "".join(f"{value:>12.2f}" for value in took.values()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "attach_ms": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
