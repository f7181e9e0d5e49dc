"""Tiny models with random weights, for architectures that no small real model is at hand for.

Their vocabulary is the first thousand tokens of the built-in model's, their text is noise, and they load
in a fraction of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 1024
EMBD = 64
LAYERS = 2

_rng = np.random.default_rng(7)


def _weights(*shape: int) -> Any:
    return (_rng.standard_normal(shape) * 0.05).astype(np.float32)


def _ones(*shape: int) -> Any:
    return np.ones(shape, dtype=np.float32)


def _writer(
    path: Path, architecture: str, vocabulary_of: Path, embeddings: Any = None, context: int = 2048
) -> GGUFWriter:
    writer = GGUFWriter(str(path), architecture)
    fields = GGUFReader(str(vocabulary_of)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()[:VOCAB]
    known = set(tokens)
    merges = [
        merge
        for merge in fields["tokenizer.ggml.merges"].contents()
        if "".join(merge.split(" ", 1)) in known and set(merge.split(" ", 1)) <= known
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(fields["tokenizer.ggml.token_type"].contents()[:VOCAB])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _sizes(writer, _weights(VOCAB, EMBD) if embeddings is None else embeddings, context)
    return writer


def _sizes(writer: GGUFWriter, embeddings: Any, context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", _ones(EMBD))


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sliding_window(path: Path, vocabulary_of: Path) -> None:
    """Gemma 2: every other layer sees a window only. Its weights are as ``llama``'s."""
    dice = np.random.default_rng(7)  # of its own: the same model whatever was written before
    writer = _writer(path, "gemma2", vocabulary_of, _wide(dice, VOCAB, EMBD) / 6)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(64)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            writer.add_tensor(f"{name}.{norm}.weight", _ones(EMBD))
        writer.add_tensor(f"{name}.attn_q.weight", _wide(dice, 64, EMBD))
        writer.add_tensor(f"{name}.attn_k.weight", _wide(dice, 32, EMBD))
        writer.add_tensor(f"{name}.attn_v.weight", _wide(dice, 32, EMBD))
        writer.add_tensor(f"{name}.attn_output.weight", _wide(dice, EMBD, 64))
        writer.add_tensor(f"{name}.ffn_gate.weight", _wide(dice, 128, EMBD))
        writer.add_tensor(f"{name}.ffn_up.weight", _wide(dice, 128, EMBD))
        writer.add_tensor(f"{name}.ffn_down.weight", _wide(dice, EMBD, 128))
    _close(writer)


def mamba(path: Path, vocabulary_of: Path) -> None:
    """Mamba: a state instead of cells."""
    inner, state, conv, rank = 2 * EMBD, 16, 4, 4
    writer = _writer(path, "mamba", vocabulary_of)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        writer.add_tensor(f"{name}.attn_norm.weight", _ones(EMBD))
        writer.add_tensor(f"{name}.ssm_in.weight", _weights(2 * inner, EMBD))
        writer.add_tensor(f"{name}.ssm_conv1d.weight", _weights(inner, conv))
        writer.add_tensor(f"{name}.ssm_conv1d.bias", _weights(inner))
        writer.add_tensor(f"{name}.ssm_x.weight", _weights(rank + 2 * state, inner))
        writer.add_tensor(f"{name}.ssm_dt.weight", _weights(inner, rank))
        writer.add_tensor(f"{name}.ssm_dt.bias", _weights(inner))
        writer.add_tensor(f"{name}.ssm_a", -_ones(inner, state))
        writer.add_tensor(f"{name}.ssm_d", _ones(inner))
        writer.add_tensor(f"{name}.ssm_out.weight", _weights(EMBD, inner))
    _close(writer)


def llama(
    path: Path, vocabulary_of: Path, *, context: int = 2048, adds_bos: bool = False, heads: int = 4
) -> None:
    """Llama: plain attention, thousands of tokens a second.

    Its weights are large, so that attention is picky and every token of a prompt shows in the answer, and in
    single precision, so that what is computed twice is the same. Two heads are as long as quantized KV needs.
    """
    dice = np.random.default_rng(7)  # of its own: the same model whatever was written before
    writer = _writer(path, "llama", vocabulary_of, _wide(dice, VOCAB, EMBD) / 6, context)
    writer.add_add_bos_token(adds_bos)
    writer.add_rope_dimension_count(EMBD // heads)
    _plain_attention(writer, dice, heads)
    _close(writer)


def adapter(path: Path) -> None:
    """A LoRA adapter of rank 4 for ``llama``, strong enough to change every answer."""
    dice = np.random.default_rng(8)
    writer = GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_a", _wide(dice, 4, EMBD))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_b", _wide(dice, EMBD, 4))
        writer.add_tensor(f"blk.{layer}.attn_v.weight.lora_a", _wide(dice, 4, EMBD))
        writer.add_tensor(f"blk.{layer}.attn_v.weight.lora_b", _wide(dice, 32, 4))
    _close(writer)


def llama_sentencepiece(path: Path) -> None:
    """Llama with a vocabulary of sentence pieces: single letters, some words, and all bytes."""
    words = ["▁the", "▁a", "he", "in", "▁is", "er", "us", "user", "▁▁", "\n\n", "ferry", "▁ferry"]
    letters = ["▁", *(chr(code) for code in range(33, 127)), "\n", "\t", "é", "Ω", "日"]
    kinds = [
        *((token, TokenType.CONTROL) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
        ("<unk>", TokenType.UNKNOWN),
        *((f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)),
        *((token, TokenType.NORMAL) for token in dict.fromkeys([*words, *letters])),
    ]
    kinds += [(f"<unused{number}>", TokenType.NORMAL) for number in range(VOCAB - len(kinds))]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in kinds])
    writer.add_token_types([kind for _, kind in kinds])
    writer.add_token_scores([-float(at) for at in range(VOCAB)])
    writer.add_unk_token_id(3)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    dice = np.random.default_rng(7)
    _sizes(writer, _wide(dice, VOCAB, EMBD) / 6, 2048)
    writer.add_rope_dimension_count(16)
    _plain_attention(writer, dice)
    _close(writer)


def qwen2vl(path: Path, vocabulary_of: Path, *, context: int = 2048) -> None:
    """Qwen 2 VL: like ``llama``, but a position has several numbers: an image takes fewer than its tokens."""
    dice = np.random.default_rng(7)  # of its own: the same model whatever was written before
    writer = _writer(path, "qwen2vl", vocabulary_of, _wide(dice, VOCAB, EMBD) / 6, context)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    _plain_attention(writer, dice)
    _close(writer)


def _wide(dice: Any, *shape: int) -> Any:
    return (dice.standard_normal(shape) * 0.3).astype(np.float32)


def _plain_attention(writer: GGUFWriter, dice: Any, heads: int = 4) -> None:
    writer.add_vocab_size(VOCAB)
    writer.add_feed_forward_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    for layer in range(LAYERS):
        name = f"blk.{layer}"
        writer.add_tensor(f"{name}.attn_norm.weight", _ones(EMBD))
        writer.add_tensor(f"{name}.attn_q.weight", _wide(dice, EMBD, EMBD))
        writer.add_tensor(f"{name}.attn_k.weight", _wide(dice, 32, EMBD))
        writer.add_tensor(f"{name}.attn_v.weight", _wide(dice, 32, EMBD))
        writer.add_tensor(f"{name}.attn_output.weight", _wide(dice, EMBD, EMBD))
        writer.add_tensor(f"{name}.ffn_norm.weight", _ones(EMBD))
        writer.add_tensor(f"{name}.ffn_gate.weight", _wide(dice, 128, EMBD))
        writer.add_tensor(f"{name}.ffn_up.weight", _wide(dice, 128, EMBD))
        writer.add_tensor(f"{name}.ffn_down.weight", _wide(dice, EMBD, 128))
