"""The prefix that a pool is to hold, as somebody asks for it: tokens, a prompt, or the start of chats.

Rule 1: one of them says it, and no more than one. Bodies are read strictly, and what is wrong is named.
Rule 2: of messages it is what complete chats that begin with them have in common. A system block is not
always a prefix by itself: templates put tools into the first user turn, or look at the last message.
Rule 3: what the engine cannot render is the caller's mistake, in the engine's words.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from polykv_proxy.api.families import CHAT_COUNT
from polykv_proxy.api.shapes import says
from polykv_proxy.core.types import as_tokens, common_prefix, text_prefix
from polykv_proxy.errors import BadRequestError, UnavailableError

if TYPE_CHECKING:
    from aiohttp import web

    from polykv_proxy.core.types import Tokens
    from polykv_proxy.fleet import Engine

R = TypeVar("R", bound="PoolRequest")

MIN_POOL_TOKENS = 32
"""Below this there is nothing worth sharing."""

TOOLS_LEFT_OUT = (
    "the model's chat template leaves tools out: this pool is the same as without them; another template "
    "can be given to the engine (--chat-template-file)"
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_PROBES = ("Aardvark", "zebra 7")
"""Two texts without a common start: whatever two renderings agree on comes before them."""


class PoolRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a pool is to hold: exactly one of ``tokens``, ``prompt``, ``messages`` and ``from_session``."""

    tokens: Annotated[list[int] | None, says("Token ids.")] = None
    prompt: Annotated[str | None, says("Text, read as a completion's prompt would be.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        says("The beginning of chats; the pool is what all of them have in common."),
    ] = None
    tools: Annotated[list[Any] | None, says("With messages: the chats' tools.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, says("With messages: the chats' settings of the template.")
    ] = None
    from_session: Annotated[
        str | None, says("What the slot of this session holds now; nothing is computed.")
    ] = None
    n_tokens: Annotated[int | None, says("At most so many tokens.")] = None
    engine: Annotated[str | None, says("Where; else where there is most room.")] = None
    pin: Annotated[bool, says("Never evict it unasked.")] = False
    ttl_s: Annotated[float | None, says("Release it when it was out of use for so many seconds.")] = None
    label: Annotated[str | None, says("A name for people, and for policies; without control characters.")] = (
        None
    )


class ForkRequest(PoolRequest, forbid_unknown_fields=True):
    """What a child is to hold: its full prefix."""

    branch_pos: Annotated[int | None, says("Leading tokens that are the parent's; else all that agree.")] = (
        None
    )


async def read_wanted(request: web.Request, kind: type[R]) -> R:
    """Read a body.

    Args:
        request: the request.
        kind: what it has to be.

    Raises:
        BadRequestError: it is not; ``param`` names the member, where one is at fault.
    """
    raw = await request.read()
    try:
        wanted = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise BadRequestError(text, param=path.strip("`.") or None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"not valid JSON: {error}") from None
    if wanted.ttl_s is not None and not wanted.ttl_s > 0:
        raise BadRequestError("ttl_s must be more than 0 seconds", param="ttl_s")
    if wanted.label is not None and _CONTROL.search(wanted.label):
        # it becomes a label in /metrics: one NUL there, and no scrape is understood any more
        raise BadRequestError("label must not have control characters", param="label")
    return wanted


async def prefix_of(wanted: PoolRequest, engine: Engine) -> tuple[Tokens, Tokens | None]:
    """The tokens of a pool, and those of a probe chat rendered against it (for ``messages``).

    Raises:
        BadRequestError: rule 1 or 3, or there is too little to share.
    """
    given = [name for name in ("tokens", "prompt", "messages") if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise BadRequestError(
            "give exactly one of tokens, prompt, messages and from_session",
            param=(given or ["tokens"])[0],
        )
    if wanted.messages is not None:
        return await _shared_by_chats(wanted, engine)
    if wanted.prompt is not None:
        if not wanted.prompt:
            raise BadRequestError("prompt must not be empty", param="prompt")
        return await engine.runtime.client.tokenize(wanted.prompt), None
    assert wanted.tokens is not None
    if not wanted.tokens or min(wanted.tokens) < 0:
        raise BadRequestError("tokens must be token ids, at least one", param="tokens")
    try:
        return as_tokens(wanted.tokens), None
    except OverflowError:
        raise BadRequestError("tokens must be token ids", param="tokens") from None


async def warning_of(wanted: PoolRequest, probe: Tokens | None, engine: Engine) -> str | None:
    """What is wrong with a pool although it can be made: its tools stand nowhere in it.

    Args:
        wanted: as it was asked for.
        probe: the chat that ``prefix_of`` rendered.
        engine: whose template it is.
    """
    if probe is None or not wanted.tools:
        return None
    bare = msgspec.structs.replace(wanted, tools=None)
    try:
        without = await _rendered(bare, _ending(wanted, _PROBES[0]), engine)
    except BadRequestError:  # a template that cannot do without them has them
        return None
    return TOOLS_LEFT_OUT if without == probe else None


def capped(tokens: Tokens, wanted: PoolRequest) -> Tokens:
    """As many leading tokens as are wanted.

    Raises:
        BadRequestError: none are.
    """
    if wanted.n_tokens is None:
        return tokens
    if wanted.n_tokens < 1:
        raise BadRequestError("n_tokens must be positive", param="n_tokens")
    return tokens[: wanted.n_tokens]


async def _shared_by_chats(wanted: PoolRequest, engine: Engine) -> tuple[Tokens, Tokens]:
    """What two chats with different last messages agree on, and one of them (rule 2)."""
    assert wanted.messages is not None
    if not wanted.messages:
        raise BadRequestError("messages must not be empty", param="messages")

    one, other = [await _rendered(wanted, _ending(wanted, text), engine) for text in _PROBES]
    shared = min(common_prefix(one, other), text_prefix(one))
    if shared < MIN_POOL_TOKENS:
        raise BadRequestError(
            f"these messages have {shared} tokens to share; a pool needs {MIN_POOL_TOKENS}",
            code="prefix_too_short",
            param="messages",
            common_tokens=shared,
        )
    return one[:shared], one


def _ending(wanted: PoolRequest, text: str) -> list[dict[str, Any]]:
    """What makes a complete chat of messages, with this text."""
    if wanted.messages and wanted.messages[-1].get("role") in ("user", "tool"):
        # two user turns in a row are an error in some templates; an assistant's at the end would
        # be taken for an answer to go on with
        return [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return [{"role": "user", "content": text}]


async def _rendered(wanted: PoolRequest, ending: list[dict[str, Any]], engine: Engine) -> Tokens:
    messages = [*(wanted.messages or []), *ending]
    chat: dict[str, Any] = {"messages": messages, "add_generation_prompt": False}
    if wanted.tools is not None:
        chat["tools"] = wanted.tools
    if wanted.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = wanted.chat_template_kwargs
    try:
        tokens = await engine.runtime.backend.prompt_tokens(CHAT_COUNT, msgspec.json.encode(chat))
    except UnavailableError as error:
        if error.code != "engine_failed":
            raise
        # a template that cannot be filled with it, say: the engine takes that for a failure of its own
        raise BadRequestError(error.message, code="engine_refused") from None
    assert tokens is not None, "every engine with pools renders chats"
    return tokens
