"""Claims about ``core.policies``: what is in force where."""

import pytest

from polykv_proxy.core.policies import KEYS, Mode, OnSaturation, Policy, PolicySet, effective, origins

FILES = PolicySet(
    default={"target_tps_per_session": 10.0, "settle_tokens": 4},
    models={"big": {"target_tps_per_session": 5.0}},
    labels={"chat": {"mode": Mode.ENFORCED}, "batch": {"target_tps_per_session": None, "priority": -1}},
)


def test_a_model_has_its_own_over_the_default():
    """Key by key; one that is not named has the default."""
    assert FILES.base(None).target_tps_per_session == 10.0
    assert FILES.base("other") == FILES.base(None)
    assert FILES.base("big").target_tps_per_session == 5.0
    assert FILES.base("big").settle_tokens == 4
    assert PolicySet().base("big") == Policy()


def test_nearest_wins_down_the_tree():
    """Root first; the label of a pool below beats what was posted above it, and posted beats label."""
    base = FILES.base(None)
    assert effective(FILES, base, []) is base
    assert effective(FILES, base, [("unknown", {}), (None, {})]) is base
    line = [("chat", {"settle_tokens": 32, "priority": 7}), (None, {}), ("batch", {})]
    policy = effective(FILES, base, line)
    assert (policy.mode, policy.settle_tokens) == (Mode.ENFORCED, 32)
    assert (policy.target_tps_per_session, policy.priority) == (None, -1)
    assert effective(FILES, base, [*line[:2], ("batch", {"priority": 3})]).priority == 3


@pytest.mark.parametrize(
    ("given", "enforced"),
    [
        ({}, False),
        ({"mode": Mode.ENFORCED}, False),
        ({"target_tps_per_session": 5.0}, False),
        ({"mode": Mode.ENFORCED, "target_tps_per_session": 5.0}, True),
        ({"mode": Mode.ENFORCED, "kv_headroom_ratio": 0.1}, True),
        ({"mode": Mode.ENFORCED, "kv_headroom_ratio": 0.1, "on_saturation": OnSaturation.WARN}, True),
    ],
)
def test_only_a_promise_that_is_enforced_holds_anybody_up(given, enforced):
    """A mode without a promise is nothing."""
    assert Policy(**given).enforced is enforced


def test_the_keys_are_those_of_the_policy():
    """What a request may post."""
    assert "target_tps_per_session" in KEYS
    assert Policy(**dict.fromkeys(KEYS & {"priority"}, 1)).priority == 1


def test_each_value_is_from_somewhere():
    """What nobody set is built in; else the nearest that has the key, as it is in force."""
    policies = PolicySet(
        default={"priority": 1, "queue_max_depth": 2, "settle_tokens": 3, "kv_headroom_ratio": 0.5},
        models={"m": {"queue_max_depth": 4}, "n": {"priority": 9}},
        labels={"chat": {"settle_tokens": 5, "kv_headroom_ratio": 0.25}},
    )
    line = [("root", "chat", {"kv_headroom_ratio": 0.1}), ("leaf", None, {"mode": "enforced"})]
    told = origins(policies, "m", line)
    assert {key: said for key, said in told.items() if said != "built_in"} == {
        "priority": "default",
        "queue_max_depth": "models.m",
        "settle_tokens": "labels.chat",
        "kv_headroom_ratio": "pools.root",
        "mode": "pools.leaf",
    }
    assert set(told) == KEYS
    assert set(origins(PolicySet(), None, ()).values()) == {"built_in"}
