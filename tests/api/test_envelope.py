"""Claims about ``api.envelope``: every refusal is one of ours, and comes before anything is read."""

import contextlib

import aiohttp
import pytest

from api.rig import CHAT, POOL, chat
from polykv_proxy.api import views


async def test_pages_of_others_drive_nothing(rig):
    """A foreign Host or Origin, a form's content type: refused in our envelope before anything is read."""
    assert (await rig.ask("/polykv/pools", Host="evil.example")).error["code"] == "foreign_host"
    assert (await rig.ask("/polykv/pools", Host="[::1")).status == 403
    assert (await rig.ask("/polykv/pools", POOL, Origin="http://evil.example")).status == 403
    form = await rig.ask("/polykv/pools", b"{}", Content_Type="text/plain")
    assert (form.status, form.error["code"]) == (415, "json_required")
    assert "Content-Type: application/json" in form.error["message"]
    assert len(rig.runtime.plane.tree) == 0


async def test_unknown_routes_and_methods_have_the_envelope(rig):
    """404, 405 and 413 are errors like ours."""
    assert (await rig.ask("/polykv/nonsense")).error["code"] == "route_not_found"
    wrong = await rig.ask("/polykv/sessions", {})
    assert (wrong.error["code"], wrong.headers["Allow"]) == ("method_not_allowed", "GET,HEAD")
    large = await rig.ask("/polykv/pools", {"prompt": "x" * (1 << 20)})
    assert (large.status, large.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"mode":' + b"[" * 200_000, b'{"sessions":' + b"[" * 200_000]
)
async def test_a_body_nested_out_of_all_reason_is_refused(rig, body):
    """On every route that reads one."""
    pool = (await rig.pool())["pool_id"]
    await rig.ask(CHAT, chat("hi", session_id="s"))
    for path in (
        "/polykv/pools",
        f"/polykv/pools/{pool}/fork",
        f"/polykv/pools/{pool}/admission",
        f"/polykv/pools/{pool}/reserve",
        "/polykv/sessions/s/migrate",
        "/polykv/tokenize",
    ):
        answer = await rig.ask(path, body, Content_Type="application/json")
        assert (answer.status, answer.error["code"]) == (400, "invalid_request"), path


async def test_a_bug_of_ours_has_the_envelope(rig, monkeypatch):
    """The loop's exception handler is told, with the request that met it."""
    monkeypatch.setattr(views, "sessions", lambda *_: 1 / 0)
    answer = await rig.ask("/polykv/sessions")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    problem = rig.problems.pop()
    assert isinstance(problem["exception"], ZeroDivisionError)
    assert problem["message"] == "unhandled error on GET /polykv/sessions"


async def test_a_bug_in_a_stream_ends_it(rig, monkeypatch):
    """No second answer is written into the first."""
    async with rig.open("/polykv/tps", Accept="text/event-stream") as answer:
        await answer.content.readuntil(b"\n\n")
        monkeypatch.setattr(views, "rates", lambda *_: 1 / 0)
        rest = b""
        with contextlib.suppress(aiohttp.ClientError):
            async for piece in answer.content:
                rest += piece
    assert b"the proxy failed" not in rest
    assert b"HTTP/1.1" not in rest


async def test_a_body_in_a_coding_that_it_does_not_have_is_refused(rig):
    """In our words, as any other that cannot be read."""
    answer = await rig.ask("/polykv/tokenize", {"prompt": "a"}, Content_Encoding="gzip")
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
