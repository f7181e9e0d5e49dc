"""``engine``: build, find, check and run the patched llama-server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polykv_proxy.cli.options import add_config_option, add_engine_options, positive, settings_from
from polykv_proxy.cli.starting import sigterm_interrupts, with_engine
from polykv_proxy.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def add_to(commands: Any) -> None:
    """Add them."""
    engine = commands.add_parser("engine", help="build, check and run the patched llama-server")
    steps = engine.add_subparsers(required=True, metavar="STEP")
    build = steps.add_parser("build", help="fetch, patch, build, check and install; quick when done before")
    add_config_option(build)
    build.add_argument("--source", type=Path, metavar="DIR", help="a llama.cpp checkout; it is not changed")
    build.add_argument("--jobs", type=positive, metavar="N", help="parallel compilations (default: CPUs)")
    build.add_argument(
        "--cmake-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further cmake argument, such as --cmake-arg -DGGML_CUDA=ON; may be repeated",
    )
    build.add_argument("--no-check", action="store_true", help="install without running the result first")
    build.set_defaults(command=_engine_build)
    path = steps.add_parser("path", help="print the path of the installed binary")
    add_config_option(path)
    path.add_argument("--stock", action="store_true", help="the unpatched one built beside it")
    path.set_defaults(command=_engine_path)
    check = steps.add_parser("check", help="boot the installed binary on a small model and decode")
    add_config_option(check)
    check.set_defaults(command=_engine_check)
    pruning = steps.add_parser(
        "prune",
        help="list builds that nobody needs any more, and remove them with --yes",
        description="List the builds in the cache that are neither current nor configured nor in use on this "
        "machine, with their logs and what builds that were cut short left, and remove them with --yes.",
    )
    add_config_option(pruning)
    pruning.add_argument("--yes", action="store_true", help="remove what is listed")
    pruning.set_defaults(command=_engine_prune)
    running = steps.add_parser(
        "run",
        help="run an engine by itself, for a proxy to attach to",
        description="Become the engine that serve would start with these settings, without a proxy. A proxy "
        "attaches to it with --engine-url unix:PATH.",
    )
    add_config_option(running)
    add_engine_options(running)
    running.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="where it listens; ends in .sock (default: see runtime_dir)",
    )
    running.add_argument("--print", action="store_true", help="print the engine's command line instead")
    running.set_defaults(command=_engine_run)


def _engine_build(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build  # noqa: PLC0415

    request = build.BuildRequest(
        cache=settings_from(args).cache_path,
        source=args.source,
        jobs=args.jobs,
        cmake_args=tuple(args.cmake_arg),
        check=not args.no_check,
    )
    with sigterm_interrupts():
        print(build.build(request).binary)
    return 0


def _engine_path(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build  # noqa: PLC0415

    engine = build.installed(settings_from(args).cache_path)
    print(engine.stock if args.stock else engine.binary)
    return 0


def _engine_check(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build, model, prove  # noqa: PLC0415

    settings = settings_from(args)
    binary = settings.engine.binary or build.installed(settings.cache_path).binary
    proof = prove.prove(binary, settings.engine.model or model.ensure(settings.cache_path))
    print(f"{binary}: {proof.tokens} tokens decoded, {proof.decode_tps:.0f} tokens/s")
    return 0


def _engine_prune(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import prune  # noqa: PLC0415

    settings = settings_from(args)
    named = [each.binary for each in settings.fleet if each.binary is not None]
    found = prune.prune(settings.cache_path, named, remove=args.yes)
    for kept in found.kept:
        print(f"{kept.path}: stays: {kept.why}")
    for each in found.leftovers:
        print(f"{each.path}: {each.what}, {each.size_bytes / 1e6:.1f} MB")
    total = f"{len(found.leftovers)} removed" if args.yes else f"{len(found.leftovers)} to remove"
    hint = "" if args.yes or not found.leftovers else "; --yes removes them"
    print(f"{total}, {found.size_bytes / 1e6:.1f} MB{hint}")
    return 0


def _engine_run(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import gguf  # noqa: PLC0415
    from polykv_proxy.engine import foreground  # noqa: PLC0415
    from polykv_proxy.engine.launch import spec_from  # noqa: PLC0415

    settings = settings_from(args)
    if settings.engine.url is not None or settings.engines:
        raise ConfigError("engine.url, engines: this runs one engine, that of the section engine")
    spec = spec_from(with_engine(settings), socket=args.socket)
    for warning in spec.warnings:
        print(f"polykv-proxy: {warning}", file=sys.stderr)
    if not args.print:
        foreground.become(spec, gguf.shards(spec.model))
    print(foreground.command_line(spec))
    return 0
