"""What the proxy counts, and how Prometheus gets it.

Counts come in as events; what is a state is read from the plane when somebody scrapes. Nothing here decides
anything, and nothing here grows without bound: no session and no pool id is ever a label.

``docs/reference/metrics.md`` lists every name; a test compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from polykv_proxy.core.divergence import Cause
from polykv_proxy.distribution import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric

    from polykv_proxy.core.gate import Gate
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.rates import Progress

PREFIX = "opencoti_polykv:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_LABELS = 64
"""Different pool labels; what comes later is counted under ``OTHER``."""

NO_POOL = "none"
OTHER = "other"

OUTCOMES = ("admitted", "queued", "rejected", "gave_up")
"""What becomes of a request for slots: at once, after a wait, refused, or whoever waited left."""

OVERFLOWS = ("window", "sequence_cap", "cells", "unknown")
"""Which wall a context hit; see ``ctx_kind`` in the HTTP reference."""

SAVES = ("saved", "failed", "late")
"""What becomes of KV that is to be saved."""

RESTORES = ("effective", "ineffective", "refused", "failed")
"""What becomes of saved KV that is wanted again: reused, not reused, not what was saved, or not restored."""

REBUILDS = ("disk", "prefill", "failed")
"""How a pool came back to an engine that lost it."""

CAUSES = (*(cause.value for cause in Cause if cause is not Cause.NEW_SESSION), "attach_shortfall", OTHER)
"""Why prompt tokens were computed again; an unknown cause is counted as ``OTHER``."""

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WAIT_BOUNDS_S = (0.0, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 600.0)


class Metrics:
    """One engine's counts.

    Args:
        plane: read when somebody scrapes.
        gate: the same, for those who come to it; None where there is none.
    """

    def __init__(self, plane: ControlPlane, gate: Gate | None = None) -> None:
        self.plane = plane
        self.gate = gate
        self.admissions = Counter(dict.fromkeys(OUTCOMES, 0))
        self.overflows = Counter(dict.fromkeys(OVERFLOWS, 0))
        self.recomputed = Counter(dict.fromkeys(CAUSES, 0))
        self.queries: Counter[str] = Counter({NO_POOL: 0})
        self.hits: Counter[str] = Counter({NO_POOL: 0})
        self.saved: Counter[str] = Counter({NO_POOL: 0})
        self.orphans_released = 0
        self.saves = Counter(dict.fromkeys(SAVES, 0))
        self.restores = Counter(dict.fromkeys(RESTORES, 0))
        self.rebuilds = Counter(dict.fromkeys(REBUILDS, 0))
        self.restored_tokens = 0
        """Prompt tokens that saved KV spared, as the engine said."""
        self.saved_bytes = 0
        self.saved_entries = 0
        self.disk_stuck = 0
        self.restarts = 0
        self.stale_samples = 0
        self.ttft = Distribution(TTFT_BOUNDS_S)
        self.itl = Distribution(ITL_BOUNDS_S)
        self.queue_wait = Distribution(WAIT_BOUNDS_S)
        self.classes = {NO_POOL: NO_POOL}
        """The pool labels there are, each with the class of the first pool that came with it."""

    # -- events ------------------------------------------------------------------------------------------

    def on_admission(self, outcome: str, wait_s: float | None = None) -> None:
        """A request for slots came to an end.

        Args:
            outcome: one of ``OUTCOMES``.
            wait_s: how long it waited, at the gate too, if it was admitted.
        """
        self.admissions[outcome] += 1
        if wait_s is not None:
            self.queue_wait.observe(wait_s)

    def on_progress(self, progress: Progress) -> None:
        """The sampler saw tokens come."""
        for tokens, gap_s in progress.gaps:
            self.itl.observe(gap_s, tokens)

    def on_first_byte(self, ttft_s: float) -> None:
        """A streamed answer began."""
        self.ttft.observe(ttft_s)

    def on_query(self, pool: PrefixPool | None, saved_tokens: int = 0) -> None:
        """A prompt was answered.

        Args:
            pool: what it was attached to, if anything.
            saved_tokens: prompt tokens that the pool spared it.
        """
        label = self.label_of(pool)
        self.queries[label] += 1
        if saved_tokens:
            self.hits[label] += 1
            self.saved[label] += saved_tokens

    def on_recomputed(self, cause: str, tokens: int) -> None:
        """Prompt tokens were computed that had been computed before."""
        self.recomputed[cause if cause in CAUSES else OTHER] += tokens

    def on_overflow(self, kind: str) -> None:
        """The engine refused or cut a request for want of context; one of ``OVERFLOWS``."""
        self.overflows[kind] += 1

    def on_restart(self) -> None:
        """The engine came back with nothing in its memory."""
        self.restarts += 1

    def on_orphan_released(self) -> None:
        """A pin that nobody used was given up."""
        self.orphans_released += 1

    def on_stale_sample(self) -> None:
        """The engine serves, and did not tell its counters when it was asked."""
        self.stale_samples += 1

    def label_of(self, pool: PrefixPool | None) -> str:
        """A pool's label, or the class of its origin; of bounded number and length."""
        if pool is None:
            return NO_POOL
        label = (pool.label or pool.origin.value)[:MAX_LABELS]
        if label not in self.classes:
            if len(self.classes) >= MAX_LABELS:
                return OTHER
            self.classes[label] = pool.origin.value
        return label


class _Picture:
    """What one scrape shows of one engine."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        plane = metrics.plane
        self.counts = metrics
        self.plane = plane
        self.book = plane.experience.book
        self.now = now
        labels = {pool.pool_id: metrics.label_of(pool) for pool in plane.tree}
        self.pool_sessions: dict[str, float] = dict.fromkeys((NO_POOL, *labels.values()), 0.0)
        self.pool_bytes: dict[str, float] = dict.fromkeys(labels.values(), 0.0)
        if plane.ownership is not None and plane.facts is not None:
            for pool_id, cells in plane.ownership.own.items():
                if pool_id in labels:
                    self.pool_bytes[labels[pool_id]] += cells * plane.facts.bytes_per_cell
        decoding, rates = self.book.decoding, dict[str, list[float | None]]()
        for session in plane.sessions:
            label = NO_POOL if session.pool is None else labels.get(session.pool, NO_POOL)
            self.pool_sessions[label] += session.slot is not None
            if session.lease in decoding:
                rates.setdefault(label, []).append(session.rate.tps)
        told = (
            {}
            if self.book.stale(now)
            else {label: _known(rates.get(label, ())) for label in self.pool_sessions}
        )
        self.pool_tps = {label: tps for label, tps in told.items() if tps is not None}

    @property
    def cells_used(self) -> float | None:
        """Used cells as of the last sample."""
        sample = self.plane.present(self.now)
        return None if sample is None else sample.cells_used

    @property
    def cells_total(self) -> float | None:
        """Cells of the engine, where it tells."""
        return self.plane.cells_total


def _known(rates: Sequence[float | None]) -> float | None:
    """The sum of those that are known; None if there are some and none is."""
    known = [each for each in rates if each is not None]
    return sum(known) if known or not rates else None


_Value: TypeAlias = "Mapping[str, float] | Distribution | float | None"


@dataclass(frozen=True, slots=True)
class _Series:
    """One metric."""

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
    text: str
    read: Callable[[_Picture], _Value]
    label: str | None = None


_GAUGE, _COUNTER, _HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily

_ALL = (
    _Series(
        "gen_throughput_tps",
        _GAUGE,
        "Tokens a second of those that decode now.",
        lambda x: x.pool_tps,
        "pool",
    ),
    _Series("pool_kv_bytes", _GAUGE, "Bytes of KV that pools own.", lambda x: x.pool_bytes, "pool"),
    _Series("pool_sessions", _GAUGE, "Sessions that a slot holds.", lambda x: x.pool_sessions, "pool"),
    _Series("queries_total", _COUNTER, "Prompts answered.", lambda x: x.counts.queries, "pool"),
    _Series(
        "prefix_cache_hits_total",
        _COUNTER,
        "Prompts that a pool spared tokens.",
        lambda x: x.counts.hits,
        "pool",
    ),
    _Series(
        "tokens_saved_total", _COUNTER, "Prompt tokens that pools spared.", lambda x: x.counts.saved, "pool"
    ),
    _Series(
        "tokens_recomputed_total",
        _COUNTER,
        "Prompt tokens computed again.",
        lambda x: x.counts.recomputed,
        "cause",
    ),
    _Series("generated_tokens_total", _COUNTER, "Tokens generated.", lambda x: x.book.generated_total),
    _Series("prompt_tokens_total", _COUNTER, "Prompt tokens computed.", lambda x: x.book.prompt_total),
    _Series(
        "aggregate_tps", _GAUGE, "Tokens generated a second, now.", lambda x: x.book.generated_tps(x.now)
    ),
    _Series(
        "mean_active_tps",
        _GAUGE,
        "Mean tokens a second of the sessions that decode now.",
        lambda x: x.book.mean_active_tps(x.now),
    ),
    _Series("admissions_total", _COUNTER, "Requests for slots.", lambda x: x.counts.admissions, "outcome"),
    _Series(
        "sessions_total",
        _COUNTER,
        "Sessions that came to the gate.",
        lambda x: None if x.counts.gate is None else x.counts.gate.counts,
        "outcome",
    ),
    _Series(
        "sessions_waiting",
        _GAUGE,
        "Sessions that wait at the gate.",
        lambda x: None if x.counts.gate is None else x.counts.gate.waiting,
    ),
    _Series(
        "queue_depth",
        _GAUGE,
        "Requests that wait: at the gate, for slots or for cells.",
        lambda x: x.plane.leases.waiting + (0 if x.counts.gate is None else x.counts.gate.waiting),
    ),
    _Series(
        "queue_wait_seconds", _HISTOGRAM, "Wait at the gate and for slots.", lambda x: x.counts.queue_wait
    ),
    _Series("kv_cells_used", _GAUGE, "KV cells in use.", lambda x: x.cells_used),
    _Series("kv_cells_total", _GAUGE, "KV cells of the engine.", lambda x: x.cells_total),
    _Series("ttft_seconds", _HISTOGRAM, "Arrival to first token of a stream.", lambda x: x.counts.ttft),
    _Series("itl_seconds", _HISTOGRAM, "Time between two tokens.", lambda x: x.counts.itl),
    _Series("engine_up", _GAUGE, "Whether the engine serves.", lambda x: x.plane.serving),
    _Series(
        "engine_restarts_total", _COUNTER, "Times the engine lost its memory.", lambda x: x.counts.restarts
    ),
    _Series("kv_saves_total", _COUNTER, "States written to disk.", lambda x: x.counts.saves, "outcome"),
    _Series(
        "kv_restores_total", _COUNTER, "States wanted from disk.", lambda x: x.counts.restores, "outcome"
    ),
    _Series(
        "kv_restored_tokens_total",
        _COUNTER,
        "Prompt tokens that saved states spared.",
        lambda x: x.counts.restored_tokens,
    ),
    _Series("kv_saved_bytes", _GAUGE, "Bytes of saved states.", lambda x: x.counts.saved_bytes),
    _Series("kv_saved_entries", _GAUGE, "Saved states.", lambda x: x.counts.saved_entries),
    _Series("kv_disk_stuck", _GAUGE, "Whether the disk does not answer.", lambda x: x.counts.disk_stuck),
    _Series(
        "pool_rebuilds_total", _COUNTER, "Lost pools that came back.", lambda x: x.counts.rebuilds, "source"
    ),
    _Series(
        "attach_shortfalls_total", _COUNTER, "Attached less than planned.", lambda x: x.plane.pools.shortfalls
    ),
    _Series(
        "stale_samples_total",
        _COUNTER,
        "Looks that the engine left unanswered.",
        lambda x: x.counts.stale_samples,
    ),
    _Series("orphaned_pins", _GAUGE, "Pools pinned for nobody.", lambda x: len(x.plane.orphans())),
    _Series(
        "orphans_released_total", _COUNTER, "Orphaned pins given up.", lambda x: x.counts.orphans_released
    ),
    _Series("overflow_total", _COUNTER, "Contexts that hit a wall.", lambda x: x.counts.overflows, "class"),
)


class Exposition(Collector):
    """All series of this proxy, in a registry of their own."""

    def __init__(self) -> None:
        self._engines: dict[str, Metrics] = {}
        self._named = True
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, engine: str, metrics: Metrics) -> None:
        """One more engine; its name becomes a label once there are several."""
        self._engines[engine] = metrics

    def render(self, *, named: bool = True) -> bytes:
        """The text that a scraper gets.

        Args:
            named: with the labels of pools; else with the classes of their origins alone.
        """
        self._named = named
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering reads no plane."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every series, of every engine."""
        now = monotonic()
        pictures = {name: _Picture(one, now) for name, one in self._engines.items()}
        several = ["engine"] if len(pictures) > 1 else []
        for series in _ALL:
            labels = several + ([series.label] if series.label else [])
            family = series.kind(PREFIX + series.name, series.text, labels=labels)
            for engine, picture in pictures.items():
                value = series.read(picture)
                if series.label == "pool" and isinstance(value, Mapping) and not self._named:
                    value = _by_class(value, picture.counts.classes)
                _put(family, [engine] if several else [], value)
            yield family


def _by_class(values: Mapping[str, float], classes: Mapping[str, str]) -> dict[str, float]:
    """Values of pool labels, added up by the labels' classes."""
    sums: dict[str, float] = {}
    for label, value in values.items():
        name = classes.get(label, OTHER)
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _put(family: Any, labels: list[str], value: _Value) -> None:
    """Add what is known to a family."""
    if isinstance(value, Distribution):
        value.add_to(family, labels)
    elif isinstance(value, Mapping):
        for label, one in value.items():
            family.add_metric([*labels, label], one)
    elif value is not None:
        family.add_metric(labels, value)
