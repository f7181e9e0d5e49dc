"""What tells one GGUF file from another without reading all of it: size, header, table, some of its weights.

::

    "GGUF", u32 version, u64 tensors, u64 pairs, the pairs (key, type, value), the tensors (name, dimensions,
    type, offset), padding, weights

Models that were trained on from the same one may have the same header and table. Their weights differ
everywhere, or in some of the tensors only: so a piece of each is looked at, and pieces all over the file. Two
that differ in less than that, such as some rows of one tensor, are taken for one.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from polykv_proxy.engine.disk import progress

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each value type."""
_STRING, _ARRAY, _U32 = 8, 9, 4
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
_MAX_DIMENSIONS = 16
_PIECES, _PIECE_BYTES = 32, 16 * 1024
_TENSOR_BYTES = 4 * 1024
_ALIGNMENT = 32
"""Of the weights, where the header names no other."""


class NotGgufError(ValueError):
    """The file is no GGUF, or ends within its header."""


@dataclass(frozen=True, slots=True)
class GgufIdentity:
    """What a file is."""

    size: int
    header: str
    """SHA-256 of everything before the table of tensors."""
    tensors: str
    """SHA-256 of that table."""
    weights: str
    """SHA-256 of pieces of what follows: evenly spread, and the middle of each tensor."""

    def plain(self) -> dict[str, Any]:
        """For a digest."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gguf:
    """What was read of a file."""

    identity: GgufIdentity
    window: int | None
    """Tokens of the sliding window, where the header names one."""


def read(path: Path) -> Gguf:
    """Identity of one file.

    Raises:
        OSError: it cannot be read.
        NotGgufError: it is something else.
    """
    if path.stat().st_size == 0:
        raise NotGgufError("the file is empty")  # which mmap does not take
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        if reader.take(4) != MAGIC:
            raise NotGgufError("this is no GGUF file")
        reader.number("<I")
        tensors, pairs = reader.number("<Q"), reader.number("<Q")
        window, alignment = None, _ALIGNMENT
        for _ in range(pairs):
            key = reader.text()
            value = reader.value(reader.number("<I"))
            if key == b"general.alignment" and value:
                alignment = value
            if key.endswith(b".attention.sliding_window") and value:
                window = max(window or 0, value)
        table, offsets = reader.at, []
        for _ in range(tensors):
            reader.text()
            dimensions = reader.number("<I")
            if dimensions > _MAX_DIMENSIONS:
                raise NotGgufError("a tensor has more dimensions than there are")
            reader.take(8 * dimensions + 4)
            offsets.append(reader.number("<Q"))
        identity = GgufIdentity(
            size=len(data),
            header=sha256(data[:table]).hexdigest(),
            tensors=sha256(data[table : reader.at]).hexdigest(),
            weights=_pieces(data, reader.at, offsets, alignment),
        )
    return Gguf(identity, window)


def _pieces(data: mmap.mmap, start: int, offsets: list[int], alignment: int) -> str:
    """Digest of ``_PIECES`` runs of ``_PIECE_BYTES``, and of the middle ``_TENSOR_BYTES`` of each tensor.

    The first and the last bytes are among them.

    Args:
        data: the file.
        start: where its table ends.
        offsets: of its tensors.
        alignment: of the first of them.
    """
    digest = sha256()
    data.madvise(mmap.MADV_RANDOM)  # what lies between the pieces is not wanted
    last = max(start, len(data) - _PIECE_BYTES)
    for number in range(_PIECES):
        at = start + (last - start) * number // (_PIECES - 1)
        digest.update(data[at : at + _PIECE_BYTES])
        progress()
    begin = start + -start % alignment
    edges = [*sorted({min(begin + offset, len(data)) for offset in offsets}), len(data)]
    for at, end in pairwise(edges):
        middle = max(at, (at + end - _TENSOR_BYTES) // 2)
        digest.update(data[middle : min(end, middle + _TENSOR_BYTES)])
        progress()
    return digest.hexdigest()


def shards(path: Path) -> list[Path]:
    """All files of a model, of which one is given."""
    found = _SHARD.match(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise NotGgufError("the file ends within its header")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def text(self) -> bytes:
        return self.take(self.number("<Q"))

    def value(self, kind: int) -> int | None:
        """Pass a value; what it is, where it is an unsigned number or a list of those (the largest)."""
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            of, count = self.number("<I"), self.number("<Q")
            if of in _SCALARS:
                raw = self.take(_SCALARS[of] * count)
                return max(struct.unpack(f"<{count}I", raw), default=None) if of == _U32 else None
            for _ in range(count):
                self.value(of)
        elif kind in _SCALARS:
            raw = self.take(_SCALARS[kind])
            return int.from_bytes(raw, "little") if kind == _U32 else None
        else:
            raise NotGgufError(f"a value has the unknown type {kind}")
        return None
