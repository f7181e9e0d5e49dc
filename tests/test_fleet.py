"""Claims about ``fleet``: what belongs to which engine is found, whoever asks."""

import asyncio
from dataclasses import replace

import pytest
from api.rig import CHAT, SYSTEM, chat

from polykv_proxy import readings
from polykv_proxy.api.identity import scope_of_keys
from polykv_proxy.core.rates import STALE_S
from polykv_proxy.core.types import Scope, SessionId
from polykv_proxy.engine import client
from polykv_proxy.errors import (
    AmbiguousSessionError,
    BadRequestError,
    DisabledError,
    NotFoundError,
    UnavailableError,
)

ALIKE = ("a", "a")
OPEN = Scope("")


async def test_engines_have_names_numbers_and_an_order(proxies):
    """One without a name goes by its number."""
    fleet = (await proxies(models=ALIKE)).fleet
    assert len(fleet) == 2
    assert [engine.name for engine in fleet] == ["engine-0", "engine-1"]
    assert fleet.first is fleet[0] is fleet.named("engine-0")
    with pytest.raises(BadRequestError, match="there are engine-0, engine-1"):
        fleet.named("x")


async def test_a_query_names_an_engine_or_a_model(proxies):
    """The engine first; a model that nobody has is no error, as in llama-server."""
    fleet = (await proxies(models=("a", "b"))).fleet
    names = {
        query: fleet.of_query(query).name
        for query in ("", "x=1", "engine=engine-1", "model=b", "model=zzz", "engine=engine-0&model=b")
    }
    assert names == {
        "": "engine-0",
        "x=1": "engine-0",
        "engine=engine-1": "engine-1",
        "model=b": "engine-1",
        "model=zzz": "engine-0",
        "engine=engine-0&model=b": "engine-0",
    }
    with pytest.raises(BadRequestError):
        fleet.of_query("engine=no")


async def test_a_proxy_of_one_engine_looks_at_no_query(rig):
    """What passes through a single engine is that engine's business alone."""
    assert rig.fleet.of_query("engine=whatever") is rig.fleet.first


async def test_new_pools_go_where_most_sequence_ids_are_free(proxies):
    """Among the engines with the first one's model; a name overrules that."""
    rig = await proxies(models=("a", "a", "b"))
    first = await rig.pool()
    assert first["engine"] == "engine-0"
    assert rig.fleet.with_pools(None).name == "engine-1"
    assert rig.fleet.with_pools("engine-2").name == "engine-2"
    rig.down()
    assert rig.fleet.with_pools(None).name == "engine-1"
    with pytest.raises(BadRequestError):
        rig.fleet.with_pools("no")


async def test_pools_are_refused_only_where_no_engine_has_them(proxies):
    """The first engine says why."""
    rig = await proxies(models=ALIKE, max_pools=0)
    with pytest.raises(DisabledError):
        rig.fleet.require_pools()
    with pytest.raises(DisabledError):
        rig.fleet.with_pools("engine-1")
    rig.fleet[1].plane._engine.facts = None
    with pytest.raises(UnavailableError):
        rig.fleet.with_pools("engine-1")


async def test_a_pool_is_found_on_its_engine(proxies):
    """By those who may see it."""
    rig = await proxies(models=ALIKE)
    made = await rig.pool({"messages": [{"role": "system", "content": SYSTEM}], "engine": "engine-1"})
    engine, pool = rig.fleet.need_pool(made["pool_id"], OPEN)
    assert (engine.name, pool.pool_id) == ("engine-1", made["pool_id"])
    assert rig.fleet.find_pool(made["pool_id"], Scope("other")) is None
    with pytest.raises(NotFoundError, match="does not exist"):
        rig.fleet.need_pool(made["pool_id"], Scope("other"))


async def test_a_session_is_where_it_is_resident(proxies):
    """The same name may be known on two engines; nobody knows another key's."""
    rig = await proxies(models=ALIKE)
    for engine in ("engine-0", "engine-1"):
        await rig.ask(f"{CHAT}?engine={engine}", chat("hi", session_id="n"))
    await rig.quiet()
    for seen in (OPEN, None):
        assert rig.fleet.need_session(SessionId("n"), seen)[0].name == "engine-0"
    rig.fleet[0].plane.board.forget(0)
    for seen in (OPEN, None):
        engine, session = rig.fleet.need_session(SessionId("n"), seen)
        assert (engine.name, session) == ("engine-1", engine.plane.sessions.get(SessionId("n"), OPEN))
    for name, seen in (("n", Scope("other")), ("?", None)):
        with pytest.raises(NotFoundError) as caught:
            rig.fleet.need_session(SessionId(name), seen, param="from_session")
        assert caught.value.param == "from_session"


async def test_a_name_that_two_keys_have_on_two_engines_is_neithers(proxies):
    """To an administrator, who is told whose they are; each key finds its own."""
    rig = await proxies(models=ALIKE)
    for engine, key in (("engine-0", "one"), ("engine-1", "two")):
        await rig.ask(f"{CHAT}?engine={engine}", chat("hi", session_id="n"), X_Api_Key=key)
    scopes = [scope_of_keys(key, None, shared=False) for key in ("one", "two")]
    found = [rig.fleet.need_session(SessionId("n"), scope) for scope in scopes]
    assert [(engine.name, session.scope) for engine, session in found] == [
        ("engine-0", scopes[0]),
        ("engine-1", scopes[1]),
    ]
    with pytest.raises(AmbiguousSessionError) as caught:
        rig.fleet.need_session(SessionId("n"), None)
    assert caught.value.details == {"scopes": sorted(scopes)}


async def test_engines_with_the_same_model_are_alike(proxies):
    """Tokens and pool ids mean the same on them."""
    fleet = (await proxies(models=("a", "b", "a"))).fleet
    assert [engine.name for engine in fleet.like(fleet[0])] == ["engine-0", "engine-2"]
    assert fleet[0].serves("a")
    assert not fleet[0].serves("b")


async def test_a_fleet_serves_while_one_engine_does(proxies):
    """An engine that is gone is not asked for pools."""
    rig = await proxies(models=ALIKE)
    rig.down()
    assert rig.fleet.serving
    assert [engine.has_pools for engine in rig.fleet] == [False, True]


async def test_an_engine_that_hangs_holds_up_no_listing(proxies, monkeypatch):
    """Its last reading is shown until that is too old: then nothing is known of it; all is of the others."""
    rig = await proxies(models=ALIKE)
    await rig.fleet.sample()
    monkeypatch.setattr(readings, "GLANCE_S", 0.05)
    rig.engines[1].slow["/polykv/engine/counters"] = hang = asyncio.Event()
    rig.fleet[1].runtime.readings.changed()
    async with asyncio.timeout(client.CONTROL_TIMEOUT_S / 2):
        for path in ("/polykv/sessions", "/polykv/pools"):
            assert (await rig.ask(path)).status == 200
    plane = rig.fleet[1].plane
    plane.sample = replace(plane.sample, taken_at=plane.sample.taken_at - STALE_S)
    listing = (await rig.ask("/polykv/pools")).json
    assert [part["kv_cells_used"] is None for part in listing["engines"]] == [False, True]
    assert listing["kv_cells_used"] is None
    hang.set()


async def test_whoever_needs_an_engine_can_wait_for_one(proxies):
    """For the first that serves, and no longer than they like."""
    rig = await proxies(models=ALIKE)
    await rig.fleet.wait_until_serving(0.0)
    for engine in rig.fleet:
        engine.plane.on_engine_down()
        engine.runtime.serving.clear()
    await rig.fleet.wait_until_serving(0.01)
    assert not rig.fleet.serving
    waiting = asyncio.get_running_loop().create_task(rig.fleet.wait_until_serving(60.0))
    await asyncio.sleep(0)
    rig.fleet[1].runtime.serving.set()
    async with asyncio.timeout(10.0):
        await waiting
