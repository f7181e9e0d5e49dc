"""The ``/polykv/requests`` routes: what became of the last requests, and why they computed what they did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from polykv_proxy.api.reply import json_reply
from polykv_proxy.core.records import RequestId
from polykv_proxy.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.api import shapes_kept
    from polykv_proxy.core.divergence import Divergence
    from polykv_proxy.core.records import RecordBook, RequestRecord
    from polykv_proxy.core.types import Scope

DEFAULT_LIMIT = 100


class RequestsApi:
    """The records' HTTP face.

    Args:
        book: the records.
        sees: what the caller of a control route may see; None: everything.
    """

    def __init__(self, book: RecordBook, sees: Callable[[web.Request], Scope | None]) -> None:
        self._book = book
        self._sees = sees

    def routes(self) -> list[web.RouteDef]:
        """What the control application serves of it."""
        return [
            web.get("/polykv/requests", self.list_requests),
            web.get("/polykv/requests/{request_id}", self.show_request),
        ]

    async def list_requests(self, request: web.Request) -> web.Response:
        """``GET /polykv/requests``: the last ones, latest first."""
        raw = request.query.get("limit", str(DEFAULT_LIMIT))
        if not (raw.isascii() and raw.isdigit() and 0 < len(raw) < 10 and int(raw) > 0):
            raise BadRequestError("limit must be a positive number", param="limit")
        scope = self._sees(request)
        query = request.query
        found = self._book.latest(
            scope,
            session_id=query.get("session_id"),
            request_id=query.get("request_id"),
            limit=int(raw),
        )
        return json_reply(
            {
                "requests": [request_view(record) for record in found],
                "other_keys_requests": self._book.hidden_from(scope),
            }
        )

    async def show_request(self, request: web.Request) -> web.Response:
        """``GET /polykv/requests/{id}``."""
        request_id = RequestId(request.match_info["request_id"])
        record = self._book.get(request_id, self._sees(request))
        if record is None:
            raise NotFoundError(
                f"request {request_id} is not known (any more)", code="request_not_found", param="request_id"
            )
        return json_reply(request_view(record))


def request_view(record: RequestRecord) -> shapes_kept.Request:
    """A record as JSON; unknown is null."""
    return {
        "request_id": record.request_id,
        "x_request_id": record.x_request_id,
        "trace_id": record.trace_id,
        "session_id": record.session_id,
        "scope": record.scope,
        "path": record.path,
        "engine": record.engine,
        "slot": record.slot,
        "state": record.state.value,
        "error_code": record.error_code,
        "started_ts": record.started_ts,
        "waited_ms": _ms(record.waited_s),
        "ttft_ms": _ms(record.ttft_s),
        "duration_ms": _ms(record.duration_s),
        "pool_id": record.pool_id,
        "pool_unknown": record.pool_unknown,
        "continued": record.continued,
        "planned_tokens": record.planned_tokens,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "computed_tokens": record.computed_tokens,
        "generated_tokens": record.generated_tokens,
        "divergence": None if record.divergence is None else divergence_view(record.divergence),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def divergence_view(divergence: Divergence) -> shapes_kept.Divergence:
    """A divergence as JSON, here and in answers."""
    return {
        "token_index": divergence.token_index,
        "message_index": divergence.message_index,
        "section": None if divergence.section is None else divergence.section.value,
        "expected_text": divergence.expected_text,
        "got_text": divergence.got_text,
        "cause": divergence.cause.value,
    }
