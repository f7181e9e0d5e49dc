"""Members of a request body as they came: raw JSON that is the engine's to understand. Pure.

Rule: it is read leniently. What is no list is one item, and what cannot be read sets no scene.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Raw: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A member, or that it is not there."""

_SCENE = ("system", "developer")


class _Message(msgspec.Struct):
    role: str = ""


def raw(member: Raw) -> bytes:
    """Its JSON; empty where it is not there."""
    return b"" if isinstance(member, msgspec.UnsetType) else bytes(member)


def items(text: bytes) -> list[bytes]:
    """Items of a list; anything else is one item, and nothing is none."""
    if not text.startswith(b"["):
        return [text] if text else []
    try:
        return [bytes(item) for item in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, RecursionError):
        return []


def scene(messages: list[bytes]) -> int:
    """How many messages set the scene: what many conversations begin with, before anybody speaks."""
    return next((at for at, message in enumerate(messages) if not _sets_it(message)), len(messages))


def _sets_it(message: bytes) -> bool:
    try:
        return msgspec.json.decode(message, type=_Message).role in _SCENE
    except (msgspec.DecodeError, RecursionError):
        return False
