"""What is sent again, and when."""

import pytest

from polykv_proxy.client import errors
from polykv_proxy.client.patience import Patience, may_repeat


def saturated(retry_after=None, should_retry=None):
    """A 429."""
    return errors.PoolSaturatedError("full", status=429, retry_after=retry_after, should_retry=should_retry)


def unavailable(code):
    """A 503."""
    return errors.UnavailableError("down", status=503, error={"code": code})


@pytest.mark.parametrize(
    ("error", "chat", "pools"),
    [
        (errors.ConnectionFailedError("refused", sent=False), True, True),
        (errors.ConnectionFailedError("reset", sent=True), False, True),
        (errors.TimedOutError("slow", sent=True), False, True),
        (errors.TruncatedStreamError("cut"), False, True),
        (saturated(), True, True),
        (saturated(should_retry=False), False, False),
        (unavailable("engine_loading"), True, True),
        (unavailable("engine_gone"), False, True),
        (errors.ServerError("bug", status=500), False, False),
        (errors.ConflictError("at work", status=409, error={"code": "slot_busy"}), True, True),
        (errors.ConflictError("runs", status=409, error={"code": "session_running"}), False, False),
        (errors.BadRequestError("no", status=400), False, False),
        (errors.ContextOverflowError("long", status=400), False, False),
        (errors.PoolNotFoundError("gone", status=404), False, False),
    ],
)
def test_what_may_have_reached_decode_is_not_repeated(error, chat, pools):
    """Rule 1, for a request that is not idempotent and for one that is."""
    assert may_repeat(error, idempotent=False) is chat
    assert may_repeat(error, idempotent=True) is pools


def test_retry_after_is_waited_for_within_bounds():
    """Rule 2: all of it, and no more than is left."""
    attempts = Patience(max_retries=5, max_wait_s=10.0).attempts()
    assert attempts.pause_after(saturated(6.0), idempotent=False) == 6.0
    assert attempts.pause_after(saturated(5.0), idempotent=False) is None
    assert attempts.pause_after(saturated(4.0), idempotent=False) == 4.0


def test_retries_are_counted_and_pauses_grow():
    """Where the server names no time."""
    attempts = Patience(max_retries=2).attempts()
    error = errors.ConnectionFailedError("refused", sent=False)
    pauses = [attempts.pause_after(error, idempotent=False) for _ in range(3)]
    assert pauses == [0.25, 0.5, None]
