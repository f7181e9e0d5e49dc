"""Requests of sessions that have no slot yet: what listings show of those who wait, wherever that is.

Rule 1: a request is here from its arrival until it has its slots: at the gate, in line, or before that for
its engine; again if it has to start over.
Rule 2: whose turn it is, is what was known when it came. One that goes on with nobody's conversation begins
one, which has no id until then; so does one whose session runs, or waits already.
Rule 3: telling costs the same for each of them, however long its conversation is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polykv_proxy.core.decisions import Ticket
    from polykv_proxy.core.records import RequestId
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Ask


@dataclass(slots=True, eq=False)
class Waiting:
    """One such request."""

    ask: Ask
    session: Session | None
    """Whose next turn it is, as far as that is known."""
    since_ts: float
    """When it arrived, in epoch seconds."""
    request_id: RequestId
    """Tells it from others that nobody named."""
    ticket: Ticket | None = None
    """Its place in the line for slots, once it asked for them."""


class WaitingRoom:
    """All of one engine, in order of arrival."""

    def __init__(self) -> None:
        self._here: dict[int, Waiting] = {}

    def __iter__(self) -> Iterator[Waiting]:
        """Those who wait; who was given slots and does not know it yet is not among them."""
        return (each for each in self._here.values() if each.ticket is None or each.ticket.lease is None)

    def come(self, waiting: Waiting) -> None:
        """It waits from now on."""
        waiting.ticket = None
        self._here[id(waiting)] = waiting

    def go(self, waiting: Waiting | None) -> None:
        """It has its slots, or left; no effect the second time."""
        self._here.pop(id(waiting), None)

    def told(self, holds: Callable[[Session], bool]) -> tuple[dict[Session, RequestId], list[Waiting]]:
        """Sessions whose next turn waits, with that, and requests that begin one, the first to arrive first.

        Args:
            holds: whether a session is still remembered.
        """
        turns: dict[Session, RequestId] = {}
        new = []
        for each in self:
            session = each.session
            if session is None or session in turns or session.running or not holds(session):
                new.append(each)
            else:
                turns[session] = each.request_id
        return turns, new
