"""Claims about ``api.identity``: keys make scopes, hints make names."""

import json

import pytest

from polykv_proxy.api.identity import (
    is_scope,
    names_of,
    our_headers,
    scope_of,
    scope_of_keys,
    session_name,
    without_ours,
)
from polykv_proxy.core.records import ClientNames
from polykv_proxy.edge.parse import parse_request_head


def head(*fields):
    """A request head with these field lines."""
    return parse_request_head(b"\r\n".join([b"POST / HTTP/1.1", b"Host: h", *fields, b"", b""]))


def test_a_scope_is_a_digest_of_the_key():
    """Equal keys give equal scopes, in whichever header; the key itself is not in it."""
    scope = scope_of(head(b"X-Api-Key: secret"), shared=False)
    assert scope == scope_of(head(b"Authorization: Bearer secret"), shared=False)
    assert scope == scope_of(head(b"Authorization: bearer  secret "), shared=False)
    assert scope != scope_of(head(b"X-Api-Key: other"), shared=False)
    assert "secret" not in scope
    assert scope


@pytest.mark.parametrize(
    "fields", [[], [b"Authorization: Basic abc"], [b"Authorization: Bearer"], [b"X-Api-Key:"]]
)
def test_without_a_key_there_is_the_common_scope(fields):
    """Only bearer tokens and ``X-Api-Key`` are keys."""
    assert scope_of(head(*fields), shared=False) == ""


def test_sharing_across_keys_gives_one_scope():
    """Then nobody is told apart."""
    assert scope_of(head(b"X-Api-Key: secret"), shared=True) == ""


def test_a_scope_has_a_form_of_its_own():
    """That of every key, and of none; nothing else."""
    for key in ("secret", "", "schlüssel"):
        assert is_scope(scope_of_keys(key, None, shared=False))
    for other in ("secret", "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n"):
        assert not is_scope(other)


@pytest.mark.parametrize("key", ["schlüssel".encode(), b"\xff\xfe"])
def test_both_faces_of_the_proxy_give_a_key_the_same_scope(key):
    """The control application decodes headers as UTF-8 with surrogates; any bytes are a key."""
    decoded = key.decode("utf-8", "surrogateescape")
    assert scope_of(head(b"X-Api-Key: " + key), shared=False) == scope_of_keys(decoded, None, shared=False)


def test_the_body_names_a_session_first_then_headers_then_metadata():
    """The first that is given counts; a sub-agent's own id comes before its session's."""
    metadata = b'{"session_id":"m"}'
    both = head(b"X-Session-Id: h", b"X-PolyKV-Session: p")
    assert session_name(both, "f", metadata) == "f"
    assert session_name(both, None, metadata) == "p"
    assert session_name(head(b"X-Session-Id: h"), None, metadata) == "h"
    assert session_name(head(), None, metadata) == "m"
    agent = head(b"X-Claude-Code-Session-Id: s", b"X-Claude-Code-Agent-Id: a")
    assert session_name(agent, None, None) == "a"
    assert session_name(head(), None, None) is None


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"thread_id": "t"}, "t"),
        ({"conversation_id": "c"}, "c"),
        ({"user_id": "user_x_account_y_session_abc"}, "abc"),
        ({"user_id": json.dumps({"device_id": "d", "session_id": "abc"})}, "abc"),
        ({"user_id": "somebody"}, None),
        ({"user_id": 7}, None),
        ({"session_id": "\n"}, None),
        ({"session_id": 7}, None),
        ([1], None),
        ({"user_id": "{" + '"a":[' * 5000}, None),
    ],
)
def test_metadata_of_known_clients_is_understood(metadata, name):
    """Anything else is no name, and no error."""
    assert session_name(head(), None, json.dumps(metadata).encode()) == name


def test_metadata_that_is_no_json_is_no_name():
    """The engine's to refuse."""
    assert session_name(head(), None, b'{"a":"\xff"}') is None


@pytest.mark.parametrize("value", [b"", b"x" * 256, b"a\x85b"])
def test_a_header_that_is_no_name_is_passed_over(value):
    """Too long, empty or unprintable values do not reach logs and headers; the next header counts."""
    fields = head(b"X-Session-Id: " + value, b"X-Session-Affinity: good")
    assert session_name(fields, None, None) == "good"


def test_our_headers_are_told_from_the_rest():
    """Names in lower case for us, and none of them for the engine."""
    fields = head(b"X-PolyKV-Pool: p", b"x-polykv-slot: 3", b"X-Other: o")
    assert our_headers(fields) == {"x-polykv-pool": "p", "x-polykv-slot": "3"}
    assert without_ours(fields) == [(b"Host", b"h"), (b"X-Other", b"o")]


TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("parent", "found"),
    [
        (b"00-" + TRACE + b"-00f067aa0ba902b7-01", TRACE.decode()),
        (b"cc-" + TRACE + b"-00f067aa0ba902b7-01-what-the-future-will-be-like", TRACE.decode()),
        (b"00-" + TRACE.upper() + b"-00f067aa0ba902b7-01", None),
        (b"ff-" + TRACE + b"-00f067aa0ba902b7-01", None),
        (b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", None),
        (b"00-" + TRACE + b"-0000000000000000-01", None),
        (b"00-" + TRACE + b"-00f067aa0ba902b7-01x", None),
        (b"", None),
    ],
)
def test_a_trace_is_known_by_its_id(parent, found):
    """The valid and invalid forms that W3C Trace Context names; later versions may go on."""
    assert names_of(head(b"traceparent: " + parent)).trace_id == found


def test_a_request_need_not_have_names():
    """A client that says nothing calls it nothing."""
    assert names_of(head()) == ClientNames(None, None)
    assert names_of(head(b"X-Request-Id: r-1")) == ClientNames("r-1", None)
