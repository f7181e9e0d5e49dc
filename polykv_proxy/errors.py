"""Every exception this package raises on purpose, in one tree.

::

    PolyKVError                     status, type and code that an HTTP answer may carry
    ├── BadRequestError       400   the client sent something we cannot use; ``param`` names the field
    │   └── NoRoomError             a conversation that the KV cells cannot hold
    ├── ForbiddenError        403   a loopback service must not be driven by a web page
    ├── NotFoundError         404   an id that was never seen
    ├── ConflictError         409   the request is fine, the state is not
    │   ├── PoolCapacityError       out of sequence ids; says what could be released
    │   ├── PoolInUseError          a pin or children stand in the way
    │   ├── PrefixMismatchError     tokens differ where they must agree
    │   ├── SessionNotResidentError no slot holds the session any more
    │   └── AmbiguousSessionError   several API keys have a session of that id
    ├── DisabledError         501   pools are off (no patch, or ``--max-pools 0``)
    ├── UnavailableError      503   the engine cannot answer now; ``retry_after_s`` says when to ask again
    │   ├── SaturatedError    429   the engine is fine but taken; the queue is full or took too long
    │   ├── EngineGoneError         the engine died or its connection broke
    │   └── StoppingError           the proxy is about to end
    ├── ConfigError                 a configuration that cannot work; ``path`` is the key
    ├── EngineStartError            no engine was ever ready; the message has the engine's own words
    └── BuildError                  the engine could not be fetched, patched, built or proven

Outcomes that are part of normal work (admit, wait, refuse) are values, not exceptions.
"""

from __future__ import annotations


class PolyKVError(Exception):
    """Base of all our errors.

    Attributes:
        status: HTTP status an answer to a client carries.
        type: OpenAI-style error type.
        code: stable machine-readable reason.
        param: name of the request field at fault, if one is.
        details: further members of the error object; JSON-ready values.
    """

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, **details: object
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.param = param
        self.details = details

    @property
    def message(self) -> str:
        """The sentence for people."""
        return str(self.args[0])

    @property
    def members(self) -> dict[str, object]:
        """The members of an OpenAI-style error object."""
        own = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return {**own, **self.details}


class BadRequestError(PolyKVError):
    """The client sent something we cannot use."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class NoRoomError(BadRequestError):
    """A conversation that the KV cells of an engine cannot hold; worded like an overflow of the engine.

    Args:
        message: the sentence for people.
        required_tokens: of the prompt; None if nobody counted them.
        ctx_size: tokens that there is room for; None if that is not known.
    """

    type = "exceed_context_size_error"
    code = "no_room"

    def __init__(self, message: str, *, required_tokens: int | None, ctx_size: int | None) -> None:
        figures = {
            "required_tokens": required_tokens,
            "cached_tokens": None,
            "ctx_size": ctx_size,
            "ctx_kind": "cells",
        }
        super().__init__(message, n_prompt_tokens=required_tokens, n_ctx=ctx_size, opencoti=figures)


class ForbiddenError(PolyKVError):
    """Refused before looking at it: wrong Host, foreign Origin, missing key."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(PolyKVError):
    """An id or route that does not exist and never did."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ConflictError(PolyKVError):
    """The request is well formed but the state does not allow it."""

    status = 409
    type = "conflict_error"
    code = "conflict"


class PoolCapacityError(ConflictError):
    """No sequence id or no cells left for another pool."""

    code = "pool_capacity_exhausted"


class PoolInUseError(ConflictError):
    """A pin, children or sessions stand in the way of what was asked."""

    code = "pool_in_use"


class PrefixMismatchError(ConflictError):
    """Tokens differ where the contract demands equality."""

    code = "prefix_mismatch"


class SessionNotResidentError(ConflictError):
    """No slot holds the session's state any more."""

    code = "session_not_resident"


class AmbiguousSessionError(ConflictError):
    """Sessions of several API keys have the id that an administrator gave."""

    code = "session_ambiguous"


class DisabledError(PolyKVError):
    """Pools are off on this engine."""

    status = 501
    type = "not_supported_error"
    code = "polykv_disabled"


class UnavailableError(PolyKVError):
    """The engine cannot answer now.

    Attributes:
        retry_after_s: whole seconds after which asking again makes sense, at least 1.
        should_retry: what clients that do not look at the rest are told to do; None: nothing.
    """

    status = 503
    type = "unavailable_error"
    code = "engine_unavailable"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int = 1,
        code: str | None = None,
        param: str | None = None,
        **details: object,
    ) -> None:
        super().__init__(message, code=code, param=param, **details)
        self.retry_after_s = max(1, retry_after_s)
        self.should_retry: bool | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What an answer says beside its body."""
        told = {"Retry-After": str(self.retry_after_s)}
        if self.should_retry is not None:
            told["x-should-retry"] = "true" if self.should_retry else "false"
        return told


class SaturatedError(UnavailableError):
    """Nothing is broken, but there is no room: the queue is full, or waiting took too long."""

    status = 429
    type = "pool_saturated"
    code = "queue_full"


class EngineGoneError(UnavailableError):
    """The engine died, or its connection broke before the answer was complete."""

    code = "engine_gone"


class StoppingError(UnavailableError):
    """The proxy is about to end: nothing new begins, and what did not end in time is cut off."""

    code = "stopping"

    def __init__(self) -> None:
        super().__init__("the proxy is stopping")


class ConfigError(PolyKVError):
    """A configuration that cannot work; the message starts with the key path."""

    code = "config_error"


class EngineStartError(PolyKVError):
    """No engine was ever ready, and none can be started like this."""

    code = "engine_not_started"


class BuildError(PolyKVError):
    """The engine could not be fetched, patched, built or proven. One line, with the next step in it."""

    code = "engine_build_failed"
