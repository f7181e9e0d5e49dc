"""Which KV is saved on disk, what a request can have of it, and what goes when there is too much.

Rule 1: an entry belongs to (kind, scope, key, model, configuration), and there is one for each: what is saved
again takes its place.
Rule 2: that partitions, tokens decide: a request gets the entry of its scope and model that has the longest
token-exact prefix in common with it, whatever key or configuration that was saved under.
Rule 3: an entry in use is neither swept nor deleted.
Rule 4: why an entry is gone is remembered for a while; where the next one took its place, nothing is gone.
Rule 5: nothing here touches a file. What a method returns is what the caller has to do on disk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from polykv_proxy.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from polykv_proxy.core.types import PoolId, Scope, Tokens

MAX_TOMBSTONES = 512
QUADRATIC_TOKENS = 8192.0
"""Length from which computing a prompt costs more for its attention than for anything else, about."""
LARGEST_REST = 8
"""Tokens that are read for nothing to each token that need not be computed, at most."""


class Kind(StrEnum):
    """What an entry is the KV of."""

    SESSION = "session"
    POOL = "pool"


class Reason(StrEnum):
    """Why an entry is gone."""

    SWEPT = "swept"
    DELETED = "deleted"
    INEFFECTIVE = "ineffective"
    """The engine took it and reused less than it should have."""
    IDENTITY_CHANGED = "identity_changed"
    """The file is not what was saved, or no engine here can read it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """What a saved pool was, beyond its tokens."""

    pool_id: PoolId
    origin: str
    label: str | None = None
    pinned: bool = False
    ttl_s: float | None = None
    created_ts: float = 0.0
    last_access_ts: float = 0.0
    parent: PoolId | None = None
    branch_pos: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """One saved state, as its sidecar describes it."""

    kind: Kind
    key: str
    """Session or pool id; ``/`` nests."""
    scope: Scope
    model_id: str
    """Digest of everything that changes KV bytes."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Digests of the parts of the configuration, by name."""
    tokens: Tokens
    file: str
    """Its name in the engine's folder."""
    file_bytes: int
    file_digest: str
    created_ts: float
    pool: PoolRecord | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """What there is one entry for (rule 1)."""
        parts = (f"{name}={self.config[name]}" for name in sorted(self.config))
        return (self.kind.value, self.scope, self.key, self.model_id, *parts)


@dataclass(slots=True, eq=False)
class Entry:
    """A saved state, and how it is used."""

    state: SavedState
    used_ts: float
    uses: int = 0
    holds: int = 0
    """Who works with its file now."""

    @property
    def tokens(self) -> Tokens:
        """The state's."""
        return self.state.tokens

    @property
    def scope(self) -> Scope:
        """The state's."""
        return self.state.scope

    def value(self, now_ts: float) -> float:
        """What keeping it is worth: work that it spares, for the bytes it takes and the time it was idle."""
        tokens = len(self.tokens)
        work = tokens * (1.0 + tokens / QUADRATIC_TOKENS) * (1 + self.uses)
        return work / (max(1, self.state.file_bytes) * (1.0 + max(0.0, now_ts - self.used_ts)))


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An entry that is gone."""

    kind: Kind
    key: str
    scope: Scope
    tokens: int
    reason: Reason
    gone_ts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much may stay, and for how long."""

    max_bytes: int = 20 * 1024**3
    max_idle_s: float = 7 * 86_400.0
    min_free_bytes: int = 1024**3
    """Of the disk; below it entries go."""


class Catalogue:
    """Everything that is saved in one folder."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, ...], Entry] = {}
        self._keys: dict[tuple[Kind, Scope, str], dict[Entry, None]] = {}
        """Entries by what they are of, whatever model and configuration."""
        self._sessions: dict[str, PrefixIndex[Entry]] = {}
        """Sessions by what they hold, one index a model."""
        self._counts: Counter[tuple[Scope, str]] = Counter()
        """How many sessions of a scope and model there are."""
        self._tombstones: OrderedDict[tuple[Kind, Scope, str], Tombstone] = OrderedDict()
        self.total_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: tuple[str, ...]) -> Entry | None:
        """The entry of an identity."""
        return self._entries.get(identity)

    def add(self, state: SavedState, *, used_ts: float, uses: int = 0) -> Entry:
        """A state was saved; it takes the place of the one before, and what that was used stays known."""
        before = self._entries.get(state.identity)
        if before is not None:
            self._drop(before)
            uses += before.uses
        entry = Entry(state, used_ts, uses)
        self._entries[state.identity] = entry
        self._keys.setdefault((state.kind, state.scope, state.key), {})[entry] = None
        self.total_bytes += state.file_bytes
        self._tombstones.pop((state.kind, state.scope, state.key), None)
        if state.kind is Kind.SESSION:
            self._sessions.setdefault(state.model_id, PrefixIndex()).add(entry)
            self._counts[state.scope, state.model_id] += 1
        return entry

    def has(self, entry: Entry) -> bool:
        """Whether this very entry is still there."""
        return self._entries.get(entry.state.identity) is entry

    def remove(self, entry: Entry, reason: Reason, now_ts: float) -> bool:
        """An entry goes; False if it is in use, or was gone."""
        if entry.holds or not self.has(entry):
            return False
        self._drop(entry)
        state = entry.state
        name = (state.kind, state.scope, state.key)
        self._tombstones.pop(name, None)
        self._tombstones[name] = Tombstone(
            *name[:1], state.key, state.scope, len(state.tokens), reason, now_ts
        )
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return True

    def _drop(self, entry: Entry) -> None:
        state = entry.state
        del self._entries[state.identity]
        name = (state.kind, state.scope, state.key)
        del self._keys[name][entry]
        if not self._keys[name]:
            del self._keys[name]
        self.total_bytes -= state.file_bytes
        if state.kind is Kind.SESSION:
            self._sessions[state.model_id].remove(entry)
            self._counts[state.scope, state.model_id] -= 1

    # -- what there is -----------------------------------------------------------------------------------

    def holds_sessions(self, scope: Scope, model_id: str) -> bool:
        """Whether looking for a request's tokens can find anything."""
        return self._counts[scope, model_id] > 0

    def best(self, tokens: Tokens, scope: Scope, model_id: str) -> tuple[Entry, int] | None:
        """The session's state with most leading tokens in common with a prompt, and how many (rule 2)."""
        index = self._sessions.get(model_id)
        return None if index is None else index.match(tokens, scope)

    def pools(self, model_id: str) -> list[Entry]:
        """Saved pools of a model, shorter ones first, so that parents come before children."""
        found = [
            entry for entry in self if entry.state.kind is Kind.POOL and entry.state.model_id == model_id
        ]
        return sorted(found, key=lambda entry: len(entry.tokens))

    def under(self, key: str, scope: Scope | None) -> list[Entry]:
        """Entries of a key, as seen from a scope (None sees all); see ``is_under``."""
        return [entry for entry in self if scope in (None, entry.scope) and is_under(entry.state.key, key)]

    def tombstones(self, scope: Scope | None) -> list[Tombstone]:
        """What went, latest first."""
        return [each for each in reversed(self._tombstones.values()) if scope in (None, each.scope)]

    def moved(self, entry: Entry) -> tuple[str, ...]:
        """Parts of the configuration that differ from the latest other entry of the same key and model."""
        state = entry.state
        others = [
            each
            for each in self._keys.get((state.kind, state.scope, state.key), ())
            if each is not entry and each.state.model_id == state.model_id
        ]
        if not others:
            return ()
        latest = max(others, key=lambda each: each.state.created_ts).state.config
        names = sorted({*latest, *state.config})
        return tuple(name for name in names if latest.get(name) != state.config.get(name))

    # -- what goes ---------------------------------------------------------------------------------------

    def overdue(self, limits: Retention, now_ts: float, free_bytes: int | None) -> list[Entry]:
        """What a sweep has to remove: what was idle for too long, then the least valuable until all fits.

        Args:
            limits: what may stay.
            now_ts: epoch seconds.
            free_bytes: of the disk; None if that is not known.
        """
        idle = [entry for entry in self if not entry.holds and now_ts - entry.used_ts > limits.max_idle_s]
        gone = sum(entry.state.file_bytes for entry in idle)
        over = self.total_bytes - gone - limits.max_bytes
        if free_bytes is not None:
            over = max(over, limits.min_free_bytes - free_bytes - gone)
        taken = set(map(id, idle))
        rest = sorted(
            (entry for entry in self if not entry.holds and id(entry) not in taken and not _is_pinned(entry)),
            key=lambda entry: entry.value(now_ts),
        )
        for entry in rest:
            if over <= 0:
                break
            idle.append(entry)
            over -= entry.state.file_bytes
        return idle


def is_under(key: str, above: str) -> bool:
    """Whether a key is another, nested below it, or a further conversation of its name, as ``name#2``."""
    return key == above or key.startswith((f"{above}/", f"{above}#"))


def _is_pinned(entry: Entry) -> bool:
    return entry.state.pool is not None and entry.state.pool.pinned


def pays(  # noqa: PLR0913 - all that counts
    *,
    matched: int,
    held: int,
    saved: int,
    free_cells: int,
    window: int,
    min_gain: int,
) -> str | None:
    """Why restoring a state would not pay; None where it does.

    1. Pools or the slot hold as much, or nearly.
    2. Nearly all of it is another conversation's: it would be read, and fill cells, for nothing.
    3. It does not fit: for a moment the engine needs cells for all of it, whatever it shares afterwards.

    Args:
        matched: leading tokens that the state and the request have in common.
        held: leading tokens that the request would have anyway.
        saved: tokens of the state.
        free_cells: cells that nobody uses or counts on.
        window: of a slot.
        min_gain: tokens that are worth reading a file.
    """
    if matched - held < min_gain:
        return "no_gain"  # 1
    if saved - matched > LARGEST_REST * (matched - held):
        return "too_long"  # 2
    if saved > free_cells or saved >= window:
        return "no_room"  # 3
    return None


def goes_on(matched: int, saved: int) -> bool:
    """Whether so many common tokens make it that conversation, not one that began alike: half of it."""
    return 2 * matched > saved
