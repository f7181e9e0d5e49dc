"""Which KV is saved on disk, what a request can have of it, and what goes when there is too much.

Rule 1: an entry belongs to (kind, scope, key, model, configuration), and there is one for each: what is saved
again takes its place.
Rule 2: that partitions, tokens decide: a request gets the entry of its scope and model that has the longest
token-exact prefix in common with it, whatever key or configuration that was saved under.
Rule 3: an entry in use is not swept. One that turned out to be wrong, or that somebody wants to be gone, is
found by nobody any more; its file is there until the last who works with it is done.
Rule 4: why an entry is gone is remembered for a while; where the next one took its place, nothing is gone.
Rule 5: nothing here touches a file. What a method returns is what the caller has to do on disk.
Rule 6: looking for a request's tokens, or for a key, takes as long as what is found, not as what there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from polykv_proxy.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from polykv_proxy.core.types import PoolId, Scope, Tokens

MAX_TOMBSTONES = 512
QUADRATIC_TOKENS = 8192.0
"""Length from which computing a prompt costs more for its attention than for anything else, about."""


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

    @property
    def variant(self) -> str:
        """Which of those of its key."""
        return variant_of(self.model_id, self.config)


@dataclass(slots=True, eq=False)
class Entry:
    """A saved state, and how it is used."""

    state: SavedState
    used_ts: float
    uses: int = 0
    holds: int = 0
    """Who works with its file now."""
    number: int = 0
    """In the order in which they came."""

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
    file: str = ""
    """The name it had."""
    variant: str = ""
    """Which of those of its key it was, see ``variant_of``."""


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
        self._below: dict[str, dict[Entry, None]] = {}
        """Entries by their keys and by all that these are under."""
        self._pools: dict[str, dict[Entry, None]] = {}
        """Pools by model."""
        self._sessions: dict[str, PrefixIndex[Entry]] = {}
        """Sessions by what they hold, one index a model."""
        self._counts: Counter[tuple[Scope, str]] = Counter()
        """How many sessions of a scope and model there are."""
        self._tombstones: OrderedDict[tuple[Kind, Scope, str, str], Tombstone] = OrderedDict()
        self._came = 0
        self.burials = 0
        """Goes up whenever a tombstone comes or goes."""
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
        self._came += 1
        entry = Entry(state, used_ts, uses, number=self._came)
        self._entries[state.identity] = entry
        self._keys.setdefault((state.kind, state.scope, state.key), {})[entry] = None
        for key in above(state.key):
            self._below.setdefault(key, {})[entry] = None
        self.total_bytes += state.file_bytes
        if self._tombstones.pop((state.kind, state.scope, state.key, state.variant), None) is not None:
            self.burials += 1
        if state.kind is Kind.POOL:
            self._pools.setdefault(state.model_id, {})[entry] = None
        else:
            self._sessions.setdefault(state.model_id, PrefixIndex()).add(entry)
            self._counts[state.scope, state.model_id] += 1
        return entry

    def has(self, entry: Entry) -> bool:
        """Whether this very entry is still there."""
        return self._entries.get(entry.state.identity) is entry

    def remove(self, entry: Entry, reason: Reason, now_ts: float) -> bool:
        """An entry goes; False if it was gone, or is to be swept while it is in use (rule 3)."""
        if (entry.holds and reason is Reason.SWEPT) or not self.has(entry):
            return False
        self._drop(entry)
        state, count = entry.state, len(entry.tokens)
        self.bury(
            Tombstone(state.kind, state.key, state.scope, count, reason, now_ts, state.file, state.variant)
        )
        return True

    def bury(self, *gone: Tombstone) -> None:
        """Remember why entries are gone, in this order; of too many the first are forgotten."""
        for one in gone:
            name = (one.kind, one.scope, one.key, one.variant)
            self._tombstones.pop(name, None)
            self._tombstones[name] = one
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self.burials += 1

    def _drop(self, entry: Entry) -> None:
        state = entry.state
        del self._entries[state.identity]
        _take_out(self._keys, (state.kind, state.scope, state.key), entry)
        for key in above(state.key):
            _take_out(self._below, key, entry)
        self.total_bytes -= state.file_bytes
        if state.kind is Kind.POOL:
            _take_out(self._pools, state.model_id, entry)
        else:
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
        return sorted(self._pools.get(model_id, ()), key=lambda entry: len(entry.tokens))

    def under(self, key: str, scope: Scope | None) -> list[Entry]:
        """Entries of a key, as seen from a scope (None sees all); see ``is_under``."""
        return [entry for entry in self._below.get(key, ()) if scope in (None, entry.scope)]

    def page(
        self, scope: Scope | None, *, key: str | None = None, after: int = 0, limit: int
    ) -> tuple[list[Entry], int | None]:
        """Some entries in the order in which they came, and the number to go on after; None: that is all.

        Args:
            scope: who asks; None sees all.
            key: only those of this key, see ``is_under``; None: of all.
            after: number of the last one that was seen.
            limit: at most so many.
        """
        among = list(self._entries.values() if key is None else self._below.get(key, ()))
        del among[: bisect_right(among, after, key=lambda entry: entry.number)]
        if scope is not None:
            among = [entry for entry in among if entry.state.scope == scope]
        found = among[: limit + 1]
        return found[:limit], found[limit - 1].number if len(found) > limit else None

    def tombstones(self, scope: Scope | None, key: str | None = None) -> list[Tombstone]:
        """What went, latest first; with a key only what was under it."""
        return [
            each
            for each in reversed(self._tombstones.values())
            if scope in (None, each.scope) and (key is None or is_under(each.key, key))
        ]

    def moved(self, entry: Entry) -> tuple[str, ...]:
        """Parts of the configuration that differ from the last other entry of the same key and model."""
        state = entry.state
        for each in reversed(self._keys.get((state.kind, state.scope, state.key), {})):
            if each is not entry and each.state.model_id == state.model_id:
                latest = each.state.config
                break
        else:
            return ()
        names = sorted({*latest, *state.config})
        return tuple(name for name in names if latest.get(name) != state.config.get(name))

    # -- what goes ---------------------------------------------------------------------------------------

    def overdue(
        self,
        limits: Retention,
        now_ts: float,
        free_bytes: int | None,
        busy: AbstractSet[Entry] = frozenset(),
    ) -> list[Entry]:
        """What a sweep has to remove: what was idle for too long, then the least valuable until all fits.

        Args:
            limits: what may stay.
            now_ts: epoch seconds.
            free_bytes: of the disk; None if that is not known.
            busy: what somebody works with, beyond those whose files are being read.
        """
        free = [entry for entry in self if not entry.holds and entry not in busy]
        idle = [entry for entry in free if now_ts - entry.used_ts > limits.max_idle_s]
        gone = sum(entry.state.file_bytes for entry in idle)
        over = self.total_bytes - gone - limits.max_bytes
        if free_bytes is not None:
            over = max(over, limits.min_free_bytes - free_bytes - gone)
        if over <= 0:
            return idle
        taken = set(map(id, idle))
        rest = sorted(
            (entry for entry in free if id(entry) not in taken and not _is_pinned(entry)),
            key=lambda entry: entry.value(now_ts),
        )
        for entry in rest:
            if over <= 0:
                break
            idle.append(entry)
            over -= entry.state.file_bytes
        return idle


def variant_of(model_id: str, config: Mapping[str, str]) -> str:
    """Which of the states of a key one is: a digest of its model and configuration."""
    parts = (f"{name}={config[name]}" for name in sorted(config))
    return sha256("\0".join((model_id, *parts)).encode()).hexdigest()[:16]


def is_under(key: str, above: str) -> bool:
    """Whether a key is another, nested below it, or a further conversation of its name, as ``name#2``."""
    return key == above or key.startswith((f"{above}/", f"{above}#"))


def above(key: str) -> list[str]:
    """All keys that a key is under (``is_under``), itself among them."""
    return [key[:at] for at, mark in enumerate(key) if mark in "/#"] + [key]


K = TypeVar("K")


def _take_out(index: dict[K, dict[Entry, None]], key: K, entry: Entry) -> None:
    del index[key][entry]
    if not index[key]:
        del index[key]


def _is_pinned(entry: Entry) -> bool:
    return entry.state.pool is not None and entry.state.pool.pinned
