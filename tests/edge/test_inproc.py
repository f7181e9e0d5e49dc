"""Claims about ``edge.inproc``: an aiohttp application is an upstream like any other."""

import asyncio

import pytest
from aiohttp import web

from edge.wire import get, post, until
from polykv_proxy.edge import InProcess, relay
from polykv_proxy.errors import EngineGoneError


@pytest.fixture
async def plane(rig):
    """An application behind an edge: (port, application's notes)."""
    notes = {"cancelled": 0, "begun": asyncio.Event(), "remote": []}

    async def echo(request):
        notes["remote"].append(request.remote)
        return web.Response(body=await request.read(), headers={"X-Path": request.path_qs})

    async def events(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        notes["begun"].set()
        try:
            await asyncio.Event().wait()
        finally:
            notes["cancelled"] += 1
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/echo", echo)
    app.router.add_get("/events", events)
    async with InProcess(app) as plane:

        async def handler(exchange):
            head = exchange.head
            response = await plane.upstream.send(head.method, head.target, head.headers, exchange.body)
            await relay(exchange, response)

        yield await rig.edge(handler), notes, plane


async def test_requests_reach_the_application(rig, plane):
    """Method, path, query and bodies of any size go through, over kept connections."""
    port, _, inproc = plane
    client = await rig.client(port)
    for body in (b"", b"{}", bytes(12 << 20)):
        await client.send(post(body, target=b"/echo?a=b"))
        message = await client.read_message()
        assert (message.status, message.field(b"x-path")) == (200, b"/echo?a=b")
        assert message.body == body
    for _ in range(3):
        await client.send(get(b"/echo"))
        assert (await client.read_message()).status == 200
    await client.send(get(b"/absent"))
    assert (await client.read_message()).status == 404
    assert inproc.upstream.connections == 2  # one more for the body that did not fit into a read


@pytest.mark.parametrize(
    "head",
    [
        get(b"/echo?" + b"x" * 20_000),
        get(b"/echo", *(b"X-Field-%d: v" % number for number in range(300))),
        get(b"/echo", b"Authorization: Bearer " + b"x" * 20_000),
    ],
    ids=["target", "fields", "value"],
)
async def test_what_the_edge_lets_in_is_not_too_long_for_the_application(rig, plane, head, caplog):
    """Else aiohttp would refuse it, in a form of its own, and put what was sent on the log."""
    port, _, _ = plane
    client = await rig.client(port)
    await client.send(head)
    assert (await client.read_message()).status == 200
    assert not caplog.records


async def test_client_that_leaves_cancels_the_application(rig, plane):
    """The application's handler is cancelled when the client closes its stream."""
    port, notes, _ = plane
    client = await rig.client(port)
    await client.send(get(b"/events"))
    await notes["begun"].wait()
    await client.read_until(b"data: 1\n\n")
    client.close()
    await until(lambda: notes["cancelled"] == 1)


async def test_many_at_once(rig, plane):
    """Requests run side by side, each on a socket pair of its own."""
    port, _, _ = plane

    async def one(number):
        client = await rig.client(port)
        await client.send(post(b"%d" % number, target=b"/echo"))
        return (await client.read_message()).body

    assert await asyncio.gather(*map(one, range(40))) == [b"%d" % number for number in range(40)]


async def test_stopped_application():
    """After its end the application answers like an engine that is gone."""
    inproc = InProcess(web.Application())
    async with inproc:
        assert await (await inproc.upstream.send("GET", b"/", [])).read(100) == b"404: Not Found"
    with pytest.raises(EngineGoneError, match="control plane"):
        await inproc.upstream.send("GET", b"/", [])
