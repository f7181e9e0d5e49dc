"""State as JSON: what the status routes show. Pure, reads the plane, decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polykv_proxy import __version__
from polykv_proxy.core.types import Capability

if TYPE_CHECKING:
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import Scope

FEATURES = ("polykv_pools_v1", "polykv_fork_v1", "polykv_snapshot_v1", "polykv_auto_match_v1")
"""Named features; clients branch on these, never on versions."""


def pools(plane: ControlPlane, scope: Scope | None) -> dict[str, Any]:
    """Every pool that ``scope`` may see (None: all), and how all used cells are accounted for."""
    visible = [pool for pool in plane.tree if scope in (None, pool.scope)]
    facts, sample, owned = plane.facts, plane.sample, plane.ownership
    named = {
        session.slot: session.session_id
        for session in plane.sessions
        if session.slot is not None and scope in (None, session.scope)
    }
    ours = {node.pool_id for node in plane.tree.nodes() if scope in (None, node.scope)}
    return {
        "pools": [pool_view(plane, pool) for pool in visible],
        "tree_depth": max((pool.depth() for pool in visible), default=0),
        "seq_ids_used": None if facts is None else facts.slots + plane.tree.sequences_used,
        "seq_ids_max": None if facts is None else facts.slots + facts.max_pools,
        "pool_seq_ids_used": plane.tree.sequences_used,
        "pool_seq_ids_max": plane.tree.max_pools,
        "kv_cells_used": None if sample is None else sample.cells_used,
        "kv_cells_total": None if facts is None else facts.cells,
        "unpooled": []
        if owned is None
        else [
            {
                "slot": slot.slot,
                "session_id": named.get(slot.slot),
                "cells": slot.cells,
                "state": slot.state.value,
            }
            for slot in owned.unpooled
        ],
        "draining": []
        if owned is None
        else [
            {
                "pool_id": rest.pool_id if rest.pool_id in ours else None,
                "cells": rest.cells,
                "holders": rest.holders,
            }
            for rest in owned.draining
        ],
        "unattributed_cells": None if owned is None else owned.unattributed,
    }


def pool_view(plane: ControlPlane, pool: PrefixPool) -> dict[str, Any]:
    """One pool; bytes are by ownership."""
    cells = {} if plane.ownership is None else plane.ownership.own
    cell_bytes = None if plane.facts is None else plane.facts.bytes_per_cell
    children = [child.pool_id for child in pool.children if not child.released]
    attached = [session for session in plane.sessions if session.pool == pool.pool_id]
    resident = [session for session in attached if session.slot is not None]
    return {
        "pool_id": pool.pool_id,
        "label": pool.label,
        "parent": None if pool.parent is None or pool.parent.released else pool.parent.pool_id,
        "branch_pos": pool.branch_pos,
        "prefix_len": pool.prefix_len,
        "own_len": pool.own_len,
        "own_kv_bytes": _bytes(cells.get(pool.pool_id, 0), cell_bytes),
        "subtree_kv_bytes": _bytes(sum(cells.get(each.pool_id, 0) for each in pool.subtree()), cell_bytes),
        "residency": pool.state.value,
        "pinned": pool.pinned,
        "orphaned_pin": pool.pinned and not resident and not children,
        "origin": pool.origin.value,
        "created_at": pool.created_ts,
        "last_access_ts": pool.last_access_ts,
        "hits": pool.hits,
        "children": children,
        "sessions": [_attached_session(plane, session) for session in resident],
    }


def sessions(plane: ControlPlane, scope: Scope | None) -> dict[str, Any]:
    """Every session that ``scope`` may see, most recently used first."""
    seen = [session for session in plane.sessions if scope in (None, session.scope)]
    return {"sessions": [_session(plane, session) for session in reversed(seen)]}


def properties(plane: ControlPlane) -> dict[str, Any]:
    """The ``opencoti`` member of ``/props``."""
    pools_work = plane.capability is Capability.ZERO_COPY
    return {
        "version": __version__,
        "capability": plane.capability.value,
        "capability_reason": plane.capability_reason,
        "features": list(FEATURES) if pools_work else [],
        "engine_build": None if plane.facts is None else plane.facts.build,
        "engine_epoch": None if plane.facts is None else plane.facts.epoch or None,
        "max_pools": None if plane.facts is None else plane.facts.max_pools,
        "kv_cells_total": None if plane.facts is None else plane.facts.cells,
        "kv_bytes_per_cell": None if plane.facts is None else plane.facts.bytes_per_cell or None,
        "attach_shortfall_total": plane.shortfalls,
    }


def _attached_session(plane: ControlPlane, session: Session) -> dict[str, Any]:
    suffix = None
    if plane.ownership is not None and session.slot is not None:
        suffix = plane.ownership.suffix.get(session.slot)
    cell_bytes = None if plane.facts is None else plane.facts.bytes_per_cell
    return {
        "session_id": session.session_id,
        "suffix_n_tokens": suffix,
        "marginal_kv_bytes": None if suffix is None else _bytes(suffix, cell_bytes),
        "tps_ewma": None,
        "ttft_ms": None if session.ttft_s is None else session.ttft_s * 1000.0,
        "state": "running" if session.running else "idle",
    }


def _session(plane: ControlPlane, session: Session) -> dict[str, Any]:
    used = None
    if plane.sample is not None and session.slot is not None:
        used = plane.sample.slots[session.slot].tokens
    return {
        "session_id": session.session_id,
        "pool_id": session.pool,
        "slot": session.slot,
        "state": "running" if session.running else "idle",
        "resident": session.slot is not None,
        "turns": session.turns,
        "ctx_used": used,
        "ctx_total": None if plane.facts is None else plane.facts.ctx_tokens,
        "ttft_ms": None if session.ttft_s is None else session.ttft_s * 1000.0,
        "started_ts": session.started_ts,
    }


def _bytes(cells: int, bytes_per_cell: int | None) -> int | None:
    return None if bytes_per_cell is None else cells * bytes_per_cell
