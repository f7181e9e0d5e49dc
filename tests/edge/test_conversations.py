"""A recorded conversation gives the same bytes, however the network cuts it."""

import asyncio
import itertools

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.wire import LIVENESS_S, SSE, Rig, chunked, get, post

EVENTS = [
    'data: {"content":"né 👩‍💻"}\n\n'.encode(),
    b":\n\n",
    'data: {"content":"漢字"}\r\n\r\n'.encode(),
    b"data: [DONE]\n\n",
]
PLAIN = b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: 11\r\n\r\nhello world"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"

REQUESTS = (
    post(b'{"stream":true}', b"Authorization: Bearer k")
    + get(b"/plain")
    + b"POST /c HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunked(b"abc", b"defg")
    + get(b"/last", b"Connection: close")
)
BODIES = [b'{"stream":true}', b"", b"abcdefg", b""]
ANSWERS = [SSE + chunked(*EVENTS), b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + PLAIN, EMPTY, PLAIN]
EXPECTED = (
    SSE + chunked(*EVENTS) + ANSWERS[1] + EMPTY + PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
)

cuts = st.lists(st.integers(min_value=1, max_value=len(REQUESTS + EXPECTED)), max_size=10)


def pieces(data, at):
    """Cut bytes at these places."""
    edges = sorted({0, len(data), *(cut for cut in at if cut < len(data))})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


async def converse(request_cuts, answer_cuts, *, guarded):
    """Hold the conversation; returns what the client read and the engine was sent."""
    seen = []
    options = {"on_truncated": lambda _error: b"data: error\n\n"} if guarded else {}

    async def conversation(peer):
        while True:
            seen.append((await peer.read_message()).body)
            for piece in pieces(ANSWERS[len(seen) - 1], answer_cuts):
                await peer.send(piece)
                await asyncio.sleep(0)

    async with asyncio.timeout(LIVENESS_S), Rig() as rig:
        client = await rig.client(await rig.proxy(await rig.server(conversation), **options))
        for piece in pieces(REQUESTS, request_cuts):
            await client.send(piece)
            await asyncio.sleep(0)
        raw = await client.read_all()
        assert rig.problems == []
    return raw, seen


@pytest.mark.parametrize(
    "factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("guarded", [False, True])
def test_cuts_change_nothing(factory, guarded):
    """Requests and answers, cut anywhere into reads, arrive as if they had come in one piece."""

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(cuts, cuts)
    def check(request_cuts, answer_cuts):
        with asyncio.Runner(loop_factory=factory) as runner:
            raw, seen = runner.run(converse(request_cuts, answer_cuts, guarded=guarded))
        assert raw == EXPECTED
        assert seen == BODIES

    check()


@pytest.mark.parametrize("guarded", [False, True])
async def test_stream_broken_anywhere(guarded):
    """An engine that dies after any byte of its answer: never a complete stream, never half an event."""
    body = SSE + chunked(*EVENTS)
    error_event = b"data: error\n\n"

    async def conversation(peer):
        await peer.read_message()
        await peer.send(body[: peer_cut[0]])

    peer_cut = [0]
    options = {"on_truncated": lambda _error: error_event} if guarded else {}
    async with Rig() as rig:
        port = await rig.proxy(await rig.server(conversation), **options)
        for cut in range(0, len(body), 3):
            peer_cut[0] = cut
            client = await rig.client(port)
            await client.send(get())
            raw = await client.read_all() if cut >= len(SSE) and not guarded else b""
            if cut < len(SSE):
                assert (await client.read_message()).status == 503
            elif guarded:
                payload = (await client.read_message()).body
                assert payload.endswith(error_event)
                told = payload.removesuffix(error_event)
                assert told in [b"".join(EVENTS[:count]) for count in range(len(EVENTS) + 1)]
            else:
                assert not raw.endswith(b"\r\n0\r\n\r\n")
                assert raw == body[:cut]
