"""What a saved state belongs to: a model and a configuration, each as a digest. Pure.

Rule 1: only what changes KV bytes is part of the model's id. Ports, threads, devices, verbosity, the context
size and the number of slots are not.
Rule 2: the same inputs have the same id in any order of their keys, and in any process.
Rule 3: numbers are compared as numbers: ``1`` and ``1.0`` are one rope scale.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.engine.slotfile import STATE_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODEL_PARTS = ("gguf", "projector", "lora", "type_k", "type_v", "options", "state_version")
"""What of an engine changes KV bytes."""

CONFIG_PARTS = ("system", "tools", "template", "kwargs")
"""What of a conversation decides which tokens its turns become."""

_SWITCHES: dict[str, tuple[str, ...]] = {"swa_full": ("--swa-full",)}
_VALUES: dict[str, tuple[str, ...]] = {
    "flash_attn": ("-fa", "--flash-attn"),  # decides how values lie in memory
    "rope_scaling": ("--rope-scaling",),
    "rope_scale": ("--rope-scale",),
    "rope_freq_base": ("--rope-freq-base",),
    "rope_freq_scale": ("--rope-freq-scale",),
    "yarn_orig_ctx": ("--yarn-orig-ctx",),
    "yarn_ext_factor": ("--yarn-ext-factor",),
    "yarn_attn_factor": ("--yarn-attn-factor",),
    "yarn_beta_slow": ("--yarn-beta-slow",),
    "yarn_beta_fast": ("--yarn-beta-fast",),
    "grp_attn_n": ("-gan", "--grp-attn-n"),
    "grp_attn_w": ("-gaw", "--grp-attn-w"),
}
_LISTS: dict[str, tuple[str, ...]] = {"override_kv": ("--override-kv",)}
"""May be given several times, or several in one word, and all count."""
_CONTROL_VECTORS = ("--control-vector", "--control-vector-scaled")
_PROJECTOR = ("-mm", "--mmproj")


def canonical(value: Any) -> bytes:
    """JSON of which each value has one: keys in order, no blanks, whole numbers without a fraction."""
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def digest(value: Any) -> str:
    """SHA-256 over the canonical JSON."""
    return sha256(canonical(value)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def model_id(parts: Mapping[str, Any]) -> str:
    """The id of a model as an engine runs it.

    Args:
        parts: those of ``MODEL_PARTS``; others are left out (rule 1), a missing one is null.
    """
    return digest({name: parts.get(name) for name in MODEL_PARTS})


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Those of an engine's arguments that change KV bytes, each under one name; of several the last."""
    found: dict[str, Any] = {}
    lists: dict[str, list[str]] = {}
    for at, word in enumerate(words):
        option, equals, joined = word.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        value = joined if equals else (words[at + 1] if at + 1 < len(words) else "")
        for name, spellings in _SWITCHES.items():
            if option in spellings:
                found[name] = True
        for name, spellings in _VALUES.items():
            if option in spellings:
                found[name] = _number(value)
        for name, spellings in _LISTS.items():
            if option in spellings:
                lists.setdefault(name, []).extend(value.split(","))
    return found | {name: sorted(values, key=_subject) for name, values in lists.items()}


def _subject(item: str) -> str:
    """What an item of a list sets: of several for one thing the order may count."""
    return item.partition("=")[0]


def projector_of(words: Sequence[str]) -> str | None:
    """The projector's file, if the arguments name one."""
    path = None
    for at, word in enumerate(words[:-1]):
        if word in _PROJECTOR:
            path = words[at + 1]
    return path


def has_control_vector(words: Sequence[str]) -> bool:
    """Whether the arguments name one; its content is not part of the model's id."""
    return any(word.partition("=")[0].replace("_", "-") in _CONTROL_VECTORS for word in words)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def parts_of_model(
    *,
    gguf: Any,
    projector: Any,
    lora: Any,
    reported: Mapping[str, str],
    arguments: Sequence[str],
) -> dict[str, Any]:
    """The parts of a model's id.

    Args:
        gguf: identities of its files.
        projector: identity of its projector's file; None without one.
        lora: identity and scale of each adapter, in the engine's order.
        reported: what the engine says of itself; the KV types are taken from here.
        arguments: what it was started with.
    """
    return {
        "gguf": gguf,
        "projector": projector,
        "lora": lora,
        "type_k": reported.get("type_k"),
        "type_v": reported.get("type_v"),
        "options": options_of(arguments),
        "state_version": STATE_VERSION,
    }


# -- configuration -----------------------------------------------------------------------------------------

_Raw = msgspec.Raw | msgspec.UnsetType


class _Body(msgspec.Struct):
    system: _Raw = msgspec.UNSET
    instructions: _Raw = msgspec.UNSET
    messages: _Raw = msgspec.UNSET
    input: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    chat_template_kwargs: _Raw = msgspec.UNSET


class _Message(msgspec.Struct):
    role: str = ""


def config_of(body: bytes, template: str) -> dict[str, str]:
    """Digests of what decides which tokens a conversation's turns become, by part.

    Args:
        body: a request's; one that cannot be read has empty parts, as a plain prompt has.
        template: the chat template in force.
    """
    try:
        parsed = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        parsed = _Body()
    system = [_value(parsed.system), _value(parsed.instructions)]
    system += [_leading(parsed.messages), _leading(parsed.input)]
    parts = {
        "system": system,
        "tools": _value(parsed.tools),
        "template": template,
        "kwargs": _value(parsed.chat_template_kwargs),
    }
    return {name: digest(parts[name]) for name in CONFIG_PARTS}


def config_hash(parts: Mapping[str, str]) -> str:
    """All parts in one."""
    return digest({name: parts.get(name) for name in CONFIG_PARTS})


def _value(raw: _Raw) -> Any:
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _leading(raw: _Raw) -> list[Any]:
    """The messages that set the scene."""
    if isinstance(raw, msgspec.UnsetType):
        return []
    found: list[Any] = []
    try:
        for item in msgspec.json.decode(raw, type=list[msgspec.Raw]):
            if msgspec.json.decode(item, type=_Message).role not in ("system", "developer"):
                break
            found.append(msgspec.json.decode(item))
    except (msgspec.DecodeError, RecursionError):
        pass
    return found
