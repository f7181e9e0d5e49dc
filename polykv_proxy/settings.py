"""Settings of one deployment: every key, its default, and what it may be. A loaded value never changes.

Units are in the key's name (``_s`` seconds, ``_bytes``) or in its docstring.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from polykv_proxy.core.catalogue import Retention

ENV_PREFIX = "POLYKV_"

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
    """llama-server to start. Unset: the patched one of ``polykv-proxy engine build``, built on demand."""

    model: Path | None = None
    """GGUF file to serve. Unset: the built-in model, SmolLM2-135M-Instruct, fetched on demand."""

    parallel: int = Field(default=4, ge=1, le=MAX_SEQUENCES)
    """Slots: requests that run at the same time. ``parallel`` + ``max_pools`` is at most 256."""

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

    args: tuple[str, ...] = Field(default=(), examples=[["-ngl", "99"]])
    """Further llama-server arguments, one list item a word. Those that would break pools are refused with the
    reason."""

    env: dict[str, SecretStr] = Field(default_factory=dict, examples=[{"CUDA_VISIBLE_DEVICES": "0"}])
    """Further environment variables of the engine."""

    api_key: SecretStr | None = None
    """Key that the engine demands and that the proxy's own calls carry. Unset: ``$LLAMA_API_KEY``, else
    none."""

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
    """Longest wait in seconds for the engine and a free slot, all waits of a request together; then 503 while
    there is no engine, else 429, both with Retry-After. What is done for a request in its slot is no wait.
    0: whoever finds no free slot is refused."""

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

    retry_hold_s: Seconds = 30.0
    """Seconds that what a client left unfinished stays in its slot for the client's retry: others make room
    first. 0: like any other."""

    orphan_ttl_s: PositiveSeconds | None = None
    """Seconds after which a pinned pool is released that no session and no child uses. Unset: never."""

    mask_billing_header: bool = False
    """Replace the changing values of the billing header that Claude Code puts before its system prompt by
    constants, so that what follows can be shared. Nothing else in a body changes; answers report it."""


class DurableSettings(_Section):
    """KV on disk: conversations and pools that survive a lost slot, an engine's end and a restart."""

    enabled: bool = True
    """Whether KV is saved and restored. It stays off where the loaded model does not go on from a file, or
    nobody can tell what the engine was started with; ``GET /props`` says why."""

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

    disk_wait_s: PositiveSeconds = 20.0
    """Seconds without progress after which the disk is taken for one that hangs. Until it answers again
    nothing is saved or restored, and nobody waits for it."""

    @property
    def retention(self) -> Retention:
        """What may stay on disk."""
        return Retention(
            max_bytes=self.max_bytes, max_idle_s=self.max_idle_s, min_free_bytes=self.min_free_bytes
        )


class RequestSettings(_Section):
    """Records of the last requests, under ``/polykv/requests``."""

    keep: int = Field(default=1000, ge=0, le=100_000)
    """How many are kept, about 2 kB each at most. 0: none."""


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
    """Everything a deployment decides. ``config.load`` reads the sources; the class by itself reads none."""

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
    """Folder of the engine's socket, whose path must stay below 108 bytes. Unset: ``$RUNTIME_DIRECTORY``,
    else ``run`` in the state folder."""

    admin_api_key: SecretStr | None = None
    """Bearer key that the ``/polykv`` control routes demand; better kept in the variable than in a file.
    Unset: the engine's key, if there is one."""

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
    engines: tuple[NamedEngine, ...] = Field(
        default=(),
        examples=[
            [
                {"name": "left", "env": {"CUDA_VISIBLE_DEVICES": "0"}},
                {"name": "right", "env": {"CUDA_VISIBLE_DEVICES": "1"}},
            ]
        ],
    )
    """Several engines behind this proxy, one item each, such as one for each GPU; a pool lives on one of
    them. A key that an item leaves out is that of ``engine``. Empty: one engine, ``engine``."""

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
                own = merged(common, own)
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


def merged(beneath: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, key by key inside sections; where both have a value ``above`` wins."""
    both = dict(beneath)
    for key, value in above.items():
        under = both.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            both[key] = merged(under, value)
        else:
            both[key] = value
    return both
