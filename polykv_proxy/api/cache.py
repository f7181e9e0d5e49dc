"""The ``/polykv/cache`` routes: what KV is on disk, why something is gone, and deleting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from polykv_proxy.api.reply import json_reply
from polykv_proxy.durable.identity import config_hash
from polykv_proxy.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.api import shapes_kept
    from polykv_proxy.core.catalogue import Catalogue, Entry, Tombstone
    from polykv_proxy.core.types import Scope
    from polykv_proxy.durable.service import Durable
    from polykv_proxy.fleet import Engine, Fleet


DEFAULT_LIMIT = 100
MAX_LIMIT = 200
"""Entries of a page; so many take about a millisecond or two."""


class CacheApi:
    """The saved states' HTTP face.

    Args:
        fleet: the engines.
        sees: what a request may see; None: everything.
    """

    def __init__(self, fleet: Fleet, sees: Callable[[web.Request], Scope | None]) -> None:
        self._fleet = fleet
        self._sees = sees

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get("/polykv/cache", self.list_entries),
            web.get("/polykv/cache/{key:.+}", self.show),
            web.delete("/polykv/cache/{key:.+}", self.delete),
        ]

    async def list_entries(self, request: web.Request) -> web.Response:
        """``GET /polykv/cache``: the states on disk, page by page, and what went lately."""
        found = self._page(request, None)
        engines = [{"engine": engine.name, **engine.runtime.saver.status()} for engine in self._fleet]
        return json_reply(found | {"engines": engines})

    async def show(self, request: web.Request) -> web.Response:
        """``GET /polykv/cache/{key}``: the states of a key and of those nested below it.

        Raises:
            NotFoundError: there is none; its tombstone, if it has one, says why.
        """
        key = request.match_info["key"]
        found = self._page(request, key)
        if not found["entries"] and "after" not in request.query:
            gone = found["tombstones"]
            raise NotFoundError(
                f"nothing is saved under {key}", code="cache_not_found", param="key", tombstones=gone
            )
        return json_reply({"key": key, **found})

    def _page(self, request: web.Request, key: str | None) -> dict[str, Any]:
        """Entries after the given one, engine by engine; on the first page tombstones, which are never many.

        Raises:
            BadRequestError: ``limit`` or ``after`` is none.
        """
        scope, limit = self._sees(request), _limit(request)
        start, seen = _after(request)
        entries: list[shapes_kept.SavedState] = []
        gone: list[shapes_kept.Tombstone] = []
        following: str | None = None
        for engine, durable in self._savers():
            catalogue = durable.shelf.catalogue
            if "after" not in request.query:
                gone += [tombstone_view(engine.name, each) for each in catalogue.tombstones(scope, key)]
            if engine.number < start or following is not None:
                continue
            after = seen if engine.number == start else 0
            room = limit - len(entries)
            page, last = catalogue.page(scope, key=key, after=after, limit=max(1, room))
            entries += [entry_view(engine.name, catalogue, entry) for entry in page[:room]]
            if page and (last is not None or not room):
                following = f"{engine.number}-{last if room else after}"
        return {"entries": entries, "tombstones": gone, "next": following}

    async def delete(self, request: web.Request) -> web.Response:
        """``DELETE /polykv/cache/{key}``: with all that is nested below it.

        Raises:
            NotFoundError: there is none.
            ConflictError: a state of it is in use, on some engine; then nothing is deleted.
            UnavailableError: a disk refuses or hangs: nobody finds them any more, and files are still there.
        """
        key, scope = request.match_info["key"], self._sees(request)
        found = [
            (durable, entries)
            for _, durable in self._savers()
            if (entries := durable.deletable(key, scope)) is not None
        ]
        if not found:
            raise NotFoundError(f"nothing is saved under {key}", code="cache_not_found", param="key")
        # in the same step: on all engines or on none
        going = [(durable, each) for durable, entries in found for each in durable.delete(entries)]
        for durable, each in going:
            await durable.shelf.disk.in_time(each)
        return json_reply({"key": key, "deleted": len(going)})

    def _savers(self) -> list[tuple[Engine, Durable]]:
        return [(engine, engine.durable) for engine in self._fleet if engine.durable is not None]


def _limit(request: web.Request) -> int:
    raw = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (raw.isascii() and raw.isdigit() and len(raw) < 10 and 0 < int(raw) <= MAX_LIMIT):
        raise BadRequestError(f"limit must be a number from 1 to {MAX_LIMIT}", param="limit")
    return int(raw)


def _after(request: web.Request) -> tuple[int, int]:
    """Engine and number of the last entry that was seen."""
    raw = request.query.get("after", "0-0")
    engine, _, number = raw.partition("-")
    if not (raw.isascii() and engine.isdigit() and number.isdigit() and len(raw) < 32):
        raise BadRequestError("after must be what next was in the page before", param="after")
    return int(engine), int(number)


def entry_view(engine: str, catalogue: Catalogue, entry: Entry) -> shapes_kept.SavedState:
    """One state as JSON."""
    state, pool = entry.state, entry.state.pool
    view: shapes_kept.SavedState = {
        "key": state.key,
        "kind": state.kind.value,
        "scope": state.scope,
        "engine": engine,
        "model_id": state.model_id,
        "config_hash": config_hash(state.config),
        "config_changed": list(catalogue.moved(entry)),
        "n_tokens": len(state.tokens),
        "bytes": state.file_bytes,
        "file": state.file,
        "created_ts": state.created_ts,
        "last_used_ts": entry.used_ts,
        "uses": entry.uses,
        "in_use": entry.holds > 0,
    }
    if pool is not None:
        view |= {"label": pool.label, "pinned": pool.pinned, "parent": pool.parent}
    return view


def tombstone_view(engine: str, gone: Tombstone) -> shapes_kept.Tombstone:
    """Why a state is gone, as JSON."""
    return {
        "key": gone.key,
        "kind": gone.kind.value,
        "scope": gone.scope,
        "engine": engine,
        "n_tokens": gone.tokens,
        "reason": gone.reason.value,
        "gone_ts": gone.gone_ts,
    }
