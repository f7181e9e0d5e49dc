"""From the bytes of a head to its value.

Pure: no I/O and no clock. Grammar is llhttp's business (through httptools, in its strict mode: no obs-fold,
no bare CR or LF, no space before the colon, no repeated ``Content-Length``); what llhttp leaves open is
decided here.

Rule 1: a head that two parsers could frame differently is refused, never repaired (RFC 9112 section 11.2).
Rule 2: a head is parsed once per form. Clients and engines repeat themselves: their heads differ in the
digits of ``Content-Length`` and in nothing else, so those are taken out, and what llhttp said about the
rest is kept. Nothing is taken out that llhttp would not have read as digits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import httptools

from polykv_proxy.edge.head import MalformedRequestError, RequestHead, ResponseHead
from polykv_proxy.errors import EngineGoneError

if TYPE_CHECKING:
    from polykv_proxy.edge.head import Head, Headers

CACHED_HEADS = 256
"""Forms of heads that are kept, for requests and for responses."""

CACHED_HEAD_BYTES = 4096
"""Longer request heads are not kept: clients must not be able to fill memory with them."""

_MUST_BE_SINGLE = frozenset({b"host", b"transfer-encoding"})
_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_LENGTH_NAME_BYTES = len(b"content-length")
_MOST_DIGITS = 15


def _form(raw: bytes) -> tuple[bytes, bytes | None]:
    """Replace a plain length by 1; returns the head that is left, and the digits, if there were any."""
    for line in _LENGTH_LINES:
        found = raw.find(line)
        if found >= 0:
            start = found + len(line)
            end = raw.find(b"\r\n", start)
            digits = raw[start:end]
            if digits.isdigit() and len(digits) <= _MOST_DIGITS:
                return raw[:start] + b"1" + raw[end:], digits
            break
    return raw, None


def _with_length(head: Head, digits: bytes) -> tuple[Headers, dict[bytes, bytes]]:
    """Fields of a head with other digits in its ``Content-Length``, which llhttp saw to be a single one."""
    headers = list(head.headers)
    for place, (name, _) in enumerate(headers):
        if len(name) == _LENGTH_NAME_BYTES and name.lower() == b"content-length":
            headers[place] = (name, digits)
            break
    index = head.index.copy()
    index[b"content-length"] = digits
    return headers, index


class _Collector:
    """Receives llhttp's callbacks for one head."""

    __slots__ = ("headers", "reason", "target")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.target = b""
        self.reason = b""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value.rstrip(b" \t")))

    def index(self) -> dict[bytes, bytes]:
        """First values by lower-case name; all values of ``Connection``, a list whose every member counts."""
        index = {name.lower(): value for name, value in reversed(self.headers)}
        if len(index) < len(self.headers) and b"connection" in index:
            values = [value for name, value in self.headers if name.lower() == b"connection"]
            index[b"connection"] = b",".join(values)  # RFC 9110 section 5.3
        return index


def parse_request_head(raw: bytes) -> RequestHead:
    """Parse one request head.

    Args:
        raw: from the first byte of the request line to the empty line, both included.

    Raises:
        MalformedRequestError: not HTTP/1.x, or framing that is ambiguous or not supported.
    """
    form, digits = _form(raw)
    head = _parse_request(form) if len(raw) <= CACHED_HEAD_BYTES else _parse_request.__wrapped__(form)
    if digits is None:
        return head
    headers, index = _with_length(head, digits)
    return RequestHead(
        headers, head.http_1_0, head.keep_alive, int(digits), head.chunked, index, head.method, head.target
    )


@lru_cache(maxsize=CACHED_HEADS)
def _parse_request(raw: bytes) -> RequestHead:
    seen = _Collector()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        # The offer is not taken up: Upgrade is hop-by-hop, the request goes on as plain HTTP/1.1
        # (RFC 9110 section 7.8). CONNECT ends here too and is refused below.
        pass
    except httptools.HttpParserError as exc:
        raise MalformedRequestError(f"malformed HTTP request: {exc}") from None
    method = parser.get_method().decode("ascii")
    version = parser.get_http_version()
    index = seen.index()
    _check_request(seen.headers, index, method, version)
    length = index.get(b"content-length")
    return RequestHead(
        headers=seen.headers,
        http_1_0=version == "1.0",
        keep_alive=_keep_alive(index, version),
        content_length=None if length is None else int(length),
        chunked=b"transfer-encoding" in index,
        index=index,
        method=method,
        target=_origin_form(seen.target),
    )


def _check_request(headers: Headers, index: dict[bytes, bytes], method: str, version: str) -> None:
    """Refuse what llhttp lets pass but another parser could read differently (rule 1)."""
    if version not in ("1.1", "1.0"):
        raise MalformedRequestError("only HTTP/1.1 and HTTP/1.0 are spoken here", status=505)
    if method == "CONNECT":
        raise MalformedRequestError("CONNECT is not supported", status=501)
    if len(index) < len(headers):
        for single in _MUST_BE_SINGLE:
            if sum(name.lower() == single for name, _ in headers) > 1:
                raise MalformedRequestError("a Host or Transfer-Encoding field is repeated")
    if version == "1.1" and b"host" not in index:
        raise MalformedRequestError("an HTTP/1.1 request needs a Host field")  # RFC 9112 section 3.2
    encoding = index.get(b"transfer-encoding")
    if encoding is None:
        return
    if version == "1.0" or b"content-length" in index:  # RFC 9112 section 6.1
        raise MalformedRequestError("Transfer-Encoding contradicts the version or a Content-Length")
    if encoding.lower() != b"chunked":
        raise MalformedRequestError("only the chunked transfer coding is supported", status=501)


def parse_response_head(raw: bytes) -> ResponseHead:
    """Parse one response head of the engine.

    Args:
        raw: from the status line to the empty line, both included.

    Raises:
        EngineGoneError: these bytes are no HTTP/1.x response.
    """
    form, digits = _form(raw)
    head = _parse_response(form)
    if digits is None:
        return head
    headers, index = _with_length(head, digits)
    return ResponseHead(
        headers,
        head.http_1_0,
        head.keep_alive,
        int(digits),
        head.chunked,
        index,
        head.status,
        head.reason,
        head.wire,
    )


@lru_cache(maxsize=CACHED_HEADS)
def _parse_response(raw: bytes) -> ResponseHead:
    seen = _Collector()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade as exc:
        raise EngineGoneError("the engine switched protocols unasked", code="engine_protocol") from exc
    except httptools.HttpParserError as exc:
        raise EngineGoneError(f"the engine's answer is not HTTP: {exc}", code="engine_protocol") from None
    index = seen.index()
    encoding = index.get(b"transfer-encoding")
    if encoding is not None and encoding.lower() != b"chunked":
        raise EngineGoneError("the engine used an unknown transfer coding", code="engine_protocol")
    length = index.get(b"content-length")
    version = parser.get_http_version()
    return ResponseHead(
        headers=seen.headers,
        http_1_0=version == "1.0",
        keep_alive=_keep_alive(index, version),
        content_length=None if length is None else int(length),
        chunked=encoding is not None,
        index=index,
        status=parser.get_status_code(),
        reason=seen.reason,
        wire=[],
    )


def _keep_alive(index: dict[bytes, bytes], version: str) -> bool:
    """Whether the sender of a head allows its connection to persist (RFC 9112 section 9.3)."""
    value = index.get(b"connection")
    if value is None:
        return version == "1.1"
    tokens = {token.strip() for token in value.lower().split(b",")}
    return b"close" not in tokens and (version == "1.1" or b"keep-alive" in tokens)


def _origin_form(target: bytes) -> bytes:
    """Reduce absolute-form to what an origin server takes (RFC 9112 section 3.2.2)."""
    if target.startswith(b"/") or target == b"*":
        return target
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        raise MalformedRequestError("the request target must be a path")
    slash = rest.find(b"/")
    return b"/" if slash < 0 else rest[slash:]
