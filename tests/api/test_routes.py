"""Claims about ``api.routes``: which handler answers which request, however it is spelt."""

import asyncio
import json

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy.api.routes import engine_path, render_error
from polykv_proxy.edge.parse import parse_request_head
from polykv_proxy.errors import BadRequestError

ENGINE_PATHS = [
    "/polykv/engine",
    "/polykv/engine/counters",
    "/polykv/engine/pools/0",
    "/polykv/engine#x",
    "/%70olykv/engine",
    "/polykv%2fengine",
    "/polykv/%65ngine/counters",
    "/%u0070olykv/engine",
    "/%70olykv/engine/pools/0",
]


@pytest.mark.parametrize("path", ENGINE_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_the_engines_internal_routes_are_not_reachable(rig, path, method):
    """Not in any spelling that the engine's HTTP library understands."""
    seen = len(rig.engine.requests)
    answer = await rig.ask(path, {} if method == "POST" else None, method=method)
    assert answer.status == 404
    assert answer.error["code"] == "route_not_found"
    later = rig.engine.requests[seen:]
    assert all(request.path == "/polykv/engine/counters" for request in later)  # our own sampler


@pytest.mark.parametrize("path", ["/polykv/engine%uD800", "/slots/%uD800", "/slots/%u0000"])
async def test_a_path_that_no_answer_can_hold_gets_an_answer_all_the_same(rig, path):
    """Escapes of half a character decode to what UTF-8 cannot encode."""
    answer = await rig.ask(path, {})
    assert (answer.status, path in answer.error["message"]) == (400 if "slots" in path else 404, True)


@pytest.mark.parametrize(
    "path", ["/v1/%63hat/completions", "/v1/chat%2Fcompletions", "/v1/chat/completions#x"]
)
async def test_a_completion_gets_a_slot_in_any_spelling(rig, path):
    """It is pinned like every other one."""
    assert (await rig.ask(path, chat("hi"))).headers["x-session-id"] == "auto-1"
    (seen,) = [request for request in rig.engine.requests if request.header("x-polykv-tag")]
    assert seen.header("x-polykv-slot") == "0"


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/a/b", "/a/b"),
        ("/%61", "/a"),
        ("/%u0061", "/a"),
        ("/%2561", "/%61"),
        ("/%zz%", "/%zz%"),
        ("/%u00", "/%u00"),
        ("/a#b%63", "/a"),
    ],
)
def test_paths_are_read_as_the_engine_reads_them(path, read):
    """Escapes once, both kinds; broken ones stay; a fragment goes."""
    assert engine_path(path) == read


async def test_everything_else_passes_through(rig):
    """Method, query and body both ways; of the headers only those that give orders to the engine go."""
    answer = await rig.ask("/echo?a=%20b", b"\x00\x01", Content_Type="x/y", X_PolyKV_Slot="3", X_Other="o")
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, b"\x00\x01", "x/y")
    seen = rig.engine.of("/echo")[0]
    assert (seen.query, seen.header("x-other"), seen.header("x-polykv-slot")) == ("a= b", "o", None)
    assert (await rig.ask("/lora-adapters")).json == []
    assert (await rig.ask("/nonsense")).status == 404


async def test_what_passes_through_waits_for_an_engine_a_while(rig):
    """Then 503 in the engine's words; /props too. One that is down is said to be."""
    rig.loading()
    for path in ("/v1/models", "/props"):
        answer = await rig.ask(path)
        assert (answer.status, answer.error["message"]) == (503, "Loading model")
    rig.down()
    assert (await rig.ask("/props")).error["message"] == "the engine is down: test"


async def test_one_that_waits_is_served_by_the_engine_that_comes(proxies):
    """As soon as it serves."""
    rig = await proxies(hold_s=30.0)
    rig.down()
    waiting = rig.start("/lora-adapters")
    await until(lambda: rig.runtime.serving._waiters)
    await rig.up()
    assert (await waiting).json == []


async def test_the_control_routes_work_without_an_engine(rig):
    """They are the proxy's own."""
    rig.down()
    assert (await rig.ask("/polykv/sessions")).status == 200
    assert (await rig.ask("/polykv")).status == 404


def test_errors_have_the_form_of_the_route():
    """OpenAI's envelope, Anthropic's on its routes, and OpenAI's where there is no head."""
    error = BadRequestError("no", param="x", more=1)
    members = {
        "message": "no",
        "type": "invalid_request_error",
        "code": "invalid_request",
        "param": "x",
        "more": 1,
    }

    def rendered(path):
        head = parse_request_head(b"POST " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        return json.loads(render_error(head, error))

    assert rendered(b"/v1/chat/completions") == {"error": members}
    assert rendered(b"/v1/messages") == {"type": "error", "error": members}
    assert rendered(b"/v1/messages/count_tokens?x") == {"type": "error", "error": members}
    assert json.loads(render_error(None, error)) == {"error": members}


async def test_an_upload_passes_unchanged(rig):
    """A body on a route that the proxy does not know is nobody's but the engine's."""
    big = b"x" * (1 << 20)
    assert (await rig.ask("/echo", big, Content_Type="x/y")).body == big


async def test_a_slow_upload_does_not_take_the_engines_time(rig):
    """The engine has few threads: it hears of a request once all of it is here."""
    seen = len([request for request in rig.engine.requests if request.path == "/echo"])
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 4\r\n\r\nab")
    await asyncio.sleep(0.2)
    assert len([request for request in rig.engine.requests if request.path == "/echo"]) == seen
    writer.write(b"cd")
    assert (await reader.read()).endswith(b"abcd")
    writer.close()


async def test_an_upload_has_a_bound(proxies):
    """413, whichever way its length is told."""
    rig = await proxies(max_body_bytes=1024)

    async def pieces():
        yield b"x" * 1025

    assert (await rig.ask("/echo", b"x" * 1024)).status == 200
    assert (await rig.ask("/echo", b"x" * 1025)).status == 413
    async with rig.session.post(rig.url + "/echo", data=pieces()) as answer:
        assert answer.status == 413


async def test_a_get_of_a_completion_route_is_the_engines_to_refuse(rig):
    """Only POST runs in a slot."""
    assert (await rig.ask(CHAT)).status == 405
    assert not rig.engine.work
