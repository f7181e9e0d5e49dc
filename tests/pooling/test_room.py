"""Claims about ``pooling.room``: what is taken back is free only when the engine says so."""

import asyncio
import contextlib

from api.rig import until
from pooling.steps import SCOPE, create, every_cell_has_its_owner, ids, talked

from polykv_proxy.core.types import as_tokens
from polykv_proxy.pooling import room


async def test_a_release_goes_on_when_its_client_leaves(rig):
    """Every number of the subtree comes back, and the engine holds none of it."""
    pool, _, _ = await create(rig)
    other, _, _ = await create(rig, as_tokens(range(50, 90)))
    pool.children.append(other)
    other.parent = pool
    task = asyncio.get_running_loop().create_task(rig.pooling.release(pool, recursive=True))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not rig.engine.pools


async def test_a_release_that_fails_is_tried_again(rig, monkeypatch):
    """The id is gone at once; the number stays taken as long as the engine may have something under it."""
    monkeypatch.setattr(room, "RELEASE_RETRY_S", (0.01, 0.01))
    pool, _, _ = await create(rig)
    path = f"/polykv/engine/pools/{pool.number}"
    rig.engine.broken[path] = (500, b"?")
    gone, freed = await rig.pooling.release(pool, recursive=False)
    assert (gone, freed) == ([pool], 0)
    tried = len([request for request in rig.engine.requests if request.path == path])
    await until(lambda: len([request for request in rig.engine.requests if request.path == path]) > tried + 1)
    assert rig.runtime.plane.tree.sequences_used == 1
    other, _, _ = await create(rig, as_tokens(range(50, 90)))
    assert other.number != pool.number
    del rig.engine.broken[path]
    await until(lambda: rig.runtime.plane.tree.sequences_used == 1)
    assert list(rig.engine.pools) == [other.number]


async def test_a_release_that_fails_ends_with_the_engine(rig, monkeypatch):
    """A new one has nothing, and its numbers are others' business."""
    monkeypatch.setattr(room, "RELEASE_RETRY_S", (0.01, 0.01))
    pool, _, _ = await create(rig)
    rig.engine.broken[f"/polykv/engine/pools/{pool.number}"] = (500, b"?")
    await rig.pooling.release(pool, recursive=False)
    rig.down()
    rig.engine.restart()
    rig.engine.broken.clear()
    await rig.up()
    other, _, _ = await create(rig)
    await asyncio.sleep(0.1)
    assert other.resident
    assert list(rig.engine.pools) == [other.number]


async def test_a_release_does_not_touch_another_engine(rig):
    """The numbers of the old one may be somebody's in the new one."""
    pool, _, _ = await create(rig)
    await rig.pooling.room.give_back(pool.number, "an older epoch")
    assert rig.engine.pools
    assert pool.resident


async def test_a_lost_pool_is_released_without_a_call(rig):
    """It holds nothing."""
    pool, _, _ = await create(rig)
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert await rig.pooling.release(pool, recursive=False) == ([pool], 0)


async def ridden(rig):
    """A pool that a session rests on, released."""
    made, _, _ = await rig.pooling.create(as_tokens(ids((1, 40))), SCOPE, label="x", pin=True)
    await talked(rig, pool_id=made.pool_id)
    gone, freed = await rig.pooling.release(made, recursive=False)
    assert (gone, freed) == ([made], 0)
    assert rig.runtime.plane.pools.find(made.pool_id, SCOPE) is None
    return made


async def test_a_released_pool_that_is_held_stays_for_a_grace(rig):
    """POOL-9: its id is gone at once, its cells a grace after the last holder left."""
    made = await ridden(rig)
    await rig.pooling.tender.round()
    assert rig.engine.used == 50
    answer = await rig.ask("/completion", {"prompt": ids((1, 40), (2, 10), (3, 5)), "pool_id": made.pool_id})
    assert answer.json["opencoti"]["pool_unknown"] is True
    await rig.ask("/polykv/sessions/me/close", {})
    for session in list(rig.runtime.plane.sessions):
        await rig.pooling.sessions.close(session.session_id, None)
    await rig.pooling.tender.round()
    assert rig.engine.used == 40
    await every_cell_has_its_owner(rig)
    made.held_ts = made.last_access_ts = made.held_ts - 100.0
    await rig.pooling.tender.round()
    assert rig.engine.used == 0
    await every_cell_has_its_owner(rig)


async def test_the_same_content_takes_up_what_lingers(rig):
    """POOL-9: under its old id, and nothing is computed; what was asked of it before counts no more."""
    made = await ridden(rig)
    before = len([request for request in rig.engine.requests if "materialize" in request.query])
    again, created, work = await create(rig, as_tokens(ids((1, 40))))
    assert (again, created, work) == (made, False, None)
    assert (again.pinned, again.label, again.resident) == (False, None, True)
    after = len([request for request in rig.engine.requests if "materialize" in request.query])
    assert after == before
    await rig.pooling.tender.round()
    assert again.resident
    await every_cell_has_its_owner(rig)


async def test_what_lingers_makes_room_first(proxies):
    """POOL-9: for a sequence id, and for cells; the session that rests on it keeps its own."""
    rig = await proxies(max_pools=1)
    made = await ridden(rig)
    other, created, _ = await create(rig)
    assert (created, other.number, made.lingers) == (True, made.number, False)
    assert rig.engine.used == other.prefix_len + 50
    await every_cell_has_its_owner(rig)
    assert await rig.pooling.room.reclaim(made.pool_id)
    await rig.pooling.release(other, recursive=False)

    made = await ridden(rig)
    assert made.lingers
    assert await rig.pooling.room.reclaim(made.pool_id)
    assert not made.lingers
    await every_cell_has_its_owner(rig)


async def test_no_grace_unless_the_policy_grants_one(proxies):
    """Then the number is free at once, and the cells with their last holder."""
    rig = await proxies(pools={"grace_s": 0.0})
    made = await ridden(rig)
    assert not made.lingers
    assert rig.runtime.plane.tree.sequences_used == 0
    await rig.ask("/polykv/sessions/me/close", {})
    assert rig.engine.used == 0


async def test_a_grace_that_was_ended_ends_whoever_leaves(proxies):
    """The client for whose pool it made room is gone; the number comes back all the same."""
    rig = await proxies(max_pools=1)
    made = await ridden(rig)
    path = f"/polykv/engine/pools/{made.number}"
    rig.engine.slow[path] = asyncio.Event()
    task = create(rig)
    await until(lambda: not made.lingers)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    rig.engine.slow.pop(path).set()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not rig.engine.pools
