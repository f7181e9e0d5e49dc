"""Claims about ``core.routing``: which engine of several answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core import routing
from polykv_proxy.core.decisions import PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.routing import Prospect, Scenes, choose, prospect
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import (
    Capability,
    EngineFacts,
    PoolUid,
    Scope,
    as_tokens,
)

SCOPE = Scope("s")
IDLE = Prospect(serving=True, serves_model=True, slots=4, idle=4, waiting=0)


def like(**more):
    """An idle engine that serves everything, but for what is given."""
    return replace(IDLE, **more)


FULL = {"idle": 0, "waiting": 3}


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(like(**FULL), like(serves_model=False, has_pool=True), id="the model that was named"),
        pytest.param(like(idle=1), like(serving=False, links=9), id="an engine that serves"),
        pytest.param(like(has_pool=True, **FULL), like(links=9), id="the pool that was named"),
        pytest.param(like(links=3, waiting=1), like(links=2, matched=900), id="the conversation"),
        pytest.param(like(idle=1), like(matched=900, **FULL), id="a free slot before a match"),
        pytest.param(like(matched=90, idle=1), like(named=True, scene=True), id="a match"),
        pytest.param(like(named=True, idle=1), like(scene=True), id="the name"),
        pytest.param(like(scene=True, idle=1), like(), id="a start that was seen before"),
        pytest.param(like(idle=3), like(idle=2), id="the least load"),
        pytest.param(like(slots=8, idle=3), like(slots=4, idle=1), id="load is by slots"),
    ],
)
def test_what_counts_more(better, worse):
    """In whatever order the engines stand."""
    assert choose([better, worse]) == 0
    assert choose([worse, better]) == 1


def test_a_model_that_nobody_has_leaves_all_engines():
    """llama-server ignores a name that it does not know, and so do several of them."""
    assert choose([like(serves_model=False, idle=1), like(serves_model=False)]) == 1


def test_without_an_engine_that_serves_the_request_waits_where_its_state_was():
    """The first of them if nothing speaks for another."""
    down = like(serving=False)
    assert choose([down, replace(down, has_pool=True)]) == 1
    assert choose([down, down]) == 0


def test_among_equals_the_first():
    """So that a single request at a time stays in one place."""
    assert choose([IDLE, IDLE, IDLE]) == 0


prospects = st.builds(
    Prospect,
    serving=st.booleans(),
    serves_model=st.booleans(),
    slots=st.integers(1, 8),
    idle=st.integers(0, 8),
    waiting=st.integers(0, 3),
    has_pool=st.booleans(),
    links=st.integers(0, 3),
    named=st.booleans(),
    matched=st.integers(0, 3),
    scene=st.booleans(),
)


@given(st.lists(prospects, min_size=1, max_size=5))
def test_the_choice_serves_whenever_one_does(engines):
    """Whatever else speaks for it, among those with the model."""
    chosen = engines[choose(engines)]
    able = [each for each in engines if each.serves_model] or engines
    assert chosen in able
    assert chosen.serving or not any(each.serving for each in able)


@given(st.lists(prospects, min_size=2, max_size=5), st.randoms())
def test_order_matters_only_among_equals(engines, random):
    """The same engine is chosen however they are listed."""
    shuffled = engines.copy()
    random.shuffle(shuffled)

    def weight(each):
        return (each.serving, each.has_pool, each.links, each.would_wait, each.matched, each.load)

    assert weight(engines[choose(engines)]) == weight(shuffled[choose(shuffled)])


def plane():
    """An engine with two slots and a pool of 64 tokens, released by none."""
    made = ControlPlane(max_waiting=4, policy=PoolPolicy())
    facts = EngineFacts("e", slots=2, max_pools=2, cells=512, ctx_tokens=256, bytes_per_cell=1, build="b")
    made.on_engine_ready(facts, Capability.ZERO_COPY, None, "model", 0.0)
    return made


def test_a_prospect_is_read_from_the_state():
    """Pool, match, conversation and load; asking changes nothing."""
    engine = plane()
    tokens = as_tokens(range(64))
    pool, _ = engine.pools.enter(tokens, SCOPE, Wanted(), now_ts=5.0)
    engine.pools.on_ready(pool, PoolUid(1))
    first = engine.leases.on_request(Ask(scope=SCOPE, name="n", chain=(1, 2)), 0.0, now_ts=0.0).lease
    engine.leases.on_finished(first, 1.0, clean=True, content=Content.NEW)
    engine.leases.on_request(Ask(scope=SCOPE, chain=(7, 8)), 2.0, now_ts=2.0)

    asking = Ask(scope=SCOPE, name="n", chain=(1, 2, 3))
    seen = prospect(
        engine, asking, serves_model=True, pool_id=pool.pool_id, tokens=as_tokens(range(80)), scene=True
    )
    assert seen == Prospect(
        serving=True,
        serves_model=True,
        slots=2,
        idle=1,
        waiting=0,
        has_pool=True,
        links=2,
        named=False,
        matched=64,
        scene=True,
    )
    assert seen.load == 0.5
    assert pool.last_access_ts == 5.0
    stranger = prospect(engine, Ask(scope=Scope("t")), serves_model=False, pool_id=pool.pool_id)
    assert not stranger.has_pool


def test_a_name_leads_back_to_where_its_conversation_was():
    """Its slot is another's by now, but its pool or its scene may still be there."""
    engine = plane()
    for chain, name in (((1, 2), "n"), ((3, 4), "m"), ((5, 6), "o")):
        lease = engine.leases.on_request(Ask(scope=SCOPE, name=name, chain=chain), 0.0, now_ts=0.0).lease
        engine.leases.on_finished(lease, 1.0, clean=True, content=Content.NEW)
    assert prospect(engine, Ask(scope=SCOPE, name="n", chain=(9, 9)), serves_model=True).named
    assert not prospect(engine, Ask(scope=SCOPE, name="x"), serves_model=True).named


def test_scenes_are_remembered_by_scope_and_bounded(monkeypatch):
    """The one that was not seen for the longest time is forgotten."""
    monkeypatch.setattr(routing, "MAX_SCENES", 2)
    scenes = Scenes()
    scenes.note(SCOPE, 1, 0)
    scenes.note(SCOPE, 2, 1)
    scenes.note(SCOPE, 1, 1)
    scenes.note(SCOPE, 3, 0)
    assert len(scenes) == 2
    assert [scenes.engine(SCOPE, start) for start in (1, 2, 3)] == [1, None, 0]
    assert scenes.engine(Scope("t"), 1) is None
