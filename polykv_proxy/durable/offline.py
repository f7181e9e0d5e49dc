"""Saved states without a proxy or an engine: what there is, whether it is right, and making it less.

Rule: a folder that a running proxy works with is only looked at; changing it is the proxy's. An engine that
runs by itself changes nothing there unasked.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from polykv_proxy.core.catalogue import Catalogue, Reason
from polykv_proxy.durable.identity import config_hash
from polykv_proxy.durable.names import sidecar_name
from polykv_proxy.durable.store import Store, StoreError
from polykv_proxy.engine import slotfile
from polykv_proxy.engine.claims import store_lock
from polykv_proxy.engine.filelock import try_lock
from polykv_proxy.errors import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from polykv_proxy.core.catalogue import Entry, Retention, SavedState, Tombstone

FIRST_TOKENS = 8


class Folder:
    """The saved states of one engine.

    Args:
        path: where they are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path)
        seen = self.store.scan()
        self.problems = seen.problems
        self.catalogue = Catalogue()
        self.catalogue.bury(*self.store.tombstones())
        for one in seen.found:
            self.catalogue.add(one.state, used_ts=one.used_ts, uses=one.uses)

    def listing(self) -> list[dict[str, Any]]:
        """Its entries, those used last first."""
        return [
            {
                "key": entry.state.key,
                "kind": entry.state.kind.value,
                "n_tokens": len(entry.tokens),
                "bytes": entry.state.file_bytes,
                "last_used_ts": entry.used_ts,
                "model_id": entry.state.model_id,
                "config_hash": config_hash(entry.state.config),
                "config_changed": list(self.catalogue.moved(entry)),
                "file": str(self.path / entry.state.file),
            }
            for entry in sorted(self.catalogue, key=lambda each: -each.used_ts)
        ]

    def wrong(self) -> list[str]:
        """What is wrong, every byte looked at; a line each."""
        reasons = {entry.state.file: _why_wrong(self.store, entry.state) for entry in self.catalogue}
        return [*self.problems, *(f"{file}: {why}" for file, why in reasons.items() if why is not None)]

    def claim(self) -> int:
        """Keep proxies out; the descriptor is to be closed.

        Raises:
            ConflictError: one works with it now.
        """
        claim = try_lock(store_lock(self.path))
        if claim is None:
            raise ConflictError(
                f"{self.path}: a running proxy works with it; ask that: DELETE /polykv/cache/…"
            )
        return claim

    def prune(self, limits: Retention, now_ts: float, *, everything: bool) -> tuple[int, int]:
        """Remove what may not stay, and litter; returns how many states and bytes went.

        Raises:
            ConflictError: a proxy works with it.
        """
        claim = self.claim()
        try:
            self.store.open()
            gone = list(self.catalogue)
            if not everything:
                gone = self.catalogue.overdue(limits, now_ts, self.store.free_bytes())
            self.remove(gone, Reason.SWEPT, now_ts)
        finally:
            os.close(claim)
        return len(gone), sum(entry.state.file_bytes for entry in gone)

    def remove(self, gone: list[Entry], reason: Reason, now_ts: float) -> None:
        """They go; whoever calls has the claim."""
        for entry in gone:
            self.store.delete(entry.state)
            self.catalogue.remove(entry, reason, now_ts)
        if gone:
            self.store.keep_tombstones(self.catalogue.tombstones(None)[::-1])


def delete(among: list[Folder], key: str, now_ts: float) -> int:
    """Delete a key's states and those of all keys nested below it from all folders, or from none.

    Returns how many.

    Raises:
        ConflictError: a proxy works with one of them.
        StoreError: a disk refuses.
    """
    found = [(folder, entries) for folder in among if (entries := folder.catalogue.under(key, None))]
    with ExitStack() as claims:
        for folder, _ in found:
            claims.callback(os.close, folder.claim())
        for folder, entries in found:
            folder.remove(entries, Reason.DELETED, now_ts)
    return sum(len(entries) for _, entries in found)


def folders(state_dir: Path) -> list[Folder]:
    """Those of all engines of a proxy, and of such as run by themselves in folders of their own below."""
    paths = [*sorted(state_dir.glob("slots-*")), *sorted(state_dir.glob("*/slots-*"))]
    return [Folder(path) for path in paths if path.is_dir()]


def inspect(file: Path, *, all_tokens: bool) -> dict[str, Any]:
    """What a slot file says of itself, and what its sidecar says of it, if it has one; or why it is gone.

    Raises:
        UnavailableError: it cannot be read, or is no slot file.
    """
    if not file.exists() and (gone := _grave(file)) is not None:
        return {
            "file": str(file),
            "key": gone.key,
            "kind": gone.kind.value,
            "n_tokens": gone.tokens,
            "gone": gone.reason.value,
            "gone_ts": gone.gone_ts,
        }
    tokens = slotfile.read_file(file)
    found: dict[str, Any] = {
        "file": str(file),
        "version": slotfile.read_version(file),
        "bytes": file.stat().st_size,
        "n_tokens": len(tokens),
        "tokens": list(tokens if all_tokens else tokens[:FIRST_TOKENS]),
    }
    for one in Store(file.parent).scan().found:
        if one.state.file == file.name:
            found |= {
                "key": one.state.key,
                "kind": one.state.kind.value,
                "model_id": one.state.model_id,
                "config_hash": config_hash(one.state.config),
                "sidecar": sidecar_name(one.state),
                "right": _why_wrong(Store(file.parent), one.state) is None,
            }
    return found


def _grave(file: Path) -> Tombstone | None:
    return next((one for one in Store(file.parent).tombstones() if one.file == file.name), None)


def _why_wrong(store: Store, state: SavedState) -> str | None:
    """What is wrong with a state's file, or why nobody can tell."""
    try:
        return store.check(state)
    except StoreError as error:
        return error.message


def table(rows: Iterable[dict[str, Any]], now_ts: float) -> str:
    """A listing for people."""
    lines = [("KEY", "KIND", "TOKENS", "MB", "IDLE", "CONFIG", "CHANGED", "MODEL")]
    lines += [
        (
            row["key"],
            row["kind"],
            str(row["n_tokens"]),
            f"{row['bytes'] / 1e6:.1f}",
            _age(now_ts - row["last_used_ts"]),
            row["config_hash"][:8] if row["kind"] == "session" else "-",
            ",".join(row["config_changed"]) or "-",
            row["model_id"][:8],
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in text)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
