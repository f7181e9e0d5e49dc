"""Claims about ``pooling.snapshot``: what the engine took is known, whoever asked for it."""

import asyncio

from api.rig import until
from pooling.steps import create, every_cell_has_its_owner, ids, talked

from polykv_proxy.core.types import as_tokens


async def slow_snapshot(rig, **body):
    """A snapshot that the engine has taken and not answered yet."""
    rig.engine.snapshot_gate.clear()
    before = len(rig.engine.pools)
    task = rig.start("/polykv/pools", {"from_session": "me"} | body)
    await until(lambda: len(rig.engine.pools) > before)
    return task


async def test_a_slot_that_is_taken_while_its_snapshot_is_on_the_way_makes_no_pool(proxies):
    """409: the engine may have taken the other conversation; what it made is given back."""
    rig = await proxies(slots=1)
    await talked(rig)
    task = await slow_snapshot(rig)
    other = rig.start("/completion", {"prompt": "somebody else", "session_id": "you"})
    await until(lambda: rig.idle == 0)
    rig.engine.snapshot_gate.set()
    answer = await task
    assert (await other).status == 200
    assert (answer.status, answer.error["code"]) == (409, "session_not_resident")
    await every_cell_has_its_owner(rig)
    assert len(rig.runtime.plane.tree) == len(rig.engine.pools) == 0


async def test_nothing_begins_in_a_slot_while_its_snapshot_is_taken(proxies, monkeypatch):
    """Else the pool would stand on what the slot shared before, and not on what it holds now."""
    rig = await proxies(slots=1, max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    other, _, _ = await create(rig, as_tokens(ids((1, 20), (9, 5))))
    await talked(rig, pool_id=root.pool_id)
    await rig.pooling.release(root, recursive=False)
    asked, go, snapshot = asyncio.Event(), asyncio.Event(), rig.runtime.client.snapshot

    async def late(*args):
        asked.set()
        await go.wait()
        return await snapshot(*args)

    monkeypatch.setattr(rig.runtime.client, "snapshot", late)
    task = rig.start("/polykv/pools", {"from_session": "me"})
    await until(asked.is_set)
    body = {"prompt": ids((1, 20), (7, 30)), "pool_id": other.pool_id, "session_id": "you"}
    request = rig.start("/completion", body)
    await until(lambda: rig.idle == 0)
    await asyncio.sleep(0.02)
    assert len(rig.engine.work) == 1
    go.set()
    assert (await task).error["code"] == "session_not_resident"  # it has no slot any more
    assert (await request).json["timings"]["cache_n"] == 20
    await every_cell_has_its_owner(rig)


async def test_a_slot_whose_next_request_is_on_its_way_is_not_snapshot(proxies):
    """What the engine would take is not what was read of the slot before."""
    rig = await proxies(slots=1)
    await talked(rig)
    rig.engine.gate.clear()
    request = rig.start("/completion", {"prompt": ids((1, 40), (2, 10), (3, 5)), "session_id": "me"})
    await until(lambda: rig.engine.running)
    rig.engine.sequences[0].tag = 0  # as if it were not there yet
    answer = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert (answer.status, answer.error["code"]) == (409, "session_not_resident")
    rig.engine.gate.set()
    await request
    await every_cell_has_its_owner(rig)


async def test_what_a_snapshot_stands_on_is_known_again(proxies):
    """While it was on the way nobody seemed to hold what is left of the released pool below it."""
    rig = await proxies(pools={"grace_s": 0.0})
    first, _, _ = await create(rig)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    for pool in (root, first):  # so that the snapshot takes another number than the root had
        await rig.pooling.release(pool, recursive=False)
    task = await slow_snapshot(rig)
    for _ in range(2):  # the first may be one that was under way
        await rig.runtime.readings.take(max_age_s=0.0)
    assert root not in rig.runtime.plane.tree.nodes()
    rig.engine.snapshot_gate.set()
    assert (await task).status == 201
    await every_cell_has_its_owner(rig)
    assert [rest.cells for rest in rig.runtime.plane.ownership.draining] == [40]


async def test_a_snapshot_whose_client_leaves_is_a_pool_all_the_same(rig):
    """Its slot lives on it from the moment it was taken, so it has to be known."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    task = await slow_snapshot(rig)
    task.cancel()
    rig.engine.snapshot_gate.set()
    await until(lambda: len(rig.runtime.plane.tree) == 2)
    await every_cell_has_its_owner(rig)


async def test_a_snapshot_of_an_engine_that_is_gone_is_an_error(rig):
    """Its number may be anybody's in the new one: nothing is entered, nothing released."""
    await talked(rig)
    task = await slow_snapshot(rig)
    rig.down()
    rig.engine.restart()
    await rig.up()
    rig.engine.snapshot_gate.set()
    assert (await task).status in (409, 503)
    assert len(rig.runtime.plane.tree) == rig.runtime.plane.tree.sequences_used == 0


async def test_a_parent_that_goes_meanwhile_is_a_conflict(rig):
    """The engine does not know it any more; who asks again gets a pool without it."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    del rig.engine.pools[root.number]
    answer = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert (answer.status, answer.error["code"]) == (409, "pool_lost")
    await until(lambda: rig.runtime.plane.tree.sequences_used == 1)


async def test_a_slot_is_snapshot_once_at_a_time(proxies):
    """The first one changes what the slot shares: the second is a child of it, and owns what is beyond."""
    rig = await proxies(max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    first = await slow_snapshot(rig, n_tokens=45)
    second = rig.start("/polykv/pools", {"from_session": "me"})
    await until(lambda: rig.runtime.plane.tree.sequences_used == 3)
    assert len(rig.engine.pools) == 2
    rig.engine.snapshot_gate.set()
    one, two = (await first).json, (await second).json
    assert (one["parent"], one["branch_pos"]) == (root.pool_id, 40)
    assert (two["parent"], two["branch_pos"]) == (one["pool_id"], 45)
    await every_cell_has_its_owner(rig)
