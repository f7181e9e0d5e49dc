"""How soon a client that leaves is noticed (ADM-10), in every state of a request, streamed or not.

Run ``python -m tests.benchmarks.leaving``; about four minutes. Beside the leaver another session streams. The
time is from the closing of the connection to the first look, 5 ms apart, at which the request is out of the
queue, or its slot idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvloop

from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.rates import serving
from tests.benchmarks.relay import machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.app import Proxy

LOOK_S = 0.005
PROMPT = " ".join(f"Chapter {number} tells of the wind." for number in range(330))
STATES = ("queued", "prefill", "streaming")


def body_of(text: str, *, stream: bool) -> dict[str, object]:
    """A request that goes on for longer than anybody waits."""
    return {
        "messages": [{"role": "user", "content": text}],
        "stream": stream,
        "max_tokens": 2000,
        "ignore_eos": True,
        "opencoti": {"auto_match": False},
    }


async def until(true: Callable[[], bool]) -> None:
    """Look again and again."""
    while not true():
        await asyncio.sleep(LOOK_S)


class Bench:
    """One proxy with two slots, and who uses them."""

    def __init__(self, proxy: Proxy, http: aiohttp.ClientSession) -> None:
        self.runtime = proxy.fleet.first.runtime
        self.plane = self.runtime.plane
        self.http = http
        self.number = 0

    def start(self, text: str, *, stream: bool) -> asyncio.Task[None]:
        """A request in the background."""

        async def run() -> None:
            async with self.http.post("/v1/chat/completions", json=body_of(text, stream=stream)) as answer:
                await answer.read()

        return asyncio.get_running_loop().create_task(run())

    async def states(self) -> list[str]:
        """Of the slots, as the engine says."""
        return [slot.state.value for slot in (await self.runtime.client.counters()).slots]

    async def engine_is(self, *states: str) -> None:
        """Wait until the slots are in these states."""
        while sorted(await self.states()) != sorted(states):
            await asyncio.sleep(LOOK_S)

    async def leave(self, state: str, *, stream: bool) -> float:
        """Seconds from the leaving of one client in this state until it was noticed."""
        self.number += 1
        running = [self.start("Count for ever.", stream=True)]
        await self.engine_is("gen", "idle")
        text = f"{self.number} {PROMPT if state == 'prefill' else 'Hi.'}"
        if state == "queued":
            running.append(self.start("Count for ever, too.", stream=True))
            await self.engine_is("gen", "gen")
        leaver = self.start(text, stream=stream)
        if state == "queued":
            await until(lambda: self.plane.leases.waiting == 1)
        else:
            await self.engine_is("gen", "gen" if state == "streaming" else "prompt")
        leaver.cancel()
        began = time.monotonic()
        if state == "queued":
            await until(lambda: self.plane.leases.waiting == 0)
        else:
            await self.engine_is("gen", "idle")
        took = time.monotonic() - began
        for task in running:
            task.cancel()
        await asyncio.gather(leaver, *running, return_exceptions=True)
        await self.engine_is("idle", "idle")
        await until(lambda: self.plane.board.idle_count == 2)
        return took


async def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Every state in turn, so that a noisy moment hits all of them."""
    settings = {"parallel": 2, "ctx_size": 8192, "max_pools": 2}
    samples: dict[str, list[float]] = {}
    async with serving(engine=settings) as proxy:
        async with aiohttp.ClientSession(f"http://{proxy.address}") as http:
            bench = Bench(proxy, http)
            for _ in range(rounds):
                for state in STATES:
                    for stream in (True, False):
                        took = await bench.leave(state, stream=stream)
                        samples.setdefault(f"{state}, {'stream' if stream else 'plain'}", []).append(took)
    return {
        name: {"median_ms": statistics.median(took) * 1e3, "worst_ms": max(took) * 1e3}
        for name, took in samples.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench-results/leaving.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="error"))
    figures = uvloop.run(measured(args.rounds))
    for state, took in figures.items():
        print(f"{state:20}  " + "  ".join(f"{name} {value:,.0f}" for name, value in took.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "leaving": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
