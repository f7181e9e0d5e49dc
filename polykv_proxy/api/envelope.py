"""The refusals of the control routes in one form, whoever refuses.

Rule 1: nothing of a request is read before the guard let it pass.
Rule 2: what aiohttp refuses by itself looks like an error of ours. So does a bug of ours, which the exception
handler of the loop is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from polykv_proxy.api.reply import json_reply
from polykv_proxy.errors import BadRequestError, PolyKVError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.api.guard import Guard

_CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "body_too_large"}


class Envelope:
    """Stands around all handlers.

    Args:
        guard: who may.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @web.middleware
    async def around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request, or say why not."""
        try:
            self._guard.check(request.method, request.headers)
            return await handler(request)
        except PolyKVError as error:
            return _reply(error)
        except web.RequestPayloadError as error:  # a content coding that it does not have
            return _reply(BadRequestError(f"the body cannot be read: {error}"))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            answer = PolyKVError(
                f"{request.method} {request.path}: {error.reason}", code=_CODES.get(error.status)
            )
            answer.status, answer.type = error.status, "invalid_request_error"
            reply = _reply(answer)
            if "Allow" in error.headers:
                reply.headers["Allow"] = error.headers["Allow"]
            return reply
        except ConnectionError:
            raise  # the client left
        except Exception as error:  # the boundary: a bug of one request must stay its own
            if request.writer.output_size:
                raise  # an answer has begun, and another cannot
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"unhandled error on {request.method} {request.path}", "exception": error}
            )
            return _reply(PolyKVError("the proxy failed on this request"))


def _reply(error: PolyKVError) -> web.Response:
    answer = json_reply({"error": error.members}, status=error.status)
    if isinstance(error, UnavailableError):
        answer.headers.update(error.headers)
    return answer
