"""Standard content blocks of our messages, without a fault that core's own reading has.

Core numbers streamed blocks by a counter that goes up with each change of kind, and tool calls by the
server's number. Where the two agree, it takes them for one block: in a stream with ``output_version="v1"`` a
reasoning block and the first tool call become one. Tool calls get numbers of their own kind here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from langchain_core.messages.block_translators import register_translator

if TYPE_CHECKING:
    from langchain_core.messages import AIMessage, AIMessageChunk
    from langchain_core.messages.content import ContentBlock

PROVIDER = "polykv"
"""``model_provider`` of every message, and the provider in traces."""

_TOOL_KINDS = frozenset({"tool_call", "invalid_tool_call", "tool_call_chunk"})


def whole(message: AIMessage) -> list[ContentBlock]:
    """Blocks of a complete message, as core reads them."""
    others = {name: value for name, value in message.response_metadata.items() if name != "model_provider"}
    return message.model_copy(update={"response_metadata": others}).content_blocks


def chunk(message: AIMessageChunk) -> list[ContentBlock]:
    """Blocks of a piece of a stream; the pieces of a tool call find each other, and nothing else."""
    blocks = [cast("ContentBlock", dict(block)) for block in whole(message)]
    if not message.tool_call_chunks or message.chunk_position == "last":
        return blocks
    blocks = [block for block in blocks if block["type"] not in _TOOL_KINDS]
    for at, piece in enumerate(message.tool_call_chunks):
        number = at if piece.get("index") is None else piece["index"]
        blocks.append(
            cast(
                "ContentBlock",
                {
                    "type": "tool_call_chunk",
                    "id": piece.get("id"),
                    "name": piece.get("name"),
                    "args": piece.get("args"),
                    "index": f"lc_tc_{number}",
                },
            )
        )
    return blocks


register_translator(PROVIDER, whole, chunk)
