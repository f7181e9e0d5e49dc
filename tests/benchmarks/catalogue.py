"""How long the event loop stands still for what is asked of saved states, with many of them.

All of it is in memory: no engine, no disk. Each call is made several times; the longest has what else ran.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from polykv_proxy.api.cache import MAX_LIMIT, entry_view
from polykv_proxy.core.catalogue import Catalogue, Kind, Reason, Retention, SavedState
from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.durable.savers import Savers
from polykv_proxy.durable.shelf import AT_ONCE
from tests.benchmarks.relay import machine

if TYPE_CHECKING:
    from collections.abc import Callable

ME = Scope("")
TIMES = 20
TOKENS = 300


@dataclass(frozen=True)
class Call:
    """One thing that is asked."""

    what: str
    median_ms: float
    longest_ms: float


def timed(what: str, call: Callable[[], object]) -> Call:
    """Several of the same."""
    took = []
    for _ in range(TIMES):
        began = perf_counter()
        call()
        took.append(perf_counter() - began)
    return Call(what, median(took) * 1e3, max(took) * 1e3)


def state(number: int, dice: random.Random) -> SavedState:
    """A conversation of a hundred under one key; each tenth is a pool."""
    return SavedState(
        kind=Kind.SESSION if number % 10 else Kind.POOL,
        key=f"run/{number // 100}/{number}",
        scope=ME,
        model_id="m",
        config={"system": str(number % 7), "tools": "t", "template": "p", "kwargs": "k"},
        tokens=as_tokens([dice.randrange(50_000) for _ in range(TOKENS)]),
        file=f"kv-{number}.bin",
        file_bytes=1000,
        file_digest="d",
        created_ts=float(number),
    )


def measure(count: int) -> list[Call]:
    """Everything that the event loop does with as many states as these."""
    dice = random.Random(1)
    catalogue, book = Catalogue(), SessionBook()
    savers = Savers(book, "r")
    states = [state(number, dice) for number in range(count)]
    entries = [catalogue.add(each, used_ts=each.created_ts) for each in states]
    for each in states:
        session = book.begin(ME, each.key, 0.0)
        savers.save_as(session, each.key)
    alike = Catalogue()
    for number in range(count):  # of one key, with a configuration each
        alike.add(replace(states[1], config={"system": str(number)}), used_ts=1.0)
    one, last = entries[count // 2], max(0, count - MAX_LIMIT)
    over = Retention(max_idle_s=1e9, max_bytes=catalogue.total_bytes // 2)

    def page(of: Catalogue, after: int = 0) -> object:
        return [entry_view("engine-0", of, entry) for entry in of.page(None, after=after, limit=MAX_LIMIT)[0]]

    def again() -> None:
        catalogue.remove(entries[0], Reason.SWEPT, 1.0)
        entries[0] = catalogue.add(states[0], used_ts=1.0)

    return [
        timed("a request looks for its tokens", lambda: catalogue.best(one.tokens, ME, "m")),
        timed("a state comes and goes", again),
        timed("GET, the first page", lambda: page(catalogue)),
        timed("GET, the last page", lambda: page(catalogue, last)),
        timed("GET, many configurations of one key", lambda: page(alike)),
        timed("GET, of a scope that has nothing", lambda: catalogue.page(Scope("x"), limit=MAX_LIMIT)),
        timed("GET, a key with a hundred below it", lambda: catalogue.page(ME, key="run/7", limit=MAX_LIMIT)),
        timed("DELETE, finding all", lambda: catalogue.under("run", None)),
        timed("DELETE, until others get their turn", lambda: _busy(savers, states[:AT_ONCE])),
        timed("a round looks at saved pools", lambda: catalogue.pools("m")),
        timed("a sweep that finds nothing (in a thread)", lambda: catalogue.overdue(Retention(), 1.0, None)),
        timed("a sweep that takes half (in a thread)", lambda: catalogue.overdue(over, 1.0, None)),
    ]


def _busy(savers: Savers, states: list[SavedState]) -> bool:
    return any(each.running for state in states for each in savers.of(state.scope, state.key))


def main() -> None:
    """Run, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("bench-results/catalogue.json"))
    args = parser.parse_args()
    results = measure(args.entries)
    for each in results:
        print(f"{each.what:45}{each.median_ms:9.3f} ms, at most{each.longest_ms:9.3f} ms")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "entries": args.entries, "calls": [asdict(each) for each in results]}
    args.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
