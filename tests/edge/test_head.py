"""Claims about ``edge.head``."""

import json

import pytest

from polykv_proxy.edge.head import (
    error_envelope,
    field_lines,
    request_bytes,
    response_bytes,
    status_line,
)
from polykv_proxy.edge.parse import parse_request_head, parse_response_head
from polykv_proxy.errors import BadRequestError


def request(*lines: bytes, start: bytes = b"POST /v1/x?a=b HTTP/1.1"):
    """Parse a request head."""
    return parse_request_head(b"\r\n".join([start, b"Host: test", *lines, b"", b""]))


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK"):
    """Parse a response head."""
    return parse_response_head(b"\r\n".join([start, *lines, b"", b""]))


def test_upgrade_offer_is_not_taken_up():
    """A request that offers another protocol is read as plain HTTP/1.1, with its body."""
    head = request(b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: 3")
    assert head.content_length == 3
    sent = request_bytes("POST", b"/", head.headers, named=head.connection_named(), framing=b"")
    assert b"pgrade" not in sent


def test_expectation():
    """Only an HTTP/1.1 client can wait for 100."""
    assert request(b"Expect: 100-Continue").expects_continue
    assert not request(b"Expect: 100-continue", start=b"POST / HTTP/1.0").expects_continue


def test_a_stream_of_events_is_told_by_its_type():
    """Whatever parameters follow; an answer without a type is none."""
    assert response(b"Content-Type: text/event-stream; charset=utf-8").event_stream
    assert not response(b"Content-Type: application/json").event_stream
    assert not response().event_stream


def test_hop_by_hop_fields_stay_behind():
    """Fields about one connection, and those that Connection names, stay behind; the rest goes as sent."""
    head = request(
        b"Connection: keep-alive, X-Secret ,Content-Length, Host",
        b"Keep-Alive: timeout=5",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Authorization: Basic x",
        b"TE: trailers",
        b"Trailer: X",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"x-secret: 1",
        b"AUTHORIZATION: Bearer k",
        b"x-Odd:",
    )
    sent = request_bytes(
        "POST", b"/x", head.headers, named=head.connection_named(), framing=b"Transfer-Encoding: chunked\r\n"
    )
    assert sent == (
        b"POST /x HTTP/1.1\r\nHost: test\r\nAUTHORIZATION: Bearer k\r\nx-Odd: \r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )


def test_what_is_about_a_connection_ends_with_it():
    """RFC 9110 section 7.6.1: what is known to be, what ``Connection`` names in any case, and framing."""
    head = response(
        b"X-Kept: 1",
        b"Connection: keep-alive, X-Mine",
        b"Connection: x-theirs",
        b"Keep-Alive: timeout=5",
        b"x-mine: 2",
        b"X-THEIRS: 3",
        b"Proxy-Authenticate: Basic",
        b"Trailer: x",
        b"Content-Length: 0",
        b"Set-Cookie: a",
        b"set-cookie: b",
    )
    assert head.end_to_end() == [(b"X-Kept", b"1"), (b"Set-Cookie", b"a"), (b"set-cookie", b"b")]
    assert {b"x-mine", b"x-theirs", b"te", b"upgrade"} <= head.hop_by_hop()
    assert b"transfer-encoding" not in response(b"Connection: content-length").connection_named()
    assert response(b"Connection: content-length, x-kept", b"X-Kept: 1").end_to_end() == []


def test_requests_of_ours_get_a_host():
    """HTTP/1.1 demands a Host field, whoever asks."""
    sent = request_bytes("GET", b"/health", [], named=frozenset(), framing=b"")
    assert sent == b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_response_is_serialised_as_it_came():
    """Status, reason, order and case survive; hop-by-hop fields go, ours come last."""
    head = response(
        b"content-TYPE: text/event-stream",
        b"Keep-Alive: timeout=5, max=100",
        b"Connection: X-Hop",
        b"X-Hop: 1",
        b"Proxy-Authenticate: Basic",
        b"Retry-After: 3",
        b"Set-Cookie: a",
        b"Set-Cookie: b",
        start=b"HTTP/1.1 503 Not Right Now",
    )
    sent = response_bytes(
        head, add=[(b"x-pool-id", b"p1")], drop=frozenset({b"retry-after"}), framing=b"Connection: close\r\n"
    )
    assert sent == (
        b"HTTP/1.1 503 Not Right Now\r\ncontent-TYPE: text/event-stream\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n"
        b"x-pool-id: p1\r\nConnection: close\r\n\r\n"
    )


def test_dropped_length_leaves_nothing_behind():
    """A length that is left out takes its digits along; a second head of that form is its own."""
    for length in (b"5", b"77"):
        head = response(b"X: 1", b"Content-Length: " + length, b"Y: 2")
        whole = response_bytes(head, add=[], drop=frozenset(), framing=b"")
        assert whole == b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: " + length + b"\r\nY: 2\r\n\r\n"
        without = response_bytes(head, add=[], drop=frozenset({b"content-length"}), framing=b"")
        assert without == b"HTTP/1.1 200 OK\r\nX: 1\r\nY: 2\r\n\r\n"


@pytest.mark.parametrize("value", [b"a\r\nX-Evil: 1", b"a\n", b"\ra"])
def test_fields_of_ours_cannot_be_split(value):
    """A line break in a field, reflected from wherever, is refused."""
    with pytest.raises(ValueError, match="line break"):
        field_lines([(b"X-A", b"1"), (b"X-B", value)])


@pytest.mark.parametrize(
    ("start", "method", "bodiless", "interim"),
    [
        (b"HTTP/1.1 204 No Content", "GET", True, False),
        (b"HTTP/1.1 304 Not Modified", "GET", True, False),
        (b"HTTP/1.1 100 Continue", "GET", True, True),
        (b"HTTP/1.1 103 Early Hints", "GET", True, True),
        (b"HTTP/1.1 200 OK", "HEAD", True, False),
        (b"HTTP/1.1 200 OK", "GET", False, False),
        (b"HTTP/1.1 200", "GET", False, False),
    ],
)
def test_which_responses_have_a_body(start, method, bodiless, interim):
    """Status and request method decide, not the fields (RFC 9112 section 6.3)."""
    head = response(b"Transfer-Encoding: chunked", start=start)
    assert head.bodiless(method) is bodiless
    assert head.interim is interim


def test_status_lines():
    """Registered reasons are filled in, unknown ones left empty, given ones kept."""
    assert status_line(404) == b"HTTP/1.1 404 Not Found\r\n"
    assert status_line(599) == b"HTTP/1.1 599 \r\n"
    assert status_line(200, b"Fine") == b"HTTP/1.1 200 Fine\r\n"


def test_error_envelope_is_openai_shaped():
    """Message, type, code and param are always there; details come beside them."""
    error = BadRequestError("no such pool", param="pool_id", known=3)
    assert json.loads(error_envelope(error)) == {
        "error": {
            "message": "no such pool",
            "type": "invalid_request_error",
            "code": "invalid_request",
            "param": "pool_id",
            "known": 3,
        }
    }
