"""Documents of an engine with a member of ours, and slot actions that cannot hurt anyone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec
from multidict import CIMultiDict

from polykv_proxy import policy
from polykv_proxy.api import views
from polykv_proxy.api.answer import insert_member
from polykv_proxy.api.identity import scope_of, without_ours
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope, SlotId
from polykv_proxy.edge.relay import relay
from polykv_proxy.engine.client import CONTROL_TIMEOUT_S
from polykv_proxy.errors import BadRequestError, ConflictError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.api.guard import Guard
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import RequestHead, ResponseHead
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.runtime import Runtime

DOCUMENT_BYTES = 64 * 1024 * 1024


class Status:
    """Handlers of the engine's own status routes.

    Args:
        runtime: the engine's control plane.
        upstream: the way to the engine.
        guard: who may use slot actions, and who sees everybody's sessions.
        shared: whether callers with different keys share prefixes.
        patch: identity of the patches that the engine was built with, where it is known.
    """

    def __init__(
        self,
        runtime: Runtime,
        upstream: Upstream,
        guard: Guard,
        *,
        shared: bool = False,
        patch: str | None = None,
    ) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._guard = guard
        self._shared = shared
        self._patch = patch

    async def props(self, exchange: Exchange) -> None:
        """``GET /props`` with our ``opencoti`` member."""
        head, body = await fetch(self._upstream, exchange)
        if head.status == 200 and body.rstrip().endswith(b"}"):
            body = insert_member(body, "opencoti", self._member())
        await exchange.respond(head.status, head.end_to_end(), body)

    def _member(self) -> dict[str, Any]:
        runtime = self._runtime
        admission = policy.document(runtime.gatekeeper.policy(None))
        return views.properties(runtime.plane, self._patch, runtime.saver.status(), admission)

    async def slots(self, exchange: Exchange) -> None:
        """``GET /slots`` with our ``opencoti`` member in each slot; every other byte stays.

        The engine lets every web page read its routes. Pages from elsewhere get what it says, and no names of
        sessions, which ``/polykv`` does not tell them either.
        """
        head, body = await fetch(self._upstream, exchange)
        if head.status == 200 and not self._guard.is_foreign_page(guarded(exchange.head)):
            body = self._with_members(body, self._sees(exchange.head))
        await exchange.respond(head.status, head.end_to_end(), body)

    def _with_members(self, body: bytes, scope: Scope | None) -> bytes:
        """A list of slots, each with a member more; a document that is no such list stays as it is."""
        try:
            elements = _elements.decode(body)
            slots = [msgspec.json.decode(raw, type=_Slot) for raw in elements]
        except msgspec.DecodeError:
            return body
        plane, pieces, at = self._runtime.plane, [], 0
        for raw, slot in zip(map(bytes, elements), slots, strict=True):
            start = body.index(raw, at)
            member = views.slot_member(plane, SlotId(slot.id), scope, slot.n_prompt_tokens, slot.n_ctx)
            pieces += [body[at:start], insert_member(raw, "opencoti", member)]
            at = start + len(raw)
        return b"".join((*pieces, body[at:]))

    def _sees(self, head: RequestHead) -> Scope | None:
        """Whose sessions may be named: everybody's with the admin key, else those of the own key."""
        return None if self._guard.is_admin(guarded(head)) else scope_of(head, shared=self._shared)

    async def slot_action(self, exchange: Exchange, slot: SlotId) -> None:
        """``POST /slots/{id}?action=…``: only on an idle slot, whose conversation is then forgotten.

        Raises:
            ConflictError: the slot is at work.
        """
        self._guard.require_admin(guarded(exchange.head))
        body = await exchange.read_body(DOCUMENT_BYTES)
        action = parse_qs(exchange.head.query).get("action", [""])[0]
        if not self._runtime.plane.serving:
            raise self._runtime.unavailable()
        if slot >= len(self._runtime.plane.board.slots):
            raise BadRequestError(f"there is no slot {slot}", code="no_such_slot", param="id_slot")
        await self._runtime.not_borrowed(slot)
        pending = self._runtime.line.request(Ask(scope=Scope(""), only=slot), conversation=False)
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


async def fetch(
    upstream: Upstream, exchange: Exchange, *, key: str | None = None
) -> tuple[ResponseHead, bytes]:
    """The engine's answer to a status request, whole and not compressed; for a HEAD what a GET gets.

    Args:
        upstream: the way to the engine.
        exchange: the request.
        key: the engine's, to be sent in place of what its client sent.

    Raises:
        UnavailableError: it is not complete after ``CONTROL_TIMEOUT_S`` seconds.
    """
    head = exchange.head
    dropped = {b"accept-encoding"} if key is None else {b"accept-encoding", b"authorization", b"x-api-key"}
    headers = [field for field in without_ours(head) if field[0].lower() not in dropped]
    if key is not None:
        headers.append((b"Authorization", b"Bearer " + key.encode()))
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            response = await upstream.send(
                "GET",
                head.target,
                headers,
                named=head.connection_named(),
                on_interim=exchange.interim,
            )
            return response.head, await response.read(DOCUMENT_BYTES)
    except TimeoutError:
        raise UnavailableError(
            f"the engine did not answer {head.path} within {CONTROL_TIMEOUT_S:g} s", code="engine_timeout"
        ) from None


async def pass_on(upstream: Upstream, exchange: Exchange) -> None:
    """The engine's answer to a status request as it is, or that there is none in time.

    Raises:
        UnavailableError: see ``fetch``.
    """
    head, body = await fetch(upstream, exchange)
    await exchange.respond(head.status, head.end_to_end(), body)


def guarded(head: RequestHead) -> CIMultiDict[str]:
    """Fields in the form that ``Guard`` takes."""
    return CIMultiDict(
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in head.headers
    )


class _Slot(msgspec.Struct):
    id: int
    n_ctx: int | None = None
    n_prompt_tokens: int | None = None


_elements = msgspec.json.Decoder(list[msgspec.Raw])
