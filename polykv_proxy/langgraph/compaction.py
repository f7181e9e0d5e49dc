"""When and how a conversation is compacted (CTX-9). Pure: generators that say what is to be done next.

Rule 1: the engine's own count of a completed turn decides, never an estimate. What was counted before the
last compaction is void (CTX-7).
Rule 2: the last turn stays as it is. A turn is a question, with all messages of the user right before it, and
everything up to the next one; a question that has no answer yet belongs to the turn before it. So tool calls
stay with their results, and uploads with their message.
Rule 3: the summary is written in place: the same messages, one more at the end.
Rule 4: what does not help is refused, with a reason: ``nothing_to_summarise``, ``already_compacted``,
``summary_empty``, ``summary_not_smaller``, ``summary_overflow``.
Rule 5: below a window of 4,096 nothing is compacted, there and after a refusal the ladder makes the outgoing
messages fit: oldest turns are left out, then long tool results of the running turn are cut. State stays.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from polykv_proxy.client.errors import ContextOverflowError
from polykv_proxy.client.procedures import SUMMARISE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from langchain_core.messages import BaseMessage

SMALL_WINDOW = 4096
"""Tokens; below it a summary would not pay for itself."""
PERCENT, SMALL_PERCENT = 95, 90
"""Of the window, at which a conversation is compacted; the second up to ``SMALL_WINDOW``."""
ROOM_PERCENT = 60
"""Of the window, to which the ladder cuts: one that cut to the brim would have to cut with each turn."""

SUMMARY_MESSAGES = 2
"""A summary is a turn: the question for it, and the answer."""
MARK = "polykv_compaction"
"""In ``additional_kwargs`` of the answer: figures of the compaction."""

EXCERPT_CHARS = 400
"""Of a tool result that is cut."""

Messages: TypeAlias = "tuple[BaseMessage, ...]"


# -- what is asked for ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summarise:
    """Have these messages answered, in place; is sent the text, or ``ContextOverflowError`` is thrown in."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class Count:
    """Is sent the prompt tokens of these messages behind system and tools."""

    messages: Messages


T = TypeVar("T")

Steps: TypeAlias = Generator["Summarise | Count", Any, T]


# -- what comes of it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """A conversation that goes on with a summary."""

    messages: Messages
    """All of them, the summary first."""
    replaced: int
    """Leading messages that the summary stands for."""
    tokens_before: int
    tokens_after: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A compaction that would not help, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder that was taken."""

    name: str
    """``drop_turns`` or ``cut_tool_results``."""
    messages: int
    """How many were left out or cut."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Messages that may fit, to be sent and not to be kept."""

    messages: Messages
    rungs: tuple[Rung, ...]


# -- when -------------------------------------------------------------------------------------------------


def threshold(window: int) -> int:
    """Tokens from which on a conversation is to be compacted."""
    return window * (SMALL_PERCENT if window <= SMALL_WINDOW else PERCENT) // 100


def occupancy(messages: Sequence[BaseMessage]) -> int | None:
    """The engine's count of the last completed turn; None before the first, and after a compaction."""
    fresh = messages[known_messages(messages) :]
    for message in reversed(fresh):
        if isinstance(message, AIMessage) and message.usage_metadata is not None:
            return message.usage_metadata["total_tokens"]
    return None


def is_due(messages: Sequence[BaseMessage], window: int) -> bool:
    """Whether the last completed turn came close to the window."""
    used = occupancy(messages)
    return used is not None and used >= threshold(window)


def may_compact(window: int) -> bool:
    """Whether a window is large enough for it."""
    return window >= SMALL_WINDOW


def known_messages(messages: Sequence[BaseMessage]) -> int:
    """Leading messages that the last compaction left; 0 without one."""
    if summary_length(messages) == 0:
        return 0
    return min(int(messages[1].additional_kwargs[MARK]["n_messages"]), len(messages))


def summary_length(messages: Sequence[BaseMessage]) -> int:
    """Leading messages that are a summary."""
    marked = len(messages) >= SUMMARY_MESSAGES and MARK in messages[1].additional_kwargs
    return SUMMARY_MESSAGES if marked else 0


# -- where to cut -----------------------------------------------------------------------------------------


def turn_starts(messages: Sequence[BaseMessage]) -> list[int]:
    """Where turns begin; the first at 0, whatever is there."""
    starts = [
        at
        for at, message in enumerate(messages)
        if isinstance(message, HumanMessage) and not (at and isinstance(messages[at - 1], HumanMessage))
    ]
    return starts if starts[:1] == [0] or not messages else [0, *starts]


def last_turn(messages: Sequence[BaseMessage]) -> int:
    """Where the last turn begins that has an answer, or else the last turn."""
    starts = turn_starts(messages)
    for at in reversed(starts):
        if any(isinstance(message, AIMessage) for message in messages[at:]):
            return at
    return starts[-1] if starts else 0


def safe_cuts(messages: Sequence[BaseMessage]) -> list[int]:
    """Where a conversation can be parted: nothing before a cut waits for something behind it."""
    cuts, open_calls = [], set[str]()
    for at, message in enumerate(messages):
        if at and not open_calls and not isinstance(message, ToolMessage):
            previous = messages[at - 1]
            if not isinstance(previous, HumanMessage):
                cuts.append(at)
        if isinstance(message, AIMessage):
            open_calls |= {call["id"] or "" for call in message.tool_calls}
        elif isinstance(message, ToolMessage):
            open_calls.discard(message.tool_call_id)
    return cuts


def without_pending(messages: Sequence[BaseMessage]) -> Messages:
    """Messages up to the last answer or tool result: what the engine has computed already."""
    end = len(messages)
    while end and isinstance(messages[end - 1], HumanMessage):
        end -= 1
    return tuple(messages[:end])


# -- compaction -------------------------------------------------------------------------------------------


def compact(messages: Sequence[BaseMessage], instruction: str = SUMMARISE) -> Steps[Compacted | Refused]:
    """Put a summary in the place of everything before the last turn.

    1. Nothing before it, or nothing but the last summary: refused.
    2. Ask for a summary in place. An overflow: of the older half, and so on; what is not summarised then
       stays as it is.
    3. Count both forms with everything that precedes them: no smaller, refused.
    """
    done, end = summary_length(messages), last_turn(messages)
    if end <= done:
        return Refused("already_compacted" if done else "nothing_to_summarise")
    context = without_pending(messages)
    asked = HumanMessage(instruction)
    text: str | None = None
    while text is None:
        try:
            text = yield Summarise((*context, asked))
        except ContextOverflowError:
            half = _half(messages, done, end)
            if half is None:
                return Refused("summary_overflow")
            end = half
            context = tuple(messages[:end])
    if not text.strip():
        return Refused("summary_empty")
    kept = tuple(messages[end:])
    before = yield Count(tuple(messages))
    figures = {"n_messages": SUMMARY_MESSAGES + len(kept), "replaced": end, "tokens_before": before}
    answer = AIMessage(text.strip(), additional_kwargs={MARK: figures})
    after = yield Count((asked, answer, *kept))
    if after >= before:
        return Refused("summary_not_smaller")
    figures["tokens_after"] = after
    return Compacted(messages=(asked, answer, *kept), replaced=end, tokens_before=before, tokens_after=after)


def _half(messages: Sequence[BaseMessage], done: int, end: int) -> int | None:
    """Where the older half of a range ends: between two turns if it can be, else within one."""
    places = [*_between(safe_cuts(messages), done, end // 2)]
    turns = [*_between(turn_starts(messages), done, end // 2)]
    return max(turns or places, default=None)


def _between(places: Iterable[int], after: int, most: int) -> Iterator[int]:
    return (place for place in places if after < place <= most)


# -- the ladder -------------------------------------------------------------------------------------------


def trim(messages: Sequence[BaseMessage], window: int) -> Steps[Trimmed]:
    """Make outgoing messages fit.

    1. Leave out the oldest turns, as few as get below ``ROOM_PERCENT``. A summary and the last turn stay.
    2. Not enough: cut the tool results of the last turn, the oldest first.
    """
    limit, rungs = window * ROOM_PERCENT // 100, []
    head, end = summary_length(messages), last_turn(messages)
    front = tuple(messages[:head])
    starts = [at for at in turn_starts(messages) if head < at <= end]
    kept = tuple(messages)
    if starts:
        dropped = yield from _fewest(len(starts), limit, lambda n: (*front, *messages[starts[n - 1] :]))
        kept = (*front, *messages[starts[dropped - 1] :])
        rungs.append(Rung("drop_turns", len(messages) - len(kept)))
    if (yield Count(kept)) <= limit:
        return Trimmed(kept, tuple(rungs))
    long = [at for at, message in enumerate(kept) if _is_long(message)]
    if long:
        cut = yield from _fewest(len(long), limit, lambda n: _cut(kept, long[:n]))
        kept = _cut(kept, long[:cut])
        rungs.append(Rung("cut_tool_results", cut))
    return Trimmed(kept, tuple(rungs))


def _fewest(most: int, limit: int, having: Callable[[int], Messages]) -> Steps[int]:
    """The smallest number from 1 to ``most`` with which messages fit; ``most`` if none does."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if (yield Count(having(middle))) <= limit:
            high = middle
        else:
            low = middle + 1
    return low


def _is_long(message: BaseMessage) -> bool:
    return isinstance(message, ToolMessage) and len(message.text) > EXCERPT_CHARS


def _cut(messages: Messages, places: Sequence[int]) -> Messages:
    """Messages with excerpts in these places."""
    cut = list(messages)
    for at in places:
        text = cut[at].text
        left = len(text) - EXCERPT_CHARS
        cut[at] = cut[at].model_copy(
            update={"content": f"{text[:EXCERPT_CHARS]}\n[{left} characters of this result are left out]"}
        )
    return tuple(cut)
