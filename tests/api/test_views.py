"""Claims about ``api.views``: state as JSON, with null for what is not known."""

from dataclasses import asdict

import pytest

from polykv_proxy import __version__
from polykv_proxy.api import views
from polykv_proxy.core.decisions import Admit, PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.rates import STALE_S
from polykv_proxy.core.slots import Ask, Content
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

SCOPE = Scope("s")


def plane_with(*slots, used=0, bytes_per_cell=10):
    """A plane whose engine was sampled once."""
    plane = ControlPlane(max_waiting=1)
    facts = EngineFacts("e", 2, 3, 1000, 500, bytes_per_cell, "build")
    plane.on_engine_ready(facts, Capability.ZERO_COPY, None, "m", 0.0)
    if slots:
        plane.on_sample(EngineSample("e", 0.0, used, 1000, 0, slots, ()))
    return plane


def slot(number, tokens, *, shared=0, uid=0, tag=0):
    """A slot of a sample."""
    return SlotSample(SlotId(number), SlotState.IDLE, 1, tag, 0, 0, 0, tokens, shared, PoolUid(uid), 500)


def pool(plane, length, uid, *, parent=None, scope=SCOPE):
    """A resident pool."""
    made = plane.tree.add(
        plane.pools.id_of(as_tokens(range(length)), scope),
        as_tokens(range(length)),
        scope=scope,
        origin=PoolOrigin.EXPLICIT,
        now_ts=5.0,
        parent=parent,
        branch_pos=0 if parent is None else parent.prefix_len,
        label="x",
    )
    plane.tree.ready(made, PoolUid(uid))
    return made


def session(plane, name, *, scope=SCOPE):
    """A session that is resident in a slot."""
    decision = plane.leases.on_request(Ask(scope=scope, name=name, chain=(1, len(name))), 1.0, now_ts=100.0)
    assert isinstance(decision, Admit)
    plane.leases.on_finished(decision.lease, 2.0, clean=True, content=Content.NEW)
    return decision.lease.session


def test_nothing_is_known_before_an_engine_answers():
    """Counts are null, not zero."""
    empty = ControlPlane(max_waiting=1)
    document = views.pools({"e": empty}, SCOPE, 0.0)
    unknown = ("seq_ids_used", "seq_ids_max", "kv_cells_used", "kv_cells_total", "unattributed_cells")
    assert [document[name] for name in unknown] == [None] * 5
    assert (document["pools"], document["unpooled"], document["draining"], document["tree_depth"]) == (
        [],
        [],
        [],
        0,
    )
    properties = views.properties(empty)
    assert properties["capability"] == "relay"
    assert properties["capability_reason"]
    assert {properties[name] for name in ("engine_build", "engine_epoch", "max_pools", "kv_cells_total")} == {
        None
    }


def test_properties_name_what_works():
    """Features by name, so that nobody has to look at versions."""
    properties = views.properties(plane_with(), "p1", {"state": "off"}, {"mode": "advisory"})
    assert properties == {
        "version": __version__,
        "capability": "zero_copy",
        "capability_reason": None,
        "features": list(views.FEATURES),
        "engine_build": "build",
        "engine_epoch": "e",
        "max_pools": 3,
        "kv_cells_total": 1000,
        "kv_bytes_per_cell": 10,
        "attach_shortfall_total": 0,
        "engine_patch": "p1",
        "durable_kv": {"state": "off"},
        "policy": {"pools": asdict(PoolPolicy()), "admission": {"mode": "advisory"}},
    }
    assert views.properties(plane_with(bytes_per_cell=0))["kv_bytes_per_cell"] is None


def test_pools_count_bytes_by_ownership():
    """A parent's bytes are its own; its subtree's are its children's too."""
    plane = plane_with()
    root = pool(plane, 100, 1)
    child = pool(plane, 130, 2, parent=root)
    mine = session(plane, "me")
    mine.pool = child.pool_id
    plane.on_sample(EngineSample("e", 0.0, 140, 1000, 0, (slot(0, 140, shared=130, uid=2), slot(1, 0)), ()))
    top, below = views.pools({"e": plane}, SCOPE, 0.0)["pools"]
    assert (top["own_kv_bytes"], top["subtree_kv_bytes"], top["children"]) == (1000, 1300, [child.pool_id])
    assert (below["own_kv_bytes"], below["parent"], below["branch_pos"]) == (300, root.pool_id, 100)
    (attached,) = below["sessions"]
    assert (attached["suffix_n_tokens"], attached["marginal_kv_bytes"], attached["ttft_ms"]) == (
        10,
        100,
        None,
    )
    assert views.pools({"e": plane}, SCOPE, 0.0)["tree_depth"] == 2


def test_a_pin_without_a_user_is_shown():
    """Pinned, with neither children nor a resident session."""
    plane = plane_with(slot(0, 0))
    made = pool(plane, 10, 1)
    made.pinned = True
    assert views.pool_view("e", plane, made)["orphaned_pin"] is True
    session(plane, "me").pool = made.pool_id
    assert views.pool_view("e", plane, made)["orphaned_pin"] is False
    assert views.pool_view("e", plane, made)["sessions"][0]["suffix_n_tokens"] is None


def test_a_listing_holds_what_its_scope_may_see():
    """Another key's cells are counted, but carry no name."""
    plane = plane_with()
    gone = pool(plane, 50, 1)
    plane.tree.release(gone)
    session(plane, "mine")
    session(plane, "theirs", scope=Scope("t"))
    plane.on_sample(EngineSample("e", 0.0, 75, 1000, 0, (slot(0, 10), slot(1, 65, shared=50, uid=1)), ()))
    plane.board.slots[1].session.slot = SlotId(1)
    for scope, names, pools in ((SCOPE, ["mine"], [gone.pool_id]), (Scope("t"), [None], [None])):
        listing = views.pools({"e": plane}, scope, 0.0)
        assert [one["session_id"] for one in listing["unpooled"]] == names
        assert [one["pool_id"] for one in listing["draining"]] == pools
        assert listing["unpooled"][0]["cells"] == 10
    (rest,) = views.pools({"e": plane}, None, 0.0)["draining"]
    assert (rest["pool_id"], rest["cells"], rest["holders"]) == (gone.pool_id, 50, 1)
    assert [(rider["session_id"], rider["suffix_n_tokens"]) for rider in rest["sessions"]] == [("theirs", 15)]


def cells_of(listing):
    """All that a listing accounts for."""
    private = [rider for pool in (*listing["pools"], *listing["draining"]) for rider in pool["sessions"]]
    return (
        sum(pool["own_kv_bytes"] // 10 for pool in listing["pools"])
        + sum(rest["cells"] for rest in listing["draining"])
        + sum(rider["suffix_n_tokens"] for rider in private)
        + sum(slot["cells"] for slot in listing["unpooled"])
        + listing["other_keys_cells"]
        + listing["unattributed_cells"]
    )


def test_a_listing_adds_up_for_everyone():
    """Also with slots whose session is gone or names another pool, released pools, and other keys."""
    plane = plane_with()
    gone = pool(plane, 50, 1)
    kept = pool(plane, 20, 2)
    session(plane, "mine").pool = gone.pool_id  # named one, but the engine shares the other
    plane.tree.release(gone)
    slots = (slot(0, 35, shared=20, uid=2), slot(1, 65, shared=50, uid=1))
    plane.on_sample(EngineSample("e", 0.0, 100, 1000, 0, slots, ()))
    for scope in (None, SCOPE, Scope("t")):
        listing = views.pools({"e": plane}, scope, 0.0)
        assert (listing["kv_cells_used"], listing["unattributed_cells"]) == (100, 0)
        assert cells_of(listing) == 100
    assert views.pools({"e": plane}, Scope("t"), 0.0)["other_keys_cells"] == 35
    (shown,) = views.pools({"e": plane}, SCOPE, 0.0)["pools"]
    assert [(rider["slot"], rider["suffix_n_tokens"]) for rider in shown["sessions"]] == [(0, 15)]
    assert shown["pool_id"] == kept.pool_id


def test_an_old_reading_says_nothing_of_the_present():
    """What the proxy itself knows stays: its pools, and the engine's size."""
    plane = plane_with()
    kept = pool(plane, 20, 1)
    plane.on_sample(EngineSample("e", 0.0, 50, 1000, 0, (slot(0, 30), slot(1, 0)), ()))
    assert views.pools({"e": plane}, SCOPE, STALE_S)["kv_cells_used"] == 50
    listing = views.pools({"e": plane}, SCOPE, STALE_S + 0.1)
    assert (listing["kv_cells_used"], listing["unattributed_cells"], listing["unpooled"]) == (None, None, [])
    assert [each["pool_id"] for each in listing["pools"]] == [kept.pool_id]
    assert listing["kv_cells_total"] == 1000


def test_a_conversation_that_went_on_without_its_pool_is_listed_once():
    """Its last request shared nothing with the pool that an earlier one was attached to."""
    plane = plane_with()
    made = pool(plane, 20, 1)
    made.pinned = True
    session(plane, "me").pool = made.pool_id
    plane.on_sample(EngineSample("e", 0.0, 50, 1000, 0, (slot(0, 30), slot(1, 0)), ()))
    listing = views.pools({"e": plane}, SCOPE, 0.0)
    assert (listing["pools"][0]["sessions"], listing["pools"][0]["orphaned_pin"]) == ([], True)
    assert [one["session_id"] for one in listing["unpooled"]] == ["me"]
    assert cells_of(listing) == 50


def test_sessions_come_last_used_first():
    """With what their slot holds, where that is known."""
    plane = plane_with(slot(0, 30, tag=1), slot(1, 0))
    session(plane, "one").ttft_s = 0.5
    session(plane, "two", scope=Scope("t"))
    (one,) = views.sessions({"e": plane}, SCOPE)["sessions"]
    assert (one["ctx_used"], one["ctx_total"], one["ctx_headroom_tokens"]) == (30, 500, 470)
    assert (one["ttft_ms"], one["started_ts"], one["tps_ewma"]) == (500.0, 100.0, None)
    everybody = views.sessions({"e": plane}, None)
    assert [each["session_id"] for each in everybody["sessions"]] == ["two", "one"]
    assert everybody["other_keys_sessions"] == 0
    nobody = Scope("operator")
    assert views.sessions({"e": plane}, SCOPE)["other_keys_sessions"] == 1
    assert views.sessions({"e": plane, "f": plane}, nobody) == {"sessions": [], "other_keys_sessions": 4}
    assert views.rates({"e": plane}, nobody, 0.0, 77.0)["other_keys_sessions"] == 2
    assert views.rates({"e": plane}, None, 0.0, 77.0)["other_keys_sessions"] == 0
    plane.board.forget(SlotId(0))
    (one,) = views.sessions({"e": plane}, SCOPE)["sessions"]
    assert (one["resident"], one["ctx_used"], one["slot"]) == (False, None, None)


def decoded(plane, session, tokens, seconds):
    """The session's last answer had so many tokens after its first."""
    session.rate.add(tokens, seconds)
    plane.on_counters(plane.sample)
    return session


def test_rates_are_those_of_whom_one_may_see():
    """With null for who is not warm yet, and for what nobody has read."""
    plane = plane_with(slot(0, 30, tag=1), slot(1, 400, tag=2), used=430)
    decoded(plane, session(plane, "one"), 40, 2.0)
    session(plane, "two", scope=Scope("t"))
    document = views.rates({"e": plane}, None, 0.0, 77.0)
    assert [each["session_id"] for each in document.pop("sessions")] == ["two", "one"]
    assert document == {
        "ts": 77.0,
        "aggregate_tps": None,
        "mean_active_tps": None,
        "prefill_tps": None,
        "pressure": 0.8,
        "compaction_pressure": 0.333,
        "other_keys_sessions": 0,
    }
    old = views.rates({"e": plane}, None, STALE_S + 0.1, 77.0)
    assert (old["pressure"], old["compaction_pressure"]) == (None, None), "the engine may be gone"
    assert views.rates({"e": plane}, SCOPE, 0.0, 77.0)["sessions"] == [
        {
            "engine": "e",
            "session_id": "one",
            "name": "one",
            "request_id": None,
            "scope": SCOPE,
            "pool_id": None,
            "state": "idle",
            "tps_ewma": 20.0,
            "ctx_used": 30,
            "ctx_total": 500,
            "ctx_headroom_tokens": 470,
        }
    ]


def test_rates_of_several_engines_are_added_up():
    """One that does not tell makes a sum unknown; the mean is over sessions, not over engines."""
    planes = {"a": plane_with(), "b": plane_with()}
    for generated, (name, plane) in zip((20, 40), planes.items(), strict=True):
        for step in range(3):
            slots = (
                SlotSample(SlotId(0), SlotState.GEN, 1, 1, generated * step, 0, 0, 5, 0, 0, 500, float(step)),
            )
            sample = EngineSample("e", 9.0, 100 * generated // 20, 1000, 0, slots, (), float(step))
            plane.on_sample(sample)
            if not step:
                ask = Ask(scope=SCOPE, name=name)
                plane.leases.on_request(ask, 1.0, now_ts=100.0)
            plane.on_counters(sample)
    both = views.rates(planes, None, 9.0, 77.0)
    assert (both["aggregate_tps"], both["mean_active_tps"], both["pressure"]) == (60.0, 30.0, 0.2)
    assert [(each["engine"], each["tps_ewma"]) for each in both["sessions"]] == [("a", 20.0), ("b", 40.0)]
    planes["c"] = plane_with()
    several = views.rates(planes, None, 9.0, 77.0)
    assert (several["aggregate_tps"], several["mean_active_tps"]) == (None, 30.0)


def test_a_pools_sessions_show_their_rates():
    """Of those that one may know."""
    plane = plane_with()
    shared = pool(plane, 100, 1)
    decoded_one = session(plane, "me")
    decoded_one.pool = shared.pool_id
    decoded_one.rate.add(30, 1.0)
    (rider,) = views.pool_view("e", plane, shared)["sessions"]
    assert rider["tps_ewma"] == 30.0


@pytest.mark.parametrize(("scope", "named"), [(SCOPE, True), (None, True), (Scope("t"), False)])
def test_a_slots_member_names_only_whom_one_may_know(scope, named):
    """Figures of the engine's own document are everybody's."""
    plane = plane_with(slot(0, 30, tag=1), slot(1, 0), used=700)
    mine = session(plane, "me")
    mine.rate.add(30, 1.0)
    mine.pool = "p"
    assert views.slot_member(plane, SlotId(0), scope, 450, 500) == {
        "pool_id": "p" if named else None,
        "session_id": "me" if named else None,
        "tps_ewma": 30.0 if named else None,
        "ctx_used": 450,
        "ctx_headroom_tokens": 50,
    }
    assert views.slot_member(plane, SlotId(1), scope, None, None) == {
        "pool_id": None,
        "session_id": None,
        "tps_ewma": None,
        "ctx_used": None,
        "ctx_headroom_tokens": None,
    }
