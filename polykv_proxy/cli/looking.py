"""``config`` and ``policy``: what is in force, and what is wrong with a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polykv_proxy.cli.options import add_config_option, settings_from
from polykv_proxy.cli.starting import check_arguments

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Add both."""
    _add_config(commands)
    _add_policy(commands)


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="look at the configuration")
    steps = config.add_subparsers(required=True, metavar="STEP")
    show = steps.add_parser("show", help="print the effective configuration, secrets masked")
    add_config_option(show)
    show.set_defaults(command=_config_show)


def _add_policy(commands: Any) -> None:
    policy = commands.add_parser("policy", help="look at policy files")
    steps = policy.add_subparsers(required=True, metavar="STEP")
    check = steps.add_parser("check", help="say what a policy file puts in force, or what is wrong with it")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_policy_check)


def _config_show(args: argparse.Namespace) -> int:
    from polykv_proxy import config  # noqa: PLC0415

    settings = settings_from(args)
    for engine in settings.engines or (settings.engine,):
        check_arguments(engine)
    print(config.shown(settings), end="")
    return 0


def _policy_check(args: argparse.Namespace) -> int:
    from polykv_proxy import policy  # noqa: PLC0415

    policies = policy.load(args.file)
    print(policy.shown(policies), end="")
    for section in policy.idle(policies):
        print(
            f"{args.file}: {section}: enforced, and judges nobody: it has neither target_tps_per_session nor "
            "kv_headroom_ratio",
            file=sys.stderr,
        )
    return 0
