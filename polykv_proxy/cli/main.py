"""From words to a command, and from what it raises to an exit status.

Exit status: 0 done, 1 failed, 2 wrong arguments or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from polykv_proxy import __version__
from polykv_proxy.cli import engines, looking, saved, serving
from polykv_proxy.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from polykv_proxy.errors import ConfigError, PolyKVError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status."""
    args = parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
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


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    whole = argparse.ArgumentParser(
        prog="polykv-proxy",
        description="Reverse proxy and control plane for llama-server: agents share prompt prefixes.",
    )
    whole.add_argument("--version", action="version", version=f"polykv-proxy {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for group in (serving, engines, looking, saved):
        group.add_to(commands)
    return whole
