"""Claims about ``edge.parse``."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.edge import parse
from polykv_proxy.edge.head import MalformedRequestError
from polykv_proxy.edge.parse import parse_request_head, parse_response_head
from polykv_proxy.errors import EngineGoneError

HOST = b"Host: test\r\n"


def request(*lines: bytes, start: bytes = b"POST /v1/x?a=b HTTP/1.1"):
    """Parse a request head."""
    return parse_request_head(b"\r\n".join([start, b"Host: test", *lines, b"", b""]))


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


def test_equal_heads_are_parsed_once():
    """The head that an engine sends again and again costs a look-up."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert parse_response_head(raw) is parse_response_head(bytes(bytearray(raw)))


@pytest.mark.parametrize("name", [b"Content-Length", b"content-length", b"CONTENT-length"])
@pytest.mark.parametrize("digits", [b"0", b"1", b"7", b"0012", b"123456789012345", b"1234567890123456"])
def test_length_is_the_heads_own(name, digits):
    """Heads that differ in their length alone share all that is known of them, but not the length."""
    for lead in (b"X-A: Content-Length: 9\r\n", b""):
        raw = b"POST / HTTP/1.1\r\n" + HOST + lead + name + b": " + digits + b"\r\nX: y\r\n\r\n"
        head = parse_request_head(raw)
        assert head.content_length == int(digits)
        assert head.get(b"content-length") == digits
        assert head.headers[-2:] == [(name, digits), (b"X", b"y")]
        raw = b"HTTP/1.1 200 OK\r\n" + lead + name + b": " + digits + b"\r\nX: y\r\n\r\n"
        answer = parse_response_head(raw)
        assert answer.content_length == int(digits)
        assert answer.headers[-2:] == [(name, digits), (b"X", b"y")]


def test_large_heads_are_not_kept():
    """Clients cannot fill memory with heads that are kept."""
    parse._parse_request.cache_clear()
    parse_request_head(b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"y" * parse.CACHED_HEAD_BYTES + b"\r\n\r\n")
    assert parse._parse_request.cache_info().currsize == 0


@given(st.binary(max_size=40), st.binary(max_size=20), st.booleans())
def test_taking_the_length_out_decides_nothing(lead, value, twice):
    """A head is accepted exactly when llhttp accepts it as it came."""
    line = b"Content-Length: " + value + b"\r\n"
    raw = b"POST / HTTP/1.1\r\n" + HOST + lead + line * (2 if twice else 1) + b"\r\n"
    raw = raw[: raw.find(b"\r\n\r\n") + 4]
    results = []
    for way in (parse_request_head, parse._parse_request.__wrapped__):
        try:
            head = way(raw)
        except MalformedRequestError as exc:
            results.append(exc.status)
        else:
            results.append((head.headers, head.index, head.content_length, head.chunked, head.keep_alive))
    assert results[0] == results[1]


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


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_parsed(data):
    """Any bytes give a head or a MalformedRequestError; nothing else."""
    with contextlib.suppress(MalformedRequestError):
        parse_request_head(data)
