"""Claims about ``durable.pools``: the tree comes back under the same ids, from disk where a file is right."""

import asyncio
import threading
from dataclasses import replace

import pytest
from api.rig import until

from polykv_proxy.core.catalogue import Retention
from polykv_proxy.core.types import PoolState
from polykv_proxy.errors import BadRequestError, UnavailableError

ROOT = {"prompt": "r" * 100}
CHILD = {"prompt": "r" * 100 + "c" * 50}
CHILDS = "/polykv/engine/pools/1"
"""Where the engine is told of the child; nothing else has that number."""


async def grown(rig):
    """A root and its child."""
    root = await rig.pool({**ROOT, "pin": True, "label": "tools"})
    child = (await rig.ask(f"/polykv/pools/{root['pool_id']}/fork", {**CHILD, "branch_pos": 80})).json
    return root, child


def shape(rig):
    """What of the tree has to come back."""
    return {
        pool.pool_id: (pool.state.value, pool.edge[0] and pool.edge[0].pool_id, pool.edge[1], pool.pinned)
        for pool in rig.runtime.plane.tree
    }


async def crashed(rig):
    """The engine is another one now."""
    rig.down()
    rig.engine.restart()
    await rig.up()
    async with asyncio.timeout(20):
        await rig.durable.settled(20)


async def test_the_tree_comes_back_from_disk(proxies):
    """Parents first, with the same edges; the engine computes nothing."""
    rig = await proxies()
    await grown(rig)
    await rig.durable.round()
    before = shape(rig)
    await crashed(rig)
    assert shape(rig) == before
    assert rig.runtime.metrics.rebuilds == {"disk": 2, "prefill": 0, "failed": 0}
    assert [number for number, _ in rig.engine.moved("restore_pool")] == [0, 1]
    await rig.quiet()
    sample = await rig.runtime.readings.take(max_age_s=0.0)
    assert rig.runtime.plane.ownership.unattributed == 0
    assert sample.cells_used == 100 + 70


async def test_what_is_not_on_disk_is_computed(proxies):
    """And what is there but damaged."""
    rig = await proxies()
    _, child = await grown(rig)
    await rig.durable.round()
    for entry in rig.durable.shelf.catalogue:
        if entry.state.key == child["pool_id"]:
            (rig.engine.folder / entry.state.file).write_bytes(b"x")
    before = shape(rig)
    await crashed(rig)
    assert shape(rig) == before
    assert rig.runtime.metrics.rebuilds == {"disk": 1, "prefill": 1, "failed": 0}


async def test_a_pool_the_engine_will_not_restore_is_computed(proxies):
    """Its number comes free again."""
    rig = await proxies()
    await grown(rig)
    await rig.durable.round()
    before = shape(rig)
    rig.down()
    rig.engine.restart()
    rig.engine.broken[CHILDS] = (503, b'{"error": {"message": "no room in the KV cache"}}')
    await rig.up()
    await until(lambda: rig.runtime.metrics.restores["failed"])
    del rig.engine.broken[CHILDS]
    await rig.durable.settled(20)
    await until(lambda: shape(rig) == before)
    assert rig.runtime.metrics.rebuilds["prefill"] == 1
    await until(lambda: not rig.runtime.plane.tree._retiring)


async def test_another_proxy_finds_them(proxies):
    """With label, pin, and who they were made for."""
    rig = await proxies()
    root, _ = await grown(rig)
    await rig.durable.drain()
    before = shape(rig)
    again = await proxies()
    await again.durable.settled(20)
    assert shape(again) == before
    listed = (await again.ask(f"/polykv/pools/{root['pool_id']}")).json
    assert (listed["label"], listed["pinned"], listed["origin"]) == ("tools", True, "explicit")


async def test_what_was_released_does_not_come_back(proxies):
    """Its file goes, too."""
    rig = await proxies()
    _, child = await grown(rig)
    await rig.durable.round()
    assert len(rig.durable.shelf.catalogue) == 2
    await rig.ask(f"/polykv/pools/{child['pool_id']}", method="DELETE")
    await rig.durable.round()
    assert [entry.state.key for entry in rig.durable.shelf.catalogue] != [child["pool_id"]]
    again = await proxies()
    await again.durable.settled(20)
    assert child["pool_id"] not in shape(again)


async def test_what_was_evicted_stays_away_until_it_is_asked_for(proxies):
    """Somebody gave its cells back."""
    rig = await proxies()
    _, child = await grown(rig)
    await rig.ask(f"/polykv/pools/{child['pool_id']}/evict", {})
    await crashed(rig)
    assert shape(rig)[child["pool_id"]][0] == "lost"


async def test_a_pin_that_changes_is_on_disk(proxies):
    """Without its KV being written again."""
    rig = await proxies()
    root = await rig.pool(ROOT)
    await rig.durable.round()
    saves = rig.engine.moved("save_pool")
    await rig.ask(f"/polykv/pools/{root['pool_id']}/pin", {})
    await rig.durable.round()
    assert rig.engine.moved("save_pool") == saves
    again = await proxies()
    await again.durable.settled(20)
    assert shape(again)[root["pool_id"]] == ("resident", None, 0, True)


async def test_a_pool_that_nobody_used_for_long_is_not_saved(proxies):
    """Unless it is pinned, or carries one that is worth it."""
    rig = await proxies(pool_recent_s=0.0)
    await rig.pool({"prompt": "u" * 60})
    await asyncio.sleep(0.01)
    await rig.durable.pools.keep()
    assert len(rig.durable.shelf.catalogue) == 0
    root = await rig.pool({"prompt": "v" * 60})
    child = {"prompt": "v" * 90, "pin": True}
    await rig.ask(f"/polykv/pools/{root['pool_id']}/fork", child)
    await asyncio.sleep(0.01)
    await rig.durable.pools.keep()
    assert len(rig.durable.shelf.catalogue) == 2


async def test_a_pool_that_went_while_it_was_saved_is_not_kept(proxies):
    """Its number may be another's by then."""
    rig = await proxies()
    root = await rig.pool(ROOT)
    held = rig.engine.slow["/polykv/engine/pools/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.pools.keep())
    await until(lambda: len(rig.durable.shelf.saves))
    leaving = rig.start(f"/polykv/pools/{root['pool_id']}", method="DELETE")
    await until(lambda: rig.runtime.plane.tree.was_released(root["pool_id"]))
    held.set()
    await asyncio.gather(keeping, leaving)
    assert len(rig.durable.shelf.catalogue) == 0


@pytest.mark.parametrize(("policy", "waits"), [("hold", True), ("plain", False)])
async def test_requests_wait_for_the_tree_or_do_without(proxies, policy, waits):
    """As the policy says; nobody is refused."""
    rig = await proxies(slots=2, while_rebuilding=policy)
    _, child = await grown(rig)
    rig.down()
    rig.engine.restart()
    held = rig.engine.slow[CHILDS] = asyncio.Event()
    await rig.up()
    asking = rig.start("/v1/completions", {"prompt": "something else"})
    if waits:
        named = rig.start(
            "/v1/completions", {"prompt": CHILD["prompt"] + "and on", "pool_id": child["pool_id"]}
        )
        await asyncio.sleep(0.1)
        assert not asking.done()
        held.set()
        assert (await named).json["timings"]["cache_n"] == child["prefix_len"]
    assert (await asking).status == 200
    held.set()
    await rig.durable.settled(20)
    await until(lambda: all(pool.state is PoolState.RESIDENT for pool in rig.runtime.plane.tree))


@pytest.mark.parametrize("named", [False, True])
async def test_who_waits_for_the_tree_counts_as_waiting(proxies, named):
    """The line for slots and the line before it are bounded together; who leaves makes room."""
    rig = await proxies(slots=2, queue={"max_depth": 2})
    _, child = await grown(rig)
    rig.down()
    rig.engine.restart()
    held = rig.engine.slow[CHILDS] = asyncio.Event()
    body = {"prompt": CHILD["prompt"] + "and on"} | ({"pool_id": child["pool_id"]} if named else {})
    if not named:
        await rig.up()
    waiting = [rig.start("/v1/completions", body) for _ in range(2)]
    await until(lambda: rig.runtime.plane.leases.waiting == 2)
    refused = await rig.ask("/v1/completions", body)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    waiting.pop().cancel()
    await until(lambda: rig.runtime.plane.leases.waiting == 1)
    waiting.append(rig.start("/v1/completions", body))
    await until(lambda: rig.runtime.plane.leases.waiting == 2)
    if named:
        await rig.up()
    held.set()
    assert [(await one).status for one in waiting] == [200, 200]
    assert rig.runtime.plane.leases.waiting == 0


async def test_who_waited_for_the_engine_waits_for_the_tree_too(proxies):
    """He was in line before anybody knew that there was something to wait for."""
    rig = await proxies(slots=2)
    _, child = await grown(rig)
    rig.engine.gate.clear()
    running = [rig.start("/v1/completions", {"prompt": f"{number} other"}) for number in range(2)]
    await until(lambda: rig.engine.running == 2)
    named = rig.start("/v1/completions", {"prompt": CHILD["prompt"] + "and on", "pool_id": child["pool_id"]})
    await until(lambda: rig.waiting == 1)
    rig.down()
    rig.engine.restart()
    rig.engine.gate.set()
    await rig.up()
    assert (await named).json["timings"]["cache_n"] == child["prefix_len"]
    await asyncio.gather(*running)


async def test_a_second_crash_while_they_come_back(proxies):
    """Who waits goes on waiting; in the end all are there."""
    rig = await proxies(slots=2)
    await grown(rig)
    before = shape(rig)
    rig.down()
    rig.engine.restart()
    held = rig.engine.slow[CHILDS] = asyncio.Event()
    await rig.up()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 2)
    assert not rig.durable.is_settled
    rig.down()
    rig.engine.restart()
    del rig.engine.slow[CHILDS]
    held.set()
    await rig.up()
    await rig.durable.settled(20)
    await until(lambda: shape(rig) == before)


def only(rig):
    """The one pool that there is."""
    (pool,) = rig.runtime.plane.tree
    return pool


async def test_how_long_a_pool_was_out_of_use_is_known_after_a_restart(proxies):
    """Its lifetime goes on from its last use, not from when it was saved; coming back is no use."""
    rig = await proxies(slots=2)
    await rig.pool({**ROOT, "ttl_s": 100})
    began = rig.runtime.now_ts()
    await rig.durable.round()
    only(rig).last_access_ts = began + 199
    await rig.durable.drain()
    again = await proxies(slots=2)
    await again.durable.settled(20)
    assert only(again).last_access_ts == pytest.approx(began + 199, abs=0.01)
    again.runtime.now_ts = lambda: began + 200
    await again.pooling.tender.round()
    await again.durable.round()
    assert only(again).state is PoolState.RESIDENT
    assert len(again.durable.shelf.catalogue) == 1
    again.runtime.now_ts = lambda: began + 300
    await again.pooling.tender.round()
    assert list(again.runtime.plane.tree) == []


async def test_what_a_pool_was_saved_for_is_not_its_use(proxies):
    """The value of its state is by its last use from the start."""
    rig = await proxies(slots=2)
    await rig.pool(ROOT)
    used = only(rig).last_access_ts = rig.runtime.now_ts() - 1000.0
    await rig.durable.round()
    (entry,) = rig.durable.shelf.catalogue
    assert entry.used_ts == used
    await rig.ask(f"/polykv/pools/{only(rig).pool_id}/pin", {})
    only(rig).last_access_ts = used
    await rig.durable.round()
    assert entry.state.pool.pinned
    (found,) = rig.durable.shelf.store.scan().found
    assert found.used_ts == pytest.approx(used, abs=0.01)


async def test_a_pool_that_is_there_is_not_swept_from_disk(proxies):
    """Who works with it may lose the engine at any time."""
    rig = await proxies(slots=2)
    await rig.pool(ROOT)
    await rig.durable.round()
    (entry,) = rig.durable.shelf.catalogue
    shelf = rig.durable.shelf
    shelf.limits = Retention(max_bytes=0, max_idle_s=0.0, min_free_bytes=0)
    entry.used_ts -= 1000.0
    assert await shelf.sweeps.sweep(1e9, due=True) == 0
    assert list(shelf.catalogue) == [entry]
    await rig.ask(f"/polykv/pools/{only(rig).pool_id}/evict", {})
    assert await shelf.sweeps.sweep(2e9, due=True) == 1


async def test_what_was_released_just_before_the_end_does_not_come_back(proxies):
    """Its file goes with the drain."""
    rig = await proxies()
    await rig.pool(ROOT)
    await rig.durable.round()
    assert len(rig.durable.shelf.catalogue) == 1
    await rig.ask(f"/polykv/pools/{only(rig).pool_id}", method="DELETE")
    await rig.durable.drain()
    assert list(rig.engine.folder.glob("kv-*")) == []


async def test_a_disk_that_hangs_does_not_keep_requests_from_an_engine_that_came_back(proxies):
    """Its pools are computed."""
    rig = await proxies(slots=2)
    await rig.pool({**ROOT, "pin": True})
    await rig.durable.round()
    go_on, check = threading.Event(), rig.durable.shelf.store.check
    rig.durable.shelf.store.check = lambda state: go_on.wait(20) and check(state)
    restore = rig.durable.pools.rebuild

    async def rebuild():
        rig.durable.shelf.disk._patience_s = 0.1
        await restore()

    rig.durable.pools.rebuild = rebuild
    await crashed(rig)
    assert rig.durable.is_settled
    assert only(rig).state is PoolState.RESIDENT
    assert rig.runtime.metrics.rebuilds["prefill"] == 1
    go_on.set()


@pytest.mark.parametrize("status", [400, 503])
async def test_a_pool_that_the_engine_will_not_take_is_saved_anew(proxies, status):
    """Its file would be refused at every start."""
    rig = await proxies(slots=2)
    pool = await rig.pool({**ROOT, "pin": True})
    await rig.durable.round()
    (entry,) = rig.durable.shelf.catalogue
    rig.down()
    rig.engine.restart()
    client, restore = rig.runtime.client, rig.runtime.client.restore_pool

    async def refuses(*_):
        if status == 400:
            raise BadRequestError("not a saved state of this model", code="engine_refused")
        raise UnavailableError("not a saved state of this model", code="engine_refused")

    client.restore_pool = refuses
    await rig.up()
    await rig.durable.settled(20)
    client.restore_pool = restore
    assert rig.runtime.metrics.rebuilds["prefill"] == 1
    await rig.durable.round()
    (anew,) = rig.durable.shelf.catalogue
    assert anew.state.key == pool["pool_id"]
    assert anew.state.file != entry.state.file


@pytest.mark.parametrize("what", ["recall", "rebuild", "origin"])
async def test_a_pool_that_makes_trouble_keeps_nobody_from_the_engine(proxies, what):
    """Requests go in; its file stays for a proxy that knows what to do with it."""
    rig = await proxies(slots=2)
    await rig.pool({**ROOT, "pin": True})
    await rig.durable.round()
    if what == "origin":
        (entry,) = rig.durable.shelf.catalogue
        await rig.durable.shelf.restate(entry, replace(entry.state.pool, origin="of tomorrow"))
        rig = await proxies(slots=2)
    else:

        def fails():
            raise ValueError("a fault")

        setattr(rig.durable.pools, what, fails)
        rig.down()
        rig.engine.restart()
        await rig.up()
    assert await rig.durable.settled(20)
    assert (await rig.ask("/v1/completions", {"prompt": "something else"})).status == 200
    assert len(rig.durable.shelf.catalogue) == 1
    assert rig.problems == []
