"""``GET /metrics``: the engines' own series, and ours behind them."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api.guard import UnauthorizedError
from polykv_proxy.api.status import fetch, guarded, kept_headers
from polykv_proxy.errors import PolyKVError
from polykv_proxy.metrics import CONTENT_TYPE, merged

if TYPE_CHECKING:
    from polykv_proxy.api.guard import Guard
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import RequestHead, ResponseHead
    from polykv_proxy.fleet import Engine, Fleet
    from polykv_proxy.metrics import Exposition

log = structlog.get_logger(__name__)

_NO_SERIES = (404, 501)
"""What an engine answers that was started without ``--metrics``."""


class Scrape:
    """The handler.

    1. An engine gives its series: those, then ours; of several engines each series has a label.
    2. It has none, does not serve, or does not answer: ours. Its key, which it cannot check now, is checked
       here.
    3. It refuses, for want of its key say: its refusal; what is not for everybody there is not here.

    Args:
        fleet: the engines.
        guard: knows the admin key, which opens this too.
        exposition: our series.
    """

    def __init__(self, fleet: Fleet, guard: Guard, exposition: Exposition) -> None:
        self._fleet = fleet
        self._guard = guard
        self._exposition = exposition

    async def handle(self, exchange: Exchange) -> None:
        """Answer one scrape."""
        answers = await asyncio.gather(*(self._ask(engine, exchange) for engine in self._fleet))
        texts: dict[str, bytes] = {}
        for engine, answer in zip(self._fleet, answers, strict=True):
            if answer is None:
                self._require_key(exchange.head, engine.key)
                continue
            head, body = answer
            if head.status == 200:
                texts[engine.name] = body
            elif head.status not in _NO_SERIES:
                await exchange.respond(head.status, kept_headers(head), body)
                return
        theirs = merged(texts) if len(self._fleet) > 1 else b"".join(texts.values())
        if theirs and not theirs.endswith(b"\n"):
            theirs += b"\n"
        text = theirs + self._exposition.render()
        await exchange.respond(200, [(b"Content-Type", CONTENT_TYPE.encode())], text)

    @staticmethod
    async def _ask(engine: Engine, exchange: Exchange) -> tuple[ResponseHead, bytes] | None:
        """One engine's own answer; None without one."""
        if not engine.plane.serving:
            return None
        try:
            return await fetch(engine.upstream, exchange)
        except PolyKVError as error:
            log.debug("engine_metrics_unavailable", engine=engine.name, reason=error.message)
            return None

    def _require_key(self, head: RequestHead, key: str | None) -> None:
        """Check an engine's key in its place.

        Raises:
            UnauthorizedError: it is missing or wrong.
        """
        if key is None or self._guard.is_admin(guarded(head)):
            return
        scheme, _, token = (head.get(b"authorization") or b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else head.get(b"x-api-key") or b""
        if not hmac.compare_digest(given, key.encode()):
            raise UnauthorizedError("send the engine's key as a bearer token", code="engine_key_required")
