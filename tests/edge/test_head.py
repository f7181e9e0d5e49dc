"""Claims about ``edge.head``."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.edge.head import (
    MalformedRequestError,
    error_envelope,
    field_lines,
    parse_request_head,
    parse_response_head,
    request_bytes,
    response_bytes,
    status_line,
)
from polykv_proxy.errors import BadRequestError, EngineGoneError

HOST = b"Host: test\r\n"


def request(*lines: bytes, start: bytes = b"POST /v1/x?a=b HTTP/1.1"):
    """Parse a request head."""
    return parse_request_head(b"\r\n".join([start, b"Host: test", *lines, b"", b""]))


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK"):
    """Parse a response head."""
    return parse_response_head(b"\r\n".join([start, *lines, b"", b""]))


def test_request_is_taken_apart():
    """Method, target, fields in order and case, and framing come out of a head."""
    head = request(b"X-One: 1", b"content-LENGTH: 12", b"x-one:  2 ")
    assert (head.method, head.target, head.path, head.query) == ("POST", b"/v1/x?a=b", "/v1/x", "a=b")
    assert head.headers == [
        (b"Host", b"test"),
        (b"X-One", b"1"),
        (b"content-LENGTH", b"12"),
        (b"x-one", b"2"),
    ]
    assert head.get(b"x-one") == b"1"
    assert head.get_all(b"x-one") == [b"1", b"2"]
    assert head.get_all(b"absent") == []
    assert head.get_text(b"x-one") == "1"
    assert head.get_text(b"absent") is None
    assert head.content_length == 12
    assert head.has_body
    assert not head.chunked
    assert head.keep_alive


@pytest.mark.parametrize(
    ("start", "lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", [], True),
        (b"GET / HTTP/1.1", [b"Connection: close"], False),
        (b"GET / HTTP/1.1", [b"Connection: foo, Close"], False),
        (b"GET / HTTP/1.1", [b"Connection: keep-alive", b"Connection: close"], False),
        (b"GET / HTTP/1.0", [], False),
        (b"GET / HTTP/1.0", [b"Connection: Keep-Alive"], True),
    ],
)
def test_persistence(start, lines, keep_alive):
    """Version and every Connection field decide whether a connection goes on."""
    assert request(*lines, start=start).keep_alive is keep_alive


@pytest.mark.parametrize(
    ("target", "reduced"),
    [
        (b"/a/b?c#", b"/a/b?c#"),
        (b"*", b"*"),
        (b"http://host:1/p?q", b"/p?q"),
        (b"HTTP://host", b"/"),
        (b"https://host/x", b"/x"),
    ],
)
def test_target_is_reduced_to_origin_form(target, reduced):
    """Absolute targets, as clients send to proxies, lose scheme and authority."""
    assert request(start=b"OPTIONS " + target + b" HTTP/1.1").target == reduced


@pytest.mark.parametrize(
    "raw",
    [
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0x3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: \r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding:\x0bchunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding : chunked\r\n\r\n",
        b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n\tb\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\rY: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b": no name\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n",
        b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET ftp://h/ HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(raw):
    """Nothing that a second parser could frame differently gets past the edge."""
    with pytest.raises(MalformedRequestError) as caught:
        parse_request_head(raw)
    assert caught.value.status in (400, 501, 505)


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


@pytest.mark.parametrize("value", [b"a\r\nX-Evil: 1", b"a\n", b"\ra"])
def test_fields_of_ours_cannot_be_split(value):
    """A line break in a field, reflected from wherever, is refused."""
    with pytest.raises(ValueError, match="line break"):
        field_lines([(b"X-A", b"1"), (b"X-B", value)])


def test_equal_heads_are_parsed_once():
    """The head that an engine sends again and again costs a look-up."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert parse_response_head(raw) is parse_response_head(bytes(bytearray(raw)))


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


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_what_is_no_answer_means_the_engine_is_gone(raw):
    """An engine that does not speak HTTP/1.x is reported as such."""
    with pytest.raises(EngineGoneError):
        parse_response_head(raw)


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


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_parsed(data):
    """Any bytes give a head or a MalformedRequestError; nothing else."""
    with contextlib.suppress(MalformedRequestError):
        parse_request_head(data)
