"""Claims about ``pooling.materialize``: a pool is computed once, and known wherever it may be."""

import asyncio
import contextlib

import pytest
from api.rig import until
from pooling.steps import SCOPE, TOKENS, create, every_cell_has_its_owner, ids, talked

from polykv_proxy import runtime
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import PoolState, SlotId, as_tokens
from polykv_proxy.errors import (
    EngineGoneError,
    PolyKVError,
    PoolCapacityError,
    SaturatedError,
    UnavailableError,
)
from polykv_proxy.saver import NoSaver


async def test_a_pool_that_waited_across_a_restart_is_not_computed(rig):
    """Its number belongs to nobody in the new engine: an error, and the next attempt works."""
    rig.take_all()
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


async def test_an_answer_that_is_lost_is_treated_alike(rig, monkeypatch):
    """The connection broke, but the engine may have the pool."""
    monkeypatch.setattr(runtime, "LAUNCH_GRACE_S", 0.2)
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


@pytest.mark.parametrize("status", [400, 503])
async def test_a_refused_pool_leaves_the_conversation_whose_slot_it_was_to_use(proxies, status):
    """CTX-5: the engine refuses before it touches the slot; one that began is another matter."""
    rig = await proxies(slots=1)
    await talked(rig)
    rig.engine.broken["/polykv/engine/pools/0"] = (status, b'{"error":{"message":"no"}}')
    with pytest.raises(PolyKVError):
        await create(rig)
    await rig.quiet()
    (session,) = rig.runtime.plane.sessions
    assert session.slot == 0
    assert rig.engine.used == 50
    await every_cell_has_its_owner(rig)
    rig.engine.sequences[0].tag = 99  # what the next lease is going to have
    rig.runtime.plane.leases._next_lease = 99
    with pytest.raises(PolyKVError):
        await create(rig)
    await rig.quiet()
    assert session.slot is None


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
    rig.take_all()
    with pytest.raises(SaturatedError):
        await create(rig)
    assert len(rig.runtime.plane.tree) == 0


async def test_a_pool_is_not_made_of_another_ones_cells(proxies):
    """A slot that rides on a pool is emptied before it computes one: else the engine would go on from it."""
    rig = await proxies(slots=1, max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    other, _, done = await create(rig, as_tokens(ids((1, 40), (3, 10))))
    assert (other.parent, done.timings.prompt_n) == (None, 50)
    await every_cell_has_its_owner(rig)
    assert rig.engine.used == 90


async def test_a_child_whose_parent_goes_while_it_waits_is_not_made_of_its_cells(proxies):
    """It owns all it has then: what its slot shares with the parent's rest would be counted twice."""
    rig = await proxies(slots=2, max_pools=3)
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    for name in ("one", "other"):
        await talked(rig, name, pool_id=root.pool_id)
    first, _ = leases = rig.take_all()
    making = asyncio.get_running_loop().create_task(
        rig.pooling.create(
            as_tokens(ids((1, 40), (3, 10))), SCOPE, label=None, pin=False, parent=root, branch_pos=40
        )
    )
    await until(lambda: rig.waiting == 1)
    rig.runtime.plane.tree.evict(root)
    await rig.pooling.room.take_back(root.number, rig.runtime.epoch)
    rig.runtime.finish(first, clean=True, content=Content.OLD)
    child, _, _ = await making
    rig.runtime.finish(leases[1], clean=True, content=Content.OLD)
    assert child.parent is None
    await every_cell_has_its_owner(rig)


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
    begin = rig.runtime.plane.pools.enter

    def no_room(tokens, *args, **options):
        if tokens == root.tokens:
            raise PoolCapacityError("no room")
        return begin(tokens, *args, **options)

    monkeypatch.setattr(rig.runtime.plane.pools, "enter", no_room)
    below = rig.runtime.plane.tree.get(child.pool_id)
    assert await rig.pooling.revive(below) is None
    assert (below.state, below.branch_pos) == (PoolState.EVICTED, 40)
    assert rig.engine.used == 0
    await every_cell_has_its_owner(rig)


async def test_idle_conversations_make_room_for_a_pool(proxies):
    """Those that were out of use for longest first, and no more of them than it takes."""
    rig = await proxies(slots=3, cells=200)
    for name in ("oldest", "older", "latest"):
        await talked(rig, name, max_tokens=8)
        await rig.quiet()
    plane = rig.runtime.plane
    pool, created, _ = await create(rig, as_tokens(range(101, 201)))
    assert (created, pool.resident) == (True, True)
    await rig.quiet()
    assert rig.engine.used <= 200
    resident = [plane.sessions.get(name, SCOPE).slot is not None for name in ("oldest", "older", "latest")]
    assert resident == [False, False, True]


async def test_a_pool_that_does_not_fit_beside_those_who_run_is_refused(rig):
    """Nothing that runs is touched; the next in need may have better luck."""
    rig.engine.cells = len(TOKENS) - 1
    with pytest.raises(UnavailableError, match="not enough free KV cells") as caught:
        await create(rig)
    assert caught.value.code == "cells_exhausted"
    await rig.quiet()
    assert rig.runtime.plane.tree.sequences_used == 0
    rig.engine.cells = 4096
    assert (await create(rig))[1]


async def test_what_a_pool_displaces_is_saved_only_when_nobody_else_is_at_it(rig):
    """Its slot is being emptied for its cells: what is saved of it then would be nothing."""
    order = []

    class Noting(NoSaver):
        async def before_request(self, lease, tokens, held):
            order.append("saved")

    rig.runtime.saver = Noting()
    async with rig.runtime.stillness.of(SlotId(0)), rig.runtime.stillness.of(SlotId(1)):
        task = create(rig)
        await until(lambda: rig.idle < len(rig.engine.sequences))
        await asyncio.sleep(0.02)
        order.append("emptied")
    await task
    assert order == ["emptied", "saved"]
