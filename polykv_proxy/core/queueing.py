"""A bounded queue that is fair among pools.

Each pool has a line of its own. Within a line it is first come, first served, except that a step of priority
is worth so many seconds of waiting. Among the lines the one goes first whose turn is oldest: a line's turn
is as old as its first one has waited since the line was last served. So a pool with a thousand waiting
takes no more than its turns, nobody is overtaken for ever, and no clock is needed: which of two turns is
older does not change while both wait.

Rule 1: the number of those who wait is bounded, for each line by its own bound.
Rule 2: who leaves is gone at once, and its memory soon after.
Rule 3: looking changes nothing; only ``pop`` uses up a line's turn.
Rule 4: each operation takes logarithmic time, whatever the order in which they come and go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

T = TypeVar("T")

STEP_S = 30.0
"""Seconds of waiting that a step of priority is worth."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    item: T
    since: float
    priority: int
    line: _Line[T]
    gone: bool = False


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    name: Hashable
    heap: list[tuple[float, int, _Waiting[T]]] = field(default_factory=list)
    count: int = 0
    served_at: float = float("-inf")
    version: int = 0


class FairQueue(Generic[T]):
    """Those who wait, by pool.

    Args:
        max_depth: of all lines together.
        step_s: seconds of waiting that a step of priority is worth.
    """

    def __init__(self, max_depth: int, step_s: float = STEP_S) -> None:
        self._max_depth = max_depth
        self._step_s = step_s
        self._lines: dict[Hashable, _Line[T]] = {}
        self._turns: list[tuple[float, int, int, _Line[T]]] = []
        """Age of each line's turn; entries of another version than the line's are out of date."""
        self._members: dict[int, _Waiting[T]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, item: T) -> bool:
        return id(item) in self._members

    def depth(self, line: Hashable) -> int:
        """How many wait in a line."""
        known = self._lines.get(line)
        return 0 if known is None else known.count

    def push(self, item: T, now: float, *, line: Hashable = None, priority: int = 0, max_depth: int) -> bool:
        """Wait; False if there is no room, and then nothing changed.

        Args:
            item: compared by identity; once.
            now: monotonic seconds.
            line: the pool.
            priority: more goes first.
            max_depth: of the line.
        """
        if len(self._members) >= self._max_depth or self.depth(line) >= max_depth:
            return False
        into = self._lines.get(line)
        if into is None:
            into = self._lines[line] = _Line(line)
        waiting = _Waiting(item, now, priority, into)
        self._members[id(item)] = waiting
        heappush(into.heap, (now - priority * self._step_s, self._number(), waiting))
        into.count += 1
        if into.heap[0][2] is waiting:
            self._turn(into)
        return True

    def head(self) -> T | None:
        """Whose turn it is."""
        line = self._first()
        return None if line is None else line.heap[0][2].item

    def heads(self) -> Iterator[T]:
        """The first of each line, oldest turn first; nothing may be pushed or taken out meanwhile."""
        self._first()
        current = [entry for entry in self._turns if entry[2] == entry[3].version and entry[3].count]
        heapify(current)
        while current:
            yield heappop(current)[3].heap[0][2].item

    def pop(self, item: T, now: float) -> None:
        """It is its turn: take it out, and let the other lines go before its own."""
        waiting = self._members.get(id(item))
        if waiting is not None:
            waiting.line.served_at = now
            self.discard(item)

    def discard(self, item: T) -> bool:
        """It does not wait any more; returns whether it did."""
        waiting = self._members.pop(id(item), None)
        if waiting is None:
            return False
        waiting.gone = True
        line = waiting.line
        line.count -= 1
        if not line.count:
            line.version += 1
            line.heap.clear()
            del self._lines[line.name]
            self._tidy()
            return True
        if 2 * line.count + 8 < len(line.heap):
            line.heap = [entry for entry in line.heap if not entry[2].gone]
            heapify(line.heap)
        while line.heap[0][2].gone:
            heappop(line.heap)
        self._turn(line)
        return True

    def _turn(self, line: _Line[T]) -> None:
        """A line's first one or the time it was served may be another: so may the age of its turn."""
        line.version += 1
        first = line.heap[0][2]
        age = max(first.since, line.served_at) - first.priority * self._step_s
        heappush(self._turns, (age, self._number(), line.version, line))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._turns) > 2 * len(self._lines) + 8:
            self._turns = [entry for entry in self._turns if entry[2] == entry[3].version and entry[3].count]
            heapify(self._turns)

    def _first(self) -> _Line[T] | None:
        while self._turns:
            _, _, version, line = self._turns[0]
            if version == line.version and line.count:
                return line
            heappop(self._turns)
        return None

    def _number(self) -> int:
        self._next += 1
        return self._next
