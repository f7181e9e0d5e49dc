"""Who is asking: the scope of their key, and the name they give to their conversation.

A name is a hint. A wrong or forged one may cost speed; it never opens another key's KV, because scope comes
from the key alone and the engine compares tokens before it reuses anything.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.core.records import ClientNames
from polykv_proxy.core.types import Scope

if TYPE_CHECKING:
    from polykv_proxy.edge.head import Headers, RequestHead

MAX_NAME_CHARS = 255

SESSION_HEADERS = (
    b"x-polykv-session",
    b"x-session-id",
    b"x-session-affinity",
    # coding agents: a sub-agent's own id comes before its session's
    b"x-claude-code-agent-id",
    b"x-claude-code-session-id",
    b"thread-id",
    b"session-id",
    b"x-dynamo-session-id",
    b"agent-session-id",
    b"x-client-session-id",
    b"x-interaction-id",
    b"x-kilocode-taskid",
    b"x-amp-thread-id",
    b"x-cagent-session-id",
    b"x-affinity",
    b"x-grok-conv-id",
    b"x-litellm-session-id",
    b"helicone-session-id",
)
"""Headers that name a conversation, the first present one counts."""

OUR_HEADER_PREFIX = b"x-polykv-"

_IS_OURS = re.compile(OUR_HEADER_PREFIX).match

_SCOPE_BYTES = 16
_SCOPE = re.compile(f"[0-9a-f]{{{2 * _SCOPE_BYTES}}}")

_SESSION_NAMES = frozenset(SESSION_HEADERS)

_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
"""A later version may go on with more."""

_METADATA_KEYS = ("session_id", "thread_id", "conversation_id")


def our_headers(head: RequestHead) -> dict[str, str]:
    """The client's ``X-PolyKV-*`` headers, names in lower case."""
    if not any(map(_IS_OURS, head.index)):
        return {}
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in head.index.items()
        if name.startswith(OUR_HEADER_PREFIX)
    }


def without_ours(head: RequestHead) -> Headers:
    """Headers for the engine: it takes orders from ``X-PolyKV-*``, so those of clients never reach it."""
    if not any(map(_IS_OURS, head.index)):
        return head.headers
    return [field for field in head.headers if not field[0].lower().startswith(OUR_HEADER_PREFIX)]


def scope_of(head: RequestHead, *, shared: bool) -> Scope:
    """Scope of a data-plane request; see ``scope_of_keys``."""
    return scope_of_keys(_text(head.get(b"x-api-key")), _text(head.get(b"authorization")), shared=shared)


def scope_of_keys(api_key: str | None, authorization: str | None, *, shared: bool) -> Scope:
    """Digest of the caller's API key, or the one scope of all callers.

    Args:
        api_key: the ``X-Api-Key`` header; bytes that are not UTF-8 as surrogates.
        authorization: the ``Authorization`` header; only bearer tokens count.
        shared: whether callers with different keys may share prefixes.
    """
    if shared:
        return Scope("")
    key = api_key
    if key is None:
        scheme, _, token = (authorization or "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
    if not key:
        return Scope("")
    raw = key.encode("utf-8", "surrogateescape")
    return Scope(blake2b(raw, digest_size=_SCOPE_BYTES, person=b"polykv-scope").hexdigest())


def is_scope(text: str) -> bool:
    """Whether a text has the form of a scope."""
    return not text or _SCOPE.fullmatch(text) is not None


def _text(value: bytes | None) -> str | None:
    """A field as aiohttp decodes it, so that both faces of the proxy give a key the same scope."""
    return None if value is None else value.decode("utf-8", "surrogateescape")


def session_name(head: RequestHead, field: str | None, metadata: bytes | None) -> str | None:
    """The client's name for this conversation.

    Args:
        head: the request.
        field: ``session_id`` of the body, if given; it comes first.
        metadata: the body's raw ``metadata`` member, if any; it comes last.
    """
    if field is not None:
        return field
    if not _SESSION_NAMES.isdisjoint(head.index):
        for name in SESSION_HEADERS:
            value = head.get_text(name)
            if value and (clean := _clean(value)):
                return clean
    return _from_metadata(metadata) if metadata else None


def names_of(head: RequestHead) -> ClientNames:
    """What the client calls this request.

    ``X-Request-Id``, where it is fit for a record, and the trace id of ``traceparent`` (W3C Trace Context,
    3.2.2), where it is one.
    """
    value, parent = head.get_text(b"x-request-id"), head.get(b"traceparent")
    found = None if parent is None else _TRACEPARENT.fullmatch(parent)
    return ClientNames(
        None if value is None else _clean(value),
        None if found is None else found["trace"].decode("ascii"),
    )


def _from_metadata(raw: bytes) -> str | None:
    try:
        metadata = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(metadata, dict):
        return None
    for key in _METADATA_KEYS:
        if isinstance(metadata.get(key), str) and (clean := _clean(metadata[key])):
            return clean
    user = metadata.get("user_id")
    if not isinstance(user, str):
        return None
    if user.startswith("{"):  # Claude Code: a JSON document in a string
        return _from_metadata(user.encode())
    _, found, session = user.rpartition("_session_")  # its older form
    return _clean(session) if found else None


def _clean(value: str) -> str | None:
    """A name fit for logs and headers, or None."""
    value = value.strip()
    return value if 0 < len(value) <= MAX_NAME_CHARS and value.isprintable() else None
