"""Claims about ``pooling.room``: what is taken back is free only when the engine says so."""

import asyncio
import contextlib

from api.rig import until
from pooling.steps import create

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
