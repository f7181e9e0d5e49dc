"""The engine's log file: rotation, and the sentence in it that says why a start failed."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROTATE_BYTES = 16 * 1024 * 1024
"""A log that has grown beyond this is put aside."""
KEEP = 3
"""Old logs kept, ``.1`` the newest."""

_TAIL_BYTES = 64 * 1024
_PREFIX = re.compile(
    r"^(?:\d+\.\d+\.\d+\.\d+ )?(?P<level>[IWED]) (?:[a-z]{3,4} +(?=\w+(?:\(\))?: ))?(?:\w+(?:\(\))?: +)*"
)
"""``0.00.006.375 E srv    load_model: failed to …``: time, level, component, function."""
_CRASH = re.compile(
    r"GGML_ASSERT|GGML_ABORT|CUDA error|illegal instruction|^terminate called|^\s*what\(\):", re.IGNORECASE
)
_PLAIN_ERROR = re.compile(r"^error\b", re.IGNORECASE)
_SAYS_NOTHING = re.compile(r"^(?:exiting due to|failed to load model$|cleaning up)")


def rotate(file: Path, *, in_use: bool = False) -> None:
    """Put a large log aside; the oldest beyond ``KEEP`` is dropped.

    Args:
        file: the log.
        in_use: whether an engine writes it, which keeps the file it was given, for appending: it is copied
            and emptied then. What is written in between is lost.

    Raises:
        OSError: it cannot be, and is as it was.
    """
    try:
        if file.stat().st_size < ROTATE_BYTES:
            return
    except FileNotFoundError:
        return
    aside = file
    if in_use:
        aside = file.with_name(f"{file.name}.0")
        try:
            shutil.copyfile(file, aside)
            os.truncate(file, 0)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
    for age in range(KEEP - 1, 0, -1):
        older = file.with_name(f"{file.name}.{age}")
        if older.exists():
            older.replace(file.with_name(f"{file.name}.{age + 1}"))
    aside.replace(file.with_name(f"{file.name}.1"))


def failure_reason(file: Path, offset: int, *, was_ready: bool) -> str | None:
    """Why the engine ended, from what it wrote after ``offset`` bytes of its log.

    llama.cpp reports the cause first and what it led to afterwards, so both ends are worth having:
    the first and the last error line, less those that say nothing. Without any error line the last
    line stands in; ``None`` where nothing was written.

    The log of an engine that was ready is about requests, whose content has no place in a reason:
    there only the marks of a crash count.
    """
    try:
        with file.open("rb") as log:
            end = log.seek(0, 2)
            if end < offset:
                offset = 0  # it was emptied meanwhile
            log.seek(max(offset, end - _TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if was_ready:
        crashes = [line.strip() for line in lines if _CRASH.search(line)]
        return crashes[-1] if crashes else None
    errors = [text for line in lines if (text := _error_text(line)) is not None]
    if errors:
        first, last = errors[0], errors[-1]
        return first if first == last else f"{first}; {last}"
    rest = [line.strip() for line in lines if line.strip()]
    return _PREFIX.sub("", rest[-1]) if rest else None


def _error_text(line: str) -> str | None:
    prefix = _PREFIX.match(line)
    if prefix is None:
        return line.strip() if _PLAIN_ERROR.search(line) or _CRASH.search(line) else None
    text = line[prefix.end() :].strip()
    return text if prefix["level"] == "E" and text and not _SAYS_NOTHING.match(text) else None
