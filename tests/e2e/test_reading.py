"""Prompts read in parts on the real engine: the tokens are those that it counts, whatever the API."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from e2e import talks
from e2e.harness import bare_engine
from e2e.talks import CHAT, COMPLETION, MESSAGES, RESPONSES, TEXT
from e2e.tiny_models import llama, llama_sentencepiece, qwen2vl
from e2e.tiny_projectors import base64_png, dynamic, fixed
from polykv_proxy.api import asked as asking
from polykv_proxy.api import reading
from polykv_proxy.api.families import CHAT_COUNT, INFERENCE
from polykv_proxy.api.reading import Reader
from polykv_proxy.core.types import MEDIUM, Capability, Scope, text_prefix
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.backend import Patched
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.types import Tokens

TEMPLATE = str(Path(__file__).with_name("tool_calls.jinja"))
SIZES = ("--threads", "1", "--parallel", "1", "--ctx-size", "512", "--kv-unified", "--polykv-max-pools", "1")
SCOPE = Scope("me")
REQUESTS = 200


def builtin(_folder: Path, vocabulary_of: Path) -> tuple[Path, ...]:
    """The built-in model: byte pairs, nothing added."""
    return (vocabulary_of,)


def with_bos(folder: Path, vocabulary_of: Path) -> tuple[Path, ...]:
    """Byte pairs, and a token at the start of each prompt that is a special token of its text, too."""
    llama(folder / "model.gguf", vocabulary_of, adds_bos=True)
    return (folder / "model.gguf",)


def sentencepiece(folder: Path, _vocabulary_of: Path) -> tuple[Path, ...]:
    """Sentence pieces: blanks belong to words, one stands before the first."""
    llama_sentencepiece(folder / "model.gguf")
    return (folder / "model.gguf",)


def seeing(folder: Path, vocabulary_of: Path) -> tuple[Path, ...]:
    """One that takes images, and has a token at the start."""
    fixed(folder / "projector.gguf")
    return (*with_bos(folder, vocabulary_of), folder / "projector.gguf")


def seeing_in_pieces(folder: Path, vocabulary_of: Path) -> tuple[Path, ...]:
    """One whose words are sentence pieces."""
    fixed(folder / "projector.gguf")
    return (*sentencepiece(folder, vocabulary_of), folder / "projector.gguf")


def seeing_sizes(folder: Path, vocabulary_of: Path) -> tuple[Path, ...]:
    """One to whom images have sizes, with text around each of them."""
    qwen2vl(folder / "model.gguf", vocabulary_of)
    dynamic(folder / "projector.gguf")
    return folder / "model.gguf", folder / "projector.gguf"


class Rig:
    """A reader, with what it has the engine tokenize, and the engine's own counts to compare with."""

    def __init__(self, client: EngineClient, facts: Any) -> None:
        self._client = client
        plane = SimpleNamespace(facts=facts, capability=Capability.ZERO_COPY, model_identity="m")
        runtime: Any = SimpleNamespace(client=client, backend=Patched(client), plane=plane, epoch=facts.epoch)
        self._reader = Reader(runtime)
        self._tokenize = client.tokenize
        client.tokenize = self._counted  # type: ignore[method-assign]
        self.read = 0
        """Characters that it had tokenized."""

    async def _counted(self, text: str, **more: Any) -> Any:
        self.read += len(text)
        return await self._tokenize(text, **more)

    async def tokens(self, path: str, raw: bytes) -> Tokens | None:
        """As a request's are found."""
        family = INFERENCE[path]
        return await self._reader.tokens(family, asking.read(raw, family, {}), SCOPE)

    async def counted(self, path: str, raw: bytes) -> Tokens:
        """As the engine counts them, whole; in number as it does without our patch."""
        count = INFERENCE[path].count_path
        if count is not None:
            tokens = await self._client.count_tokens(count, raw)
            assert len(tokens) == await self._client.count(count, raw)
            return tokens
        prompt = json.loads(raw)["prompt"]
        if isinstance(prompt, str):
            return await self._tokenize(prompt)
        return await self._client.count_tokens(CHAT_COUNT, raw)

    async def text_of(self, path: str, raw: bytes) -> str:
        """Of a prompt, before its first medium."""
        count, prompt = INFERENCE[path].count_path, json.loads(raw).get("prompt")
        if isinstance(prompt, str):
            return prompt
        return (await self._client.prompt(count or CHAT_COUNT, raw, text_from=0)).text or ""


@pytest.mark.parametrize("model", [builtin, with_bos, sentencepiece, seeing, seeing_in_pieces, seeing_sizes])
async def test_prompts_read_in_parts_are_the_prompts_that_the_engine_counts(
    patched: Path,
    smollm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[Path, Path], tuple[Path, ...]],
) -> None:
    """POOL-13, POOL-19: for random requests, whatever was read before; most of what is common is known."""
    monkeypatch.setattr(reading, "MIN_BYTES", 0)
    dice = random.Random(9)
    files = model(tmp_path, smollm)
    media = ("--mmproj", str(files[1])) if files[1:] else ()
    paths = [CHAT, CHAT, MESSAGES, MESSAGES, RESPONSES, RESPONSES, TEXT, COMPLETION]
    sent = pictures = refused = 0
    template = ("--jinja", "--chat-template-file", TEMPLATE)
    async with (
        bare_engine(patched, files[0], tmp_path, *SIZES, *template, *media) as engine,
        EngineClient(EngineAddress(engine.base), None) as client,
    ):
        facts, _, _ = await client.describe()
        rig = Rig(client, facts)
        marker = await client.media_marker() if media else ""
        for talk in talks.talks(dice, REQUESTS, media=bool(media)):
            path = dice.choice(paths)
            raw = json.dumps(talks.said(dice, talk, path, marker)).encode()
            try:
                expected = await rig.counted(path, raw)
            except PolyKVError:
                refused += 1
                with pytest.raises(PolyKVError):
                    await rig.tokens(path, raw)
                continue
            assert await rig.tokens(path, raw) == expected
            sent += len(await rig.text_of(path, raw))
            pictures += text_prefix(expected) < len(expected)
        if media:
            await refuses_what_the_engine_refuses(rig, marker)
    assert rig.read < sent / 2
    assert refused < REQUESTS / 20
    assert (pictures > REQUESTS / 4) == bool(media)


async def refuses_what_the_engine_refuses(rig: Rig, marker: str) -> None:
    """A text that looks like an image, an image without a place: neither gets tokens of its own."""
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": f"a{marker}b"}]}),
        (COMPLETION, {"prompt": {"prompt_string": "ab", "multimodal_data": [base64_png(0)]}}),
        (COMPLETION, {"prompt": {"prompt_string": f"a{marker}b", "multimodal_data": []}}),
    ):
        with pytest.raises(PolyKVError):
            await rig.tokens(path, json.dumps(body).encode())


async def test_mixed_prompts_are_the_engines_to_read(
    patched: Path, smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and texts in turn; each text is tokenized alone."""
    monkeypatch.setattr(reading, "MIN_BYTES", 0)
    async with (
        bare_engine(patched, smollm, tmp_path, *SIZES) as engine,
        EngineClient(EngineAddress(engine.base), None) as client,
    ):
        facts, _, _ = await client.describe()
        rig = Rig(client, facts)
        prompt = [1, "The ferry", 2, " is late"]
        tokens = await rig.tokens(COMPLETION, json.dumps({"prompt": prompt}).encode())
        texts = [await client.tokenize(text) for text in prompt[1::2]]
        assert list(tokens or ()) == [1, *texts[0], 2, *texts[1]]
        assert MEDIUM not in list(tokens or ())
        answer = await engine.post("/completion", {"prompt": prompt, "n_predict": 1})
        assert answer.json["tokens_evaluated"] == len(tokens or ())


async def test_text_that_a_template_cuts_inside_a_letter_is_not_shown(
    patched: Path, smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the letter cannot be told in JSON; its tokens can."""
    monkeypatch.setattr(reading, "MIN_BYTES", 0)
    template = tmp_path / "cut.jinja"
    said = "'<|im_start|>' + one.role + one.content[:3] + '<|im_end|>'"
    template.write_text("{%- for one in messages %}{{ " + said + " }}{%- endfor %}")
    options = ("--jinja", "--chat-template-file", str(template))
    async with (
        bare_engine(patched, smollm, tmp_path, *SIZES, *options) as engine,
        EngineClient(EngineAddress(engine.base), None) as client,
    ):
        facts, _, _ = await client.describe()
        rig = Rig(client, facts)
        for content, shown in (("abcde", "abc"), ("\u00e9" * 3, None)):
            raw = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
            prompt = await client.prompt(CHAT_COUNT, raw, text_from=0)
            assert prompt.text == (shown and f"<|im_start|>user{shown}<|im_end|>")
            assert await rig.tokens(CHAT, raw) == await rig.counted(CHAT, raw)
