"""What a save costs those who are being answered meanwhile, and what it spares: on the real engine.

One conversation streams. Another computes a prompt, which is then saved and restored: each time it is seen
how many tokens of the stream did not come, at its own pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import uvloop

from polykv_proxy import config
from polykv_proxy.engine import build, model
from tests.benchmarks.durable import text
from tests.benchmarks.relay import machine
from tests.e2e.harness import serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.e2e.harness import Served

PACE_TOKENS = 16
"""Of the stream, before something is done, that tell its pace."""


@dataclass(frozen=True)
class Cost:
    """What moving a conversation of one length costs the other one."""

    tokens: int
    megabytes: float
    save_s: float
    save_lost: float
    """Tokens of the stream."""
    restore_s: float
    restore_lost: float
    compute_s: float
    compute_lost: float


class Stream:
    """A conversation that is answered all the time."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.arrivals: list[float] = []

    async def run(self) -> None:
        """Until cancelled."""
        body = {"prompt": "Once upon a time", "n_predict": 100_000, "ignore_eos": True, "stream": True}
        async with self._served.http.session() as session:
            async with session.post("/completion", json=body, headers={"X-Session-Id": "streams"}) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        self.arrivals.append(perf_counter())

    async def lost(self, what: Callable[[], Awaitable[object]]) -> tuple[float, float]:
        """Seconds that something took, and tokens that did not come meanwhile and right after."""
        await self._more(PACE_TOKENS)
        before, began = self.arrivals[-PACE_TOKENS:], perf_counter()
        await what()
        took = perf_counter() - began
        await self._more(2)
        each = median(b - a for a, b in pairwise(before))
        since = [at for at in self.arrivals if at > before[-1]]
        return took, max(0.0, (since[-1] - before[-1]) / each - len(since))

    async def _more(self, tokens: int) -> None:
        wanted = len(self.arrivals) + tokens
        while len(self.arrivals) < wanted:
            await asyncio.sleep(0.005)


async def cost(served: Served, stream: Stream, words: int, round_: int) -> Cost:
    """All of it for one length."""
    prompt = text(words + round_, words)
    body: dict[str, Any] = {"prompt": prompt, "n_predict": 1, "temperature": 0}

    async def compute() -> None:
        answer = await served.http.post(
            "/completion", body, headers={"X-Session-Id": f"other-{words}-{round_}"}
        )
        assert answer.status == 200, answer.body

    compute_s, compute_lost = await stream.lost(compute)
    (slot,) = [each for each in (await served.counters())["slots"] if each["state"] == "idle"]
    written: dict[str, Any] = {}

    async def move(action: str) -> None:
        answer = await served.engine.post(f"/slots/{slot['id']}?action={action}", {"filename": "bench.bin"})
        assert answer.status == 200, answer.body
        written.update(answer.json)

    save_s, save_lost = await stream.lost(lambda: move("save"))
    restore_s, restore_lost = await stream.lost(lambda: move("restore"))
    return Cost(
        written["n_saved"],
        written["n_written"] / 1e6,
        *(save_s, save_lost, restore_s, restore_lost, compute_s, compute_lost),
    )


async def measure(lengths: Sequence[int], rounds: int) -> list[Cost]:
    """Each length, the median of a few rounds."""
    settings = config.load()
    binary = settings.engine.binary or build.ensure(settings.cache_path).binary
    gguf = settings.engine.model or model.ensure(settings.cache_path)
    sizes = ("--model", str(gguf), "--parallel", "2", "--ctx-size", "16384", "--max-pools", "2")
    env = {"POLYKV_ENGINE__BINARY": str(binary), "POLYKV_DURABLE__ENABLED": "false"}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        async with serve(Path(folder), *sizes, env=env | {"POLYKV_POOLS__AUTO_POOLS": "false"}) as served:
            for words in lengths:
                stream = Stream(served)
                running = asyncio.create_task(stream.run())
                while not stream.arrivals:
                    await asyncio.sleep(0.05)
                seen = [await cost(served, stream, words, round_) for round_ in range(rounds)]
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await served.quiet()
                middle = {name: median(getattr(each, name) for each in seen) for name in asdict(seen[0])}
                results.append(Cost(**middle))
                print(row(results[-1]), flush=True)
    return results


def row(cost: Cost) -> str:
    """A line of the table."""
    return (
        f"{cost.tokens:>8.0f}{cost.megabytes:>8.1f}{cost.save_s:>9.3f}{cost.save_lost:>9.1f}"
        f"{cost.restore_s:>9.3f}{cost.restore_lost:>9.1f}{cost.compute_s:>9.3f}{cost.compute_lost:>9.1f}"
    )


def main() -> None:
    """Run, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="+", default=[60, 250, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench-results/saving.json"))
    args = parser.parse_args()
    print(f"{'':>16}{'save':>18}{'restore':>18}{'compute':>18}")
    print(f"{'tokens':>8}{'MB':>8}" + f"{'s':>9}{'lost':>9}" * 3)
    results = uvloop.run(measure(args.words, args.rounds))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "saving": [asdict(each) for each in results]}
    args.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
