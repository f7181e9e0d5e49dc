"""The control plane of one engine: the one stateful object of the core.

Rule 1: every method is synchronous and returns what should happen; nothing here happens by itself.
Rule 2: a request is sent only to slots that are known to be idle, so the engine never queues.
Rule 3: those who wait are served in order of arrival. A request that cannot be placed holds back those
behind it: none of them may starve it.
Rule 4: a lease ends exactly once. Ending it again changes nothing.
Rule 5: what the engine reports corrects what was assumed. A new epoch means that nothing is resident.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from polykv_proxy.core.accounting import attribute
from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Command,
    Decision,
    Lease,
    PoolPolicy,
    Queue,
    Reject,
    Ticket,
    WakeQueued,
)
from polykv_proxy.core.pools import PoolTree, PrefixPool, pool_id_of
from polykv_proxy.core.sessions import SessionBook
from polykv_proxy.core.slots import Ask, Content, Placement, SlotBoard
from polykv_proxy.core.types import (
    Capability,
    LeaseId,
    PoolOrigin,
    PoolState,
    SessionId,
)
from polykv_proxy.errors import (
    BadRequestError,
    DisabledError,
    NotFoundError,
    PrefixMismatchError,
    SessionNotResidentError,
    UnavailableError,
)

if TYPE_CHECKING:
    from polykv_proxy.core.accounting import Ownership
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.slots import Slot
    from polykv_proxy.core.types import (
        EngineFacts,
        EngineSample,
        PoolId,
        PoolNumber,
        PoolUid,
        Scope,
        SlotSample,
        Tokens,
    )


class ControlPlane:
    """State of one engine and of everybody who uses it.

    Args:
        max_waiting: requests that may wait at once.
        policy: what happens without being asked for.
        number: the engine's, from 0.
    """

    def __init__(self, *, max_waiting: int, policy: PoolPolicy | None = None, number: int = 0) -> None:
        self._max_waiting = max_waiting
        self._policy = policy or PoolPolicy()
        self.facts: EngineFacts | None = None
        self.capability = Capability.RELAY
        self.capability_reason: str | None = "the engine is not ready yet"
        self.model_identity = ""
        self.tree = PoolTree(0)
        self.board = SlotBoard(0)
        self.sample: EngineSample | None = None
        self.ownership: Ownership | None = None
        self.shortfalls = 0
        """Attached requests that reused less than was planned."""
        self._serving = False
        self._waiting: OrderedDict[int, Ticket] = OrderedDict()
        self.sessions = SessionBook(f"auto-{number}-" if number else "auto-")
        self._running: dict[LeaseId, Lease] = {}
        self._next_lease = 1

    # -- the engine's life -------------------------------------------------------------------------------

    @property
    def policy(self) -> PoolPolicy:
        """What happens without being asked for."""
        return self._policy

    @property
    def serving(self) -> bool:
        """Whether requests can be sent now."""
        return self._serving

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def on_engine_ready(
        self, facts: EngineFacts, capability: Capability, reason: str | None, model_identity: str, now: float
    ) -> list[Command]:
        """An engine answers; what it can do was tested.

        Args:
            facts: static facts, of this load of the model.
            capability: what was seen to work.
            reason: why not more, if not.
            model_identity: digest of everything that changes KV bytes.
            now: monotonic seconds.
        """
        if self.facts != facts:  # not by the epoch alone: an engine without the patch has none
            self._forget_residency(facts, same_model=model_identity == self.model_identity)
        self.facts, self.capability, self.capability_reason = facts, capability, reason
        self.model_identity = model_identity
        self._serving = True
        return self._serve_waiting(now)

    def on_engine_down(self) -> None:
        """Nothing can be sent until the next ``on_engine_ready``; what was running ends on its own."""
        self._serving = False

    def _forget_residency(self, facts: EngineFacts, *, same_model: bool) -> None:
        if not same_model:
            self.tree = PoolTree(facts.max_pools)  # other KV bytes: the old ids can never be valid again
        self.tree.max_pools = facts.max_pools
        self.tree.lose_all()
        for session in self.sessions:
            session.slot = None
        for lease in self._running.values():
            lease.ended = True  # its slot belongs to the dead engine
            if lease.session is not None:
                lease.session.running = False
        self._running.clear()
        self.board = SlotBoard(facts.slots)
        self.sample = self.ownership = None

    def on_sample(self, sample: EngineSample) -> None:
        """Correct the picture by what the engine reports; readings of another epoch are ignored."""
        if self.facts is None or sample.epoch != self.facts.epoch:
            return
        self.sample = sample
        self.ownership = attribute(self.tree.nodes(), sample)
        if self.ownership.dead:
            self.tree.drop_ghosts(set(self.ownership.dead))

    # -- requests ----------------------------------------------------------------------------------------

    def on_request(self, ask: Ask, now: float, *, now_ts: float, conversation: bool = True) -> Decision:
        """A request wants slots.

        1. The engine serves, nobody waits, and slots are idle: admit.
        2. Too many wait: reject.
        3. Wait in line.

        Args:
            ask: what it wants.
            now: monotonic seconds.
            now_ts: epoch seconds, for the session's record.
            conversation: whether it belongs to a session (computing a pool does not).
        """
        for session in self.sessions.expire(now):
            if session.slot is not None:
                self.board.forget(session.slot)
        if self._serving and not self._waiting:
            lease = self._grant(ask, now, now_ts, conversation=conversation)
            if lease is not None:
                return Admit(lease)  # 1
        if len(self._waiting) >= self._max_waiting:
            return Reject("queue_full", f"{len(self._waiting)} requests are waiting already")  # 2
        ticket = Ticket(ask, conversation, now, now_ts)
        self._waiting[id(ticket)] = ticket
        return Queue(ticket)  # 3

    def on_gave_up(self, ticket: Ticket, now: float) -> list[Command]:
        """Whoever held the ticket left or waited too long. A lease it was just given is passed on."""
        self._waiting.pop(id(ticket), None)
        if ticket.lease is not None:
            return self.on_finished(ticket.lease, now, clean=True, content=Content.OLD)
        return self._serve_waiting(now)

    def on_dispatch(self, lease: Lease, plan: AttachPlan) -> None:
        """The request goes out attached to a pool."""
        lease.pool = plan.pool
        plan.pool.attached += 1

    def on_first_byte(self, lease: Lease, ttft_s: float) -> None:
        """The answer began to reach the client."""
        if lease.session is not None:
            lease.session.ttft_s = ttft_s

    def on_finished(
        self, lease: Lease, now: float, *, clean: bool, content: Content, stop: bool = True
    ) -> list[Command]:
        """A request is over, whatever way.

        Args:
            lease: its lease; ending one twice changes nothing.
            now: monotonic seconds.
            clean: the engine's answer was complete, so its slots are idle. Otherwise the engine may
                still be working for a client that left, and the slots stay taken until ``on_slots_idle``.
            content: what its first slot holds now, where the answer was complete.
            stop: whether the engine is to be stopped where the answer was not complete.
        """
        if lease.ended:
            return []
        lease.ended = True
        if lease.pool is not None:
            lease.pool.attached -= 1
        if lease.session is not None:
            lease.session.running = False
            lease.session.last_seen = now
        if not clean:
            return [AwaitIdle(lease, stop)]
        return self._free(lease, now, content)

    def on_slots_idle(self, lease: Lease, now: float, content: Content) -> list[Command]:
        """The engine is seen to be done with an abandoned request."""
        return self._free(lease, now, content)

    def _free(self, lease: Lease, now: float, content: Content) -> list[Command]:
        if self._running.pop(lease.lease_id, None) is None:
            return []  # the engine it ran on is gone
        for index, number in enumerate(lease.slots):
            self.board.free(number, now, content if index == 0 else Content.NOTHING)
        return self._serve_waiting(now)

    def _serve_waiting(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._serving and self._waiting:
            key, ticket = next(iter(self._waiting.items()))
            lease = self._grant(ticket.ask, now, ticket.since_ts, conversation=ticket.conversation)
            if lease is None:
                break  # rule 3
            del self._waiting[key]
            ticket.lease = lease
            commands.append(WakeQueued(ticket))
        return commands

    def _grant(self, ask: Ask, now: float, now_ts: float, *, conversation: bool) -> Lease | None:
        placement = self.board.place(ask)
        if placement is None:
            return None
        session = self._session_for(ask, placement, now, now_ts) if conversation else None
        lease = Lease(LeaseId(self._next_lease), placement.slots, session, placement.continues, now)
        self._next_lease += 1
        self.board.take(placement, lease.lease_id, session, ask)
        self._running[lease.lease_id] = lease
        return lease

    # -- sessions ----------------------------------------------------------------------------------------

    def _session_for(self, ask: Ask, placement: Placement, now: float, now_ts: float) -> Session:
        """The conversation that continues in the placed slot, else a new one under the client's name."""
        held = self.board.slots[placement.slots[0]].session
        # it may have been forgotten while a request that came to nothing had its slot
        goes_on = placement.continues and held is not None and self.sessions.holds(held)
        session = held if goes_on else self.sessions.idle_namesake(ask.scope, ask.name)
        if session is None:
            session = self.sessions.begin(ask.scope, ask.name, now_ts)
        self.sessions.touch(session, now)
        return session

    # -- pools -------------------------------------------------------------------------------------------

    def require_pools(self) -> None:
        """Raise unless pools work.

        Raises:
            UnavailableError: the engine is not ready; nobody can tell yet.
            DisabledError: they do not; the message says why.
        """
        if self.facts is None:
            raise UnavailableError("the engine is not ready yet", code="engine_loading", retry_after_s=2)
        if self.capability is not Capability.ZERO_COPY:
            raise DisabledError(f"pools are off: {self.capability_reason}")

    def pool_id_of(self, tokens: Tokens, scope: Scope) -> PoolId:
        """The id that this content has on this engine."""
        return pool_id_of(tokens, model=self.model_identity, adapters="", scope=scope)

    def find_pool(self, pool_id: PoolId, scope: Scope | None) -> PrefixPool | None:
        """A pool by id, as seen from a scope (None: an administrator, who sees all)."""
        pool = self.tree.get(pool_id)
        return pool if pool is not None and scope in (None, pool.scope) else None

    def need_pool(self, pool_id: PoolId, scope: Scope | None) -> PrefixPool:
        """Like ``find_pool``.

        Raises:
            NotFoundError: there is none, or it is another key's.
        """
        pool = self.find_pool(pool_id, scope)
        if pool is None:
            raise NotFoundError(f"pool {pool_id} does not exist", code="pool_not_found", param="pool_id")
        return pool

    def begin_pool(  # noqa: PLR0913 - the facts of a pool
        self,
        tokens: Tokens,
        scope: Scope,
        *,
        label: str | None,
        pin: bool,
        now_ts: float,
        origin: PoolOrigin = PoolOrigin.EXPLICIT,
        parent: PrefixPool | None = None,
        branch_pos: int = 0,
    ) -> tuple[PrefixPool, bool]:
        """Enter a pool for this content; returns it and whether it has to be computed.

        One code path for all three edges: a root (no parent), an extension (D = the parent's length) and a
        branch (D below it). A pool of the same content that is there already stays where it is in the tree.

        Raises:
            BadRequestError: it can never fit.
            PoolCapacityError: no sequence id is free.
            DisabledError, UnavailableError: see ``require_pools``.
        """
        self.require_pools()
        self._check_length(tokens)
        pool_id = self.pool_id_of(tokens, scope)
        pool = self.tree.get(pool_id)
        if pool is not None and pool.occupies_sequence:
            _ask_again(pool, origin, label=label, pin=pin, now_ts=now_ts)
            return pool, False
        if pool is not None and pool.state is PoolState.EVICTED and parent is None:
            parent, branch_pos = pool.parent, pool.branch_pos  # back to its place
        pool = self.tree.add(
            pool_id,
            tokens,
            scope=scope,
            origin=origin,
            now_ts=now_ts,
            label=label,
            pinned=pin,
            parent=parent,
            branch_pos=branch_pos,
        )
        return pool, True

    def _check_length(self, tokens: Tokens) -> None:
        assert self.facts is not None
        limit = min(self.facts.ctx_tokens, self.facts.cells)
        if len(tokens) >= limit:
            raise BadRequestError(
                f"a prefix of {len(tokens)} tokens does not fit the context of {limit} tokens",
                code="pool_too_long",
                prefix_len=len(tokens),
                ctx_size=limit,
            )

    def branch_point(self, parent: PrefixPool, tokens: Tokens, branch_pos: int | None) -> int:
        """D of a child with these tokens.

        1. Nothing in common: the tokens are no continuation, and never silently become a root.
        2. No D asked for: as much as agrees, at most the parent's length.
        3. D asked for: [0, D) must agree, token for token.

        Args:
            parent: the pool to fork.
            tokens: the child's full prefix [0, L).
            branch_pos: the D that was asked for.

        Raises:
            BadRequestError: D beyond the parent's or the child's end.
            PrefixMismatchError: the contract does not hold; says where.
        """
        common = parent.match(tokens)
        both = min(parent.prefix_len, len(tokens))
        if branch_pos is not None and not 0 < branch_pos <= both:
            raise BadRequestError(
                f"branch_pos must be between 1 and {both}, the length of the shorter of the two",
                param="branch_pos",
                parent_len=parent.prefix_len,
            )
        if common == 0 or (branch_pos is not None and common < branch_pos):
            suffix_only = common == 0
            raise PrefixMismatchError(
                f"the parent and these tokens have nothing in common; pass the child's full prefix, "
                f"beginning with the parent's {parent.prefix_len} tokens, not only what is new"
                if suffix_only
                else f"[0, {branch_pos}) must be the parent's, but token {common} differs",
                first_mismatch=common,
                expected_token=parent.tokens[common] if common < parent.prefix_len else None,
                got_token=tokens[common] if common < len(tokens) else None,
                parent_len=parent.prefix_len,
                suffix_only=suffix_only,
                next_moves={
                    "re_root": "create a pool of its own from the same tokens: POST /polykv/pools",
                    "full_prefill": "send the request without a pool",
                },
            )
        return common if branch_pos is None else branch_pos

    def resident_slot(self, session_id: SessionId, scope: Scope | None) -> Slot:
        """The slot that holds a session now.

        Raises:
            NotFoundError: no such session.
            SessionNotResidentError: another conversation has taken its slot.
        """
        session = self.sessions.get(session_id)
        if session is None or scope not in (None, session.scope):
            raise NotFoundError(
                f"session {session_id} does not exist", code="session_not_found", param="from_session"
            )
        if session.slot is None:
            raise SessionNotResidentError(
                f"no slot holds session {session_id} any more", param="from_session"
            )
        return self.board.slots[session.slot]

    def snapshot_parent(self, held: SlotSample, asked: PrefixPool | None) -> PrefixPool | None:
        """The pool, perhaps a ghost, below which a snapshot of a slot belongs.

        1. The slot shares nothing: below the one that was asked for, if it is resident.
        2. It shares with a pool below the one that was asked for: there is where the cells are.
        3. The one that was asked for agrees with all that is shared: its cells take their place.
        4. It does not: the cells decide.
        """
        node = self.tree.node(held.pool_uid) if held.shared_tokens else None
        if asked is None or not asked.resident:
            return node
        if node is None:
            return asked  # 1
        if not node.is_below(asked) and asked.match(node.tokens) >= held.shared_tokens:
            return asked  # 3
        return node  # 2, 4

    def adopt_snapshot(  # noqa: PLR0913 - the facts of a pool
        self,
        number: PoolNumber,
        uid: PoolUid,
        tokens: Tokens,
        scope: Scope,
        *,
        origin: PoolOrigin,
        label: str | None,
        pin: bool,
        now_ts: float,
        parent: PrefixPool | None,
        branch_pos: int,
    ) -> tuple[PrefixPool, bool]:
        """Enter what the engine just snapshot under a reserved number.

        Returns the pool of that content, and whether the number is in use now: if the content had a pool
        already, the snapshot is superfluous and has to be given back, and its slot lives on its ghost.
        """
        pool_id = self.pool_id_of(tokens, scope)
        pool = self.tree.get(pool_id)
        if pool is not None and pool.occupies_sequence:
            _ask_again(pool, origin, label=label, pin=pin, now_ts=now_ts)
            self.reject_snapshot(number, uid, tokens, scope, parent=parent, branch_pos=branch_pos)
            return pool, False
        pool = self.tree.add(
            pool_id,
            tokens,
            scope=scope,
            origin=origin,
            now_ts=now_ts,
            label=label,
            pinned=pin,
            parent=parent,
            branch_pos=branch_pos,
            number=number,
        )
        self.tree.ready(pool, uid)
        return pool, True

    def reject_snapshot(  # noqa: PLR0913 - the facts of a pool
        self,
        number: PoolNumber,
        uid: PoolUid,
        tokens: Tokens,
        scope: Scope,
        *,
        parent: PrefixPool | None,
        branch_pos: int,
    ) -> None:
        """Nobody is to have what the engine snapshot; its slot shares the cells with it all the same."""
        pool_id = self.pool_id_of(tokens, scope)
        self.tree.add_ghost(
            pool_id, tokens, scope=scope, number=number, uid=uid, parent=parent, branch_pos=branch_pos
        )

    def on_pool_ready(self, pool: PrefixPool, uid: PoolUid) -> None:
        """The engine computed it."""
        if self.is_awaited(pool):
            self.tree.ready(pool, uid)

    def is_awaited(self, pool: PrefixPool) -> bool:
        """Whether it still has to be computed: the engine may have been restarted since it was entered."""
        return pool.state is PoolState.MATERIALIZING and self.tree.get(pool.pool_id) is pool

    def on_pool_failed(self, pool: PrefixPool, *, retire: bool = False) -> None:
        """The engine could not compute it, or nobody wants it any more.

        Args:
            pool: no effect on one that is resident.
            retire: the engine may have it all the same; its number stays taken until ``tree.retire``.
        """
        if self.is_awaited(pool):
            self.tree.failed(pool, retire=retire)

    def plan_attach(
        self, pool: PrefixPool, tokens: Tokens, *, cap: int | None, strict: bool, now_ts: float
    ) -> AttachPlan | None:
        """How far a request can ride on a pool; None when there is nothing to attach to.

        Args:
            pool: the pool that was asked for.
            tokens: the request's prompt.
            cap: ``shared_prefix_n_tokens``: attach at most so many.
            strict: refuse a cap above the match instead of lowering it.
            now_ts: epoch seconds.

        Raises:
            BadRequestError: strict, and the cap exceeds the match.
        """
        matched = pool.match(tokens)
        if strict and cap is not None and cap > matched:
            raise BadRequestError(
                f"shared_prefix_n_tokens is {cap} but only {matched} leading tokens agree with the pool",
                code="shared_prefix_too_long",
                param="shared_prefix_n_tokens",
                matched_tokens=matched,
                prefix_len=pool.prefix_len,
            )
        if not pool.resident:
            return None
        pool.last_access_ts = now_ts
        return AttachPlan(pool, matched if cap is None else min(cap, matched), matched)

    def match(self, tokens: Tokens, scope: Scope, *, now_ts: float) -> AttachPlan | None:
        """The pool that holds most of a prompt, if it holds enough to be worth an attach."""
        found = self.tree.index.match(tokens, scope)
        if found is None or found[1] < self._policy.min_match_tokens:
            return None
        pool, matched = found
        pool.last_access_ts = now_ts
        return AttachPlan(pool, matched, matched)

    def shareable(self, tokens: Tokens, lease: Lease, matched: int) -> tuple[Slot, int] | None:
        """A slot whose prompt has much more in common with this one than any pool, and how much.

        1. Pools that come by themselves are off, or as many exist as may: none.
        2. The closest slot of the same scope shares too little, or hardly more than a pool does: none.
        3. That slot: its common prefix is worth a pool.
        """
        policy = self._policy
        if not policy.auto_pools or lease.session is None:
            return None
        found = self.board.closest(tokens, lease.session.scope, other_than=lease.slots[0])
        if found is None or found[1] < max(policy.auto_min_tokens, matched + policy.auto_gain_tokens):
            return None
        return found

    def too_many_automatic(self) -> bool:
        """Whether pools that come by themselves have taken the share of sequence ids that they may."""
        count = sum(pool.origin is PoolOrigin.AUTO and pool.occupies_sequence for pool in self.tree)
        return count >= max(1, int(self.tree.max_pools * self._policy.auto_share))

    def on_prompt(self, lease: Lease, tokens: Tokens) -> None:
        """The exact tokens of a request that is about to run."""
        if not lease.ended:
            self.board.slots[lease.slots[0]].tokens = tokens

    def on_attached(self, plan: AttachPlan, session: Session | None, cached_tokens: int | None) -> bool:
        """An attached request's answer proves itself; returns whether it fell short of the plan.

        Args:
            plan: what was intended.
            session: whose request it was.
            cached_tokens: prompt tokens that the engine says it did not compute; None if it did not say.
        """
        plan.pool.hits += plan.tokens > 0
        if session is not None:
            session.pool = plan.pool.pool_id if plan.tokens else None
        # the engine always computes the last prompt token, so a whole match may show one token less
        short = cached_tokens is not None and cached_tokens < plan.tokens - 1
        self.shortfalls += short
        return short


def _ask_again(pool: PrefixPool, origin: PoolOrigin, *, label: str | None, pin: bool, now_ts: float) -> None:
    """Somebody wants a pool that is there: what is asked for is added, nothing is taken away."""
    pool.pinned = pool.pinned or pin
    pool.label = label if label is not None else pool.label
    pool.last_access_ts = now_ts
    if pool.origin is PoolOrigin.AUTO:
        pool.origin = origin
