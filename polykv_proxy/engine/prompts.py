"""Exact tokens of a prompt on an engine without the patch, which counts them and does not give them away.

Rule 1: the engine renders a chat, and tokenizes what came of it as it tokenizes a prompt.
Rule 2: of a chat with media no more is known than the text before the first one; all else is one position.
Rule 3: a Responses body is taken for the chat that it becomes (``rendering``) only where the engine counts as
many tokens in it. Those of other APIs cannot be had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.media import has_media
from polykv_proxy.core.types import MEDIUM, as_tokens
from polykv_proxy.engine.rendering import chat_of_responses

if TYPE_CHECKING:
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.engine.client import EngineClient


async def tokens_of(client: EngineClient, count_path: str, body: bytes, *, media: bool) -> Tokens | None:
    """The tokens of a body; None where they cannot be had.

    Args:
        client: the way to the engine.
        count_path: route at which the body's API counts.
        body: the request's.
        media: whether the engine takes images or sounds.

    Raises:
        BadRequestError: the engine refuses the body.
    """
    if "/chat/completions/" in count_path:
        text = await client.render(body)
        if not (media and has_media(body)):
            return await client.tokenize(text)
        before, medium, _ = text.partition(await client.media_marker())
        if not medium:  # it was in what a tool is told to expect, or the like
            return await client.tokenize(text)
        return await client.tokenize(before) + as_tokens([MEDIUM])
    chat = chat_of_responses(body) if "/responses/" in count_path else None
    if chat is None:
        return None
    tokens = await client.tokenize(await client.render(chat))
    return tokens if await client.count(count_path, body) == len(tokens) else None
