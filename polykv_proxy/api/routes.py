"""Which handler answers which request.

1. ``/polykv/engine…`` belongs to the proxy's own conversation with the engine: not found here.
2. ``/polykv/…`` goes to the control application.
3. What runs in a slot is placed by the proxy.
4. Status documents get members of ours, metrics get our series; slot actions are checked.
5. With several engines, their health and their models are told in one document each, unless one is named.
6. Everything else passes through: the body once it is complete, because the engine would keep a thread of
   its few waiting for a slow one; the answer as it streams.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec

from polykv_proxy.api import asked as asking
from polykv_proxy.api import status, tps
from polykv_proxy.api.families import INFERENCE, SPREADING, Dialect, Family
from polykv_proxy.api.identity import names_of, our_headers, scope_of, session_name, without_ours
from polykv_proxy.api.placement import Placement
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import SlotId
from polykv_proxy.edge.head import error_envelope
from polykv_proxy.edge.relay import relay
from polykv_proxy.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polykv_proxy.api.advice import Advice
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.inference import Inference
    from polykv_proxy.api.journal import Journal
    from polykv_proxy.api.merged import Merged
    from polykv_proxy.api.scrape import Scrape
    from polykv_proxy.api.status import Status
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.edge.exchange import BodySource, Exchange
    from polykv_proxy.edge.head import Headers, RequestHead
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.errors import PolyKVError
    from polykv_proxy.fleet import Engine, Fleet
    from polykv_proxy.settings import Settings

_SLOT_ACTION = re.compile(r"/slots/([0-9]{1,6})")
_ESCAPE = re.compile(r"%(?:u([0-9A-Fa-f]{4})|([0-9A-Fa-f]{2}))")
_OTHER = Family(Dialect.OTHER)
_READING = ("GET", "HEAD")
_HEALTH = frozenset({"/health", "/v1/health"})
_MODELS = frozenset({"/models", "/v1/models"})


@dataclass(frozen=True, slots=True, eq=False)
class Handlers:
    """What answers for one engine."""

    inference: Inference
    status: Status


class Routes:
    """The handler that the edge calls for every request.

    Args:
        fleet: the engines.
        handlers: what answers for each of them, in the same order.
        merged: what answers for all of them together.
        control: the way to the control application.
        settings: limits, and who shares with whom.
        advice: what is noticed in requests.
        journal: keeps the records.
        hold_s: seconds a passed-through request waits for an engine.
        scrape: metrics; None leaves them to the engine.
    """

    def __init__(  # noqa: PLR0913 - one argument for each place a request can go
        self,
        fleet: Fleet,
        handlers: Sequence[Handlers],
        merged: Merged,
        control: Upstream,
        settings: Settings,
        *,
        advice: Advice,
        journal: Journal,
        hold_s: float,
        scrape: Scrape | None = None,
    ) -> None:
        self._fleet = fleet
        self._handlers = handlers
        self._merged = merged
        self._control = control
        self._advice = advice
        self._journal = journal
        self._hold_s = hold_s
        self._scrape = scrape
        self._max_body_bytes = settings.max_body_bytes
        self._shared = settings.share_across_keys
        self._several = len(fleet) > 1
        self._placement = Placement(fleet)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        head = exchange.head
        path = engine_path(head.path)
        if path == "/polykv" or path.startswith("/polykv/"):
            if path.startswith("/polykv/engine"):
                raise NotFoundError(f"{head.path} does not exist", code="route_not_found")
            if path == "/polykv/tps":
                exchange.write_stall_s = tps.STALL_S
            await self._pass(exchange, self._control, head.headers, exchange.body if head.has_body else b"")
            return
        if head.method == "POST" and await self._post(exchange, path):
            return
        engine = self._fleet.of_query(head.query)
        if self._several and path == "/v1/stream":
            engine = self._placement.of_stream(head.query) or engine
        if head.method in _READING and await self._get(exchange, path, engine):
            return
        body = await exchange.read_body(self._max_body_bytes) if head.has_body else b""
        await self._await_engine(engine)
        await self._pass(exchange, engine.upstream, without_ours(head), body)

    async def _post(self, exchange: Exchange, path: str) -> bool:
        """Answer a POST that needs more than to be passed through; returns whether it was one."""
        family = INFERENCE.get(path)
        if family is not None:
            await self._infer(exchange, family, spreading=False)
            return True
        if path in SPREADING:
            await self._infer(exchange, _OTHER, spreading=True)
            return True
        if (match := _SLOT_ACTION.fullmatch(path)) is not None:
            engine = self._fleet.of_query(exchange.head.query)
            await self._handlers[engine.number].status.slot_action(exchange, SlotId(int(match[1])))
            return True
        if path.startswith("/slots/"):  # the engine reads "0x" and "+0" as numbers too
            raise BadRequestError(
                f"{exchange.head.path}: not a slot number", code="no_such_slot", param="id_slot"
            )
        return False

    async def _get(self, exchange: Exchange, path: str, engine: Engine) -> bool:
        """Answer a GET or HEAD that needs more than to be passed through; returns whether it was one."""
        if path in _HEALTH:
            await self._health(exchange, engine)
        elif path in _MODELS:
            await self._models(exchange, engine)
        elif path == "/metrics" and self._scrape is not None:
            await self._scrape.handle(exchange)
        elif path in ("/props", "/slots"):
            await self._await_engine(engine)
            documents = self._handlers[engine.number].status
            await (documents.props if path == "/props" else documents.slots)(exchange)
        else:
            return False
        return True

    async def _health(self, exchange: Exchange, engine: Engine) -> None:
        """For all engines, or for the one that is named."""
        one = not self._several or "engine" in parse_qs(exchange.head.query)
        asked = [engine] if one else list(self._fleet)
        if not any(each.plane.serving for each in asked):
            await self._merged.loading(exchange, asked)
        elif not one:
            await self._merged.health(exchange)
        else:
            await status.pass_on(engine.upstream, exchange)

    async def _models(self, exchange: Exchange, engine: Engine) -> None:
        """Of all engines, or of the one that is named."""
        if self._several and not parse_qs(exchange.head.query).keys() & {"engine", "model"}:
            await self._merged.models(exchange)
        else:
            await self._await_engine(engine)
            await status.pass_on(engine.upstream, exchange)

    async def _infer(self, exchange: Exchange, family: Family, *, spreading: bool) -> None:
        """A request that runs in a slot: read it, choose its engine, have it answered there."""
        head = exchange.head
        scope = scope_of(head, shared=self._shared)
        with self._journal.open(head.path, scope, names_of(head)) as entry:
            body = await exchange.read_body(self._max_body_bytes)
            asked = asking.read(body, family, our_headers(head), mask=self._advice.masks)
            if asked.masked:
                self._advice.on_masked(scope)
            ask = Ask(
                scope=scope,
                name=session_name(head, asked.session, asked.metadata),
                chain=asked.chain,
                structured=asked.structured,
                slots=asked.completions,
                exclusive=spreading or asked.many_prompts,
            )
            number, tokens = 0, None
            if self._several:
                engine, tokens = await self._choose(head, family, asked, ask)
                number = engine.number
            await self._handlers[number].inference.handle(
                exchange, family, asked, ask, entry=entry, tokens=tokens
            )

    async def _choose(
        self, head: RequestHead, family: Family, asked: Asked, ask: Ask
    ) -> tuple[Engine, Tokens | None]:
        """The engine for a request, and its tokens there if they had to be asked for."""

        async def tokenize(engine: Engine) -> Tokens | None:
            matching = self._handlers[engine.number].inference.matching
            return (
                await matching.tokens(family, asked, ask.scope) if matching.may_match(family, asked) else None
            )

        query = head.query
        chosen = self._fleet.of_query(query) if "engine=" in query else None
        engine, tokens = (chosen, None) if chosen else await self._placement.choose(asked, ask, tokenize)
        if (stream := head.get_text(b"x-conversation-id")) is not None:
            self._placement.note_stream(stream, engine)
        return engine, tokens

    async def _await_engine(self, engine: Engine) -> None:
        if engine.plane.serving:
            return
        try:
            async with asyncio.timeout(self._hold_s):
                await engine.runtime.serving.wait()
        except TimeoutError:
            raise engine.runtime.unavailable() from None

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
