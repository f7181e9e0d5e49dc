"""Admission policies: what is promised to sessions, and what happens to those that would break it.

Rule 1: a policy is data and never changes; a new one replaces it whole.
Rule 2: what a pool leaves open it has from its parent, and so on up to the model's and the default policy.
Nearest wins, key by key. At one pool, what was posted to it wins over what a file says of its label.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Given: TypeAlias = "Mapping[str, Any]"
"""The keys of a policy that somebody set, by their names in ``Policy``, with values of their types."""


class Mode(StrEnum):
    """Whether a policy has consequences."""

    ADVISORY = "advisory"
    """Nobody is refused; answers say who would have been."""
    ENFORCED = "enforced"


class OnSaturation(StrEnum):
    """What an enforced policy does with a session for which there is no room."""

    REJECT = "reject"
    WARN = "warn"
    """Let it in and say so."""
    QUEUE = "queue"


class Projection(StrEnum):
    """How the tokens per second with one more session are foreseen."""

    CONSERVATIVE = "conservative"
    """As if all that decode shared a fixed number of tokens."""
    FITTED = "fitted"
    """From the curve that was measured, once it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What holds for the sessions of a pool."""

    target_tps_per_session: float | None = None
    """Floor: decode tokens per second that each session is to have. None: no floor."""
    mode: Mode = Mode.ADVISORY
    on_saturation: OnSaturation = OnSaturation.REJECT
    projection: Projection = Projection.FITTED
    settle_tokens: int = 16
    """Tokens that a newcomer decodes before the next one may follow."""
    settle_max_s: float = 2.0
    """Seconds after which it may follow in any case."""
    kv_headroom_ratio: float = 0.0
    """Share of all KV cells, 0 to 1, that must still be free after a session came in."""
    queue_max_depth: int = 64
    """Sessions of one pool that may wait to come in."""
    queue_max_wait_s: float = 120.0
    priority: int = 0
    """Who waits with a higher one goes first; each step is worth ``queueing.STEP_S`` seconds of waiting."""
    session_idle_s: float = 300.0
    """Seconds without a request after which a session is outside again."""

    @property
    def enforced(self) -> bool:
        """Whether anybody may be refused or held."""
        return self.mode is Mode.ENFORCED and self.judges

    @property
    def judges(self) -> bool:
        """Whether there is anything to fall short of."""
        return self.target_tps_per_session is not None or self.kv_headroom_ratio > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPolicy:
    """How an engine's cells are looked after: for all pools alike, since there is one cache."""

    watermark_ratio: float = 0.01
    """Share of the cells, 0 to 1, that admissions always leave free."""
    growth_tokens: int = 32
    """Cells that a running request may fill between two samples, and while one is stopped and a slot is
    emptied after that; more where the engine was seen to be faster, and at most an eighth of the cache for
    all slots together."""
    overcommit: bool = True
    """Reserve what requests are expected to produce, not all that they may."""
    assumed_tokens: int = 1024
    """Length of an answer whose class is not known yet."""
    quantile: float = 0.9
    """Share of a class's answers, 0 to 1, that an estimate covers."""
    stale_after_s: float = 3.0
    """Age of the last sample from which the engine counts as full."""


KEYS = frozenset(each.name for each in fields(Policy))
"""Names that a ``Given`` may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """What the policy files say."""

    default: Given = field(default_factory=dict)
    models: Mapping[str, Given] = field(default_factory=dict)
    """By the name of a model."""
    labels: Mapping[str, Given] = field(default_factory=dict)
    """By the label of a pool."""
    cells: CellPolicy = CellPolicy()

    def base(self, model: str | None) -> Policy:
        """The policy of requests that ride on no pool."""
        given = {**self.default, **(self.models.get(model, {}) if model is not None else {})}
        return Policy(**given)


def effective(policies: PolicySet, base: Policy, line: Iterable[tuple[str | None, Given]]) -> Policy:
    """The policy in force for a pool.

    Args:
        policies: of the files.
        base: ``policies.base`` for the model that the pool is of.
        line: label, and what was posted, of the pool's root first and of the pool itself last.
    """
    given: dict[str, Any] = {}
    for label, posted in line:
        if label is not None and (said := policies.labels.get(label)):
            given |= said
        given |= posted
    return replace(base, **given) if given else base


BUILT_IN = "built_in"
"""Where a value is from that nobody set."""


def origins(
    policies: PolicySet, model: str | None, line: Iterable[tuple[str, str | None, Given]]
) -> dict[str, str]:
    """Where each key of the policy in force for a pool has its value from.

    Args:
        policies: of the files.
        model: whose section holds, if one does.
        line: as for ``effective``, each with the pool's id before it.

    Returns:
        By key: ``built_in``, the section of the file, or ``pools.`` and the id of the pool that has it.
    """
    found = dict.fromkeys(KEYS, BUILT_IN) | dict.fromkeys(policies.default, "default")
    if model is not None:
        found |= dict.fromkeys(policies.models.get(model, {}), f"models.{model}")
    for pool, label, posted in line:
        if label is not None:
            found |= dict.fromkeys(policies.labels.get(label, {}), f"labels.{label}")
        found |= dict.fromkeys(posted, f"pools.{pool}")
    return found
