"""The head of a slot file: which tokens the engine saved. Pure but for one function that reads a file.

::

    u32 magic "qsgg", u32 version, u32 n, then n 32-bit words: -1, 1, count, the token ids, media keys, zeros

Older engines write the token ids alone. The KV that follows is the engine's business.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from polykv_proxy.core.types import as_tokens
from polykv_proxy.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from polykv_proxy.core.types import Tokens

STATE_VERSION = 4
"""Of the KV in the files that the pinned engine writes; it reads no other."""

_MAGIC = b"qsgg"
_HEAD = struct.Struct("<4sII")
_STATE_HEAD = 3
_MAX_WORDS = 1 << 26
"""No context is as long; beyond it the file is something else."""


class UnreadableError(UnavailableError):
    """A slot file cannot be read now, which says nothing of what is in it."""

    code = "slot_file_unreadable"

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the slot file cannot be read: {error.strerror}")


def read_file(path: Path) -> Tokens:
    """Token ids of a slot file.

    Raises:
        UnavailableError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            return read_tokens(file)
    except OSError as error:
        raise UnreadableError(error) from None


def read_version(path: Path) -> int:
    """Format version of a slot file.

    Raises:
        UnavailableError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
    except OSError as error:
        raise UnreadableError(error) from None
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise UnavailableError("this is no slot file", code="slot_file")
    version: int = _HEAD.unpack(head)[1]
    return version


def read_tokens(file: BinaryIO) -> Tokens:
    """Token ids from the start of a slot file.

    Raises:
        UnavailableError: no slot file, a truncated one, or one that holds media.
    """
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise UnavailableError("this is no slot file", code="slot_file")
    _, _, count = _HEAD.unpack(head)
    raw = file.read(4 * count) if count <= _MAX_WORDS else b""
    if len(raw) < 4 * count or not raw:
        raise UnavailableError("the slot file ends within its tokens", code="slot_file")
    words = as_tokens(struct.unpack(f"<{count}i", raw))
    tokens = words
    if count >= _STATE_HEAD and words[0] == -1:
        tokens = words[_STATE_HEAD : _STATE_HEAD + words[2]]
        if len(tokens) != words[2]:
            raise UnavailableError("the slot file ends within its tokens", code="slot_file")
    if any(token < 0 for token in tokens):
        raise UnavailableError("the slot holds media, which have no token ids", code="slot_file")
    return tokens
