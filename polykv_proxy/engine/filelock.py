"""Whole-file locks that the kernel drops when the last holder is gone, however it went."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Lock a file, creating it where needed.

    Returns:
        A descriptor that holds the lock until it and every copy of it are closed, or ``None`` where
        somebody else holds it. A child that inherits the descriptor keeps the lock alive.
    """
    return _take(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)


def share(path: Path) -> int | None:
    """Hold a lock of a file that is there, together with others.

    Returns:
        A descriptor as of ``try_lock``; ``None`` where the file cannot be read, or somebody has it alone.
    """
    with suppress(OSError):
        return _take(path, os.O_RDONLY, fcntl.LOCK_SH)
    return None


def is_locked(path: Path) -> bool:
    """Whether somebody holds a lock of a file, alone or with others, or nobody can tell."""
    try:
        descriptor = _take(path, os.O_RDONLY, fcntl.LOCK_EX)
    except OSError:
        descriptor = None
    if descriptor is None:
        return path.exists()
    os.close(descriptor)
    return False


def _take(path: Path, flags: int, how: int) -> int | None:
    """Open a file and lock it so; None where somebody else holds it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file; wait for it if need be, after saying so through ``on_wait``."""
    descriptor = try_lock(path)
    if descriptor is None:
        on_wait()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
    try:
        yield
    finally:
        os.close(descriptor)
