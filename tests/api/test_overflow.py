"""Claims about ``api.overflow``: overflows look the same wherever they appear, and all else stays."""

import json

import pytest
from fake_engine import Script
from recorded import CELLS_OVERFLOW, WINDOW_OVERFLOW

from api.rig import CHAT, chat
from polykv_proxy.api.overflow import Overflows
from polykv_proxy.core.types import EngineFacts

FACTS = EngineFacts(
    "e", slots=2, max_pools=2, cells=4096, ctx_tokens=2048, bytes_per_cell=1, build="b", model_tokens=2048
)
OTHER = {"code": 500, "message": "Compute error.", "type": "server_error"}


def test_a_body_gets_one_status_and_one_type():
    """With the figures in a member of ours."""
    overflows = Overflows(FACTS, 7)
    status, body = overflows.in_body(500, json.dumps({"error": CELLS_OVERFLOW}).encode())
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert error["opencoti"] == {
        "required_tokens": None,
        "cached_tokens": 7,
        "ctx_size": None,
        "ctx_kind": "cells",
    }
    assert overflows.seen == "cells"


@pytest.mark.parametrize(
    "body", [json.dumps({"error": OTHER}).encode(), b"", b"no JSON", b"[1]", b'{"error":"x"}']
)
def test_other_bodies_keep_their_bytes(body):
    """And their status."""
    overflows = Overflows(FACTS, None)
    assert overflows.in_body(500, body) == (500, body)
    assert overflows.seen is None


def test_events_are_mended_each_for_itself():
    """The error alone is written anew; its event keeps its name."""
    token = b'data: {"choices":[{"delta":{"content":"an error of mine"}}]}\n\n'
    error = b"data: " + json.dumps({"error": WINDOW_OVERFLOW}).encode() + b"\n\n"
    mended = Overflows(FACTS, None).in_events(token + error)
    assert mended.startswith(token + b"data: {")
    assert mended.endswith(b"}\n\n")
    found = json.loads(mended[len(token) + 6 :])["error"]
    assert (found["n_prompt_tokens"], found["opencoti"]["ctx_kind"]) == (3000, "window")


def test_anthropics_error_events_are_the_error_alone():
    """As the engine sends them in the middle of a stream."""
    event = b"event: error\ndata: " + json.dumps(CELLS_OVERFLOW).encode() + b"\n\n"
    mended = Overflows(None, None).in_events(event)
    assert mended.startswith(b"event: error\ndata: {")
    found = json.loads(mended.split(b"data: ", 1)[1])
    assert (found["type"], found["opencoti"]["ctx_kind"]) == ("exceed_context_size_error", None)


def test_events_without_an_overflow_keep_their_bytes():
    """Whatever they speak of."""
    events = b"".join(
        (
            b": an error in a comment\n\n",
            b"data: error\n\n",
            b'data: {"message":"error", "code" : 1}\n\n',
            b"data: " + json.dumps({"error": OTHER}, indent=1).encode() + b"\n\n",
            b'data: {"half',
        )
    )
    assert Overflows(FACTS, None).in_events(events) == events


async def test_a_request_that_is_too_long_is_told_so(rig):
    """What the client sent before is still resident: the next request goes on with it."""
    await rig.ask(CHAT, chat("one", session_id="s"))
    await rig.quiet()
    rig.engine.script = Script(fault="error", status=500, error_body={"error": CELLS_OVERFLOW})
    answer = await rig.ask(CHAT, chat("one", "two", session_id="s"))
    assert answer.status == 400
    assert answer.error["type"] == "exceed_context_size_error"
    assert answer.error["opencoti"]["ctx_kind"] == "cells"


@pytest.mark.parametrize("ours", [{}, {"session_id": "s"}])
async def test_a_stream_that_hits_the_wall_ends_with_the_typed_error(rig, ours):
    """Spliced or with a block of ours; nothing before it is touched."""
    plain = await rig.ask(CHAT, chat("hi", stream=True))
    rig.engine.script = Script(fault="error_mid_stream", error_body={"error": CELLS_OVERFLOW})
    answer = await rig.ask(CHAT, chat("hi there", stream=True, **ours))
    *tokens, (_, last) = answer.events
    assert answer.status == 200
    assert last["error"]["type"] == "exceed_context_size_error"
    assert last["error"]["opencoti"]["ctx_kind"] == "cells"
    assert len(tokens) == 2
    assert tokens == plain.events[:2]
