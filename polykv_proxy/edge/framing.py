"""Where a message body ends: one small machine per kind of framing (RFC 9112 sections 6 and 7).

Pure and strict. A machine is fed raw bytes and says how many of them belong to the body; payload without
framing goes to ``sink``, if one is set. The caller may therefore forward the raw bytes untouched and still
know what was in them and where they ended.

Rule 1: a machine never accepts a byte beyond the end of its body.
Rule 2: chunk sizes are plain hexadecimal. Python's ``int`` takes signs, blanks and underscores; we do not.
Rule 3: lines have a bounded length, so a body can never make the proxy collect memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHUNK_LINE_BYTES = 4096
"""Longest chunk-size line with its extensions; they carry no meaning for us."""

MAX_TRAILER_BYTES = 16 * 1024
"""All trailer fields together."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n\x00]*)?\r\n")

COMMON_SIZES = {b"%x" % size: size for size in range(1, 4096)}
"""Sizes of chunks by their size line, as engines write it, for the look at the most common case."""

_SIZE, _DATA, _DATA_END, _TRAILER = range(4)


class FramingError(Exception):
    """Body bytes that contradict their framing."""


class Body:
    """A body without bytes, and the base of the others.

    Attributes:
        done: the body is complete.
        sink: called with every piece of payload, in order; may be changed between two feeds.
        payload_bytes: payload seen so far.
    """

    __slots__ = ("done", "payload_bytes", "sink")

    def __init__(self) -> None:
        self.done = True
        self.payload_bytes = 0
        self.sink: Callable[[bytes], object] | None = None

    def feed(self, data: bytes) -> int:  # noqa: ARG002 - the interface; nothing belongs to an empty body
        """Advance over raw bytes and return how many belong to this body.

        Raises:
            FramingError: the bytes are not framed as announced.
        """
        return 0

    def eof(self) -> bool:
        """Tell that the peer closed; returns whether the body is complete."""
        return self.done


class LengthBody(Body):
    """A body of a known number of bytes."""

    __slots__ = ("remaining",)

    def __init__(self, length: int) -> None:
        super().__init__()
        self.remaining = length
        self.done = length == 0

    def feed(self, data: bytes) -> int:
        """See ``Body.feed``."""
        used = len(data)
        if used > self.remaining:
            used = self.remaining
            data = data[:used]
        self.remaining -= used
        self.payload_bytes += used
        self.done = self.remaining == 0
        if used and self.sink is not None:
            self.sink(data)
        return used


class UntilCloseBody(Body):
    """A response body that ends with its connection (RFC 9112 section 6.3, rule 8)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def feed(self, data: bytes) -> int:
        """See ``Body.feed``."""
        self.payload_bytes += len(data)
        if self.sink is not None:
            self.sink(data)
        return len(data)

    def eof(self) -> bool:
        """See ``Body.eof``: here the close is the end."""
        self.done = True
        return True


class ChunkedBody(Body):
    """A chunked body (RFC 9112 section 7.1), chunk by chunk where they arrive whole.

    Attributes:
        between_chunks: the next byte starts a chunk; only here may another chunk be put in, or be taken
            note of by someone else (who then adds to ``payload_bytes``).
    """

    __slots__ = ("_line", "_remaining", "_state", "_trailer_bytes", "between_chunks")

    def __init__(self) -> None:
        super().__init__()
        self.done = False
        self.between_chunks = True
        self._state = _SIZE
        self._remaining = 0
        self._line = b""
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> int:
        """See ``Body.feed``."""
        pos, size = 0, len(data)
        if self.between_chunks:
            pos = self._whole_chunks(data)
        while pos < size and not self.done:
            pos = self._payload(data, pos) if self._state == _DATA else self._until_newline(data, pos)
        self.between_chunks = self._state == _SIZE and not self._line
        return pos

    def _whole_chunks(self, data: bytes) -> int:
        """Take the complete chunks at the start; returns where the rest begins."""
        pos, size = 0, len(data)
        match = _SIZE_LINE.match
        while pos < size and (line := match(data, pos)) is not None:
            start = line.end()
            end = start + int(line[1], 16)
            if end == start or data[end : end + 2] != b"\r\n":
                break  # the last chunk, one that is still arriving, or an error: the slow path tells
            self.payload_bytes += end - start
            if self.sink is not None:
                self.sink(data[start:end])
            pos = end + 2
        return pos

    def _payload(self, data: bytes, pos: int) -> int:
        piece = data[pos : pos + self._remaining]
        self._remaining -= len(piece)
        self.payload_bytes += len(piece)
        if self._remaining == 0:
            self._state = _DATA_END
        if self.sink is not None:
            self.sink(piece)
        return pos + len(piece)

    def _until_newline(self, data: bytes, pos: int) -> int:
        newline = data.find(b"\n", pos)
        end = len(data) if newline < 0 else newline + 1
        self._line += data[pos:end]
        if len(self._line) > MAX_CHUNK_LINE_BYTES:
            raise FramingError("a chunk-size or trailer line is too long")
        if self._state == _DATA_END and not b"\r\n".startswith(self._line):
            raise FramingError("a chunk is longer than its size says")
        if newline >= 0:
            line, self._line = self._line, b""
            self._take_line(line)
        return end

    def _take_line(self, line: bytes) -> None:
        if self._state == _SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None:
                raise FramingError("a chunk size is not a hexadecimal number")
            self._remaining = int(match[1], 16)
            self._state = _DATA if self._remaining else _TRAILER
        elif self._state == _DATA_END:
            self._state = _SIZE
        elif line == b"\r\n":
            self.done = True
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES or not line.endswith(b"\r\n") or b":" not in line:
                raise FramingError("trailer fields are malformed or too large")


def chunk(payload: bytes) -> bytes:
    """Frame payload as one chunk; empty payload gives nothing, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""


LAST_CHUNK = b"0\r\n\r\n"
