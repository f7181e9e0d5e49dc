"""Members of a request body as they came: raw JSON that is the engine's to understand. Pure.

Rule 1: it is read leniently. What is no list is one item, and what cannot be read sets no scene.
Rule 2: nothing is looked at item by item without a bound. A body may be as long as ``max_body_bytes``, and
all others wait while one is read; what no window holds is the engine's to refuse, in a thread of its own.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Raw: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A member, or that it is not there."""

MOST_COMMAS = 1 << 20
"""A text with as many is not taken apart: hardly a token has two, so it is some million tokens long."""

MOST_ITEMS = 1 << 14
"""Items of a list that are told apart; in place of all others stands the list itself."""

_SCENE = ("system", "developer")


class _Message(msgspec.Struct):
    role: str = ""


def raw(member: Raw) -> bytes:
    """Its JSON; empty where it is not there."""
    return b"" if isinstance(member, msgspec.UnsetType) else bytes(member)


def is_endless(text: bytes) -> bool:
    """Whether a text is too long for its parts to be looked at (rule 2)."""
    return text.count(b",") >= MOST_COMMAS


def items(text: bytes) -> list[bytes]:
    """Items of a list, ``MOST_ITEMS`` at most; anything else is one item, and nothing is none."""
    if not text.startswith(b"[") or is_endless(text):
        return [text] if text else []
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return []
    if len(found) > MOST_ITEMS:
        return [*map(bytes, found[: MOST_ITEMS - 1]), text]
    return [bytes(item) for item in found]


def starts(text: bytes) -> list[bytes]:
    """First characters of a list's items, however many; none of anything else, nor of an endless one."""
    if not text.startswith(b"[") or is_endless(text):
        return []
    try:
        return [bytes(memoryview(item)[:1]) for item in msgspec.json.decode(text, type=list[msgspec.Raw])]
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
