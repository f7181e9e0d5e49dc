"""More conversations than slots, in turn: from disk, computed again, or from llama-server's own RAM cache.

Every setup has the same model, slots and cells, and the same conversations, each with a past of its own. Only
the rounds after the first count: there each conversation has lost its slot, and comes back with a bit more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import uvloop

from polykv_proxy import config
from polykv_proxy.engine import build, model
from tests.benchmarks.relay import machine
from tests.e2e.harness import Http, bare_engine, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WORDS = ("harbour", "letter", "winter", "copper", "garden", "signal", "marble", "engine", "paper", "river")
NEW_TOKENS = 4


@dataclass(frozen=True)
class Shape:
    """What is asked."""

    sessions: int
    slots: int
    words: int
    rounds: int


@dataclass(frozen=True)
class Result:
    """What one setup did for the turns that came back."""

    setup: str
    turns: int
    prompt_tokens: int
    computed_tokens: int
    reused_ratio: float
    ttft_mean_s: float
    ttft_max_s: float
    wall_s: float
    disk_mb: float | None = None


def text(seed: int, words: int) -> str:
    """Text that no other seed begins with."""
    return " ".join(
        WORDS[(seed * 7 + at * at + at // 5 * seed) % len(WORDS)] + str(seed) for at in range(words)
    )


async def turn(http: Http, name: str, prompt: str) -> tuple[float, int, int]:
    """One streamed turn: seconds to its first token, prompt tokens, and those that were computed."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "cache_prompt": True}
    began, first, timings = time.perf_counter(), None, {}
    async with http.session() as session:
        async with session.post("/completion", json=body, headers={"X-Session-Id": name}) as answer:
            assert answer.status == 200, await answer.read()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    first = first or time.perf_counter()
                    timings = json.loads(line[6:]).get("timings") or timings
    assert first is not None
    return first - began, timings["cache_n"] + timings["prompt_n"], timings["prompt_n"]


async def go(setup: str, http: Http, shape: Shape, disk: Callable[[], Awaitable[float]] | None) -> Result:
    """All rounds; see the module's docstring for what counts."""
    pasts = {f"s{number}": text(number, shape.words) for number in range(shape.sessions)}
    seen: list[tuple[float, int, int]] = []
    began = time.perf_counter()
    for round_ in range(shape.rounds + 1):
        if round_ == 1:
            began = time.perf_counter()
        for name, past in list(pasts.items()):
            done = await turn(http, name, past)
            if round_:
                seen.append(done)
            pasts[name] += f" And then {round_}, said {name}."
    waits, prompts, computed = zip(*seen, strict=True)
    return Result(
        setup=setup,
        turns=len(seen),
        prompt_tokens=sum(prompts),
        computed_tokens=sum(computed),
        reused_ratio=1 - sum(computed) / sum(prompts),
        ttft_mean_s=mean(waits),
        ttft_max_s=max(waits),
        wall_s=time.perf_counter() - began,
        disk_mb=None if disk is None else await disk(),
    )


async def measure(shape: Shape, cells: int) -> list[Result]:
    """All setups, one after the other."""
    settings = config.load()
    binary = settings.engine.binary or build.ensure(settings.cache_path).binary
    gguf = settings.engine.model or model.ensure(settings.cache_path)
    sizes = (
        "--model",
        str(gguf),
        "--parallel",
        str(shape.slots),
        "--ctx-size",
        str(cells),
        "--max-pools",
        "2",
    )
    env = {"POLYKV_ENGINE__BINARY": str(binary), "POLYKV_POOLS__AUTO_POOLS": "false"}
    results = []
    for setup, on in (("disk", "true"), ("prefill", "false")):
        with tempfile.TemporaryDirectory() as folder:
            async with serve(Path(folder), *sizes, env=env | {"POLYKV_DURABLE__ENABLED": on}) as served:

                async def on_disk(http: Http = served.http) -> float:
                    listing = (await http.get("/polykv/cache")).json
                    return sum(engine["bytes"] for engine in listing["engines"]) / 1e6

                results.append(await go(setup, served.http, shape, on_disk))
    stock = binary.with_name("llama-server-stock")
    same = ("--parallel", str(shape.slots), "--ctx-size", str(cells), "--kv-unified", "-b", "512")
    with tempfile.TemporaryDirectory() as folder:
        async with bare_engine(stock, gguf, Path(folder), *same, "--cache-ram", "8192") as http:
            results.append(await go("stock RAM cache", http, shape, None))
    return results


def table(results: list[Result]) -> str:
    """The results as text."""
    lines = [f"{'setup':16}{'turns':>7}{'computed':>10}{'reused':>9}{'TTFT s':>9}{'max':>8}{'wall s':>9}"]
    lines += [
        f"{one.setup:16}{one.turns:>7}{one.computed_tokens:>10}{one.reused_ratio:>9.1%}"
        f"{one.ttft_mean_s:>9.3f}{one.ttft_max_s:>8.2f}{one.wall_s:>9.1f}"
        for one in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--words", type=int, default=120, help="of each past; about three tokens each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cells", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("bench-results/durable.json"))
    args = parser.parse_args()
    shape = Shape(args.sessions, args.slots, args.words, args.rounds)
    results = uvloop.run(measure(shape, args.cells))
    print(table(results))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "shape": asdict(shape), "durable": [asdict(one) for one in results]}
    args.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
