"""Claims about ``core.curve``: the knee is found, and nothing is claimed beyond what was seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.curve import Bias, Fit, TpotCurve, Windows


def learned(truth, ns, windows=3):
    """A curve that saw so many windows of each number of sessions."""
    curve = TpotCurve()
    for _ in range(windows):
        for n in ns:
            curve.add(n, truth.tpot_s(n))
    return curve


def test_one_number_of_sessions_tells_nothing():
    """Nor do two, before there are enough windows of each."""
    curve = learned(Fit(0.02, 0.01, 0.001), [4])
    assert (curve.fit(), curve.reach) == (None, 0)
    curve.add(5, 0.02)
    curve.add(5, 0.02)
    assert curve.fit() is None
    curve.add(5, 0.02)
    assert curve.fit() is not None
    assert curve.reach == 6


@pytest.mark.parametrize("knee", [1, 8, 20])
def test_the_knee_is_found(knee):
    """Flat before it, a line after it; within a thousandth."""
    truth = Fit(0.02, 0.02 - 0.001 * knee, 0.001)
    fit = learned(truth, range(1, 31)).fit()
    for n in range(1, 40):
        assert fit.tpot_s(n) == pytest.approx(truth.tpot_s(n), rel=1e-3)


@given(
    st.floats(0.005, 0.1),
    st.floats(0.0, 0.02),
    st.integers(1, 30),
    st.sets(st.integers(1, 60), min_size=2, max_size=20),
)
def test_what_was_seen_is_reproduced(t0, b, knee, ns):
    """Whatever the curve and wherever it was looked at: no error beyond rounding where it was seen."""
    truth = Fit(t0, t0 - b * knee, b)
    fit = learned(truth, sorted(ns)).fit()
    for n in ns:
        assert fit.tpot_s(n) == pytest.approx(truth.tpot_s(n), rel=0.02)
    assert fit.b >= 0.0


def test_fewer_than_were_seen_take_some_time_too():
    """A steep line ends in nothing; nobody's tokens are free, and what then comes can be compared."""
    curve, bias = TpotCurve(), Bias()
    for n, tpot_s in ((2, 0.02), (4, 0.07)):
        for _ in range(3):
            curve.add(n, tpot_s)
    assert [curve.fit().tpot_s(n) for n in (1, 2, 4)] == [0.01, pytest.approx(0.02), pytest.approx(0.07)]
    feed(Windows(curve, bias), 1, 4)
    assert bias.ratio > 0.0


def test_more_sessions_are_never_foreseen_to_be_faster():
    """A falling line is noise."""
    curve = TpotCurve()
    for n, tpot_s in ((4, 0.03), (8, 0.02)):
        for _ in range(4):
            curve.add(n, tpot_s)
    fit = curve.fit()
    assert fit.tpot_s(100) == pytest.approx(fit.tpot_s(1))


def test_reach_grows_with_what_was_seen():
    """One more, or an eighth."""
    assert learned(Fit(0.02, 0.01, 0.001), [1, 2]).reach == 3
    assert learned(Fit(0.02, 0.01, 0.001), [1, 80]).reach == 90


def test_the_curve_follows_a_change():
    """Twice as slow from now on: known after some hundred windows at most."""
    curve = learned(Fit(0.0, 0.01, 0.001), range(1, 11), windows=60)
    for _ in range(60):
        for n in range(1, 11):
            curve.add(n, 2 * (0.01 + 0.001 * n))
    assert curve.fit().tpot_s(10) == pytest.approx(0.04, rel=0.2)


def test_weights_stay_finite():
    """However many windows come."""
    curve = TpotCurve()
    for number in range(20_000):
        curve.add(1 + number % 2, 0.02 + 0.001 * (number % 2))
    assert curve._scale <= 1e9
    assert curve.fit().tpot_s(3) == pytest.approx(0.022, rel=1e-3)


def test_bias_is_measured_over_predicted():
    """It comes with the first window."""
    bias = Bias()
    assert (bias.ratio, bias.margin_ratio) == (None, 0.0)
    for _ in range(20):
        bias.add(8.0, 10.0, 0.5)
    assert (bias.ratio, bias.margin_ratio) == (pytest.approx(0.8), pytest.approx(0.0))


def test_the_margin_is_what_a_session_may_experience():
    """Slow swings count whole; what cancels out within two seconds hardly counts."""
    slow, quick = Bias(), Bias()
    for number in range(400):
        slow.add(9.0 if number // 20 % 2 else 11.0, 10.0, 0.5)
        quick.add(9.0 if number % 2 else 11.0, 10.0, 0.5)
    assert slow.ratio == pytest.approx(1.0, abs=0.03)
    assert quick.ratio == pytest.approx(1.0, abs=0.01)
    assert 0.12 < slow.margin_ratio < 0.25
    assert quick.margin_ratio < 0.04


def feed(windows, n, count, tpot_s=0.05, span_s=0.25):
    """So many samples with n sessions that decode steadily."""
    for _ in range(count):
        windows.add(n, span_s, round(n * span_s / tpot_s), n * span_s)


def test_steady_windows_teach_the_curve():
    """Half a second with the same number of sessions."""
    curve, bias = TpotCurve(), Bias()
    windows = Windows(curve, bias)
    feed(windows, 2, 6)
    feed(windows, 4, 6)
    assert curve.fit().tpot_s(4) == pytest.approx(0.05)
    assert bias.ratio is None  # nothing was foreseen yet
    feed(windows, 4, 4)
    assert bias.ratio == pytest.approx(1.0)


def test_unsteady_windows_teach_nothing():
    """The number changes in every one of them, or nobody decodes in between."""
    curve = TpotCurve()
    windows = Windows(curve, Bias())
    for _ in range(20):
        feed(windows, 2, 1)
        feed(windows, 3, 1)
        feed(windows, 3, 1)
        feed(windows, 0, 1)
    assert curve.fit() is None
    for _ in range(20):  # with many, one more or less is no change
        feed(windows, 64, 1)
        feed(windows, 66, 1)
    for _ in range(20):
        feed(windows, 32, 1)
        feed(windows, 33, 1)
    assert curve.fit() is not None


def test_a_window_needs_tokens():
    """A slow engine's windows are longer: a few tokens each."""
    curve = TpotCurve()
    windows = Windows(curve, Bias())
    for n in (1, 2):
        for _ in range(3):
            for _ in range(7):
                windows.add(n, 1.0, n, n * 1.0)
            assert curve.fit() is None
            windows.add(n, 1.0, n, n * 1.0)
    assert curve.fit() is not None
