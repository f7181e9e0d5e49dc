"""What an engine needs before it is started: its arguments checked, its binary built, its model fetched."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from polykv_proxy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from polykv_proxy.settings import EngineSettings, Settings

E = TypeVar("E", bound="EngineSettings")


def with_engine(settings: Settings) -> Settings:
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
    check_arguments(engine)
    for name, file in (("model", engine.model), ("binary", engine.binary)):
        # the supervisor would wait for it to appear; at a start it is a typing error
        if file is not None and not file.is_file():
            raise ConfigError(f"{key}.{name}: {file}: no such file")
    chosen: dict[str, Path] = {}
    with sigterm_interrupts():
        if engine.model is None:
            chosen["model"] = model.ensure(settings.cache_path)
        if engine.binary is None:
            chosen["binary"] = build.ensure(settings.cache_path).binary
    return engine.model_copy(update=chosen)


def check_arguments(engine: EngineSettings) -> None:
    """Say what cannot work before minutes are spent on building for it."""
    from polykv_proxy.engine import profile  # noqa: PLC0415

    if engine.url is None:
        profile.check(engine.parallel, 0 if engine.stock else engine.max_pools, engine.args)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end a build as Ctrl-C does: its processes waited for, its stage removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
