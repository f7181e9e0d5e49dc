"""Claims about ``pooling.tend``: lifetimes end, and what an answer that was lost left behind is found."""

import asyncio

from api.rig import until
from pooling.steps import SCOPE, TOKENS, create, every_cell_has_its_owner, ids, talked

from polykv_proxy.core.types import PoolNumber, as_tokens
from polykv_proxy.errors import UnavailableError


async def ended(rig, ttl_s, **pool):
    """A pool with that lifetime, that was last used two seconds ago."""
    made, _, _ = await rig.pooling.create(TOKENS, SCOPE, label=None, pin=False, ttl_s=ttl_s, **pool)
    made.last_access_ts -= 2.0
    return made


async def test_a_pool_is_released_when_its_lifetime_is_over(rig):
    """Its id is gone and its cells are free."""
    made = await ended(rig, 1.0)
    await rig.pooling.tender.round()
    assert rig.runtime.plane.pools.find(made.pool_id, SCOPE) is None
    assert rig.runtime.plane.tree.was_released(made.pool_id)
    assert rig.engine.used == 0


async def test_a_lifetime_does_not_end_while_a_session_rests_on_the_pool(rig):
    """It begins anew when the session is over."""
    made, _, _ = await rig.pooling.create(as_tokens(ids((1, 40))), SCOPE, label=None, pin=False, ttl_s=1.0)
    await talked(rig, pool_id=made.pool_id)
    made.last_access_ts -= 100.0
    await rig.runtime.readings.take(max_age_s=0.0)
    await rig.pooling.tender.round()
    assert made.resident
    assert (await rig.ask("/polykv/sessions/me/close", {})).status == 200
    await rig.runtime.readings.take(max_age_s=0.0)
    await rig.pooling.tender.round()
    assert made.resident
    made.held_ts -= 100.0
    await rig.pooling.tender.round()
    assert not made.resident


async def test_a_pool_that_nobody_knows_of_is_released(rig):
    """Under a number that is free here; pools of ours stay."""
    made, _, _ = await create(rig)
    rig.engine.pools[1] = rig.engine.holding(ids((5, 10)))
    await rig.runtime.readings.take(max_age_s=0.0)
    await rig.pooling.tender.round()
    await until(lambda: list(rig.engine.pools) == [made.number])
    await until(lambda: rig.runtime.plane.tree.sequences_used == 1)


async def test_what_a_lost_snapshot_left_behind_is_taken_back(rig, monkeypatch):
    """The engine took it and its answer never came: number and slot are freed, the sum is right."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    take = rig.runtime.client.snapshot

    async def lost(*args):
        await take(*args)
        raise UnavailableError("no answer in time", code="engine_timeout")

    monkeypatch.setattr(rig.runtime.client, "snapshot", lost)
    assert (await rig.ask("/polykv/pools", {"from_session": "me"})).status == 503
    await until(lambda: rig.runtime.plane.tree.sequences_used == len(rig.engine.pools) == 1)
    await rig.runtime.readings.take(max_age_s=0.0)
    assert rig.runtime.plane.ownership.unattributed != 0
    await rig.pooling.tender.round()
    await every_cell_has_its_owner(rig)
    assert rig.engine.used == root.prefix_len
    answer = await rig.ask("/completion", {"prompt": ids((1, 40), (2, 10)), "session_id": "me"})
    assert answer.status == 200
    await every_cell_has_its_owner(rig)


async def test_what_somebody_works_with_is_left_alone(rig):
    """A snapshot that is on its way is no stray."""
    await talked(rig)
    rig.engine.snapshot_gate.clear()
    task = rig.start("/polykv/pools", {"from_session": "me"})
    await until(lambda: rig.engine.pools)
    await rig.runtime.readings.take(max_age_s=0.0)
    await rig.pooling.tender.round()
    await asyncio.sleep(0.01)
    assert list(rig.engine.pools) == [PoolNumber(0)]
    rig.engine.snapshot_gate.set()
    assert (await task).status == 201
    assert rig.engine.sequences[0].tokens
    await every_cell_has_its_owner(rig)


async def test_it_goes_round_by_itself(rig):
    """As part of every proxy."""
    made = await ended(rig, 1.0)
    await until(lambda: not made.resident)


async def test_an_orphaned_pin_is_named_and_stays(rig):
    """CTX-8: nobody decided that it may go; it is counted and listed."""
    made, _, _ = await rig.pooling.create(TOKENS, SCOPE, label=None, pin=True)
    made.last_access_ts -= 1e6
    await rig.pooling.tender.round()
    assert (made.resident, made.orphan_ts is not None) == (True, True)
    made.orphan_ts -= 1e6
    await rig.pooling.tender.round()
    assert made.resident
    listed = (await rig.ask("/polykv/pools?orphans=1")).json
    assert [pool["pool_id"] for pool in listed["pools"]] == [made.pool_id]
    assert rig.runtime.plane.orphans() == [made]


async def test_an_orphan_is_released_after_its_time(proxies):
    """CTX-8: a branch from its leaf up, each in its time; one that a session rests on stays."""
    rig = await proxies(max_pools=4, pools={"orphan_ttl_s": 5.0})
    root, _, _ = await rig.pooling.create(TOKENS, SCOPE, label=None, pin=True)
    longer = as_tokens([*TOKENS, *ids((7, 10))])
    leaf, _, _ = await rig.pooling.create(longer, SCOPE, label=None, pin=True, parent=root, branch_pos=40)
    other, _, _ = await rig.pooling.create(as_tokens(ids((1, 40))), SCOPE, label=None, pin=True)
    await talked(rig, pool_id=other.pool_id)
    for pool in (root, leaf, other):
        pool.last_access_ts -= 100.0
    for gone, left in ((leaf, {root, other}), (root, {other})):
        await rig.pooling.tender.round()
        assert gone.resident
        gone.orphan_ts -= 100.0
        for node in (root, leaf):
            node.held_ts = None
        await rig.pooling.tender.round()
        assert not gone.resident
        assert set(rig.runtime.plane.tree) == left
    assert rig.runtime.plane.tree.was_released(leaf.pool_id)
    assert rig.runtime.metrics.orphans_released == 2
    await every_cell_has_its_owner(rig)
