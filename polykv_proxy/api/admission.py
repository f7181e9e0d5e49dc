"""The admission routes: what policy holds for a pool, whether there is room, and places in advance."""

from __future__ import annotations

import uuid
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web

from polykv_proxy import policy as policies
from polykv_proxy.api.reply import json_reply
from polykv_proxy.api.shapes import says
from polykv_proxy.core.admission import Refused
from polykv_proxy.core.promises import MAX_PLACES, MAX_TTL_S, Wish
from polykv_proxy.core.types import PoolId, Scope
from polykv_proxy.errors import BadRequestError
from polykv_proxy.gatekeeper import document, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.fleet import Engine, Fleet


def _within(**bounds: float) -> msgspec.Meta:
    """Bounds for readers of the schema; they are checked below, in words that name the member."""
    return msgspec.Meta(extra_json_schema=bounds)


class Places(msgspec.Struct, forbid_unknown_fields=True):
    """Places that are kept for sessions."""

    sessions: Annotated[int, says(f"How many, 1 to {MAX_PLACES}."), _within(minimum=1, maximum=MAX_PLACES)]
    ttl_s: Annotated[
        float,
        says(f"For how many seconds, at most {MAX_TTL_S:g}."),
        _within(exclusiveMinimum=0, maximum=MAX_TTL_S),
    ]


class AdmissionApi:
    """The routes.

    Args:
        fleet: the engines.
        sees: what a request may see; None: everything.
    """

    def __init__(self, fleet: Fleet, sees: Callable[[web.Request], Scope | None]) -> None:
        self._fleet = fleet
        self._sees = sees

    def routes(self) -> list[web.RouteDef]:
        """What the control application serves of it."""
        return [
            web.get("/polykv/admission", self.show_default),
            web.get("/polykv/pools/{pool_id}/admission", self.show),
            web.post("/polykv/pools/{pool_id}/admission", self.post),
            web.get("/polykv/pools/{pool_id}/capacity", self.capacity),
            web.post("/polykv/pools/{pool_id}/reserve", self.reserve),
            web.get("/polykv/capacity", self.capacity_of_engine),
        ]

    async def post(self, request: web.Request) -> web.Response:
        """``POST …/{id}/admission``: say what holds for a pool; echoes what is in force, inherited or not."""
        engine, pool = self._pool(request)
        try:
            values = msgspec.json.decode(await request.read())
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequestError(f"not valid JSON: {error}") from None
        engine.runtime.gatekeeper.post(pool, policies.posted(values))
        return self._in_force(engine, pool)

    async def show(self, request: web.Request) -> web.Response:
        """``GET …/{id}/admission``: what is in force for a pool, and where each value is from."""
        return self._in_force(*self._pool(request))

    async def show_default(self, request: web.Request) -> web.Response:
        """``GET /polykv/admission``: the same for sessions that name no pool."""
        return self._in_force(self._fleet.of_query(request.query_string), None)

    @staticmethod
    def _in_force(engine: Engine, pool: PrefixPool | None) -> web.Response:
        keeper = engine.runtime.gatekeeper
        return json_reply(
            {
                "engine": engine.name,
                "pool_id": None if pool is None else pool.pool_id,
                "effective": policies.document(keeper.policy(pool)),
                "sources": policies.sources(keeper.origins(pool)),
            }
        )

    async def capacity(self, request: web.Request) -> web.Response:
        """``GET …/{id}/capacity``: whether one more session would be let in; asking changes nothing."""
        engine, pool = self._pool(request)
        return self._capacity(request, engine, pool)

    async def capacity_of_engine(self, request: web.Request) -> web.Response:
        """``GET /polykv/capacity``: the same of an engine, for sessions that name no pool."""
        return self._capacity(request, self._fleet.of_query(request.query_string), None)

    @staticmethod
    def _capacity(request: web.Request, engine: Engine, pool: PrefixPool | None) -> web.Response:
        given = request.query.get("expected_tokens")
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 10):
            raise BadRequestError("expected_tokens must be a number of tokens", param="expected_tokens")
        keeper = engine.runtime.gatekeeper
        found = keeper.gate.capacity(
            monotonic(),
            keeper.policy(pool),
            None if pool is None else pool.pool_id,
            None if given is None else int(given),
        )
        return json_reply(document(found, engine.name))

    async def reserve(self, request: web.Request) -> web.Response:
        """``POST …/{id}/reserve``: places for sessions that will come; all of them, or none."""
        engine, pool = self._pool(request)
        try:
            wanted = msgspec.json.decode(await request.read(), type=Places)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequestError(f'send {{"sessions": …, "ttl_s": …}}: {error}') from None
        if not 1 <= wanted.sessions <= MAX_PLACES:
            raise BadRequestError(f"sessions must be 1 to {MAX_PLACES}", param="sessions")
        if not 0 < wanted.ttl_s <= MAX_TTL_S:
            raise BadRequestError(f"ttl_s must be more than 0, at most {MAX_TTL_S:g}", param="ttl_s")
        keeper = engine.runtime.gatekeeper
        wish = Wish(
            leases=tuple(uuid.uuid4().hex for _ in range(wanted.sessions)),
            scope=pool.scope,
            key=f"{pool.pool_id} {request.headers.get('Idempotency-Key') or uuid.uuid4().hex}",
            ttl_s=wanted.ttl_s,
            pool=pool.pool_id,
        )
        now = monotonic()
        promise = keeper.gate.reserve(wish, keeper.policy(pool), now, jitter=0.5)
        if isinstance(promise, Refused):
            raise refusal(promise, engine.name)
        return json_reply(
            {
                "pool_id": pool.pool_id,
                "leases": list(promise.leases),
                "expires_in_s": round(max(0.0, promise.expires_at - now), 3),
            }
        )

    def _pool(self, request: web.Request) -> tuple[Engine, PrefixPool]:
        return self._fleet.need_pool(PoolId(request.match_info["pool_id"]), self._sees(request))
