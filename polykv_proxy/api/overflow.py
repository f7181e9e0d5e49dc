"""Overflows on their way to clients: one type for all, in whole bodies and as the last event of a stream.

Everything else in an answer stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.api.answer import decoded
from polykv_proxy.engine.overflow import STATUS, kind_of, recognise, typed

if TYPE_CHECKING:
    from polykv_proxy.core.types import EngineFacts

STATUSES = frozenset({400, 500, 503})
"""With which the engine tells that there is no more room."""


class Overflows:
    """Looks for overflows in the answer to one request.

    Args:
        facts: the engine's sizes; None if they are not known.
        cached_tokens: tokens of the request that are resident, as far as is known.
    """

    __slots__ = ("_cached_tokens", "_facts", "required_tokens", "seen")

    def __init__(self, facts: EngineFacts | None, cached_tokens: int | None) -> None:
        self._facts = facts
        self._cached_tokens = cached_tokens
        self.seen: str | None = None
        """``ctx_kind`` of the overflow that was found, ``unknown`` where that cannot be told."""
        self.required_tokens: int | None = None
        """That the request would have needed, where the engine says so."""

    def in_body(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that is no stream, as the client gets them."""
        document = decoded(body)
        mended = None if document is None else self._mended(document)
        return (status, body) if mended is None else (STATUS, mended)

    def in_events(self, events: bytes) -> bytes:
        """Whole events of a stream, as the client gets them."""
        blocks = events.split(b"\n\n")
        for at, block in enumerate(blocks):
            start = block.find(b"{")
            if b"error" not in block or start < 0:
                continue
            document = decoded(block[start:])
            if document is not None and (mended := self._mended(document)) is not None:
                blocks[at] = block[:start] + mended
        return b"\n\n".join(blocks)

    def in_error(self, error: dict[str, Any]) -> dict[str, Any]:
        """One error object, as the client gets it."""
        found = recognise(error)
        if found is None:
            return error
        kind = None
        if self._facts is not None:
            kind = kind_of(
                found,
                ctx_tokens=self._facts.ctx_tokens,
                cells=self._facts.cells,
                model_tokens=self._facts.model_tokens,
            )
        self.seen = "unknown" if kind is None else kind.value
        self.required_tokens = found.required_tokens
        return typed(error, found, kind, cached_tokens=self._cached_tokens)

    def _mended(self, document: dict[str, Any]) -> bytes | None:
        """A document whose error is an overflow, as clients get it; None if it has none.

        In a stream of Anthropic's API the engine sends the error object alone.
        """
        error = document.get("error")
        if isinstance(error, dict):
            mended = self.in_error(error)
            return None if mended is error else msgspec.json.encode({**document, "error": mended})
        if "message" not in document or "code" not in document:
            return None
        mended = self.in_error(document)
        return None if mended is document else msgspec.json.encode(mended)
