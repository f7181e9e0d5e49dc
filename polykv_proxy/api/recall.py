"""What conversations sent to an engine before, and what was left of it when the next request came.

Each engine has one: what another engine holds is nothing that a request could have reused here. Nothing is
read from bodies until an explanation is looked for. Exact tokens are asked for after the answer, for few
requests at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api import asked as asking
from polykv_proxy.api import outline as outlines
from polykv_proxy.api.families import INFERENCE, Dialect
from polykv_proxy.api.tail import begins_with
from polykv_proxy.core.divergence import Cause, Divergence, Then, refined
from polykv_proxy.core.outlines import Outline, Part, Section
from polykv_proxy.core.past import Past, PastBook
from polykv_proxy.core.types import Capability, agreement, text_prefix
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.records import RequestRecord
    from polykv_proxy.core.slots import Chain
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

PAST_CONVERSATIONS = 1000
"""Conversations whose last request is remembered."""

PAST_BUDGET_BYTES = 32 * 1024 * 1024
"""Bytes that they may take, all together."""

BODY_LIMIT_BYTES = 4 * 1024 * 1024
"""A longer body is not remembered; what changed in it is not shown."""

NAMESAKES = 6
"""Conversations of a name that a new one is compared with."""

REFINING = 2
"""Explanations that may ask the engine for tokens at once; others stay as they are."""

SNIPPET_TOKENS = 32

_COUNT_PATHS = {family.dialect: family.count_path for family in INFERENCE.values()}


class Candidate:
    """A conversation that a request may be part of, as it was when the request was sent."""

    __slots__ = ("certain", "held", "past", "taken")

    def __init__(self, past: Past, *, certain: bool, held: bool, taken: bool) -> None:
        self.past = past
        self.certain = certain
        self.held = held
        self.taken = taken

    def then(self, outline: Outline) -> Then:
        """What the core is told of it."""
        answer, reasoned = begins_with(self.past.answer)
        return Then(
            outline=outline,
            epoch=self.past.epoch,
            prompt_tokens=self.past.prompt_tokens,
            resident_tokens=self.past.resident_tokens,
            held=self.held,
            taken=self.taken,
            answer=answer,
            reasoned=reasoned,
        )


class Recall:
    """The conversations of one engine.

    Args:
        runtime: its control plane.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pasts = PastBook(PAST_CONVERSATIONS, PAST_BUDGET_BYTES, _summary)
        self.refining = 0
        """Explanations that ask the engine now."""

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._runtime.name

    @property
    def epoch(self) -> str:
        """The engine's load."""
        return self._runtime.epoch

    def remember(self, past: Past) -> None:
        """A conversation's request is over."""
        if past.body is not None and len(past.body) > BODY_LIMIT_BYTES:
            past.body = None
        self._pasts.keep(past)

    def candidates(self, lease: Lease, chain: Chain) -> list[Candidate]:
        """Whose earlier request this one may go on with.

        1. It runs in the slot that holds its conversation: that one.
        2. It continues what was sent before, wherever that is now; its session's last request; the latest
           ones of its name.
        """
        session = lease.session
        assert session is not None
        own = self._pasts.of(session)
        if lease.continues:  # 1
            return [] if own is None else [Candidate(own, certain=True, held=True, taken=False)]
        continued = self._pasts.continued_by(session.scope, session.name, chain)
        found = [continued, own, *self._pasts.recent(session.scope, session.name, NAMESAKES)]
        board = self._runtime.plane.board.slots
        # the request itself may have displaced it: it was there to be reused all the same
        displaced = {board[number].before[0] for number in lease.slots if number < len(board)}
        candidates = []
        for past in dict.fromkeys(found):
            if past is None:
                continue
            owner = past.session
            if owner is session:
                held, taken = False, lease.evicted
            else:
                held, taken = owner.slot is not None or owner in displaced, owner.taken
            certain = past is continued or _share_links(past, chain)
            candidates.append(Candidate(past, certain=certain, held=held, taken=taken))
        return candidates

    # -- tokens, on the side -----------------------------------------------------------------------------

    def refine(self, record: RequestRecord, past: Past, now: tuple[bytes, Dialect, Tokens | None]) -> None:
        """Ask the engine for what tokens can tell; no more than a few requests at a time.

        Args:
            record: of a request whose divergence is in its text, or in what the template made of it.
            past: what it diverged from.
            now: its body and dialect, and its tokens if they are known.
        """
        found, plane = record.divergence, self._runtime.plane
        if found is None or self.refining >= REFINING or plane.capability is not Capability.ZERO_COPY:
            return
        textless = found.expected_text is None and found.got_text is None
        if found.token_index is None or (textless and found.cause is not Cause.MEDIA):
            self.refining += 1
            self._runtime.spawn(self._refine(record, found, past, now))

    async def _refine(
        self, record: RequestRecord, found: Divergence, past: Past, now: tuple[bytes, Dialect, Tokens | None]
    ) -> None:
        body, dialect, tokens = now
        try:
            before = past.tokens or await self._tokens(past.body, Dialect(past.dialect))
            after = tokens or await self._tokens(body, dialect)
            if before is None or after is None:
                return
            common = agreement(before, after, record.cached_tokens if record.continued else None)
            if common is None:
                return
            at = common
            if common == len(before) and found.token_index is not None:
                at = max(common, found.token_index)  # in the answer
            record.divergence = refined(
                found,
                common=common,
                then_tokens=len(before),
                expected_text=await self._text(before, at),
                got_text=await self._text(after, at),
            )
        except PolyKVError as error:
            log.debug("divergence_not_refined", request_id=record.request_id, reason=error.message)
        finally:
            self.refining -= 1

    async def _text(self, tokens: Tokens, at: int) -> str | None:
        """What a prompt says from a token on, before the next medium; None: nothing."""
        words = tokens[at : at + SNIPPET_TOKENS]
        words = words[: text_prefix(words)]
        return await self._runtime.client.text_of(words) if words else None

    async def _tokens(self, body: bytes | None, dialect: Dialect) -> Tokens | None:
        if body is None:
            return None
        path = _COUNT_PATHS.get(dialect)
        if path is not None:
            return await self._runtime.client.count_tokens(path, body)
        prompt = asking.prompt_tokens(outlines.prompt_of(body))
        return await self._runtime.client.tokenize(prompt) if isinstance(prompt, str) else prompt


def of_links(chain: Iterable[int]) -> Outline:
    """All that is left of a request whose body was too long to remember."""
    parts = [
        Part(section=Section.MESSAGES if at else Section.SYSTEM, digest=link, size_bytes=0)
        for at, link in enumerate(chain)
    ]
    return Outline(tuple(parts))


def _summary(past: Past) -> Outline:
    assert past.body is not None
    return outlines.read(past.body, Dialect(past.dialect)).without_text()


def _share_links(past: Past, chain: Chain) -> bool:
    """Whether two requests have more in common than what many conversations begin with."""
    if past.dialect in (Dialect.LLAMA.value, Dialect.OPENAI_TEXT.value):
        need = max(2, (len(past.chain) + 1) // 2)
    else:
        need = 2
    return len(past.chain) >= need <= len(chain) and past.chain[need - 1] == chain[need - 1]
