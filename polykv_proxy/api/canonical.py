"""Takes the changing values out of a billing header before the engine sees it, where the policy says so.

Claude Code puts a line before its system prompt that is another one with every request. The engine masks one
of its two changing values on one of its routes; on all others, and by the other value, nothing behind that
line can ever be shared. A body is changed inside that line and nowhere else: the place of every value is
found by walking the JSON text, and what is around it is copied byte for byte.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.core.volatile import BILLING_HEADER, BILLING_MARKER, steady

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = re.compile(rb'[\s,{]*"([^"\\]*(?:\\.[^"\\]*)*)"\s*:\s*', re.DOTALL)
_GAP = re.compile(rb"[\s,]*")
_TEXT_START = b'"' + BILLING_MARKER
_HEADER = re.compile(rb'(?<!\\)"' + BILLING_HEADER.pattern)
"""The line where it opens a text; further inside, somebody speaks of it."""

_SYSTEM_MEMBERS = (b"system", b"instructions")
_MESSAGE_MEMBERS = (b"messages", b"input")


class _Role(msgspec.Struct):
    role: str = ""


def without_billing_values(body: bytes) -> bytes:
    """The body with constants in the billing headers of its system texts; the same object without any.

    A body without one costs one search through its memory.

    Args:
        body: a JSON object; anything else is left alone, it is the engine's to refuse.
    """
    if _TEXT_START not in body:
        return body
    try:
        spans = list(_system_spans(body))
    except (msgspec.DecodeError, RecursionError, _UnevenError):
        return body
    parts: list[bytes] = []
    done = 0
    for start, end in spans:
        parts += [body[done:start], _HEADER.sub(lambda found: steady(found[0]), body[start:end])]
        done = end
    changed = b"".join((*parts, body[done:]))
    return body if changed == body else changed


class _UnevenError(Exception):
    """The text is not what its values say: a name appears twice, say."""


def _system_spans(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the system texts of a body stand, in order."""
    for name, start, end in _members(body):
        if name in _SYSTEM_MEMBERS:
            yield start, end
        elif name in _MESSAGE_MEMBERS and body[start : start + 1] == b"[":
            for at, until in _items(body, start, end):
                if _TEXT_START in body[at:until] and _is_system(body[at:until]):
                    yield at, until


def _is_system(message: bytes) -> bool:
    try:
        return msgspec.json.decode(message, type=_Role).role in ("system", "developer")
    except msgspec.ValidationError:
        return False


def _members(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name and place of each member of a JSON object."""
    at = 0
    for raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).values():
        key = _KEY.match(body, at)
        if key is None:
            raise _UnevenError
        at = _end_of(body, key.end(), raw)
        yield key[1], key.end(), at


def _items(body: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Places of the items of the JSON array that stands at [start, end)."""
    at = start + 1
    for raw in msgspec.json.decode(body[start:end], type=list[msgspec.Raw]):
        gap = _GAP.match(body, at)
        assert gap is not None  # it matches no bytes, too
        at = _end_of(body, gap.end(), raw)
        yield gap.end(), at


def _end_of(body: bytes, start: int, raw: msgspec.Raw) -> int:
    value = bytes(raw)
    if not body.startswith(value, start):
        raise _UnevenError
    return start + len(value)
