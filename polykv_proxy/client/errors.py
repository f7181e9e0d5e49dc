"""What can go wrong, as one tree. Pure: made from a status, headers and a body.

::

    PolyKVError                       status, code, type, param, details, retry_after
    ├── ConnectionFailedError         no complete answer; ``sent`` says whether the request may have arrived
    │   ├── TimedOutError             it took longer than the client waits
    │   └── TruncatedStreamError      a stream ended without its end marker
    ├── BadRequestError         400   the request cannot be used; ``param`` names the member
    │   └── ContextOverflowError      a conversation that does not fit: ``required_tokens``, ``ctx_size``, …
    ├── AuthenticationError  401/403  a key is missing, or wrong
    ├── NotFoundError           404   no such thing
    │   └── PoolNotFoundError         the pool is gone; the same content makes it again, under the same id
    ├── ConflictError           409   the request is fine, the state is not
    │   ├── PrefixMismatchError       a fork whose tokens are not the parent's: where, and what stands there
    │   └── PoolCapacityError         no sequence id is left: ``releasable`` pools
    ├── PoolSaturatedError      429   no room for another session or request now: ``retry_after``, ``arm``
    ├── UnavailableError     502-504  the engine cannot answer now: ``retry_after``
    ├── DisabledError           501   pools are off, or there is no proxy in front of the engine
    └── ServerError             5xx   a defect of the server

``code`` is for programs; the codes are explained in the reference of errors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class PolyKVError(Exception):
    """Base of all errors of the client.

    Args:
        message: the sentence for people.
        status: of the HTTP answer; None if there was none.
        error: the members of the answer's error object.
        retry_after: seconds after which the server wants to be asked again.
        should_retry: what the server says about asking again; None: nothing.

    Attributes:
        code: stable reason; None if the answer had none.
        type: OpenAI-style error type.
        param: member of the request at fault.
        details: all members of the error object.
        response: the client library's answer object, if there is one; not looked at here.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        error: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.details: dict[str, Any] = dict(error or {})
        self.code: str | int | None = self.details.get("code")
        self.type: str | None = self.details.get("type")
        self.param: str | None = self.details.get("param")
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.response: Any = None

    @property
    def message(self) -> str:
        """The sentence for people."""
        return str(self.args[0])


class ConnectionFailedError(PolyKVError):
    """There was no complete answer.

    Attributes:
        sent: whether the request may have arrived, and may be at work.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class TimedOutError(ConnectionFailedError):
    """It took longer than the client waits."""


class TruncatedStreamError(ConnectionFailedError):
    """A stream ended without its end marker: what came is not the whole answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=True)


class BadRequestError(PolyKVError):
    """The request cannot be used; ``param`` names the member at fault."""


class ContextOverflowError(BadRequestError):
    """A conversation that does not fit; every figure is None where it is not known."""

    @property
    def required_tokens(self) -> int | None:
        """Tokens that the prompt takes."""
        return self._figure("required_tokens", "n_prompt_tokens")

    @property
    def ctx_size(self) -> int | None:
        """Tokens that there is room for."""
        return self._figure("ctx_size", "n_ctx")

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that are computed already."""
        return self._figure("cached_tokens", "cached_tokens")

    @property
    def ctx_kind(self) -> str | None:
        """What is too small: ``window``, ``sequence_cap`` or ``cells``."""
        ours = self.details.get("opencoti")
        return ours.get("ctx_kind") if isinstance(ours, dict) else None

    def _figure(self, ours: str, engines: str) -> int | None:
        block = self.details.get("opencoti")
        value = block.get(ours) if isinstance(block, dict) else None
        return self.details.get(engines) if value is None else value


class AuthenticationError(PolyKVError):
    """A key is missing or wrong, or the service is not to be used from here."""


class NotFoundError(PolyKVError):
    """What was asked for does not exist."""


class PoolNotFoundError(NotFoundError):
    """The pool is gone. Create it again: the same content has the same id."""


class ConflictError(PolyKVError):
    """The request is fine, the state of things is not."""


class PrefixMismatchError(ConflictError):
    """A fork whose tokens are not the parent's."""

    @property
    def first_mismatch(self) -> int | None:
        """Index of the first token that differs."""
        return self.details.get("first_mismatch")

    @property
    def expected(self) -> tuple[int | None, str | None]:
        """The parent's token there, and its text."""
        return self.details.get("expected_token"), self.details.get("expected_text")

    @property
    def got(self) -> tuple[int | None, str | None]:
        """The token that was given, and its text."""
        return self.details.get("got_token"), self.details.get("got_text")

    @property
    def next_moves(self) -> list[Any]:
        """What would work instead."""
        return list(self.details.get("next_moves") or ())


class PoolCapacityError(ConflictError):
    """All sequence ids for pools are taken."""

    @property
    def releasable(self) -> list[str]:
        """Pools that nobody pinned."""
        return list(self.details.get("releasable") or ())


class PoolSaturatedError(PolyKVError):
    """No room for another session or request now; ask again after ``retry_after`` seconds."""

    @property
    def arm(self) -> str | None:
        """What stands in the way: ``tps``, ``cells``, ``context`` or ``queue``."""
        return self.details.get("arm")

    @property
    def reason(self) -> str | None:
        """Why, in words."""
        return self.details.get("reason")

    @property
    def capacity(self) -> dict[str, Any]:
        """The figures at that moment; see ``results.Capacity``."""
        return dict(self.details.get("capacity") or {})

    @property
    def headroom_sessions(self) -> int | None:
        """Sessions for which there was room."""
        return self.capacity.get("headroom_sessions")


class UnavailableError(PolyKVError):
    """The engine cannot answer now; ask again after ``retry_after`` seconds."""


class DisabledError(PolyKVError):
    """Pools are off, or nothing but a plain engine answers."""


class ServerError(PolyKVError):
    """A defect of the server."""


_BY_CODE: dict[str, type[PolyKVError]] = {
    "pool_not_found": PoolNotFoundError,
    "pool_lost": PoolNotFoundError,
    "prefix_mismatch": PrefixMismatchError,
    "pool_capacity_exhausted": PoolCapacityError,
}
_BY_STATUS: dict[int, type[PolyKVError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    429: PoolSaturatedError,
    501: DisabledError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


def error_class(status: int | None, error: Mapping[str, Any]) -> type[PolyKVError]:
    """Which error an answer is: by its type or code, else by its status."""
    if error.get("type") == "exceed_context_size_error":
        return ContextOverflowError
    code = error.get("code")
    if isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code]
    if status is None and isinstance(code, int):  # the engine's errors inside a stream
        status = code
    if status is None:
        status = {"pool_saturated": 429, "unavailable_error": 503}.get(str(error.get("type")))
    if status is None or status in _BY_STATUS:
        return ServerError if status is None else _BY_STATUS[status]
    return BadRequestError if status < 500 else ServerError


def error_from_answer(status: int, headers: Mapping[str, str], body: bytes) -> PolyKVError:
    """The error that an HTTP answer with a status of 400 or more is.

    Args:
        status: of the answer.
        headers: names in lower case, or a mapping that does not look at case.
        body: of the answer, JSON or not.
    """
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    found = document.get("error") if isinstance(document, dict) else None
    error = found if isinstance(found, dict) else {}
    message = error.get("message") or (found if isinstance(found, str) else None) or _excerpt(body)
    return error_class(status, error)(
        f"{message} (HTTP {status})",
        status=status,
        error=error,
        retry_after=_seconds(headers.get("retry-after")),
        should_retry={"true": True, "false": False}.get(headers.get("x-should-retry", "")),
    )


def error_from_event(error: object) -> PolyKVError:
    """The error that an event of a stream is.

    Args:
        error: its ``error`` member.
    """
    members = error if isinstance(error, dict) else {"message": str(error)}
    code = members.get("code")
    status = code if isinstance(code, int) else None
    message = str(members.get("message") or "the stream ended in an error")
    return error_class(status, members)(message, status=status, error=members)


def _seconds(value: str | None) -> float | None:
    """Seconds of a ``Retry-After``; a date is not one, and not what the proxy sends."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return text or "no message"
