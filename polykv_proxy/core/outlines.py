"""Outlines: what a request consists of, part by part, and where a later one goes on otherwise.

Rule 1: an outline needs no text. Digests tell what changed, text shows it.
Rule 2: parts are in the order of a rendered prompt: the first change is what counts.
Rule 3: messages and prompts may become more, that is no change; every other section stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Section(StrEnum):
    """A part of a request, as clients write it."""

    SYSTEM = "system"
    TOOLS = "tools"
    TEMPLATE = "template"
    MESSAGES = "messages"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request."""

    section: Section
    digest: int
    size_bytes: int
    message_index: int | None = None
    text: str | None = None
    """What it says, where that is kept."""
    verbatim: bool = False
    """Whether the text is all that it says, and not its JSON."""
    masked_digest: int | None = None
    """Digest without headers that change with each request; None where it has none."""
    items: tuple[int, ...] = ()
    """Digests of single tools, in order."""
    media: bool = False
    open_ended: bool = False
    """A plain prompt's end: what goes on there is no change."""

    def goes_on_in(self, later: Part) -> bool:
        """Whether the later request says the same here, or the same and more."""
        if self.digest == later.digest:
            return True
        if not self.open_ended:
            return False
        if self.text is None or later.text is None:
            return later.size_bytes >= self.size_bytes  # not told apart without text
        return later.text.startswith(self.text)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a request consists of, in the order of a rendered prompt."""

    parts: tuple[Part, ...]

    def without_text(self) -> Outline:
        """The compact form."""
        return Outline(tuple(replace(part, text=None) for part in self.parts))

    def of(self, section: Section) -> tuple[Part, ...]:
        """The parts of one section."""
        return tuple(part for part in self.parts if part.section is section)

    @property
    def media(self) -> bool:
        """Whether anything in it is no text."""
        return any(part.media for part in self.parts)


def first_change(then: Outline, now: Outline) -> tuple[Part | None, Part | None] | None:
    """The first part that the later request does not go on with: as it was and as it is, None for missing."""
    for section in Section:
        before, after = then.of(section), now.of(section)
        for index, part in enumerate(before):
            if index >= len(after):
                return part, None
            if not part.goes_on_in(after[index]):
                return part, after[index]
        if section not in (Section.MESSAGES, Section.PROMPT) and len(after) > len(before):
            return None, after[len(before)]
    return None


def is_related(then: Outline, now: Outline) -> bool:
    """Whether two requests are of one conversation although their beginnings differ.

    What many conversations begin with says nothing: at least one message must be the same, in its place.
    """
    before, after = _spoken(then), _spoken(now)
    return any(one == other for one, other in zip(before, after, strict=False))


def _spoken(outline: Outline) -> Iterable[int]:
    # by place after the system prompt, which may have become shorter or longer
    return [part.digest for part in outline.of(Section.MESSAGES)]
