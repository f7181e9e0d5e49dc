"""Errors of the client that LangChain and LangGraph know, too.

Each is an error of ``polykv_proxy.client`` and one of langchain-core's model errors, so either can be caught:

::

    PoolSaturatedError      ModelRateLimitError       retryable
    ContextOverflowError    ContextOverflowError      summarisers compact on it
    PoolNotFoundError       ModelNotFoundError
    BadRequestError         ModelInvalidRequestError
    AuthenticationError     ModelAuthenticationError
    UnavailableError        ModelAPIError             retryable
    ServerError             ModelAPIError             retryable
    ConnectionFailedError   ModelConnectionError      retryable
    TimedOutError           ModelTimeoutError         retryable
    TruncatedStreamError    ModelConnectionError      retryable

Retryable says that a graph may try again, not that this package does: it never repeats what may have reached
decode. No retry policy of LangChain reads ``Retry-After``; the model waits for it itself, within bounds.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core import exceptions as core

from polykv_proxy.client import errors as client

if TYPE_CHECKING:
    from collections.abc import Iterator


class PoolSaturatedError(client.PoolSaturatedError, core.ModelRateLimitError):
    """No room for another session or request now; ask again after ``retry_after`` seconds."""


class ContextOverflowError(client.ContextOverflowError, core.ContextOverflowError):
    """A conversation that does not fit."""


class PoolNotFoundError(client.PoolNotFoundError, core.ModelNotFoundError):
    """The pool is gone."""


class BadRequestError(client.BadRequestError, core.ModelInvalidRequestError):
    """The request cannot be used."""


class AuthenticationError(client.AuthenticationError, core.ModelAuthenticationError):
    """A key is missing or wrong."""


class UnavailableError(client.UnavailableError, core.ModelAPIError):
    """The engine cannot answer now."""


class ServerError(client.ServerError, core.ModelAPIError):
    """A defect of the server."""


class ConnectionFailedError(client.ConnectionFailedError, core.ModelConnectionError):
    """There was no complete answer."""


class TimedOutError(client.TimedOutError, core.ModelTimeoutError):
    """It took longer than the model waits."""


class TruncatedStreamError(client.TruncatedStreamError, core.ModelConnectionError):
    """A stream ended without its end marker."""


_TWINS: dict[type[client.PolyKVError], type[client.PolyKVError]] = {
    kind.__mro__[1]: kind
    for kind in (
        PoolSaturatedError,
        ContextOverflowError,
        PoolNotFoundError,
        BadRequestError,
        AuthenticationError,
        UnavailableError,
        ServerError,
        ConnectionFailedError,
        TimedOutError,
        TruncatedStreamError,
    )
}


def as_model_error(error: client.PolyKVError) -> client.PolyKVError:
    """The same error as one that LangChain knows; itself where there is none."""
    kind = _TWINS.get(type(error))
    if kind is None:
        return error
    twin = kind.__new__(kind, *error.args)
    twin.__dict__.update(error.__dict__)
    return twin


@contextmanager
def model_errors() -> Iterator[None]:
    """Errors of the client in this block leave it as ones that LangChain knows."""
    try:
        yield
    except client.PolyKVError as error:
        twin = as_model_error(error)
        if twin is error:
            raise
        raise twin from error
