"""Whether a request chooses LoRA adapters of its own: what it computes is not the loaded model's KV. Pure."""

from __future__ import annotations

import re

import msgspec

_MAY_BE = re.compile(rb'"lora"|\\u00[67]', re.IGNORECASE)
"""The key as it stands, or an escape that may be one of its letters: the same JSON."""


class _Body(msgspec.Struct):
    lora: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def has_adapters(body: bytes) -> bool:
    """Whether a request names adapters; of one that nobody can read it is taken for granted that it may.

    Bodies are looked into only where one of ``_MAY_BE`` is in them.
    """
    if _MAY_BE.search(body) is None:
        return False
    try:
        return not isinstance(msgspec.json.decode(body, type=_Body).lora, msgspec.UnsetType)
    except (msgspec.DecodeError, RecursionError):
        return True
