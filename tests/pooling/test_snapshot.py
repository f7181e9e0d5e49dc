"""Claims about ``pooling.snapshot``: what the engine took is known, whoever asked for it."""

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
