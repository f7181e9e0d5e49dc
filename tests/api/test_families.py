"""Claims about ``api.families``: which API a path belongs to, and how each words an error."""

import json

import pytest

from polykv_proxy.api.families import INFERENCE, SPREADING, Dialect, Family

ERROR = {"message": "no", "type": "t", "code": "c"}


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/completion", Dialect.LLAMA),
        ("/completions", Dialect.LLAMA),
        ("/v1/completions", Dialect.OPENAI_TEXT),
        ("/chat/completions", Dialect.OPENAI_CHAT),
        ("/v1/chat/completions", Dialect.OPENAI_CHAT),
        ("/responses", Dialect.RESPONSES),
        ("/v1/responses", Dialect.RESPONSES),
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/infill", Dialect.OTHER),
    ],
)
def test_every_path_has_its_dialect(path, dialect):
    """A route that runs in a slot is known by its exact path, and only text can be pooled."""
    assert INFERENCE[path].dialect is dialect
    assert INFERENCE[path].pooled is (dialect is not Dialect.OTHER)
    assert path not in SPREADING


def test_an_openai_error_event_is_a_bare_data_line():
    """One event with an ``error`` member."""
    for dialect in (Dialect.LLAMA, Dialect.OPENAI_CHAT, Dialect.OPENAI_TEXT):
        event = Family(dialect).error_event(ERROR)
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert json.loads(event[6:]) == {"error": ERROR}


def test_an_anthropic_error_event_is_named():
    """``event: error`` with Anthropic's envelope."""
    head, data = Family(Dialect.ANTHROPIC).error_event(ERROR).rstrip().split(b"\n")
    assert head == b"event: error"
    assert json.loads(data[6:]) == {"type": "error", "error": ERROR}


def test_a_responses_error_event_has_flat_members():
    """``event: error`` with type, code and message at the top, as its clients read it."""
    head, data = Family(Dialect.RESPONSES).error_event(ERROR).rstrip().split(b"\n")
    assert head == b"event: error"
    assert json.loads(data[6:]) == {
        "type": "error",
        "code": "c",
        "message": "no",
        "param": None,
        "error": ERROR,
    }
