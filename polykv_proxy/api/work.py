"""One request that runs in a slot, on its way: what is known of it so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.slots import Content

if TYPE_CHECKING:
    import asyncio

    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.hold import Hold
    from polykv_proxy.api.journal import Entry
    from polykv_proxy.core.decisions import AttachPlan, Lease, Place
    from polykv_proxy.core.tally import Before
    from polykv_proxy.core.types import Scope, Tokens
    from polykv_proxy.core.waiting import Waiting
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.gatekeeper import Visit


@dataclass(slots=True)
class Work:
    """One request on its way."""

    exchange: Exchange
    family: Family
    asked: Asked
    scope: Scope
    hold: Hold
    entry: Entry
    plan: AttachPlan | None = None
    tokens: Tokens | None = None
    """Exact tokens of the prompt, where they were asked for."""
    model: str = ""
    """What they are tokens of."""
    countable: bool = True
    """Whether the engine may still be asked for them: what it could not count once, it will refuse itself."""
    pool_unknown: bool = False
    unpooled: str | None = None
    """Why it does not ride on a pool that it named and that is there."""
    place: Place | None = None
    """Its place in line, where it had to wait before it could ask for slots."""
    waits: Waiting | None = None
    """It, as one of those who have no slot yet, where it belongs to a session."""
    lease: Lease | None = None
    content: Content = Content.OLD
    """What its slot holds, as far as it came."""
    clean: bool = True
    """Whether the engine is done with it."""
    told: bool = False
    """Whether the answer's own account of itself was taken."""
    before: Before | None = None
    """Its slot's totals when it was sent, where they are known."""
    visit: Visit | None = None
    """Its session's presence, where it belongs to one."""
    cells: int | None = None
    """That it took beyond what it shared."""
    clock: asyncio.Timeout | None = None
    """Its time is over when it is stopped for its cells."""
    stops: int = 0
    """Times that it was stopped for its cells."""
    boundary: int = 0
    """Leading tokens that others are expected to begin with, as far as the client hinted at any."""

    def start_over(self) -> None:
        """Forget what became of the attempt; what its prompt is made of stays known."""
        self.plan, self.pool_unknown, self.unpooled, self.lease = None, False, None, None
        self.content, self.clean, self.told = Content.OLD, True, False
        self.countable, self.before = True, None

    @property
    def matched(self) -> int:
        """Leading tokens that the pool it rides on holds."""
        return 0 if self.plan is None else self.plan.matched
