"""What commands have in common: arguments, the settings that these make, and what a command ends with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polykv_proxy.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Where the configuration is."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file (default: $POLYKV_CONFIG)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What is said of an engine; each flag is a key of the settings."""
    parser.add_argument("--model", metavar="PATH", help="GGUF file (default: the built-in model)")
    parser.add_argument("--parallel", metavar="N", help="slots: requests that run at once")
    parser.add_argument("--ctx-size", metavar="C", help="KV cells in tokens, shared by all")
    parser.add_argument("--max-pools", metavar="M", help="prefix pools at once; 0 turns pools off")
    parser.add_argument(
        "--engine-arg",
        action="append",
        metavar="ARG",
        help="further llama-server argument, one word each: --engine-arg -ngl --engine-arg 99",
    )


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def settings_from(args: argparse.Namespace) -> Settings:
    """The effective settings: flags win over the environment and the file."""
    from polykv_proxy import config  # noqa: PLC0415 (see the package)

    engine = {
        "model": "model",
        "parallel": "parallel",
        "ctx_size": "ctx_size",
        "max_pools": "max_pools",
        "args": "engine_arg",
    }
    given: dict[str, Any] = {key: getattr(args, name, None) for key, name in engine.items()}
    overrides: dict[str, Any] = {"engine": {k: v for k, v in given.items() if v is not None}}
    if urls := getattr(args, "engine_url", None):
        # who names engines means these and no others
        one = len(urls) == 1
        overrides["engines"] = [] if one else [{"url": url} for url in urls]
        if one:
            overrides["engine"]["url"] = urls[0]
    if getattr(args, "listen", None) is not None:
        overrides["listen"] = args.listen
    return config.load(args.config, overrides)
