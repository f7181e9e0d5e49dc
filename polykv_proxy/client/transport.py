"""What both shells have in common: how httpx is set up, what its errors mean, whose connections these are."""

from __future__ import annotations

import asyncio
import json
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from polykv_proxy.client.errors import (
    ConnectionFailedError,
    PolyKVError,
    ServerError,
    TimedOutError,
    error_from_answer,
)
from polykv_proxy.client.results import Rates

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from polykv_proxy.client.calls import Call

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8090"
CONNECT_TIMEOUT_S = 10.0
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the proxy is and who asks.

    Attributes:
        url: with or without ``/v1`` at its end.
        api_key: names the scope that pools belong to; a bearer token.
        admin_key: of the control routes, where the proxy demands one.
        headers: further ones.
        timeout_s: seconds without a byte of an answer that are waited; None: for ever.
    """

    url: str = DEFAULT_URL
    api_key: str | None = None
    admin_key: str | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For an httpx client."""
        headers = dict(self.headers or {})
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if self.admin_key:
            headers["X-PolyKV-Admin-Key"] = self.admin_key
        return {
            "base_url": self.url.rstrip("/").removesuffix("/v1"),
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
        }


def request_options(call: Call[Any]) -> dict[str, Any]:
    """A call as httpx takes it."""
    return {
        "method": call.method,
        "url": call.path,
        "content": call.content,
        "params": dict(call.params),
        "headers": call.all_headers,
    }


def result(call: Call[T], answer: httpx.Response) -> T:
    """What a complete answer says.

    Raises:
        PolyKVError: it is an error, or not what was to be expected.
    """
    if answer.status_code >= 400:
        raise refusal(answer)
    try:
        return call.read(answer.json())
    except (ValueError, KeyError, TypeError) as error:
        raise with_response(
            ServerError(f"{call.method} {call.path}: the answer cannot be read: {error!r}"), answer
        ) from None


def rates(data: str) -> Rates:
    """One document of the stream of rates.

    Raises:
        ServerError: it is none.
    """
    try:
        return Rates.read(json.loads(data))
    except (ValueError, TypeError, AttributeError) as error:
        raise ServerError(f"a document of rates cannot be read: {error!r}") from None


def refusal(answer: httpx.Response) -> PolyKVError:
    """The error that a complete answer is."""
    return with_response(error_from_answer(answer.status_code, answer.headers, answer.content), answer)


def with_response(error: PolyKVError, answer: httpx.Response) -> PolyKVError:
    """An error that knows the answer it came in."""
    error.response = answer
    return error


def failure(error: httpx.HTTPError) -> ConnectionFailedError:
    """What an error of httpx means: whether the request can have arrived."""
    sent = not isinstance(error, _NOT_SENT)
    kind = TimedOutError if isinstance(error, httpx.TimeoutException) else ConnectionFailedError
    return kind(str(error) or type(error).__name__, sent=sent)


class LoopClients:
    """One ``httpx.AsyncClient`` for each event loop, closed when its loop ends.

    Connections belong to the loop that opened them. A client that lives longer than one ``asyncio.run``
    therefore needs more than one of them, and nobody tells it when a loop is over; but loops close their
    asynchronous generators when they end, so one of these keeps watch.

    Args:
        make: a new httpx client.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._clients: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]
        ] = weakref.WeakKeyDictionary()

    async def get(self) -> httpx.AsyncClient:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is not None and not found[0].is_closed:
            return found[0]
        client = self._make()
        watch = self._close_at_the_end(client)
        self._clients[loop] = client, watch
        await anext(watch)
        return client

    async def aclose(self) -> None:
        """Close the client of the running loop."""
        found = self._clients.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()

    async def _close_at_the_end(self, client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            # the generator knows its loop, so as long as it is kept, the loop is
            self._clients.pop(asyncio.get_running_loop(), None)
            await client.aclose()
