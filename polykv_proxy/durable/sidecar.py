"""What stands beside a slot file: which state it is, in JSON, with a checksum over all of it. Pure.

The tokens are not in it: they are read from the slot file itself, and the sidecar says what they must be.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.core.catalogue import Kind, PoolRecord, SavedState
from polykv_proxy.core.types import PoolId, Scope
from polykv_proxy.durable.identity import canonical
from polykv_proxy.engine.slotfile import STATE_VERSION

if TYPE_CHECKING:
    from polykv_proxy.core.types import Tokens

VERSION = 1


class BadSidecarError(ValueError):
    """It is no sidecar of ours, or was changed."""


class _Pool(msgspec.Struct, forbid_unknown_fields=True):
    pool_id: str
    origin: str
    label: str | None
    pinned: bool
    ttl_s: float | None
    created_ts: float
    last_access_ts: float
    parent: str | None
    branch_pos: int


class Sidecar(msgspec.Struct, forbid_unknown_fields=True):
    """The document."""

    version: int
    state_version: int
    """Of the slot file."""
    kind: str
    key: str
    scope: str
    model_id: str
    config: dict[str, str]
    file: str
    file_bytes: int
    file_digest: str
    n_tokens: int
    tokens_digest: str
    created_ts: float
    used_ts: float
    uses: int
    pool: _Pool | None
    checksum: str = ""


def tokens_digest(tokens: Tokens) -> str:
    """SHA-256 of token ids."""
    return sha256(memoryview(tokens).cast("B")).hexdigest()


def write(state: SavedState, *, used_ts: float, uses: int) -> bytes:
    """The document of a state."""
    record = state.pool
    pool = None
    if record is not None:
        pool = _Pool(**{name: getattr(record, name) for name in _Pool.__struct_fields__})
    document = Sidecar(
        version=VERSION,
        state_version=STATE_VERSION,
        kind=state.kind.value,
        key=state.key,
        scope=state.scope,
        model_id=state.model_id,
        config=dict(state.config),
        file=state.file,
        file_bytes=state.file_bytes,
        file_digest=state.file_digest,
        n_tokens=len(state.tokens),
        tokens_digest=tokens_digest(state.tokens),
        created_ts=state.created_ts,
        used_ts=used_ts,
        uses=uses,
        pool=pool,
    )
    document.checksum = _checksum(document)
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def read(raw: bytes) -> Sidecar:
    """The document as it stands.

    Raises:
        BadSidecarError: it is damaged, of another version, or of another slot file format.
    """
    try:
        document = msgspec.json.decode(raw, type=Sidecar)
    except msgspec.DecodeError as error:
        raise BadSidecarError(f"not a sidecar: {error}") from None
    if document.version != VERSION:
        raise BadSidecarError(f"version {document.version}; this proxy writes {VERSION}")
    if document.checksum != _checksum(document):
        raise BadSidecarError("the checksum is wrong")
    if document.state_version != STATE_VERSION:
        raise BadSidecarError(f"a slot file of version {document.state_version}, not {STATE_VERSION}")
    if document.kind not in tuple(Kind):
        raise BadSidecarError(f"an unknown kind, {document.kind}")
    return document


def state_of(document: Sidecar, tokens: Tokens) -> SavedState:
    """The state, with the tokens that were read from its slot file.

    Raises:
        BadSidecarError: they are not those that were saved.
    """
    if len(tokens) != document.n_tokens or tokens_digest(tokens) != document.tokens_digest:
        raise BadSidecarError("the slot file holds other tokens")
    pool = None
    if document.pool is not None:
        values: dict[str, Any] = msgspec.structs.asdict(document.pool)
        parent = values.pop("parent")
        values["pool_id"] = PoolId(values["pool_id"])
        pool = PoolRecord(**values, parent=None if parent is None else PoolId(parent))
    return SavedState(
        kind=Kind(document.kind),
        key=document.key,
        scope=Scope(document.scope),
        model_id=document.model_id,
        config=document.config,
        tokens=tokens,
        file=document.file,
        file_bytes=document.file_bytes,
        file_digest=document.file_digest,
        created_ts=document.created_ts,
        pool=pool,
    )


def _checksum(document: Sidecar) -> str:
    members = msgspec.to_builtins(document)
    members.pop("checksum")
    return sha256(canonical(members)).hexdigest()
