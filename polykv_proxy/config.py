"""The only reader of the configuration file and of the environment's settings.

Precedence, highest first: command line, environment (``POLYKV_LISTEN``, ``POLYKV_ENGINE__PARALLEL``,
lists as JSON), YAML file, default. Unknown keys are refused wherever they come from, because a
misspelt limit that is silently ignored is worse than a refused start.

``config/schema.json`` is generated from ``settings``
(``python -m polykv_proxy.config > config/schema.json``), and so is what people read, see ``reference``; tests
hold all of it to them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from polykv_proxy.errors import ConfigError
from polykv_proxy.settings import ENV_PREFIX, Settings, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    KeyPath: TypeAlias = tuple[int | str, ...]

ENV_CONFIG_FILE = "POLYKV_CONFIG"
"""Names the configuration file where no ``--config`` is given; not a settings key."""


def load(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read all sources and return the effective settings.

    Args:
        file: YAML file; ``None`` reads the one named by ``POLYKV_CONFIG``, or none.
        overrides: nested values of the command line; they win over everything else.

    Raises:
        ConfigError: a source cannot be read, or a key is unknown or has a value that cannot work. One
            line with the key path, behind the file if that has the key.
    """
    _refuse_unknown_variables()
    if file is None and os.environ.get(ENV_CONFIG_FILE):
        file = Path(os.environ[ENV_CONFIG_FILE])
    written = {} if file is None else read_yaml(file)
    told: Mapping[str, Any] = {}
    commanded = overrides or {}

    def variable(path: KeyPath) -> str | None:
        return None if _has(commanded, path) or not _has(told, path) else _variable(path)

    try:
        told = EnvSettingsSource(Settings)()
        settings = Settings(**merged(merged(written, told), commanded))
    except ValidationError as error:
        paths = [each["loc"] for each in error.errors()]
        in_force = (
            _has(written, path) and not variable(path) and not _has(commanded, path) for path in paths
        )
        where = f"{file}: " if any(in_force) else ""
        raise ConfigError(where + one_line(error, variable)) from None
    except SettingsError as error:
        raise ConfigError(f"environment: {error}; lists and mappings are written as JSON") from None
    if settings.engine.api_key is None and os.environ.get("LLAMA_API_KEY"):
        # who protected llama-server by its own variable must not lose that by putting us in front
        key = {"api_key": SecretStr(os.environ["LLAMA_API_KEY"].split(",")[0])}
        engines = tuple(
            each if each.api_key is not None else each.model_copy(update=key) for each in settings.engines
        )
        engine = settings.engine.model_copy(update=key)
        settings = settings.model_copy(update={"engine": engine, "engines": engines})
    return settings


def shown(settings: Settings) -> str:
    """The effective settings as YAML, secrets masked, folders that would be used filled in."""
    values = settings.model_dump(mode="json")
    values |= {
        "cache_dir": str(settings.cache_path),
        "state_dir": str(settings.state_path),
        "runtime_dir": str(settings.runtime_path),
    }
    for engine in (values["engine"], *values["engines"]):
        engine["log_dir"] = engine["log_dir"] or str(settings.state_path)
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def json_schema() -> str:
    """JSON Schema of the YAML file, as it stands in ``config/schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def _refuse_unknown_variables() -> None:
    # nested names are checked as keys; pydantic-settings overlooks unknown top-level ones
    known = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    for name in sorted(os.environ):
        upper = name.upper()
        if upper.startswith(ENV_PREFIX) and upper != ENV_CONFIG_FILE and upper.split("__")[0] not in known:
            raise ConfigError(f"environment: {name} is not a known setting")


def _variable(path: KeyPath) -> str | None:
    """The variable that says what stands at a path: of the key itself, or of a section as JSON."""
    known = {name.upper(): name for name in os.environ}
    for end in range(len(path), 0, -1):
        name = ENV_PREFIX + "__".join(map(str, path[:end])).upper()
        if name in known:
            return known[name]
    return None


def _has(values: Mapping[str, Any], path: KeyPath) -> bool:
    """Whether a mapping has the key that an error is about, or the list that it stands in."""
    found: Any = values
    for part in path:
        if isinstance(found, list):
            return True
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return bool(path)


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML file's mapping, its empty sections left out.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{file}: must be a mapping of keys to values")
    # an empty section (`queue:` with all its keys commented out) means its defaults
    return {key: value for key, value in data.items() if value is not None}


def one_line(error: ValidationError, variable: Callable[[KeyPath], str | None] = lambda _: None) -> str:
    """What is wrong, each problem with the path of its key, and with the variable that it is from."""
    problems = []
    for item in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in item["loc"]) or "settings"
        text = (
            "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        )
        origin = variable(item["loc"])
        problems.append(f"{path}: {text}" + (f" (environment: {origin})" if origin else ""))
    return "; ".join(problems)


if __name__ == "__main__":
    sys.stdout.write(json_schema())
