"""What clients hint about the prefixes that they share: where they end, and which conversations share them.

1. A mark in the body is a boundary. Its place in tokens is asked of the engine once for each prefix.
2. Without marks, conversations of one group end their common prefix where their tokens part.
3. A request that is the first behind a boundary leaves a pool of what precedes it, while it runs: those that
   come later find it, whoever has its slot by then. Nobody waits for that but those who want to share it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api import marks
from polykv_proxy.core.groups import GroupBook
from polykv_proxy.core.types import common_prefix, text_prefix
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.marks import Marked
    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.types import Scope, Tokens
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

MAX_KNOWN = 1024
"""Prefixes whose length in tokens is remembered."""

SETTLE_S = 2.0
"""Longest time that a slot is kept after its answer, for the pool that is left behind."""


class Hints:
    """Boundaries that clients hint at.

    Args:
        runtime: the engine's control plane.
        pooling: what is done to pools.
    """

    def __init__(self, runtime: Runtime, pooling: Pooling) -> None:
        self._runtime = runtime
        self._pooling = pooling
        self._groups = GroupBook()
        self._known: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Future[int]] = {}

    async def boundary(self, asked: Asked, family: Family, scope: Scope, tokens: Tokens) -> int:
        """Leading tokens that others are expected to begin with; 0 where nothing hints at any, or too few.

        Args:
            asked: the request.
            family: its API.
            scope: whose it is.
            tokens: its prompt.
        """
        plane = self._runtime.plane
        policy = plane.policy
        if not policy.auto_pools or not plane.capability.shares_cells:
            return 0
        marked = marks.deepest(asked.body, family)
        place = 0 if marked is None else await self._place(marked, family, tokens)
        if (group := marks.group_of(asked.body)) is not None:
            shared = self._groups.meet(scope, group, asked.chain, tokens)
            place = place or shared
        place = min(place, text_prefix(tokens))
        return place if place >= policy.min_match_tokens else 0

    async def _place(self, marked: Marked, family: Family, tokens: Tokens) -> int:
        """Tokens that precede a mark; those who ask for the same at the same time ask the engine once."""
        key = (self._runtime.plane.model_identity, marked.key)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        going = self._asking.get(key)
        if going is None:
            going = self._asking[key] = self._runtime.background(self._ask(key, marked, family, tokens))
        try:
            return await asyncio.shield(going)
        except PolyKVError as error:
            log.debug("mark_not_placed", reason=error.message)
            return 0

    async def _ask(self, key: tuple[str, int], marked: Marked, family: Family, tokens: Tokens) -> int:
        assert family.count_path is not None
        try:
            rendered = [await self._runtime.client.count_tokens(family.count_path, b) for b in marked.bodies]
            place = min(common_prefix(one, other) for one in rendered for other in (tokens, rendered[0]))
            self._known[key] = place
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            log.debug("mark_placed", tokens=place)
            return place
        finally:
            del self._asking[key]

    def leave_pool(self, lease: Lease, boundary: int, matched: int) -> asyncio.Future[bool] | None:
        """Leave a pool of a request's tokens before a boundary.

        Args:
            lease: of the request, whose prompt is computed.
            boundary: see ``boundary``.
            matched: leading tokens that a pool holds already.
        """
        plane = self._runtime.plane
        if boundary <= matched or not plane.pools.may_keep(boundary - matched):
            return None
        slot = plane.board.slots[lease.slots[0]]
        return self._runtime.background(self._pooling.share_from(slot, boundary))

    @staticmethod
    async def settle(leaving: asyncio.Future[bool] | None) -> None:
        """Let a pool come to be that is left behind by a request whose answer is complete.

        Its slot would be another's the next moment, and the tokens gone.
        """
        if leaving is not None:
            with suppress(TimeoutError, PolyKVError):
                async with asyncio.timeout(SETTLE_S):
                    await asyncio.shield(leaving)
