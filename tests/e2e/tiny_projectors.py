"""Tiny vision projectors with random weights for the tiny models, and images to show them.

A projector is an encoder of image patches and two layers that lead into the text model's embeddings. What
it sees is noise, but another noise for another image.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter

from e2e.tiny_models import EMBD as TEXT_EMBD

if TYPE_CHECKING:
    from pathlib import Path

PATCH = 14
"""Pixels on a side."""
EMBD = 32
HEADS = 2
HIDDEN = 64
LAYERS = 2

FIXED_TOKENS = 16
"""Tokens of any image with ``fixed``."""


def fixed(path: Path) -> None:
    """Janus Pro's: every image is scaled to 56 by 56 pixels and becomes ``FIXED_TOKENS`` tokens."""
    dice = np.random.default_rng(11)
    writer = _encoder(path, "janus_pro", 4 * PATCH, dice)
    writer.add_vision_use_gelu(True)
    _add(writer, dice, "v.position_embd.weight", FIXED_TOKENS, EMBD)
    _layers(writer, dice, "mm.0", "mm.1", EMBD)
    _close(writer)


def dynamic(path: Path) -> None:
    """Qwen 2 VL's: a token for each 28 by 28 pixels, as many positions as its longer side has tokens."""
    dice = np.random.default_rng(12)
    writer = _encoder(path, "qwen2vl_merger", 16 * PATCH, dice)
    writer.add_vision_use_silu(True)
    _add(writer, dice, "v.patch_embd.weight.1", EMBD, 3, PATCH, PATCH)
    _layers(writer, dice, "mm.0", "mm.2", 4 * EMBD)
    _close(writer)


def png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """An image of noise, the same for the same seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def base64_png(seed: int, width: int = 56, height: int = 56) -> str:
    """The same in base64."""
    return base64.b64encode(png(seed, width, height)).decode()


def data_url(seed: int, width: int = 56, height: int = 56) -> str:
    """The same as clients send it."""
    return f"data:image/png;base64,{base64_png(seed, width, height)}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _encoder(path: Path, projector: str, image_size: int, dice: Any) -> GGUFWriter:
    writer = GGUFWriter(str(path), "clip")
    writer.add_file_type(0)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    writer.add_vision_image_size(image_size)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(EMBD)
    writer.add_vision_feed_forward_length(HIDDEN)
    writer.add_vision_projection_dim(TEXT_EMBD)
    writer.add_vision_block_count(LAYERS)
    writer.add_vision_head_count(HEADS)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    _add(writer, dice, "v.patch_embd.weight", EMBD, 3, PATCH, PATCH)
    _norm(writer, "v.post_ln")
    for layer in range(LAYERS):
        name = f"v.blk.{layer}"
        _norm(writer, f"{name}.ln1")
        _norm(writer, f"{name}.ln2")
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            _layer(writer, dice, f"{name}.{part}", EMBD, EMBD)
        _layer(writer, dice, f"{name}.ffn_up", HIDDEN, EMBD)
        _layer(writer, dice, f"{name}.ffn_down", EMBD, HIDDEN)
    return writer


def _layers(writer: GGUFWriter, dice: Any, first: str, second: str, width: int) -> None:
    """From the encoder's embeddings to the text model's."""
    _layer(writer, dice, first, HIDDEN, width)
    _layer(writer, dice, second, TEXT_EMBD, HIDDEN)


def _layer(writer: GGUFWriter, dice: Any, name: str, rows: int, columns: int) -> None:
    _add(writer, dice, f"{name}.weight", rows, columns)
    _add(writer, dice, f"{name}.bias", rows)


def _norm(writer: GGUFWriter, name: str) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(EMBD, dtype=np.float32))
    writer.add_tensor(f"{name}.bias", np.zeros(EMBD, dtype=np.float32))


def _add(writer: GGUFWriter, dice: Any, name: str, *shape: int) -> None:
    writer.add_tensor(name, (dice.standard_normal(shape) * 0.3).astype(np.float32))


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
