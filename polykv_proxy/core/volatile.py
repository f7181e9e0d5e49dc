"""Parts of a prompt that change though nothing was meant by it: each one undoes the sharing of what follows.

Rule 1: only the first difference counts. Nothing behind it can be shared, whatever it is.
Rule 2: a part is named only where both texts have one of its kind at that place; else nothing is said.
Rule 3: making a text steady changes the values that are known to carry no meaning, and no other byte.

Texts are raw bytes, as they stand in a JSON body (with its escapes) or in a rendered prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BILLING_MARKER = b"x-anthropic-billing-header:"
"""How the line begins that Claude Code puts before its system prompt, another one with every request."""

BILLING_HEADER = re.compile(re.escape(BILLING_MARKER) + rb"(?:[ \t]*[a-z_]+=[^;\s\"\\]*;?)*")
"""The whole line: fields, each ended by a semicolon. The system prompt follows without a break."""

_BILLING_FIELD = re.compile(rb"[a-z_]+=[^;\s\"\\]*")

_STAMP = re.compile(rb"(cch=)[0-9a-f]+")
"""Another one in each request; the engine masks it on /v1/messages, and only there."""
_BUILD = re.compile(rb"(cc_version=\d+\.\d+\.\d+)\.[0-9a-f]+")
"""Its last part is another one in each conversation."""

_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?:[a-z]*day)?"
_WORD_START = rb"(?:(?<![A-Za-z])|(?<=\\n)|(?<=\\t)|(?<=\\r))"  # an escaped line break ends in a letter
_TIME = rb"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp](?:[Mm]|\.[Mm]\.))?"
_CLOCK = re.compile(
    b"|".join(
        (
            rb"(?<!\d)\d{4}-\d\d-\d\d(?:(?:T| )" + _TIME + rb")?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?",
            rb"(?<!\d)\d{1,4}[/.]\d{1,2}[/.]\d{2,4}(?:,? " + _TIME + rb")?",
            _WORD_START + _MONTH + rb" \d{4}",
            _WORD_START
            + rb"(?:"
            + _DAY
            + rb",? )?(?:"
            + _MONTH
            + rb" \d{1,2}(?:st|nd|rd|th)?|\d{1,2} "
            + _MONTH
            + rb")(?:,? "
            + _TIME
            + rb")?(?: [A-Z]{3,4})?(?:,? \d{4})?(?:,? (?:at )?"
            + _TIME
            + rb")?",
            _WORD_START + _DAY,
            rb"(?<![\d:])" + _TIME,
            rb"(?<!\d)1\d{9}(?:\d{3})?(?:\.\d+)?(?!\d)",  # seconds or milliseconds since 1970
        )
    )
)

_CLOCK_WINDOW_BYTES = 64
"""No written time reaches further to either side of a place in it."""

_JSON_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_TOOL_NAME = re.compile(rb'"name"\s*:\s*"([^"\\]{1,64})"')

SNIPPET_CHARS = 96


class VolatileKind(StrEnum):
    """What kind of part it is."""

    BILLING_HEADER = "billing_header"
    """Claude Code's accounting line."""
    CLOCK = "clock"
    """A date, a time, or seconds since 1970."""
    TOOLS_REORDERED = "tools_reordered"
    """The same tools in another order."""


@dataclass(frozen=True, slots=True)
class Volatile:
    """A part that changed though nothing was meant by it."""

    kind: VolatileKind
    at: int
    """Byte offset of the first difference."""
    old: str
    """The part as it stood in the one text, cut to ``SNIPPET_CHARS``."""
    new: str
    """The part as it stands in the other."""


def volatile_part(old: bytes, new: bytes) -> Volatile | None:
    """What makes two texts of the same origin differ first, if it is of a known kind.

    1. They are equal, or one ends where the other goes on: None.
    2. Both are JSON arrays of the same items: the order.
    3. Both have a billing header there: its field that differs.
    4. Both have a written time there.

    Args:
        old: an earlier text: a system prompt, a list of tools, a rendered prompt.
        new: the text of the same part now.
    """
    at = first_difference(old, new)
    if at == min(len(old), len(new)):
        return None  # 1
    if (moved := _reordered(old, new)) is not None:
        return Volatile(VolatileKind.TOOLS_REORDERED, at, *moved)  # 2
    one, other = _billing_field(old, at), _billing_field(new, at)
    if one is not None and other is not None:
        return Volatile(VolatileKind.BILLING_HEADER, at, _snippet(one), _snippet(other))  # 3
    one, other = _clock(old, at), _clock(new, at)
    if one is not None and other is not None:
        return Volatile(VolatileKind.CLOCK, at, _snippet(one), _snippet(other))  # 4
    return None


def steady(text: bytes) -> bytes:
    """The text with the values of every billing header in it replaced by constants; see rule 3."""
    if BILLING_MARKER not in text:
        return text
    return BILLING_HEADER.sub(lambda found: _BUILD.sub(rb"\1.000", _stampless(found[0])), text)


def as_engine_masks(text: bytes) -> bytes:
    """An Anthropic system text as far as the engine itself makes it steady."""
    if BILLING_MARKER not in text:
        return text
    return BILLING_HEADER.sub(lambda found: _stampless(found[0]), text)


def _stampless(header: bytes) -> bytes:
    return _STAMP.sub(rb"\1fffff", header)


def first_difference(one: bytes, other: bytes) -> int:
    """Leading bytes on which both agree; found by halving, at memory speed."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _billing_field(text: bytes, at: int) -> bytes | None:
    """The field of a billing header that stands at ``at``."""
    start = text.rfind(BILLING_MARKER, 0, at)
    header = BILLING_HEADER.match(text, start) if start >= 0 else None
    if header is None or header.end() < at:
        return None
    for field in _BILLING_FIELD.finditer(text, start + len(BILLING_MARKER), header.end()):
        if field.start() <= at <= field.end():
            return field[0]
    return None


def _clock(text: bytes, at: int) -> bytes | None:
    """The written time that stands at ``at``."""
    begin = max(0, at - _CLOCK_WINDOW_BYTES)
    window = text[begin : at + _CLOCK_WINDOW_BYTES]
    for found in _CLOCK.finditer(window):
        if found.start() <= at - begin <= found.end():
            return found[0]
    return None


def _reordered(old: bytes, new: bytes) -> tuple[str, str] | None:
    """Names of the first items that changed places, where that is all that changed."""
    if len(old) != len(new) or not (old.startswith(b"[") and new.startswith(b"[")):
        return None
    before, after = list(_items(old)), list(_items(new))
    if before == after or sorted(before) != sorted(after):
        return None
    one, other = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    return _name(one), _name(other)


def _items(array: bytes) -> Iterator[bytes]:
    """Items of a JSON array as they stand there, without space around them."""
    depth, start = 0, 1
    for mark in _JSON_MARK.finditer(array):
        sign = mark[0]
        if sign in (b"[", b"{"):
            depth += 1
        elif sign in (b"]", b"}"):
            depth -= 1
        if (sign == b"," and depth == 1) or depth == 0:
            yield array[start : mark.start()].strip()
            start = mark.end()
        if depth == 0:
            return


def _name(item: bytes) -> str:
    named = _TOOL_NAME.search(item)
    return _snippet(item if named is None else named[1])


def _snippet(text: bytes) -> str:
    return text.decode("utf-8", "replace")[:SNIPPET_CHARS]
