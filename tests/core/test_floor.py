"""The claim of the gate as a whole: the floor is kept, and little is given away for that.

A simulated engine under twice the load that it can sustain, ramped up, with the gate, with every other
limiter, and with the best static limit that a search with hindsight finds (``tests.benchmarks.simulation``).
The benchmark does the same at length; here are few seeds and the two smaller engines.
"""

import pytest

from polykv_proxy.core.policies import OnSaturation, Projection
from tests.benchmarks.simulation import (
    PROFILES,
    Aimd,
    Gradient,
    Limiter,
    Load,
    OurGate,
    Static,
    best_static,
    simulate,
    wrong_rejections,
)

SEEDS = range(31, 33)
LOAD = Load()
TALK = Load(turns=6, tokens=150, pause_s=6.0, last_s=300.0)


def runs(profile, limiter, load=LOAD, seeds=SEEDS):
    """What came of each seed, a new limiter each."""
    return [simulate(profile, load, limiter(), seed) for seed in seeds]


def goodput(outcomes):
    """Mean tokens in session-seconds in which the floor was kept."""
    return sum(outcome.goodput_tokens for outcome in outcomes) / len(outcomes)


@pytest.mark.parametrize("profile", PROFILES[:2], ids=lambda profile: profile.name)
def test_the_floor_is_kept_and_little_is_given_away(profile):
    """At twice the sustainable load: 99 % of session-seconds, and 95 % of what hindsight would have got."""
    ours = runs(profile, lambda: OurGate(profile.floor))
    assert min(outcome.kept_share() for outcome in ours) >= 0.99
    assert all(outcome.refused for outcome in ours)
    assert goodput(ours) >= 0.95 * best_static(profile, LOAD, SEEDS)[0]
    for other in (Limiter, lambda: Aimd(profile.floor), lambda: Gradient(profile.floor)):
        assert goodput(ours) >= goodput(runs(profile, other))


def test_without_a_gate_the_floor_is_lost():
    """The same load; else the claims above were about nothing."""
    profile = PROFILES[1]
    assert max(outcome.kept_share() for outcome in runs(profile, Limiter)) < 0.2
    assert max(outcome.kept_share() for outcome in runs(profile, lambda: Static(1.2 * 73))) < 0.5


def test_few_are_refused_for_whom_there_was_room():
    """The trace again with that session let in: where one counts for more than noise, the floor broke."""
    profile = PROFILES[0]
    for seed, outcome in zip(SEEDS, runs(profile, lambda: OurGate(profile.floor)), strict=True):
        judged = wrong_rejections(profile, LOAD, outcome, seed, 20)
        assert judged.looked_at >= 20
        assert judged.wrong <= 0.05 * judged.looked_at
        too_low = simulate(profile, LOAD, Static(profile.sustainable - 2), seed)
        assert wrong_rejections(profile, LOAD, too_low, seed, 10).wrong >= 5  # the count can tell


def test_of_many_sessions_few_are_clearly_wronged():
    """One more of seventy slows the others down by less than chance does, so a little room is allowed for."""
    profile, seed = PROFILES[1], SEEDS[0]
    outcome = simulate(profile, LOAD, OurGate(profile.floor), seed)
    judged = wrong_rejections(profile, LOAD, outcome, seed, 20)
    assert judged.clearly <= 0.05 * judged.looked_at


@pytest.mark.parametrize("closes", [True, False])
def test_agents_that_pause_have_their_floor_when_they_come_back(closes):
    """Whether or not anybody says that a session is over."""
    profile = PROFILES[1]
    ours = runs(profile, lambda: OurGate(profile.floor, closes=closes), TALK)
    kept = sum(outcome.kept_share() for outcome in ours) / len(ours)
    assert kept >= 0.99
    assert min(outcome.most_inside for outcome in ours) > 1.2 * profile.sustainable
    assert goodput(ours) >= 0.9 * goodput(runs(profile, lambda: Static(102), TALK))


def test_queue_keeps_the_floor_too_and_lets_in_as_many():
    """Those who wait come in when somebody leaves."""
    profile, seed = PROFILES[0], SEEDS[0]
    queued = simulate(
        profile, LOAD, OurGate(profile.floor, on_saturation=OnSaturation.QUEUE, queue_max_wait_s=60.0), seed
    )
    rejected = simulate(profile, LOAD, OurGate(profile.floor), seed)
    assert queued.kept_share() >= 0.99
    assert len(queued.admitted) >= len(rejected.admitted)


def test_the_conservative_projection_needs_no_curve():
    """It holds the floor by what is measured alone, if not as well: it knows of no stray seconds."""
    profile = PROFILES[1]
    outcomes = runs(profile, lambda: OurGate(profile.floor, projection=Projection.CONSERVATIVE))
    assert min(outcome.kept_share() for outcome in outcomes) >= 0.95
