"""Settings of one deployment: the only reader of the configuration file and of the environment.

Precedence, highest first: command line, environment (``POLYKV_LISTEN``, ``POLYKV_ENGINE__PARALLEL``,
lists as JSON), YAML file, default. Unknown keys are refused wherever they come from, because a
misspelt limit that is silently ignored is worse than a refused start. A loaded value never changes.

Units are in the key's name (``_s`` seconds, ``_bytes``) or in its docstring. ``config/polykv.yaml``
lists every key with its default and ``config/schema.json`` is generated from this file
(``python -m polykv_proxy.config > config/schema.json``); tests hold both to it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from polykv_proxy.core.catalogue import Retention
from polykv_proxy.errors import ConfigError

ENV_PREFIX = "POLYKV_"
ENV_CONFIG_FILE = "POLYKV_CONFIG"
"""Names the configuration file where no ``--config`` is given; not a settings key."""

MAX_SEQUENCES = 256
"""Sequence ids of one llama.cpp context (``LLAMA_MAX_SEQ``), slots and pools together."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineSettings(_Section):
    """The llama-server behind the proxy: ours to run, or somebody else's to attach to (``url``)."""

    url: str | None = None
    """Attach to a running engine: ``http://host:port`` or ``unix:/path/to.sock``. Unset: start one."""

    binary: Path | None = None
    """llama-server to start. Unset: the patched one that ``engine build`` installed (built on demand)."""

    model: Path | None = None
    """GGUF file to serve. Unset: the built-in model, SmolLM2-135M-Instruct (fetched on demand)."""

    parallel: int = Field(default=4, ge=1, le=MAX_SEQUENCES)
    """Slots: requests that run at the same time."""

    ctx_size: int = Field(default=8192, ge=0)
    """KV cells of the engine in tokens, shared by all slots and pools. 0: the model's training context."""

    stock: bool = False
    """``binary`` is llama-server as it comes, without our patch: pools are kept as slot files, and a session
    that attaches gets a copy. An engine behind ``url`` is found out by itself."""

    max_pools: int = Field(default=16, ge=0, lt=MAX_SEQUENCES)
    """Prefix pools that may exist at once. 0 turns pools off."""

    prefill_cap: int | None = Field(default=None, ge=0)
    """Prompt tokens, of all requests and pools, that a step may add while others generate; smaller is
    smoother for those and slower for prompts. 0: no cap. Unset: 16 on CPU hosts, no cap on GPUs."""

    args: tuple[str, ...] = ()
    """Further llama-server arguments, one list item a word. Those that would break pools are refused."""

    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Further environment variables of the engine, such as CUDA_VISIBLE_DEVICES."""

    api_key: SecretStr | None = None
    """Key that the engine demands and that the proxy's own calls carry. Unset: LLAMA_API_KEY, else none."""

    log_dir: Path | None = None
    """Folder of the engine's log files. Unset: the state folder."""

    ready_timeout_s: PositiveSeconds = 600.0
    """Seconds a starting engine has to load its model before it is stopped and tried again."""

    hang_timeout_s: Seconds = 120.0
    """Seconds without any answer after which a ready engine is stopped and started again. 0: never."""

    restart_backoff_s: PositiveSeconds = 0.5
    """Seconds before the first restart; doubles with each failure in a row."""

    restart_backoff_max_s: PositiveSeconds = 60.0
    """Longest wait in seconds between restarts; reached at once after the third quick failure in a row."""

    stop_deadline_s: Seconds = 10.0
    """Seconds between asking the engine to stop and killing it."""

    @field_validator("url")
    @classmethod
    def _url_form(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://", "unix:/")):
            raise ValueError("must be http://host:port or unix:/path/to.sock")
        if value is not None and value.startswith("http") and urlsplit(value).path.strip("/"):
            # a client's base URL ends in /v1; the proxy needs all of the engine's routes
            raise ValueError("must be http://host:port, without a path such as /v1")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.parallel + self.max_pools > MAX_SEQUENCES:
            raise ValueError(
                f"parallel ({self.parallel}) + max_pools ({self.max_pools}) must be at most {MAX_SEQUENCES}, "
                "the sequence ids of one llama.cpp context"
            )
        if self.restart_backoff_s > self.restart_backoff_max_s:
            raise ValueError("restart_backoff_s must not exceed restart_backoff_max_s")
        return self


class NamedEngine(EngineSettings):
    """One engine of several. A key that is left out is that of ``engine``."""

    name: str = Field(default="", max_length=64, pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """What routes, listings and metrics call it. Unset: its number, ``engine-0`` for the first."""


class QueueSettings(_Section):
    """How requests wait for a slot."""

    max_wait_s: Seconds = 600.0
    """Longest wait in seconds for the engine and a free slot; then 503 while there is no engine, else 429,
    both with Retry-After."""

    max_depth: int = Field(default=1024, ge=0)
    """Requests that may wait at once; one more is refused with 429. 0: nobody waits."""

    hold_grace_s: Seconds = 10.0
    """Seconds before a stream that waits gets its head and keepalive comments. A refusal before that is a
    real status, after it the stream's last event."""

    keepalive_s: PositiveSeconds = 10.0
    """Seconds between keepalive comments on a stream that waits."""


class PoolSettings(_Section):
    """What happens with prefixes without being asked for."""

    auto_match: bool = True
    """Attach requests that name no pool to the one that holds most of their prompt."""

    auto_pools: bool = True
    """Make a pool of a prefix that a second conversation shares."""

    min_match_tokens: int = Field(default=32, ge=1)
    """Tokens below which a match is not worth an attach."""

    auto_min_tokens: int = Field(default=256, ge=1)
    """Tokens below which a common prefix is not worth a pool."""

    auto_gain_tokens: int = Field(default=64, ge=1)
    """Tokens that a pool must hold beyond what the best existing one does to come by itself."""

    auto_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the pools' sequence ids, 0 to 1, that pools which came by themselves may take. Those that
    were asked for always come first."""

    grace_s: Seconds = 60.0
    """Seconds that a pool which came by itself stays after its last use before it may make room, and that one
    which was released while in use stays after its last holder left."""

    orphan_ttl_s: PositiveSeconds | None = None
    """Seconds after which a pinned pool is released that no session and no child uses. Unset: never."""

    mask_billing_header: bool = False
    """Replace the changing values of the billing header that Claude Code puts before its system prompt by
    constants, so that what follows can be shared. Nothing else in a body changes; answers report it."""


class DurableSettings(_Section):
    """KV on disk: conversations and pools that survive a lost slot, an engine's end and a restart."""

    enabled: bool = True
    """Whether KV is saved and restored. It stays off where the loaded model does not go on from a file, or
    the engine's folder is on another host; ``/props`` says why."""

    max_bytes: int = Field(default=20 * 1024**3, ge=0)
    """Bytes that saved KV of one engine may take; the least valuable goes first."""

    max_idle_s: Seconds = 7 * 86_400.0
    """Seconds out of use after which a saved state goes."""

    min_free_bytes: int = Field(default=1024**3, ge=0)
    """Bytes of the disk that stay free; below that nothing is saved, and saved states go."""

    idle_save_s: Seconds = 30.0
    """Seconds without a request after which a conversation is saved while it still has its slot."""

    min_tokens: int = Field(default=64, ge=1)
    """Tokens that a conversation must have beyond its pool to be worth a file, and that a restore must
    spare."""

    pools_every_s: Seconds = 60.0
    """Seconds between two looks for pools to save."""

    pool_recent_s: Seconds = 3600.0
    """Seconds since its last use for which a pool that is not pinned is worth saving."""

    while_rebuilding: Literal["hold", "plain"] = "hold"
    """What becomes of requests while lost pools come back: ``hold`` lets them wait, at most
    ``queue.max_wait_s``; ``plain`` serves them without."""

    drain_s: Seconds = 30.0
    """Seconds that saving may take when the proxy stops."""

    @property
    def retention(self) -> Retention:
        """What may stay on disk."""
        return Retention(
            max_bytes=self.max_bytes, max_idle_s=self.max_idle_s, min_free_bytes=self.min_free_bytes
        )


class RequestSettings(_Section):
    """Records of the last requests, under ``/polykv/requests``."""

    keep: int = Field(default=1000, ge=0, le=100_000)
    """How many, about 2 kB each at most. 0 keeps none."""


class LogSettings(_Section):
    """The proxy's own log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""

    format: Literal["console", "json"] = "console"
    """``console`` for people, ``json`` for collectors: one object a line."""


class TelemetrySettings(_Section):
    """What the proxy tells about itself while it runs."""

    metrics: bool = True
    """Whether ``/metrics`` has our series behind the engine's. Off: it is the engine's alone."""

    tps_interval_s: PositiveSeconds = 0.5
    """Seconds between two documents of the ``/polykv/tps`` stream."""


class Settings(BaseSettings):
    """Everything a deployment decides. :func:`load` reads the sources; the class by itself reads none."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
    )

    listen: str = "127.0.0.1:8090"
    """Address to serve on, ``host:port``; IPv6 as ``[::1]:8090``. Port 0 takes a free one."""

    cache_dir: Path | None = None
    """Built engines and models; safe to delete. Unset: ``$XDG_CACHE_HOME/polykv-proxy`` or
    ``~/.cache/polykv-proxy``."""

    state_dir: Path | None = None
    """Engine records, logs and saved KV, one proxy each. Unset: ``$STATE_DIRECTORY``, else
    ``$XDG_STATE_HOME/polykv-proxy`` or ``~/.local/state/polykv-proxy``."""

    runtime_dir: Path | None = None
    """The engine's socket. Unset: ``$RUNTIME_DIRECTORY``, else ``run`` in the state folder."""

    admin_api_key: SecretStr | None = None
    """Bearer key that the ``/polykv`` control routes demand. Unset: the engine's key, if there is one."""

    policy_file: Path | None = None
    """Admission policies, see ``config/policies``; read again when it changes and on SIGHUP. A file that
    cannot work changes nothing while the proxy runs. Unset: nobody is refused."""

    share_across_keys: bool = False
    """Whether callers with different API keys may share prefixes. Off: a pool serves only the key that
    created it, because shared KV can be told apart by its speed."""

    allowed_hosts: tuple[str, ...] = ()
    """Host names, besides localhost and IP addresses, under which the ``/polykv`` routes may be called.
    Guards a loopback service against web pages that point a name of theirs at it."""

    max_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Largest request body in bytes; a larger one is answered with 413."""

    drain_s: Seconds = 30.0
    """Seconds that running requests may finish in after SIGTERM."""

    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    queue: QueueSettings = QueueSettings()
    pools: PoolSettings = PoolSettings()
    durable: DurableSettings = DurableSettings()
    requests: RequestSettings = RequestSettings()
    engine: EngineSettings = EngineSettings()
    engines: tuple[NamedEngine, ...] = ()
    """Several engines behind this proxy, one item each, such as one for each GPU. A key that an item leaves
    out is that of ``engine``. Empty: one engine, ``engine``."""

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, values: Any) -> Any:
        """Fill what an item of ``engines`` leaves out, and number those without a name."""
        if not isinstance(values, Mapping) or not isinstance(values.get("engines"), list | tuple):
            return values
        common = values.get("engine", {})
        if isinstance(common, EngineSettings):
            common = common.model_dump(exclude_unset=True)
        if not isinstance(common, Mapping):
            return values  # to be refused as it is
        items = []
        for number, item in enumerate(values["engines"]):
            own = item.model_dump(exclude_unset=True) if isinstance(item, NamedEngine) else item
            if isinstance(own, Mapping):
                own = _merged(common, own)
                own["name"] = own.get("name") or f"engine-{number}"
            items.append(own)
        return {**values, "engines": tuple(items)}

    @model_validator(mode="after")
    def _engines_differ(self) -> Self:
        names = [each.name for each in self.engines]
        if len(set(names)) < len(names):
            raise ValueError("engines: each needs a name of its own")
        return self

    @field_validator("listen")
    @classmethod
    def _listen_form(cls, value: str) -> str:
        _split_address(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (the framework's signature)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller gives and nothing else, so that a test's settings are what it wrote."""
        return (init_settings,)

    @property
    def fleet(self) -> tuple[NamedEngine, ...]:
        """All engines, one at least, each with its name."""
        return self.engines or (NamedEngine(**{"name": "engine-0", **dict(self.engine)}),)

    def of_engine(self, number: int) -> Settings:
        """The same settings for one engine of ``fleet``: ``engine`` is that one, and there are no others."""
        return self.model_copy(update={"engine": self.fleet[number], "engines": ()})

    @property
    def listen_host(self) -> str:
        """Host part of ``listen``, without brackets."""
        return _split_address(self.listen)[0]

    @property
    def listen_port(self) -> int:
        """Port part of ``listen``."""
        return _split_address(self.listen)[1]

    @property
    def cache_path(self) -> Path:
        """``cache_dir`` with its default filled in."""
        return self.cache_dir or _xdg("XDG_CACHE_HOME", ".cache")

    @property
    def state_path(self) -> Path:
        """``state_dir`` with its default filled in."""
        return self.state_dir or _service_dir("STATE_DIRECTORY") or _xdg("XDG_STATE_HOME", ".local/state")

    @property
    def runtime_path(self) -> Path:
        """``runtime_dir`` with its default filled in."""
        return self.runtime_dir or _service_dir("RUNTIME_DIRECTORY") or self.state_path / "run"

    @property
    def engine_log_path(self) -> Path:
        """``engine.log_dir`` with its default filled in."""
        return self.engine.log_dir or self.state_path


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
    try:
        values = _merged(written, EnvSettingsSource(Settings)())
        settings = Settings(**_merged(values, overrides or {}))
    except ValidationError as error:
        where = f"{file}: " if any(_has(written, each["loc"]) for each in error.errors()) else ""
        raise ConfigError(where + one_line(error)) from None
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


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError("must be host:port, with an IPv6 host in brackets")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"port {port!r} is not a number from 0 to 65535")
    return (host[1:-1] if bracketed else host), int(port)


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / fallback) / "polykv-proxy"


def _service_dir(variable: str) -> Path | None:
    """Folder that systemd made for the unit; it passes several joined by colons, ours is the first."""
    value = os.environ.get(variable)
    return Path(value.split(":")[0]) if value else None


def _refuse_unknown_variables() -> None:
    # nested names are checked as keys; pydantic-settings overlooks unknown top-level ones
    known = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    for name in sorted(os.environ):
        upper = name.upper()
        if upper.startswith(ENV_PREFIX) and upper != ENV_CONFIG_FILE and upper.split("__")[0] not in known:
            raise ConfigError(f"environment: {name} is not a known setting")


def _merged(beneath: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, key by key inside sections; where both have a value ``above`` wins."""
    both = dict(beneath)
    for key, value in above.items():
        under = both.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            both[key] = _merged(under, value)
        else:
            both[key] = value
    return both


def _has(values: Mapping[str, Any], path: tuple[int | str, ...]) -> bool:
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


def one_line(error: ValidationError) -> str:
    """What is wrong, each problem with the path of its key."""
    problems = []
    for item in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in item["loc"]) or "settings"
        text = (
            "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        )
        problems.append(f"{path}: {text}")
    return "; ".join(problems)


if __name__ == "__main__":
    sys.stdout.write(json_schema())
