"""Claims about ``core.sight``: what a gate sees of its engine, and for how long that holds."""

import pytest

from polykv_proxy.core.headroom import Picture
from polykv_proxy.core.sight import MARGINAL_ANSWERS, Look, Sight

INSIDE = Picture(working=2, live=3.5, promised=1, waiting=4, refused=5)


def seen(sight, now=0.0):
    """The picture at that moment."""
    return sight.complete(INSIDE, now)


def taught(sight):
    """Looks at one session, then at two, until the pace is known; returns when the last one was taken."""
    now = 0.0
    for n in (1, 2):
        for _ in range(20):
            now += 0.25
            sight.on_look(Look(taken_at=now, decoding=n, mean_tps=50.0, tokens=n * 20, seconds=n * 0.25))
    return now


def test_the_last_look_is_what_is_seen():
    """Beside what was known of who is inside, which stays as it was."""
    sight = Sight()
    assert seen(sight) == INSIDE
    sight.on_look(Look(taken_at=0.0, decoding=3, mean_tps=9.0))
    last = Look(
        taken_at=1.0,
        decoding=2,
        mean_tps=20.0,
        window=4096,
        pressure=0.5,
        seq_ids_used=6,
        seq_ids_max=8,
    )
    sight.on_look(last)
    picture = seen(sight)
    told = ("decoding", "mean_tps", "window", "pressure", "seq_ids_used", "seq_ids_max")
    assert [getattr(picture, name) for name in told] == [getattr(last, name) for name in told]
    known = ("working", "live", "promised", "waiting", "refused")
    assert [getattr(picture, name) for name in known] == [getattr(INSIDE, name) for name in known]


@pytest.mark.parametrize(("stale_after_s", "stale"), [(3.0, True), (None, False)])
def test_a_look_that_is_too_old_says_nothing(stale_after_s, stale):
    """Nor does one that never came; where nobody looks there is nothing to be stale."""
    sight = Sight(stale_after_s)
    assert seen(sight).stale is stale
    sight.on_look(Look(taken_at=10.0, decoding=0, mean_tps=None))
    assert not seen(sight, 13.0).stale
    assert seen(sight, 13.1).stale is stale


def test_what_was_learned_of_a_model_outlives_its_engine():
    """The last look does not; another model has another curve."""
    sight = Sight()
    now = taught(sight)
    assert seen(sight).fit is not None
    assert seen(sight).reach >= 2
    assert seen(sight).bias is not None
    sight.on_engine_ready(same_model=True, stale_after_s=1.0)
    assert seen(sight).fit is not None
    assert seen(sight).mean_tps is None
    assert seen(sight, now).stale
    sight.on_engine_ready(same_model=False, stale_after_s=None)
    assert (seen(sight).fit, seen(sight).reach, seen(sight).bias) == (None, 0, None)
    taught(sight)
    assert seen(sight).fit is not None


def test_what_a_session_takes_is_a_mean():
    """Of few all count alike, so that the first is not the figure for long; of many the recent ones do."""
    sight = Sight()
    assert seen(sight).marginal_tokens is None
    sight.on_over(600)
    assert seen(sight).marginal_tokens == 600.0
    for _ in range(MARGINAL_ANSWERS - 1):
        sight.on_over(0)
    assert seen(sight).marginal_tokens == pytest.approx(600.0 / MARGINAL_ANSWERS)
    for _ in range(2 * MARGINAL_ANSWERS):
        sight.on_over(320)
    assert 270.0 < seen(sight).marginal_tokens < 290.0
