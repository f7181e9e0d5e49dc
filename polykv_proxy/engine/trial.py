"""Whether an engine goes on from a slot file, on the model that it has loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.core.types import SlotId, Tokens
    from polykv_proxy.engine.client import EngineClient

TEST_TOKENS = 144
"""Longer than the shortest sliding windows in use; a pool that is longer than a window shows it itself."""
TAIL_TOKENS = 8


async def restore_works(  # noqa: PLR0913 - what a trial consists of
    client: EngineClient,
    name: str,
    slots: tuple[SlotId, SlotId],
    ctx_tokens: int,
    *,
    length: int = TEST_TOKENS,
    window: int = 0,
    on_saved: Callable[[], Awaitable[None]] | None = None,
) -> tuple[bool, str | None]:
    """Save a prompt, restore it into another slot, let a slot run in between, and go on from it.

    Args:
        client: the way to the engine.
        name: of the file; the caller deletes it.
        slots: two idle ones, or one twice; empty afterwards.
        ctx_tokens: window of a slot.
        length: tokens of the prompt.
        window: of the model, shorter than the prompt; 0 if it has none.
        on_saved: called when the file is there.

    Returns:
        Whether it also goes on from before the end of what was restored, and from before the last window, of
        which a file may have all that there is; and what went wrong, or None.

    Raises:
        BadRequestError, NotFoundError, UnavailableError: the engine does not do one of the steps.
    """
    one, other = slots
    words = await client.tokenize("The quick brown fox jumps over the lazy dog. " * (length // 4 + 4))
    tokens = words[: min(length, ctx_tokens // 2)]
    ends = len(tokens), len(tokens) - TAIL_TOKENS, min(len(tokens) // 4, len(tokens) - window - TAIL_TOKENS)
    await client.prefill(tokens, one)
    saved = await client.save_slot(one, name)
    if on_saved is not None:
        await on_saved()
    await client.erase_slot(one)
    if saved.n_tokens != len(tokens):
        return False, f"self-test: {saved.n_tokens} of {len(tokens)} tokens were saved"
    await client.restore_slot(other, name)
    if one != other:
        await client.complete(tokens[:TAIL_TOKENS], {}, slot=one)
    whole = await reused(client, _leaving(words, tokens, ends[0]), other)
    partial = True
    for end in ends[1:]:
        await client.restore_slot(other, name)
        partial &= await reused(client, _leaving(words, tokens, end), other) == end
    for slot in {one, other}:
        await client.erase_slot(slot)
    if whole != len(tokens):
        return partial, f"self-test: a request reused {whole} of {len(tokens)} restored tokens"
    return partial, None


def _leaving(words: Tokens, tokens: Tokens, end: int) -> Tokens:
    """A prompt that has so many tokens of another, and then goes another way; its text repeats itself."""
    turn = tokens[end] if end < len(tokens) else None
    other_way = next(at for at in range(len(words) - TAIL_TOKENS, 0, -1) if words[at] != turn)
    return tokens[:end] + words[other_way : other_way + TAIL_TOKENS]


async def reused(client: EngineClient, tokens: Tokens, slot: SlotId) -> int:
    """How much of a prompt the engine does not compute in that slot now."""
    answer = await client.complete(tokens, {}, slot=slot)
    return int(answer.get("timings", {}).get("cache_n", 0))
