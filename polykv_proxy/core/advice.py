"""What keeps conversations from sharing, as far as it was seen in how they open.

Rule 1: an opening is looked at once. One that was seen before costs a look-up.
Rule 2: two openings are compared only within a scope, and a difference is reported only where most of what
follows it is the same: else they are different prompts, and nothing is lost.
Rule 3: bounded: so many openings, so many bytes of each, so many findings; the oldest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polykv_proxy.core.volatile import VolatileKind, volatile_part

if TYPE_CHECKING:
    from polykv_proxy.core.types import Scope
    from polykv_proxy.core.volatile import Volatile

MAX_SEEN = 4096
MAX_OPENINGS = 64
MAX_PART_BYTES = 128 * 1024
MAX_FINDINGS = 256

PAUSE_S = 1.0
"""After a look that found what was known already, the scope is not looked at for so long."""

MIN_LOST_BYTES = 256
"""A difference with less text behind it costs nothing worth a word."""

_PROBES = 8
_PROBE_BYTES = 48


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation opens: what many conversations have in common, or should."""

    api: str
    system: bytes
    tools: bytes


@dataclass(slots=True)
class Finding:
    """A part that keeps conversations from sharing what follows it."""

    kind: VolatileKind
    section: str
    """``system`` or ``tools``."""
    api: str
    old: str
    new: str
    shared_bytes: int
    """Bytes of the section before the difference."""
    lost_bytes: int
    """Bytes of the section behind it, which cannot be shared."""
    first_seen_ts: float
    last_seen_ts: float
    times: int = 1
    """Looks that found it. Not every request is looked at."""


class AdviceBook:
    """All that was found so far."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[Scope, int], None] = OrderedDict()
        self._openings: OrderedDict[tuple[Scope, int], Opening] = OrderedDict()
        self._findings: OrderedDict[tuple[Scope, str, str, str], Finding] = OrderedDict()
        self._paused_until: OrderedDict[Scope, float] = OrderedDict()
        self.masked: dict[Scope, int] = {}
        """Requests whose billing header was made constant, by scope."""

    def wants(self, scope: Scope, opener: int, now: float) -> bool:
        """Whether a conversation's opening is worth a look.

        Args:
            scope: whose it is.
            opener: hash of the opening.
            now: monotonic seconds.
        """
        return (scope, opener) not in self._seen and now >= self._paused_until.get(scope, 0.0)

    def look(
        self, scope: Scope, opener: int, opening: Opening, *, now: float, now_ts: float
    ) -> tuple[Finding, bool] | None:
        """Compare an opening with those of the same API that were seen before, the latest first.

        Returns what keeps it from sharing with one of them, and whether that is news.
        """
        found = None
        for (whose, _), earlier in reversed(self._openings.items()):
            if whose == scope and earlier.api == opening.api:
                found = _compared(earlier, opening)
                if found is not None:
                    break
        self._remember(scope, opener, opening)
        if found is None:
            return None
        section, part, length = found
        key = (scope, part.kind.value, section, opening.api)
        known = self._findings.pop(key, None)
        finding = Finding(
            kind=part.kind,
            section=section,
            api=opening.api,
            old=part.old,
            new=part.new,
            shared_bytes=part.at,
            lost_bytes=length - part.at,
            first_seen_ts=now_ts if known is None else known.first_seen_ts,
            last_seen_ts=now_ts,
            times=1 if known is None else known.times + 1,
        )
        self._findings[key] = finding
        _trim(self._findings, MAX_FINDINGS)
        if known is not None:
            self._paused_until[scope] = now + PAUSE_S
            _trim(self._paused_until, MAX_OPENINGS)
        return finding, known is None

    def findings(self, scope: Scope | None) -> list[Finding]:
        """What was found in a scope (None: in all), the latest last."""
        return [each for (whose, *_), each in self._findings.items() if scope in (None, whose)]

    def on_masked(self, scope: Scope) -> bool:
        """A billing header was made constant; returns whether it is the scope's first."""
        first = scope not in self.masked
        if first and len(self.masked) >= MAX_SEEN:
            self.masked.pop(next(iter(self.masked)))
        self.masked[scope] = self.masked.get(scope, 0) + 1
        return first

    def masked_in(self, scope: Scope | None) -> int:
        """Requests of a scope (None: of all) whose billing header was made constant."""
        return sum(self.masked.values()) if scope is None else self.masked.get(scope, 0)

    def _remember(self, scope: Scope, opener: int, opening: Opening) -> None:
        self._seen[scope, opener] = None
        _trim(self._seen, MAX_SEEN)
        tools = opening.tools if len(opening.tools) <= MAX_PART_BYTES else b""  # a part of a list is no list
        self._openings[scope, opener] = Opening(opening.api, opening.system[:MAX_PART_BYTES], tools)
        _trim(self._openings, MAX_OPENINGS)


def _compared(earlier: Opening, opening: Opening) -> tuple[str, Volatile, int] | None:
    """Section, part and the section's length, where two openings differ by something volatile."""
    new = opening.system[:MAX_PART_BYTES]
    part = volatile_part(earlier.system, new)
    if part is not None and _goes_on_alike(earlier.system, new, part.at):
        return "system", part, len(opening.system)
    if earlier.tools and (part := volatile_part(earlier.tools, opening.tools)) is not None:
        return "tools", part, len(opening.tools)
    return None


def _goes_on_alike(old: bytes, new: bytes, at: int) -> bool:
    """Whether most of a text behind a difference stands in the other text too; a few samples tell."""
    rest = len(new) - at
    if rest < MIN_LOST_BYTES:
        return False
    step = (rest - _PROBE_BYTES) // _PROBES
    samples = [new[place : place + _PROBE_BYTES] for place in range(at + step, len(new), step)][:_PROBES]
    return 2 * sum(sample in old for sample in samples) > len(samples)


def _trim(book: OrderedDict[Any, Any], most: int) -> None:
    while len(book) > most:
        book.popitem(last=False)
