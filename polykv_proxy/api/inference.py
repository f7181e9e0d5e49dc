"""Requests that run in a slot: read, place, attach, splice.

1. Wait for the engine if it does not serve yet.
2. With a pool: get the prompt's exact tokens from the engine and plan how far it can ride.
3. Wait for a slot; the engine never queues.
4. Send the client's bytes with our pins as headers; deliver the answer (``delivery``).
5. Give the slot back, whatever happened.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api import asked as asking
from polykv_proxy.api import strangers
from polykv_proxy.api.delivery import Delivery, used_up
from polykv_proxy.api.hints import Hints
from polykv_proxy.api.hold import Hold, done
from polykv_proxy.api.identity import OUR_HEADER_PREFIX, without_ours
from polykv_proxy.api.matching import Matching
from polykv_proxy.api.recall import Recall
from polykv_proxy.api.sizes import need_of
from polykv_proxy.api.work import Work
from polykv_proxy.core.slots import Content
from polykv_proxy.core.tally import before, took
from polykv_proxy.core.types import Capability, PoolId
from polykv_proxy.core.waiting import Waiting
from polykv_proxy.errors import PolyKVError, SaturatedError, StoppingError

if TYPE_CHECKING:
    from polykv_proxy.api.advice import Advice
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.journal import Entry
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import EngineSample, Tokens
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.edge.upstream_response import UpstreamResponse
    from polykv_proxy.engine.backend import Address
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime
    from polykv_proxy.settings import Settings

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 3
"""Times a request is stopped for its cells until that is its answer: alone it would be, again and again."""


class Inference:
    """The handler of all routes that run in a slot.

    Args:
        runtime: the engine's control plane.
        pooling: what is done to pools.
        upstream: the way to the engine.
        advice: who notices what keeps conversations from sharing.
        settings: limits and queue times.
    """

    def __init__(
        self, runtime: Runtime, pooling: Pooling, upstream: Upstream, advice: Advice, settings: Settings
    ) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._advice = advice
        self._hints = Hints(runtime, pooling)
        self.matching = Matching(runtime, pooling, self._hints)
        self._delivery = Delivery(runtime)
        self._settings = settings
        self._recall = Recall(runtime)

    async def handle(  # noqa: PLR0913 - what is known of a request
        self,
        exchange: Exchange,
        family: Family,
        asked: Asked,
        ask: Ask,
        *,
        entry: Entry,
        tokens: Tokens | None = None,
    ) -> None:
        """Answer one request.

        Args:
            exchange: the request; its body was read.
            family: its API.
            asked: what its body says.
            ask: what it wants of the slots.
            entry: its record.
            tokens: its exact prompt, where that is known already.
        """
        hold = Hold(
            exchange,
            family,
            self._settings.queue,
            stream=asked.stream and family.pooled,
            expired=self._waited_too_long,
        )
        work = Work(exchange, family, asked, ask.scope, hold, entry, tokens=tokens)
        work.model = self._runtime.plane.model_identity
        try:
            await self._run(work, ask)
        except PolyKVError as error:
            if not hold.opened:
                raise
            entry.failed(error.code)
            await hold.fail(error)
        except asyncio.CancelledError:
            if hold.opened and exchange.cut_off and not exchange.responded:
                await hold.fail(StoppingError())
            raise

    async def _run(self, work: Work, ask: Ask) -> None:
        """All of it: past the gate, where sessions come in, and through the slots."""
        if not work.family.pooled:
            return await self._serve(work, ask)
        keeper, asked = self._runtime.gatekeeper, work.asked
        pools = self._runtime.plane.pools
        pool = None if asked.pool_id is None else pools.find(PoolId(asked.pool_id), work.scope)
        visit = work.visit = keeper.visit(ask, pool, lease=asked.lease_id)
        room, request_id = self._runtime.plane.waiting, work.entry.record.request_id
        work.waits = Waiting(ask, visit.known, self._runtime.now_ts(), request_id)
        room.come(work.waits)
        try:
            if visit.waits:
                if visit.known is None and await self._is_stranger(work):
                    return None
                await work.hold.until(visit.wait)
            await self._serve(work, ask)
        finally:
            room.go(work.waits)
            visit.leave(work.cells)

    async def _is_stranger(self, work: Work) -> bool:
        """Whether the engine takes no request with this key; then that is the answer."""
        refusal = await strangers.refusal_of(self._upstream, work.exchange.head)
        if refusal is None:
            return False
        head, body = refusal
        work.entry.refused(head.status)
        await work.exchange.respond(head.status, head.end_to_end(), body)
        return True

    async def _serve(self, work: Work, ask: Ask) -> None:
        asked, saver, line = work.asked, self._runtime.saver, self._runtime.line
        try:
            while True:
                if work.family.pooled and not saver.is_settled:
                    work.place = line.hold(work.place)
                    await work.hold.in_line(saver.settled)
                if asked.pool_id is not None and asked.cache and work.family.pooled:
                    await self.matching.use_named(work, PoolId(asked.pool_id))
                if await self._attempt(work, await self._sized(work, ask)):
                    break
                work.start_over()
                if work.waits is not None:
                    self._runtime.plane.waiting.come(work.waits)
        finally:
            line.let_go(work.place)

    async def _attempt(self, work: Work, ask: Ask) -> bool:
        """Run it once; False where it has to start over, and its client got nothing of it.

        It has to if it was stopped for its cells, or if the engine it waited for lost pools that come back.

        Raises:
            NoRoomError: it was stopped later than that.
        """
        runtime = self._runtime
        visit, waited_s = work.visit, 0.0
        if visit is not None:
            waited_s, visit.waited_s = visit.waited_s, 0.0  # counted once, also where it starts over
        pending = runtime.line.request(
            ask, conversation=work.family.pooled, place=work.place, waited_s=waited_s
        )
        clock = work.clock = asyncio.timeout(None)
        if work.waits is not None:
            work.waits.ticket = pending.ticket
        try:
            work.lease = pending.lease or await work.hold.in_line(pending.wait)
            assert work.lease is not None
            runtime.plane.waiting.go(work.waits)
            if work.family.pooled and not runtime.saver.is_settled:
                return False
            if work.visit is not None and work.lease.session is not None:
                work.visit.known_as(work.lease.session.key)
            async with clock:
                runtime.stoppable[work.lease.lease_id] = clock
                await self._prepare(work)
                await self._go(work, whole=work.asked.completions == 1 and not ask.exclusive)
        except TimeoutError:
            if not clock.expired():
                raise
            return self._stopped(work)
        finally:
            pending.give_up()
            if work.lease is not None:
                runtime.stoppable.pop(work.lease.lease_id, None)
                answered = work.clean and work.content is not Content.OLD
                work.cells = runtime.plane.cells.took(work.lease) if answered else None
                resumable = work.exchange.head.get(b"x-conversation-id") is not None
                self._count_what_it_left(work)
                runtime.finish(work.lease, clean=work.clean, content=work.content, stop=not resumable)
        return True

    def _count_what_it_left(self, work: Work) -> None:
        """An answer that broke off does not tell what it took: that shows once its slot is idle."""
        lease, then = work.lease, work.before
        if work.clean or lease is None or then is None or not self._runtime.plane.leases.holds(lease):
            return

        def show(sample: EngineSample) -> None:
            if (found := took(then, lease.lease_id, sample)) is not None:
                work.entry.broke_off(lease, found)

        self._runtime.left[lease.lease_id] = show

    async def _prepare(self, work: Work) -> None:
        """All that has to be known before it is sent; no await follows."""
        lease, asked = work.lease, work.asked
        assert lease is not None
        if not lease.continues:
            self._advice.notice(asked, work.family, work.scope)
        if asked.pool_id is None and not await self.matching.use_new(work):
            await self.matching.use_longest(work)
        await self.matching.count_media(work)
        await self._swap(work)
        await work.hold.until(partial(self._runtime.stillness.may_begin, lease))
        self.matching.look_again(work)

    async def _swap(self, work: Work) -> None:
        """Let what its slot held be saved, and what it goes on with be restored."""
        lease, asked, saver = work.lease, work.asked, self._runtime.saver
        assert lease is not None
        tokens = None
        if (
            lease.session is not None
            and not lease.continues
            and asked.cache
            and asked.completions == 1
            and not asked.many_prompts
            and saver.may_help(work.scope, adapters=asked.adapters)
        ):
            tokens = await self.matching.tokens_of(work)
        # what has to go for it is gone then
        await work.hold.until(partial(self._runtime.stillness.may_begin, lease))
        going = self._runtime.background(saver.before_request(lease, tokens, work.matched))
        try:
            await work.hold.until(done(going))
        finally:
            going.cancel()

    async def _go(self, work: Work, *, whole: bool) -> None:
        """Send it and pass the answer on.

        Args:
            work: the request.
            whole: whether its first slot holds its whole conversation afterwards.
        """
        assert work.lease is not None
        work.clean = False
        response = await self._send(work)
        if response.head.status >= 500:
            work.content = Content.NOTHING
        elif response.head.status == 200:
            work.content = Content.NEW if whole else Content.NOTHING
        leaving = None
        if work.content is Content.NEW:  # the prompt is computed: the head comes with the first token
            leaving = self._hints.leave_pool(work.lease, work.boundary, work.matched)
        work.clean = await self._delivery.deliver(work, response)
        if work.clean:
            await self._hints.settle(leaving)

    async def _sized(self, work: Work, ask: Ask) -> Ask:
        """The wish with what it needs of the cells; counted where a bound would make it wait."""
        plane, asked = self._runtime.plane, work.asked
        if plane.cells.ledger is None:
            return ask
        slots = len(plane.board.slots) if ask.exclusive else 1
        need = need_of(asked, work.family, work.plan, work.tokens, slots=slots)
        if work.tokens is None and plane.leases.must_count(need, monotonic()):
            await self.matching.tokens_of(work)
            need = need_of(asked, work.family, work.plan, work.tokens, slots=slots)
        facts, tokens = plane.facts, work.tokens
        if facts is not None and tokens is not None and len(tokens) >= facts.ctx_tokens:
            return ask  # beyond the window: the engine says so, and takes no cell
        return replace(ask, need=need)

    def _stopped(self, work: Work) -> bool:
        """It was stopped before the cells were used up; returns False where it is worth another attempt.

        Raises:
            NoRoomError: the client has a part of its answer, or the same would happen again.
        """
        work.stops += 1
        if not work.exchange.responded and work.stops < MAX_ATTEMPTS:
            log.info("request_starts_over", reason="the cells were used up")
            return False
        self._runtime.metrics.on_overflow("cells")
        if work.exchange.responded:
            work.hold.opened = True  # the status is spent, and a stream has its last event
        raise used_up()

    def _waited_too_long(self) -> Exception:
        if not self._runtime.plane.serving:
            return self._runtime.unavailable()
        waited = self._settings.queue.max_wait_s
        return SaturatedError(
            f"no slot became free within {waited:g} s", code="queue_timeout", retry_after_s=5
        )

    async def _send(self, work: Work) -> UpstreamResponse:
        """Send it to its slot, in the way of its engine; returns when the answer begins."""
        head, lease, backend = work.exchange.head, work.lease, self._runtime.backend
        assert lease is not None
        lease.streams = work.asked.stream
        plane = self._runtime.plane
        if len(lease.slots) == 1 and plane.capability is Capability.ZERO_COPY:
            work.before = before(plane.board.slots[lease.slots[0]], plane.sample)
        work.entry.sent(
            self._recall,
            work.asked,
            work.family,
            lease,
            plan=work.plan,
            pool_unknown=work.pool_unknown,
            tokens=work.tokens,
        )
        pin = asking.pinner(work.asked, work.family) if backend.pins_in_body else None

        async def send(address: Address) -> UpstreamResponse:
            body = work.asked.body
            if address.id_slot is not None and pin is not None:
                body = pin(address.id_slot)
            elif work.asked.ignored_slot and not address.headers:
                body = asking.without(body, ("id_slot",))  # nothing overrides it without the patch
            return await self._upstream.send(
                head.method,
                head.target,
                [*without_ours(head), *address.headers],
                body,
                # a client may not declare our headers to be about its own connection
                named=_not_ours(head.connection_named()),
                on_interim=work.exchange.interim,
            )

        plane.leases.on_dispatch(lease, work.plan)
        response = await backend.dispatch(lease, work.plan, work.tokens, send, pinnable=pin is not None)
        if response.head.status != 200:
            backend.forget(lease.slots)  # nobody knows how far it came
        return response


def _not_ours(names: frozenset[bytes]) -> frozenset[bytes]:
    return frozenset(name for name in names if not name.startswith(OUR_HEADER_PREFIX)) if names else names
