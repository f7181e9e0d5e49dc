"""What a request asks for: its body is read once, as far as needed, and never rebuilt without cause.

Members that are the engine's business are kept as raw bytes and looked at leniently: a wrong one is the
engine's to refuse, in its own words. Members that are ours are read strictly, and stripped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from xxhash import xxh3_64

from polykv_proxy.api import members
from polykv_proxy.api.answer import insert_member
from polykv_proxy.api.canonical import without_billing_values
from polykv_proxy.api.families import Dialect
from polykv_proxy.core.types import as_tokens
from polykv_proxy.core.volatile import as_engine_masks
from polykv_proxy.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from polykv_proxy.api.families import Family
    from polykv_proxy.core.slots import Chain
    from polykv_proxy.core.types import Tokens

TEXT_LINK_BYTES = 256
"""Plain prompts have no messages: their links are runs of this many bytes, a last partial one left out."""

MOST_TEXT_LINKS = 1 << 16
"""What is behind so many runs is not looked at."""

SCENE_BYTES = 1024
"""What precedes the messages is worth remembering from this length on; below it much is alike by chance."""

_SIGN_BIT = 1 << 31

OUR_KEYS = ("pool_id", "session_id", "shared_prefix_n_tokens", "shared_pool_slot", "opencoti")


class _Body(msgspec.Struct):
    pool_id: members.Raw = msgspec.UNSET
    session_id: members.Raw = msgspec.UNSET
    shared_prefix_n_tokens: members.Raw = msgspec.UNSET
    shared_pool_slot: members.Raw = msgspec.UNSET
    opencoti: members.Raw = msgspec.UNSET
    id_slot: members.Raw = msgspec.UNSET
    model: members.Raw = msgspec.UNSET
    stream: members.Raw = msgspec.UNSET
    stream_options: members.Raw = msgspec.UNSET
    n: members.Raw = msgspec.UNSET
    n_cmpl: members.Raw = msgspec.UNSET
    n_predict: members.Raw = msgspec.UNSET
    max_tokens: members.Raw = msgspec.UNSET
    max_completion_tokens: members.Raw = msgspec.UNSET
    max_output_tokens: members.Raw = msgspec.UNSET
    cache_prompt: members.Raw = msgspec.UNSET
    metadata: members.Raw = msgspec.UNSET
    prompt: members.Raw = msgspec.UNSET
    messages: members.Raw = msgspec.UNSET
    input: members.Raw = msgspec.UNSET
    system: members.Raw = msgspec.UNSET
    instructions: members.Raw = msgspec.UNSET
    tools: members.Raw = msgspec.UNSET
    chat_template_kwargs: members.Raw = msgspec.UNSET
    lora: members.Raw = msgspec.UNSET


class _Ours(msgspec.Struct, forbid_unknown_fields=True):
    pool_id: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    shared_prefix_n_tokens: int | None = None
    strict: bool = False
    cache: bool = True
    auto_match: bool = True
    report: bool = True
    lease_id: str | None = None


_NOTHING_ASKED = _Ours()

_UNREAD = _Body(lora=msgspec.Raw(b"null"))
"""Of a body that nobody can read it is taken for granted that it may choose adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's wishes."""

    body: bytes
    """What the engine gets: the client's bytes, or those without our members."""
    ours: bool = False
    """Whether it carried a PolyKV member or header."""
    pool_id: str | None = None
    session: str | None = None
    shared_prefix_tokens: int | None = None
    strict: bool = False
    cache: bool = True
    auto_match: bool = True
    report: bool = True
    stream: bool = False
    include_usage: bool = False
    completions: int = 1
    max_tokens: int | None = None
    """New tokens of an answer at most; None where the body sets no bound."""
    lease_id: str | None = None
    """A promised place that the session redeems."""
    many_prompts: bool = False
    """Several prompts: the engine runs each in a slot of its own choice."""
    ignored_slot: bool = False
    """The client chose a slot; slots are the proxy's."""
    adapters: bool = False
    """It chooses LoRA adapters of its own, or may: what it computes is not the loaded model's KV."""
    masked: bool = False
    """A billing header's changing values are constants now."""
    metadata: bytes | None = None
    prompt: bytes | None = None
    """Raw ``prompt`` member of a plain completion."""
    chain: Chain = ()
    structured: bool = True
    scene: int | None = None
    """Fingerprint of what many conversations may begin with, where it is long enough to count."""
    raw_model: bytes | None = None

    @property
    def only_bound(self) -> int | None:
        """``max_tokens``, where nothing else that was asked for cuts an answer."""
        return None if b'"t_max_predict_ms"' in self.body else self.max_tokens

    @property
    def model(self) -> str | None:
        """The model that it names."""
        try:
            return None if self.raw_model is None else msgspec.json.decode(self.raw_model, type=str)
        except msgspec.DecodeError:
            return None


def read(body: bytes, family: Family, headers: dict[str, str], *, mask: bool = False) -> Asked:
    """Read a request body.

    Args:
        body: as received.
        family: the API it came in on.
        headers: the client's ``x-polykv-*`` headers, names in lower case.
        mask: make the values of billing headers constant.

    Raises:
        BadRequestError: a member of ours is wrong; ``param`` names it.
    """
    received, body = body, without_billing_values(body) if mask else body
    text, parsed = _parsed(body)
    stripped = any(getattr(parsed, key) is not msgspec.UNSET for key in OUR_KEYS)
    ours = _ours(parsed, headers) if stripped or headers else _NOTHING_ASKED
    structured = family.count_path is not None
    completions = _number(parsed.n_cmpl) or _number(parsed.n) or 1  # the engine's order
    chain, scene = _chain(parsed, family, structured=structured)
    return Asked(
        body=without(text, OUR_KEYS) if stripped else body,
        ours=stripped or bool(headers),
        pool_id=ours.pool_id,
        session=ours.session_id,
        shared_prefix_tokens=ours.shared_prefix_n_tokens,
        strict=ours.strict,
        cache=ours.cache and members.raw(parsed.cache_prompt) != b"false",
        auto_match=ours.auto_match,
        report=ours.report,
        stream=members.raw(parsed.stream) == b"true",
        include_usage=b"include_usage" in members.raw(parsed.stream_options)
        and _object(parsed.stream_options).get("include_usage") is True,
        completions=completions,
        max_tokens=_most(parsed),
        lease_id=ours.lease_id,
        many_prompts=not structured and _is_list_of_prompts(parsed.prompt),
        ignored_slot=members.raw(parsed.id_slot) not in (b"", b"null", b"-1"),
        adapters=parsed.lora is not msgspec.UNSET,
        masked=body is not received,
        metadata=members.raw(parsed.metadata) or None,
        prompt=members.raw(parsed.prompt) or None,
        chain=chain,
        structured=structured,
        scene=scene,
        raw_model=members.raw(parsed.model) or None,
    )


def _parsed(body: bytes) -> tuple[bytes, _Body]:
    """The JSON text of a body, and its members; none where it is no object, which the engine refuses.

    What the engine would run must not pass unread, or it runs in more slots than it was given. Its parser
    skips a byte order mark, takes a NUL for the end, and knows no bound of nesting.

    Raises:
        BadRequestError: it is nested out of all reason.
    """
    try:
        try:
            return body, msgspec.json.decode(body, type=_Body)
        except msgspec.DecodeError:
            text = body.removeprefix(b"\xef\xbb\xbf").partition(b"\0")[0]
            return text, msgspec.json.decode(text, type=_Body)
    except msgspec.DecodeError:
        return body, _UNREAD
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def prompt_tokens(raw: bytes) -> Tokens | str | None:
    """A plain completion's one prompt: its ids, its text, or None for the mixed and multimodal forms.

    None, too, for more ids than any window holds.
    """
    if raw.startswith(b"[") and members.is_endless(raw):
        return None
    try:
        prompt = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list of one
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        try:
            return as_tokens(prompt)
        except OverflowError:
            return None
    return None


def odd_prompt(raw: bytes) -> bytes | None:
    """The mixed or multimodal form of a plain completion's one prompt, as a body that the engine counts.

    None for any other form, for several prompts, and for more than any window holds.
    """
    if raw[:1] == b"{":
        return b'{"prompt":' + raw + b"}"
    starts = members.starts(raw)
    if starts == [b"{"]:
        return b'{"prompt":' + members.items(raw)[0] + b"}"
    kinds = set(starts)
    is_mixed = b'"' in kinds and any(kind in b"-0123456789" for kind in kinds)
    return b'{"prompt":' + raw + b"}" if is_mixed else None


def _ours(parsed: _Body, headers: dict[str, str]) -> _Ours:
    """Our members, wherever they stand: the object, else the shorthands, else the headers."""
    ours = _strict(parsed.opencoti, _Ours | None, "opencoti") or _Ours()
    if ours.pool_id is None:
        ours.pool_id = _strict(parsed.pool_id, str | None, "pool_id") or headers.get("x-polykv-pool")
    if ours.session_id is None:
        ours.session_id = _strict(parsed.session_id, str | None, "session_id")
    if ours.shared_prefix_n_tokens is None:
        ours.shared_prefix_n_tokens = _strict(
            parsed.shared_prefix_n_tokens, int | None, "shared_prefix_n_tokens"
        )
    if ours.shared_prefix_n_tokens is not None and ours.shared_prefix_n_tokens < 0:
        raise BadRequestError("shared_prefix_n_tokens must not be negative", param="shared_prefix_n_tokens")
    if ours.session_id is not None and not (
        0 < len(ours.session_id) <= 255 and ours.session_id.isprintable()
    ):
        raise BadRequestError("session_id must be 1 to 255 printable characters", param="session_id")
    return ours


def _strict(raw: members.Raw, kind: Any, name: str) -> Any:
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{name}: {error}", param=name) from None


def pinner(asked: Asked, family: Family) -> Callable[[int], bytes] | None:
    """Puts a slot into a body, for an engine that reads it there; None where it would not.

    It would not in a body that is no JSON object, nor in Anthropic's API, of which it keeps what it knows.
    """
    if family.dialect is Dialect.ANTHROPIC:
        return None
    try:
        document = msgspec.json.decode(asked.body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    body = without(asked.body, ("id_slot",)) if "id_slot" in document else asked.body
    return lambda slot: insert_member(body, "id_slot", slot)


def without(body: bytes, keys: Iterable[str]) -> bytes:
    """A JSON object without these members; all other values keep their bytes.

    Raises:
        BadRequestError: a member's name is no text.
    """
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"not valid JSON: {error}") from None
    for key in keys:
        document.pop(key, None)
    return msgspec.json.encode(document)


def _object(raw: members.Raw) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(members.raw(raw))
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _number(raw: members.Raw) -> int | None:
    """A positive number as the engine reads it: fractions are cut off, and 32 bits are kept."""
    text = members.raw(raw)
    if not text or (text.isdigit() and len(text) < 6):
        return int(text or b"0") or None
    try:
        value = msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError:
        return None
    number = (int(value) + _SIGN_BIT) % (2 * _SIGN_BIT) - _SIGN_BIT
    return number if number > 0 else None


def _most(parsed: _Body) -> int | None:
    """The bound of an answer, whatever its API calls it; of several the largest, whichever counts."""
    named = (parsed.n_predict, parsed.max_tokens, parsed.max_completion_tokens, parsed.max_output_tokens)
    bounds = [bound for raw in named if (bound := _number(raw)) is not None]
    return max(bounds) if bounds else None


def _is_list_of_prompts(raw: members.Raw) -> bool:
    text = members.raw(raw)
    if text.startswith(b"[") and members.is_endless(text):
        return True  # it may be: nothing may run in more slots than it was given
    # a list that mixes text and ids is one prompt; a list of texts, of lists or of objects is as many
    starts = members.starts(text)
    return len(starts) > 1 and all(start in (b'"', b"[", b"{") for start in starts)


def _chain(parsed: _Body, family: Family, *, structured: bool) -> tuple[Chain, int | None]:
    """Fingerprint of the conversation, and of its scene."""
    if family.dialect is Dialect.OTHER:
        return (), None
    if not structured:
        links = _text_chain(family.dialect.value.encode(), members.raw(parsed.prompt))
        runs = SCENE_BYTES // TEXT_LINK_BYTES
        return links, links[runs] if len(links) > runs else None
    system = as_engine_masks(members.raw(parsed.system))
    rest = (parsed.instructions, parsed.tools, parsed.chat_template_kwargs)
    messages = members.items(members.raw(parsed.messages)) + members.items(members.raw(parsed.input))
    first = members.scene(messages)
    head = b"\0".join((family.dialect.value.encode(), system, *map(members.raw, rest), *messages[:first]))
    links = _linked(head, messages[first:])
    return links, links[0] if len(head) >= SCENE_BYTES else None


def _linked(head: bytes, parts: Iterable[bytes | memoryview]) -> Chain:
    """Hashes of a head and of everything up to each part; lengths keep parts apart."""
    state = xxh3_64(head)
    links = [state.intdigest()]
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
        links.append(state.intdigest())
    return tuple(links)


def _text_chain(kind: bytes, prompt: bytes) -> Chain:
    prompt = prompt.rstrip(b'"]')  # the end of a string or list is not part of what goes on
    whole = min(len(prompt) - len(prompt) % TEXT_LINK_BYTES, MOST_TEXT_LINKS * TEXT_LINK_BYTES)
    view = memoryview(prompt)
    return _linked(kind, (view[at : at + TEXT_LINK_BYTES] for at in range(0, whole, TEXT_LINK_BYTES)))
