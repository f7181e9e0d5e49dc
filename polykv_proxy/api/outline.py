"""What a request consists of: system prompt, tools, template settings, messages, each with a hash.

Made only where it is needed to explain something, never on a request's way. Pure; reads leniently, as the
engine is the one to refuse.
"""

from __future__ import annotations

from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from polykv_proxy.api import members
from polykv_proxy.api.families import Dialect
from polykv_proxy.core.media import has_media
from polykv_proxy.core.outlines import Outline, Part, Section
from polykv_proxy.core.volatile import BILLING_HEADER, BILLING_MARKER

PROMPT_RUN_BYTES = 4096
"""Plain prompts have no parts of their own: they are cut into runs of so many bytes."""

_WRAPPING = frozenset({"role", "content", "type", "id", "status"})
"""Members of a message that says nothing but its content."""


class _Body(msgspec.Struct):
    system: members.Raw = msgspec.UNSET
    instructions: members.Raw = msgspec.UNSET
    tools: members.Raw = msgspec.UNSET
    chat_template_kwargs: members.Raw = msgspec.UNSET
    messages: members.Raw = msgspec.UNSET
    input: members.Raw = msgspec.UNSET
    prompt: members.Raw = msgspec.UNSET


def read(body: bytes, dialect: Dialect) -> Outline:
    """The outline of a request body; one that cannot be read has no parts.

    Args:
        body: as the engine got it.
        dialect: the API it came in on.
    """
    try:
        parsed = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return Outline(())
    if dialect in (Dialect.LLAMA, Dialect.OPENAI_TEXT):
        return Outline(_prompt(members.raw(parsed.prompt)))
    if dialect is Dialect.OTHER:
        return Outline(())
    messages = members.items(members.raw(parsed.messages)) + members.items(members.raw(parsed.input))
    scene = members.scene(messages)
    parts = [_system(raw, None) for raw in map(members.raw, (parsed.system, parsed.instructions)) if raw]
    parts += [_system(raw, at) for at, raw in enumerate(messages[:scene])]
    if tools := members.raw(parsed.tools):
        items = tuple(map(xxh3_64_intdigest, members.items(tools)))
        parts.append(_part(Section.TOOLS, tools, None, items=items))
    if settings := members.raw(parsed.chat_template_kwargs):
        parts.append(_part(Section.TEMPLATE, settings, None))
    parts += [
        _part(Section.MESSAGES, raw, at, media=has_media(raw))
        for at, raw in enumerate(messages[scene:], scene)
    ]
    return Outline(tuple(parts))


def prompt_of(body: bytes) -> bytes:
    """The raw ``prompt`` member; empty where there is none."""
    try:
        return members.raw(msgspec.json.decode(body, type=_Body).prompt)
    except (msgspec.DecodeError, RecursionError):
        return b""


def _part(section: Section, raw: bytes, index: int | None, **more: Any) -> Part:
    text, verbatim = _text(raw)
    return Part(
        section=section,
        digest=xxh3_64_intdigest(raw),
        size_bytes=len(raw),
        message_index=index,
        text=text,
        verbatim=verbatim,
        **more,
    )


def _system(raw: bytes, index: int | None) -> Part:
    masked = BILLING_HEADER.sub(b"", raw) if BILLING_MARKER in raw else None
    digest = None if masked is None else xxh3_64_intdigest(masked)
    return _part(Section.SYSTEM, raw, index, masked_digest=digest)


def _prompt(raw: bytes) -> tuple[Part, ...]:
    """A plain prompt in runs; its last one may go on in a later request."""
    raw = raw.strip(b' \t\r\n"[]')  # the end of a string or list is not part of what goes on
    runs = [raw[at : at + PROMPT_RUN_BYTES] for at in range(0, len(raw), PROMPT_RUN_BYTES)]
    return tuple(
        Part(
            section=Section.PROMPT,
            digest=xxh3_64_intdigest(run),
            size_bytes=len(run),
            text=run.decode(errors="replace"),
            open_ended=number == len(runs) - 1,
        )
        for number, run in enumerate(runs)
    )


def _text(raw: bytes) -> tuple[str, bool]:
    """What a part says, and True, where it is only text; else its JSON, so that all of it can be compared."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw.decode(errors="replace"), False
    if isinstance(value, dict) and value.keys() <= _WRAPPING:
        value = value.get("content")
    if isinstance(value, list) and value:
        texts = [item.get("text") if isinstance(item, dict) else None for item in value]
        said = [text for text in texts if isinstance(text, str)]
        value = "\n".join(said) if len(said) == len(texts) else None
    return (value, True) if isinstance(value, str) else (raw.decode(errors="replace"), False)
