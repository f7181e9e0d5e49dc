"""Why a request computed what its conversation had computed before.

Rule 1: nothing fell short, nothing is said. What could be reused is what the conversation's slot held, short
of the prompt's last token, which the engine always computes.
Rule 2: where nothing was left, that is the cause; what the client changed counts only where there was
something to reuse.
Rule 3: of several changes the first in the order of a rendered prompt is named: system, tools, template
settings, messages.
Rule 4: a token index is given only where it is exact; texts only where they are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from polykv_proxy.core.outlines import Section, first_change
from polykv_proxy.core.types import common_prefix

if TYPE_CHECKING:
    from polykv_proxy.core.outlines import Outline, Part

SNIPPET_CHARS = 80
"""Longest text that shows a difference."""

LEAD_CHARS = 20
"""How much of it stands before the difference."""

ANSWER_START_TOKENS = 4
"""A difference so close to the start of the last answer is a template's, where the answer begins with
something that templates cut off: reasoning, a blank."""


class Cause(StrEnum):
    """What made a request compute more than it had to."""

    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TOOLS_REORDERED = "tools_reordered"
    HISTORY_EDITED = "history_edited"
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    """The messages are the same, the model's template made another prompt of them."""
    VOLATILE_HEADER = "volatile_header"
    """Only a header that a client changes with each request is different."""
    NEW_SESSION = "new_session"
    """It had nothing; a pool, or what another conversation left, may have given it a part."""
    EVICTED = "evicted"
    """Another conversation took the slot."""
    RESTARTED = "restarted"
    """The engine loaded its model again."""
    RETOKENISED = "retokenised"
    """The text is the same, the tokens are not."""
    MEDIA = "media"
    CACHE_DISABLED = "cache_disabled"
    """The client asked for it."""
    SLOT_LOST = "slot_lost"
    """The slot was emptied, or was still at work for an earlier request."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where and why a request left what its conversation had resident.

    Attributes:
        token_index: the first token that differs; None where none does, or it is not known exactly.
        message_index: index in the request's list of messages.
    """

    cause: Cause
    token_index: int | None = None
    message_index: int | None = None
    section: Section | None = None
    expected_text: str | None = None
    got_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Then:
    """The conversation's previous request, and what was left of it."""

    outline: Outline
    epoch: str
    prompt_tokens: int | None
    resident_tokens: int | None
    """What its slot held when it was over; None: more than nothing, not known how much."""
    held: bool
    """Whether a slot held it until the new request came."""
    taken: bool
    """Where none did: whether because another conversation took the slot."""
    answer: str | None = None
    """How its answer began, at least the first token; None: not known."""
    reasoned: bool = False
    """Whether that began with reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The request that is looked at."""

    outline: Outline
    epoch: str
    prompt_tokens: int
    cached_tokens: int
    attached_tokens: int
    """Of these, those that a pool gave at least."""
    cache: bool
    """Whether the client lets the engine reuse anything."""
    continues: bool
    """Whether it ran in the slot that held the conversation."""

    @property
    def exact_index(self) -> int | None:
        """The first token that differs from what the slot held: the engine compared them."""
        return self.cached_tokens if self.continues and self.cached_tokens > self.attached_tokens else None


def fell_short(cached_tokens: int, prompt_tokens: int, resident_tokens: int | None) -> bool:
    """Whether less was reused than there was.

    Args:
        cached_tokens: prompt tokens that were not computed.
        prompt_tokens: the whole prompt.
        resident_tokens: what there was; None: something.
    """
    there = 1 if resident_tokens is None else resident_tokens
    return cached_tokens < min(there, prompt_tokens - 1)


def diagnose(then: Then | None, now: Now) -> Divergence | None:
    """Name the cause.

    1. As much was reused as there was: nothing to say.
    2. No earlier request of the conversation is known: ``new_session``, whatever it found of others, unless
       that was all of its prompt.
    3. The client wanted no cache: ``cache_disabled``.
    4. The engine loaded its model since: ``restarted``.
    5. No slot held it any more: ``evicted``, or ``slot_lost`` if nobody took the slot.
    6. The request says something else than the earlier one did: see ``_changed``.
    7. It goes on, but in another slot, because its own was at work: ``slot_lost``.
    8. All of the earlier prompt was reused, not all of the answer: see ``_answer_differs``.
    9. Nothing but the pool's share was reused: ``slot_lost``, the engine had emptied the slot.
    10. The earlier prompt diverges although nothing in it changed: ``media`` if it has any, else
        ``template_rewrote_history``. Tokens, where they are known, tell more: see ``refined``.
    """
    if then is None:  # 2
        short = fell_short(now.cached_tokens, now.prompt_tokens, now.prompt_tokens)
        return Divergence(Cause.NEW_SESSION) if short else None
    if not fell_short(now.cached_tokens, now.prompt_tokens, then.resident_tokens):  # 1
        return None
    gone = _nothing_left(then, now)
    if gone is not None:  # 3, 4, 5
        return Divergence(gone)
    changed = first_change(then.outline, now.outline)
    if changed is not None:  # 6
        return replace(_changed(*changed), token_index=now.exact_index)
    return _unchanged(then, now) if now.continues else Divergence(Cause.SLOT_LOST)  # 7


def _nothing_left(then: Then, now: Now) -> Cause | None:
    """Why there was nothing that the request could have reused; 3 to 5."""
    if not now.cache:
        return Cause.CACHE_DISABLED
    if then.epoch != now.epoch:
        return Cause.RESTARTED
    if not then.held:
        return Cause.EVICTED if then.taken else Cause.SLOT_LOST
    return None


def _unchanged(then: Then, now: Now) -> Divergence:
    """The request goes on with what was sent before, and yet the tokens are others; 8 to 10."""
    messages = then.outline.of(Section.MESSAGES)
    section = Section.MESSAGES if messages else Section.PROMPT
    if then.prompt_tokens is not None and now.cached_tokens >= then.prompt_tokens:  # 8
        return _answer_differs(then, now, now.cached_tokens - then.prompt_tokens)
    if now.cached_tokens <= now.attached_tokens:  # 9
        return Divergence(Cause.SLOT_LOST)
    if then.outline.media:  # 10
        return Divergence(Cause.MEDIA, token_index=now.exact_index, section=section)
    cause = Cause.TEMPLATE_REWROTE_HISTORY if messages else Cause.RETOKENISED
    return Divergence(cause, token_index=now.exact_index, section=section)


def _answer_differs(then: Then, now: Now, reused: int) -> Divergence:
    """The last answer is not in the prompt as it was generated.

    1. A plain prompt: ``retokenised``, it is not looked into.
    2. It did not come back, or begins otherwise: ``history_edited``.
    3. It began with reasoning or a blank, and the difference is there: ``template_rewrote_history``.
    4. It came back as it was, as far as is known: ``retokenised``.

    Args:
        then: the request that was answered.
        now: the one that should hold the answer.
        reused: tokens of the answer that were reused.
    """
    place = len(then.outline.of(Section.MESSAGES))
    index = now.exact_index
    if not place:  # 1
        return Divergence(Cause.RETOKENISED, token_index=index, section=Section.PROMPT)
    messages = now.outline.of(Section.MESSAGES)
    back = messages[place] if place < len(messages) else None
    got = None if back is None or not back.verbatim else back.text
    cause = Cause.RETOKENISED  # 4
    expected_text: str | None = None
    got_text: str | None = None
    start = then.answer if got is None or then.answer is None else then.answer[: len(got)]
    if back is None or (got is not None and start is not None and not got.startswith(start)):
        cause = Cause.HISTORY_EDITED  # 2
        expected_text, got_text = snippets(then.answer, got)
    elif reused < ANSWER_START_TOKENS and (then.reasoned or (start or "")[:1].isspace()):
        cause = Cause.TEMPLATE_REWROTE_HISTORY  # 3
    return Divergence(
        cause,
        token_index=index,
        message_index=None if back is None else back.message_index,
        section=Section.MESSAGES,
        expected_text=expected_text,
        got_text=got_text,
    )


def _changed(before: Part | None, after: Part | None) -> Divergence:
    """The cause of a change in the request itself.

    1. The system prompt, but for a header that changes with each request: ``volatile_header``.
    2. The system prompt: ``system_changed``.
    3. The same tools in another order: ``tools_reordered``; other tools: ``tools_changed``.
    4. Settings of the template: ``template_rewrote_history``.
    5. A message with media in it: ``media``.
    6. Another message, or a plain prompt: ``history_edited``.
    """
    one = before or after
    assert one is not None
    both = before is not None and after is not None
    match one.section:
        case Section.SYSTEM:
            masked = both and _unmasked(before) == _unmasked(after)
            cause = Cause.VOLATILE_HEADER if masked else Cause.SYSTEM_CHANGED  # 1, 2
        case Section.TOOLS:
            same = both and _sorted_items(before) == _sorted_items(after) != []
            cause = Cause.TOOLS_REORDERED if same else Cause.TOOLS_CHANGED  # 3
        case Section.TEMPLATE:
            cause = Cause.TEMPLATE_REWROTE_HISTORY  # 4
        case _:
            media = any(part is not None and part.media for part in (before, after))
            cause = Cause.MEDIA if media else Cause.HISTORY_EDITED  # 5, 6
    expected, got = snippets(*(None if part is None else part.text for part in (before, after)))
    return Divergence(
        cause,
        message_index=one.message_index,
        section=one.section,
        expected_text=expected,
        got_text=got,
    )


def _unmasked(part: Part | None) -> int | None:
    """What stays of a system prompt without what changes each time; without such a header, all of it."""
    if part is None:
        return None
    return part.digest if part.masked_digest is None else part.masked_digest


def _sorted_items(part: Part | None) -> list[int]:
    return [] if part is None else sorted(part.items)


def snippets(before: str | None, after: str | None) -> tuple[str | None, str | None]:
    """What two texts say around their first difference; from the start where only one is known."""
    at = 0 if before is None or after is None else common_prefix(before, after)
    start = max(0, at - LEAD_CHARS)
    return _cut(before, start), _cut(after, start)


def _cut(text: str | None, start: int) -> str | None:
    return None if text is None else text[start : start + SNIPPET_CHARS]


def refined(
    divergence: Divergence, *, common: int, then_tokens: int, expected_text: str | None, got_text: str | None
) -> Divergence:
    """A divergence as tokens show it, once both prompts' are known.

    1. A changed part: its index is where the tokens differ; what the part says stays.
    2. All of the earlier prompt agrees, so that the slot must have held something else: ``slot_lost``; in
       the answer nothing more is known than what came back.
    3. Tokens differ and their texts do not: ``retokenised``.
    4. Texts differ too: as it was.

    Args:
        divergence: of a request that was compared with an earlier one.
        common: leading tokens on which both prompts agree.
        then_tokens: length of the earlier prompt.
        expected_text: text of the earlier prompt's tokens from there on.
        got_text: text of the later one's.
    """
    if divergence.expected_text is not None or divergence.got_text is not None:  # 1
        return replace(divergence, token_index=common) if divergence.token_index is None else divergence
    if common >= then_tokens:  # 2
        if divergence.token_index is not None and divergence.token_index >= then_tokens:
            return replace(divergence, got_text=_cut(got_text, 0))
        return Divergence(Cause.SLOT_LOST)
    expected, got = _cut(expected_text, 0), _cut(got_text, 0)
    cause = divergence.cause
    if expected and got and (expected.startswith(got) or got.startswith(expected)):
        cause = Cause.RETOKENISED  # 3
    return replace(divergence, cause=cause, token_index=common, expected_text=expected, got_text=got)  # 4
