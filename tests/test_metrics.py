"""Claims about ``metrics``: one valid exposition, bounded labels, and nothing that is not known."""

import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from polykv_proxy import metrics
from polykv_proxy.core.gate import Gate
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.rates import STALE_S, Progress
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import (
    Capability,
    EngineFacts,
    EngineSample,
    PoolOrigin,
    PoolUid,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)
from polykv_proxy.metrics import Exposition, Metrics

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
SCOPE = Scope("s")


def parsed(text):
    """Every sample of an exposition: name and labels to value."""
    found = {}
    for family in text_string_to_metric_families(text.decode() if isinstance(text, bytes) else text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def shown(*engines):
    """What a scrape of these shows, without the prefix; values by name, or by name and labels."""
    exposition = Exposition()
    for number, one in enumerate(engines):
        exposition.add(str(number), one)
    found = {}
    for (name, *labels), value in parsed(exposition.render()).items():
        assert name.startswith(metrics.PREFIX)
        short = name.removeprefix(metrics.PREFIX)
        found[(short, *labels) if labels else short] = value
    return found


@pytest.fixture
def plane():
    """One that serves, sampled once."""
    plane = ControlPlane(max_waiting=5)
    plane.on_engine_ready(EngineFacts("e", 2, 4, 1000, 500, 10, "b"), Capability.ZERO_COPY, None, "m", 0.0)
    return plane


def pool(plane, length, uid, label=None, origin=PoolOrigin.EXPLICIT):
    """A resident pool."""
    tokens = as_tokens([uid, *range(length - 1)])
    made = plane.tree.add(
        plane.pools.id_of(tokens, SCOPE), tokens, scope=SCOPE, origin=origin, now_ts=0.0, label=label
    )
    plane.tree.ready(made, PoolUid(uid))
    return made


def documented():
    """Names in the reference."""
    return set(re.findall(r"`opencoti_polykv:(\w+)", DOCUMENT.read_text()))


def test_the_reference_lists_every_metric_and_no_other(plane):
    """By name, with its labels."""
    one = Metrics(plane, Gate())
    pool(plane, 40, 1)
    plane.on_sample(EngineSample("e", metrics.monotonic(), 0, 1000, 0, (), ()))
    for clock in (0.0, 1.0):
        plane.on_counters(EngineSample("e", metrics.monotonic() + clock, 0, 1000, 0, (), ()))
    found = {key if isinstance(key, str) else key[0] for key in shown(one)}
    histograms = {re.sub("_(bucket|sum|count)$", "", name) for name in found}
    assert histograms == documented() - {"mean_active_tps"}, "nobody decodes here"


def test_what_is_not_known_is_not_there():
    """Before an engine answered: no figure that would look like zero."""
    found = shown(Metrics(ControlPlane(max_waiting=1)))
    for name in ("kv_cells_used", "kv_cells_total", "aggregate_tps", "mean_active_tps"):
        assert name not in found
    assert ("gen_throughput_tps", ("pool", "none")) not in found
    assert (found["engine_up"], found["queue_depth"], found["generated_tokens_total"]) == (0.0, 0.0, 0.0)
    assert found["admissions_total", ("outcome", "rejected")] == 0.0


def test_the_cells_of_an_engine_without_counters_are_not_known():
    """There is an upper bound, and nobody could tell it from the figure of another engine."""
    plane = ControlPlane(max_waiting=1)
    plane.on_engine_ready(EngineFacts("", 2, 0, 1000, 500, 0, "b"), Capability.RELAY, "stock", "m", 0.0)
    assert "kv_cells_total" not in shown(Metrics(plane))


def test_states_are_read_at_the_scrape(plane):
    """Bytes by ownership, sessions and speed, by pool."""
    one = Metrics(plane)
    named, plain = pool(plane, 100, 1, "docs"), pool(plane, 50, 2)
    now = metrics.monotonic()
    lease = plane.leases.on_request(Ask(scope=SCOPE, name="a"), now, now_ts=0.0).lease
    lease.session.pool = named.pool_id
    for step in range(4):
        slots = tuple(
            SlotSample(
                SlotId(number),
                SlotState.GEN if number == 0 else SlotState.IDLE,
                number,
                lease.lease_id if number == 0 else 0,
                20 * step if number == 0 else 0,
                7 * step,
                0,
                120 if number == 0 else 0,
                100 if number == 0 else 0,
                PoolUid(1) if number == 0 else 0,
                500,
                float(step),
            )
            for number in (0, 1)
        )
        sample = EngineSample("e", now, 170, 1000, 0, slots, (), float(step))
        plane.on_sample(sample)
        plane.on_counters(sample)
    found = shown(one)
    label = named.label
    assert found["gen_throughput_tps", ("pool", label)] == pytest.approx(20.0)
    assert found["gen_throughput_tps", ("pool", "none")] == 0.0
    assert found["pool_kv_bytes", ("pool", label)] == 1000.0
    assert found["pool_kv_bytes", ("pool", plain.origin.value)] == 500.0
    assert (found["pool_sessions", ("pool", label)], found["pool_sessions", ("pool", "explicit")]) == (1, 0)
    assert (found["kv_cells_used"], found["kv_cells_total"], found["engine_up"]) == (170, 1000, 1)
    assert found["aggregate_tps"] == pytest.approx(20.0)
    assert found["mean_active_tps"] == pytest.approx(20.0)
    assert (found["generated_tokens_total"], found["prompt_tokens_total"]) == (60, 42)


def test_a_speed_that_is_not_known_is_not_there(plane, monkeypatch):
    """A pool's only session is too new, or the engine went silent: neither is a speed of 0."""
    one, named = Metrics(plane), pool(plane, 40, 1, "docs")
    now = metrics.monotonic()
    lease = plane.leases.on_request(Ask(scope=SCOPE, name="a"), now, now_ts=0.0).lease
    lease.session.pool = named.pool_id
    for step in range(2):
        tokens = (
            SlotSample(SlotId(0), SlotState.GEN, 1, lease.lease_id, step, 0, 0, 40, 0, 0, 500, 0.1 * step),
        )
        sample = EngineSample("e", now, 170, 1000, 0, tokens, (), 0.1 * step)
        plane.on_sample(sample)
        plane.on_counters(sample)
    found = shown(one)
    assert (found["gen_throughput_tps", ("pool", "none")], found["kv_cells_used"]) == (0.0, 170.0)
    assert ("gen_throughput_tps", ("pool", "docs")) not in found
    later = now + STALE_S + 0.1

    def gone():
        found = shown(one)
        assert {key for key in found if key[0] in ("gen_throughput_tps", "aggregate_tps")} == set()
        assert "kv_cells_used" not in found
        assert found["pool_sessions", ("pool", "docs")] == 1.0

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "monotonic", lambda: later)
        gone()
    assert shown(one)["kv_cells_used"] == 170.0
    plane.on_engine_down()  # at once, not when the last reading has become old
    gone()


def test_events_are_counted(plane):
    """Each under its own name."""
    one = Metrics(plane)
    docs = pool(plane, 40, 1, "docs")
    for outcome, wait in (("admitted", 0.0), ("queued", 2.0), ("rejected", None), ("gave_up", None)):
        one.on_admission(outcome, wait)
    one.on_query(None)
    one.on_query(docs)
    one.on_query(docs, 39)
    one.on_recomputed("evicted", 12)
    one.on_recomputed("something new", 5)
    one.on_overflow("cells")
    one.on_restart()
    one.on_stale_sample()
    one.on_first_byte(0.3)
    one.on_progress(Progress(5, 0, 0, ((4, 0.02), (1, 3.0))))
    found = shown(one)
    for outcome in metrics.OUTCOMES:
        assert found["admissions_total", ("outcome", outcome)] == 1
    assert (found["queue_wait_seconds_count"], found["queue_wait_seconds_sum"]) == (2, 2.0)
    assert (found["queries_total", ("pool", "none")], found["queries_total", ("pool", "docs")]) == (1, 2)
    assert found["prefix_cache_hits_total", ("pool", "docs")] == 1
    assert found["tokens_saved_total", ("pool", "docs")] == 39
    assert found["tokens_recomputed_total", ("cause", "evicted")] == 12
    assert found["tokens_recomputed_total", ("cause", "other")] == 5
    assert found["overflow_total", ("class", "cells")] == 1
    assert (found["engine_restarts_total"], found["stale_samples_total"]) == (1, 1)
    assert (found["ttft_seconds_count"], found["ttft_seconds_bucket", ("le", "0.25")]) == (1, 0)
    assert (found["itl_seconds_count"], found["itl_seconds_bucket", ("le", "0.025")]) == (5, 4)
    assert found["itl_seconds_sum"] == pytest.approx(3.08)


def test_labels_are_bounded(plane):
    """However many names clients think of, and however long."""
    one = Metrics(plane)
    plane.tree.max_pools = 200
    for number in range(150):
        one.on_query(pool(plane, 40, number + 1, f"team-{number}"))
    found = shown(one)
    labels = {key[1][1] for key in found if key[0] == "queries_total"}
    assert len(labels) == metrics.MAX_LABELS + 1
    assert sum(found[key] for key in found if key[0] == "queries_total") == 150
    assert len(one.label_of(pool(plane, 40, 400, "x" * 500))) <= metrics.MAX_LABELS
    assert Metrics(plane).label_of(pool(plane, 40, 401, origin=PoolOrigin.AUTO)) == "auto"
    assert len(Metrics(plane).label_of(pool(plane, 40, 402, "y" * 500))) == metrics.MAX_LABELS


def test_without_labels_pools_are_told_apart_by_class(plane):
    """Nothing is lost: what was under a label is under the class of its pool, also beyond the bound."""
    one = Metrics(plane)
    plane.tree.max_pools = 200
    one.on_query(pool(plane, 40, 1, "secret"), 10)
    one.on_query(pool(plane, 40, 2), 1)
    one.on_query(pool(plane, 40, 3, "mine", origin=PoolOrigin.SNAPSHOT))
    one.on_query(None)
    for number in range(100):
        one.on_query(pool(plane, 40, number + 10, f"team-{number}"))
    exposition = Exposition()
    exposition.add("e", one)
    text = exposition.render(named=False)
    found = parsed(text)
    kept = metrics.MAX_LABELS - 4  # of the hundred; the others are none, secret, explicit, mine
    queries = {"none": 1, "explicit": 2 + kept, "snapshot": 1, "other": 100 - kept}
    name = metrics.PREFIX + "queries_total"
    assert {key[1][1]: value for key, value in found.items() if key[0] == name} == queries
    assert found[metrics.PREFIX + "tokens_saved_total", ("pool", "explicit")] == 11
    assert not re.search(rb"secret|mine|team-", text)
    assert b"secret" in exposition.render()


def test_labels_may_hold_anything(plane):
    """Quotes and line ends of a client's label do not break the text."""
    one = Metrics(plane)
    label = 'a"b\\c\nd'
    one.on_query(pool(plane, 40, 1, label))
    assert shown(one)["queries_total", ("pool", label)] == 1


def test_several_engines_get_a_label(plane):
    """Each series once for each of them; with one engine there is no such label."""
    one, other = Metrics(plane), Metrics(ControlPlane(max_waiting=1))
    one.on_restart()
    found = shown(one, other)
    assert found["engine_restarts_total", ("engine", "0")] == 1
    assert found["engine_restarts_total", ("engine", "1")] == 0
    assert found["overflow_total", ("class", "cells"), ("engine", "1")] == 0
    assert found["ttft_seconds_count", ("engine", "1")] == 0
    assert shown(one)["engine_restarts_total"] == 1


def test_registries_are_apart(plane):
    """Two proxies in one process do not see each other, and the library's own registry sees neither."""
    before = {family.name for family in REGISTRY.collect()}
    one, other = Exposition(), Exposition()
    one.add("0", Metrics(plane))
    other.add("0", Metrics(plane))
    assert parsed(one.render()) == parsed(other.render())
    assert {family.name for family in REGISTRY.collect()} == before
