"""Where clients mark the end of a prefix that others will begin with, and bodies that find it in tokens.

Marks are ``cache_control`` (Anthropic's, which many OpenAI-style clients send as well) and OpenAI's
``prompt_cache_breakpoint``, on tools, system blocks and parts of messages. Those up to the conversation's
opening message can end a shared prefix; marks further on follow one conversation, which its slot keeps.

A mark is a place in JSON, and a template may put tools before or after the system text, or wrap them. So its
place in tokens is found by rendering: bodies that are the same up to the mark and differ right behind it
agree on exactly the tokens that precede it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from xxhash import xxh3_64_intdigest

from polykv_proxy.api.families import Dialect
from polykv_proxy.api.members import is_endless

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.api.families import Family

_WORDS = (b'"cache_control"', b'"prompt_cache_breakpoint"')
_NAMES = ("cache_control", "prompt_cache_breakpoint")

PROBES = ("Aardvark", "zebra 7")
"""Two texts without a common start: a prompt that goes on like one of them does not go on like the other."""

_NOT_RENDERED = ("metadata", "stream", "stream_options", "prompt_cache_key", "user", "seed", "id_slot")
"""Members that never reach a template and differ from request to request."""

MAX_GROUP_CHARS = 255
"""A longer name is none: names are kept."""

_Members = dict[str, msgspec.Raw]


class _Grouped(msgspec.Struct):
    prompt_cache_key: str | None = None


@dataclass(frozen=True, slots=True)
class Marked:
    """The deepest mark of a body that others may share a prefix up to."""

    key: int
    """Hash of all that decides which tokens precede it."""
    bodies: tuple[bytes, ...]
    """Bodies whose common tokens, with the marked body's, are those that precede it."""


def deepest(body: bytes, family: Family) -> Marked | None:
    """The deepest mark worth a boundary; None where there is none, as one search through memory tells.

    1. A part of the opening message, if something follows it.
    2. The system text, from its last block to its first.
    3. The tools, likewise.

    Args:
        body: the request's JSON.
        family: its API.
    """
    if family.count_path is None or not any(word in body for word in _WORDS):
        return None
    try:
        members = msgspec.json.decode(body, type=_Members)
        cut = _in_messages(members, family) or _in_system(members) or _in_tools(members)
    except (msgspec.DecodeError, RecursionError):
        return None  # the engine's to refuse
    if cut is None:
        return None
    for name in _NOT_RENDERED:
        members.pop(name, None)
    bodies = tuple(msgspec.json.encode({**members, **cut(probe)}) for probe in PROBES)
    return Marked(xxh3_64_intdigest(family.count_path.encode() + bodies[0]), bodies)


def group_of(body: bytes) -> str | None:
    """The group that a conversation says it belongs to: ``prompt_cache_key``."""
    if b'"prompt_cache_key"' not in body:
        return None
    try:
        name = msgspec.json.decode(body, type=_Grouped).prompt_cache_key or ""
    except (msgspec.DecodeError, RecursionError):
        return None
    return name if 0 < len(name) <= MAX_GROUP_CHARS else None


_Cut = dict[str, Any]


def _in_messages(members: _Members, family: Family) -> Callable[[str], _Cut] | None:
    """Marks in the opening message, or in system messages before it."""
    name = "input" if family.dialect is Dialect.RESPONSES else "messages"
    messages = _list(members.get(name))
    first = next((at for at, one in enumerate(messages) if not _is_system(one)), len(messages))
    if first < len(messages):
        message = _decoded(messages[first])
        followed = first + 1 < len(messages)
        if (part := _last_marked(message, whole=followed)) is not None:
            return _cut_message(name, messages[:first], message, part, [_says("assistant")])
    for at in reversed(range(first)):
        message = _decoded(messages[at])
        if (part := _last_marked(message, whole=True)) is not None:
            return _cut_message(name, messages[:at], message, part, [])
    return None


def _cut_message(
    name: str, before: list[msgspec.Raw], message: Any, part: int, behind: list[Callable[[str], _Cut]]
) -> Callable[[str], _Cut]:
    """Messages up to a part of one, and something else behind it; behind the message, if the part ends it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    kind = "input_text" if name == "input" else "text"

    def cut(probe: str) -> _Cut:
        if part + 1 == len(parts):
            more = [say(probe) for say in (*behind, _says("user"))]
            return {name: [*before, message, *more]}
        shorter = {**message, "content": [*parts[: part + 1], {"type": kind, "text": probe}]}
        more = [] if behind else [_says("user")(probe)]
        return {name: [*before, shorter, *more]}

    return cut


def _in_system(members: _Members) -> Callable[[str], _Cut] | None:
    """Marks on Anthropic's system blocks."""
    blocks = _list(members.get("system"))
    marked = _last_marked({"content": [_decoded(one) for one in blocks]}, whole=True)
    if marked is None:
        return None
    kept = blocks[: marked + 1]

    def cut(probe: str) -> _Cut:
        more = [] if len(kept) == len(blocks) else [{"type": "text", "text": probe}]
        return {"system": [*kept, *more], "messages": [_says("user")(probe)]}

    return cut


def _in_tools(members: _Members) -> Callable[[str], _Cut] | None:
    """Marks on tools. What the system says is not part of what they mark, wherever the template puts it."""
    tools = _list(members.get("tools"))
    marked = _last_marked({"content": [_decoded(one) for one in tools]}, whole=True)
    if marked is None:
        return None
    name = "input" if "input" in members else "messages"
    messages = _list(members.get(name))
    opens_with_system = bool(messages) and _is_system(messages[0])

    def cut(probe: str) -> _Cut:
        system = [_says("system")(probe)] if opens_with_system else []
        texts: _Cut = {member: probe for member in ("system", "instructions") if member in members}
        return texts | {"tools": tools[: marked + 1], name: [*system, _says("user")(probe)]}

    return cut


def _last_marked(message: Any, *, whole: bool) -> int | None:
    """Number of the last marked part of a message.

    Args:
        message: decoded.
        whole: whether its very end counts too; not where nothing follows.
    """
    if not isinstance(message, dict):
        return None
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    if whole and _is_marked(message):
        return len(parts) - 1
    for at in reversed(range(len(parts) if whole else len(parts) - 1)):
        if _is_marked(parts[at]):
            return at
    return None


def _is_marked(item: Any) -> bool:
    return isinstance(item, dict) and (
        any(item.get(name) for name in _NAMES) or _is_marked(item.get("function"))
    )


def _is_system(raw: msgspec.Raw) -> bool:
    message = _decoded(raw)
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _says(role: str) -> Callable[[str], _Cut]:
    return lambda text: {"role": role, "content": text}


def _list(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Items of a JSON array; none of anything else, nor of one that is endless."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"[" or is_endless(bytes(raw)):
        return []
    return msgspec.json.decode(raw, type=list[msgspec.Raw])


def _decoded(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)
