"""The ``polykv-proxy`` command: arguments in, one call out, errors as one line.

Exit status: 0 done, 1 failed, 2 wrong arguments or configuration, 130 interrupted. Modules that do
the work are imported when their command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from polykv_proxy import __version__
from polykv_proxy.errors import ConfigError, NotFoundError, PolyKVError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from polykv_proxy.settings import EngineSettings, Settings

E = TypeVar("E", bound="EngineSettings")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status."""
    args = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        status: int = args.command(args)
        sys.stdout.flush()
    except ConfigError as error:
        status = _complain(error, EXIT_USAGE)
    except PolyKVError as error:
        status = _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output went away (`| head`); a second flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    raise SystemExit(status)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end a build as Ctrl-C does: its processes waited for, its stage removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: PolyKVError, status: int) -> int:
    print(f"polykv-proxy: {error.message}", file=sys.stderr)
    return status


def _joined(argv: Sequence[str]) -> list[str]:
    """``--engine-arg -ngl`` as ``--engine-arg=-ngl``: argparse takes no value that looks like an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in ("--engine-arg", "--cmake-arg"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polykv-proxy",
        description="Reverse proxy and control plane for llama-server: agents share prompt prefixes.",
    )
    parser.add_argument("--version", action="version", version=f"polykv-proxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    _add_engine(commands)
    _add_config(commands)
    _add_policy(commands)
    _add_cache(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        description="Serve a model. Without arguments: the built-in model on the patched engine at "
        "127.0.0.1:8090. What is not given here comes from the environment and the configuration file.",
    )
    _add_config_option(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="address to serve on")
    _add_engine_options(serve)
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
    _add_config_option(demo)
    demo.add_argument("--k", type=_positive, default=8, metavar="N", help="agents (default: 8)")
    demo.add_argument(
        "--prefix-tokens",
        type=_positive,
        default=1400,
        metavar="M",
        help="length of the shared system prompt in tokens, about (default: 1400)",
    )
    demo.add_argument("--json", action="store_true", help="print only the line of JSON")
    demo.set_defaults(command=_demo)


def _add_engine(commands: Any) -> None:
    engine = commands.add_parser("engine", help="build and check the patched llama-server")
    steps = engine.add_subparsers(required=True, metavar="STEP")
    build = steps.add_parser("build", help="fetch, patch, build, check and install; quick when done before")
    _add_config_option(build)
    build.add_argument("--source", type=Path, metavar="DIR", help="a llama.cpp checkout; it is not changed")
    build.add_argument("--jobs", type=_positive, metavar="N", help="parallel compilations (default: CPUs)")
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
    _add_config_option(path)
    path.add_argument("--stock", action="store_true", help="the unpatched one built beside it")
    path.set_defaults(command=_engine_path)
    check = steps.add_parser("check", help="boot the installed binary on a small model and decode")
    _add_config_option(check)
    check.set_defaults(command=_engine_check)
    running = steps.add_parser(
        "run",
        help="run an engine by itself, for a proxy to attach to",
        description="Become the engine that serve would start with these settings, without a proxy. A proxy "
        "attaches to it with --engine-url unix:PATH.",
    )
    _add_config_option(running)
    _add_engine_options(running)
    running.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="where it listens; ends in .sock (default: see runtime_dir)",
    )
    running.add_argument("--print", action="store_true", help="print the engine's command line instead")
    running.set_defaults(command=_engine_run)


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="look at the configuration")
    steps = config.add_subparsers(required=True, metavar="STEP")
    show = steps.add_parser("show", help="print the effective configuration, secrets masked")
    _add_config_option(show)
    show.set_defaults(command=_config_show)


def _add_policy(commands: Any) -> None:
    policy = commands.add_parser("policy", help="look at policy files")
    steps = policy.add_subparsers(required=True, metavar="STEP")
    check = steps.add_parser("check", help="say what a policy file puts in force, or what is wrong with it")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_policy_check)


def _add_cache(commands: Any) -> None:
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
        _add_config_option(step)
        step.set_defaults(command=command)


def _add_config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file (default: $POLYKV_CONFIG)")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _settings(args: argparse.Namespace) -> Settings:
    from polykv_proxy import config  # noqa: PLC0415 (see the module docstring)

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


def _serve(args: argparse.Namespace) -> int:
    from polykv_proxy import app  # noqa: PLC0415

    return app.run(_with_engine(_settings(args)))


def _demo(args: argparse.Namespace) -> int:
    from polykv_proxy import demo  # noqa: PLC0415

    settings = _with_engine(_settings(args))
    return demo.run(settings, k=args.k, prefix_tokens=args.prefix_tokens, json_only=args.json)


def _with_engine(settings: Settings) -> Settings:
    """Settings with each engine's ``binary`` and ``model`` filled in; builds and fetches what is missing.

    An engine that runs already needs neither and is left as it is.
    """
    if not settings.engines:
        return settings.model_copy(update={"engine": _complete(settings.engine, settings, "engine")})
    engines = tuple(_complete(each, settings, f"engines.{each.name}") for each in settings.engines)
    return settings.model_copy(update={"engines": engines})


def _complete(engine: E, settings: Settings, key: str) -> E:
    from polykv_proxy.engine import build, model  # noqa: PLC0415

    if engine.url is not None:
        return engine
    _check_arguments(engine)
    for name, file in (("model", engine.model), ("binary", engine.binary)):
        # the supervisor would wait for it to appear; at a start it is a typing error
        if file is not None and not file.is_file():
            raise ConfigError(f"{key}.{name}: {file}: no such file")
    chosen: dict[str, Path] = {}
    with _sigterm_interrupts():
        if engine.model is None:
            chosen["model"] = model.ensure(settings.cache_path)
        if engine.binary is None:
            chosen["binary"] = build.ensure(settings.cache_path).binary
    return engine.model_copy(update=chosen)


def _check_arguments(engine: EngineSettings) -> None:
    """Say what cannot work before minutes are spent on building for it."""
    from polykv_proxy.engine import profile  # noqa: PLC0415

    if engine.url is None:
        profile.check(engine.parallel, 0 if engine.stock else engine.max_pools, engine.args)


def _engine_build(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build  # noqa: PLC0415

    request = build.BuildRequest(
        cache=_settings(args).cache_path,
        source=args.source,
        jobs=args.jobs,
        cmake_args=tuple(args.cmake_arg),
        check=not args.no_check,
    )
    with _sigterm_interrupts():
        print(build.build(request).binary)
    return 0


def _engine_path(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build  # noqa: PLC0415

    engine = build.installed(_settings(args).cache_path)
    print(engine.stock if args.stock else engine.binary)
    return 0


def _engine_check(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import build, model, prove  # noqa: PLC0415

    settings = _settings(args)
    binary = settings.engine.binary or build.installed(settings.cache_path).binary
    proof = prove.prove(binary, settings.engine.model or model.ensure(settings.cache_path))
    print(f"{binary}: {proof.tokens} tokens decoded, {proof.decode_tps:.0f} tokens/s")
    return 0


def _engine_run(args: argparse.Namespace) -> int:
    from polykv_proxy.engine import foreground  # noqa: PLC0415
    from polykv_proxy.engine.launch import spec_from  # noqa: PLC0415

    settings = _settings(args)
    if settings.engine.url is not None or settings.engines:
        raise ConfigError("engine.url, engines: this runs one engine, that of the section engine")
    spec = spec_from(_with_engine(settings), socket=args.socket)
    for warning in spec.warnings:
        print(f"polykv-proxy: {warning}", file=sys.stderr)
    if not args.print:
        foreground.become(spec)
    print(foreground.command_line(spec))
    return 0


def _config_show(args: argparse.Namespace) -> int:
    from polykv_proxy import config  # noqa: PLC0415

    settings = _settings(args)
    for engine in settings.engines or (settings.engine,):
        _check_arguments(engine)
    print(config.shown(settings), end="")
    return 0


def _policy_check(args: argparse.Namespace) -> int:
    from polykv_proxy import policy  # noqa: PLC0415

    print(policy.shown(policy.load(args.file)), end="")
    return 0


def _cache_list(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    folders = offline.folders(_settings(args).state_path)
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

    folders = offline.folders(_settings(args).state_path)
    wrong = [line for folder in folders for line in folder.wrong()]
    for line in wrong:
        print(line)
    print(f"{sum(len(folder.catalogue) for folder in folders)} states, {len(wrong)} wrong")
    return EXIT_FAILED if wrong else 0


def _cache_prune(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    settings = _settings(args)
    limits = settings.durable.retention
    for folder in offline.folders(settings.state_path):
        count, size = folder.prune(limits, _now(), everything=args.all)
        print(f"{folder.path}: {count} states removed, {size / 1e6:.1f} MB")
    return 0


def _cache_delete(args: argparse.Namespace) -> int:
    from polykv_proxy.durable import offline  # noqa: PLC0415

    count = offline.delete(offline.folders(_settings(args).state_path), args.key, _now())
    if not count:
        raise NotFoundError(f"nothing is saved under {args.key}", code="cache_not_found")
    print(f"{count} deleted")
    return 0


def _now() -> float:
    return time.time()  # noqa: TID251 - there is no runtime here that would tell
