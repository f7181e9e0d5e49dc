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

APIS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WORDS = ("harbour", "letter", "winter", "copper", "garden", "signal", "the", "and", "of", "to", "a", "is")
SIZES = ("--parallel", "1", "--ctx-size", "512", "--kv-unified", "--polykv-max-pools", "1")
TURN_WORDS = 180


def say(dice: random.Random, words: int) -> str:
    """Some text."""
    return " ".join(
        dice.choice(WORDS) + (str(dice.randrange(1000)) if dice.random() < 0.1 else "") for _ in range(words)
    )


def turns(dice: random.Random, words: int) -> list[str]:
    """A conversation of so many words: the system's, then users' and assistants', a user's at the end."""
    count = (words - 300) // TURN_WORDS | 1
    return [say(dice, 300), *(say(dice, TURN_WORDS) for _ in range(count))]


def body(path: str, texts: list[str]) -> bytes:
    """A request of an API."""
    system, *rest = texts
    said = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(rest)]
    if path == APIS["messages"]:
        return msgspec.json.encode({"system": system, "messages": said, "max_tokens": 1})
    if path == APIS["responses"]:
        typed = [{"type": "message", **one} for one in said]
        return msgspec.json.encode({"instructions": system, "input": typed})
    return msgspec.json.encode({"messages": [{"role": "system", "content": system}, *said]})


async def milliseconds(work, rounds: int) -> float:
    """Median time of a call."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


async def measure(client: EngineClient, api: str, words: int, rounds: int) -> dict[str, float | str]:
    """All figures of one API and size."""
    dice = random.Random(5)
    facts, _, _ = await client.describe()
    plane = SimpleNamespace(facts=facts, capability=Capability.ZERO_COPY, model_identity="")
    reader = Reader(SimpleNamespace(client=client, backend=Patched(client), plane=plane, epoch=facts.epoch))
    path = APIS[api]
    family = INFERENCE[path]
    count = family.count_path
    texts = turns(dice, words)
    raw = body(path, texts)
    text = (await client.prompt(count, raw, text_from=0)).text
    figures = {
        "api": api,
        "tokens": len(await client.count_tokens(count, raw)),
        "messages": len(texts),
        "render_ms": await milliseconds(lambda: client.prompt(count, raw, text_from=0), rounds),
        "tokenize_ms": await milliseconds(lambda: client.tokenize(text), rounds),
        "tokenize_end_ms": await milliseconds(lambda: client.tokenize(text[-1200:]), rounds),
        "count_ms": await milliseconds(lambda: client.count_tokens(count, raw), rounds),
    }
    scope = Scope("bench")
    await reader.tokens(family, asking.read(raw, family, {}), scope)

    async def next_turn() -> None:
        texts.extend((say(dice, 100), say(dice, 60)))
        await reader.tokens(family, asking.read(body(path, texts), family, {}), scope)

    figures["next_turn_ms"] = await milliseconds(next_turn, rounds)
    asked = asking.read(body(path, texts), family, {})
    assert await reader.tokens(family, asked, scope) == await client.count_tokens(count, asked.body)
    return figures


async def run(rounds: int) -> list[dict[str, float | str]]:
    """All APIs and sizes on one engine."""
    cache = config.load().cache_path
    with tempfile.TemporaryDirectory() as folder:
        engine = bare_engine(build.ensure(cache).binary, model.ensure(cache), Path(folder), *SIZES)
        async with engine as http, EngineClient(EngineAddress(http.base), None) as client:
            return [
                await measure(client, api, words, rounds)
                for words in (800, 6000, 24_000, 96_000)
                for api in APIS
            ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench-results/reading.json"))
    args = parser.parse_args()
    figures = asyncio.run(run(args.rounds))
    for each in figures:
        words = (f"{value:,.1f}" if isinstance(value, float) else str(value) for value in each.values())
        print("  ".join(f"{name} {word}" for name, word in zip(each, words, strict=True)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "reading": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
