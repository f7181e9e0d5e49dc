"""What watching costs: a scrape's time on the loop, and decode speed beside a reader of 100 Hz.

A reader may cost decoding no more than the CPU time that reading takes: "lost" is the share of its speed that
a decoding session lost, "cpu" the share of a core that proxy and reader took for it, the engine's left out.

Run ``python -m tests.benchmarks.status``; about two minutes. The first part needs no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import aiohttp
import uvloop

from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import (
    Capability,
    EngineFacts,
    EngineSample,
    PoolOrigin,
    PoolUid,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)
from polykv_proxy.metrics import Exposition, Metrics
from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.rates import serving
from tests.benchmarks.relay import machine

SCOPE = Scope("bench")
PATHS = ("/polykv/tps", "/polykv/sessions", "/slots", "/metrics")


def busy_plane(pools: int, sessions: int) -> ControlPlane:
    """Every session decodes on one of the pools, each pool with a label of its own."""
    plane = ControlPlane(max_waiting=0)
    facts = EngineFacts("e", sessions, pools, 1 << 20, 1 << 16, 23040, "b")
    plane.on_engine_ready(facts, Capability.ZERO_COPY, None, "m", 0.0)
    made = []
    for number in range(pools):
        tokens = as_tokens([number, *range(500)])
        pool_id = plane.pools.id_of(tokens, SCOPE)
        pool = plane.tree.add(
            pool_id, tokens, scope=SCOPE, origin=PoolOrigin.EXPLICIT, now_ts=0.0, label=f"team-{number}"
        )
        plane.tree.ready(pool, PoolUid(number + 1))
        made.append(pool)
    leases = []
    for number in range(sessions):
        lease = plane.leases.on_request(Ask(scope=SCOPE, name=f"s{number}"), 0.0, now_ts=0.0).lease
        lease.session.pool = made[number % pools].pool_id
        leases.append(lease)
    began = time.monotonic()
    for step in range(5):
        slots = tuple(
            SlotSample(
                SlotId(number),
                SlotState.GEN,
                number,
                leases[number].lease_id,
                30 * step,
                0,
                0,
                700,
                501,
                PoolUid(number % pools + 1),
                1 << 16,
                began + step,
            )
            for number in range(sessions)
        )
        sample = EngineSample("e", began + step, 20_000, 1 << 20, 0, slots, (), began + step)
        plane.on_sample(sample)
        plane.on_counters(sample)
    return plane


def scrape_ms(pools: int, sessions: int, rounds: int) -> dict[str, float]:
    """Time of one scrape's rendering, which nothing else on the loop can interrupt."""
    exposition = Exposition()
    exposition.add("0", Metrics(busy_plane(pools, sessions)))
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        text = exposition.render()
        samples.append((time.perf_counter() - began) * 1e3)
    samples.sort()
    return {
        "median_ms": statistics.median(samples),
        "p99_ms": samples[int(rounds * 0.99)],
        "bytes": len(text),
    }


async def decode_tps(address: str, tokens: int) -> float:
    """Speed of one answer, by the engine's own timings."""
    body = {"prompt": "The sea", "n_predict": tokens, "ignore_eos": True, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{address}/completion", json=body) as answer:
            return (await answer.json())["timings"]["predicted_per_second"]


async def reader(address: str, counts: list[int]) -> None:
    """A hundred requests a second, each status document in turn."""
    async with aiohttp.ClientSession() as session:
        due = time.monotonic()
        while True:
            path = PATHS[counts[0] % len(PATHS)]
            async with session.get(f"http://{address}{path}") as answer:
                await answer.read()
            counts[0] += 1
            due += 0.01
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def readers_cost(rounds: int, tokens: int) -> dict[str, float]:
    """Decode speed with and without the reader, in turn, so that a noisy moment hits both."""
    alone, watched, counts = [], [], [0]

    async def measured(address: str) -> tuple[float, float]:
        """Speed, and the share of a core that this process took."""
        began, cpu = time.monotonic(), time.process_time()
        tps = await decode_tps(address, tokens)
        return tps, (time.process_time() - cpu) / (time.monotonic() - began)

    async with serving() as proxy:
        await decode_tps(proxy.address, 32)
        for _ in range(rounds):
            alone.append(await measured(proxy.address))
            began, before = time.monotonic(), counts[0]
            task = asyncio.get_running_loop().create_task(reader(proxy.address, counts))
            watched.append(await measured(proxy.address))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            hertz = (counts[0] - before) / (time.monotonic() - began)
    speeds = [statistics.median(tps for tps, _ in each) for each in (alone, watched)]
    shares = [statistics.median(share for _, share in each) for each in (alone, watched)]
    return {
        "alone_tps": speeds[0],
        "watched_tps": speeds[1],
        "lost": 1.0 - speeds[1] / speeds[0],
        "cpu": shares[1] - shares[0],
        "reads_per_s": hertz,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-results/status.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="error"))
    figures = {"scrape": scrape_ms(args.pools, args.sessions, 500)}
    print("scrape  " + "  ".join(f"{name} {value:,.2f}" for name, value in figures["scrape"].items()))
    if not args.no_engine:
        figures["reader"] = uvloop.run(readers_cost(args.rounds, args.tokens))
        print("reader  " + "  ".join(f"{name} {value:,.2f}" for name, value in figures["reader"].items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "status": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
