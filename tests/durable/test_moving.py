"""Claims about ``durable.moving``: KV moves to its end, and who waits for that may leave."""

import asyncio

import pytest
from api.rig import CHAT, PATIENT, chat, held_open, until

from durable.test_sessions import keys, turn
from polykv_proxy.core.cells import need_of_pool
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope, SlotId


@pytest.mark.parametrize("why", ["save", "restore", "erase", "read"])
async def test_a_stream_that_waits_for_kv_is_kept_alive(proxies, why):
    """Another's is saved from its slot, its own comes back, its slot is being emptied."""
    rig = await proxies(queue=PATIENT)
    await turn(rig, "a", "y" * 300)
    emptying = None
    if why in ("restore", "read"):
        await turn(rig, "b", "z" * 300)
        await rig.durable.round()
    if why == "read":
        held, check = asyncio.Event(), rig.durable.shelf.check

        async def slow(entry):
            await held.wait()
            return await check(entry)

        rig.durable.shelf.check = slow
    else:
        held = rig.engine.slow["/slots/0"] = asyncio.Event()
    if why == "erase":
        need = need_of_pool(1, None, 0)
        lease = rig.runtime.line.request(Ask(scope=Scope(""), need=need), conversation=False).lease
        emptying = asyncio.create_task(rig.runtime._empty(SlotId(0)))
        await until(lambda: SlotId(0) in rig.runtime.stillness)
        rig.runtime.finish(lease, clean=True, content=Content.OLD)
    name, said = ("c", "first") if why in ("save", "erase") else ("a", "y" * 300)
    async with rig.open(CHAT, chat(name, said, "more", session_id=name, stream=True)) as answer:
        assert (await held_open(answer)).replace(b":\n\n", b"") == b""
        held.set()
        assert b"[DONE]" in await answer.content.read()
    if emptying is not None:
        assert await emptying
    await rig.quiet()


@pytest.mark.parametrize("what", ["save", "restore"])
async def test_who_leaves_while_kv_moves_is_gone_at_once(proxies, what):
    """His slot is kept until it is done; nothing is restored for nobody, and a state is held to the end."""
    rig = await proxies()
    await turn(rig, "a", "y" * 300)
    if what == "restore":
        await turn(rig, "b", "z" * 300)
        await rig.durable.round()
    before = len(rig.engine.moved("restore"))
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    going = rig.runtime._moving
    name, said = ("c", "first") if what == "save" else ("a", "y" * 300)
    asking = rig.start(CHAT, chat(name, said, "more", session_id=name))
    slot = rig.runtime.plane.board.slots[0]
    await until(lambda: going and (len(rig.durable.shelf.saves) or slot.before[0] is None))
    asking.cancel()
    await until(lambda: not going)  # its handler is gone, and the lease is not
    assert rig.idle == 0
    if what == "restore":
        assert [entry.state.key for entry in rig.durable.shelf.catalogue if entry.holds] == ["a"]
    held.set()
    await rig.quiet()
    await rig.durable.shelf.all_over()
    assert len(rig.engine.moved("restore")) == before + (what == "restore")
    assert not any(entry.holds for entry in rig.durable.shelf.catalogue)
    assert rig.durable.shelf.metrics.saves["failed"] == 0
    assert "a" in keys(rig)


async def test_however_often_its_caller_is_cancelled_a_save_goes_to_its_end(proxies):
    """Its slot is kept until then."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves))
    for _ in range(3):
        keeping.cancel()
        await asyncio.sleep(0.01)
        assert not keeping.done()
    assert rig.idle == 0
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await rig.durable.shelf.all_over()
    assert keys(rig) == ["a"]
    assert rig.idle == 1


async def test_a_client_that_leaves_does_not_stop_a_save(proxies):
    """The slot is kept until it is done: a late save would be of another conversation."""
    rig = await proxies()
    await turn(rig, "a", "first")
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    asking = rig.start(CHAT, chat("b", "first", session_id="b"))
    await until(lambda: len(rig.durable.shelf.saves))
    asking.cancel()
    await asyncio.sleep(0.05)
    assert rig.idle == 0
    held.set()
    await rig.quiet()
    await rig.durable.shelf.all_over()
    assert keys(rig) == ["a"]
    (entry,) = rig.durable.shelf.catalogue
    assert await rig.durable.shelf.check(entry)
