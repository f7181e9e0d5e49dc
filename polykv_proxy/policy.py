"""Policy files: what operators tune while the proxy runs.

A file has four sections: ``default`` holds for everything, ``models`` and ``labels`` say what differs for
requests to a model and for pools of a label (and for all pools below them), ``cells`` is for the engine's
cache. A key that is left out is inherited, see ``core.policies``. Unknown keys are refused.

A file is read whole or not at all: one that cannot work leaves in force what was, and says why.
``config/policies`` has commented examples, and ``schema.json`` there is generated from this file
(``python -m polykv_proxy.policy > config/policies/schema.json``); tests hold both to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polykv_proxy.config import one_line, read_yaml
from polykv_proxy.core.policies import CellPolicy, Mode, OnSaturation, Policy, PolicySet, Projection
from polykv_proxy.errors import BadRequestError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from polykv_proxy.core.policies import Given

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""Neither ``yes`` nor a text that reads like one: the schema says number."""
Whole = Annotated[int, Field(strict=True)]
Tps = Annotated[Number, Field(gt=0, le=1e6)]
Ratio = Annotated[Number, Field(ge=0, lt=1)]
Seconds = Annotated[Number, Field(ge=0, le=86_400)]

_POLICY = Policy()
_CELLS = CellPolicy()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AdmissionKeys(_Section):
    """What may be said of admission; a key that is left out is inherited."""

    target_tps_per_session: Tps | None = _POLICY.target_tps_per_session
    """Floor: decode tokens per second that each session is to have. null: no floor."""

    mode: Mode = _POLICY.mode
    """``advisory``: nobody is refused, answers say who would have been. ``enforced``: ``on_saturation``."""

    on_saturation: OnSaturation = _POLICY.on_saturation
    """``reject`` with 429, ``warn`` in a header, or ``queue`` until there is room."""

    projection: Projection = _POLICY.projection
    """``fitted``: the measured curve of decode time, once known. ``conservative``: mean x n / (n + 1),
    where n + 1 counts those inside who pause and are expected back, too."""

    settle_tokens: Whole = Field(default=_POLICY.settle_tokens, ge=0, le=4096)
    """Tokens that a newcomer decodes before the next one may follow."""

    settle_max_ms: Whole = Field(default=int(_POLICY.settle_max_s * 1000), ge=0, le=60_000)
    """Milliseconds after which the next one may follow in any case."""

    kv_headroom_ratio: Ratio = _POLICY.kv_headroom_ratio
    """Share of all KV cells, 0 to 1, that must still be free after a session came in."""

    queue_max_depth: Whole = Field(default=_POLICY.queue_max_depth, ge=0, le=4096)
    """Sessions of one pool that may wait to come in; one more is refused."""

    queue_max_wait_s: Seconds = _POLICY.queue_max_wait_s
    """Longest wait to come in, in seconds; then 429."""

    priority: Whole = Field(default=_POLICY.priority, ge=-100, le=100)
    """Higher goes first in the queue; each step is worth 30 seconds of waiting."""

    session_idle_s: Seconds = _POLICY.session_idle_s
    """Seconds without a request after which a session is outside again, and its next turn a new admission."""

    def given(self) -> Given:
        """The keys that were set, as the core calls them."""
        said: dict[str, Any] = {key: getattr(self, key) for key in self.model_fields_set}
        if "settle_max_ms" in said:
            said["settle_max_s"] = said.pop("settle_max_ms") / 1000
        return said


class CellKeys(_Section):
    """How an engine's cache is looked after; the same for all pools."""

    watermark_ratio: Ratio = _CELLS.watermark_ratio
    """Share of the KV cells, 0 to 1, that admissions always leave free."""

    growth_tokens: Whole = Field(default=_CELLS.growth_tokens, ge=1, le=4096)
    """Cells that a running request may fill between two samples, and while one is stopped and a slot is
    emptied after that."""

    overcommit: Annotated[bool, Field(strict=True)] = _CELLS.overcommit
    """Reserve what requests are expected to produce. Off: all that ``max_tokens`` allows. Then none is ever
    ended early because others grew, but one without ``max_tokens`` takes the whole cache."""

    assumed_tokens: Whole = Field(default=_CELLS.assumed_tokens, ge=1)
    """Length of an answer, in tokens, that is expected while nothing is known of its kind."""

    quantile: Number = Field(default=_CELLS.quantile, gt=0, lt=1)
    """Share of the answers of a kind, 0 to 1, that an expectation covers."""

    stale_after_s: Annotated[Number, Field(gt=1, le=600)] = _CELLS.stale_after_s
    """Age of the last sample, in seconds, from which the engine counts as full."""


class PolicyDocument(_Section):
    """A policy file."""

    default: AdmissionKeys = AdmissionKeys()
    """For everything that nothing else is said of."""

    models: dict[str, AdmissionKeys] = Field(default_factory=dict)
    """By the name of a model."""

    labels: dict[str, AdmissionKeys] = Field(default_factory=dict)
    """By the label of a pool."""

    cells: CellKeys = CellKeys()
    """For the KV cache of each engine."""

    def policies(self) -> PolicySet:
        """As the core wants it."""
        return PolicySet(
            default=self.default.given(),
            models={name: keys.given() for name, keys in self.models.items()},
            labels={name: keys.given() for name, keys in self.labels.items()},
            cells=CellPolicy(**dict(self.cells)),
        )


def load(file: Path) -> PolicySet:
    """Read a policy file.

    Raises:
        ConfigError: it cannot be read or cannot work. One line: the file, then each key's path.
    """
    values = read_yaml(file)
    for section in ("models", "labels"):
        if isinstance(values.get(section), dict):  # a name with all its keys commented out says nothing
            values[section] = {name: keys or {} for name, keys in values[section].items()}
    try:
        return PolicyDocument.model_validate(values).policies()
    except ValidationError as error:
        raise ConfigError(f"{file}: {one_line(error)}") from None


def posted(values: object) -> Given:
    """What the body of a request says of a pool's admission.

    Raises:
        BadRequestError: a key is unknown or has a value that cannot work; ``param`` is the key.
    """
    if not isinstance(values, Mapping):
        raise BadRequestError("the body must be an object of policy keys")
    try:
        return AdmissionKeys.model_validate(values).given()
    except ValidationError as error:
        param = str(error.errors(include_url=False)[0]["loc"][0])
        raise BadRequestError(one_line(error), code="invalid_policy", param=param) from None


def sources(origins: Mapping[str, str]) -> dict[str, str]:
    """Where the values of a ``document`` are from, with the keys of the file."""
    said = dict(origins)
    said["settle_max_ms"] = said.pop("settle_max_s")
    return {key: said[key] for key in AdmissionKeys.model_fields}


def document(policy: Policy) -> dict[str, Any]:
    """A policy in force, with the keys of the file."""
    said = asdict(policy)
    said["settle_max_ms"] = round(said.pop("settle_max_s") * 1000)
    return {key: said[key] for key in AdmissionKeys.model_fields}


def shown(policies: PolicySet) -> str:
    """Everything that a file puts in force, as YAML, with what was left out filled in."""
    base = policies.base(None)
    values = {
        "default": document(base),
        "models": {name: document(policies.base(name)) for name in policies.models},
        "labels": {
            name: document(Policy(**{**policies.default, **given})) for name, given in policies.labels.items()
        },
        "cells": asdict(policies.cells),
    }
    text: str = yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False)
    return text


def idle(policies: PolicySet) -> list[str]:
    """Sections that enforce a policy which judges nobody, since neither floor nor headroom is set.

    The default is none of them where a model or a label gives what it leaves out, and a label where a model
    does.
    """
    bases = {name: policies.base(name) for name in (None, *policies.models)}
    found = {
        "default": [bases[None]],
        **{f"models.{name}": [base] for name, base in bases.items() if name is not None},
        **{
            f"labels.{name}": [replace(base, **given) for base in bases.values()]
            for name, given in policies.labels.items()
        },
    }
    judging = any(each.judges for section in found.values() for each in section)
    return [
        name
        for name, section in found.items()
        if any(each.mode is Mode.ENFORCED for each in section)
        and not any(each.judges for each in section)
        and not (name == "default" and judging)
    ]


def json_schema() -> str:
    """JSON Schema of a policy file, as it stands in ``config/policies/schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **PolicyDocument.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


class PolicyFile:
    """The policies in force, and the file that they come from.

    Args:
        file: None: the defaults, for good.

    Raises:
        ConfigError: see ``load``; a proxy does not start on a file that cannot work.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen = _stamp(file)
        self.current = PolicySet() if file is None else load(file)
        self.error: str | None = None
        """Why the file as it is now was refused; None if it is what is in force."""

    def reload(self) -> bool:
        """Read the file again; returns whether something else is in force now.

        One that cannot work changes nothing but ``error``.
        """
        if self._file is None:
            return False
        self._seen = _stamp(self._file)
        try:
            new = load(self._file)
        except ConfigError as error:
            self.error = error.message
            return False
        self.error = None
        changed = new != self.current
        self.current = new
        return changed

    def poll(self) -> bool:
        """Like ``reload``, if the file was changed since it was read."""
        return _stamp(self._file) != self._seen and self.reload()


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Changes when a file does, or when another one takes its name; None while there is none."""
    try:
        stat = None if file is None else file.stat()
    except OSError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)


if __name__ == "__main__":
    sys.stdout.write(json_schema())
