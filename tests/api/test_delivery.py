"""Claims about ``api.delivery``: the engine's answer reaches its client, and so does what went wrong."""

import json

import pytest
from fake_engine import Script
from structlog.testing import capture_logs

from api.bodies import APIS
from api.rig import CHAT, PATIENT, chat, held_open, occupied
from polykv_proxy.api import reporting


async def test_an_engines_refusal_passes_untouched(rig):
    """Status and body are the engine's."""
    rig.engine.script = Script(
        fault="error", status=400, error_body={"error": {"message": "no", "code": 400}}
    )
    answer = await rig.ask(CHAT, chat("hi"))
    assert (answer.status, answer.json) == (400, {"error": {"message": "no", "code": 400}})
    await rig.quiet()


async def test_a_refusal_keeps_its_words_and_its_fields(rig):
    """Only what says that there is no more room is changed."""
    body = {"error": {"code": 400, "message": "no such sampler", "type": "invalid_request_error"}}
    hop = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "Keep-Alive": "timeout=77"}
    rig.engine.script = Script(
        fault="error", status=400, error_body=body, headers={"X-Engine": "kept", **hop}
    )
    answer = await rig.ask(CHAT, chat("hi"))
    assert (answer.status, answer.json) == (400, body)
    assert answer.headers["X-Engine"] == "kept"
    assert not {"X-Hop", "Keep-Alive"} & set(answer.headers)
    assert answer.headers.getall("Content-Length") == [str(len(answer.body))]


@pytest.mark.parametrize("path", APIS)
async def test_an_engine_that_dies_mid_stream_ends_it_with_an_error_event(rig, path):
    """In the form of each API, behind complete events."""
    rig.engine.script = Script(fault="die_mid_stream")
    answer = await rig.ask(path, APIS[path] | {"stream": True, "session_id": "me"})
    assert answer.status == 200
    name, event = answer.events[-1]
    assert event["error"]["code"] == "engine_gone"
    assert name == ("error" if path in ("/v1/messages", "/v1/responses") else None)
    await rig.quiet()


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such thing", "code": 400}}, "no such thing"),
        ({"error": "odd"}, "the engine answered with status 400"),
        ({"error": {"code": 1}}, "the engine answered with status 400"),
        ([], "the engine answered with status 400"),
    ],
)
async def test_an_engine_that_refuses_late_ends_the_stream_with_its_error(proxies, path, body, message):
    """Its own words where there are any; the slot is free again."""
    rig, running = await occupied(proxies, **PATIENT)
    async with rig.open(path, APIS[path] | {"stream": True}) as answer:
        await held_open(answer)
        rig.engine.script = Script(fault="error", status=400, error_body=body)
        rig.engine.gate.set()
        rest = await answer.content.read()
    document = json.loads(rest[rest.index(b"{") :])
    assert document["error"]["message"] == message
    await running
    await rig.quiet()


async def test_an_engine_that_dies_under_a_held_stream_ends_it_with_an_error(proxies):
    """Before its head and in the middle: never a stream that merely stops."""
    for fault in ("die_before_head", "die_mid_stream"):
        rig, running = await occupied(proxies, **PATIENT)
        async with rig.open(CHAT, chat("hi", stream=True)) as answer:
            await held_open(answer)
            rig.engine.script = Script(fault=fault)
            rig.engine.gate.set()
            rest = await answer.content.read()
        assert b'"code":"engine_gone"' in rest.split(b"\n\n")[-2]
        await running
        await rig.quiet()


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_in_our_block_costs_nobody_the_answer(rig, monkeypatch, path, stream):
    """The client gets what the engine says; the log has what went wrong."""

    def broken(*_):
        raise TypeError("a defect")

    monkeypatch.setattr(reporting, "judge", broken)
    whole = await rig.ask(path, APIS[path] | {"stream": stream})
    with capture_logs() as logged:
        answer = await rig.ask(path, APIS[path] | {"stream": stream, "opencoti": {}})
    assert answer.status == 200
    assert b"opencoti" not in answer.body
    assert b"error" not in answer.body
    assert (len(answer.events), len(answer.body) > 0) == (len(whole.events), True)
    assert "block_failed" in [entry["event"] for entry in logged]
    await rig.quiet()
