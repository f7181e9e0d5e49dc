"""Matching: one prompt of 131,072 tokens against an index of 10,000 pools."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from polykv_proxy.core.pools import PrefixPool
from polykv_proxy.core.prefix import PrefixIndex, block_hashes
from polykv_proxy.core.types import PoolId, PoolNumber, PoolOrigin, Scope, as_tokens, common_prefix
from tests.benchmarks.relay import machine

SCOPE = Scope("bench")


def pool_of(tokens, number: int) -> PrefixPool:
    """A pool with this content."""
    return PrefixPool(PoolId(str(number)), tokens, SCOPE, PoolNumber(number), PoolOrigin.EXPLICIT, 0.0)


def build(pools: int, prompt) -> PrefixIndex:
    """An index whose pools leave the prompt, and each other, at every depth; few are as long as it is."""
    random.seed(7)
    index = PrefixIndex()
    for number in range(pools):
        kept = min(len(prompt), int(random.expovariate(1 / 1500)) + 1)
        own = as_tokens(random.randrange(50_000) for _ in range(random.randrange(1, 400)))
        index.add(pool_of(prompt[:kept] + own, number))
    index.add(pool_of(prompt[:-500], pools))
    return index


def microseconds(work, rounds: int) -> float:
    """Median time of one call."""
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        samples.append((time.perf_counter() - began) * 1e6)
    return statistics.median(samples)


def main() -> None:
    """Build, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("bench-results/matching.json"))
    args = parser.parse_args()
    random.seed(1)
    prompt = as_tokens(random.randrange(50_000) for _ in range(args.tokens))
    index = build(args.pools, prompt)
    pool, matched = index.match(prompt, SCOPE)
    assert matched == common_prefix(pool.tokens, prompt) == args.tokens - 500
    figures = {
        "match_us": microseconds(lambda: index.match(prompt, SCOPE), args.rounds),
        "hash_us": microseconds(lambda: block_hashes(prompt, SCOPE), args.rounds),
        "confirm_us": microseconds(lambda: common_prefix(pool.tokens, prompt), args.rounds),
        "blocks": len(index),
    }
    print("  ".join(f"{name} {value:,.0f}" for name, value in figures.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "matching": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
