"""Outlines of requests that say something."""

from polykv_proxy.core.outlines import Outline, Part, Section


def part(section, text, index=None, **more):
    """A part that says this."""
    return Part(
        section=section,
        digest=hash(text),
        size_bytes=len(text),
        message_index=index,
        text=text,
        **{"verbatim": True} | more,
    )


def outline(*messages, system="Be brief.", tools=(), template=None, header=None):
    """A chat: a system prompt, tools by name, template settings, messages."""
    masked = None if header is None else hash(system)
    parts = [part(Section.SYSTEM, (header or "") + system, masked_digest=masked)]
    if tools:
        parts.append(part(Section.TOOLS, " ".join(tools), items=tuple(map(hash, tools))))
    if template:
        parts.append(part(Section.TEMPLATE, template))
    for index, message in enumerate(messages):
        parts.append(part(Section.MESSAGES, message, index, media="[image" in message))
    return Outline(tuple(parts))


def prompt(*runs):
    """A plain prompt."""
    return Outline(
        tuple(part(Section.PROMPT, run, open_ended=at == len(runs) - 1) for at, run in enumerate(runs))
    )
