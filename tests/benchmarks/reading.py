"""Reading prompts: what rendering, tokenizing and counting cost on the real engine, and what a next turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec

from polykv_proxy import config
from polykv_proxy.api import asked as asking
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.api.reading import Reader
from polykv_proxy.core.types import Capability, Scope
from polykv_proxy.engine import build, model
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.backend import Patched
from polykv_proxy.engine.client import EngineClient
from tests.benchmarks.relay import machine
from tests.e2e.harness import bare_engine

CHAT = INFERENCE["/v1/chat/completions"]
WORDS = ("harbour", "letter", "winter", "copper", "garden", "signal", "the", "and", "of", "to", "a", "is")
SIZES = ("--parallel", "1", "--ctx-size", "512", "--kv-unified", "--polykv-max-pools", "1")
TURN_WORDS = 180


def say(dice: random.Random, words: int) -> str:
    """Some text."""
    return " ".join(
        dice.choice(WORDS) + (str(dice.randrange(1000)) if dice.random() < 0.1 else "") for _ in range(words)
    )


def chat(dice: random.Random, words: int) -> dict:
    """A chat of so many words."""
    messages = [{"role": "system", "content": say(dice, 300)}]
    messages += [
        {"role": ("user", "assistant")[at % 2], "content": say(dice, TURN_WORDS)}
        for at in range(max(1, (words - 300) // TURN_WORDS))
    ]
    return {"messages": messages}


async def milliseconds(work, rounds: int) -> float:
    """Median time of a call."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


async def measure(client: EngineClient, words: int, rounds: int) -> dict[str, float]:
    """All figures of one size."""
    dice = random.Random(5)
    facts, _, _ = await client.describe()
    plane = SimpleNamespace(facts=facts, capability=Capability.ZERO_COPY, model_identity="")
    reader = Reader(SimpleNamespace(client=client, backend=Patched(client), plane=plane, epoch=facts.epoch))
    body = chat(dice, words)
    raw = msgspec.json.encode(body)
    text = await client.render(raw)
    figures = {
        "tokens": len(await client.count_tokens(CHAT.count_path, raw)),
        "messages": len(body["messages"]),
        "render_ms": await milliseconds(lambda: client.render(raw), rounds),
        "tokenize_ms": await milliseconds(lambda: client.tokenize(text), rounds),
        "tokenize_end_ms": await milliseconds(lambda: client.tokenize(text[-1200:]), rounds),
        "count_ms": await milliseconds(lambda: client.count_tokens(CHAT.count_path, raw), rounds),
    }
    scope = Scope("bench")
    await reader.tokens(CHAT, asking.read(raw, CHAT, {}), scope)

    async def next_turn() -> None:
        body["messages"].append({"role": "assistant", "content": say(dice, 100)})
        body["messages"].append({"role": "user", "content": say(dice, 60)})
        asked = asking.read(msgspec.json.encode(body), CHAT, {})
        await reader.tokens(CHAT, asked, scope)

    figures["next_turn_ms"] = await milliseconds(next_turn, rounds)
    asked = asking.read(msgspec.json.encode(body), CHAT, {})
    assert await reader.tokens(CHAT, asked, scope) == await client.count_tokens(CHAT.count_path, asked.body)
    return figures


async def run(rounds: int) -> list[dict[str, float]]:
    """All sizes on one engine."""
    cache = config.load().cache_path
    with tempfile.TemporaryDirectory() as folder:
        engine = bare_engine(build.ensure(cache).binary, model.ensure(cache), Path(folder), *SIZES)
        async with engine as http, EngineClient(EngineAddress(http.base), None) as client:
            return [await measure(client, words, rounds) for words in (800, 6000, 24_000, 96_000)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench-results/reading.json"))
    args = parser.parse_args()
    figures = asyncio.run(run(args.rounds))
    for each in figures:
        print("  ".join(f"{name} {value:,.1f}" for name, value in each.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "reading": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
