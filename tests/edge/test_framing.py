"""Claims about ``edge.framing``."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.wire import chunked
from polykv_proxy.edge.framing import (
    MAX_CHUNK_LINE_BYTES,
    MAX_TRAILER_BYTES,
    Body,
    ChunkedBody,
    FramingError,
    LengthBody,
    UntilCloseBody,
    chunk,
)


def collect(body):
    """Let a body collect its payload."""
    pieces = []
    body.sink = pieces.append
    return pieces


def feed_all(body, reads):
    """Feed one read after another."""
    for data in reads:
        body.feed(data)


def test_empty_body_takes_nothing():
    """A message without a body ends at once."""
    body = Body()
    assert body.done
    assert body.feed(b"next") == 0
    assert body.eof()


def test_length_body_stops_at_its_length():
    """Bytes behind the announced length belong to the next message."""
    body = LengthBody(5)
    pieces = collect(body)
    assert body.feed(b"ab") == 2
    assert not body.eof()
    assert body.feed(b"cdeXY") == 3
    assert body.done
    assert b"".join(pieces) == b"abcde"


def test_length_zero_is_done():
    """``Content-Length: 0`` needs no byte."""
    assert LengthBody(0).done


def test_until_close_ends_with_the_close():
    """Everything belongs to the body until the peer closes."""
    body = UntilCloseBody()
    pieces = collect(body)
    assert body.feed(b"abc") == 3
    assert not body.done
    assert body.eof()
    assert body.done
    assert pieces == [b"abc"]


def test_whole_chunks_take_the_fast_path():
    """Complete chunks in one read give one payload each and end on a boundary."""
    body = ChunkedBody()
    pieces = collect(body)
    data = chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")
    assert body.feed(data) == len(data)
    assert body.between_chunks
    assert pieces == [b"data: 1\n\n", b"data: 2\n\n"]


def test_bytes_behind_the_last_chunk_are_not_taken():
    """The end of a chunked body is exact, so nothing behind it can slip through."""
    body = ChunkedBody()
    data = chunked(b"abc")
    assert body.feed(data + b"HTTP/1.1 200 OK") == len(data)
    assert body.done


def test_extensions_and_trailers_are_accepted():
    """Chunk extensions and trailer fields are legal and carry no payload."""
    body = ChunkedBody()
    pieces = collect(body)
    data = b'3;a=b;c="d"\r\nabc\r\n0;x\r\nX-Sum: 1\r\nY: 2\r\n\r\n'
    assert body.feed(data) == len(data)
    assert body.done
    assert pieces == [b"abc"]


@pytest.mark.parametrize(
    "data",
    [
        b"+3\r\nabc\r\n",
        b"-3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"1_0\r\nabc\r\n",
        b"\r\nabc\r\n",
        b"3\nabc\r\n",
        b"3 \r\nabc\r\n",
        b"3\rabc\r\n",
        b"g\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n",
        b"3\r\nabcX\r\n",
        b"fffffffffffffffff\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nX: 1\n\r\n",
        b"3;a\x00b\r\nabc\r\n",
    ],
)
def test_malformed_chunks_are_refused(data):
    """What two parsers could read differently is an error, whole or byte by byte."""
    with pytest.raises(FramingError):
        ChunkedBody().feed(data)
    with pytest.raises(FramingError):
        feed_all(ChunkedBody(), [bytes([value]) for value in data])


def test_overlong_chunk_is_noticed_at_once():
    """A chunk that goes on where its CRLF belongs is an error before any further line ends."""
    with pytest.raises(FramingError):
        ChunkedBody().feed(b"2\r\nokX")
    with pytest.raises(FramingError):
        ChunkedBody().feed(b"2\r\nok\rX")


def test_lines_are_bounded():
    """Neither an endless size line nor endless trailers collect memory."""
    with pytest.raises(FramingError):
        ChunkedBody().feed(b"3;" + b"x" * MAX_CHUNK_LINE_BYTES)
    line = b"X: " + b"y" * 1000 + b"\r\n"
    with pytest.raises(FramingError):
        feed_all(ChunkedBody(), [b"0\r\n", *[line] * (MAX_TRAILER_BYTES // 1000 + 2)])


def test_empty_payload_makes_no_chunk():
    """An empty chunk would end the body."""
    assert chunk(b"") == b""
    assert chunk(b"a" * 26) == b"1a\r\n" + b"a" * 26 + b"\r\n"


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(min_value=0, max_value=500), max_size=12),
    rest=st.binary(max_size=10),
)
def test_any_split_gives_the_same_payload(payloads, cuts, rest):
    """However a chunked body is cut into reads, payload and end are the same."""
    framed = chunked(*payloads)
    data = framed + rest
    body = ChunkedBody()
    pieces = collect(body)
    taken = 0
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(edges):
        taken += body.feed(data[start:end])
    assert body.done
    assert taken == len(framed)
    assert b"".join(pieces) == b"".join(payloads)
    assert body.payload_bytes == len(b"".join(payloads))


@given(st.binary(max_size=200))
def test_garbage_never_breaks_the_machine(data):
    """Any bytes either are a body or raise FramingError; nothing else happens."""
    body = ChunkedBody()
    with contextlib.suppress(FramingError):
        assert 0 <= body.feed(data) <= len(data)
