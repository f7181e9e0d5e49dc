"""The ``/polykv`` routes: pools, and what belongs to them, as JSON over an in-process aiohttp application."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from aiohttp import web

from polykv_proxy.api import views
from polykv_proxy.api.envelope import Envelope
from polykv_proxy.api.guard import UnauthorizedError
from polykv_proxy.api.identity import is_scope, scope_of_keys
from polykv_proxy.api.prefixes import ForkRequest, PoolRequest, capped, prefix_of, read_wanted, warning_of
from polykv_proxy.api.reply import flag, json_reply
from polykv_proxy.api.sessions import SessionsApi
from polykv_proxy.core.types import PoolId, Scope, SessionId, common_prefix
from polykv_proxy.errors import BadRequestError, NotFoundError, PolyKVError, PrefixMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.api.guard import Guard
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.engine.patched import Materialized
    from polykv_proxy.fleet import Engine, Fleet


class ControlApi:
    """The control plane's HTTP face.

    Args:
        fleet: the engines.
        guard: who may.
        shared: whether callers with different keys share prefixes.
        hold_s: seconds that a new pool waits for an engine.
    """

    def __init__(self, fleet: Fleet, guard: Guard, *, shared: bool, hold_s: float) -> None:
        self._fleet = fleet
        self._guard = guard
        self._shared = shared
        self._hold_s = hold_s

    def application(self, max_body_bytes: int, further: Iterable[web.RouteDef] = ()) -> web.Application:
        """The routes, and those of others, behind the guard and the error envelope."""
        app = web.Application(middlewares=[Envelope(self._guard).around], client_max_size=max_body_bytes)
        app.router.add_get("/polykv/pools", self.list_pools)
        app.router.add_post("/polykv/pools", self.create_pool)
        app.router.add_get("/polykv/pools/{pool_id}", self.show_pool)
        app.router.add_delete("/polykv/pools/{pool_id}", self.release_pool)
        app.router.add_post("/polykv/pools/{pool_id}/release", self.release_pool)
        app.router.add_post("/polykv/pools/{pool_id}/fork", self.fork_pool)
        app.router.add_post("/polykv/pools/{pool_id}/evict", self.evict_pool)
        app.router.add_post("/polykv/pools/{pool_id}/flush", self.evict_pool)
        app.router.add_post("/polykv/pools/{pool_id}/pin", self.pin_pool)
        app.router.add_post("/polykv/pools/{pool_id}/unpin", self.pin_pool)
        SessionsApi(self._fleet, self.sees).add_to(app.router)
        app.router.add_post("/polykv/tokenize", self.tokenize)
        app.router.add_routes(further)
        return app

    # -- pools -------------------------------------------------------------------------------------------

    async def create_pool(self, request: web.Request) -> web.Response:
        """``POST /polykv/pools``: 201 with a new pool, 200 with the one that holds this content already."""
        await self._fleet.wait_until_serving(self._hold_s)
        self._fleet.require_pools()
        wanted = await read_wanted(request, PoolRequest)
        if wanted.from_session is not None:
            _require_alone(wanted)
            wanted_id, seen = SessionId(wanted.from_session), self.sees(request)
            engine, session = self._fleet.need_session(wanted_id, seen, param="from_session")
            return await self._create_from_session(wanted, engine, session.scope)
        engine = self._fleet.with_pools(wanted.engine)
        tokens, full = await prefix_of(wanted, engine)
        tokens, scope = capped(tokens, wanted), self._scope(request)
        # where this content is already, it stays
        known = self._fleet.find_pool(engine.plane.pools.id_of(tokens, scope), scope)
        warning = await warning_of(wanted, full, engine)
        engine = engine if known is None else known[0]
        made = await engine.pooling.create(
            tokens, scope, label=wanted.label, pin=wanted.pin, ttl_s=wanted.ttl_s
        )
        return self._created(engine, made, full, warning)

    async def fork_pool(self, request: web.Request) -> web.Response:
        """``POST /polykv/pools/{id}/fork``: a child whose first D tokens are the parent's cells."""
        engine, parent = self._pool(request)
        wanted = await read_wanted(request, ForkRequest)
        if wanted.engine not in (None, engine.name):
            raise BadRequestError(f"a child lives with its parent, on {engine.name}", param="engine")
        if wanted.from_session is not None:
            _require_alone(wanted)
            parent = await engine.pooling.ensure_resident(parent)
            return await self._create_from_session(wanted, engine, parent.scope, parent)
        tokens, full = await prefix_of(wanted, engine)
        tokens = capped(tokens, wanted)
        try:
            branch_pos = engine.plane.pools.branch_point(parent, tokens, wanted.branch_pos)
        except PrefixMismatchError as error:
            await self._spell_out(error, engine)
            raise
        warning = await warning_of(wanted, full, engine)
        parent = await engine.pooling.ensure_resident(parent)
        made = await engine.pooling.create(
            tokens,
            parent.scope,
            label=wanted.label,
            pin=wanted.pin,
            ttl_s=wanted.ttl_s,
            parent=parent,
            branch_pos=branch_pos,
        )
        return self._created(engine, made, full, warning)

    @staticmethod
    async def _spell_out(error: PrefixMismatchError, engine: Engine) -> None:
        """Add the text of the tokens that differ: the form in which people can debug it."""
        for kind in ("expected", "got"):
            token = error.details.get(f"{kind}_token")
            if isinstance(token, int):
                with suppress(PolyKVError):  # one the model does not have is no text
                    error.details[f"{kind}_text"] = await engine.runtime.client.text_of([token])

    async def _create_from_session(
        self, wanted: PoolRequest, engine: Engine, scope: Scope, parent: PrefixPool | None = None
    ) -> web.Response:
        if wanted.engine not in (None, engine.name):
            raise BadRequestError(f"the session is on {engine.name}", param="engine")
        assert wanted.from_session is not None
        engine.plane.pools.require()
        pool, created = await engine.pooling.snapshot_session(
            SessionId(wanted.from_session),
            scope,
            n_tokens=wanted.n_tokens,
            label=wanted.label,
            pin=wanted.pin,
            ttl_s=wanted.ttl_s,
            parent=parent,
        )
        return self._created(engine, (pool, created, None))

    @staticmethod
    def _created(
        engine: Engine,
        made: tuple[PrefixPool, bool, Materialized | None],
        full: Tokens | None = None,
        warning: str | None = None,
    ) -> web.Response:
        pool, created, work = made
        parent, branch_pos = pool.edge
        answer: dict[str, Any] = {
            "pool_id": pool.pool_id,
            "engine": engine.name,
            "prefix_len": pool.prefix_len,
            "parent": None if parent is None else parent.pool_id,
            "branch_pos": branch_pos,
            "created": created,
            "pinned": pool.pinned,
            "label": pool.label,
            "prompt_tokens_computed": work.timings.prompt_n if created and work is not None else 0,
        }
        if full is not None:
            answer["shared_probe_tokens"] = shared = common_prefix(full, pool.tokens)
            if shared == 0:
                warning = "a chat rendered against this pool shares nothing with it"
        if warning is not None:
            answer["warning"] = warning
        return json_reply(answer, status=201 if created else 200)

    async def list_pools(self, request: web.Request) -> web.Response:
        """``GET /polykv/pools``: pools, with ``?orphans=1`` orphaned pins, and where all used cells are."""
        orphans = flag(request, "orphans")
        self._fleet.require_pools()
        await self._fleet.sample()
        listing = views.pools(self._fleet.planes, self.sees(request), monotonic(), orphans=orphans)
        for part, engine in zip(listing["engines"], self._fleet, strict=True):
            part.update(engine.runtime.backend.listing())
        return json_reply(listing)

    async def show_pool(self, request: web.Request) -> web.Response:
        """``GET /polykv/pools/{id}``: one pool and what is below it."""
        engine, pool = self._pool(request)
        await engine.runtime.readings.glance()
        view, *below = [views.pool_view(engine.name, engine.plane, each) for each in pool.subtree()]
        return json_reply({**view, "subtree": below})

    async def pin_pool(self, request: web.Request) -> web.Response:
        """``POST /polykv/pools/{id}/pin`` and ``/unpin``; idempotent."""
        engine, pool = self._pool(request)
        pool.pinned = request.path.endswith("/pin")
        pool.last_access_ts = engine.runtime.now_ts()  # somebody wants it, or did until now
        return json_reply({"pool_id": pool.pool_id, "pinned": pool.pinned})

    async def evict_pool(self, request: web.Request) -> web.Response:
        """``POST /polykv/pools/{id}/evict`` and ``/flush``: cells go, ids and tokens stay."""
        engine, pool = self._pool(request)
        flush = request.path.endswith("/flush")
        gone, freed = await engine.pooling.evict(pool, flush=flush)
        return await self._freed(engine, pool, "evicted", gone, freed)

    async def _freed(
        self, engine: Engine, pool: PrefixPool, verb: str, gone: list[PrefixPool], freed: int
    ) -> web.Response:
        """What a release or an eviction gave back, and what still holds the rest."""
        names = [each.pool_id for each in gone]
        left = await self._left(engine, set(names))
        return json_reply({"pool_id": pool.pool_id, verb: names, "cells_freed": freed, **left})

    @staticmethod
    async def _left(engine: Engine, names: set[PoolId]) -> dict[str, Any]:
        """What is left of pools that were given back, and how many hold it."""
        await engine.runtime.readings.take(max_age_s=0.0)
        owned = engine.plane.ownership
        still = [] if owned is None else [rest for rest in owned.draining if rest.pool_id in names]
        return {
            "cells_draining": sum(rest.cells for rest in still),
            "holders": sum(rest.holders for rest in still),
            **engine.runtime.backend.listing(),
        }

    async def release_pool(self, request: web.Request) -> web.Response:
        """``DELETE /polykv/pools/{id}`` and ``POST …/release``; again is no error."""
        recursive = flag(request, "recursive")
        self._fleet.require_pools()
        pool_id = PoolId(request.match_info["pool_id"])
        found = self._fleet.find_pool(pool_id, self.sees(request))
        if found is None:
            for engine in self._fleet:
                if engine.plane.tree.was_released(pool_id):
                    left = await self._left(engine, {pool_id})
                    return json_reply(
                        {"pool_id": pool_id, "already_released": True, "cells_freed": 0, **left}
                    )
            raise NotFoundError(f"pool {pool_id} does not exist", code="pool_not_found", param="pool_id")
        engine, pool = found
        gone, freed = await engine.pooling.release(pool, recursive=recursive)
        return await self._freed(engine, pool, "released", gone, freed)

    # -- tokens ------------------------------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /polykv/tokenize``: exact ids of a prompt, or the poolable prefix of messages."""
        wanted = await read_wanted(request, PoolRequest)
        engine = self._fleet.with_pools(wanted.engine)
        tokens, full = await prefix_of(wanted, engine)
        pool_id = engine.plane.pools.id_of(tokens, self._scope(request))
        return json_reply(
            {
                "tokens": list(tokens),
                "n_tokens": len(tokens),
                "pool_id": pool_id,
                "probe_tokens": None if full is None else len(full),
            }
        )

    # -- who ---------------------------------------------------------------------------------------------

    def _scope(self, request: web.Request) -> Scope:
        """Whose pools these are: see ``sees``; where that is everything, those of the client key."""
        seen = self.sees(request)
        return self._own(request) if seen is None else seen

    def _own(self, request: web.Request) -> Scope:
        """The scope of the client key that was sent, which the admin key is none of."""
        bearer = (
            None if self._guard.is_admin_bearer(request.headers) else request.headers.get("Authorization")
        )
        return scope_of_keys(request.headers.get("X-Api-Key"), bearer, shared=self._shared)

    def sees(self, request: web.Request) -> Scope | None:
        """What may be seen: everything with the admin key, else what the own key shares.

        With ``?scope=`` the admin key sees what the key of that scope does, and nothing else.

        Raises:
            BadRequestError: ``scope`` is none.
            UnauthorizedError: it is another key's, and the admin key was not sent.
        """
        asked = request.query.get("scope")
        if asked is not None and not is_scope(asked):
            raise BadRequestError("scope must be one of those that listings show", param="scope")
        if self._guard.is_admin(request.headers):
            return None if asked is None else Scope(asked)
        own = self._own(request)
        if asked not in (None, own):
            raise UnauthorizedError("only the admin key sees other scopes than its own")
        return own

    def _pool(self, request: web.Request) -> tuple[Engine, PrefixPool]:
        return self._fleet.need_pool(PoolId(request.match_info["pool_id"]), self.sees(request))


def _require_alone(wanted: PoolRequest) -> None:
    """Raise where a pool is to be made of a session and of something else."""
    if any(getattr(wanted, name) is not None for name in ("tokens", "prompt", "messages")):
        raise BadRequestError("from_session stands alone: it says what the pool holds", param="from_session")
