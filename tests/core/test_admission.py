"""Claims about ``core.admission``: what happens to a session that wants to come in."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission import Entered, Held, Newcomer, Refused, decide
from polykv_proxy.core.headroom import Arm, Failing, Picture, Reason
from polykv_proxy.core.policies import Mode, OnSaturation, Policy

REJECT = Policy(target_tps_per_session=20.0, mode=Mode.ENFORCED)
WARN = replace(REJECT, on_saturation=OnSaturation.WARN)
QUEUE = replace(REJECT, on_saturation=OnSaturation.QUEUE)
ADVISORY = replace(REJECT, mode=Mode.ADVISORY)

ROOM = Picture(working=2, live=2.0, decoding=2, mean_tps=60.0)
FULL = Picture(working=2, live=2.0, decoding=2, mean_tps=25.0)
SETTLING = replace(ROOM, settling=1)
STALE = replace(FULL, stale=True)


def asked(picture, policy, **newcomer):
    """The verdict on a newcomer."""
    return decide(picture, policy, Newcomer(**newcomer), 0.5)


@pytest.mark.parametrize("policy", [REJECT, QUEUE, ADVISORY, Policy()])
def test_where_there_is_room_it_comes_in(policy):
    """And nothing is said."""
    assert asked(ROOM, policy) == Entered()


@pytest.mark.parametrize("picture", [FULL, SETTLING, STALE, replace(FULL, waiting=3)])
def test_advisory_refuses_nobody(picture):
    """It tells who would have been, and settling is no reason."""
    assert asked(picture, ADVISORY) == Entered(Arm.TPS if picture.mean_tps == 25.0 else None)
    assert asked(picture, Policy(mode=Mode.ENFORCED)) == Entered()


def test_where_nobody_can_tell_it_is_refused_as_such():
    """Whatever the policy does with saturation."""
    for policy in (REJECT, WARN, QUEUE):
        verdict = asked(STALE, policy)
        assert isinstance(verdict, Refused)
        assert verdict.cannot_tell
        assert verdict.capacity.reason == "samples stale"


def test_warn_lets_in_and_tells():
    """How many may follow, and which arm fails; nobody waits, not even for those who settle."""
    assert asked(FULL, WARN) == Entered(Arm.TPS, 0)
    assert asked(SETTLING, WARN) == Entered(None, 3)
    assert asked(Picture(working=0, live=0.0), WARN) == Entered(None, None)


def test_reject_refuses_with_its_numbers():
    """The arm, the reason, when to come back, and the document that a client could have asked for."""
    verdict = asked(FULL, REJECT)
    assert isinstance(verdict, Refused)
    assert verdict.failing == Failing(Arm.TPS, Reason.TPS_FLOOR)
    assert verdict.retry_after_s == 2
    assert verdict.capacity.projected_mean_tps_if_admitted == pytest.approx(50 / 3)
    assert not verdict.capacity.can_admit
    assert not verdict.cannot_tell


def test_reject_waits_for_newcomers_to_settle_and_not_longer():
    """A burst does not pass, and is not refused for being one."""
    verdict = asked(SETTLING, REJECT)
    assert verdict == Held(Failing(Arm.TPS, Reason.SETTLING), REJECT.settle_max_s)
    last = asked(SETTLING, REJECT, may_wait=False)
    assert isinstance(last, Refused)
    assert last.failing.reason is Reason.SETTLING


def test_queue_waits_for_room():
    """As long as the policy allows, and as many as it does."""
    assert asked(FULL, QUEUE) == Held(Failing(Arm.TPS, Reason.TPS_FLOOR), QUEUE.queue_max_wait_s)
    verdict = asked(replace(FULL, waiting=64), QUEUE)
    assert verdict.failing == Failing(Arm.QUEUE, Reason.QUEUE_FULL)
    assert asked(FULL, QUEUE, may_wait=False).failing.arm is Arm.TPS


def test_nobody_overtakes_those_who_wait():
    """Even where there is room now; whose turn it is goes."""
    waiting = replace(ROOM, waiting=1)
    assert asked(waiting, QUEUE).failing == Failing(Arm.QUEUE, Reason.IN_LINE)
    assert asked(waiting, REJECT).max_wait_s == REJECT.settle_max_s
    assert asked(waiting, QUEUE, first=True) == Entered()
    assert isinstance(asked(replace(FULL, waiting=64), QUEUE, first=True), Held)


def test_what_never_fits_is_not_made_to_wait():
    """Its window does not grow."""
    verdict = asked(replace(FULL, window=4096), QUEUE, expected_tokens=5000)
    assert isinstance(verdict, Refused)
    assert verdict.failing == Failing(Arm.CONTEXT, Reason.CONTEXT)


PICTURES = st.builds(
    Picture,
    working=st.integers(0, 50),
    live=st.floats(0, 80),
    promised=st.integers(0, 5),
    settling=st.integers(0, 5),
    decoding=st.integers(0, 50),
    mean_tps=st.none() | st.floats(0.1, 200),
    floor=st.none() | st.floats(1, 50),
    window=st.none() | st.integers(100, 9000),
    waiting=st.integers(0, 70),
    leave_gap_s=st.none() | st.floats(0, 1000),
    refused=st.integers(0, 10_000),
    stale=st.booleans(),
)
POLICIES = st.builds(
    Policy,
    target_tps_per_session=st.none() | st.floats(1, 100),
    mode=st.sampled_from(Mode),
    on_saturation=st.sampled_from(OnSaturation),
)


@given(PICTURES, POLICIES, st.booleans(), st.none() | st.integers(1, 10_000), st.floats(0, 1))
def test_every_verdict_is_within_the_policy(picture, policy, may_wait, expected_tokens, jitter):
    """Whatever the engine looks like."""
    verdict = decide(picture, policy, Newcomer(expected_tokens=expected_tokens, may_wait=may_wait), jitter)
    if not policy.enforced:
        assert isinstance(verdict, Entered)
    if isinstance(verdict, Held):
        assert may_wait
        assert picture.waiting < policy.queue_max_depth
        assert 0 < verdict.max_wait_s <= max(policy.queue_max_wait_s, policy.settle_max_s)
    if isinstance(verdict, Refused):
        assert 1 <= verdict.retry_after_s <= 60
        assert policy.enforced
        assert policy.on_saturation is not OnSaturation.WARN or verdict.cannot_tell
    if isinstance(verdict, Entered) and policy.enforced and policy.on_saturation is not OnSaturation.WARN:
        assert verdict == Entered()
