"""``AsyncPolyKVClient``: what asyncio adds. That both clients offer the same is tested with the other one."""

import asyncio

import pytest

from client.serving import Scripted, hang_up, stream
from polykv_proxy.client import (
    AsyncPolyKVClient,
    ConnectionFailedError,
    PoolNotFoundError,
    PoolSaturatedError,
    ServerError,
    TruncatedStreamError,
)
from polykv_proxy.client.procedures import History

SYSTEM = {"role": "system", "content": "You are a helper with a long system prompt. " * 4}


async def test_the_life_of_a_pool(rig):
    """Created, found again, shown, released; several at once."""
    async with AsyncPolyKVClient(rig.url) as client:
        pools = await asyncio.gather(*(client.create_pool(messages=[SYSTEM]) for _ in range(3)))
        assert len({pool.pool_id for pool in pools}) == 1
        assert (await client.show_pool(pools[0].pool_id)).prefix_len == pools[0].prefix_len
        assert (await client.release_pool(pools[0].pool_id)).released == (pools[0].pool_id,)
        with pytest.raises(PoolNotFoundError):
            await client.show_pool(pools[0].pool_id)


async def test_procedures(rig):
    """Errors are thrown into them: the ancestor was never there, and is made."""
    turn = [{"role": "user", "content": "One. " * 9}, {"role": "assistant", "content": "Two. " * 9}]
    async with AsyncPolyKVClient(rig.url) as client:
        assert (await client.wait_for_capacity()).can_admit
        done = await client.compact_by_refork(
            "never", History(system=[SYSTEM], past=turn, tail=turn), summary="Short. " * 9, session_id="s"
        )
        assert done.pool.created
        assert not done.migrated


async def test_waiting_for_room_ends():
    """And sleeps in between, instead of asking at once."""
    full = (200, {}, {"can_admit": False, "retry_after_s": 1, "reason": "queue full"})
    async with Scripted(full) as server, AsyncPolyKVClient(server.url) as client:
        with pytest.raises(PoolSaturatedError, match="queue full"):
            await client.wait_for_capacity(max_wait_s=1.5)
        assert len(server.requests) == 2


async def test_rates_come_as_a_stream(rig):
    """Documents until the block ends; then the connection is closed."""
    async with AsyncPolyKVClient(rig.url) as client:
        async with client.tps_stream() as documents:
            first = await anext(documents)
            assert (await anext(documents)).ts >= first.ts
        async with asyncio.timeout(20.0):
            while rig.tps.readers:
                await asyncio.sleep(0.005)


async def test_a_stream_that_is_refused():
    """The error of the answer."""
    async with Scripted((500, {}, {"error": {"message": "bug"}})) as server:
        async with AsyncPolyKVClient(server.url) as client:
            with pytest.raises(ServerError):
                async with client.tps_stream():
                    pass


async def test_a_chat_that_may_have_begun_is_not_sent_again():
    """The connection broke after it was sent."""
    async with Scripted(hang_up) as server, AsyncPolyKVClient(server.url) as client:
        with pytest.raises(ConnectionFailedError):
            await client.chat({"messages": []})
        assert len(server.requests) == 1


async def test_two_loops_in_a_row_leave_nothing_behind():
    """One client object, two ``asyncio.run``; nobody closes it."""
    async with Scripted((200, {}, {"pool_id": "p", "prefix_len": 1})) as server:
        client = AsyncPolyKVClient(server.url)

        async def ask():
            return await asyncio.gather(*(client.create_pool(tokens=[1]) for _ in range(3)))

        for _ in range(2):
            await asyncio.to_thread(asyncio.run, ask())
        await server.all_closed()


async def test_a_call_that_is_cancelled_leaves_nothing_behind():
    """The proxy sees the client leave."""
    waiting = asyncio.Event()

    async def never(reader, writer):
        waiting.set()
        await reader.read()
        return False

    async with Scripted(never) as server, AsyncPolyKVClient(server.url) as client:
        call = asyncio.ensure_future(client.create_pool(tokens=[1]))
        await waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.all_closed()


async def test_a_stream_that_is_left_closes_its_connection():
    """In the middle of the answer, by an exception of the reader's."""
    waiting = asyncio.Event()
    async with Scripted(stream({"n": 1}, hold=waiting)) as server, AsyncPolyKVClient(server.url) as client:

        async def leave():
            async with client.chat_stream({"messages": []}) as documents:
                async for document in documents:
                    raise ZeroDivisionError(document)

        with pytest.raises(ZeroDivisionError):
            await leave()
        await server.all_closed()


async def test_streams_are_complete_or_an_error():
    """With and without the end marker; a refusal is waited for."""
    full = (429, {"retry-after": "0"}, {"error": {"code": "queue_full", "message": "full"}})
    script = (full, stream({"n": 1}), stream({"n": 1}, end=b""))
    async with Scripted(*script) as server, AsyncPolyKVClient(server.url) as client:
        async with client.chat_stream({"messages": []}) as documents:
            assert [document async for document in documents] == [{"n": 1}]
        with pytest.raises(TruncatedStreamError):
            async with client.chat_stream({"messages": []}) as documents:
                assert [document async for document in documents]
