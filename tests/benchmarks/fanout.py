"""Fan-out: k agents on one prefix, shared against unshared in the same run, for several k."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import uvloop

from polykv_proxy import config, demo
from polykv_proxy.engine import build, model
from polykv_proxy.engine.progress import Progress
from polykv_proxy.settings import LogSettings
from polykv_proxy.telemetry import configure_logging
from tests.benchmarks.relay import machine

DEFAULT_K = (4, 8, 16)


async def measure(agents: tuple[int, ...], prefix_tokens: int) -> list[dict]:
    """One comparison for each number of agents."""
    settings = config.load()
    chosen = {
        "binary": settings.engine.binary or build.ensure(settings.cache_path).binary,
        "model": settings.engine.model or model.ensure(settings.cache_path),
    }
    settings = settings.model_copy(update={"engine": settings.engine.model_copy(update=chosen)})
    rows = []
    for k in agents:
        progress = Progress(estimates=False)
        comparison = await demo.compare(settings, k=k, prefix_tokens=prefix_tokens, progress=progress)
        rows.append(comparison.document()["demo"])
    return rows


def table(rows: list[dict]) -> str:
    """The rows as text: ratios first, they are what carries over to other machines."""
    heads = ("prompt tokens", "/ideal", "TTFT s", "wall s", "tps", "cells")
    lines = [f"{'k':>3} {'setup':9}" + "".join(f"{head:>14}" for head in heads)]
    for row in rows:
        for setup in ("shared", "unshared"):
            run = row[setup]
            ratio = run["prompt_tokens_computed"] / row["ideal_prompt_tokens"]
            lines.append(
                f"{row['k']:>3} {setup:9}{run['prompt_tokens_computed']:>14}{ratio:>14.2f}"
                f"{run['ttft_mean_s']:>14.2f}{run['wall_s']:>14.2f}{run['tps_mean']:>14.1f}{run['kv_cells']:>14}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, action="append", help="agents; may be repeated (default: 4, 8, 16)")
    parser.add_argument("--prefix-tokens", type=int, default=1400)
    parser.add_argument("--out", type=Path, default=Path("bench-results/fanout.json"))
    args = parser.parse_args()
    configure_logging(LogSettings(level="warning"))
    rows = uvloop.run(measure(tuple(args.k or DEFAULT_K), args.prefix_tokens))
    print(table(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "fanout": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
