"""What a request is going to need of the KV cells, from what its body says. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.core import costs
from polykv_proxy.core.cells import Need
from polykv_proxy.core.media import media_parts

if TYPE_CHECKING:
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.core.decisions import AttachPlan
    from polykv_proxy.core.types import Tokens


def need_of(
    asked: Asked, family: Family, plan: AttachPlan | None, tokens: Tokens | None, *, slots: int = 1
) -> Need:
    """What a request needs.

    Args:
        asked: its body.
        family: its API.
        plan: the pool that it rides on.
        tokens: its prompt; None if nobody counted it.
        slots: that the engine runs it in, where it chooses them itself.
    """
    media = 0 if tokens is not None else media_parts(asked.body)
    size = costs.Asked(
        kind=(None if plan is None else plan.pool.label, family.dialect),
        body_bytes=len(asked.body),
        media=media,
        max_tokens=asked.max_tokens,
        answers=max(asked.completions, slots),
    )
    return Need(
        asked=size,
        prompt=None if tokens is None else len(tokens),
        shared=0 if plan is None else plan.tokens,
        pool=None if plan is None else plan.pool,
    )
