"""Exact tokens of a prompt on an engine without the patch, which counts them and does not give them away.

Rule 1: the engine renders a chat, and tokenizes what came of it as it tokenizes a prompt. A multimodal prompt
is text already.
Rule 2: of a prompt with media no more is known than the text before the first one; all else is one position.
Rule 3: a Responses body is taken for the chat that it becomes (``rendering``) only where the engine counts as
many tokens in it. Those of other APIs cannot be had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core.media import has_media
from polykv_proxy.core.types import MEDIUM, as_tokens
from polykv_proxy.engine.rendering import chat_of_responses, text_of_plain
from polykv_proxy.engine.wire import Prompt

if TYPE_CHECKING:
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.engine.client import EngineClient


async def tokens_of(client: EngineClient, count_path: str, body: bytes, *, media: bool) -> Tokens | None:
    """The tokens of a body; None where they cannot be had. See ``shown``."""
    prompt = await shown(client, count_path, body, media=media)
    if prompt is None or prompt.text is None:
        return None if prompt is None else prompt.tokens
    return await client.tokenize(prompt.text) + prompt.tokens


async def shown(client: EngineClient, count_path: str, body: bytes, *, media: bool) -> Prompt | None:
    """The text of a body, or its tokens where their number decides; None where neither can be had.

    Args:
        client: the way to the engine.
        count_path: route at which the body's API counts.
        body: the request's.
        media: whether the engine takes images or sounds.

    Raises:
        BadRequestError: the engine refuses the body.
    """
    if "/chat/completions/" in count_path:
        text = text_of_plain(body)
        if text is None:
            text = await client.render(body)
        if media and has_media(body):
            before, medium, _ = text.partition(await client.media_marker())
            if medium:  # else it was in what a tool is told to expect, or the like
                return Prompt(before, as_tokens([MEDIUM]))
        return Prompt(text, as_tokens(()))
    chat = chat_of_responses(body) if "/responses/" in count_path else None
    if chat is None:
        return None
    tokens = await client.tokenize(await client.render(chat))
    return Prompt(None, tokens) if await client.count(count_path, body) == len(tokens) else None
