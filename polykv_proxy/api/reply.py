"""Answers of the control routes, and what their queries say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from polykv_proxy.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


def json_reply(document: Mapping[str, object], *, status: int = 200) -> web.Response:
    """A JSON document."""
    return web.Response(
        body=msgspec.json.encode(document), status=status, content_type="application/json", charset="utf-8"
    )


def flag(request: web.Request, name: str) -> bool:
    """A yes or no in the query; no if it is not there.

    Raises:
        BadRequestError: something else.
    """
    given = request.query.get(name, "0")
    if given not in ("0", "1", "false", "true"):
        raise BadRequestError(f"{name} must be 1 or 0, not {given!r}", param=name)
    return given in ("1", "true")
