"""The ``/polykv/sessions`` routes: what conversations there are, end one, move one to another pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from polykv_proxy.api import views
from polykv_proxy.api.reply import flag, json_reply
from polykv_proxy.core.types import PoolId, SessionId
from polykv_proxy.errors import BadRequestError, ConflictError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import Scope
    from polykv_proxy.fleet import Engine, Fleet


class Migration(msgspec.Struct, forbid_unknown_fields=True):
    """Where a session's next request attaches."""

    pool_id: str


class SessionsApi:
    """The sessions' HTTP face.

    Args:
        fleet: the engines.
        sees: what a request may see; None: everything.
    """

    def __init__(self, fleet: Fleet, sees: Callable[[web.Request], Scope | None]) -> None:
        self._fleet = fleet
        self._sees = sees

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/polykv/sessions", self.list_sessions)
        # a name may hold braces, which a plain pattern leaves out
        router.add_post("/polykv/sessions/{session_id:[^/]+}/close", self.close)
        router.add_post("/polykv/sessions/{session_id:[^/]+}/migrate", self.migrate)

    async def list_sessions(self, request: web.Request) -> web.Response:
        """``GET /polykv/sessions``."""
        await self._fleet.sample()
        return json_reply(views.sessions(self._fleet.planes, self._sees(request)))

    async def close(self, request: web.Request) -> web.Response:
        """``POST …/{id}/close``: the session is over, and the cells that only it held are free.

        With ``?keep=1`` its state stays on disk for the conversation to come back.
        """
        keep = flag(request, "keep")
        engine, session = self._session(request)
        freed, kept = await engine.pooling.sessions.close(session.session_id, session.scope, keep=keep)
        found = {"session_id": session.session_id, "closed": True, "cells_freed": freed, "kept": kept}
        return json_reply(found)

    async def migrate(self, request: web.Request) -> web.Response:
        """``POST …/{id}/migrate``: its next request attaches to another pool; all of it, or nothing."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=Migration)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequestError(f'send {{"pool_id": …}}: {error}', param="pool_id") from None
        engine, session = self._session(request)
        home, pool = self._fleet.need_pool(PoolId(wanted.pool_id), session.scope)
        if home is not engine:
            raise ConflictError(
                f"the session lives on {engine.name} and the pool on {home.name}", code="other_engine"
            )
        freed = await engine.pooling.sessions.migrate(session.session_id, session.scope, pool)
        found = {"session_id": session.session_id, "pool_id": pool.pool_id, "cells_freed": freed}
        return json_reply(found)

    def _session(self, request: web.Request) -> tuple[Engine, Session]:
        return self._fleet.need_session(SessionId(request.match_info["session_id"]), self._sees(request))
