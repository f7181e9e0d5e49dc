"""Backoff, as a function of failures."""

from polykv_proxy.engine.state import Backoff


def test_waits_double_and_are_long_after_three_quick_failures():
    """No jitter: one engine has no herd to avoid."""
    backoff = Backoff(first_s=0.5, max_s=60.0)
    assert [backoff.delay_s(failures) for failures in range(1, 6)] == [0.5, 1.0, 60.0, 60.0, 60.0]


def test_wait_never_exceeds_its_cap():
    """Also where the first wait is near it."""
    backoff = Backoff(first_s=5.0, max_s=6.0, quick_failures=10)
    assert [backoff.delay_s(failures) for failures in (1, 2, 3)] == [5.0, 6.0, 6.0]
