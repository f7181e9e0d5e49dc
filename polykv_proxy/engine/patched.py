"""What the patched engine's own routes say, as core values. Pure: bytes in, values out.

Their contract is ``docs/reference/engine-protocol.md``; ``PROTOCOL_VERSION`` is checked when an engine
becomes ready.
"""

from __future__ import annotations

import msgspec

from polykv_proxy.core.types import (
    EngineFacts,
    EngineSample,
    OverflowSample,
    PoolNumber,
    PoolSample,
    PoolUid,
    SlotId,
    SlotSample,
    SlotState,
)
from polykv_proxy.engine.wire import PromptTimings, SlotFile
from polykv_proxy.errors import UnavailableError

PROTOCOL_VERSION = 1


class _Info(msgspec.Struct):
    version: int
    epoch: str
    build_info: str
    n_slots: int
    max_pools: int
    n_cells: int
    n_ctx_slot: int
    bytes_per_cell: int
    type_k: str
    type_v: str


class _Kv(msgspec.Struct):
    n_cells: int
    n_used: int


class _Slot(msgspec.Struct):
    id: int
    state: SlotState
    id_task: int
    tag: int
    n_gen_total: int
    n_prompt_total: int
    n_cached_total: int
    n_tokens: int
    n_pool_shared: int
    n_ctx: int
    pool_uid: int
    t_gen_last_us: int | None = None
    waits: bool | None = None


class _Pool(msgspec.Struct):
    id_pool: int
    uid: int
    n_tokens: int


class _Overflow(msgspec.Struct):
    n_waited: int
    n_slots_cleared: int
    n_pools_released: int
    n_ended: int
    n_refused: int


class _Counters(msgspec.Struct):
    epoch: str
    n_deferred: int
    kv: _Kv
    slots: list[_Slot]
    pools: list[_Pool]
    t_us: int | None = None
    overflow: _Overflow | None = None


class Materialized(msgspec.Struct):
    """Answer to a pool that was computed."""

    uid: int
    n_tokens: int
    timings: PromptTimings
    file_bytes: int | None = None
    """Size of its file, where a pool is one."""


class SnapshotTaken(msgspec.Struct):
    """Answer to a pool that was made of a slot."""

    uid: int
    n_parent: int
    """Leading tokens whose cells are the parent's."""
    tokens: list[int]
    file_bytes: int | None = None
    """Size of its file, where a pool is one."""


class _Freed(msgspec.Struct):
    n_cells_freed: int


class PoolRestored(msgspec.Struct):
    """Answer to a pool that was made of a file."""

    uid: int
    n_tokens: int


class _PoolSaved(msgspec.Struct):
    n_tokens: int
    n_written: int


_info = msgspec.json.Decoder(_Info)
_counters = msgspec.json.Decoder(_Counters)
_materialized = msgspec.json.Decoder(Materialized)
_snapshot = msgspec.json.Decoder(SnapshotTaken)
_freed = msgspec.json.Decoder(_Freed)
_pool_saved = msgspec.json.Decoder(_PoolSaved)
_pool_restored = msgspec.json.Decoder(PoolRestored)


def read_info(body: bytes) -> tuple[EngineFacts, dict[str, str]]:
    """``GET /polykv/engine``: facts, and what of them changes KV bytes.

    Raises:
        UnavailableError: a protocol version that this proxy does not speak.
        msgspec.ValidationError: not such a document.
    """
    info = _info.decode(body)
    if info.version != PROTOCOL_VERSION:
        raise UnavailableError(
            f"the engine speaks protocol {info.version}, this proxy {PROTOCOL_VERSION}: rebuild one of them",
            code="engine_protocol",
        )
    facts = EngineFacts(
        epoch=info.epoch,
        slots=info.n_slots,
        max_pools=info.max_pools,
        cells=info.n_cells,
        ctx_tokens=info.n_ctx_slot,
        bytes_per_cell=info.bytes_per_cell,
        build=info.build_info,
    )
    return facts, {"type_k": info.type_k, "type_v": info.type_v}


def read_counters(body: bytes, now: float) -> EngineSample:
    """``GET /polykv/engine/counters``, received at monotonic second ``now``."""
    counters = _counters.decode(body)
    return EngineSample(
        epoch=counters.epoch,
        taken_at=now,
        cells_used=counters.kv.n_used,
        cells_total=counters.kv.n_cells,
        deferred=counters.n_deferred,
        slots=tuple(
            SlotSample(
                slot=SlotId(slot.id),
                state=slot.state,
                task=slot.id_task,
                tag=slot.tag,
                gen_total=slot.n_gen_total,
                prompt_total=slot.n_prompt_total,
                cached_total=slot.n_cached_total,
                tokens=slot.n_tokens,
                shared_tokens=slot.n_pool_shared,
                pool_uid=PoolUid(slot.pool_uid),
                ctx_tokens=slot.n_ctx,
                last_token_s=_seconds(slot.t_gen_last_us),
                waits=slot.waits,
            )
            for slot in counters.slots
        ),
        pools=tuple(
            PoolSample(PoolNumber(pool.id_pool), PoolUid(pool.uid), pool.n_tokens) for pool in counters.pools
        ),
        clock_s=_seconds(counters.t_us),
        overflow=_overflow(counters.overflow),
    )


def _overflow(counted: _Overflow | None) -> OverflowSample | None:
    if counted is None:
        return None
    return OverflowSample(
        waited=counted.n_waited,
        slots_cleared=counted.n_slots_cleared,
        pools_released=counted.n_pools_released,
        ended=counted.n_ended,
        refused=counted.n_refused,
    )


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6


def read_materialized(body: bytes) -> Materialized:
    """Answer to a materialized pool."""
    return _materialized.decode(body)


def read_snapshot(body: bytes) -> SnapshotTaken:
    """Answer to a snapshot."""
    return _snapshot.decode(body)


def read_freed(body: bytes) -> int:
    """Answer to a released pool: cells that nobody else held."""
    return _freed.decode(body).n_cells_freed


def read_pool_file(body: bytes) -> SlotFile:
    """Answer to a saved pool."""
    saved = _pool_saved.decode(body)
    return SlotFile(saved.n_tokens, saved.n_written)


def read_pool_restored(body: bytes) -> PoolRestored:
    """Answer to a restored pool."""
    return _pool_restored.decode(body)
