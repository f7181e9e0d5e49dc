"""State as JSON: what the status routes show. Pure, reads the plane, decides nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from polykv_proxy import __version__
from polykv_proxy.core.experience import compaction_pressure, context_of, headroom, pressure
from polykv_proxy.core.keeping import holds_otherwise, is_held, is_orphan, last_use, resting, riding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from polykv_proxy.api import shapes
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import Scope, SlotId

N = TypeVar("N", int, float)

FEATURES = ("polykv_pools_v1", "polykv_fork_v1", "polykv_snapshot_v1", "polykv_auto_match_v1")
"""Named features; clients branch on these, never on versions."""


def pools(
    planes: Mapping[str, ControlPlane], scope: Scope | None, now: float, *, orphans: bool = False
) -> dict[str, Any]:
    """Every pool that ``scope`` may see (None: all), and how all used cells are accounted for.

    Used cells are the own cells of the pools and of those that drain, the private cells of the sessions
    listed below either, those of unpooled slots, what is other keys', and what is not attributed. Figures
    of several engines are added up; one that does not tell makes the sum unknown. So does one whose last
    reading is too old to speak of the present.

    Args:
        planes: the engines' states by the engines' names.
        scope: whose eyes.
        now: monotonic seconds.
        orphans: list only pools that are pinned for nobody; every figure stays that of all.
    """
    parts = [_engine_pools(name, plane, scope, now) for name, plane in planes.items()]
    lists = ("pools", "unpooled", "draining")
    sums = [key for key in parts[0] if key not in lists and key not in ("engine", "tree_depth")]
    return {
        "pools": [each for part in parts for each in part["pools"] if each["orphaned_pin"] or not orphans],
        "tree_depth": max(part["tree_depth"] for part in parts),
        **{key: _sum(part[key] for part in parts) for key in sums},
        "unpooled": [each for part in parts for each in part["unpooled"]],
        "draining": [each for part in parts for each in part["draining"]],
        "engines": [{key: value for key, value in part.items() if key not in lists} for part in parts],
    }


def _sum(figures: Iterable[N | None]) -> N | None:
    known = list(figures)
    return None if None in known else sum(figure for figure in known if figure is not None)


def _engine_pools(name: str, plane: ControlPlane, scope: Scope | None, now: float) -> dict[str, Any]:
    """One engine's part of ``pools``."""
    visible = [pool for pool in plane.tree if scope in (None, pool.scope)]
    facts, sample = plane.facts, plane.present(now)
    owned = None if sample is None else plane.ownership
    named = {
        session.slot: session.session_id
        for session in plane.sessions
        if session.slot is not None and scope in (None, session.scope)
    }
    pools_used, pools_max = plane.tree.sequence_ids
    ours = {node.pool_id for node in plane.tree.nodes() if scope in (None, node.scope)}
    return {
        "engine": name,
        "pools": [pool_view(name, plane, pool) for pool in visible],
        "tree_depth": max((pool.depth() for pool in visible), default=0),
        "seq_ids_used": None if facts is None else facts.slots + pools_used,
        "seq_ids_max": None if facts is None else facts.slots + pools_max,
        "pool_seq_ids_used": pools_used,
        "pool_seq_ids_max": pools_max,
        "kv_cells_used": None if sample is None else sample.cells_used,
        "kv_cells_total": plane.cells_total,
        "unpooled": []
        if owned is None
        else [
            {
                "engine": name,
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
                "engine": name,
                "pool_id": rest.pool_id if rest.pool_id in ours else None,
                "cells": rest.cells,
                "holders": rest.holders,
                "lingers": rest.lingers,
                "prefix_len": rest.prefix_len,
                "sessions": [_rider(plane, slot, scope) for slot in rest.slots],
            }
            for rest in owned.draining
        ],
        "other_keys_cells": 0
        if owned is None
        else sum(
            owned.own.get(pool.pool_id, 0)
            + sum(owned.suffix[slot] for slot in owned.riders.get(pool.pool_id, ()))
            for pool in plane.tree
            if scope not in (None, pool.scope)
        ),
        "unattributed_cells": None if owned is None else owned.unattributed,
    }


def pool_view(engine: str, plane: ControlPlane, pool: PrefixPool) -> shapes.Pool:
    """One pool of an engine; bytes are by ownership."""
    cells = {} if plane.ownership is None else plane.ownership.own
    cell_bytes = None if plane.facts is None else plane.facts.bytes_per_cell
    children = [child.pool_id for child in pool.living_children]
    riders = () if plane.ownership is None else plane.ownership.riders.get(pool.pool_id, ())
    coming = [
        session.slot
        for session in plane.sessions
        if session.pool == pool.pool_id and session.slot is not None
    ]
    slots = sorted({*riders, *(slot for slot in coming if not holds_otherwise(plane.ownership, slot))})
    parent, branch_pos = pool.edge
    held = is_held(pool, riding(plane.sample)) or bool(slots)
    ends = None if pool.ttl_s is None or pool.pinned or held else last_use(pool) + pool.ttl_s
    return {
        "pool_id": pool.pool_id,
        "engine": engine,
        "scope": pool.scope,
        "label": pool.label,
        "parent": None if parent is None else parent.pool_id,
        "branch_pos": branch_pos,
        "prefix_len": pool.prefix_len,
        "own_len": pool.own_len,
        "own_kv_bytes": _bytes(cells.get(pool.pool_id, 0), cell_bytes),
        "subtree_kv_bytes": _bytes(sum(cells.get(each.pool_id, 0) for each in pool.subtree()), cell_bytes),
        "file_bytes": pool.file_bytes,
        "residency": pool.state.value,
        "pinned": pool.pinned,
        "pinned_by_descendants": held,
        "ttl_s": pool.ttl_s,
        "expires_ts": ends,
        "orphaned_pin": pool.pinned
        and is_orphan(pool, riding(plane.sample), resting(plane.sessions, plane.ownership)),
        "origin": pool.origin.value,
        "created_at": pool.created_ts,
        "last_access_ts": pool.last_access_ts,
        "hits": pool.hits,
        "children": children,
        "sessions": [_rider(plane, slot, pool.scope) for slot in slots],
    }


def sessions(planes: Mapping[str, ControlPlane], scope: Scope | None) -> shapes.Sessions:
    """Every session that ``scope`` may see, of each engine those that begin, then the last used first."""
    found: list[shapes.Session] = []
    hidden = 0
    for name, plane in planes.items():
        seen = _Seen(name, plane, scope)
        for row, since in seen.begin():
            none: shapes.Session = {
                **row,
                "slot": None,
                "resident": False,
                "turns": 0,
                "ttft_ms": None,
                "started_ts": since,
            }
            found.append(none)
        for row, session in seen.known():
            one: shapes.Session = {
                **row,
                "slot": session.slot,
                "resident": session.slot is not None,
                "turns": session.turns,
                "ttft_ms": _ms(session.ttft_s),
                "started_ts": session.started_ts,
            }
            found.append(one)
        hidden += seen.hidden
    return {"sessions": found, "other_keys_sessions": hidden}


class _Seen:
    """The sessions of one engine as a scope sees them, those among them that wait."""

    def __init__(self, engine: str, plane: ControlPlane, scope: Scope | None) -> None:
        self._engine = engine
        self._plane = plane
        self._scope = scope
        self._turns, self._new = plane.who_waits()

    @property
    def hidden(self) -> int:
        """How many it may not see."""
        scopes = [*(each.scope for each in self._plane.sessions), *(each.ask.scope for each in self._new)]
        return sum(self._scope not in (None, each) for each in scopes)

    def begin(self) -> Iterator[tuple[shapes.SessionRate, float]]:
        """Those whose first request waits, and since when; the last to arrive first."""
        facts = self._plane.facts
        for each in reversed(self._new):
            if self._scope in (None, each.ask.scope):
                row: shapes.SessionRate = {
                    "engine": self._engine,
                    "session_id": None,
                    "name": each.ask.name,
                    "request_id": each.request_id,
                    "scope": each.ask.scope,
                    "pool_id": None,
                    "state": "waiting",
                    "tps_ewma": None,
                    "ctx_used": None,
                    "ctx_total": None if facts is None else facts.ctx_tokens or None,
                    "ctx_headroom_tokens": None,
                }
                yield row, each.since_ts

    def known(self) -> Iterator[tuple[shapes.SessionRate, Session]]:
        """All others, the last used first."""
        plane = self._plane
        for session in reversed(list(plane.sessions)):
            if self._scope in (None, session.scope):
                context = context_of(session, plane.sample, plane.facts)
                waits = "waiting" if session in self._turns else "idle"
                row: shapes.SessionRate = {
                    "engine": self._engine,
                    "session_id": session.session_id,
                    "name": session.name,
                    "request_id": self._turns.get(session),
                    "scope": session.scope,
                    "pool_id": session.pool,
                    "state": "running" if session.running else waits,
                    "tps_ewma": rounded(session.rate.tps),
                    "ctx_used": context.used,
                    "ctx_total": context.total,
                    "ctx_headroom_tokens": context.headroom,
                }
                yield row, session


def properties(
    plane: ControlPlane,
    patch: str | None = None,
    durable: Mapping[str, Any] | None = None,
    admission: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``opencoti`` member of ``/props``.

    Args:
        plane: the control plane.
        patch: identity of the patches that the engine was built with, where it is known.
        durable: whether KV is saved, and why not.
        admission: what holds for sessions that name no pool.
    """
    return {
        "version": __version__,
        "engine_patch": patch,
        "capability": plane.capability.value,
        "capability_reason": plane.capability_reason,
        "features": list(FEATURES) if plane.capability.has_pools else [],
        "engine_build": None if plane.facts is None else plane.facts.build,
        "engine_epoch": None if plane.facts is None else plane.facts.epoch or None,
        "max_pools": None if plane.facts is None else plane.facts.max_pools,
        "kv_cells_total": plane.cells_total,
        "kv_bytes_per_cell": None if plane.facts is None else plane.facts.bytes_per_cell or None,
        "attach_shortfall_total": plane.pools.shortfalls,
        "durable_kv": durable,
        "policy": {"pools": asdict(plane.policy), "admission": admission},
    }


def _rider(plane: ControlPlane, slot: SlotId, scope: Scope | None) -> shapes.Rider:
    """A slot that shares a pool's cells, and whose it is if ``scope`` may know."""
    session = next((each for each in plane.sessions if each.slot == slot), None)
    suffix = None if plane.ownership is None else plane.ownership.suffix.get(slot)
    cell_bytes = None if plane.facts is None else plane.facts.bytes_per_cell
    if session is None or scope not in (None, session.scope):
        session = None
    return {
        "session_id": None if session is None else session.session_id,
        "slot": slot,
        "suffix_n_tokens": suffix,
        "marginal_kv_bytes": None if suffix is None else _bytes(suffix, cell_bytes),
        "tps_ewma": None if session is None else rounded(session.rate.tps),
        "ttft_ms": None if session is None else _ms(session.ttft_s),
        "state": "running" if session is not None and session.running else "idle",
    }


def rates(planes: Mapping[str, ControlPlane], scope: Scope | None, now: float, now_ts: float) -> shapes.Rates:
    """What the engines do now, and how fast tokens come to each session that ``scope`` may see.

    Everything is of the last reading; None where that is too old, or not known yet. Figures of several
    engines are added up; one that does not tell makes the sum unknown.
    """
    books = [plane.experience.book for plane in planes.values()]
    active = [tps for book in books for tps in book.active_tps(now)]
    uses = [use for plane in planes.values() if (use := pressure(plane.present(now))) is not None]
    use = max(uses, default=None)
    seen = [_Seen(name, plane, scope) for name, plane in planes.items()]
    return {
        "ts": now_ts,
        "aggregate_tps": rounded(_sum(book.generated_tps(now) for book in books)),
        "mean_active_tps": rounded(sum(active) / len(active) if active else None),
        "prefill_tps": rounded(_sum(book.prompt_tps(now) for book in books)),
        "pressure": rounded(use),
        "compaction_pressure": rounded(compaction_pressure(use)),
        "sessions": [row for each in seen for row, _ in (*each.begin(), *each.known())],
        "other_keys_sessions": sum(each.hidden for each in seen),
    }


def slot_member(
    plane: ControlPlane, slot: SlotId, scope: Scope | None, used: int | None, window: int | None
) -> shapes.SlotMember:
    """The ``opencoti`` member of one slot in ``/slots``.

    Args:
        plane: the control plane.
        slot: its number.
        scope: whose sessions may be named; None: all.
        used: tokens that the engine says it holds.
        window: tokens that it can hold.
    """
    session = plane.session_in(slot)
    if session is not None and scope not in (None, session.scope):
        session = None
    return {
        "pool_id": None if session is None else session.pool,
        "session_id": None if session is None else session.session_id,
        "tps_ewma": None if session is None else rounded(session.rate.tps),
        "ctx_used": used,
        "ctx_headroom_tokens": headroom(used, window, plane.sample),
    }


def rounded(value: float | None) -> float | None:
    """A figure without digits that nobody can tell apart."""
    return None if value is None else round(value, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def _bytes(cells: int, bytes_per_cell: int | None) -> int | None:
    return None if bytes_per_cell is None else cells * bytes_per_cell
