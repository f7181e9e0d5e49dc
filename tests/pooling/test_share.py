"""Claims about ``pooling.share``: what a request computes becomes a pool as soon as it is there."""

import asyncio

import pytest
from api.rig import until
from pooling.steps import ids, talked

from polykv_proxy.core.slots import Slot
from polykv_proxy.core.types import PoolOrigin, SlotId

PROMPT = ids((1, 40), (2, 10))


async def computing(rig, done):
    """A request whose prompt the engine has computed up to ``done`` tokens; its task and its slot."""
    rig.engine.prefill_gate.clear()
    rig.engine.prefilled = done
    task = rig.start("/completion", {"prompt": PROMPT, "session_id": "me"})
    await until(lambda: rig.engine.running == 1)
    return task, next(slot for slot in rig.runtime.plane.board if not slot.idle)


async def test_a_request_that_has_passed_the_prefix_is_shared_at_once(rig):
    """It still computes the rest; the pool is its first tokens, and came by itself."""
    leader, slot = await computing(rig, 40)
    assert await rig.pooling.share_from(slot, 40)
    (pool,) = rig.runtime.plane.tree
    assert (pool.prefix_len, pool.origin, pool.resident) == (40, PoolOrigin.AUTO, True)
    rig.engine.prefill_gate.set()
    assert (await leader).status == 200


async def test_all_who_wait_for_the_same_request_share_one_snapshot(rig):
    """Three ask before it is there; the engine is asked once."""
    leader, slot = await computing(rig, 10)
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(rig.pooling.share_from(slot, 40)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(wait.done() for wait in waits)
    rig.engine.prefill_gate.set()
    assert await asyncio.gather(*waits) == [True] * 3
    assert len(rig.engine.pools) == len(rig.runtime.plane.tree) == 1
    await leader


@pytest.mark.parametrize("wanted", [51, 60])
async def test_a_request_that_is_over_and_never_came_so_far_is_not_waited_for(rig, wanted):
    """Its slot holds less than what was to be shared, and nothing will change that."""
    await talked(rig)
    slot = rig.runtime.plane.board.slots[0]
    assert not await rig.pooling.share_from(slot, wanted)
    assert await rig.pooling.share_from(slot, 50)


async def test_a_slot_without_a_conversation_is_nobodys_leader(rig):
    """Computing a pool, say."""
    assert not await rig.pooling.share_from(Slot(SlotId(0)), 1)


async def test_nobody_waits_longer_than_its_own_prefill_would_take(rig):
    """By the speed at which the leader was seen to compute; those with more to compute wait on."""
    leader, slot = await computing(rig, 5)
    loop = asyncio.get_running_loop()
    patient = loop.create_task(rig.pooling.share_from(slot, 40, own_tokens=10**9))
    small = loop.create_task(rig.pooling.share_from(slot, 40, own_tokens=1))
    await until(lambda: any(wait.progress._first for wait in rig.pooling.sharing._going.values()))
    assert not small.done()  # nothing was seen to advance: nobody knows how long it would take
    sequence = rig.engine.sequences[slot.slot]
    rig.engine._compute(sequence, PROMPT[:20])
    assert not await small
    assert not patient.done()
    rig.engine.prefill_gate.set()
    assert await patient
    await leader
