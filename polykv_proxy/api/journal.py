"""Keeps the records of requests, and finds out why one computed more than it had to.

Nothing here is on a request's way but a few assignments: an explanation is looked for once the engine has
said that reuse fell short.
"""

from __future__ import annotations

import asyncio
from array import array
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import structlog
from structlog.contextvars import bind_contextvars, reset_contextvars

from polykv_proxy.api import outline as outlines
from polykv_proxy.api.answer import Usage
from polykv_proxy.api.families import Dialect
from polykv_proxy.api.recall import of_links
from polykv_proxy.core.divergence import Cause, Divergence, Now, diagnose, fell_short, refined
from polykv_proxy.core.outlines import Outline, is_related
from polykv_proxy.core.past import Past
from polykv_proxy.core.records import NAMELESS, RecordBook, RequestState
from polykv_proxy.core.types import agreement
from polykv_proxy.engine.overflow import TYPE as OVERFLOW
from polykv_proxy.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextvars import Token
    from types import TracebackType

    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.overflow import Overflows
    from polykv_proxy.api.recall import Candidate, Recall
    from polykv_proxy.core.decisions import AttachPlan, Lease
    from polykv_proxy.core.records import ClientNames, RequestRecord
    from polykv_proxy.core.tally import Took
    from polykv_proxy.core.types import Scope, Tokens


log = structlog.get_logger(__name__)

_IDS = ("request_id", "x_request_id", "trace_id")
"""What every line of the log has that is written on a request's behalf."""

_WHERE = ("path", "engine", "slot", "session_id", "continued", "pool_id", "error_code")
_TOKENS = ("planned_tokens", "prompt_tokens", "cached_tokens", "generated_tokens")
"""What the line at its end has besides."""


def _known(record: RequestRecord, names: Iterable[str]) -> dict[str, Any]:
    """Those members of a record that are known."""
    return {name: value for name in names if (value := getattr(record, name)) is not None}


def _logged(record: RequestRecord) -> dict[str, Any]:
    """What became of a request, for the log."""
    times = {"waited_ms": record.waited_s, "ttft_ms": record.ttft_s, "duration_ms": record.duration_s}
    told = {name: round(1000.0 * seconds, 3) for name, seconds in times.items() if seconds is not None}
    cause = None if record.divergence is None else record.divergence.cause.value
    seen = {"state": record.state.value} | _known(record, (*_WHERE, *_TOKENS)) | told
    return seen if cause is None else seen | {"divergence": cause}


class Entry:
    """One request's record while the request is on its way; a context manager around all of it.

    What is logged meanwhile on its behalf has its ids, and its end is logged.

    Attributes:
        record: what is kept of it.
    """

    __slots__ = (
        "_answer",
        "_arrived_at",
        "_asked",
        "_candidates",
        "_chosen",
        "_divergence",
        "_explained",
        "_family",
        "_ids",
        "_kept",
        "_lease",
        "_own_outline",
        "_plan",
        "_recall",
        "_tokens",
        "_usage",
        "record",
    )

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self._arrived_at = monotonic()
        self._recall: Recall | None = None
        self._asked: Asked | None = None
        self._family: Family | None = None
        self._lease: Lease | None = None
        self._plan: AttachPlan | None = None
        self._tokens: Tokens | None = None
        self._candidates: list[Candidate] = []
        self._chosen: Candidate | None = None
        self._usage = Usage()
        self._answer = b""
        self._own_outline: Outline | None = None
        self._divergence: Divergence | None = None
        self._explained = False
        self._kept = False
        self._ids: Mapping[str, Token[Any]] = {}

    def __enter__(self) -> Self:
        self._ids = bind_contextvars(**_known(self.record, _IDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.record.end(RequestState.DONE)
        elif isinstance(error, PolyKVError):
            self.failed(error.code)
        elif isinstance(error, asyncio.CancelledError):
            self.record.end(RequestState.CANCELLED)
        else:
            self.failed(PolyKVError.code)
        self.record.duration_s = monotonic() - self._arrived_at
        if self._lease is not None:
            self.record.slot = self._lease.slots[0]  # where the engine chose one, it is known by now
        self._close()
        log.info("request", **_logged(self.record))
        reset_contextvars(**self._ids)

    # -- on its way --------------------------------------------------------------------------------------

    def sent(  # noqa: PLR0913 - all that is known when a request goes out
        self,
        recall: Recall,
        asked: Asked,
        family: Family,
        lease: Lease,
        *,
        plan: AttachPlan | None,
        pool_unknown: bool,
        tokens: Tokens | None,
    ) -> None:
        """The request goes to the engine now; what its conversation holds is looked at before it changes."""
        record = self.record
        record.waited_s = monotonic() - self._arrived_at
        record.engine, record.slot = recall.engine, lease.slots[0]
        record.continued, record.pool_unknown = lease.continues, pool_unknown
        if plan is not None:
            record.pool_id, record.planned_tokens = plan.pool.pool_id, plan.tokens
        if tokens is not None:
            record.prompt_tokens = len(tokens)
        self._recall, self._asked, self._family, self._lease = recall, asked, family, lease
        self._plan, self._tokens = plan, tokens
        if lease.session is not None:
            record.session_id = lease.session.session_id
            self._candidates = recall.candidates(lease, asked.chain)

    def answering(self) -> None:
        """The engine answers, and does not refuse."""
        self._kept = True

    def refused(self, status: int, overflows: Overflows | None = None) -> None:
        """The engine refuses, in its own words, or says even later that there is no more room."""
        self.failed(f"engine_status_{status}" if overflows is None or overflows.seen is None else OVERFLOW)
        if self.record.prompt_tokens is None and overflows is not None:
            self.record.prompt_tokens = overflows.required_tokens

    def began(self, data: bytes) -> None:
        """The first bytes of the answer."""
        self._answer = data

    def first_token(self, ttft_s: float) -> None:
        """A stream's answer begins to reach the client."""
        self.record.ttft_s = ttft_s

    def answered(self, usage: Usage, error: PolyKVError | None) -> None:
        """The answer is through, or broke off.

        Args:
            usage: what the engine said that it took.
            error: why it broke off.
        """
        record = self.record
        self._usage = usage
        if usage.prompt_tokens is not None:  # else it may have been counted
            record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.generated_tokens = usage.generated_tokens
        if error is not None:
            self.failed(error.code)
        record.divergence = self.divergence(usage)

    def broke_off(self, lease: Lease, found: Took) -> None:
        """What the engine's counters show of a request whose answer did not tell."""
        record = self.record
        if (
            lease is not self._lease
            or record.state is RequestState.RUNNING
            or record.generated_tokens is not None
        ):
            return  # it started over, or told it after all
        record.generated_tokens = found.generated
        if found.prompt is not None:
            record.prompt_tokens, record.cached_tokens = found.prompt, found.cached

    def failed(self, code: str) -> None:
        """It was refused, or broke off."""
        self.record.end(RequestState.FAILED, code)

    # -- why ---------------------------------------------------------------------------------------------

    def divergence(self, usage: Usage) -> Divergence | None:
        """Why less was reused than there was, as far as can be told without asking the engine."""
        if not self._explained and usage.cached_tokens is not None and usage.prompt_tokens is not None:
            self._explained = True
            self._divergence = self._explain(usage.cached_tokens, usage.prompt_tokens)
        return self._divergence

    def shown(self, usage: Usage) -> Divergence | None:
        """``divergence`` for the answer's block: only of a conversation that had something."""
        found = self.divergence(usage)
        return None if found is None or found.cause is Cause.NEW_SESSION else found

    def _explain(self, cached: int, prompt: int) -> Divergence | None:
        recall, lease, asked = self._recall, self._lease, self._asked
        if (
            recall is None
            or lease is None
            or lease.session is None
            or asked is None
            or not fell_short(cached, prompt, prompt)
        ):
            return None
        if lease.continues and not self._candidates:
            return None  # it went on with something that is not remembered
        then, outline = None, Outline(())
        for candidate in self._candidates:
            resident = candidate.past.resident_tokens
            if candidate.certain and not fell_short(cached, prompt, resident):
                return None
            before, outline = self._outlines(candidate.past)
            if candidate.certain or is_related(before, outline):
                self._chosen = candidate
                then = candidate.then(before)
                break
        now = Now(
            outline=outline,
            epoch=recall.epoch,
            prompt_tokens=prompt,
            cached_tokens=cached,
            attached_tokens=0 if self._plan is None else self._plan.tokens,
            cache=asked.cache,
            continues=lease.continues,
        )
        found = diagnose(then, now)
        if found is None or found.section is None or found.token_index is not None:
            return found
        return self._located(found, cached, continues=lease.continues)

    def _located(self, found: Divergence, cached: int, *, continues: bool) -> Divergence:
        """With a token index, where both prompts' tokens are at hand."""
        then = None if self._chosen is None else self._chosen.past.tokens
        if then is None or self._tokens is None or found.expected_text is found.got_text is None:
            return found
        common = agreement(then, self._tokens, cached if continues else None)
        if common is None:
            return found
        return refined(
            found,
            common=common,
            then_tokens=len(then),
            expected_text=None,
            got_text=None,
        )

    def _outlines(self, past: Past) -> tuple[Outline, Outline]:
        """What the earlier request consisted of, and this one."""
        assert self._asked is not None
        assert self._family is not None
        if past.body is not None:
            before = outlines.read(past.body, Dialect(past.dialect))
        elif past.outline is not None:
            before = past.outline
        else:
            return of_links(past.chain), of_links(self._asked.chain)
        if self._own_outline is None:
            self._own_outline = outlines.read(self._asked.body, self._family.dialect)
        return before, self._own_outline

    # -- afterwards --------------------------------------------------------------------------------------

    def _close(self) -> None:
        """The request is over: remember it, and look closer at what it diverged from."""
        found, recall, lease = self._divergence, self._recall, self._lease
        asked, family = self._asked, self._family
        if recall is None or asked is None or family is None or lease is None or lease.session is None:
            return
        if found is not None and found.section is not None and self._chosen is not None:
            recall.refine(self.record, self._chosen.past, (asked.body, family.dialect, self._tokens))
        if not self._kept or asked.completions > 1 or asked.many_prompts:
            return
        usage, resident = self._usage, None
        if self.record.state is RequestState.DONE and usage.context_tokens is not None:
            # the last generated token was not computed any more
            resident = usage.context_tokens - min(1, usage.generated_tokens or 0)
        recall.remember(
            Past(
                session=lease.session,
                dialect=family.dialect.value,
                chain=array("Q", asked.chain),
                epoch=recall.epoch,
                body=asked.body,
                prompt_tokens=usage.prompt_tokens,
                resident_tokens=resident,
                answer=self._answer,
                tokens=self._tokens,
            )
        )


class Journal:
    """All records of one proxy.

    Args:
        keep: how many.
        now_ts: epoch seconds.
    """

    def __init__(self, keep: int, now_ts: Callable[[], float]) -> None:
        self._now_ts = now_ts
        self.book = RecordBook(keep, f"{int(now_ts()):x}")

    def open(self, path: str, scope: Scope, names: ClientNames = NAMELESS) -> Entry:
        """A request arrived."""
        return Entry(self.book.begin(path, scope, self._now_ts(), names))
