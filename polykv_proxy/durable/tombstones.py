"""Why saved states are gone, for the next run of the proxy: one small file, with a checksum over it. Pure.

It decides nothing: where it is lost, or was changed, nobody knows why something is gone, and that is all.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.core.catalogue import Kind, Reason, Tombstone
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.identity import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 2


class BadTombstonesError(ValueError):
    """They are not ours, or were changed."""


class _Stone(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    key: str
    scope: str
    tokens: int
    reason: Reason
    gone_ts: float
    file: str
    variant: str


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    tombstones: list[_Stone]
    checksum: str = ""


def write(gone: Iterable[Tombstone]) -> bytes:
    """The document, in the order given."""
    stones = [_Stone(*(getattr(one, name) for name in _Stone.__struct_fields__)) for one in gone]
    document = _Document(VERSION, stones)
    document.checksum = _checksum(document)
    return msgspec.json.encode(document) + b"\n"


def read(raw: bytes) -> list[Tombstone]:
    """What was written, in that order.

    Raises:
        BadTombstonesError: it is damaged, or of another version.
    """
    try:
        document = msgspec.json.decode(raw, type=_Document)
    except msgspec.DecodeError as error:
        raise BadTombstonesError(str(error)) from None
    if document.version != VERSION or document.checksum != _checksum(document):
        raise BadTombstonesError("another version, or changed")
    return [
        Tombstone(**(msgspec.structs.asdict(one) | {"scope": Scope(one.scope)}))
        for one in document.tombstones
    ]


def _checksum(document: _Document) -> str:
    return sha256(canonical(msgspec.to_builtins(document.tombstones))).hexdigest()
