"""``PolyKVClient`` against the whole proxy, and against servers that fail."""

import asyncio
import inspect

import httpx
import pytest

from client.serving import Scripted, hang_up, stream
from polykv_proxy.client import (
    AsyncPolyKVClient,
    ConnectionFailedError,
    Patience,
    PolyKVClient,
    PoolNotFoundError,
    PoolSaturatedError,
    ServerError,
    TruncatedStreamError,
)
from polykv_proxy.client.procedures import History

SYSTEM = {"role": "system", "content": "You are a helper with a long system prompt. " * 4}
POOL = {"pool_id": "p", "prefix_len": 9}


async def in_thread(url, work, **options):
    """Work with a client in a thread, while the loop serves."""

    def run():
        with PolyKVClient(url, **options) as client:
            return work(client)

    async with asyncio.timeout(30.0):
        return await asyncio.to_thread(run)


async def test_the_life_of_a_pool(rig):
    """Created, found again, forked, pinned, shown, released."""

    def work(client):
        root = client.create_pool(messages=[SYSTEM], label="root")
        assert root.created
        again = client.create_pool(messages=[SYSTEM])
        assert (again.pool_id, again.created) == (root.pool_id, False)
        child = client.fork_pool(root.pool_id, messages=[SYSTEM, {"role": "user", "content": "More. " * 20}])
        assert child.parent == root.pool_id
        assert client.pin_pool(root.pool_id) is True
        assert client.unpin_pool(root.pool_id) is False
        assert [each.pool_id for each in client.show_pool(root.pool_id).subtree] == [child.pool_id]
        assert {pool.pool_id for pool in client.list_pools().pools} == {root.pool_id, child.pool_id}
        assert client.evict_pool(root.pool_id, subtree=True).evicted == (child.pool_id, root.pool_id)
        assert set(client.release_pool(root.pool_id, recursive=True).released) == {
            root.pool_id,
            child.pool_id,
        }
        assert client.release_pool(root.pool_id).already_released
        with pytest.raises(PoolNotFoundError) as caught:
            client.show_pool("never")
        assert caught.value.code == "pool_not_found"
        assert isinstance(caught.value.response, httpx.Response)

    await in_thread(rig.url, work)


async def test_everything_else_there_is_to_ask(rig):
    """Room, places, sessions, tokens, rates, properties."""

    def work(client):
        pool = client.create_pool(messages=[SYSTEM])
        assert client.set_admission(pool.pool_id, {"mode": "advisory"})["mode"] == "advisory"
        assert client.capacity(pool.pool_id, expected_tokens=5).can_admit
        assert client.wait_for_capacity(pool.pool_id).can_admit
        places = client.reserve(pool.pool_id, sessions=2)
        assert len(set(places.leases)) == 2
        tokens = client.tokenize(messages=[SYSTEM])
        assert (tokens.pool_id, tokens.n_tokens) == (pool.pool_id, pool.prefix_len)
        assert tokens.probe_tokens > tokens.n_tokens
        body = {"messages": [SYSTEM, {"role": "user", "content": "Hello"}]}
        answer = client.chat({**body, "opencoti": {"session_id": "s", "pool_id": pool.pool_id}})
        assert answer.opencoti["pool_id"] == pool.pool_id
        assert [session.session_id for session in client.list_sessions()] == ["s"]
        assert client.rates().of("s").session_id == "s"
        moved = client.migrate_session("s", pool.pool_id)
        assert (moved.session_id, moved.pool_id) == ("s", pool.pool_id)
        assert client.close_session("s").session_id == "s"
        assert client.props()["opencoti"]["capability"] == "zero_copy"

    await in_thread(rig.url, work, api_key="k")


async def test_compaction_moves_a_conversation(rig):
    """The session is known, so it is migrated; its name stays."""

    def work(client):
        root = client.create_pool(messages=[SYSTEM])
        turn = [{"role": "user", "content": "One. " * 9}, {"role": "assistant", "content": "Two. " * 9}]
        client.chat({"messages": [SYSTEM, turn[0]], "opencoti": {"session_id": "s", "pool_id": root.pool_id}})
        done = client.compact_by_refork(
            root.pool_id,
            History(system=[SYSTEM], past=turn, tail=turn),
            session_id="s",
            summary="Short. " * 9,
        )
        assert done.migrated
        assert done.pool.parent == root.pool_id
        assert [session.session_id for session in client.list_sessions()] == ["s"]

    await in_thread(rig.url, work)


async def test_rates_come_as_a_stream(rig):
    """Documents until the block ends; then the connection is closed."""

    def work(client):
        with client.tps_stream() as documents:
            return next(documents), next(documents)

    first, second = await in_thread(rig.url, work)
    assert second.ts >= first.ts
    await asyncio.wait_for(_no_readers(rig), 20.0)


async def _no_readers(rig):
    while rig.tps.readers:
        await asyncio.sleep(0.005)


async def test_a_saturated_server_is_asked_again():
    """After its Retry-After, with the same key: a request that was refused never began."""
    full = (429, {"retry-after": "0"}, {"error": {"code": "pool_saturated", "message": "full"}})
    async with Scripted(full, full, (200, {}, POOL)) as server:
        pool = await in_thread(server.url, lambda client: client.create_pool(tokens=[1], idempotency_key="k"))
        assert pool.pool_id == "p"
        assert [headers["idempotency-key"] for _, headers, _ in server.requests] == ["k"] * 3


async def test_patience_has_an_end():
    """The error has what the server said."""
    full = (429, {"retry-after": "9"}, {"error": {"code": "pool_saturated", "message": "full", "arm": "tps"}})
    async with Scripted(full) as server:
        with pytest.raises(PoolSaturatedError) as caught:
            await in_thread(server.url, lambda client: client.chat({}), patience=Patience(2, max_wait_s=5.0))
        assert (caught.value.retry_after, caught.value.arm, len(server.requests)) == (9.0, "tps", 1)


async def test_a_chat_that_may_have_begun_is_not_sent_again():
    """The connection broke after it was sent; a pool's creation is repeated."""
    async with Scripted(hang_up) as server:
        with pytest.raises(ConnectionFailedError) as caught:
            await in_thread(server.url, lambda client: client.chat({"messages": []}))
        assert caught.value.sent
        assert len(server.requests) == 1
        with pytest.raises(ConnectionFailedError):
            await in_thread(server.url, lambda client: client.create_pool(tokens=[1]))
        assert len(server.requests) == 4


async def test_reservations_have_the_same_key_each_time():
    """The client's own, when none was given."""
    answer = (200, {}, {"pool_id": "p", "leases": ["a"], "expires_in_s": 1.0})
    async with Scripted(hang_up, answer) as server:
        await in_thread(server.url, lambda client: client.reserve("p", sessions=1))
        keys = [headers["idempotency-key"] for _, headers, _ in server.requests]
        assert keys[0] == keys[1]


async def test_a_stream_that_is_refused():
    """The error of the answer, not an empty stream."""

    def work(client):
        with client.tps_stream():
            pass

    async with Scripted((500, {}, {"error": {"message": "bug"}})) as server:
        with pytest.raises(ServerError):
            await in_thread(server.url, work)


async def test_a_client_of_ones_own_stays_open():
    """Whoever made it closes it."""
    async with Scripted((200, {}, POOL)) as server:

        def work():
            with httpx.Client(base_url=server.url) as http:
                with PolyKVClient(http=http) as client:
                    client.create_pool(tokens=[1])
                assert not http.is_closed

        await asyncio.to_thread(work)


def test_both_clients_offer_the_same():
    """Names, arguments and docstrings; only the shell differs."""
    shell = {"close", "aclose", "tps_stream", "chat_stream"}
    blocking, concurrent = (
        {
            name: (str(inspect.signature(method)), inspect.getdoc(method))
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_") and name not in shell
        }
        for kind in (PolyKVClient, AsyncPolyKVClient)
    )
    assert blocking == concurrent
    assert len(blocking) >= 20


async def test_a_chat_as_a_stream(rig):
    """Documents, one by one, to the end marker."""

    def work(client):
        with client.chat_stream({"messages": [SYSTEM, {"role": "user", "content": "Hi"}]}) as documents:
            return list(documents)

    documents = await in_thread(rig.url, work)
    assert any(each["choices"] and each["choices"][0]["finish_reason"] for each in documents)


async def test_a_stream_that_breaks_off_is_an_error():
    """What came until then came; then it is said that there is more."""
    seen = []

    def work(client):
        with client.chat_stream({"messages": []}) as documents:
            seen.extend(documents)

    async with Scripted(stream({"n": 1}, end=b"")) as server:
        with pytest.raises(TruncatedStreamError):
            await in_thread(server.url, work)
        assert len(server.requests) == 1


async def test_a_refused_stream_is_opened_again():
    """It had not begun; what begins afterwards is not repeated."""
    full = (429, {"retry-after": "0"}, {"error": {"code": "queue_full", "message": "full"}})

    def work(client):
        with client.chat_stream({"messages": []}) as documents:
            return list(documents)

    async with Scripted(full, stream({"n": 1})) as server:
        assert await in_thread(server.url, work) == [{"n": 1}]
        assert len(server.requests) == 2
