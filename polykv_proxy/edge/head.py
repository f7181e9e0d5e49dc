"""Heads of HTTP/1.1 messages: look up, cut what is hop-by-hop, serialise.

Pure: values in, bytes out; ``parse`` makes the values. Heads are not changed once they are made.

Rule 1: names, values and order of end-to-end fields leave as they came, byte for byte.
Rule 2: framing fields are facts about one connection: they are read once and written anew for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from polykv_proxy.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.errors import PolyKVError

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Field lines in order of arrival: (name as sent, value without surrounding whitespace)."""

HEAD_BYTES = 64 * 1024
"""Longest request head that is read."""

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
    index: dict[bytes, bytes] = field(repr=False)
    """First values by lower-case name."""

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field; ``name`` in lower case."""
        return self.index.get(name)

    def get_text(self, name: bytes) -> str | None:
        """Like ``get``, decoded; fields are Latin-1 at worst, so this cannot fail."""
        value = self.index.get(name)
        return None if value is None else value.decode("latin-1")

    def get_all(self, name: bytes) -> list[bytes]:
        """Every value of a field in order; ``name`` in lower case."""
        if name not in self.index:
            return []
        return [value for key, value in self.headers if key.lower() == name]

    def connection_named(self) -> frozenset[bytes]:
        """Fields that ``Connection`` declares to be hop-by-hop, lower case (RFC 9110 section 7.6.1)."""
        value = self.index.get(b"connection")
        if value is None or value.lower() in _PLAIN_CONNECTION:
            return frozenset()
        named = frozenset(token.strip() for token in value.lower().split(b","))
        # Framing and Host are ours to write; a client cannot nominate them away.
        return named - _FRAMING - {b"host"}

    def hop_by_hop(self) -> frozenset[bytes]:
        """All fields that are about this connection, lower case: the known ones, and those it names."""
        return HOP_BY_HOP | self.connection_named()

    def end_to_end(self) -> list[tuple[bytes, bytes]]:
        """The fields that go on to the next connection where the body is framed anew (rule 2)."""
        hidden = self.hop_by_hop() | _FRAMING
        return [field for field in self.headers if field[0].lower() not in hidden]


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
        return self.index.get(b"expect", b"").lower() == b"100-continue" and not self.http_1_0

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow (RFC 9112 section 6.3: no framing field, no body)."""
        return self.chunked or bool(self.content_length)


@dataclass(slots=True, eq=False)
class ResponseHead(Head):
    """The head of a response."""

    status: int
    reason: bytes
    wire: list[bytes] = field(repr=False)
    """What ``response_bytes`` made of this form of head once: up to the length, and behind it."""

    @property
    def interim(self) -> bool:
        """Whether a final response is still to come (1xx; 101 ends HTTP and is not interim)."""
        return 100 <= self.status < 200 and self.status != HTTPStatus.SWITCHING_PROTOCOLS

    @property
    def event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self.index.get(b"content-type", b"").startswith(b"text/event-stream")

    def bodiless(self, method: str) -> bool:
        """Whether the message ends with its head, whatever its fields say (RFC 9112 section 6.3, rule 1)."""
        return method == "HEAD" or self.status in _BODILESS_STATUS or self.status < 200


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
    if drop:
        before, after = _end_to_end(head, drop)
    else:
        if not head.wire:
            head.wire.extend(_end_to_end(head, drop))
        before, after = head.wire
    length = b"" if b"content-length" in drop else head.index.get(b"content-length", b"")
    return b"".join((before, length, after, field_lines(add), framing, b"\r\n"))


def _end_to_end(head: ResponseHead, drop: frozenset[bytes]) -> tuple[bytes, bytes]:
    """Status line and forwarded fields, cut where the digits of ``Content-Length`` belong."""
    hidden = head.hop_by_hop() | drop
    parts = [status_line(head.status, head.reason)]
    before = None
    for name, value in head.headers:
        key = name.lower()
        if key in hidden:
            continue
        if key == b"content-length":
            before = b"".join([*parts, name, b": "])
            parts = [b"\r\n"]
        else:
            parts += (name, b": ", value, b"\r\n")
    rest = b"".join(parts)
    return (rest, b"") if before is None else (before, rest)


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
    return msgspec.json.encode({"error": error.members})
