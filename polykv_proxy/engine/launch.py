"""From settings to one engine's start: binary, arguments, environment, folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.engine.profile import LaunchProfile, child_environment
from polykv_proxy.engine.state import Backoff
from polykv_proxy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polykv_proxy.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything needed to run one engine."""

    index: int
    """Number of the engine on this host, from 0; part of its files' names."""
    binary: Path
    model: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment of the process."""
    socket: Path
    slot_dir: Path
    state_dir: Path
    log_dir: Path
    ready_timeout_s: float
    stop_deadline_s: float
    """For an engine that is left over, or that does not become healthy."""
    backoff: Backoff
    hang_timeout_s: float = 0.0
    """Silence after which a ready engine is ended and started again; 0: never."""
    watch_s: float = 5.0
    """Pause between two looks at a ready engine."""
    warnings: tuple[str, ...] = ()
    """Arguments that work but cost something; to be logged once."""


def slot_folder(settings: Settings, index: int) -> Path:
    """Where an engine of ours has its slot files."""
    return settings.state_path.absolute() / f"slots-{index}"


def spec_from(settings: Settings, index: int = 0, *, socket: Path | None = None) -> EngineSpec:
    """The engine that the settings describe; ``engine.binary`` and ``engine.model`` must be filled in.

    Args:
        settings: of its proxy, or of itself.
        index: its number on this host.
        socket: where it listens, if not in the runtime folder.

    Raises:
        ConfigError: an argument, a variable or a path that cannot work.
    """
    engine = settings.engine
    if engine.binary is None or engine.model is None:
        raise ConfigError("engine.binary, engine.model: needed to start an engine")
    state_dir = settings.state_path.absolute()
    profile = LaunchProfile(
        model=engine.model.absolute(),
        socket=(socket or settings.runtime_path / f"engine-{index}.sock").absolute(),
        slot_dir=slot_folder(settings, index),
        parallel=engine.parallel,
        ctx_size=engine.ctx_size,
        max_pools=0 if engine.stock else engine.max_pools,
        prefill_cap=engine.prefill_cap,
        extra=engine.args,
    )
    added = {name: value.get_secret_value() for name, value in engine.env.items()}
    api_key = engine.api_key.get_secret_value() if engine.api_key else None
    return EngineSpec(
        index=index,
        binary=engine.binary.absolute(),
        model=profile.model,
        argv=profile.argv(),
        env=child_environment(os.environ, added, api_key=api_key),
        socket=profile.socket,
        slot_dir=profile.slot_dir,
        state_dir=state_dir,
        log_dir=settings.engine_log_path.absolute(),
        ready_timeout_s=engine.ready_timeout_s,
        stop_deadline_s=engine.stop_deadline_s,
        hang_timeout_s=engine.hang_timeout_s,
        backoff=Backoff(first_s=engine.restart_backoff_s, max_s=engine.restart_backoff_max_s),
        warnings=profile.warnings(),
    )
