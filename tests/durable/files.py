"""Files for tests: model files, slot files, saved states."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fake_stock import slot_file

from polykv_proxy.core.catalogue import Kind, SavedState
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.durable.names import temporary_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from polykv_proxy.durable.store import Store

PAIRS: tuple[tuple[str, Any], ...] = (
    ("general.architecture", "llama"),
    ("llama.rope.freq_base", 10000.0),
    ("llama.block_count", 2),
    ("tokenizer.ggml.tokens", ["a", "b", "c"]),
    ("tokenizer.ggml.scores", [0.5, 1.5]),
    ("general.flag", True),
)
TENSORS = (("token_embd.weight", (4, 3), 0, 0), ("output_norm.weight", (4,), 0, 64))


def gguf_bytes(pairs: Iterable[tuple[str, Any]] = PAIRS, tensors: Iterable[Any] = TENSORS) -> bytes:
    """A small model file."""
    pairs, tensors = list(pairs), list(tensors)
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs:
        raw += _text(key) + _value(value)
    for name, shape, kind, offset in tensors:
        raw += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return raw + bytes(64) + bytes(range(256))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    head = {str: 8, float: 6, int: 4}[type(value[0])]
    body = b"".join(_value(each)[4:] for each in value)
    return struct.pack("<IIQ", 9, head, len(value)) + body


def state(tokens: Iterable[int], key: str = "me", **more: Any) -> SavedState:
    """A state that was not saved yet."""
    values: dict[str, Any] = {
        "kind": Kind.SESSION,
        "key": key,
        "scope": Scope(""),
        "model_id": "m",
        "config": {"system": "s", "tools": "t", "template": "p", "kwargs": "k"},
        "tokens": as_tokens(tokens),
        "file": "",
        "file_bytes": 0,
        "file_digest": "",
        "created_ts": 100.0,
    }
    return SavedState(**(values | more))


def engine_saves(folder: Path, name: str, tokens: Iterable[int], kv: bytes = b"kv" * 50) -> int:
    """What an engine does; returns the bytes it wrote."""
    raw = slot_file(list(tokens)) + kv
    (folder / name).write_bytes(raw)
    return len(raw)


def saved(store: Store, draft: SavedState, *, kv: bytes = b"kv" * 50) -> SavedState:
    """A state whose file is there and counts."""
    name = temporary_name(draft.identity)
    size = engine_saves(store.folder, name, draft.tokens, kv)
    return store.commit(replace(draft, file=name, file_bytes=size), used_ts=100.0)
