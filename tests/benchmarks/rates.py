"""How true the reported speeds are: what clients count against what ``/polykv/tps`` says of them (TPS-5).

Run ``python -m tests.benchmarks.rates``; about six minutes. One session, then four side by side, several
runs each, behind an agent's system prompt and behind nothing. Over the part of a run in which every session
has its first 64 tokens behind it, the time-mean of what was reported is compared with the tokens that the
client got in that time. A rate looks back over 128 tokens or two seconds. From an empty context a model as
small as the built-in one loses a third of its speed within an answer, and what looks back shows that late;
"slowed" is what the clients' own counts of the first and the last quarter differ by.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvloop

from polykv_proxy import config
from polykv_proxy.app import Proxy
from polykv_proxy.engine import build, model
from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.relay import machine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STEADY_AFTER = 64
"""Tokens of a session after which it counts."""
SIZES = {"parallel": 4, "ctx_size": 8192}

BEGINNINGS = {
    "an agent's prompt": "You look after a river. Report levels, name the station, and never guess. " * 100,
    "nothing": "",
}
"""System prompts that answers come behind."""

INTERVAL_S = 0.1
"""Between two documents of the stream of rates."""


@contextlib.asynccontextmanager
async def serving(
    *,
    engine: dict[str, object] | None = None,
    telemetry: dict[str, object] | None = None,
    durable: dict[str, object] | None = None,
) -> AsyncIterator[Proxy]:
    """The whole proxy with the built-in model, and an engine of its own; with these settings changed."""
    settings = config.load()
    chosen = {"binary": build.ensure(settings.cache_path).binary, "model": model.ensure(settings.cache_path)}
    with tempfile.TemporaryDirectory() as folder:
        update = {
            "engine": settings.engine.model_copy(update=chosen | (engine or {})),
            "telemetry": settings.telemetry.model_copy(update=telemetry or {}),
            "durable": settings.durable.model_copy(update=durable or {}),
            "state_dir": Path(folder),
            "runtime_dir": Path(folder) / "run",
            "listen": "127.0.0.1:0",
        }
        async with Proxy(settings.model_copy(update=update)) as proxy:
            await proxy.fleet.first.runtime.serving.wait()
            yield proxy


@dataclass
class Run:
    """One run: when each session's tokens came, and what was said of all of them when."""

    arrivals: dict[str, list[float]] = field(default_factory=dict)
    documents: list[tuple[float, dict[str, object]]] = field(default_factory=list)

    def span(self) -> tuple[float, float]:
        """The part in which every session is under way."""
        return max(seen[STEADY_AFTER] for seen in self.arrivals.values()), min(
            seen[-1] for seen in self.arrivals.values()
        )

    def counted(self, name: str) -> float:
        """Tokens a second that its client got."""
        begin, end = self.span()
        within = [at for at in self.arrivals[name] if begin <= at <= end]
        return (len(within) - 1) / (within[-1] - within[0])

    def reported(self, name: str | None) -> float:
        """Time-mean of what was reported of a session, or of all together."""
        begin, end = self.span()
        area = held = 0.0
        for (at, document), (until, _) in pairwise(self.documents):
            lasted = min(until, end) - max(at, begin)
            value = document["aggregate_tps"]
            if name is not None:
                tps = {each["session_id"]: each["tps_ewma"] for each in document["sessions"]}
                value = tps.get(name)
            if lasted > 0 and value is not None:
                area, held = area + value * lasted, held + lasted
        return area / held

    def slowed(self) -> float:
        """Share of its speed that the first session lost, from the first quarter to the last."""
        begin, end = self.span()
        quarter = (end - begin) / 4
        seen = next(iter(self.arrivals.values()))
        first = sum(begin <= at < begin + quarter for at in seen)
        return 1.0 - sum(end - quarter < at <= end for at in seen) / first

    def errors(self) -> dict[str, float]:
        """Relative errors: the worst session's, and the aggregate's against the sum of the sessions."""
        each = [abs(self.reported(name) / self.counted(name) - 1.0) for name in self.arrivals]
        total = sum(self.reported(name) for name in self.arrivals)
        return {"session": max(each), "sum": abs(total / self.reported(None) - 1.0), "slowed": self.slowed()}


async def measure(address: str, sessions: int, tokens: int, tag: str, beginning: str = "") -> Run:
    """So many streams side by side, each of a session of its own, behind a system prompt."""
    run = Run({f"{tag}-{number}": [] for number in range(sessions)})

    async def follow(http: aiohttp.ClientSession) -> None:
        async with http.get("/polykv/tps", headers={"Accept": "text/event-stream"}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    run.documents.append((time.monotonic(), json.loads(line[6:])))

    async def stream(http: aiohttp.ClientSession, name: str) -> None:
        body = {
            "stream": True,
            "session_id": name,
            "max_tokens": tokens,
            "ignore_eos": True,
            "messages": [
                {"role": "system", "content": beginning or "Answer."},
                {"role": "user", "content": "Count from 1 to 1000, one number in each line."},
            ],
        }
        async with http.post("/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                if b'"content":"' in line:
                    run.arrivals[name].append(time.monotonic())

    async with aiohttp.ClientSession(f"http://{address}") as http:
        follower = asyncio.get_running_loop().create_task(follow(http))
        await asyncio.gather(*(stream(http, name) for name in run.arrivals))
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
    return run


async def accuracy(runs: int, tokens: int) -> dict[str, dict[str, float]]:
    """Median errors for one session and for four, behind each beginning."""
    figures = {}
    async with serving(engine=SIZES, telemetry={"tps_interval_s": INTERVAL_S}) as proxy:
        for shape, beginning in BEGINNINGS.items():
            for sessions in (1, 4):
                errors = []
                for number in range(runs):
                    tag = f"{len(beginning)}-{sessions}-{number}"
                    errors.append((await measure(proxy.address, sessions, tokens, tag, beginning)).errors())
                figures[f"{sessions}, behind {shape}"] = {
                    "session_error_median": statistics.median(each["session"] for each in errors),
                    "session_error_worst": max(each["session"] for each in errors),
                    "sum_error_median": statistics.median(each["sum"] for each in errors),
                    "slowed_median": statistics.median(each["slowed"] for each in errors),
                }
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--out", type=Path, default=Path("bench-results/rates.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="error"))
    figures = uvloop.run(accuracy(args.runs, args.tokens))
    for sessions, errors in figures.items():
        print(f"{sessions:32}" + "  ".join(f"{name} {value:.2%}" for name, value in errors.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "rates": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
