"""Claims about ``pooling``: pools in the engine and in the tree stay one picture."""

import asyncio
import contextlib

import pytest
from api.rig import until

from polykv_proxy import pooling
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import PoolState, Scope, as_tokens
from polykv_proxy.errors import EngineGoneError, PoolCapacityError, SaturatedError, UnavailableError

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


# -- snapshots --------------------------------------------------------------------------------------------


def ids(*runs):
    """Token ids: so many of each."""
    return [number for number, count in runs for _ in range(count)]


async def talked(rig, name="me", **more):
    """A session whose slot holds 50 tokens."""
    body = {"prompt": ids((1, 40), (2, 10)), "session_id": name, **more}
    assert (await rig.ask("/completion", body)).status == 200


async def slow_snapshot(rig, **body):
    """A snapshot that the engine has taken and not answered yet."""
    rig.engine.snapshot_gate.clear()
    before = len(rig.engine.pools)
    task = rig.start("/polykv/pools", {"from_session": "me"} | body)
    await until(lambda: len(rig.engine.pools) > before)
    return task


async def every_cell_has_its_owner(rig):
    """At rest nothing is unattributed, and sequence ids are those of the engine's pools."""
    await rig.quiet()
    await until(lambda: rig.runtime.plane.tree.sequences_used == len(rig.engine.pools))
    await rig.runtime.sample(max_age_s=0.0)
    assert rig.runtime.plane.ownership.unattributed == 0


async def test_a_slot_that_is_taken_while_its_snapshot_is_on_the_way_makes_no_pool(proxies):
    """409: the engine may have taken the other conversation; what it made is given back."""
    rig = await proxies(slots=1)
    await talked(rig)
    task = await slow_snapshot(rig)
    await rig.ask("/completion", {"prompt": "somebody else", "session_id": "you"})
    rig.engine.snapshot_gate.set()
    answer = await task
    assert (answer.status, answer.error["code"]) == (409, "session_not_resident")
    await every_cell_has_its_owner(rig)
    assert len(rig.runtime.plane.tree) == len(rig.engine.pools) == 0


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


async def test_a_pool_is_not_made_of_another_ones_cells(proxies):
    """A slot that rides on a pool is emptied before it computes one: else the engine would go on from it."""
    rig = await proxies(slots=1, max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    other, _, done = await create(rig, as_tokens(ids((1, 40), (3, 10))))
    assert (other.parent, done.timings.prompt_n) == (None, 50)
    await every_cell_has_its_owner(rig)
    assert rig.engine.used == 90


async def test_a_child_waits_for_a_parent_that_is_being_computed(proxies):
    """Two requests bring a chain back at once: each pool is computed once and keeps its place."""
    rig = await proxies(max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    child, _, _ = await rig.pooling.create(
        as_tokens(ids((1, 40), (2, 10))), SCOPE, label=None, pin=False, parent=root, branch_pos=40
    )
    tree = rig.runtime.plane.tree
    await rig.pooling.evict(root, flush=True)
    rig.engine.pool_gate.clear()
    loop = asyncio.get_running_loop()
    one = loop.create_task(rig.pooling.ensure_resident(tree.get(root.pool_id)))
    await until(lambda: rig.engine.running == 1)
    two = loop.create_task(rig.pooling.ensure_resident(tree.get(child.pool_id)))
    await asyncio.sleep(0.01)
    rig.engine.pool_gate.set()
    assert (await two).parent is await one
    assert rig.engine.used == 50


async def test_a_child_whose_parent_cannot_be_had_stays_evicted(rig, monkeypatch):
    """A request goes on without it; nothing of the chain is computed."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    child, _, _ = await rig.pooling.create(
        as_tokens(ids((1, 40), (2, 10))), SCOPE, label=None, pin=False, parent=root, branch_pos=40
    )
    await rig.pooling.evict(root, flush=True)
    begin = rig.runtime.plane.begin_pool

    def no_room(tokens, *args, **options):
        if tokens == root.tokens:
            raise PoolCapacityError("no room")
        return begin(tokens, *args, **options)

    monkeypatch.setattr(rig.runtime.plane, "begin_pool", no_room)
    below = rig.runtime.plane.tree.get(child.pool_id)
    assert await rig.pooling.revive(below) is None
    assert (below.state, below.branch_pos) == (PoolState.EVICTED, 40)
    assert rig.engine.used == 0
    await every_cell_has_its_owner(rig)
