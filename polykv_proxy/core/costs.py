"""What a request may add to the KV cache, before it runs.

Rule 1: what was counted is exact. What was not is bounded from above, and never taken for proof that a
request cannot fit.
Rule 2: an answer is as long as its kind usually is, and never longer than it may be: ``max_tokens``, or what
its window leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from polykv_proxy.core.lengths import LengthBook

TEMPLATE_TOKENS = 1024
"""Allowance for what a chat template adds to a body: marks around messages, a preamble for tools."""

MEDIA_TOKENS = 4096
"""Allowance for an image or a sound that the body only points at."""


def upper_bound_tokens(body_bytes: int, media: int = 0) -> int:
    """Tokens that a prompt has at most, as far as its body tells.

    A token covers one byte of text at least, and what a template puts around a message is shorter than the
    JSON around it.

    Args:
        body_bytes: length of the request's body.
        media: images and the like whose bytes are not in the body.
    """
    return body_bytes + TEMPLATE_TOKENS + media * MEDIA_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request adds to the cache, in cells."""

    prompt: int
    """Prompt tokens that no pool holds; those that its own slot holds from earlier are among them."""
    expected: int
    """Tokens it will produce, as far as is known; all its sequences together."""
    bound: int
    """Tokens it may produce at most."""
    exact: bool = True
    """Whether ``prompt`` was counted. If not it is an upper bound, and proves nothing about never."""
    answers: int = 1
    """Sequences that grow at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request's body says of its size."""

    kind: Hashable
    """Class of its answers, such as pool label and route."""
    body_bytes: int
    media: int = 0
    """Images and the like whose bytes are not in the body."""
    max_tokens: int | None = None
    """New tokens of each answer at most; None: as many as its window holds."""
    answers: int = 1
    """Several for ``n`` of one prompt, which they share."""


def cost_of(asked: Asked, lengths: LengthBook, window: int, *, prompt: int | None, shared: int) -> Cost:
    """The cells that a request adds.

    Args:
        asked: its body.
        lengths: what is known of answers.
        window: tokens of one slot's context.
        prompt: tokens of its prompt; None if nobody counted them.
        shared: leading ones that a pool holds.
    """
    exact = prompt is not None
    tokens = upper_bound_tokens(asked.body_bytes, asked.media) if prompt is None else prompt
    # a bound of the prompt says nothing about the room that it leaves
    room = max(0, window - tokens) if exact else window
    each = room if asked.max_tokens is None else min(asked.max_tokens, room)
    return Cost(
        prompt=max(0, min(tokens, window) - shared) if not exact else max(0, tokens - shared),
        expected=asked.answers * lengths.expected(asked.kind, each),
        bound=asked.answers * each,
        exact=exact,
        answers=asked.answers,
    )
