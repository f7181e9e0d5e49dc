"""An engine's folders belong to whoever runs it, for as long as that lives; its saved states to one proxy.

The latter need not be the same: a proxy works with the states of an engine that runs by itself, also while
that is down.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from polykv_proxy.engine.filelock import share, try_lock
from polykv_proxy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from polykv_proxy.engine.launch import EngineSpec


def claim_folders(spec: EngineSpec, *, store: bool = True) -> list[int]:
    """Make an engine's folders and claim them, and its binary with others.

    Args:
        spec: the engine.
        store: whether to claim its saved states, too.

    Returns:
        Descriptors that hold the claims until they and every copy of them are closed.

    Raises:
        ConfigError: a folder cannot be made, or belongs to somebody else who runs.
    """
    claims: list[int] = []
    try:
        for folder in (spec.state_dir, spec.socket.parent, spec.slot_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        claims.append(_claim("state_dir", spec.state_dir / f"engine-{spec.index}.lock"))
        # a start replaces the socket, so that a second engine would take a running one's away
        claims.append(_claim("runtime_dir", spec.socket.with_name(f"{spec.socket.name}.lock")))
        if (binary := share(spec.binary)) is not None:  # so that nobody prunes it between two starts
            claims.append(binary)
        store_lock(spec.slot_dir).touch(mode=0o600)  # by its user, before somebody else looks after it
        if store:
            claims.append(_claim("state_dir", store_lock(spec.slot_dir)))
    except OSError as error:
        drop(claims)
        raise ConfigError(f"state_dir: {error.filename}: {error.strerror}") from None
    except ConfigError:
        drop(claims)
        raise
    return claims


def store_lock(folder: Path) -> Path:
    """The file whose lock whoever works with the states in a folder holds."""
    return folder.with_name(f"{folder.name}.lock")


def drop(claims: list[int]) -> None:
    """Give them up; the list is empty afterwards."""
    while claims:
        os.close(claims.pop())


def _claim(key: str, file: Path) -> int:
    claim = try_lock(file)
    if claim is None:
        raise ConfigError(f"{key}: {file.parent} is in use by another polykv-proxy; each needs its own")
    return claim
