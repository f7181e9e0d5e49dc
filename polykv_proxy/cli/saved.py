"""``cache``: look at saved KV, and remove it, without a proxy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polykv_proxy.cli.options import EXIT_FAILED, add_config_option, settings_from
from polykv_proxy.errors import NotFoundError

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Add them."""
    cache = commands.add_parser(
        "cache",
        help="look at saved KV",
        description="Look at the KV that proxies with this state folder saved. No engine is needed; what "
        "changes something waits until no proxy works with it.",
    )
    steps = cache.add_subparsers(required=True, metavar="STEP")
    listing = steps.add_parser("list", help="what is saved, what was used last first")
    listing.add_argument("--json", action="store_true", help="a line of JSON for each")
    inspect = steps.add_parser("inspect", help="what a slot file holds, read from the file itself")
    inspect.add_argument("file", type=Path, metavar="FILE")
    inspect.add_argument("--tokens", action="store_true", help="all token ids, not the first few")
    verify = steps.add_parser("verify", help="look at every byte; exit status 1 if something is wrong")
    prune = steps.add_parser("prune", help="remove what the configuration does not let stay")
    prune.add_argument("--all", action="store_true", help="remove everything that was saved")
    delete = steps.add_parser("delete", help="delete a key, with all keys nested below it")
    delete.add_argument("key", metavar="KEY")
    for step, command in (
        (listing, _cache_list),
        (inspect, _cache_inspect),
        (verify, _cache_verify),
        (prune, _cache_prune),
        (delete, _cache_delete),
    ):
        add_config_option(step)
        step.set_defaults(command=command)


def _cache_list(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    folders = offline.folders(settings_from(args).state_path)
    rows = [row for folder in folders for row in folder.listing()]
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(offline.table(rows, _now()))
    for problem in (problem for folder in folders for problem in folder.problems):
        print(f"polykv-proxy: not to be used: {problem}", file=sys.stderr)
    return 0


def _cache_inspect(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    print(json.dumps(offline.inspect(args.file, all_tokens=args.tokens), indent=1))
    return 0


def _cache_verify(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    folders = offline.folders(settings_from(args).state_path)
    wrong = [line for folder in folders for line in folder.wrong()]
    for line in wrong:
        print(line)
    print(f"{sum(len(folder.catalogue) for folder in folders)} states, {len(wrong)} wrong")
    return EXIT_FAILED if wrong else 0


def _cache_prune(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    settings = settings_from(args)
    limits = settings.durable.retention
    for folder in offline.folders(settings.state_path):
        count, size = folder.prune(limits, _now(), everything=args.all)
        print(f"{folder.path}: {count} states removed, {size / 1e6:.1f} MB")
    return 0


def _cache_delete(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    count = offline.delete(offline.folders(settings_from(args).state_path), args.key, _now())
    if not count:
        raise NotFoundError(f"nothing is saved under {args.key}", code="cache_not_found")
    print(f"{count} deleted")
    return 0


def _now() -> float:
    return time.time()  # noqa: TID251 - there is no runtime here that would tell
