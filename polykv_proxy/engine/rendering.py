"""Prompts of bodies on an engine that does not give away their tokens. Pure.

``/apply-template`` of the engine renders Chat Completions bodies only. A Responses body becomes one here
where it is plain text; whoever uses the result compares its length with the engine's own count, and the
engine compares tokens itself before it reuses anything. So a difference costs speed, never correctness.
"""

from __future__ import annotations

from typing import Any

import msgspec

_TEXT_PARTS = {"input_text", "output_text"}


class _Multimodal(msgspec.Struct):
    prompt_string: str


class _Plain(msgspec.Struct):
    prompt: _Multimodal
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def chat_of_responses(body: bytes) -> bytes | None:
    """The chat that the engine makes of a Responses body; None where it is more than plain text."""
    try:
        wanted = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    given, instructions = wanted.pop("input", None), wanted.pop("instructions", None)
    if wanted.get("tools"):
        return None
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            message = _message(item)
            if message is None:
                return None
            messages.append(message)
    else:
        return None
    return msgspec.json.encode({**wanted, "messages": messages})


def text_of_plain(body: bytes) -> str | None:
    """The text of a multimodal prompt of ``/completion``; None where a body is anything else."""
    try:
        plain = msgspec.json.decode(body, type=_Plain)
    except (msgspec.DecodeError, RecursionError):
        return None
    return plain.prompt.prompt_string if plain.messages is msgspec.UNSET else None


def _message(item: object) -> dict[str, Any] | None:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return None
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        return None
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or "text" not in part:
            return None
        texts.append({"type": "text", "text": part["text"]})
    return {"role": item.get("role"), "content": texts}
