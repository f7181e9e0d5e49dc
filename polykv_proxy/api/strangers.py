"""Who has no key of the engine's, found out before he waits among those who have one.

Only the engine knows which keys it takes, and it says so when it gets a request. One that has to wait at the
gate would take a place and a turn there until then, so the engine is asked for something small with its key.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polykv_proxy.errors import EngineGoneError

if TYPE_CHECKING:
    from polykv_proxy.edge.head import RequestHead, ResponseHead
    from polykv_proxy.edge.upstream import Upstream

PATIENCE_S = 2.0
"""Seconds that the engine has to say it; then the request waits like any other."""

ROUTE = b"/props"
"""Guarded by the key, like all but a few, and answered also while all slots are at work."""

MAX_BYTES = 1 << 20

_KEYS = frozenset({b"authorization", b"x-api-key"})
_REFUSED = frozenset({401, 403})


async def refusal_of(upstream: Upstream, head: RequestHead) -> tuple[ResponseHead, bytes] | None:
    """The engine's refusal of a client's key; None where it takes it, or does not say."""
    keys = [field for field in head.headers if field[0].lower() in _KEYS]
    try:
        async with asyncio.timeout(PATIENCE_S):
            response = await upstream.send("GET", ROUTE, keys)
            body = await response.read(MAX_BYTES)
    except (TimeoutError, EngineGoneError):
        return None
    return (response.head, body) if response.head.status in _REFUSED else None
