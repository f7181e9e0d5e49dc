"""Running a build step: output line by line to a log, and no orphan when we are interrupted."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_GRACE_S = 10.0
"""Seconds that a step has to clean up after an interruption before it is killed."""


def run_logged(
    argv: Sequence[str],
    log: TextIO,
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> int:
    """Run a program to its end and return its exit status.

    Both output streams go to ``log``, preceded by the command, and line by line to ``on_line``. The
    program shares our process group: Ctrl-C reaches it too, and it is waited for either way.

    Raises:
        OSError: the program cannot be started, or the log cannot be written.
    """
    log.write(f"$ {' '.join(argv)}\n")
    log.flush()
    with subprocess.Popen(  # noqa: S603 (our own command lines, no shell)
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if env is None else dict(env),
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if on_line is not None:
                    on_line(line.rstrip("\n"))
        except BaseException:
            _end(process)
            raise
        return process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
