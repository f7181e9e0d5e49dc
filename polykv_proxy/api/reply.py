"""Answers of the control routes."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_reply(document: dict[str, Any], *, status: int = 200) -> web.Response:
    """A JSON document."""
    return web.Response(
        body=msgspec.json.encode(document), status=status, content_type="application/json", charset="utf-8"
    )
