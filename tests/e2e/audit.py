"""What must be true of an idle engine and of the proxy's picture of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is told about one moment at which nothing runs."""

    counters: dict[str, Any]
    """The engine's own, read directly."""
    listed: dict[str, Any]
    """``GET /polykv/pools``."""
    sessions: list[dict[str, Any]]
    """``GET /polykv/sessions``."""
    bytes_per_cell: int

    @property
    def resident(self) -> list[dict[str, Any]]:
        """The pools that hold cells."""
        return [pool for pool in self.listed["pools"] if pool["residency"] == "resident"]

    @property
    def riders(self) -> list[dict[str, Any]]:
        """Slots that share cells, with a pool or with what is left of one."""
        holders = [*self.listed["pools"], *self.listed["draining"]]
        return [rider for holder in holders for rider in holder["sessions"]]

    def problems(self) -> list[str]:
        """Where the two stories differ, or one does not add up."""
        return [*self._cells(), *self._sequence_ids(), *self._sessions()]

    def _cells(self) -> Iterator[str]:
        """POOL-10: every used cell has one owner."""
        owned = {
            "own": sum(pool["own_kv_bytes"] for pool in self.listed["pools"]) // self.bytes_per_cell,
            "private": sum(rider["suffix_n_tokens"] or 0 for rider in self.riders),
            "unpooled": sum(slot["cells"] for slot in self.listed["unpooled"]),
            "draining": sum(rest["cells"] for rest in self.listed["draining"]),
        }
        used = self.counters["kv"]["n_used"]
        if not sum(owned.values()) == self.listed["kv_cells_used"] == used:
            yield f"{owned} make {sum(owned.values())} of {self.listed['kv_cells_used']}, engine {used}"
        if self.listed["unattributed_cells"] != 0:
            yield f"{self.listed['unattributed_cells']} cells are nobody's"
        for pool in self.resident:
            if pool["own_kv_bytes"] != pool["own_len"] * self.bytes_per_cell:
                yield f"{pool['pool_id']} owns {pool['own_kv_bytes']} bytes for {pool['own_len']} tokens"
        private = {rider["slot"]: rider["suffix_n_tokens"] for rider in self.riders}
        shared = {
            slot["id"]: slot["n_tokens"] - slot["n_pool_shared"]
            for slot in self.counters["slots"]
            if slot["n_pool_shared"]
        }
        if private != shared:
            yield f"private cells by slot are {private}, engine {shared}"

    def _sequence_ids(self) -> Iterator[str]:
        """The engine holds the resident pools and nothing else under the pools' sequence ids."""
        lingering = [rest for rest in self.listed["draining"] if rest["lingers"]]
        whole = [*self.resident, *lingering]
        lengths = Counter(pool["prefix_len"] for pool in whole)
        held = Counter(pool["n_tokens"] for pool in self.counters["pools"])
        if lengths != held:
            yield f"resident pools are {lengths}, engine {held}"
        if self.listed["pool_seq_ids_used"] != len(whole):
            yield f"{self.listed['pool_seq_ids_used']} sequence ids for {len(whole)} pools"
        strange = [pool for pool in self.listed["pools"] if pool["residency"] not in ("resident", "evicted")]
        if strange:
            yield f"neither resident nor evicted: {strange}"

    def _sessions(self) -> Iterator[str]:
        """No session runs, and each is in one slot, which holds something, or in none."""
        if self.counters["n_deferred"]:
            yield f"{self.counters['n_deferred']} tasks wait in the engine"
        slots = {slot["id"]: slot for slot in self.counters["slots"]}
        at_home = [session for session in self.sessions if session["slot"] is not None]
        if len({session["slot"] for session in at_home}) != len(at_home):
            yield f"sessions share a slot: {at_home}"
        for session in self.sessions:
            if session["state"] != "idle":
                yield f"runs: {session}"
            if session["resident"] != (session["slot"] is not None):
                yield f"resident nowhere: {session}"
        for session in at_home:
            if session["ctx_used"] not in (None, slots[session["slot"]]["n_tokens"]):
                yield f"holds {slots[session['slot']]['n_tokens']} tokens: {session}"
        known = {session["session_id"] for session in self.sessions}
        named = [each["session_id"] for each in [*self.riders, *self.listed["unpooled"]]]
        if len(set(named) - {None}) != len([name for name in named if name is not None]):
            yield f"a session is listed twice: {named}"
        if not set(named) <= {*known, None}:
            yield f"listed but not known: {set(named) - known}"
