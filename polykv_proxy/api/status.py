"""Documents of an engine with a member of ours, and slot actions that cannot hurt anyone."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from polykv_proxy.api import views
from polykv_proxy.api.answer import insert_member
from polykv_proxy.api.identity import without_ours
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope, SlotId
from polykv_proxy.edge.relay import relay
from polykv_proxy.errors import BadRequestError, ConflictError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.api.guard import Guard
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.runtime import Runtime

DOCUMENT_BYTES = 64 * 1024 * 1024


class Status:
    """Handlers of the engine's own status routes.

    Args:
        runtime: the engine's control plane.
        upstream: the way to the engine.
        guard: who may use slot actions.
    """

    def __init__(self, runtime: Runtime, upstream: Upstream, guard: Guard) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._guard = guard

    async def props(self, exchange: Exchange) -> None:
        """``GET /props`` with our ``opencoti`` member."""
        head = exchange.head
        response = await self._upstream.send(
            head.method,
            head.target,
            without_ours(head),
            named=head.connection_named(),
            on_interim=exchange.interim,
        )
        body = await response.read(DOCUMENT_BYTES)
        if response.head.status == 200 and body.rstrip().endswith(b"}"):
            body = insert_member(body, "opencoti", views.properties(self._runtime.plane))
        kept = [
            field
            for field in response.head.headers
            if field[0].lower() not in (b"content-length", b"connection", b"keep-alive", b"transfer-encoding")
        ]
        await exchange.respond(response.head.status, kept, body)

    async def slot_action(self, exchange: Exchange, slot: SlotId) -> None:
        """``POST /slots/{id}?action=…``: only on an idle slot, whose conversation is then forgotten.

        Raises:
            ConflictError: the slot is at work.
        """
        headers = {
            name.decode("latin-1").title(): value.decode("utf-8", "surrogateescape")
            for name, value in exchange.head.headers
        }
        self._guard.require_admin(headers)
        body = await exchange.read_body(DOCUMENT_BYTES)
        action = parse_qs(exchange.head.query).get("action", [""])[0]
        if not self._runtime.plane.serving:
            raise UnavailableError("the engine is not ready", code="engine_loading", retry_after_s=2)
        if slot >= len(self._runtime.plane.board.slots):
            raise BadRequestError(f"there is no slot {slot}", code="no_such_slot", param="id_slot")
        pending = self._runtime.request(Ask(scope=Scope(""), only=slot), conversation=False)
        if pending.lease is None:
            pending.give_up()
            raise ConflictError(f"slot {slot} is at work", code="slot_busy")
        content = Content.NOTHING
        try:
            head = exchange.head
            response = await self._upstream.send(
                head.method, head.target, without_ours(head), body, named=head.connection_named()
            )
            if action == "save" and response.head.status == 200:
                content = Content.OLD
            await relay(exchange, response)
        finally:
            # the engine defers nothing here: the slot is idle, so an unfinished action ends by itself
            self._runtime.finish(pending.lease, clean=True, content=content)
            self._runtime.backend.forget([slot])
