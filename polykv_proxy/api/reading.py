"""The exact tokens of prompts, without tokenizing again what was tokenized before.

1. The engine makes text of a body, whatever its API; a plain prompt is text already.
2. What of the text was read before, for the same scope, is known in tokens up to a seam (``core.texts``).
3. The engine tokenizes the rest.

The text ends before the first medium. What follows it comes in tokens, and so does what is too short to be
worth two questions.
The engine compares tokens itself before it reuses anything: an error here would cost speed only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from polykv_proxy.api import asked as asking
from polykv_proxy.api.families import CHAT_COUNT
from polykv_proxy.core.texts import Seam, Texts, choose_seam
from polykv_proxy.errors import BadRequestError, NotFoundError, PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.core.types import Scope, Tokens
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

MIN_BYTES = 16 * 1024
"""Shorter prompts are tokenized in the time that a second question to the engine takes."""

BUDGET_BYTES = 32 * 1024 * 1024
"""Of texts and their tokens; a prompt of 32,768 tokens takes about 260 KiB."""

_FINAL = (BadRequestError, NotFoundError)
"""What an engine that cannot show its prompts answers, however often it is asked."""

_TURNS = ("a b", " A\n", "\tb ")
"""Of a chat that shows a model's special tokens, with blanks beside them."""


class Reader:
    """Reads prompts for one engine.

    Args:
        runtime: its control plane.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._load: tuple[str, str] | None = None
        self._texts: Texts | None = None
        self._looking = False
        """Whether somebody finds out about the seam."""

    async def tokens(self, family: Family, asked: Asked, scope: Scope) -> Tokens | None:
        """A prompt's exact token ids; None where the engine will have to say what it made of it.

        What was read while the model changed is of neither.

        Raises:
            PolyKVError: the engine refuses the body, or cannot answer.
        """
        load = self._now
        tokens = await self._read(family, asked, scope)
        return tokens if self._now == load else None

    @property
    def _now(self) -> tuple[str, str]:
        """The engine's load, and what it has loaded."""
        return self._runtime.epoch, self._runtime.plane.model_identity

    async def _read(self, family: Family, asked: Asked, scope: Scope) -> Tokens | None:
        if family.count_path is not None:
            return await self._of_body(family.count_path, asked.body, scope)
        raw = asked.prompt or b""
        prompt = asking.prompt_tokens(raw)
        if isinstance(prompt, str):
            texts = await self._known() if len(prompt) >= MIN_BYTES else None
            return await self._of_text(prompt, scope, texts)
        if prompt is None and (body := asking.odd_prompt(raw)) is not None:
            return await self._of_body(CHAT_COUNT, body, scope)
        return prompt

    async def _of_body(self, count_path: str, body: bytes, scope: Scope) -> Tokens | None:
        backend = self._runtime.backend
        worth_it = len(body) >= MIN_BYTES and self._runtime.plane.capability.has_pools
        texts = await self._known() if worth_it else None
        if texts is None:
            return await backend.prompt_tokens(count_path, body)
        shown = await backend.prompt(count_path, body, text_from=MIN_BYTES)
        if shown is None or shown.text is None:
            return None if shown is None else shown.tokens
        return await self._of_text(shown.text, scope, texts) + shown.tokens

    async def _of_text(self, text: str, scope: Scope, texts: Texts | None) -> Tokens:
        client = self._runtime.client
        if texts is None:
            return await client.tokenize(text)
        raw = text.encode()
        start = texts.start(scope, raw)
        if start.offset:
            rest = raw[start.offset :].decode()
            tokens = start.tokens + await client.tokenize(rest, whole=False)
        else:
            tokens = await client.tokenize(text)
        texts.learn(scope, raw, tokens)
        return tokens

    async def _known(self) -> Texts | None:
        """What was read since the engine loaded its model; None: read whole.

        That is so where the model's prompts have no seams, and while somebody finds out about them.
        """
        load = self._now
        if self._load == load:
            return self._texts
        if self._looking:
            return None
        self._looking = True
        try:
            seam = await self._seam()
        except PolyKVError as error:
            log.debug("no_prompt_seam", reason=error.message)
            if not isinstance(error, _FINAL) and error.code != "engine_protocol":
                return None  # it was busy, or is gone: the next prompt asks again
            seam = None
        finally:
            self._looking = False
        log.debug("prompt_seam", seam=None if seam is None else seam.text.decode())
        self._load, self._texts = load, None if seam is None else Texts(seam, BUDGET_BYTES)
        return self._texts

    async def _seam(self) -> Seam | None:
        """The special token that this model's prompts are divided by, if they can be read in parts.

        Text must have the tokens that the engine counts for it, whole and in parts.

        Raises:
            PolyKVError: the engine refuses to show it, or cannot answer.
        """
        client = self._runtime.client
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(_TURNS)]
        body = msgspec.json.encode({"messages": chat})
        text = await client.render(body)
        whole, ends = await client.tokenize(text), await client.tokenize(text, whole=False)
        added = len(whole) - len(ends)
        plain = await client.tokenize(text, whole=False, special=False)
        seam = choose_seam(await client.pieces(text), plain, added=added)
        if seam is None or whole[added:] != ends:
            return None  # a token at the end belongs to no part
        if await self._runtime.backend.prompt_tokens(CHAT_COUNT, body) != whole:
            return None
        raw = text.encode()
        at = raw.rfind(seam.text)
        parts = [await client.tokenize(part.decode(), whole=False) for part in (raw[:at], raw[at:])]
        return seam if parts[0] + parts[1] == ends else None
