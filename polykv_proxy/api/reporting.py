"""What an answer proves, told to its client, to the control plane and to the metrics."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api import views
from polykv_proxy.api.lint import judge
from polykv_proxy.api.requests import divergence_view
from polykv_proxy.core.divergence import Cause
from polykv_proxy.core.experience import headroom

if TYPE_CHECKING:
    from polykv_proxy.api.answer import Usage
    from polykv_proxy.api.overflow import Overflows
    from polykv_proxy.api.work import Work
    from polykv_proxy.edge.head import Headers
    from polykv_proxy.edge.splice import RelayResult
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)


class Reporting:
    """Tells what became of requests.

    Args:
        runtime: the engine's control plane.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def begun(self, work: Work) -> None:
        """The first token of a stream passes, on its way to the client: how long that waited shows now."""
        assert work.lease is not None
        waited = monotonic() - work.exchange.arrived_at
        work.entry.first_token(waited)
        self._runtime.plane.leases.on_first_byte(work.lease, waited)
        self._runtime.metrics.on_first_byte(waited)

    def account(self, work: Work, usage: Usage, result: RelayResult) -> None:
        """What the answer proves: whether the pool was really used.

        Args:
            work: the request.
            usage: what the engine says that it took.
            result: how it went.
        """
        assert work.lease is not None
        runtime, plan = self._runtime, work.plan
        work.entry.answered(usage, result.error)
        if result.completed and usage.generated_tokens is not None and work.asked.completions == 1:
            runtime.plane.cells.on_answer(work.lease, usage.generated_tokens)
        self.tell(work, usage, whole=result.completed)
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

    def tell(self, work: Work, usage: Usage, *, whole: bool = False) -> None:
        """The answer's own account of itself goes to its session; telling it again changes nothing.

        Args:
            work: the request.
            usage: what the engine says that it took.
            whole: whether it says no more; some APIs never say how long it took.
        """
        lease = work.lease
        several = work.asked.completions != 1 or work.asked.many_prompts
        if lease is None or lease.session is None or work.told or several:
            return
        if usage.context_tokens is not None:
            lease.session.context_tokens = lease.context_tokens = usage.context_tokens
        if usage.generated_tokens is not None and (whole or usage.decode_s is not None):
            self._runtime.plane.on_answer(lease, usage.generated_tokens, usage.decode_s)
            work.told = True

    def count(self, work: Work, overflows: Overflows) -> None:
        """What became of the request, for the metrics."""
        metrics, record, plan = self._runtime.metrics, work.entry.record, work.plan
        if overflows.seen is not None:
            metrics.on_overflow(overflows.seen)
        elif work.family.pooled and record.computed_tokens is not None:
            saved = 0 if plan is None else min(plan.tokens, record.cached_tokens or 0)
            metrics.on_query(None if plan is None else plan.pool, saved)
        found = record.divergence
        if found is not None and found.cause is not Cause.NEW_SESSION and record.computed_tokens is not None:
            metrics.on_recomputed(found.cause, record.computed_tokens)

    def headers(self, work: Work) -> Headers:
        """The head fields of ours: the pool, the leading tokens it is to share, the session."""
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

    def block(self, work: Work, usage: Usage) -> dict[str, object]:
        """Our block in the answer; unknown is null."""
        assert work.lease is not None
        plane, plan, session = self._runtime.plane, work.plan, work.lease.session
        self.tell(work, usage)
        used, facts = usage.context_tokens, plane.facts
        total = None if facts is None else facts.ctx_tokens
        shared = None
        if plan is not None and usage.cached_tokens is not None:
            shared = min(plan.tokens, usage.cached_tokens)
        block: dict[str, object] = {
            "request_id": work.entry.record.request_id,
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
        if work.lease.restored_tokens:
            block["restored_tokens"] = work.lease.restored_tokens
        if (divergence := work.entry.shown(usage)) is not None:
            block["divergence"] = divergence_view(divergence)
        if work.asked.ignored_slot:
            block["id_slot_ignored"] = True
        if work.asked.masked:
            block["billing_header_masked"] = True
        if usage.hit_wall(total, work.asked.only_bound):
            block["context_full"] = True
        if odd := judge(work.asked.body, work.family.dialect):
            block["lint"] = odd
        return block
