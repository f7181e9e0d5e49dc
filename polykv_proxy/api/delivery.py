"""An engine's answer on its way to its client: spliced, or refused in words; and what follows from it.

Rule 1: an answer that is not to carry our block is only watched: its ends are kept, and read when it is over.
Rule 2: a refusal is the engine's, in its own words, but for an overflow, which has one type for all.
Rule 3: once a stream is open its status is spent: what goes wrong from then on is its last event.
Rule 4: what an answer left behind is told to whoever saves KV only if the client got all of it.
Rule 5: a defect in what we add to an answer is logged, and costs nobody the answer.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import structlog

from polykv_proxy.api.answer import AnswerReader, Usage
from polykv_proxy.api.overflow import STATUSES, Overflows
from polykv_proxy.api.reporting import Reporting
from polykv_proxy.api.tail import Tail
from polykv_proxy.core.slots import Content
from polykv_proxy.edge.relay import relay, relay_into_open_stream
from polykv_proxy.edge.splice import RelayResult
from polykv_proxy.errors import NoRoomError, StoppingError

if TYPE_CHECKING:
    from polykv_proxy.api.work import Work
    from polykv_proxy.edge.upstream_response import UpstreamResponse
    from polykv_proxy.errors import EngineGoneError, PolyKVError
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

ERROR_BODY_BYTES = 64 * 1024 * 1024


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]


class Delivery:
    """Delivers the answers of one engine.

    Args:
        runtime: its control plane.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reporting = Reporting(runtime)

    async def deliver(self, work: Work, response: UpstreamResponse) -> bool:
        """Answer a request; returns whether the engine is done with it.

        Args:
            work: the request; it has its slot, and its exchange has no answer or an open stream.
            response: the engine's answer, of which only the head was looked at.
        """
        cached = None if work.plan is None else work.plan.matched
        overflows = Overflows(self._runtime.plane.facts, cached)
        if response.head.status == 200:
            work.entry.answering()
        elif not work.hold.opened and response.head.status not in STATUSES:
            work.entry.refused(response.head.status, overflows)
        if work.hold.opened and response.head.status != 200:
            return await self._refuse_late(work, response, overflows)
        if response.head.status in STATUSES:
            return await self._refuse(work, response, overflows)
        return await self._splice(work, response, overflows)

    async def _splice(self, work: Work, response: UpstreamResponse, overflows: Overflows) -> bool:
        assert work.lease is not None
        stream = response.head.event_stream
        reader = self._reader(work, response, stream=stream)
        tail = None
        if response.head.status == 200:
            tail = Tail(partial(self._reporting.begun, work) if work.asked.stream else None)
        observer = None if tail is None else tail.observe

        def truncated(error: EngineGoneError) -> bytes | None:
            told: PolyKVError = error
            if work.clock is not None and work.clock.expired():
                told = used_up()
            elif work.exchange.cut_off:
                told = StoppingError()
            return work.family.error_event(told.members) if work.family.pooled else None

        if work.hold.opened:
            result = await relay_into_open_stream(
                work.exchange,
                response,
                transform=reader,
                observer=observer,
                on_truncated=truncated,
                mend=overflows.in_events,
            )
        else:
            result = await relay(
                work.exchange,
                response,
                add_headers=self._reporting.headers(work),
                transform=reader,
                observer=observer,
                on_truncated=truncated,
                mend=overflows.in_events,
            )
        usage = Usage()
        if tail is not None and result.completed:
            usage = tail.usage(stream=stream)
            work.entry.began(tail.beginning())
        self._reporting.account(work, usage, result)
        if overflows.seen is not None:
            work.entry.refused(response.head.status, overflows)
        self._reporting.count(work, overflows)
        whole = result.completed and result.error is None and usage.generated_tokens is not None
        asked = work.asked
        if whole and work.content is Content.NEW and asked.cache and overflows.seen is None:  # rule 4
            self._runtime.saver.on_delivered(work.lease, asked.body, adapters=asked.adapters)
        await self._runtime.saver.on_answer(work.lease, usage.cached_tokens)
        return result.completed

    def _reader(self, work: Work, response: UpstreamResponse, *, stream: bool) -> AnswerReader | None:
        """Somebody to put our block into the answer, where it is to carry one (rule 1)."""
        asked = work.asked
        if response.head.status != 200 or not (asked.ours and asked.report):
            return None
        return AnswerReader(
            work.family,
            stream=stream,
            include_usage=asked.include_usage,
            completions=asked.completions,
            block=lambda usage: self._block(work, usage),
        )

    def _block(self, work: Work, usage: Usage) -> dict[str, object] | None:
        """Our block; none where we fail to make it (rule 5)."""
        try:
            return self._reporting.block(work, usage)
        except Exception:
            log.exception("block_failed", request_id=work.entry.record.request_id)
            return None

    async def _refuse(self, work: Work, response: UpstreamResponse, overflows: Overflows) -> bool:
        """The engine refuses a request (rule 2)."""
        status, body = overflows.in_body(response.head.status, await response.read(ERROR_BODY_BYTES))
        work.entry.refused(response.head.status, overflows)
        result = RelayResult(bytes=len(body), completed=True, first_byte_at=monotonic())
        headers = [*response.head.end_to_end(), *self._reporting.headers(work)]
        await work.exchange.respond(status, headers, body)
        self._reporting.account(work, Usage(), result)
        self._reporting.count(work, overflows)
        return True

    async def _refuse_late(self, work: Work, response: UpstreamResponse, overflows: Overflows) -> bool:
        """The engine refuses a request whose stream is open already (rule 3)."""
        body = await response.read(ERROR_BODY_BYTES)
        try:
            members = msgspec.json.decode(body, type=_ErrorBody).error
        except msgspec.DecodeError:
            members = {}
        stand_in = {
            "message": f"the engine answered with status {response.head.status}",
            "type": "server_error",
        }
        error = overflows.in_error(stand_in | members)
        work.entry.refused(response.head.status, overflows)
        await work.hold.fail_with(error)
        self._reporting.count(work, overflows)
        return True


def used_up() -> NoRoomError:
    """The error for a request that was stopped because the cells would not do for all."""
    return NoRoomError(
        "the KV cells of the engine are used up; this answer was the last to begin",
        required_tokens=None,
        ctx_size=None,
    )
