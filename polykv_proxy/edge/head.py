"""Heads of HTTP/1.1 messages: parse, look up, cut what is hop-by-hop, serialise.

Pure: bytes in, values out; no I/O and no clock. Grammar is llhttp's business (through httptools, in its
strict mode: no obs-fold, no bare CR or LF, no space before the colon, no repeated ``Content-Length``);
what llhttp leaves open is decided here.

Rule 1: a head that two parsers could frame differently is refused, never repaired (RFC 9112 section 11.2).
Rule 2: names, values and order of end-to-end fields leave as they came, byte for byte.
Rule 3: framing fields are facts about one connection: they are read here and written anew for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

import httptools
import msgspec

from polykv_proxy.errors import BadRequestError, EngineGoneError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.errors import PolyKVError

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Field lines in order of arrival: (name as sent, value without surrounding whitespace)."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields about one connection (RFC 9110 section 7.6.1), lower case; ``Connection`` names more."""

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_REQUEST_REWRITTEN = HOP_BY_HOP | {b"content-length", b"expect"}
_MUST_BE_SINGLE = frozenset({b"host", b"transfer-encoding"})
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
_BODILESS_STATUS = frozenset({204, 304})


class MalformedRequestError(BadRequestError):
    """Bytes of a client that are no acceptable HTTP/1.1 request; its connection closes after the answer."""

    code = "malformed_http"

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class BodyTooLargeError(BadRequestError):
    """A request body beyond the limit its reader set (RFC 9110 section 15.5.14)."""

    status = 413
    code = "body_too_large"


@dataclass(slots=True, eq=False)
class Head:
    """What request and response heads share."""

    headers: Headers
    http_1_0: bool
    keep_alive: bool
    """Whether this message lets its connection go on (version and ``Connection`` considered)."""
    content_length: int | None
    chunked: bool
    _index: dict[bytes, bytes] = field(repr=False)

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field; ``name`` in lower case."""
        return self._index.get(name)

    def get_text(self, name: bytes) -> str | None:
        """Like ``get``, decoded; fields are Latin-1 at worst, so this cannot fail."""
        value = self._index.get(name)
        return None if value is None else value.decode("latin-1")

    def get_all(self, name: bytes) -> list[bytes]:
        """Every value of a field in order; ``name`` in lower case."""
        if name not in self._index:
            return []
        return [value for key, value in self.headers if key.lower() == name]

    def connection_named(self) -> frozenset[bytes]:
        """Fields that ``Connection`` declares to be hop-by-hop, lower case (RFC 9110 section 7.6.1)."""
        value = self._index.get(b"connection")
        if value is None or value.lower() in _PLAIN_CONNECTION:
            return frozenset()
        named = frozenset(token.strip() for token in value.lower().split(b","))
        # Framing and Host are ours to write; a client cannot nominate them away.
        return named - _FRAMING - {b"host"}


@dataclass(slots=True, eq=False)
class RequestHead(Head):
    """The head of a request."""

    method: str
    target: bytes
    """Request target as sent, reduced to origin-form where it was absolute (RFC 9112 section 3.2.2)."""

    @property
    def path(self) -> str:
        """Target up to the question mark, percent-encoding kept."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> str:
        """Target after the question mark, percent-encoding kept; empty when there is none."""
        return self.target.partition(b"?")[2].decode("latin-1")

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for ``100 Continue`` (ignored for HTTP/1.0, RFC 9110 section 10.1.1)."""
        return self._index.get(b"expect", b"").lower() == b"100-continue" and not self.http_1_0

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow (RFC 9112 section 6.3: no framing field, no body)."""
        return self.chunked or bool(self.content_length)


@dataclass(slots=True, eq=False)
class ResponseHead(Head):
    """The head of a response."""

    status: int
    reason: bytes

    @property
    def interim(self) -> bool:
        """Whether a final response is still to come (1xx; 101 ends HTTP and is not interim)."""
        return 100 <= self.status < 200 and self.status != HTTPStatus.SWITCHING_PROTOCOLS

    def bodiless(self, method: str) -> bool:
        """Whether the message ends with its head, whatever its fields say (RFC 9112 section 6.3, rule 1)."""
        return method == "HEAD" or self.status in _BODILESS_STATUS or self.status < 200


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
        _index=index,
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


@lru_cache(maxsize=256)
def parse_response_head(raw: bytes) -> ResponseHead:
    """Parse one response head of the engine; equal bytes give the same object, not to be changed.

    An engine repeats itself: the heads of its event streams, for one, are all alike.

    Args:
        raw: from the status line to the empty line, both included.

    Raises:
        EngineGoneError: these bytes are no HTTP/1.x response.
    """
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
        _index=index,
        status=parser.get_status_code(),
        reason=seen.reason,
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


def request_bytes(
    method: str, target: bytes, source: Headers, *, named: frozenset[bytes], framing: bytes
) -> bytes:
    """Serialise a request head for the engine.

    Args:
        method: request method.
        target: origin-form target.
        source: fields to forward; hop-by-hop ones are left out, and ``Expect``, which was answered here.
        named: further hop-by-hop fields, lower case (``Head.connection_named``).
        framing: complete field line that frames the body, with CRLF; empty when there is none.
    """
    parts = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\n"]
    has_host = False
    for name, value in source:
        key = name.lower()
        if key in _REQUEST_REWRITTEN or key in named:
            continue
        has_host = has_host or key == b"host"
        parts += (name, b": ", value, b"\r\n")
    if not has_host:
        parts.append(b"Host: localhost\r\n")
    parts += (framing, b"\r\n")
    return b"".join(parts)


def response_bytes(
    head: ResponseHead,
    *,
    add: Iterable[tuple[bytes, bytes]],
    drop: frozenset[bytes],
    framing: bytes,
) -> bytes:
    """Serialise an engine's head for a client.

    Args:
        head: what the engine sent.
        add: fields of ours, put last.
        drop: lower-case names to leave out, on top of hop-by-hop ones. The caller names
            ``content-length`` here when the body is framed anew.
        framing: complete field lines about this connection, each with CRLF.
    """
    named = head.connection_named()
    hidden = HOP_BY_HOP | drop | named if drop or named else HOP_BY_HOP
    parts = [status_line(head.status, head.reason)]
    for name, value in head.headers:
        if name.lower() not in hidden:
            parts += (name, b": ", value, b"\r\n")
    parts += (field_lines(add), framing, b"\r\n")
    return b"".join(parts)


def field_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Serialise fields of ours, each with CRLF.

    Raises:
        ValueError: one has a line break in it. What a client sent us may be reflected in our fields, and
            must never be able to end one (RFC 9110 section 5.5).
    """
    lines = [b"%b: %b\r\n" % field for field in fields]
    joined = b"".join(lines)
    if joined.count(b"\n") != len(lines) or joined.count(b"\r") != len(lines):
        raise ValueError("a header field has a line break in it")
    return joined


def status_line(status: int, reason: bytes | None = None) -> bytes:
    """Status line with CRLF; without a reason the registered one is used."""
    if reason is None:
        try:
            reason = HTTPStatus(status).phrase.encode("ascii")
        except ValueError:
            reason = b""
    return b"HTTP/1.1 %d %b\r\n" % (status, reason)


def error_envelope(error: PolyKVError) -> bytes:
    """The JSON body that tells a client what went wrong, in the form OpenAI clients parse."""
    members = {
        "message": error.message,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        **error.details,
    }
    return msgspec.json.encode({"error": members})
