"""Prompts read in parts on the real engine: the tokens are those that it counts, for any tokenizer."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from e2e.harness import bare_engine
from e2e.tiny_models import llama, llama_sentencepiece
from polykv_proxy.api import asked as asking
from polykv_proxy.api import reading
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.api.reading import Reader
from polykv_proxy.core.types import Capability, Scope
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.backend import Patched
from polykv_proxy.engine.client import EngineClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SIZES = ("--threads", "1", "--parallel", "1", "--ctx-size", "512", "--kv-unified", "--polykv-max-pools", "1")
SCOPE = Scope("me")
BITS = (
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "end|>",
        "<s>",
        "</s>",
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        " a",
        "b",
    ),
    *("The ferry is late.", " Ω", "日本語", "🚢", "é", "1234567", "user\n", "don't", "\u200b", "<", ">"),
)
"""Text is made of these: special tokens, halves of them, and what tokenizers join."""


def builtin(_path: Path, vocabulary_of: Path) -> Path:
    """The built-in model: byte pairs, nothing added."""
    return vocabulary_of


def with_bos(path: Path, vocabulary_of: Path) -> Path:
    """Byte pairs, and a token at the start of each prompt that is a special token of its text, too."""
    llama(path, vocabulary_of, adds_bos=True)
    return path


def sentencepiece(path: Path, vocabulary_of: Path) -> Path:
    """Sentence pieces: blanks belong to words, one stands before the first."""
    llama_sentencepiece(path)
    return path


def some_text(dice: random.Random, most: int) -> str:
    """Something that a client may say."""
    return "".join(dice.choice(BITS) for _ in range(dice.randrange(most)))


def bodies(dice: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of conversations that begin, go on, branch off and are edited."""
    talks: list[list[dict[str, str]]] = [[{"role": "system", "content": some_text(dice, 60)}]]
    made: list[tuple[str, dict[str, Any]]] = []
    for _ in range(count):
        talk = [dict(message) for message in dice.choice(talks[-4:])]
        roles = ("user", "assistant")
        for _ in range(dice.randrange(1, 4)):
            talk.append({"role": roles[(len(talk) + 1) % 2], "content": some_text(dice, 40)})
        if dice.random() < 0.3:
            place = dice.randrange(len(talk))
            talk[place]["content"] = talk[place]["content"][: dice.randrange(30)] + some_text(dice, 5)
        talks.append(talk)
        if dice.random() < 0.3:
            text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>" for one in talk)
            made.append((TEXT, {"prompt": text}))
        else:
            made.append((CHAT, {"messages": talk}))
    return made


@pytest.mark.parametrize("model", [builtin, with_bos, sentencepiece])
async def test_prompts_read_in_parts_are_the_prompts_that_the_engine_counts(
    patched: Path,
    smollm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[Path, Path], Path],
) -> None:
    """POOL-13: for 150 random requests, whatever was read before; most of what is common is known."""
    monkeypatch.setattr(reading, "MIN_BYTES", 0)
    sent = read = 0
    async with (
        bare_engine(patched, model(tmp_path / "model.gguf", smollm), tmp_path, *SIZES) as engine,
        EngineClient(EngineAddress(engine.base), None) as client,
    ):
        facts, _, _ = await client.describe()
        plane = SimpleNamespace(facts=facts, capability=Capability.ZERO_COPY, model_identity="m")
        runtime: Any = SimpleNamespace(client=client, backend=Patched(client), plane=plane, epoch=facts.epoch)
        reader = Reader(runtime)
        tokenize = client.tokenize

        async def counted(text: str, **more: Any) -> Any:
            nonlocal read
            read += len(text)
            return await tokenize(text, **more)

        monkeypatch.setattr(client, "tokenize", counted)
        for path, body in bodies(random.Random(9), 150):
            family = INFERENCE[path]
            raw = json.dumps(body).encode()
            tokens = await reader.tokens(family, asking.read(raw, family, {}), SCOPE)
            if path == CHAT:
                text = await client.render(raw)
                assert tokens == await client.count_tokens(f"{CHAT}/input_tokens", raw)
            else:
                text = body["prompt"]
            sent += len(text)
            assert tokens == await tokenize(text)
    assert read < sent / 2
