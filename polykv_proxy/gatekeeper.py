"""The gate of one engine at work: tells it what happens, and lets those in who may come.

Rule: a verdict is acted on in the step in which it is given, see ``core.gate``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import asdict
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from polykv_proxy.core.admission import Entered, Refused
from polykv_proxy.core.experience import pressure
from polykv_proxy.core.gate import Entry, Gate, Waiter
from polykv_proxy.core.headroom import Arm
from polykv_proxy.core.policies import effective, origins
from polykv_proxy.core.sight import Look
from polykv_proxy.core.types import EngineSample, SessionId
from polykv_proxy.errors import PolyKVError, SaturatedError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.core.headroom import Capacity
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.policies import Given, Policy, PolicySet
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.rates import Progress
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import PoolId, Scope, SessionKey, SlotId
    from polykv_proxy.policy import PolicyFile

MAX_POSTED = 1024
"""Pools with a policy of their own; those that are gone make room."""


class Visit:
    """One request of a session, from the gate on; ``leave`` ends it, whatever happened."""

    def __init__(self, keeper: Gatekeeper, entry: Entry) -> None:
        self._keeper = keeper
        self._session = entry.session
        self._policy, self._pool = entry.policy, entry.pool
        self._entered: Entered | None = None
        self._waiter: Waiter | None = None
        self.woken: asyncio.Future[Entered] | None = None
        self.waited_s = 0.0
        """Seconds that it waited at the gate, until it came in."""
        self.known: Session | None = None
        """The session that it goes on with, where that is known from the start."""

    @property
    def waits(self) -> bool:
        """Whether it has to wait before it may go on."""
        return self._waiter is not None and self._entered is None

    @property
    def sessions_remaining(self) -> int | None:
        """How many more may follow, where the policy warns of that."""
        return None if self._entered is None else self._entered.sessions_remaining

    @property
    def backpressure(self) -> str | None:
        """The arm that would refuse a newcomer, or would have refused this one."""
        refusing = None if self._entered is None else self._entered.backpressure
        if refusing is None:
            refusing = self._keeper.gate.backpressure(monotonic(), self._policy, self._pool)
        return None if refusing is None else refusing.value

    def knock(self, entry: Entry, scope: Scope) -> None:
        """Come to the gate.

        Raises:
            SaturatedError: it may not come in.
            UnavailableError: nobody can tell.
        """
        passage = self._keeper.gate.on_request(entry, monotonic(), jitter=_jitter(), scope=scope)
        if isinstance(passage, Refused):
            raise refusal(passage, self._keeper.name)
        if isinstance(passage, Entered):
            self._entered = passage
            return
        self._waiter = passage
        self.woken = asyncio.get_running_loop().create_future()
        self._keeper.waiting[id(passage)] = self

    def let_in(self, entered: Entered) -> None:
        """It may go on."""
        assert self._waiter is not None
        self._entered, self.waited_s = entered, monotonic() - self._waiter.since
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(entered)

    async def wait(self, timeout_s: float) -> Entered | None:
        """Wait to come in; None when ``timeout_s`` seconds pass before that.

        Raises:
            SaturatedError: it waited as long as its policy allows.
            UnavailableError: nobody can tell.
        """
        waiter = self._waiter
        assert waiter is not None
        assert self.woken is not None
        left_s = waiter.since + waiter.max_wait_s - monotonic()
        if self._entered is None and left_s <= 0.0:
            verdict = self._keeper.gate.on_expired(waiter, monotonic(), jitter=_jitter())
            self._keeper.waiting.pop(id(waiter), None)
            self._waiter = None
            if isinstance(verdict, Refused):
                raise refusal(verdict, self._keeper.name)
            self._entered, self.waited_s = verdict, monotonic() - waiter.since
        with contextlib.suppress(TimeoutError):
            if self._entered is None:
                async with asyncio.timeout(min(timeout_s, left_s)):
                    await asyncio.shield(self.woken)
        return self._entered

    def known_as(self, session: SessionKey) -> None:
        """The session that it belongs to is known now."""
        if self._entered is not None and session != self._session:
            self._keeper.gate.on_known(self._session, session, monotonic())
            self._session = session

    def leave(self, cells: int | None) -> None:
        """The request is over.

        Args:
            cells: that it took beyond what it shared, if that is known.
        """
        now = monotonic()
        if self._entered is not None:
            self._keeper.gate.on_over(self._session, now, cells, stays=self._keeper.knows(self._session))
        elif self._waiter is not None:
            self._keeper.waiting.pop(id(self._waiter), None)
            self._keeper.gate.on_gave_up(self._waiter, now)
        else:
            return
        self._keeper.wake()


class Gatekeeper:
    """Keeps the gate of one engine.

    Args:
        plane: the engine's state.
        policies: in force for all engines.
        name: the engine's, for clients.
    """

    def __init__(self, plane: ControlPlane, policies: PolicyFile, name: str = "engine-0") -> None:
        self.name = name
        self.gate = Gate(leases=plane.leases)
        self.waiting: dict[int, Visit] = {}
        self.posted: dict[PoolId, Given] = {}
        """What was said of pools by their ids."""
        self._plane = plane
        self._policies = policies
        self._adopted: PolicySet | None = None
        self._base: Policy
        self._section: str | None = None
        """The name under ``models`` that holds."""
        self._numbers = count(1)
        self._generated: dict[SlotId, tuple[int, int]] = {}
        """Tag and tokens of each slot at the last look."""
        self._model = ""

    # -- policies ----------------------------------------------------------------------------------------

    def policy(self, pool: PrefixPool | None) -> Policy:
        """What holds for sessions of a pool; None: of those that name none."""
        policies = self._policies.current
        if policies is not self._adopted:
            self._adopt(policies)
        line: list[tuple[str | None, Given]] = []
        while pool is not None:
            line.append((pool.label, self.posted.get(pool.pool_id, {})))
            pool = pool.parent
        return effective(policies, self._base, reversed(line)) if line else self._base

    def origins(self, pool: PrefixPool | None) -> dict[str, str]:
        """Where each key of ``policy`` has its value from."""
        self.policy(None)
        line: list[tuple[str, str | None, Given]] = []
        while pool is not None:
            line.append((pool.pool_id, pool.label, self.posted.get(pool.pool_id, {})))
            pool = pool.parent
        return origins(self._policies.current, self._section, reversed(line))

    def _adopt(self, policies: PolicySet) -> None:
        facts = self._plane.facts
        names = () if facts is None else facts.models
        self._section = next((name for name in names if name in policies.models), None)
        self._base = policies.base(self._section)
        self._plane.cells.adopt(policies.cells)
        self._adopted = None if facts is None else policies

    def refresh(self) -> None:
        """The policies may be others: those who wait may come in under them."""
        self.policy(None)
        self.wake()

    def post(self, pool: PrefixPool, given: Given) -> None:
        """Something is said of a pool, in place of what was said before."""
        if len(self.posted) >= MAX_POSTED:
            known = {each.pool_id for each in self._plane.tree}
            self.posted = {name: said for name, said in self.posted.items() if name in known}
        self.posted[pool.pool_id] = given
        self.wake()

    # -- events ------------------------------------------------------------------------------------------

    def on_engine_ready(self) -> None:
        """An engine is there, empty."""
        self._adopted = None
        self.policy(None)
        ledger, model = self._plane.cells.ledger, self._plane.model_identity
        stale_after_s = None if ledger is None else self._policies.current.cells.stale_after_s
        self.gate.on_engine_ready(ledger, same_model=model == self._model, stale_after_s=stale_after_s)
        self._model = model
        self._generated.clear()

    def visit(self, ask: Ask, pool: PrefixPool | None, *, lease: str | None) -> Visit:
        """A request comes to the gate.

        Args:
            ask: what it wants of the slots.
            pool: that it names.
            lease: a promised place that it redeems.

        Raises:
            SaturatedError, UnavailableError: see ``Visit.knock``.
        """
        known = self._plane.leases.session_of(ask)
        name = (ask.scope, SessionId(f"\0{next(self._numbers)}")) if known is None else known.key
        pool_id = None if pool is None else pool.pool_id
        entry = Entry(session=name, policy=self.policy(pool), pool=pool_id, lease=lease)
        visit = Visit(self, entry)
        visit.known = known
        visit.knock(entry, ask.scope)
        return visit

    def knows(self, session: SessionKey) -> bool:
        """Whether there is such a session: its request had a slot, and the engine did not refuse it."""
        scope, name = session
        return self._plane.sessions.get(name, scope) is not None

    def on_look(self, progress: Progress, counts: object, now: float) -> None:
        """The sampler looked.

        Args:
            progress: what came since the last time.
            counts: the engine's counters; others than a patched engine's say nothing of single sessions.
            now: monotonic seconds.
        """
        plane = self._plane
        sample = counts if isinstance(counts, EngineSample) else None
        if sample is not None:
            self._count_tokens(sample)
        book, facts = plane.experience.book, plane.facts
        pools_used, pools_max = plane.tree.sequence_ids
        look = Look(
            taken_at=now,
            decoding=book.decoding_count,
            mean_tps=book.mean_active_tps(now),
            tokens=sum(tokens for tokens, _ in progress.gaps),
            seconds=sum(tokens * gap_s for tokens, gap_s in progress.gaps),
            window=None if facts is None else facts.ctx_tokens or None,
            pressure=pressure(sample),
            seq_ids_used=None if facts is None else facts.slots + pools_used,
            seq_ids_max=None if facts is None else facts.slots + pools_max,
        )
        self.gate.on_look(look)
        self.wake()

    def _count_tokens(self, sample: EngineSample) -> None:
        for each in sample.slots:
            tag, before = self._generated.get(each.slot, (0, 0))
            self._generated[each.slot] = (each.tag, each.gen_total)
            session = self._plane.session_in(each.slot)
            if tag and tag == each.tag and session is not None and session.lease == tag:
                self.gate.on_tokens(session.key, each.gen_total - before)

    def wake(self) -> None:
        """Let in who may come; call it after whatever made room."""
        for waiter in self.gate.wake(monotonic()):
            visit = self.waiting.pop(id(waiter), None)
            if visit is None or waiter.entered is None:
                self.gate.on_gave_up(waiter, monotonic())
            else:
                visit.let_in(waiter.entered)


def document(found: Capacity, engine: str) -> dict[str, object]:
    """The capacity of an engine as clients get it: without digits that nobody can tell apart."""
    figures = asdict(found).items()
    return {"engine": engine} | {
        name: round(value, 3) if isinstance(value, float) else value for name, value in figures
    }


def refusal(refused: Refused, engine: str) -> PolyKVError:
    """A refusal by an engine's gate as clients get it: which arm failed, and the numbers."""
    failing = refused.failing
    capacity = document(refused.capacity, engine)
    if refused.cannot_tell:
        return UnavailableError(
            "nobody can tell whether there is room: the engine does not say how it is",
            code="cannot_tell",
            retry_after_s=refused.retry_after_s,
            arm=failing.arm.value,
            reason=failing.reason.value,
            capacity=capacity,
        )
    error = SaturatedError(
        f"no room for another session: {failing.reason.value}",
        code="pool_saturated",
        retry_after_s=refused.retry_after_s,
        arm=failing.arm.value,
        reason=failing.reason.value,
        capacity=capacity,
    )
    error.should_retry = failing.arm is not Arm.CONTEXT
    return error


def _jitter() -> float:
    return random.random()  # noqa: S311 - spreads those who come back
