"""Which handler answers which request.

1. ``/polykv/engine…`` belongs to the proxy's own conversation with the engine: not found here.
2. ``/polykv/…`` goes to the control application.
3. What runs in a slot is placed by the proxy.
4. Status documents get a member of ours; slot actions are checked.
5. Everything else passes through: the body once it is complete, because the engine would keep a thread of
   its few waiting for a slow one; the answer as it streams.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.api.families import INFERENCE, SPREADING, Dialect, Family
from polykv_proxy.api.identity import without_ours
from polykv_proxy.core.types import SlotId
from polykv_proxy.edge.head import error_envelope
from polykv_proxy.edge.relay import relay
from polykv_proxy.errors import BadRequestError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.api.inference import Inference
    from polykv_proxy.api.status import Status
    from polykv_proxy.edge.exchange import BodySource, Exchange
    from polykv_proxy.edge.head import Headers, RequestHead
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.errors import PolyKVError
    from polykv_proxy.runtime import Runtime

_SLOT_ACTION = re.compile(r"/slots/([0-9]{1,6})")
_ESCAPE = re.compile(r"%(?:u([0-9A-Fa-f]{4})|([0-9A-Fa-f]{2}))")
_OTHER = Family(Dialect.OTHER)
_HEALTH = frozenset({"/health", "/v1/health"})


class Routes:
    """The handler that the edge calls for every request.

    Args:
        runtime: the engine's control plane.
        upstream: the way to the engine.
        control: the way to the control application.
        inference: requests that run in a slot.
        status: the engine's status routes.
        hold_s: seconds a passed-through request waits for an engine.
        max_body_bytes: bound of a passed-through body.
    """

    def __init__(  # noqa: PLR0913 - one argument for each place a request can go
        self,
        runtime: Runtime,
        upstream: Upstream,
        control: Upstream,
        inference: Inference,
        status: Status,
        *,
        hold_s: float,
        max_body_bytes: int,
    ) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._control = control
        self._inference = inference
        self._status = status
        self._hold_s = hold_s
        self._max_body_bytes = max_body_bytes

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        head = exchange.head
        path = engine_path(head.path)
        if path == "/polykv" or path.startswith("/polykv/"):
            if path.startswith("/polykv/engine"):
                raise NotFoundError(f"{head.path} does not exist", code="route_not_found")
            await self._pass(exchange, self._control, head.headers, exchange.body if head.has_body else b"")
            return
        if head.method == "POST" and await self._post(exchange, path):
            return
        if head.method == "GET":
            if path in _HEALTH and not self._runtime.plane.serving:
                await self._status.loading(exchange)
                return
            if path == "/props" and self._runtime.plane.serving:
                await self._status.props(exchange)
                return
        body = await exchange.read_body(self._max_body_bytes) if head.has_body else b""
        await self._await_engine()
        await self._pass(exchange, self._upstream, without_ours(head), body)

    async def _post(self, exchange: Exchange, path: str) -> bool:
        """Answer a POST that needs more than to be passed through; returns whether it was one."""
        family = INFERENCE.get(path)
        if family is not None:
            await self._inference.handle(exchange, family)
            return True
        if path in SPREADING:
            await self._inference.handle(exchange, _OTHER, spreading=True)
            return True
        if (match := _SLOT_ACTION.fullmatch(path)) is not None:
            await self._status.slot_action(exchange, SlotId(int(match[1])))
            return True
        if path.startswith("/slots/"):  # the engine reads "0x" and "+0" as numbers too
            raise BadRequestError(
                f"{exchange.head.path}: not a slot number", code="no_such_slot", param="id_slot"
            )
        return False

    async def _await_engine(self) -> None:
        if self._runtime.plane.serving:
            return
        try:
            async with asyncio.timeout(self._hold_s):
                await self._runtime.serving.wait()
        except TimeoutError:
            raise UnavailableError("Loading model", code="engine_loading", retry_after_s=2) from None

    @staticmethod
    async def _pass(
        exchange: Exchange, upstream: Upstream, headers: Headers, body: bytes | BodySource
    ) -> None:
        head = exchange.head
        response = await upstream.send(
            head.method,
            head.target,
            headers,
            body,
            named=head.connection_named(),
            on_interim=exchange.interim,
        )
        await relay(exchange, response)


def engine_path(path: str) -> str:
    """The path as the engine's HTTP library reads it: no spelling of a route may slip past its handler.

    For comparing only: escapes can make of it what no answer can be encoded with.
    """
    path = path.partition("#")[0]
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)), path) if "%" in path else path


def render_error(head: RequestHead | None, error: PolyKVError) -> bytes:
    """Body of an error of ours, in the form the route's clients parse."""
    if head is not None and head.path.startswith("/v1/messages"):
        return msgspec.json.encode({"type": "error", "error": error.members})
    return error_envelope(error)
