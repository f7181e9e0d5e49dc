"""Claims about ``pooling.sessions``: conversations end and move with what their slots hold, or not at all."""

import pytest
from api.rig import CHAT, chat, until
from fake_engine import Script
from pooling.steps import SCOPE, create, every_cell_has_its_owner, ids, talked

from polykv_proxy.core.types import as_tokens
from polykv_proxy.errors import ConflictError, NotFoundError, UnavailableError

ME = "me"


async def test_a_session_that_is_closed_frees_what_only_it_held(rig):
    """Its suffix goes, the pool stays; and it is gone for whoever asks."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await talked(rig, pool_id=root.pool_id)
    assert await rig.pooling.sessions.close(ME, SCOPE) == (10, False)
    assert rig.engine.used == 40
    with pytest.raises(NotFoundError):
        await rig.pooling.sessions.close(ME, SCOPE)
    await every_cell_has_its_owner(rig)


async def test_a_session_that_is_resident_nowhere_frees_nothing(proxies):
    """It is over all the same."""
    rig = await proxies(slots=1)
    await talked(rig)
    await talked(rig, "you", cache_prompt=False)
    assert await rig.pooling.sessions.close(ME, SCOPE) == (0, False)
    assert rig.engine.used == 50


async def test_a_running_session_is_neither_closed_nor_moved(rig):
    """Its request is somebody's: 409, nothing happens to it."""
    root, _, _ = await create(rig, as_tokens(ids((1, 40))))
    rig.engine.gate.clear()
    task = rig.start("/completion", {"prompt": ids((1, 40), (2, 10)), "session_id": ME})
    await until(lambda: rig.engine.running)
    for action in (rig.pooling.sessions.close(ME, SCOPE), rig.pooling.sessions.migrate(ME, SCOPE, root)):
        with pytest.raises(ConflictError) as caught:
            await action
        assert caught.value.code == "session_running"
    rig.engine.gate.set()
    assert (await task).status == 200


async def test_a_session_that_is_closed_while_its_request_is_stopped_is_closed(rig):
    """Its client left just before: what was computed is given up, and nobody goes on from it."""
    rig.engine.script = Script(tokens=100, token_delay_s=5.0)
    body = {"prompt": ids((1, 40), (2, 10)), "session_id": ME, "stream": True}
    async with rig.open("/completion", body) as answer:
        await answer.content.readany()
        (session,) = rig.runtime.plane.sessions
        rig.engine.broken["/polykv/engine/counters"] = (503, b"{}")  # nobody sees that it is over
    await until(lambda: not session.running)
    assert rig.idle == 1
    assert await rig.pooling.sessions.close(ME, SCOPE) == (0, False)
    rig.engine.broken.clear()
    await rig.quiet()
    assert rig.engine.used == 0
    assert all((slot.session, slot.chain) == (None, ()) for slot in rig.runtime.plane.board)
    rig.engine.script = Script()
    answer = await rig.ask("/completion", body | {"stream": False})
    assert answer.json["timings"]["cache_n"] == 0


@pytest.mark.parametrize("name", [{"session_id": ME}, {}])
async def test_the_next_request_of_a_session_that_moves_attaches_to_the_new_pool(proxies, name):
    """Under the same id, with a name and without, and only once; what it held before is free."""
    rig = await proxies(pools={"auto_match": False})
    new = await rig.pool()
    await rig.ask(CHAT, chat("hi", **name))
    (session,) = rig.runtime.plane.sessions
    pool = rig.runtime.plane.pools.find(new["pool_id"], SCOPE)
    freed = await rig.pooling.sessions.migrate(session.session_id, SCOPE, pool)
    assert (freed > 0, rig.engine.used) == (True, pool.prefix_len)
    answer = await rig.ask(CHAT, chat("hi", "more", **name))
    assert (answer.headers["x-pool-id"], answer.headers["x-session-id"]) == (
        pool.pool_id,
        session.session_id,
    )
    assert answer.headers["x-cached-prefix-tokens"] == str(pool.prefix_len)
    assert (session.pool, session.moves_to, session.turns) == (pool.pool_id, None, 2)
    assert "x-pool-id" not in (await rig.ask(CHAT, chat("hi", "more", "and", **name))).headers
    await every_cell_has_its_owner(rig)


async def test_a_session_that_moves_may_begin_differently(rig):
    """That is what it moves for: its name tells that it is the same."""
    await talked(rig)
    pool, _, _ = await create(rig, as_tokens(ids((5, 40))))
    await rig.pooling.sessions.migrate(ME, SCOPE, pool)
    answer = await rig.ask("/completion", {"prompt": ids((5, 40), (2, 10)), "session_id": ME})
    assert (answer.headers["x-pool-id"], answer.headers["x-session-id"]) == (pool.pool_id, ME)


async def test_a_session_moves_to_a_pool_that_was_evicted(rig):
    """It is computed again first."""
    await talked(rig)
    pool, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await rig.pooling.evict(pool, flush=False)
    await rig.pooling.sessions.migrate(ME, SCOPE, rig.runtime.plane.tree.get(pool.pool_id))
    assert rig.runtime.plane.tree.get(pool.pool_id).resident


async def test_a_move_that_fails_changes_nothing(rig):
    """Neither without the pool nor without the slot: the session goes on as it was."""
    await talked(rig)
    pool, _, _ = await create(rig, as_tokens(ids((1, 40))))
    before = rig.engine.used
    path = f"/slots/{rig.runtime.plane.sessions.get(ME, SCOPE).slot}"
    rig.engine.broken[path] = (501, b"{}")
    with pytest.raises(UnavailableError):
        await rig.pooling.sessions.migrate(ME, SCOPE, pool)
    rig.engine.broken.clear()
    rig.down()
    with pytest.raises(ConflictError) as caught:
        await rig.pooling.sessions.migrate(ME, SCOPE, pool)
    assert caught.value.code == "slot_busy"
    await rig.up()
    await rig.pooling.release(pool, recursive=False)
    with pytest.raises(ConflictError):
        await rig.pooling.sessions.migrate(ME, SCOPE, pool)
    session = rig.runtime.plane.sessions.get(ME, SCOPE)
    assert (session.moves_to, rig.engine.used) == (None, before - 40)


async def test_a_pool_that_went_before_the_next_request_is_no_error(rig):
    """The request runs without it, and the next one does not look for it again."""
    await talked(rig)
    pool, _, _ = await create(rig, as_tokens(ids((1, 40))))
    await rig.pooling.sessions.migrate(ME, SCOPE, pool)
    await rig.pooling.release(pool, recursive=False)
    answer = await rig.ask("/completion", {"prompt": ids((1, 40), (2, 10), (3, 5)), "session_id": ME})
    assert answer.status == 200
    assert "x-pool-id" not in answer.headers
    assert rig.runtime.plane.sessions.get(ME, SCOPE).moves_to is None
