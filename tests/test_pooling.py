"""Claims about ``pooling``: pools in the engine and in the tree stay one picture."""

import asyncio
import contextlib

import pytest
from api.rig import until

from polykv_proxy import pooling
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import PoolState, Scope, as_tokens
from polykv_proxy.errors import EngineGoneError, SaturatedError, UnavailableError

TOKENS = as_tokens(range(1, 41))
SCOPE = Scope("")


def take_all(rig):
    """Leases on every slot."""
    return [rig.runtime.request(Ask(scope=SCOPE), conversation=False).lease for _ in rig.engine.sequences]


def create(rig, tokens=TOKENS):
    """Ask for a pool on the side."""
    return asyncio.get_running_loop().create_task(rig.pooling.create(tokens, SCOPE, label=None, pin=False))


async def test_a_pool_that_waited_across_a_restart_is_not_computed(rig):
    """Its number belongs to nobody in the new engine: an error, and the next attempt works."""
    take_all(rig)
    task = create(rig)
    await until(lambda: rig.waiting == 1)
    rig.down()
    rig.engine.restart()
    await rig.up()
    with pytest.raises(EngineGoneError):
        await task
    assert not rig.engine.pools
    assert next(iter(rig.runtime.plane.tree)).state is PoolState.LOST
    pool, created, _ = await create(rig)
    assert (pool.resident, created) == (True, True)
    await rig.quiet()


async def test_who_joins_a_pool_that_is_being_given_up_is_told_to_come_again(rig):
    """503, and not the other client's cancellation."""
    rig.engine.pool_gate.clear()
    first = create(rig)
    await until(lambda: rig.engine.running == 1)
    first.cancel()
    second = create(rig)  # runs when the first has left and its computation is about to be cancelled
    with pytest.raises(UnavailableError) as caught:
        await second
    assert caught.value.code == "pool_given_up"
    await rig.quiet()


async def test_a_pool_that_was_computed_after_all_is_released(rig):
    """Given up too late: the engine has it, nobody knows it, and its number must not be lost."""
    rig.engine.pool_gate.clear()
    task = create(rig)
    await until(lambda: rig.engine.running == 1)
    rig.engine.pools[0] = rig.engine.holding(list(TOKENS))  # in this very moment
    task.cancel()
    await rig.quiet()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not rig.engine.pools
    rig.engine.pool_gate.set()
    assert (await create(rig))[0].number == 0


async def test_an_answer_that_is_lost_is_treated_alike(rig):
    """The connection broke, but the engine may have the pool."""
    rig.engine.broken["/polykv/engine/pools/0"] = (200, b"nonsense")
    with pytest.raises(UnavailableError):
        await create(rig)
    assert rig.runtime.plane.tree.sequences_used == 1
    assert rig.idle == 1
    rig.engine.broken.clear()
    rig.engine.pools[0] = rig.engine.holding(list(TOKENS))
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not rig.engine.pools
    await rig.quiet()


async def test_a_refused_pool_frees_its_slot_at_once(rig):
    """The engine answered: it is done, whatever the status."""
    for status in (400, 500, 503):
        rig.engine.broken["/polykv/engine/pools/0"] = (status, b'{"error":{"message":"no"}}')
        with contextlib.suppress(Exception):
            await create(rig)
        assert rig.idle == 2
        assert rig.runtime.plane.tree.sequences_used == 0


async def test_a_full_queue_refuses_pools_too(proxies):
    """The refusal reaches who asked."""
    rig = await proxies(queue={"max_depth": 0})
    take_all(rig)
    with pytest.raises(SaturatedError):
        await create(rig)
    assert len(rig.runtime.plane.tree) == 0


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
    monkeypatch.setattr(pooling, "RELEASE_RETRY_S", (0.01, 0.01))
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
    monkeypatch.setattr(pooling, "RELEASE_RETRY_S", (0.01, 0.01))
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
    await rig.pooling._give_back(pool.number, "an older epoch")
    assert rig.engine.pools
    assert pool.resident


async def test_a_lost_pool_is_released_without_a_call(rig):
    """It holds nothing."""
    pool, _, _ = await create(rig)
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert await rig.pooling.release(pool, recursive=False) == ([pool], 0)
