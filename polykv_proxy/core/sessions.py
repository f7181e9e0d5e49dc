"""Sessions: client conversations, and where the state of each is.

Rule 1: a name is a namespace. Coding agents send side calls and parallel sub-agents under one id, so several
conversations may run under it; each has an id of its own.
Rule 2: names and ids live within a scope. Another key's session of the same id is another session, and
neither key can tell from its own ids whether there is one.
Rule 3: what is remembered is bounded: sessions out of use are forgotten, and beyond a number the oldest.
Rule 4: a session begins with a request that the engine did something for. Until then it is one of a request
that runs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polykv_proxy.core.rates import DecodeRate
from polykv_proxy.core.types import SessionId
from polykv_proxy.errors import AmbiguousSessionError, ConflictError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from polykv_proxy.core.types import LeaseId, PoolId, Scope, SessionKey, SlotId

SESSION_IDLE_S = 300.0
"""Seconds without a request after which a session that no slot holds is over."""

MAX_SESSIONS = 10_000
"""Sessions remembered at once; beyond it the one that was idle for the longest time is forgotten."""

EXPIRY_S = 1.0
"""Seconds between two looks for sessions that are over."""


@dataclass(slots=True, eq=False)
class Session:
    """A conversation and where its state is."""

    session_id: SessionId
    name: str | None
    """What the client called it; several concurrent conversations may share a name."""
    scope: Scope
    started_ts: float
    slot: SlotId | None = None
    """The slot that holds its KV, if one still does."""
    taken: bool = False
    """Where none does: whether another conversation took the slot."""
    pool: PoolId | None = None
    """The pool that its last attached request was attached to, from the moment it was sent, while its turns
    go on from there."""
    moves_to: PoolId | None = None
    """The pool that its next request attaches to if it names none."""
    running: bool = False
    closed: bool = False
    """Whether somebody said that it is over: then nobody goes on from what it left, wherever that is."""
    turns: int = 0
    last_seen: float = 0.0
    ttft_s: float | None = None
    """Of the last streamed answer: from its arrival at the proxy to its first token."""
    lease: LeaseId | None = None
    """Its last request that the engine did something for."""
    context_tokens: int | None = None
    """Tokens of the conversation after its last answer, where the answer told."""
    re_rooted: bool = False
    """Whether it moved to another root, and no turn was completed there yet: what it held before says nothing
    about what it will hold."""
    rate: DecodeRate = field(default_factory=DecodeRate)
    """How fast tokens come to it."""
    delivered: LeaseId | None = None
    """Its last request whose answer went out whole: what the slot holds since is worth saving."""
    saved: LeaseId | None = None
    """The one that the state on disk is of."""
    coming: LeaseId | None = None
    """The one whose state is on its way there."""
    refused: LeaseId | None = None
    """The one that was not saved when it could have been."""
    refused_at: float = 0.0
    """When that was."""
    saved_as: str | None = None
    """The key of that state."""
    kept: tuple[str, int] | None = None
    """The file of a state, and how many leading tokens of it the slot still has; None: nobody knows."""
    config: dict[str, str] = field(default_factory=dict)
    """Digests of what decides how its turns become tokens."""

    @property
    def key(self) -> SessionKey:
        """Tells it from all others of its engine."""
        return self.scope, self.session_id


class SessionBook:
    """All sessions of one engine, least recently used first.

    Args:
        prefix: of the ids of sessions that nobody named; differs between the engines of one proxy.
    """

    def __init__(self, prefix: str = "auto-") -> None:
        self._prefix = prefix
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._names: dict[tuple[Scope, str], list[Session]] = {}
        self._next_auto = 1
        self._next_expiry = 0.0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: SessionId, scope: Scope) -> Session | None:
        """A session of a scope by its id."""
        return self._sessions.get((scope, session_id))

    def seen(self, session_id: SessionId, scope: Scope | None) -> list[Session]:
        """The sessions of an id that a scope sees: one at most, but for an administrator (None: sees all)."""
        if scope is None:
            return [session for session in self if session.session_id == session_id]
        session = self.get(session_id, scope)
        return [] if session is None else [session]

    def need(self, session_id: SessionId, scope: Scope | None, *, param: str = "session_id") -> Session:
        """A session by id, as seen from a scope (None: an administrator, who sees all).

        Raises:
            NotFoundError: there is none, or it is another key's.
            AmbiguousSessionError: several keys have one.
        """
        found = self.seen(session_id, scope)
        require_one(session_id, found, param=param)
        return found[0]

    def idle(self, session_id: SessionId, scope: Scope | None) -> Session:
        """Like ``need``, for what cannot be done to one that runs.

        Raises:
            NotFoundError: there is none.
            ConflictError: it runs, or several keys have one.
        """
        session = self.need(session_id, scope)
        if session.running:
            raise ConflictError(
                f"session {session_id} runs; wait for its request, or leave it", code="session_running"
            )
        return session

    def holds(self, session: Session) -> bool:
        """Whether this very session is still remembered."""
        return self._sessions.get(session.key) is session

    def idle_namesake(self, scope: Scope, name: str | None) -> Session | None:
        """The latest session of that name, if it is idle and resident nowhere: it can go on anywhere."""
        if name is None:
            return None
        namesakes = self._names.get((scope, name))
        if not namesakes:
            return None
        latest = max(namesakes, key=lambda session: session.last_seen)
        return latest if latest.slot is None and not latest.running else None

    def begin(self, scope: Scope, name: str | None, now_ts: float) -> Session:
        """A new session; its id is the first that its scope has free."""
        if name is None:
            wanted = f"{self._prefix}{self._next_auto}"
            self._next_auto += 1
        else:
            wanted = name
        candidate, number = wanted, 1
        while (scope, candidate) in self._sessions:
            number += 1
            candidate = f"{wanted}#{number}"
        session = Session(SessionId(candidate), name, scope, started_ts=now_ts)
        self._sessions[session.key] = session
        if name is not None:
            self._names.setdefault((scope, name), []).append(session)
        return session

    def touch(self, session: Session, now: float) -> None:
        """A request of the session begins."""
        self.note(session, now)
        session.running = True
        session.turns += 1

    def on_sent(self, session: Session, pool: PoolId | None, *, continues: bool) -> None:
        """A request of it goes to the engine; whatever the answer proves, it is on this pool from now on.

        1. Attached: on that one, and it goes on from other tokens if it was on another.
        2. It goes on in its slot: where it was, since the slot goes on sharing what it shared.
        3. It begins in a slot without a pool: on none.

        Args:
            session: whose it is.
            pool: what the request is attached to.
            continues: whether its slot holds what it goes on with.
        """
        if pool is not None:
            session.moves_to = None
            if not continues and session.pool not in (None, pool):
                self.re_root(session)
            session.pool = pool  # 1
        elif not continues:
            session.pool = None  # 3

    @staticmethod
    def re_root(session: Session) -> None:
        """It goes on from other tokens: how full its context is shows after its next answer."""
        session.re_rooted, session.context_tokens = True, None

    def on_migrated(self, session: Session, now: float) -> None:
        """What it held is gone, and its next request may come to any slot: the name tells whose it is."""
        session.pool = None
        self.re_root(session)
        if self.holds(session):
            self.note(session, now)

    def note(self, session: Session, now: float) -> None:
        """It is in use: of its namesakes the latest, and the last to be forgotten."""
        self._sessions.move_to_end(session.key)
        session.last_seen = now

    def expire(self, now: float) -> list[Session]:
        """Forget sessions that are over; returns those that a slot still held.

        1. One that runs stays.
        2. Beyond the bound the oldest goes, whatever holds it.
        3. Out of use for long and held by no slot: it goes.
        """
        if now < self._next_expiry and len(self._sessions) <= MAX_SESSIONS:
            return []
        self._next_expiry = now + EXPIRY_S
        resident = []
        for session in list(self._sessions.values()):
            crowded = len(self._sessions) > MAX_SESSIONS
            if not crowded and now - session.last_seen <= SESSION_IDLE_S:
                break  # all that follow were used later
            if session.running or not (crowded or session.slot is None):
                continue
            self._forget(session)
            if session.slot is not None:
                resident.append(session)
        return resident

    def end(self, session: Session) -> None:
        """Somebody says that it is over, whatever holds it."""
        session.closed = True
        self.drop(session)

    def drop(self, session: Session) -> None:
        """Its first request came to nothing, as when the engine refuses its key: there is no such session."""
        if self.holds(session):
            self._forget(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.key]
        if session.name is not None:
            namesakes = self._names[session.scope, session.name]
            namesakes.remove(session)
            if not namesakes:
                del self._names[session.scope, session.name]


def require_one(session_id: SessionId, found: Iterable[Session], *, param: str = "session_id") -> None:
    """Raise unless the sessions that were found under an id are there, and all of one scope.

    Raises:
        NotFoundError: there is none.
        AmbiguousSessionError: they are of several scopes; it lists them.
    """
    scopes = sorted({session.scope for session in found})
    if not scopes:
        raise NotFoundError(f"session {session_id} does not exist", code="session_not_found", param=param)
    if len(scopes) > 1:
        raise AmbiguousSessionError(
            f"{len(scopes)} API keys have a session {session_id}; say with ?scope= whose is meant",
            param=param,
            scopes=scopes,
        )
