"""What both clients have in common: addresses, keys, errors of httpx, connections of loops."""

import asyncio
import subprocess
import sys

import httpx
import pytest

import polykv_proxy.client
import polykv_proxy.langgraph
from client.serving import Scripted
from polykv_proxy.client import calls, errors, transport
from polykv_proxy.client.transport import LoopClients, Target


def test_an_address_may_end_in_v1():
    """As other clients want it."""
    assert Target("http://x:1/v1/").options["base_url"] == "http://x:1"


def test_keys_are_headers():
    """The client's as a bearer token, the admin's in its own header."""
    headers = Target(api_key="a", admin_key="b", headers={"X-More": "c"}).options["headers"]
    assert headers == {"X-More": "c", "Authorization": "Bearer a", "X-PolyKV-Admin-Key": "b"}


@pytest.mark.parametrize(
    ("error", "kind", "sent"),
    [
        (httpx.ConnectError("refused"), errors.ConnectionFailedError, False),
        (httpx.ConnectTimeout("slow"), errors.TimedOutError, False),
        (httpx.PoolTimeout("busy"), errors.TimedOutError, False),
        (httpx.ReadTimeout("slow"), errors.TimedOutError, True),
        (httpx.RemoteProtocolError("hung up"), errors.ConnectionFailedError, True),
        (httpx.ReadError(""), errors.ConnectionFailedError, True),
    ],
)
def test_whether_a_request_may_have_arrived(error, kind, sent):
    """Only what failed before a connection stood has not."""
    found = transport.failure(error)
    assert type(found) is kind
    assert found.sent is sent
    assert found.message


def test_an_answer_that_cannot_be_read_is_the_servers_fault():
    """And the error has the answer."""
    answer = httpx.Response(200, json={"pinned": 1, "no": "id"})
    with pytest.raises(errors.ServerError) as caught:
        transport.result(calls.create_pool(tokens=[1]), answer)
    assert caught.value.response is answer
    with pytest.raises(errors.ServerError):
        transport.rates("[]")


async def test_each_loop_has_its_own_client_and_closes_it():
    """Two ``asyncio.run`` in a row work, and leave no connection behind."""
    async with Scripted((200, {}, {"ok": True})) as server:
        clients = LoopClients(lambda: httpx.AsyncClient(base_url=server.url))

        async def ask():
            first = await clients.get()
            assert await clients.get() is first
            await asyncio.gather(*(first.get("/") for _ in range(3)))
            return first

        used = [await asyncio.to_thread(asyncio.run, ask()) for _ in range(2)]
        assert not clients._clients, "loops that ended are kept alive"
        assert used[0] is not used[1]
        assert all(client.is_closed for client in used)
        await server.all_closed()
        assert server.accepted >= 2


async def test_a_closed_client_is_replaced():
    """Closing is no end."""
    async with Scripted((200, {}, {"ok": True})) as server:
        clients = LoopClients(lambda: httpx.AsyncClient(base_url=server.url))
        await (await clients.get()).get("/")
        await clients.aclose()
        await server.all_closed()
        assert (await (await clients.get()).get("/")).status_code == 200
        await clients.aclose()


IMPORTED = """
import sys
import {module}
ours = [name for name in sys.modules if name.startswith("polykv_proxy.")]
print("\\n".join([*ours, *sys.modules.keys() & {heavy!r}]))
"""
HEAVY = {"aiohttp", "msgspec", "structlog", "uvloop", "pydantic_settings", "prometheus_client", "httptools"}


@pytest.mark.parametrize("package", ["client", "langgraph"])
def test_importing_a_client_loads_nothing_of_the_server(package):
    """In a fresh interpreter, only its own modules are there."""
    script = IMPORTED.format(module=f"polykv_proxy.{package}", heavy=HEAVY)
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    allowed = (
        ("polykv_proxy.client",) if package == "client" else ("polykv_proxy.client", "polykv_proxy.langgraph")
    )
    assert f"polykv_proxy.{package}" in loaded
    assert [name for name in loaded if not name.startswith(allowed)] == []


def test_the_client_needs_nothing_of_langchain():
    """Its extra is httpx alone."""
    script = "import sys, polykv_proxy.client; assert not any(n.startswith('lang') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("package", [polykv_proxy.client, polykv_proxy.langgraph])
def test_every_public_name_says_what_it_is(package):
    """With a docstring of its own, methods too."""
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type):
            assert vars(value).get("__doc__"), name
            for member, method in vars(value).items():
                if callable(method) and not member.startswith("_") and not isinstance(method, type):
                    assert method.__doc__, f"{name}.{member}"
        elif callable(value):
            assert value.__doc__, name
