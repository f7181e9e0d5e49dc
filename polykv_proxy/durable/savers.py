"""Which session saves under which key. Found by the key, however many sessions there are.

Rule 1: a session that named itself saves under its id; one without a name under its id and this run of the
proxy, since those ids are counted anew in each.
Rule 2: one that goes on from a state, or that was saved beside another's, saves under that key from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.types import SessionId

if TYPE_CHECKING:
    from polykv_proxy.core.sessions import Session, SessionBook
    from polykv_proxy.core.types import Scope

MIN_NOTED = 256
"""Keys that are noted before it is looked whose sessions are over."""


class Savers:
    """The sessions of one engine by their keys.

    Args:
        sessions: all that are remembered.
        run: tells this run of the proxy from others.
    """

    def __init__(self, sessions: SessionBook, run: str) -> None:
        self._sessions = sessions
        self._run = run
        self._noted: dict[tuple[Scope, str], list[Session]] = {}
        """Those of rule 2."""
        self._tidy_at = MIN_NOTED

    def key(self, session: Session) -> str:
        """What a session saves under."""
        if session.saved_as is not None:
            return session.saved_as
        if session.name is None:
            return f"auto/{self._run}/{session.session_id}"
        return session.session_id

    def of(self, scope: Scope, key: str) -> list[Session]:
        """The sessions that save under a key."""
        unnamed = key.removeprefix(f"auto/{self._run}/")
        named = [self._sessions.get(SessionId(each), scope) for each in {key, unnamed}]
        found = dict.fromkeys([*self._noted.get((scope, key), ()), *named])
        return [
            each
            for each in found
            if each is not None and self.key(each) == key and self._sessions.holds(each)
        ]

    def is_anothers(self, session: Session, key: str) -> bool:
        """Whether another session saves under a key."""
        return any(each is not session for each in self.of(session.scope, key))

    def save_as(self, session: Session, key: str) -> None:
        """From now on a session saves under that key (rule 2)."""
        session.saved_as = key
        name = (session.scope, key)
        if session not in self._noted.get(name, ()):
            self._noted[name] = [*self.of(*name), session] if name in self._noted else [session]
        if len(self._noted) > self._tidy_at:
            self._noted = {name: alive for name in self._noted if (alive := self.of(*name))}
            self._tidy_at = max(MIN_NOTED, 2 * len(self._noted))


def is_named(session: Session, key: str) -> bool:
    """Whether a key is of a session's name, or of none where it has none."""
    name = session.name
    return key.startswith("auto/") if name is None else key == name or key.startswith(f"{name}#")
