"""Claims about ``core.patience``: nobody waits longer than doing it alone would take."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.patience import Progress, is_worth_waiting


def test_without_a_speed_nothing_is_judged():
    """Nobody knows how long the own prefill would take."""
    assert is_worth_waiting(1e9, 1, None)


@given(st.integers(1, 100_000), st.floats(0.5, 1e5))
def test_the_bound_is_the_own_prefill(own_tokens, tokens_per_s):
    """Just before that moment it is worth waiting, just after it is not; with nothing to compute never."""
    alone_s = own_tokens / tokens_per_s
    assert is_worth_waiting(alone_s * 0.99, own_tokens, tokens_per_s)
    assert not is_worth_waiting(alone_s * 1.01, own_tokens, tokens_per_s)
    assert not is_worth_waiting(0.0, 0, tokens_per_s)


def test_speed_is_what_was_seen():
    """From the first look to the last advance: neither what was cached before counts nor a halt."""
    progress = Progress()
    assert progress.tokens_per_s is None
    assert progress.seen(1000, 10.0)
    assert progress.tokens_per_s is None
    assert not progress.seen(1000, 11.0)
    assert progress.tokens_per_s is None
    assert progress.seen(1300, 12.0)
    assert progress.tokens_per_s == 150.0
    assert not progress.seen(1300, 20.0)
    assert progress.tokens_per_s == 150.0
    assert progress.seen(1600, 16.0)
    assert progress.tokens_per_s == 100.0


def test_two_looks_in_one_moment_give_no_speed():
    """It would be endless."""
    progress = Progress()
    progress.seen(0, 1.0)
    progress.seen(10, 1.0)
    assert progress.tokens_per_s is None
