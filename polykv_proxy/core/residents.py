"""What is resident in an engine's KV cells whether a request runs or not: pools, and what idle slots hold.

Rule 1: a cell is counted once: what several share belongs to one of them.
Rule 2: what nobody needs now, and can be had again, is taken back, least valuable first. What a running
request shares is needed.
Rule 3: one that has no name any more, and that running requests share, goes with the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Key: TypeAlias = "Hashable"
"""Names a resident, such as ``("slot", 3)`` or ``("pool", id)``."""


@dataclass(slots=True, eq=False)
class _Resident:
    cells: int
    value: float | None
    lasting: bool
    holders: int = 0
    """Running requests that share its cells."""
    going: bool = False
    """It was named to be taken back."""
    gone: bool = False
    """It has no name any more; its cells go with its last holder."""

    @property
    def reclaimable(self) -> bool:
        return self.value is not None and self.holders == 0


class Residents:
    """The residents of one engine, and their sums.

    Attributes:
        cells: that all of them hold.
        protected: of those, the cells that are not taken back.
        lasting: cells of pinned ones: requests must not wait for their end.
    """

    def __init__(self) -> None:
        self._known: dict[Key, _Resident] = {}
        self.cells = self.protected = self.lasting = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def cells_of(self, key: Key) -> int:
        """Cells of a resident; 0 if there is none of that name."""
        known = self._known.get(key)
        return 0 if known is None else known.cells

    def keep(self, key: Key, cells: int, *, value: float | None = None, lasting: bool = False) -> None:
        """A resident holds so many cells now; one that is known is changed, and is no longer going.

        Args:
            key: its name.
            cells: beyond what other residents hold; shared ones belong to one of them.
            value: what is lost if it is taken back; None: it is not.
            lasting: it is pinned: requests must not wait for its end.
        """
        old = self._known.get(key)
        holders = 0 if old is None else old.holders
        self._uncount(old)
        new = self._known[key] = _Resident(max(0, cells), value, lasting, holders)
        self._count(new)

    def drop(self, key: Key) -> None:
        """A resident is gone; one that is not known does not matter."""
        old = self._known.get(key)
        if old is None:
            return
        if old.holders:
            self._uncount(old)
            old.gone, old.lasting = True, False
            self._count(old)
            return
        self._uncount(self._known.pop(key))

    def hold(self, keys: Iterable[Key]) -> None:
        """A running request shares their cells; all of them are known."""
        for key in keys:
            each = self._known[key]
            self._uncount(each)
            each.holders += 1
            self._count(each)

    def let_go(self, keys: Iterable[Key]) -> None:
        """That request is over."""
        for key in keys:
            each = self._known[key]
            self._uncount(each)
            each.holders -= 1
            self._count(each)
            if each.gone and each.holders == 0:
                self._uncount(self._known.pop(key))

    def take_over(self, key: Key) -> None:
        """A request goes on with what a resident holds: they are its own now, unless others share them."""
        old = self._known.get(key)
        if old is not None and not old.holders:
            self._uncount(self._known.pop(key))

    def shared(self, keys: Iterable[Key]) -> int:
        """Cells of those that do not last."""
        return sum(each.cells for key in keys if (each := self._known.get(key)) and not each.lasting)

    def claimed(self, keys: Iterable[Key], replaces: Key | None) -> int:
        """Cells that can no longer be taken back once a request shares these and takes over that one."""
        claimed = sum(
            each.cells for key in keys if (each := self._known.get(key)) is not None and each.reclaimable
        )
        if replaces is not None and (old := self._known.get(replaces)) is not None:
            claimed -= 0 if old.reclaimable else old.cells
        return claimed

    @property
    def going(self) -> bool:
        """Whether one was named to be taken back, and is not gone yet."""
        return any(each.going for each in self._known.values())

    def reclaim(self, short: int) -> list[Key]:
        """Residents to take back, least valuable first, for so many cells to become empty.

        Each is named once: ``drop`` it when it is gone, or ``keep`` it when it would not go.
        """
        if short <= 0:
            return []
        short -= sum(each.cells for each in self._known.values() if each.going)
        idle = [(key, each) for key, each in self._known.items() if each.reclaimable and not each.going]
        named = []
        for key, each in sorted(idle, key=lambda item: item[1].value or 0.0):
            if short <= 0:
                break
            if each.cells:
                each.going = True
                short -= each.cells
                named.append(key)
        return named

    def _count(self, each: _Resident, sign: int = 1) -> None:
        self.cells += sign * each.cells
        if not each.reclaimable:
            self.protected += sign * each.cells
        if each.lasting:
            self.lasting += sign * each.cells

    def _uncount(self, each: _Resident | None) -> None:
        if each is not None:
            self._count(each, -1)
