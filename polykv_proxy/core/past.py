"""What is remembered of conversations' last requests, to tell later why one had to be computed again.

Rule 1: bounded in number and in bytes. What was sent is kept while there is room; beyond that its outline
stays, and beyond that nothing. The conversation unused for the longest time goes first.
Rule 2: nothing here decides where a request runs: the memory may be wrong or gone at no cost but an answer.
Rule 3: conversations are found within a scope and a name only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator

    from polykv_proxy.core.outlines import Outline
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Chain
    from polykv_proxy.core.types import Scope, Tokens

PART_BYTES = 200
"""About what a part of an outline takes."""


@dataclass(slots=True, eq=False)
class Past:
    """A conversation's last request."""

    session: Session
    dialect: str
    """The API that it came in on."""
    chain: array[int]
    epoch: str
    """The engine's load that ran it."""
    body: bytes | None
    """What was sent; None: only the outline is left."""
    prompt_tokens: int | None = None
    resident_tokens: int | None = None
    """What its slot held when it was over."""
    answer: bytes = b""
    """The first bytes of its answer, as they came."""
    tokens: Tokens | None = None
    """Its prompt's, if they were needed anyway."""
    outline: Outline | None = None
    """Without text; made when the body goes."""
    counted_bytes: int = 0
    """What the book counts it for."""

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        held = 8 * len(self.chain) + len(self.answer)
        held += 0 if self.body is None else len(self.body)
        held += 0 if self.tokens is None else self.tokens.itemsize * len(self.tokens)
        return held + (0 if self.outline is None else PART_BYTES * len(self.outline.parts))


class PastBook:
    """The last request of each conversation, least recently used first.

    Args:
        keep: conversations.
        budget_bytes: of all of them together.
        summarise: makes the outline of one whose body is to go; without text.
    """

    def __init__(self, keep: int, budget_bytes: int, summarise: Callable[[Past], Outline]) -> None:
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._summarise = summarise
        self._pasts: OrderedDict[Session, Past] = OrderedDict()
        self._ends: dict[tuple[Scope, str | None, int], Past] = {}
        """By the last link of the chain: what continues a conversation has it in its own."""
        self._names: dict[tuple[Scope, str | None], dict[Session, Past]] = {}
        self._full: OrderedDict[Session, Past] = OrderedDict()
        """Those whose bodies are still here."""
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._pasts)

    def keep(self, past: Past) -> None:
        """A request of the conversation is over; what was known of it before is forgotten."""
        self._drop(past.session)
        session = past.session
        self._pasts[session] = past
        self._names.setdefault((session.scope, session.name), {})[session] = past
        if past.body is not None:
            self._full[session] = past
        if past.chain:
            self._ends[_end(past)] = past
        past.counted_bytes = past.size_bytes
        self.size_bytes += past.counted_bytes
        while len(self._pasts) > self._keep:
            self._drop(next(iter(self._pasts)))
        while self.size_bytes > self._budget_bytes and self._full:
            self._shrink(self._full.popitem(last=False)[1])
        while self.size_bytes > self._budget_bytes and self._pasts:
            self._drop(next(iter(self._pasts)))

    def of(self, session: Session) -> Past | None:
        """What is remembered of a conversation."""
        return self._pasts.get(session)

    def continued_by(self, scope: Scope, name: str | None, chain: Chain) -> Past | None:
        """The conversation that a request goes on with; the first link alone is nobody's."""
        for depth in range(len(chain), 1, -1):
            found = self._ends.get((scope, name, chain[depth - 1]))
            if found is not None:
                return found
        return None

    def recent(self, scope: Scope, name: str | None, most: int) -> Iterator[Past]:
        """The latest conversations of that name, ``most`` of them."""
        return islice(reversed(self._names.get((scope, name), {}).values()), most)

    def _shrink(self, past: Past) -> None:
        past.outline = self._summarise(past)
        past.body = past.tokens = None
        self.size_bytes += past.size_bytes - past.counted_bytes
        past.counted_bytes = past.size_bytes

    def _drop(self, session: Session) -> None:
        past = self._pasts.pop(session, None)
        if past is None:
            return
        namesakes = self._names[session.scope, session.name]
        del namesakes[session]
        if not namesakes:
            del self._names[session.scope, session.name]
        self._full.pop(session, None)
        self.size_bytes -= past.counted_bytes
        if past.chain and self._ends.get(_end(past)) is past:
            del self._ends[_end(past)]


def _end(past: Past) -> tuple[Scope, str | None, int]:
    return past.session.scope, past.session.name, past.chain[-1]
