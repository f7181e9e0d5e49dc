"""``serve`` and ``demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polykv_proxy.cli.options import add_config_option, add_engine_options, positive, settings_from
from polykv_proxy.cli.starting import with_engine

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Add both."""
    _add_serve(commands)
    _add_demo(commands)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model. Without arguments: the built-in model on the patched engine at "
        "127.0.0.1:8090. What is not given here comes from the environment and the configuration file.",
    )
    add_config_option(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="address to serve on")
    add_engine_options(serve)
    serve.add_argument(
        "--engine-url",
        action="append",
        metavar="URL",
        help="attach to a running engine instead of starting one; several times for several engines",
    )
    serve.set_defaults(command=_serve)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="the main job with and without sharing, side by side",
        description="Run k agents on one long system prompt, once with a shared pool and once without.",
    )
    add_config_option(demo)
    demo.add_argument("--k", type=positive, default=8, metavar="N", help="agents (default: 8)")
    demo.add_argument(
        "--prefix-tokens",
        type=positive,
        default=1400,
        metavar="M",
        help="length of the shared system prompt in tokens, about (default: 1400)",
    )
    demo.add_argument("--json", action="store_true", help="print only the line of JSON")
    demo.set_defaults(command=_demo)


def _serve(args: argparse.Namespace) -> int:
    from polykv_proxy import app  # noqa: PLC0415

    return app.run(with_engine(settings_from(args)))


def _demo(args: argparse.Namespace) -> int:
    from polykv_proxy import demo  # noqa: PLC0415

    settings = with_engine(settings_from(args))
    return demo.run(settings, k=args.k, prefix_tokens=args.prefix_tokens, json_only=args.json)
