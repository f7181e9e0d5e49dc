"""What rendered prompts are in tokens, so that of the next one only what is new has to be tokenized.

A tokenizer cuts text at special tokens first and then looks at each piece alone. So what precedes a special
token, the **seam**, has the same tokens whatever comes behind it.

Rule 1: a prompt's tokens are reused up to a seam that lies in what both texts have in common, and
``MARGIN_BYTES`` before the end of that: a longer special token across the seam would be the same in both.
Rule 2: the seams of a text are found in its tokens by counting. Where text and tokens do not have the same
number of them, none is used.
Rule 3: all that is remembered takes no more than a budget of bytes; what was of use last stays.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polykv_proxy.core.types import as_tokens, common_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polykv_proxy.core.types import Scope, Tokens

MARGIN_BYTES = 64
"""No special token is longer."""

OVERHEAD_BYTES = 512
"""Of an entry, beside its text and tokens."""

MAX_LOOKS = 512
"""Texts of a scope that a new one is compared with, the latest ones."""

PROBE_BYTES = 64
"""A text that agrees for longer than the best one so far agrees in its last so many bytes, too."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A special token that a model's prompts are divided by."""

    text: bytes
    token: int
    added: int = 0
    """Tokens that every prompt gets at its start, beside those of its text."""


@dataclass(slots=True, eq=False)
class _Known:
    text: bytes
    tokens: Tokens
    at_bytes: array[int]
    """Where its seams are in the text."""
    at_tokens: array[int]

    @property
    def cost(self) -> int:
        arrays = (self.tokens, self.at_bytes, self.at_tokens)
        return len(self.text) + sum(len(each) * each.itemsize for each in arrays) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of a prompt's beginning."""

    tokens: Tokens
    """Exactly those of the text before ``offset``; none where nothing is known."""
    offset: int
    """Bytes of the text that they cover."""


NOTHING = Start(as_tokens(()), 0)


@dataclass(slots=True)
class Texts:
    """The rendered prompts of one load of one model.

    Args:
        seam: what divides its prompts.
        budget_bytes: see rule 3.
    """

    seam: Seam
    budget_bytes: int
    used_bytes: int = 0
    _known: dict[Scope, OrderedDict[int, _Known]] = field(default_factory=dict)
    _ages: OrderedDict[int, Scope] = field(default_factory=OrderedDict)
    """All of them by number, the longest unused first."""
    _number: int = 0

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._ages)

    def start(self, scope: Scope, text: bytes) -> Start:
        """The longest beginning of a prompt that is known in tokens (rule 1).

        Args:
            scope: whose it is; others' prompts are not looked at.
            text: the prompt, as the engine renders it.
        """
        found = self._closest(scope, text)
        if found is None:
            return NOTHING
        number, common = found
        known = self._known[scope][number]
        last = common - MARGIN_BYTES - len(self.seam.text)
        for at_byte, at_token in zip(reversed(known.at_bytes), reversed(known.at_tokens), strict=True):
            if 0 < at_byte <= last:
                self._use(scope, number)
                return Start(known.tokens[:at_token], at_byte)
        return NOTHING

    def learn(self, scope: Scope, text: bytes, tokens: Tokens) -> None:
        """Remember a prompt; it takes the place of one that it goes on from."""
        if len(text) > self.budget_bytes:
            return
        at_bytes = array("q", _occurrences(text, self.seam.text))
        at_tokens = self._seams(tokens)
        if len(at_bytes) != len(at_tokens):  # rule 2
            return
        known = _Known(text, tokens, at_bytes, at_tokens)
        if known.cost > self.budget_bytes:
            return
        before = self._closest(scope, text)
        if before is not None and before[1] == len(self._known[scope][before[0]].text):
            self._forget(before[0])
        self._number += 1
        self._known.setdefault(scope, OrderedDict())[self._number] = known
        self._ages[self._number] = scope
        self.used_bytes += known.cost
        while self.used_bytes > self.budget_bytes:
            self._forget(next(iter(self._ages)))

    def _closest(self, scope: Scope, text: bytes) -> tuple[int, int] | None:
        """The text with the longest common start: its number, and the bytes in common."""
        best: tuple[int, int] | None = None
        length = 0
        for number in list(reversed(self._known.get(scope, ())))[:MAX_LOOKS]:
            other = self._known[scope][number].text
            end = length + 1
            begin = max(0, end - PROBE_BYTES)
            if len(other) < end or other[begin:end] != text[begin:end]:
                continue
            common = common_prefix(other, text)
            if common > length:
                best, length = (number, common), common
        return best

    def _seams(self, tokens: Tokens) -> array[int]:
        raw, width = tokens.tobytes(), tokens.itemsize
        wanted = as_tokens([self.seam.token]).tobytes()
        found = _occurrences(raw, wanted, overlapping=True)
        return array("i", [at // width for at in found if at % width == 0 and at >= self.seam.added * width])

    def _use(self, scope: Scope, number: int) -> None:
        self._ages.move_to_end(number)
        self._known[scope].move_to_end(number)

    def _forget(self, number: int) -> None:
        scope = self._ages.pop(number)
        self.used_bytes -= self._known[scope].pop(number).cost
        if not self._known[scope]:
            del self._known[scope]


def choose_seam(pieces: Sequence[tuple[int, str]], plain: Sequence[int], *, added: int) -> Seam | None:
    """The special token that divides a rendered chat best; None where there is none.

    The most frequent one, of several the first. What a text becomes without special tokens is none.

    Args:
        pieces: tokens of the chat with their texts.
        plain: tokens of the same text, with special tokens taken for text.
        added: see ``Seam``.
    """
    ordinary = frozenset(plain)
    counts: dict[tuple[int, str], int] = {}
    for token, text in pieces:
        if token not in ordinary and 0 < len(text.encode()) <= MARGIN_BYTES:
            counts[token, text] = counts.get((token, text), 0) + 1
    best = max(counts, key=lambda each: counts[each], default=None)
    if best is None or counts[best] < 2:
        return None
    return Seam(best[1].encode(), best[0], added)


def _occurrences(text: bytes, wanted: bytes, *, overlapping: bool = False) -> list[int]:
    found, step = [], 1 if overlapping else len(wanted)
    at = text.find(wanted)
    while at >= 0:
        found.append(at)
        at = text.find(wanted, at + step)
    return found
