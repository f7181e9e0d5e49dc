"""What any llama-server says, patched or not, as core values. Pure: bytes in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from polykv_proxy.core.stock import NO_TASK, SlotLook
from polykv_proxy.core.types import EngineFacts, SlotId, Tokens, as_tokens


class PromptTimings(msgspec.Struct):
    """What computing a prompt, or a pool, took."""

    cache_n: int
    """Tokens that came from what the slot held, or from a parent."""
    prompt_n: int
    """Tokens that were computed."""
    prompt_ms: float


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Props(msgspec.Struct):
    total_slots: int = 1
    build_info: str = ""
    model_path: str = ""
    chat_template: str = ""
    default_generation_settings: dict[str, Any] = {}
    modalities: dict[str, bool] = {}
    media_marker: str = ""


class _Model(msgspec.Struct):
    id: str = ""
    aliases: list[str] = []
    meta: dict[str, Any] | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _TokenList(msgspec.Struct):
    tokens: list[int]


class _Piece(msgspec.Struct):
    id: int
    piece: str | list[int]


class _Pieces(msgspec.Struct):
    tokens: list[_Piece]


class StockSlot(msgspec.Struct, frozen=True):
    """One slot as any engine shows it in ``GET /slots``."""

    id: int = 0
    is_processing: bool = False
    id_task: int | None = None
    """The running or the last task; None before the first. Counts up over the whole engine."""
    n_prompt_tokens: int = 0
    """Tokens that it holds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine shows it: some text, and what follows that in tokens."""

    text: str | None
    """Up to the first medium at most; None: the tokens are all of it."""
    tokens: Tokens
    """Empty where the text has no media behind it."""


class SlotFile(msgspec.Struct):
    """What a save or a restore moved."""

    n_tokens: int
    n_bytes: int


class Adapter(msgspec.Struct):
    """A LoRA adapter."""

    path: str = ""
    scale: float = 0.0


class _SlotMoved(msgspec.Struct):
    n_saved: int = 0
    n_restored: int = 0
    n_written: int = 0
    n_read: int = 0


class _Computed(msgspec.Struct):
    timings: PromptTimings


class _Rendered(msgspec.Struct):
    prompt: str


class _Prompt(msgspec.Struct):
    tokens: list[int]
    text: str | None = None


class _Counted(msgspec.Struct):
    input_tokens: int


class _NextToken(msgspec.Struct):
    n_decoded: int = 0


class _StockCounters(msgspec.Struct):
    id: int
    is_processing: bool
    id_task: int = NO_TASK
    n_prompt_tokens_processed: int = 0
    n_prompt_tokens_cache: int = 0
    next_token: list[_NextToken] = []


_adapters = msgspec.json.Decoder(list[Adapter])
_error = msgspec.json.Decoder(_ErrorBody)
_props = msgspec.json.Decoder(_Props)
_models = msgspec.json.Decoder(_Models)
_object = msgspec.json.Decoder(dict[str, Any])
_token_list = msgspec.json.Decoder(_TokenList)
_pieces = msgspec.json.Decoder(_Pieces)
_stock_slots = msgspec.json.Decoder(list[StockSlot])
_slot_moved = msgspec.json.Decoder(_SlotMoved)
_computed = msgspec.json.Decoder(_Computed)
_rendered = msgspec.json.Decoder(_Rendered)
_prompt = msgspec.json.Decoder(_Prompt)
_counted = msgspec.json.Decoder(_Counted)
_stock_counters = msgspec.json.Decoder(list[_StockCounters])


def read_props(body: bytes) -> tuple[EngineFacts, dict[str, str]]:
    """``GET /props`` of an engine without the patch: what can be known of it.

    Cells are not reported there: they are taken to be one window for each slot, an upper bound.
    """
    props = _props.decode(body)
    ctx = props.default_generation_settings.get("n_ctx", 0)
    facts = EngineFacts(
        epoch="",
        slots=props.total_slots,
        max_pools=0,
        cells=ctx * props.total_slots,
        ctx_tokens=ctx,
        bytes_per_cell=0,
        build=props.build_info,
    )
    return facts, {}


def read_template_identity(body: bytes) -> dict[str, str]:
    """``GET /props``: what decides how a chat becomes tokens."""
    props = _props.decode(body)
    return {"model_path": props.model_path, "chat_template": props.chat_template}


def read_model_identity(body: bytes) -> dict[str, str]:
    """``GET /v1/models``: what tells one model from another."""
    models = _models.decode(body).data
    meta = (models[0].meta if models else None) or {}
    keys = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype", "vocab_type")
    return {key: str(meta.get(key)) for key in keys}


def read_model_names(body: bytes) -> tuple[str, ...]:
    """``GET /v1/models``: every name of every model, in order, none twice."""
    names = [name for model in _models.decode(body).data for name in (model.id, *model.aliases)]
    return tuple(dict.fromkeys(name for name in names if name))


def read_pieces(body: bytes) -> list[tuple[int, str]]:
    """``{"tokens": [{"id", "piece"}]}`` of the tokenizing route; a piece that is no text is bytes there."""
    found = _pieces.decode(body).tokens
    return [(one.id, one.piece if isinstance(one.piece, str) else "") for one in found]


def read_media(body: bytes) -> bool:
    """``GET /props``: whether the engine takes anything but text."""
    return any(_props.decode(body).modalities.values())


def read_media_marker(body: bytes) -> str:
    """``GET /props``: what stands for a medium in a prompt's text; empty where none is taken."""
    return _props.decode(body).media_marker if read_media(body) else ""


def read_model_tokens(body: bytes) -> int | None:
    """``GET /v1/models``: the context that the first model was trained with."""
    models = _models.decode(body).data
    tokens = ((models[0].meta if models else None) or {}).get("n_ctx_train")
    return tokens if isinstance(tokens, int) else None


def read_tokens(body: bytes) -> Tokens:
    """``{"tokens": [...]}`` of the tokenizing and counting routes.

    Raises:
        msgspec.ValidationError: no token ids in it; the engine lacks the patch.
    """
    return as_tokens(_token_list.decode(body).tokens)


def read_adapters(body: bytes) -> list[Adapter]:
    """``GET /lora-adapters``."""
    return _adapters.decode(body)


def read_object(body: bytes) -> dict[str, Any]:
    """Any JSON object."""
    return _object.decode(body)


def read_slots(body: bytes) -> list[StockSlot]:
    """``GET /slots`` of any engine."""
    return _stock_slots.decode(body)


def read_slot_file(body: bytes) -> SlotFile:
    """Answer to a slot that was saved or restored."""
    moved = _slot_moved.decode(body)
    return SlotFile(moved.n_saved or moved.n_restored, moved.n_written or moved.n_read)


def read_computed(body: bytes) -> PromptTimings:
    """Answer to a completion: what its prompt took."""
    return _computed.decode(body).timings


def read_rendered(body: bytes) -> str:
    """``POST /apply-template``: the prompt of a chat."""
    return _rendered.decode(body).prompt


def read_prompt(body: bytes) -> Prompt:
    """Answer of a counting route that may show text.

    Raises:
        msgspec.ValidationError: no token ids in it; the engine lacks the patch.
    """
    shown = _prompt.decode(body)
    return Prompt(shown.text, as_tokens(shown.tokens))


def read_count(body: bytes) -> int:
    """Answer of a counting route: how many tokens."""
    return _counted.decode(body).input_tokens


def read_stock_slots(body: bytes) -> list[SlotLook]:
    """``GET /slots`` of an engine without the patch: what each slot has done for its task.

    Raises:
        msgspec.ValidationError: an engine whose ``/slots`` says something else.
    """
    return [
        SlotLook(
            slot=SlotId(slot.id),
            working=slot.is_processing,
            task=slot.id_task,
            generated=slot.next_token[0].n_decoded if slot.next_token else 0,
            prompt=slot.n_prompt_tokens_processed,
            cached=slot.n_prompt_tokens_cache,
        )
        for slot in _stock_counters.decode(body)
    ]


def read_error(body: bytes, status: int) -> str:
    """The sentence in an engine's error body, or a stand-in."""
    try:
        message = _error.decode(body).error.message
    except msgspec.DecodeError:
        message = ""
    return message or f"the engine answered with status {status}"
