"""The two ends of answers that pass untouched, at the price of one small call for each piece of them.

The engine says what a request took in the last events of a stream (Anthropic's API: also in the first), or
at the end of a plain answer; how the answer begins is in the first. So the first pieces and the last few are
kept as they come, by reference, and read once the answer is complete.

While it computes a long prompt, the engine sends comments, or its progress where a client asked for that. An
answer begins with what follows.
"""

from __future__ import annotations

import json
import re
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.api.answer import Usage, decoded, read_usage

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PIECES = 6
"""Pieces kept from the beginning: the first token's event is one of them."""

BEGINNING_BYTES = 4096
"""Of these, as much is kept; a plain answer may be one piece."""

LAST_PIECES = 8
"""Pieces kept; the end of a stream comes in up to four."""

_MEMBER = re.compile(r'"(timings|usage)"\s*:\s*(?=\{)')

_PROGRESS = b'"prompt_progress":{'

BEGINNING_CHARS = 80

_CONTENT = re.compile(rb'"(?:content|text|delta)"\s*:\s*"((?:[^"\\]|\\.)+)"')
_REASONING = re.compile(rb'"(?:reasoning_content|thinking)"\s*:\s*"[^"]')

_PARSER = json.JSONDecoder()


class Tail:
    """The ends of one answer: ``observe`` each piece, read the rest when it is complete.

    Args:
        on_begun: called once, when anything came but signs that the engine is at the prompt.
    """

    __slots__ = ("_first", "_last", "_on_begun", "begun")

    def __init__(self, on_begun: Callable[[], object] | None = None) -> None:
        self._on_begun = on_begun
        self._first: list[bytes] = []
        self._last: deque[bytes] = deque(maxlen=LAST_PIECES)
        self.begun = False
        """Whether that was seen."""

    def observe(self, data: bytes) -> None:
        """A piece of the answer."""
        if not self.begun and self._waits(data):
            return
        if len(self._first) < FIRST_PIECES:
            self._first.append(data)
        self._last.append(data)

    def _waits(self, data: bytes) -> bool:
        """Whether the engine was still at the prompt; what tells its progress may tell more, and is kept."""
        event = data.rstrip().rpartition(b"\n\n")[2]
        if event.strip(b":") and _PROGRESS not in event:
            self.begun = True
            if self._on_begun is not None:
                self._on_begun()
            return False
        if _PROGRESS in data:
            self._last.append(data)
            self._first = self._first or [data]
        return True

    def beginning(self) -> bytes:
        """The first bytes of the answer; see ``begins_with``."""
        return b"".join(self._first)[:BEGINNING_BYTES]

    def usage(self, *, stream: bool) -> Usage:
        """What the engine says that the request took.

        Args:
            stream: whether the answer was an event stream.
        """
        data = b"".join(self._last)
        if not stream:
            return _usage_at_end(data)
        found = Usage()
        for piece in (b"".join(self._first), data):  # of a short answer all is read twice
            if not _says(piece):
                continue
            for event in piece.split(b"\n\n"):
                if _says(event):
                    found = found.updated(_usage(decoded(event[event.find(b"{") :])))
        return found


def _says(data: bytes) -> bool:
    """Whether usage may be in it. These cannot be part of a string in JSON text: its quotes are escaped."""
    return b'"timings"' in data or b'"usage"' in data


def begins_with(data: bytes) -> tuple[str | None, bool]:
    """How an answer begins, None where that does not show; and whether with reasoning.

    Args:
        data: its first bytes.
    """
    found, text = _CONTENT.search(data), None
    if found is not None:
        with suppress(msgspec.DecodeError):
            text = msgspec.json.decode(b'"%b"' % found[1], type=str)[:BEGINNING_CHARS]
    return text, _REASONING.search(data) is not None


def _usage_at_end(data: bytes) -> Usage:
    """Usage of a plain answer, also where its beginning is not here any more."""
    if not _says(data):
        return Usage()
    document = decoded(data)
    if document is None:
        document, text = {}, data.decode(errors="replace")
        for found in _MEMBER.finditer(text):
            with suppress(ValueError):
                document[found[1]] = _PARSER.raw_decode(text, found.end())[0]
    return _usage(document)


def _usage(document: dict[str, Any] | None) -> Usage:
    if document is None:
        return Usage()
    try:
        return read_usage(document)
    except (KeyError, TypeError, AttributeError):
        return Usage()  # not what this engine says; nobody depends on it
