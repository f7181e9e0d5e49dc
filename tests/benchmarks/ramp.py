"""Admission on the real engine: twice the load that keeps the floor, with the gate and without (ADM-12).

Run ``python -m tests.benchmarks.ramp``; about six minutes. The floor is what ``--sustainable`` sessions get
side by side, less a tenth. Then sessions come twice as fast as so many can be served, once with a policy
that queues for that floor and once with one that only advises, in turn within each round. Judged is every
window of two seconds between a session's first and last token, by what its client got in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.rates import serving
from tests.benchmarks.relay import machine

WINDOW_S = 2.0
PREFIX = "You write about rivers, one plain sentence after the other, for as long as you are let. " * 8
MODES = ("advisory", "enforced")


@dataclass
class Outcome:
    """What the sessions of one run got."""

    kept_s: float = 0.0
    all_s: float = 0.0
    good_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)

    def add(self, asked_at: float, arrivals: list[float], floor: float) -> None:
        """One session's stream."""
        self.waits_s.append(arrivals[0] - asked_at)
        at = arrivals[0]
        while at + WINDOW_S <= arrivals[-1]:
            got = sum(at <= each < at + WINDOW_S for each in arrivals)
            self.all_s += WINDOW_S
            if got >= floor * WINDOW_S:
                self.kept_s += WINDOW_S
                self.good_tokens += got
            at += WINDOW_S


class Ramp:
    """A pool on a real engine, and the sessions that come to it."""

    def __init__(self, http: aiohttp.ClientSession, tokens: int) -> None:
        self.http = http
        self.tokens = tokens
        self.pool = ""
        self._number = 0

    async def open(self) -> None:
        """Compute what all sessions begin with."""
        body = {"messages": [{"role": "system", "content": PREFIX}], "pin": True}
        async with self.http.post("/polykv/pools", json=body) as answer:
            self.pool = (await answer.json())["pool_id"]

    async def policy(self, mode: str, floor: float) -> None:
        """Say what holds from now on."""
        body = {
            "mode": mode,
            "on_saturation": "queue",
            "target_tps_per_session": floor,
            "queue_max_wait_s": 600.0,
            "settle_max_ms": 1000,
        }
        async with self.http.post(f"/polykv/pools/{self.pool}/admission", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def session(self) -> tuple[float, list[float]]:
        """One session of one answer; when it came, and when its tokens did. It is over at its end."""
        self._number += 1
        name, asked_at = f"s{self._number}", time.monotonic()
        body = {
            "messages": [
                {"role": "system", "content": PREFIX},
                {"role": "user", "content": f"Number {self._number}: go."},
            ],
            "stream": True,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "pool_id": self.pool,
            "session_id": name,
        }
        async with self.http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            arrivals = [time.monotonic() async for line in answer.content if b'"content":"' in line]
        async with self.http.post(f"/polykv/sessions/{name}/close", json={}) as answer:
            await answer.read()
        return asked_at, arrivals

    async def floor(self, sustainable: int) -> float:
        """Nine tenths of what so many sessions get side by side."""
        streams = [
            arrivals for _, arrivals in await asyncio.gather(*(self.session() for _ in range(sustainable)))
        ]
        return 0.9 * statistics.mean((len(each) - 1) / (each[-1] - each[0]) for each in streams)

    async def run(self, mode: str, floor: float, sustainable: int, sessions: int) -> Outcome:
        """Sessions come twice as fast as so many can be served."""
        await self.policy(mode, floor)
        pause_s = self.tokens / floor / sustainable / 2
        running = []
        for _ in range(sessions):
            running.append(asyncio.get_running_loop().create_task(self.session()))
            await asyncio.sleep(pause_s)
        outcome = Outcome()
        for asked_at, arrivals in await asyncio.gather(*running):
            outcome.add(asked_at, arrivals, floor)
        return outcome


async def measured(args: argparse.Namespace) -> dict[str, object]:
    """Both, in turn."""
    outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    slots = 4 * args.sustainable
    async with serving(engine={"parallel": slots, "ctx_size": 1024 * slots, "max_pools": 2}) as proxy:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(f"http://{proxy.address}", timeout=timeout) as http:
            ramp = Ramp(http, args.tokens)
            await ramp.open()
            await ramp.floor(args.sustainable)  # so that nothing is cold
            floor = await ramp.floor(args.sustainable)
            for _ in range(args.rounds):
                for mode in MODES:
                    outcomes[mode].append(await ramp.run(mode, floor, args.sustainable, args.sessions))
    return {"floor_tps": floor} | {
        mode: {
            "kept_share": sum(each.kept_s for each in runs) / max(1e-9, sum(each.all_s for each in runs)),
            "session_seconds": sum(each.all_s for each in runs),
            "goodput_tokens": sum(each.good_tokens for each in runs),
            "first_token_mean_s": statistics.mean(wait for each in runs for wait in each.waits_s),
        }
        for mode, runs in outcomes.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sustainable", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("bench-results/ramp.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="error"))
    figures = uvloop.run(measured(args))
    print(f"floor {figures['floor_tps']:.1f} tokens/s")
    for mode in MODES:
        print(f"{mode:10}" + "  ".join(f"{name} {value:,.3f}" for name, value in figures[mode].items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "ramp": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
