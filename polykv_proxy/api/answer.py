"""Reading answers as they pass, and putting one block of ours into those that asked for it.

The engine's usage figures are read from the event that carries them. The block goes, once, into the usage
chunk if there is one, else into the chunk with the finish reason; into a plain JSON answer at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.api.families import Dialect

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.api.families import Family

EVENT_LIMIT_BYTES = 64 * 1024 * 1024
"""An event beyond this is passed on unread; the last event of ``/completion`` repeats the prompt."""


_CUT = frozenset({"limit", "length", "max_tokens"})
"""What the APIs call an answer that ended for its length."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine says a request took; None where it does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    decode_s: float | None = None
    """Seconds from the first generated token to the last."""
    truncated: bool | None = None
    """The engine's own word for an answer, or its prompt, that was cut at a wall; few APIs carry it."""
    cut: bool | None = None
    """Whether the answer ended for its length, whatever set that."""

    @property
    def context_tokens(self) -> int | None:
        """Tokens of the conversation now."""
        if self.prompt_tokens is None or self.generated_tokens is None:
            return None
        return self.prompt_tokens + self.generated_tokens

    def updated(self, later: Usage) -> Usage:
        """With what a later event says."""
        return Usage(
            self.prompt_tokens if later.prompt_tokens is None else later.prompt_tokens,
            self.cached_tokens if later.cached_tokens is None else later.cached_tokens,
            self.generated_tokens if later.generated_tokens is None else later.generated_tokens,
            self.decode_s if later.decode_s is None else later.decode_s,
            self.truncated if later.truncated is None else later.truncated,
            self.cut if later.cut is None else later.cut,
        )

    def hit_wall(self, ctx_tokens: int | None, max_tokens: int | None) -> bool:
        """Whether the conversation came to the end of its context, or of the cells that there were for it.

        1. The engine says that it was cut.
        2. It fills its window: not one token more fits.
        3. It ended for its length, and had not come to the length that its client allows.

        Args:
            ctx_tokens: the window; None if it is not known.
            max_tokens: of an answer; None where nobody set a bound, or something else may have ended it.
        """
        used, generated = self.context_tokens, self.generated_tokens
        if self.truncated:
            return True  # 1
        if used is not None and ctx_tokens is not None and used + 1 >= ctx_tokens:
            return True  # 2
        return bool(self.cut) and max_tokens is not None and generated is not None and generated < max_tokens


def read_answer(document: dict[str, Any]) -> Usage:
    """Usage in an answer or event of any dialect, and whether it was cut."""
    truncated = document.get("truncated")
    return replace(
        read_usage(document),
        truncated=truncated if isinstance(truncated, bool) else None,
        cut=_was_cut(document),
    )


def _was_cut(document: dict[str, Any]) -> bool | None:
    """Whether an answer ended for its length; None where it does not say why it ended."""
    choices = document.get("choices") or ()
    delta = document.get("delta")
    reasons = [document.get("stop_type"), document.get("stop_reason")]
    reasons += [choice.get("finish_reason") for choice in choices]
    reasons += [delta.get("stop_reason")] if isinstance(delta, dict) else []
    said = [reason for reason in reasons if reason is not None]
    return any(reason in _CUT for reason in said) if said else None


def read_usage(document: dict[str, Any]) -> Usage:
    """Usage in an answer or event of any dialect; ``timings`` are the engine's own and come first."""
    timings = document.get("timings")
    if isinstance(timings, dict) and "cache_n" in timings:
        cached = timings["cache_n"]
        decode_ms = timings.get("predicted_ms")
        return Usage(
            cached + timings["prompt_n"],
            cached,
            timings.get("predicted_n"),
            None if decode_ms is None else decode_ms / 1000.0,
        )
    inner = document.get("response") or document.get("message") or document
    usage = inner.get("usage") if isinstance(inner, dict) else None
    if not isinstance(usage, dict):
        return Usage()
    if "cache_read_input_tokens" in usage:  # Anthropic counts the two apart
        cached = usage["cache_read_input_tokens"]
        return Usage(cached + usage.get("input_tokens", 0), cached, usage.get("output_tokens"))
    if "output_tokens" in usage and "input_tokens" not in usage:
        return Usage(None, None, usage["output_tokens"])
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Usage(
        usage.get("prompt_tokens", usage.get("input_tokens")),
        details.get("cached_tokens"),
        usage.get("completion_tokens", usage.get("output_tokens")),
    )


def insert_member(document: bytes, name: str, value: object) -> bytes:
    """A JSON object with one more member at its end; every other byte stays.

    Args:
        document: must end, whitespace aside, with the object's closing brace.
        name: the member's name.
        value: JSON-ready.
    """
    at = document.rstrip().rfind(b"}")
    comma = b"" if document[:at].rstrip().endswith(b"{") else b","
    member = msgspec.json.encode(name) + b":" + msgspec.json.encode(value)
    return document[:at] + comma + member + document[at:]


class AnswerReader:
    """Follows one answer. Feed it the payload; it hands out what is to be sent.

    Args:
        family: the API.
        stream: whether the answer is an event stream.
        include_usage: whether the client asked for a usage chunk.
        completions: how many answers the request asked for.
        block: makes our block from the usage once it is known. Without it, or where it makes none, nothing is
            put in.
    """

    def __init__(
        self,
        family: Family,
        *,
        stream: bool,
        include_usage: bool = False,
        completions: int = 1,
        block: Callable[[Usage], dict[str, object] | None] | None = None,
    ) -> None:
        self.usage = Usage()
        self._family = family
        self._stream = stream
        self._include_usage = include_usage
        self._finishes_left = completions
        self._block = block
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._done = False

    def feed(self, data: bytes) -> bytes:
        """Take payload; returns payload that is complete enough to go out."""
        if self._done:
            data = b"".join((*self._held, data))
            self._held = []
            return data
        if not self._stream:
            self._held.append(data)
            return b""
        end = data.rfind(b"\n\n") + 2
        if end < 2:  # an event may also end between two pieces
            end = int(data.startswith(b"\n") and bool(self._held) and self._held[-1].endswith(b"\n"))
        if not end and self._held_bytes + len(data) < EVENT_LIMIT_BYTES:
            if data:
                self._held.append(data)
                self._held_bytes += len(data)
            return b""
        end = end or len(data)
        whole = b"".join((*self._held, data[:end]))
        rest = data[end:]
        self._held = [rest] if rest else []
        self._held_bytes = len(rest)
        if not self._interesting(whole):
            return whole
        events = whole.split(b"\n\n")
        return b"\n\n".join([*(self._event(event) for event in events[:-1]), events[-1]])

    def finish(self) -> bytes:
        """The payload is complete; returns the rest of it."""
        rest = b"".join(self._held)
        self._held = []
        if self._done or not rest:
            return rest
        if self._stream:
            return self._event(rest) if self._interesting(rest) else rest
        document = decoded(rest)
        if document is None or "error" in document:
            return rest
        self.usage = read_answer(document)
        self._done = True
        return self._with_block(rest)

    def _with_block(self, document: bytes) -> bytes:
        block = None if self._block is None else self._block(self.usage)
        return document if block is None else insert_member(document, "opencoti", block)

    def _interesting(self, events: bytes) -> bool:
        """A cheap look, so that the many events in the middle cost little."""
        match self._family.dialect:
            case Dialect.LLAMA:
                return b'"stop":true' in events
            case Dialect.OPENAI_CHAT | Dialect.OPENAI_TEXT:
                return b'"timings":{' in events or b'"finish_reason":"' in events or b'"usage":{' in events
            case Dialect.ANTHROPIC:
                return b"event: message_start" in events or b"event: message_delta" in events
            case Dialect.RESPONSES:
                return b"event: response.completed" in events
            case Dialect.OTHER:
                return False

    def _event(self, event: bytes) -> bytes:
        start = event.find(b"{")
        if self._done or start < 0 or not event[:start].rstrip().endswith(b"data:"):
            return event
        document = decoded(event[start:])
        if document is None or "error" in document:
            return event
        self.usage = self.usage.updated(read_answer(document))
        if not self._is_last(document):
            return event
        self._done = True
        return self._with_block(event)

    def _is_last(self, document: dict[str, Any]) -> bool:
        finished = False
        match self._family.dialect:
            case Dialect.LLAMA:
                finished = document.get("stop") is True
            case Dialect.OPENAI_CHAT if self._include_usage:
                return document.get("choices") == [] and "usage" in document
            case Dialect.OPENAI_CHAT | Dialect.OPENAI_TEXT:
                finished = any(choice.get("finish_reason") for choice in document.get("choices", ()))
            case Dialect.ANTHROPIC:
                finished = document.get("type") == "message_delta"
            case Dialect.RESPONSES:
                finished = document.get("type") == "response.completed"
            case Dialect.OTHER:
                pass
        self._finishes_left -= finished
        return finished and self._finishes_left <= 0


def decoded(raw: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
