"""Streams are read whatever the pieces they come in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.client.errors import ContextOverflowError, ServerError, TruncatedStreamError
from polykv_proxy.client.events import ChatEvents, EventReader

STREAM = (
    b': comment\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: two\ndata:lines\n\nid: 7\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(STREAM))))
def test_cuts_make_no_difference(cuts):
    """Any division into pieces gives the same events."""
    reader, events, at = EventReader(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        events += reader.feed(STREAM[at:cut])
        at = cut
    assert events == ['{"a": 1}', "two\nlines", "[DONE]"]


def event(document):
    """One event."""
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"


def test_a_chat_ends_with_its_marker():
    """What comes after it does not count."""
    chat = ChatEvents()
    assert chat.feed(event({"n": 1}) + event({"n": 2})) == [{"n": 1}, {"n": 2}]
    assert chat.feed(event(b"[DONE]") + event({"n": 3})) == []
    chat.finish()


def test_a_chat_without_its_marker_is_an_error():
    """Not a short answer."""
    chat = ChatEvents()
    chat.feed(event({"n": 1}))
    with pytest.raises(TruncatedStreamError):
        chat.finish()


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"error": {"code": 400, "type": "exceed_context_size_error"}}, ContextOverflowError),
        (b"[1]", ServerError),
        (b"{", ServerError),
    ],
)
def test_events_that_are_errors(document, kind):
    """Those of the engine and the proxy, and what nobody can read."""
    with pytest.raises(kind):
        ChatEvents().feed(event(document))
