"""Requests that run in a slot: read, place, attach, splice.

1. Wait for the engine if it does not serve yet.
2. With a pool: get the prompt's exact tokens from the engine and plan how far it can ride.
3. Wait for a slot; the engine never queues.
4. Send the client's bytes with our pins as headers; splice the answer.
5. Give the slot back, whatever happened.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from polykv_proxy.api import asked as asking
from polykv_proxy.api import views
from polykv_proxy.api.answer import AnswerReader, Usage
from polykv_proxy.api.hints import Hints
from polykv_proxy.api.hold import Hold
from polykv_proxy.api.identity import OUR_HEADER_PREFIX, without_ours
from polykv_proxy.api.lint import judge
from polykv_proxy.api.overflow import STATUSES, Overflows
from polykv_proxy.api.recall import Recall
from polykv_proxy.api.requests import divergence_view
from polykv_proxy.api.sizes import need_of
from polykv_proxy.api.tail import Tail
from polykv_proxy.core.divergence import Cause
from polykv_proxy.core.experience import headroom
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import PoolId
from polykv_proxy.edge.head import HOP_BY_HOP
from polykv_proxy.edge.relay import RelayResult, relay, relay_into_open_stream
from polykv_proxy.errors import EngineGoneError, NoRoomError, PolyKVError, SaturatedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from polykv_proxy.api.advice import Advice
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.journal import Entry
    from polykv_proxy.config import Settings
    from polykv_proxy.core.decisions import AttachPlan, Lease
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import Scope, Tokens
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import Headers
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.edge.upstream_response import UpstreamResponse
    from polykv_proxy.engine.backend import Address
    from polykv_proxy.gatekeeper import Visit
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

T = TypeVar("T")

ERROR_BODY_BYTES = 64 * 1024 * 1024

MAX_LOOKS = 8
"""Times a request looks for somebody to share with before it runs on what there is."""

MIN_MATCH_BYTES = 256
"""A body below this cannot hold a prompt that is worth a match."""


class _ErrorBody(msgspec.Struct):
    error: dict[str, object]


@dataclass(slots=True)
class _Work:
    """One request on its way."""

    exchange: Exchange
    family: Family
    asked: Asked
    scope: Scope
    hold: Hold
    entry: Entry
    plan: AttachPlan | None = None
    tokens: Tokens | None = None
    """Exact tokens of the prompt, where they were asked for."""
    pool_unknown: bool = False
    unpooled: str | None = None
    """Why it does not ride on a pool that it named and that is there."""
    lease: Lease | None = None
    content: Content = Content.OLD
    """What its slot holds, as far as it came."""
    clean: bool = True
    """Whether the engine is done with it."""
    told: bool = False
    """Whether the answer's own account of itself was taken."""
    visit: Visit | None = None
    """Its session's presence, where it belongs to one."""
    cells: int | None = None
    """That it took beyond what it shared."""
    clock: asyncio.Timeout | None = None
    """Its time is over when it is stopped for its cells."""
    boundary: int = 0
    """Leading tokens that others are expected to begin with, as far as the client hinted at any."""

    @property
    def matched(self) -> int:
        """Leading tokens that the pool it rides on holds."""
        return 0 if self.plan is None else self.plan.matched


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
        self._pooling = pooling
        self._upstream = upstream
        self._advice = advice
        self._hints = Hints(runtime, pooling)
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
        hold = Hold(exchange, family, self._settings.queue, stream=asked.stream and family.pooled)
        work = _Work(exchange, family, asked, ask.scope, hold, entry, tokens=tokens)
        try:
            await self._run(work, ask)
        except PolyKVError as error:
            if not hold.opened:
                raise
            entry.failed(error.code)
            await hold.fail(error)

    async def _run(self, work: _Work, ask: Ask) -> None:
        """All of it: past the gate, where sessions come in, and through the slots."""
        if not work.family.pooled:
            return await self._serve(work, ask)
        keeper, asked = self._runtime.gatekeeper, work.asked
        pools = self._runtime.plane.pools
        pool = None if asked.pool_id is None else pools.find(PoolId(asked.pool_id), work.scope)
        visit = work.visit = keeper.visit(ask, pool, lease=asked.lease_id)
        try:
            if visit.waits:
                await work.hold.until(visit.wait, self._waited_too_long)
            await self._serve(work, ask)
        finally:
            visit.leave(work.cells)

    async def _serve(self, work: _Work, ask: Ask) -> None:
        asked = work.asked
        if asked.pool_id is not None and asked.cache and work.family.pooled:
            await self._plan(work, PoolId(asked.pool_id))
        ask = await self._sized(work, ask)
        while not await self._attempt(work, ask):
            log.info("request_starts_over", reason="the cells were used up")
            work.lease, work.content, work.clean, work.told = None, Content.OLD, True, False

    async def _attempt(self, work: _Work, ask: Ask) -> bool:
        """Run it once; False where it was stopped for its cells before the client got anything of it.

        Raises:
            NoRoomError: it was stopped later than that.
        """
        runtime = self._runtime
        pending = runtime.request(ask, conversation=work.family.pooled)
        clock = work.clock = asyncio.timeout(None)
        try:
            work.lease = pending.lease or await work.hold.until(pending.wait, self._waited_too_long)
            assert work.lease is not None
            if work.visit is not None and work.lease.session is not None:
                work.visit.known_as(work.lease.session.session_id)
            await self._prepare(work)
            async with clock:
                runtime.stoppable[work.lease.lease_id] = clock
                await self._go(work, whole=work.asked.completions == 1 and not ask.exclusive)
        except TimeoutError:
            if not clock.expired():
                raise
            return self._stopped(work)
        finally:
            pending.give_up()
            if work.lease is not None:
                runtime.stoppable.pop(work.lease.lease_id, None)
                work.cells = runtime.plane.cells.took(work.lease) if work.clean else None
                resumable = work.exchange.head.get(b"x-conversation-id") is not None
                runtime.finish(work.lease, clean=work.clean, content=work.content, stop=not resumable)
        return True

    async def _prepare(self, work: _Work) -> None:
        """All that has to be known before it is sent; no await follows."""
        lease, asked = work.lease, work.asked
        assert lease is not None
        if not lease.continues:
            self._advice.notice(asked, work.family, work.scope)
        if asked.pool_id is None and not await self._moves(work):
            await self._find_pool(work)
        await self._runtime.may_begin(lease)
        self._look_again(work)

    async def _go(self, work: _Work, *, whole: bool) -> None:
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
        work.clean = (await self._answer(work, response)).completed
        if work.clean:
            await self._hints.settle(leaving)

    async def _sized(self, work: _Work, ask: Ask) -> Ask:
        """The wish with what it needs of the cells; counted where a bound would make it wait."""
        plane, asked = self._runtime.plane, work.asked
        if plane.cells.ledger is None:
            return ask
        slots = len(plane.board.slots) if ask.exclusive else 1
        need = need_of(asked, work.family, work.plan, work.tokens, slots=slots)
        if work.tokens is None and plane.must_count(need, monotonic()):
            await self._tokens_of(work)
            need = need_of(asked, work.family, work.plan, work.tokens, slots=slots)
        facts, tokens = plane.facts, work.tokens
        if facts is not None and tokens is not None and len(tokens) >= facts.ctx_tokens:
            return ask  # beyond the window: the engine says so, and takes no cell
        return replace(ask, need=need)

    def _stopped(self, work: _Work) -> bool:
        """It was stopped before the cells were used up; returns False where its client had nothing yet.

        Raises:
            NoRoomError: the client has a part of its answer.
        """
        if not work.exchange.responded:
            return False
        self._runtime.metrics.on_overflow("cells")
        work.hold.opened = True  # the status is spent, and a stream has its last event
        raise _used_up()

    def _waited_too_long(self) -> Exception:
        if not self._runtime.plane.serving:
            return UnavailableError("the engine is not ready", code="engine_loading", retry_after_s=5)
        waited = self._settings.queue.max_wait_s
        return SaturatedError(
            f"no slot became free within {waited:g} s", code="queue_timeout", retry_after_s=5
        )

    # -- pools -------------------------------------------------------------------------------------------

    async def _plan(self, work: _Work, pool_id: PoolId) -> None:
        """Find out how far the request can ride on the pool it names; never an error for the pool's sake."""
        plane = self._runtime.plane
        if not plane.serving:
            await work.hold.until(self._serving, self._waited_too_long)
        pool = plane.pools.find(pool_id, work.scope)
        if pool is None and plane.tree.get(pool_id) is not None:
            log.info("pool_of_another_key", pool_id=pool_id)
        if pool is not None and pool.comes_back:
            going = self._runtime.background(self._pooling.revive(pool))
            pool = (await work.hold.until(_patience(going), self._waited_too_long))[0]
        if pool is None or not pool.resident or not plane.capability.has_pools:
            work.pool_unknown = True
            return
        if self._runtime.backend.pins_in_body and asking.pinner(work.asked, work.family) is None:
            work.unpooled = "not_pinnable"
            return
        if (tokens := await self._tokens_of(work)) is None:
            work.unpooled = "not_tokenizable"
            return
        work.plan = plane.pools.plan_attach(
            pool,
            tokens,
            cap=work.asked.shared_prefix_tokens,
            strict=work.asked.strict,
            now_ts=self._runtime.now_ts(),
        )

    async def _moves(self, work: _Work) -> bool:
        """Plan for the pool that the session was told to move to; whether it was told so and can."""
        assert work.lease is not None
        session = work.lease.session
        if session is None or session.moves_to is None or not work.asked.cache:
            return False
        await self._plan(work, session.moves_to)
        if work.plan is None:  # it is gone, and was not asked for by this request
            session.moves_to, work.pool_unknown = None, False
        return work.plan is not None

    async def _find_pool(self, work: _Work) -> None:
        """A request that names no pool: attach it to the longest match, or share with who computes the same.

        1. It continues what its slot holds, or is too short to gain anything: nothing to do.
        2. Another conversation has much more in common with it than any pool: that part becomes a pool, as
           soon as the other has passed it; then look again.
        3. The pool that holds most of it, if that is enough.

        A boundary that the client hinted at makes a shorter prefix worth a pool, and ends it there.
        """
        plane, lease, asked = self._runtime.plane, work.lease, work.asked
        assert lease is not None
        if not self.may_match(work.family, work.asked) or lease.continues:  # 1
            return
        tokens = await self._tokens_of(work)
        if tokens is None or len(tokens) < plane.policy.min_match_tokens:
            return
        if asked.completions == 1:
            work.boundary = await self._hints.boundary(asked, work.family, work.scope, tokens)
        since = monotonic()
        for _ in range(MAX_LOOKS):
            found = plane.pools.match(tokens, work.scope, now_ts=self._runtime.now_ts())
            matched = 0 if found is None else found.matched
            leader = plane.shareable(tokens, lease, matched, work.boundary)
            if leader is None:
                break
            slot, common = leader
            own = len(tokens) - matched
            share = self._pooling.share_from(slot, common, own_tokens=own, since=since)
            going = self._runtime.background(share)
            if not (await work.hold.until(_patience(going), self._waited_too_long))[0]:
                break  # 2: it was not to be
        work.plan = plane.pools.match(tokens, work.scope, now_ts=self._runtime.now_ts())  # 3

    def may_match(self, family: Family, asked: Asked) -> bool:
        """Whether a request that names no pool may find one."""
        plane = self._runtime.plane
        return (
            plane.policy.auto_match
            and plane.capability.has_pools
            and family.pooled
            and asked.cache
            and asked.auto_match
            and not asked.many_prompts
            and len(asked.body) >= MIN_MATCH_BYTES
            and not (self._runtime.backend.pins_in_body and asking.pinner(asked, family) is None)
        )

    def _look_again(self, work: _Work) -> None:
        """The world may have changed while the request waited: no await between this and the sending.

        Raises:
            EngineGoneError: the lease is of an engine that is gone.
        """
        assert work.lease is not None
        if work.lease.ended:
            raise EngineGoneError("the engine was restarted")
        plane, tokens = self._runtime.plane, work.tokens
        if tokens is not None:
            plane.on_prompt(work.lease, tokens)
        if work.plan is not None:
            pool = work.plan.pool
            if not pool.resident or plane.pools.find(pool.pool_id, work.scope) is not pool:
                # its number may be another pool's by now
                work.plan, work.pool_unknown = None, work.asked.pool_id is not None
        plan = work.plan
        plane.cells.settle(
            work.lease,
            prompt=None if tokens is None else len(tokens),
            shared=0 if plan is None else plan.tokens,
            pool=None if plan is None else plan.pool,
        )

    async def _serving(self, timeout_s: float) -> bool | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._runtime.serving.wait()
        except TimeoutError:
            return None

    async def _tokens_of(self, work: _Work) -> Tokens | None:
        """The exact tokens of a request on its way; whoever needs them first asks for them."""
        if work.tokens is None:
            work.tokens = await self.tokens(work.family, work.asked)
        return work.tokens

    async def tokens(self, family: Family, asked: Asked) -> Tokens | None:
        """A prompt's exact token ids; None where the engine will have to say what it made of it."""
        client = self._runtime.client
        try:
            if family.count_path is not None:
                return await self._runtime.backend.prompt_tokens(family.count_path, asked.body)
            prompt = asking.prompt_tokens(asked.prompt) if asked.prompt is not None else None
            return await client.tokenize(prompt) if isinstance(prompt, str) else prompt
        except PolyKVError as error:
            # the engine will refuse the request itself, in its own words
            log.debug("prompt_not_tokenized", api=family.dialect.value, reason=error.message)
            return None

    # -- the engine --------------------------------------------------------------------------------------

    async def _send(self, work: _Work) -> UpstreamResponse:
        """Send it to its slot, in the way of its engine; returns when the answer begins."""
        head, lease, backend = work.exchange.head, work.lease, self._runtime.backend
        assert lease is not None
        lease.streams = work.asked.stream
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

        if work.plan is not None and work.plan.tokens:
            self._runtime.plane.on_dispatch(lease, work.plan)
        response = await backend.dispatch(lease, work.plan, work.tokens, send, pinnable=pin is not None)
        if response.head.status != 200:
            backend.forget(lease.slots)  # nobody knows how far it came
        return response

    async def _answer(self, work: _Work, response: UpstreamResponse) -> RelayResult:
        """Splice the answer to the client; what nobody writes into is only watched."""
        work.entry.answering(response.head.status)
        cached = None if work.plan is None else work.plan.tokens
        overflows = Overflows(self._runtime.plane.facts, cached)
        if work.hold.opened and response.head.status != 200:
            return await self._refused_late(work, response, overflows)
        if response.head.status in STATUSES:
            return await self._refused(work, response, overflows)
        stream = (response.head.get(b"content-type") or b"").startswith(b"text/event-stream")
        reader = self._reader(work, response, stream=stream)
        tail = Tail() if response.head.status == 200 else None
        observer = None if tail is None else tail.observe

        def truncated(error: EngineGoneError) -> bytes | None:
            told = _used_up() if work.clock is not None and work.clock.expired() else error
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
                add_headers=self._headers(work),
                transform=reader,
                observer=observer,
                on_truncated=truncated,
                mend=overflows.in_events,
            )
        usage = Usage()
        if tail is not None and result.completed:
            usage = tail.usage(stream=stream)
            work.entry.began(tail.beginning())
        self._account(work, usage, result, ttft=tail is not None and work.asked.stream)
        self._count(work, overflows)
        return result

    async def _refused(self, work: _Work, response: UpstreamResponse, overflows: Overflows) -> RelayResult:
        """The engine refuses a request: in its own words, but for an overflow, which has one type for all."""
        status, body = overflows.in_body(response.head.status, await response.read(ERROR_BODY_BYTES))
        hidden = HOP_BY_HOP | response.head.connection_named() | {b"content-length"}
        headers = [field for field in response.head.headers if field[0].lower() not in hidden]
        result = RelayResult(bytes=len(body), completed=True, first_byte_at=monotonic())
        await work.exchange.respond(status, [*headers, *self._headers(work)], body)
        self._account(work, Usage(), result)
        self._count(work, overflows)
        return result

    async def _refused_late(
        self, work: _Work, response: UpstreamResponse, overflows: Overflows
    ) -> RelayResult:
        """The engine refuses a request whose stream is open already: its error becomes the last event."""
        body = await response.read(ERROR_BODY_BYTES)
        try:
            members = msgspec.json.decode(body, type=_ErrorBody).error
        except msgspec.DecodeError:
            members = {}
        stand_in = {
            "message": f"the engine answered with status {response.head.status}",
            "type": "server_error",
        }
        await work.hold.fail_with(overflows.in_error(stand_in | members))
        self._count(work, overflows)
        return RelayResult(completed=True)

    def _reader(self, work: _Work, response: UpstreamResponse, *, stream: bool) -> AnswerReader | None:
        """Somebody to put our block into the answer, where it is to carry one."""
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

    def _account(self, work: _Work, usage: Usage, result: RelayResult, *, ttft: bool = False) -> None:
        """What the answer proves: how long the client waited, and whether the pool was really used.

        Args:
            work: the request.
            usage: what the engine says that it took.
            result: how it went.
            ttft: whether its first byte came with its first token.
        """
        assert work.lease is not None
        runtime, plan = self._runtime, work.plan
        first = result.first_byte_at if result.first_byte_at is not None else monotonic()
        waited = first - work.exchange.arrived_at
        work.entry.first_byte(waited)
        if ttft and result.first_byte_at is not None:
            runtime.plane.on_first_byte(work.lease, waited)
            runtime.metrics.on_first_byte(waited)
        work.entry.answered(usage, result.error)
        if result.completed and usage.generated_tokens is not None and work.asked.completions == 1:
            runtime.plane.cells.on_answer(work.lease, usage.generated_tokens)
        self._tell(work, usage)
        if plan is None:
            return
        cached = usage.cached_tokens
        if runtime.plane.pools.on_attached(plan, work.lease.session, cached):
            runtime.metrics.on_recomputed("attach_shortfall", plan.tokens - (cached or 0))
            log.warning(
                "attach_shortfall",
                pool_id=plan.pool.pool_id,
                planned_tokens=plan.tokens,
                cached_tokens=cached,
            )

    def _tell(self, work: _Work, usage: Usage) -> None:
        """The answer's own account of itself goes to its session; telling it again changes nothing."""
        lease = work.lease
        if lease is None or lease.session is None or work.told or work.asked.completions != 1:
            return
        if usage.context_tokens is not None:
            lease.session.context_tokens = lease.context_tokens = usage.context_tokens
        if usage.generated_tokens is not None and usage.decode_s is not None:
            self._runtime.plane.on_answer(lease, usage.generated_tokens, usage.decode_s)
            work.told = True

    def _count(self, work: _Work, overflows: Overflows) -> None:
        """What became of the request, for the metrics."""
        metrics, record, plan = self._runtime.metrics, work.entry.record, work.plan
        if overflows.seen is not None:
            metrics.on_overflow(overflows.seen)
        elif work.family.pooled and record.prompt_tokens is not None:
            saved = 0 if plan is None else min(plan.tokens, record.cached_tokens or 0)
            metrics.on_query(None if plan is None else plan.pool, saved)
        found = record.divergence
        if found is not None and found.cause is not Cause.NEW_SESSION and record.prompt_tokens is not None:
            metrics.on_recomputed(found.cause, record.prompt_tokens - (record.cached_tokens or 0))

    def _headers(self, work: _Work) -> Headers:
        assert work.lease is not None
        added: list[tuple[bytes, bytes]] = []
        if work.plan is not None:
            added.append((b"x-pool-id", work.plan.pool.pool_id.encode()))
            added.append((b"x-cached-prefix-tokens", b"%d" % work.plan.tokens))
        if work.lease.session is not None:
            name = work.lease.session.session_id
            added.append((b"x-session-id", name.encode("ascii", "backslashreplace")))
        if work.visit is not None and work.visit.sessions_remaining is not None:
            added.append((b"x-sessions-remaining", b"%d" % work.visit.sessions_remaining))
        return added

    def _block(self, work: _Work, usage: Usage) -> dict[str, object]:
        """Our block in the answer; unknown is null."""
        assert work.lease is not None
        plane, plan, session = self._runtime.plane, work.plan, work.lease.session
        self._tell(work, usage)
        used, facts = usage.context_tokens, plane.facts
        total = None if facts is None else facts.ctx_tokens
        shared = None
        if plan is not None and usage.cached_tokens is not None:
            shared = min(plan.tokens, usage.cached_tokens)
        block: dict[str, object] = {
            "session_id": None if session is None else session.session_id,
            "pool_id": work.asked.pool_id if plan is None else plan.pool.pool_id,
            "n_pool_shared": shared,
            "pool_match": None if plan is None else plan.matched,
            "pool_len": None if plan is None else plan.pool.prefix_len,
            "session_tps": None if session is None else views.rounded(session.rate.tps),
            "ctx_used": used,
            "ctx_headroom_tokens": headroom(used, total, plane.sample),
            "backpressure": None if work.visit is None else work.visit.backpressure,
        }
        if work.unpooled is not None:
            block["unpooled_reason"] = work.unpooled
        if work.pool_unknown:
            block["pool_unknown"] = True
        if (divergence := work.entry.shown(usage)) is not None:
            block["divergence"] = divergence_view(divergence)
        if work.asked.ignored_slot:
            block["id_slot_ignored"] = True
        if work.asked.masked:
            block["billing_header_masked"] = True
        if used is not None and facts is not None and used + 1 >= facts.ctx_tokens:
            block["context_full"] = True
        if odd := judge(work.asked.body, work.family.dialect):
            block["lint"] = odd
        return block


def _used_up() -> NoRoomError:
    return NoRoomError(
        "the KV cells of the engine are used up; this answer was the last to begin",
        required_tokens=None,
        ctx_size=None,
    )


def _not_ours(names: frozenset[bytes]) -> frozenset[bytes]:
    return frozenset(name for name in names if not name.startswith(OUR_HEADER_PREFIX)) if names else names


def _patience(going: asyncio.Future[T]) -> Callable[[float], Awaitable[tuple[T] | None]]:
    """A wait for an outcome: None while there is none."""

    async def wait(timeout_s: float) -> tuple[T] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return (await asyncio.shield(going),)
        except TimeoutError:
            return None

    return wait
