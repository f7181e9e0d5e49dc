"""Claims about ``core.headroom``: what is foreseen, which arm fails, and what somebody who asks is told."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.curve import Fit
from polykv_proxy.core.headroom import (
    Arm,
    Failing,
    Picture,
    Reason,
    capacity,
    failing,
    floor_of,
    foresee,
    headroom_sessions,
    keeps_floor,
    retry_after_s,
    settles,
)
from polykv_proxy.core.ledger import Figures
from polykv_proxy.core.policies import Mode, OnSaturation, Policy, Projection

FLOOR = Policy(target_tps_per_session=20.0, mode=Mode.ENFORCED)
LINE = Fit(0.02, 0.01, 0.01)  # flat up to one session, then 0.01 s each
IDLE = Picture(working=0, live=0.0)


def at(n, mean_tps=None, **more):
    """An engine with n sessions that all decode."""
    return Picture(working=n, live=float(n), decoding=n, mean_tps=mean_tps, **more)


def cells(free=1000, total=1000, margin=0):
    """A ledger's figures."""
    return Figures(
        total=total,
        protected=0,
        reclaimable=0,
        reserved=total - free,
        unexplained=0,
        free=free,
        margin=margin,
        running=0,
    )


def test_an_idle_engine_admits_and_foresees_nothing():
    """The floor arm needs somebody who decodes."""
    told = capacity(IDLE, FLOOR)
    assert told.can_admit
    assert told.reason is told.projected_mean_tps_if_admitted is told.retry_after_s is None
    assert told.n_active_sessions == 0


def test_conservative_shares_a_fixed_number_of_tokens():
    """Mean times n over n + 1, and no fit changes that."""
    foreseen = foresee(at(4, 25.0, fit=LINE, reach=9), Projection.CONSERVATIVE)
    assert foreseen.deciding == foreseen.measured == pytest.approx(20.0)
    assert foresee(at(4), Projection.CONSERVATIVE).deciding is None


def test_the_fitted_one_decides_where_it_may_be_trusted():
    """Corrected by its bias, and above what the conservative one says."""
    foreseen = foresee(at(3, 24.0, fit=LINE, reach=4), Projection.FITTED)
    assert foreseen.trusted
    assert foreseen.deciding == foreseen.model == pytest.approx(20.0)
    assert foreseen.measured == pytest.approx(18.0)
    assert foresee(at(3, 24.0, fit=LINE, reach=4, bias=0.9), Projection.FITTED).deciding == pytest.approx(
        18.0
    )


def test_the_more_pessimistic_decides_until_then():
    """Beyond its reach, and where there is no fit at all."""
    assert foresee(at(3, 24.0, fit=LINE, reach=3), Projection.FITTED).deciding == pytest.approx(18.0)
    assert foresee(at(3, 40.0, fit=LINE, reach=3), Projection.FITTED).deciding == pytest.approx(20.0)
    assert foresee(at(3, 24.0), Projection.FITTED).deciding == pytest.approx(18.0)
    assert foresee(at(3, fit=LINE, reach=3), Projection.FITTED).deciding == pytest.approx(20.0)
    assert foresee(at(3), Projection.FITTED).deciding is None


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.02), st.integers(1, 200), st.integers(0, 40))
def test_the_conservative_one_never_promises_too_much(t0, b, knee, n):
    """On any curve of the form, below the knee and above it."""
    fit = Fit(t0, t0 - b * min(knee, t0 / b if b else knee), b)
    truth = 1.0 / fit.tpot_s(n + 2)
    foreseen = foresee(at(n + 1, 1.0 / fit.tpot_s(n + 1)), Projection.CONSERVATIVE)
    assert foreseen.deciding <= truth * (1 + 1e-9)


def test_those_who_pause_and_those_who_were_promised_count():
    """And those in prefill, of whom the mean knows nothing yet."""
    picture = Picture(working=4, live=6.0, promised=1, decoding=3, mean_tps=50.0)
    assert foresee(picture, Projection.FITTED).deciding == pytest.approx(50.0 * 3 / 8)
    assert foresee(replace(picture, duty=0.1), Projection.FITTED).deciding == pytest.approx(50.0 * 3 / 6)


def test_a_margin_is_kept_below_what_the_curve_says():
    """As much as what comes strays from it; the conservative one needs none."""
    picture = at(3, 24.0, fit=LINE, reach=9)
    assert keeps_floor(picture, FLOOR)
    assert not keeps_floor(replace(picture, margin_ratio=0.01), FLOOR)
    conservative = replace(FLOOR, projection=Projection.CONSERVATIVE)
    assert keeps_floor(at(4, 25.0, margin_ratio=0.5), conservative)


def test_nobodys_floor_is_broken_for_another():
    """The highest of those that were promised, and of the newcomer's own, has to be kept."""
    assert floor_of(at(1, floor=30.0), FLOOR) == 30.0
    assert floor_of(at(1, floor=10.0), FLOOR) == 20.0
    assert floor_of(at(1), Policy()) is None
    assert keeps_floor(at(1, 25.0), Policy())
    assert not keeps_floor(at(1, 25.0, floor=20.0), Policy())


def test_each_arm_has_a_name():
    """What can never fit first, then the cells, then the floor."""
    busy = at(4, 22.0, cells=cells(free=100), window=4096)
    assert failing(busy, FLOOR, 5000) == Failing(Arm.CONTEXT, Reason.CONTEXT)
    assert failing(busy, FLOOR, 1001) == Failing(Arm.CONTEXT, Reason.CONTEXT)
    assert failing(busy, FLOOR, 500) == Failing(Arm.CELLS, Reason.CELLS)
    assert failing(busy, FLOOR, 50) == Failing(Arm.TPS, Reason.TPS_FLOOR)
    assert failing(busy, Policy(), 50) is None
    assert Reason.CONTEXT == "context headroom exhausted"


def test_an_average_session_is_assumed_where_nobody_says():
    """And a policy may want more cells to stay free than the wall needs."""
    assert failing(at(1, cells=cells(free=100), marginal_tokens=150.0), Policy()).arm is Arm.CELLS
    assert failing(at(1, cells=cells(free=100), marginal_tokens=50.0), Policy()) is None
    wary = Policy(kv_headroom_ratio=0.2)
    assert failing(at(1, cells=cells(free=100)), wary).arm is Arm.CELLS
    assert failing(at(1, cells=cells(free=400, margin=150)), wary) is None
    assert failing(at(1, cells=cells(free=400, margin=250)), wary).arm is Arm.CELLS


@pytest.mark.parametrize(
    ("working", "settling", "waits"),
    [(1, 1, True), (5, 1, True), (5, 0, False), (33, 1, False), (36, 4, True)],
)
def test_one_newcomer_at_a_time_or_an_eighth(working, settling, waits):
    """Of those whose effect is seen."""
    assert settles(replace(at(working), settling=settling)) is waits


def test_headroom_is_what_the_narrowest_arm_leaves():
    """In whole sessions; None where nothing limits."""
    assert headroom_sessions(at(2, fit=LINE, reach=99), FLOOR) == 2
    assert headroom_sessions(at(4, fit=LINE, reach=99), FLOOR) == 0
    assert headroom_sessions(IDLE, FLOOR) is None
    assert headroom_sessions(IDLE, Policy()) is None
    picture = at(2, fit=LINE, reach=99, cells=cells(free=250), marginal_tokens=200.0)
    assert headroom_sessions(picture, FLOOR) == 1
    assert headroom_sessions(picture, replace(FLOOR, kv_headroom_ratio=0.9)) == 0


def test_headroom_is_of_sessions_as_large_as_is_said():
    """Not of average ones; what fits nowhere has none."""
    picture = at(1, cells=cells(free=7682, total=8192), marginal_tokens=65.0, window=8192)
    told = [headroom_sessions(picture, Policy(), tokens) for tokens in (None, 1, 99, 4000, 7682, 7683, 9000)]
    assert told == [118, 7682, 77, 1, 1, 0, 0]
    assert headroom_sessions(at(1, window=8192), Policy(), 9000) == 0
    assert headroom_sessions(at(1, window=8192), Policy(), 8192) is None
    floor = at(2, fit=LINE, reach=99, cells=cells(free=250))
    assert [headroom_sessions(floor, FLOOR, tokens) for tokens in (10, 250)] == [2, 1]


def test_who_waits_already_comes_before_those_who_ask():
    """At the gate and past it; what the latter need is known, or is what sessions take on average."""
    picture = at(1, cells=cells(free=500), marginal_tokens=100.0)
    waiting = (
        {},
        {"at_gate": 2},
        {"in_line": 2, "line_cells": 140},
        {"in_line": 2, "line_unknown": 2},
        {"at_gate": 1, "in_line": 2, "line_unknown": 1, "line_cells": 250},
        {"in_line": 1, "line_cells": 500},
        {"in_line": 1, "line_cells": 900},
    )
    told = [headroom_sessions(replace(picture, **each), Policy()) for each in waiting]
    assert told == [5, 3, 3, 3, 0, 0, 0]
    unknown = at(1, cells=cells(free=500), in_line=1)
    assert headroom_sessions(replace(unknown, line_cells=500), Policy()) is None
    assert headroom_sessions(replace(unknown, line_cells=501), Policy()) == 0
    floor = at(2, fit=LINE, reach=99)
    assert [headroom_sessions(replace(floor, at_gate=n), FLOOR) for n in (0, 1, 2, 3)] == [2, 1, 0, 0]


def test_nobody_who_asks_is_judged_by_those_who_wait():
    """They say how many may come in beside them, not whether one may: who comes in waits behind them."""
    picture = at(1, cells=cells(free=500), marginal_tokens=100.0, in_line=1, line_cells=900, at_gate=1)
    told = capacity(picture, Policy())
    assert (told.can_admit, told.reason, told.headroom_sessions) == (True, "others wait", 0)
    assert failing(picture, Policy()) is None


@pytest.mark.parametrize(
    "picture",
    [
        at(4, 22.0),
        at(1, 90.0, settling=1),
        at(1, 90.0, waiting=1),
        at(1, 90.0, stale=True),
        at(1, 90.0, cells=cells(free=10)),
    ],
)
def test_where_one_may_not_come_in_there_is_no_headroom(picture):
    """Whatever the reason: the document does not say no and 58."""
    told = capacity(picture, FLOOR, 50)
    assert (told.can_admit, told.headroom_sessions) == (False, 0)
    assert told.reason is not None
    assert told.retry_after_s is not None


def test_who_comes_in_to_wait_for_a_slot_is_told():
    """Slots are no arm, but nobody takes a wait for room: busy ones, or others that wait for cells."""
    picture = at(4, cells=cells(free=500), marginal_tokens=100.0, slots_free=0, in_line=2)
    told = capacity(picture, Policy())
    assert (told.can_admit, told.reason, told.queue_depth) == (True, "no slot free", 2)
    assert (told.headroom_sessions, told.slots_free, told.retry_after_s) == (5, 0, None)
    assert capacity(replace(picture, slots_free=1), Policy()).reason == "others wait"
    assert capacity(replace(picture, slots_free=1, in_line=0), Policy()).reason is None
    assert capacity(replace(picture, slots_free=None, in_line=0), Policy()).reason is None


def test_who_waits_at_the_gate_is_in_the_way_where_the_policy_holds():
    """Of its own pool; where it warns, nobody is held for others or to settle."""
    picture = at(1, 90.0, waiting=1, at_gate=1, settling=1)
    assert capacity(picture, FLOOR).reason == "others wait"
    assert capacity(replace(picture, waiting=0), FLOOR).reason == "settling"
    assert capacity(picture, replace(FLOOR, on_saturation=OnSaturation.WARN)).can_admit
    assert capacity(picture, Policy()).can_admit


def test_pressure_is_what_the_engine_uses():
    """Not what newcomers cannot have; nothing known is not zero, and a stale look says nothing."""
    assert capacity(IDLE, FLOOR).pressure is None
    seen = at(1, cells=cells(free=0), pressure=0.85)
    assert (capacity(seen, FLOOR).pressure, capacity(seen, FLOOR).compaction_pressure) == (
        0.85,
        pytest.approx(0.5),
    )
    told = capacity(replace(seen, stale=True), FLOOR)
    assert (told.pressure, told.compaction_pressure) == (None, None)


def test_who_is_refused_is_told_when_a_place_may_be_free():
    """After those refused before, spread, at least one second and at most a minute."""
    assert retry_after_s(IDLE, 0.5) == 2
    assert retry_after_s(at(1, leave_gap_s=0.01), 0.0) == 1
    assert retry_after_s(at(1, leave_gap_s=4.0), 0.5) == 4
    assert retry_after_s(at(1, leave_gap_s=4.0, refused=2), 0.5) == 12
    spread = {retry_after_s(at(1, leave_gap_s=4.0, refused=2), jitter / 10) for jitter in range(11)}
    assert (min(spread), max(spread)) == (6, 18)
    assert len(spread) > 8
    assert retry_after_s(at(1, leave_gap_s=4.0, refused=99), 1.0) == 60


def test_the_document_has_all_members_and_no_invented_values():
    """Unknown is None."""
    told = asdict(capacity(at(1), Policy()))
    assert set(told) == {
        *("can_admit", "reason", "projected_mean_tps_if_admitted", "projected_model", "projected_measured"),
        *("projection_bias_ewma", "mean_active_tps", "n_active_sessions", "headroom_sessions"),
        *("kv_headroom_pct", "kv_cells_free", "kv_cells_total", "marginal_tokens_mean", "seq_ids_used"),
        *("seq_ids_max", "slots_free", "ctx_headroom_tokens", "compaction_pressure", "pressure", "settling"),
        *("queue_depth", "sessions_waiting", "retry_after_s"),
    }
    known = {key for key, value in told.items() if value is not None}
    assert known == {"can_admit", "n_active_sessions", "settling", "queue_depth", "sessions_waiting"}


def test_the_document_of_a_busy_engine():
    """Every number is one of the picture, or follows from it."""
    picture = at(
        4,
        24.0,
        fit=LINE,
        reach=9,
        bias=0.96,
        cells=cells(free=400, margin=100),
        marginal_tokens=100.0,
        window=2048,
        slots_free=3,
        seq_ids_used=5,
        seq_ids_max=20,
        waiting=2,
        at_gate=3,
        in_line=4,
        pressure=0.6,
    )
    told = capacity(picture, FLOOR)
    assert not told.can_admit
    assert told.reason == "projected tps below floor"
    assert told.projected_mean_tps_if_admitted == told.projected_model == pytest.approx(16.0)
    assert told.projected_measured == pytest.approx(19.2)
    assert (told.kv_cells_free, told.kv_cells_total, told.kv_headroom_pct) == (400, 1000, 40.0)
    assert (told.ctx_headroom_tokens, told.headroom_sessions) == (300, 0)
    assert (told.queue_depth, told.sessions_waiting, told.slots_free) == (7, 3, 3)
    assert (told.pressure, told.compaction_pressure) == (0.6, 0.0)
    assert told.retry_after_s == 2


def test_settling_and_staleness_are_reasons_too():
    """Settling only where a policy makes others wait."""
    picture = replace(at(1, 90.0), settling=1)
    assert capacity(picture, FLOOR).reason == "settling"
    assert capacity(picture, Policy()).can_admit
    assert capacity(picture, Policy()).settling
    assert capacity(replace(picture, stale=True), FLOOR).reason == "samples stale"
