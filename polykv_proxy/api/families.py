"""The engine's text APIs: what is common to all of them, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec


class Dialect(Enum):
    """How an API words its streams and errors."""

    LLAMA = "llama"
    """``/completion``: bare data lines, the last one says ``"stop":true``."""
    OPENAI_TEXT = "openai_text"
    OPENAI_CHAT = "openai_chat"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    OTHER = "other"
    """Runs in a slot, but has no pools and no streams of ours."""


@dataclass(frozen=True, slots=True)
class Family:
    """One API of the engine."""

    dialect: Dialect
    count_path: str | None = None
    """Route that counts (and, patched, returns) the prompt tokens of such a body; none for plain prompts."""

    @property
    def pooled(self) -> bool:
        """Whether its requests can ride on a pool."""
        return self.dialect is not Dialect.OTHER

    def error_event(self, error: dict[str, object]) -> bytes:
        """An error as the last event of a stream of this API.

        Args:
            error: members of the error object; ``message`` and ``type`` at least.
        """
        if self.dialect is Dialect.ANTHROPIC:
            return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error}) + b"\n\n"
        if self.dialect is Dialect.RESPONSES:
            flat = {"type": "error", "code": error.get("code"), "message": error["message"], "param": None}
            return b"event: error\ndata: " + msgspec.json.encode({**flat, "error": error}) + b"\n\n"
        return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


CHAT_COUNT = "/v1/chat/completions/input_tokens"
"""Counts chats; and, patched, plain prompts that are not just text."""

_CHAT = Family(Dialect.OPENAI_CHAT, CHAT_COUNT)
_RESPONSES = Family(Dialect.RESPONSES, "/v1/responses/input_tokens")
_LLAMA = Family(Dialect.LLAMA)
_OTHER = Family(Dialect.OTHER)

INFERENCE: dict[str, Family] = {
    "/completion": _LLAMA,
    "/completions": _LLAMA,
    "/v1/completions": Family(Dialect.OPENAI_TEXT),
    "/chat/completions": _CHAT,
    "/v1/chat/completions": _CHAT,
    "/responses": _RESPONSES,
    "/v1/responses": _RESPONSES,
    "/v1/messages": Family(Dialect.ANTHROPIC, "/v1/messages/count_tokens"),
    "/infill": _OTHER,
    "/v1/audio/transcriptions": _OTHER,
    "/audio/transcriptions": _OTHER,
}
"""POST routes that run in a slot of the engine, by path."""

SPREADING = frozenset({"/v1/systemone"})
"""POST routes whose several tasks the engine places by itself, in any idle slots. (Embeddings and reranking
need an engine that does nothing else, and pass through.)"""
