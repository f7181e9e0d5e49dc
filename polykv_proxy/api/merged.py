"""What is said for all engines together: their health, and their models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from polykv_proxy.api.status import fetch
from polykv_proxy.errors import PolyKVError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.api import shapes
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import Headers, ResponseHead
    from polykv_proxy.fleet import Engine, Fleet

log = structlog.get_logger(__name__)

_LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
"""What llama-server itself says while it loads; clients wait for it word by word."""

_JSON: Headers = [(b"Content-Type", b"application/json; charset=utf-8")]

_document = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


class _Id(msgspec.Struct):
    id: str | None = None
    name: str | None = None


_id = msgspec.json.Decoder(_Id)


class Merged:
    """Handlers of the routes that all engines answer together.

    Args:
        fleet: the engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @staticmethod
    async def loading(exchange: Exchange, engines: Iterable[Engine]) -> None:
        """``GET /health`` while none of these serves: an engine's own words while it loads, or why not."""
        reasons = [engine.runtime.unavailable() for engine in engines]
        body = _LOADING
        if all(reason.code != "engine_loading" for reason in reasons):
            told = {"message": reasons[0].message, "type": "unavailable_error", "code": 503}
            body = msgspec.json.encode({"error": told})
        await exchange.respond(503, [*_JSON, (b"Retry-After", b"2")], body)

    async def health(self, exchange: Exchange) -> None:
        """``GET /health`` of several engines, of which one at least serves."""
        document = {"status": "ok", "engines": [engine_state(engine) for engine in self._fleet]}
        await exchange.respond(200, _JSON, msgspec.json.encode(document))

    async def models(self, exchange: Exchange) -> None:
        """``GET /v1/models``: those of all engines that serve, each once, in the engines' own words.

        The client's own key is what each engine sees; an engine that refuses it has nothing to add.

        Raises:
            UnavailableError: no engine serves, or none answered.
        """
        answers = await asyncio.gather(*(self._ask(engine, exchange) for engine in self._fleet))
        merged: dict[str, Any] = {}
        refusal: tuple[int, Headers, bytes] | None = None
        for engine, answer in zip(self._fleet, answers, strict=True):
            if answer is None:
                continue
            head, body = answer
            if head.status != 200:
                refusal = head.status, _JSON, body
                continue
            try:
                _add(merged, _document.decode(body))
            except msgspec.DecodeError as error:
                log.info("models_not_listed", engine=engine.name, reason=str(error))
        if merged:
            await exchange.respond(200, _JSON, msgspec.json.encode(merged))
        elif refusal is not None:
            await exchange.respond(*refusal)
        else:
            raise UnavailableError("no engine answers", code="engine_loading", retry_after_s=2)

    @staticmethod
    async def _ask(engine: Engine, exchange: Exchange) -> tuple[ResponseHead, bytes] | None:
        """One engine's own answer; None without one."""
        if not engine.plane.serving:
            return None
        try:
            return await fetch(engine.upstream, exchange)
        except PolyKVError as error:
            log.info("models_not_listed", engine=engine.name, reason=error.message)
            return None


def engine_state(engine: Engine) -> shapes.EngineHealth:
    """One engine in a list of all."""
    status, plane = engine.runtime.status, engine.plane
    return {
        "name": engine.name,
        "state": None if status is None else status.state.value,
        "serving": plane.serving,
        "reason": None if status is None else status.reason,
        "restarts": None if status is None else status.restarts,
        "models": [] if plane.facts is None else list(plane.facts.models),
        "capability": plane.capability.value,
        "capability_reason": plane.capability_reason,
    }


def _add(merged: dict[str, Any], document: dict[str, msgspec.Raw]) -> None:
    """Add a document's members: lists grow by what is new in them, the rest is the first one's."""
    for key, raw in document.items():
        if not bytes(raw).startswith(b"["):
            merged.setdefault(key, raw)
            continue
        known = merged.setdefault(key, [])
        names = {_name(each) for each in known}
        known.extend(each for each in _list.decode(raw) if _name(each) not in names)


def _name(model: msgspec.Raw) -> str | None:
    found = _id.decode(model)
    return found.id if found.id is not None else found.name
