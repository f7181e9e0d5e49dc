"""What becomes of pools: entered, found, attached to, taken from slots.

Rule 1: every method is synchronous; it changes the tree, and what the engine has to do for it is the
caller's to do.
Rule 2: pools are seen within their scope; None is an administrator, who sees all.
Rule 3: there is one way into the tree for all pools, computed or snapshot.
Rule 4: a plan is what the proxy knows; the engine compares tokens itself, and its answer proves the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.decisions import AttachPlan
from polykv_proxy.core.pools import PrefixPool, pool_id_of
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import Capability, PoolOrigin, PoolState
from polykv_proxy.errors import (
    BadRequestError,
    DisabledError,
    NotFoundError,
    PrefixMismatchError,
    UnavailableError,
)

if TYPE_CHECKING:
    from polykv_proxy.core.decisions import PoolPolicy
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import EngineFacts, PoolId, PoolNumber, PoolUid, Scope, SlotSample, Tokens


@dataclass(slots=True)
class KnownEngine:
    """What is known of the engine; the plane keeps it up to date, the planner reads it."""

    facts: EngineFacts | None = None
    capability: Capability = Capability.RELAY
    reason: str | None = "the engine is not ready yet"
    """Why it can do no more, if so."""
    model_identity: str = ""
    """Digest of everything that changes KV bytes."""

    def meet(
        self, facts: EngineFacts, capability: Capability, reason: str | None, model_identity: str
    ) -> None:
        """An engine answers; what it can do was tested."""
        self.facts, self.capability, self.reason = facts, capability, reason
        self.model_identity = model_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What somebody asks of a pool beyond its content."""

    label: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    """Seconds out of use after which it is released by itself."""
    origin: PoolOrigin = PoolOrigin.EXPLICIT


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot that the engine took: under a reserved number, and its name there."""

    number: PoolNumber
    uid: PoolUid
    file_bytes: int | None = None
    """Size of its file, where pools are files."""


class PoolPlanner:
    """The pools of one engine.

    Args:
        engine: what is known of it; read only.
        policy: what happens without being asked for.
    """

    def __init__(self, engine: KnownEngine, policy: PoolPolicy) -> None:
        self._engine = engine
        self._policy = policy
        self.tree = PoolTree(0)
        self.shortfalls = 0
        """Attached requests that reused less than was planned."""

    def lose_all(self, max_pools: int, *, same_model: bool) -> None:
        """The engine holds nothing any more.

        Args:
            max_pools: sequence ids that it has for pools now.
            same_model: otherwise its KV bytes are others, and the old ids can never be valid again.
        """
        if not same_model:
            self.tree = PoolTree(max_pools)
        self.tree.max_pools = max_pools
        self.tree.lose_all()

    def require(self) -> None:
        """Raise unless pools work.

        Raises:
            UnavailableError: the engine is not ready; nobody can tell yet.
            DisabledError: they do not; the message says why.
        """
        if self._engine.facts is None:
            raise UnavailableError("the engine is not ready yet", code="engine_loading", retry_after_s=2)
        if not self._engine.capability.has_pools:
            raise DisabledError(f"pools are off: {self._engine.reason}")

    def id_of(self, tokens: Tokens, scope: Scope) -> PoolId:
        """The id that this content has on this engine."""
        return pool_id_of(tokens, model=self._engine.model_identity, adapters="", scope=scope)

    def find(self, pool_id: PoolId, scope: Scope | None) -> PrefixPool | None:
        """A pool by id, as seen from a scope (None: an administrator, who sees all)."""
        pool = self.tree.get(pool_id)
        return pool if pool is not None and scope in (None, pool.scope) else None

    def need(self, pool_id: PoolId, scope: Scope | None) -> PrefixPool:
        """Like ``find``.

        Raises:
            NotFoundError: there is none, or it is another key's.
        """
        pool = self.find(pool_id, scope)
        if pool is None:
            raise NotFoundError(f"pool {pool_id} does not exist", code="pool_not_found", param="pool_id")
        return pool

    def enter(  # noqa: PLR0913 - the facts of a pool
        self,
        tokens: Tokens,
        scope: Scope,
        wanted: Wanted,
        *,
        now_ts: float,
        parent: PrefixPool | None = None,
        branch_pos: int = 0,
        taken: Taken | None = None,
    ) -> tuple[PrefixPool, bool]:
        """Enter a pool for this content; returns it, and whether it is new to the engine.

        One code path for all three edges: a root (no parent), an extension (D = the parent's length) and a
        branch (D below it). A pool of the same content that is there already stays where it is in the tree.

        Args:
            tokens: the whole prefix.
            scope: whose it is.
            wanted: what is asked of it.
            now_ts: epoch seconds.
            parent: whose [0, ``branch_pos``) it shares.
            branch_pos: D.
            taken: the engine made it already, a snapshot. Else a new one has to be computed, and then
                reported to ``on_ready``. A snapshot of content that has a pool is superfluous: it has to
                be given back, and its slot lives on its ghost.

        Raises:
            BadRequestError: it can never fit.
            PoolCapacityError: no sequence id is free.
            DisabledError, UnavailableError: see ``require``.
        """
        if taken is None:
            self.require()
            self._check_length(tokens)
        pool_id = self.id_of(tokens, scope)
        pool = self.tree.get(pool_id) or self._taken_up(pool_id, wanted, now_ts)
        if pool is not None and pool.occupies_sequence:
            _ask_again(pool, wanted, now_ts)
            if taken is not None:
                self.reject_snapshot(taken, tokens, scope, parent=parent, branch_pos=branch_pos)
            return pool, False
        if taken is None and parent is None and pool is not None and pool.state is PoolState.EVICTED:
            parent, branch_pos = pool.parent, pool.branch_pos  # back to its place
        pool = self.tree.add(
            pool_id,
            tokens,
            scope=scope,
            origin=wanted.origin,
            now_ts=now_ts,
            label=wanted.label,
            pinned=wanted.pin,
            ttl_s=wanted.ttl_s,
            parent=parent,
            branch_pos=branch_pos,
            number=None if taken is None else taken.number,
        )
        if taken is not None:
            self.tree.ready(pool, taken.uid, taken.file_bytes)
        return pool, True

    def _taken_up(self, pool_id: PoolId, wanted: Wanted, now_ts: float) -> PrefixPool | None:
        """A released pool of the same content that the engine still has: nothing is computed for it."""
        pool = self.tree.take_up(pool_id)
        if pool is not None:
            pool.origin, pool.created_ts = wanted.origin, now_ts
        return pool

    def _check_length(self, tokens: Tokens) -> None:
        facts = self._engine.facts
        assert facts is not None
        limit = min(facts.ctx_tokens, facts.cells)
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

    def snapshot_parent(self, held: SlotSample | None, asked: PrefixPool | None) -> PrefixPool | None:
        """The pool, perhaps a ghost, below which a snapshot of a slot belongs.

        1. The slot shares nothing: below the one that was asked for, if it is resident.
        2. It shares with a pool below the one that was asked for: there is where the cells are.
        3. The one that was asked for agrees with all that is shared: its cells take their place.
        4. It does not: the cells decide.
        """
        node = self.tree.node(held.pool_uid) if held is not None and held.shared_tokens else None
        if asked is None or not asked.resident:
            return node
        if node is None or held is None:
            return asked  # 1
        if not node.is_below(asked) and asked.match(node.tokens) >= held.shared_tokens:
            return asked  # 3
        return node  # 2, 4

    def reject_snapshot(
        self, taken: Taken, tokens: Tokens, scope: Scope, *, parent: PrefixPool | None, branch_pos: int
    ) -> None:
        """Nobody is to have what the engine snapshot; its slot shares the cells with it all the same."""
        self.tree.add_ghost(
            self.id_of(tokens, scope),
            tokens,
            scope=scope,
            number=taken.number,
            uid=taken.uid,
            parent=parent,
            branch_pos=branch_pos,
        )

    def on_ready(self, pool: PrefixPool, uid: PoolUid, file_bytes: int | None = None) -> None:
        """The engine computed it."""
        if self.is_awaited(pool):
            self.tree.ready(pool, uid, file_bytes)

    def is_awaited(self, pool: PrefixPool) -> bool:
        """Whether it still has to be computed: the engine may have been restarted since it was entered."""
        return pool.state is PoolState.MATERIALIZING and self.tree.get(pool.pool_id) is pool

    def on_failed(self, pool: PrefixPool, *, retire: bool = False) -> None:
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
        wanted = matched if cap is None else min(cap, matched)
        return AttachPlan(pool, wanted if self._can_ride(pool, wanted, tokens) else 0, matched)

    def _can_ride(self, pool: PrefixPool, n_tokens: int, tokens: Tokens) -> bool:
        """Whether the engine can go on from there: where a state has no parts, from a pool's end only."""
        facts = self._engine.facts
        return facts is None or facts.partial_match or n_tokens == pool.prefix_len < len(tokens)

    def match(self, tokens: Tokens, scope: Scope, *, now_ts: float) -> AttachPlan | None:
        """The pool that holds most of a prompt, if it holds enough to be worth an attach."""
        found = self.tree.index.match(tokens, scope)
        if found is not None and not self._can_ride(*found, tokens):
            whole = (
                (pool, pool.prefix_len)
                for pool in self.tree
                if pool.resident and pool.scope == scope
                if self._can_ride(pool, pool.match(tokens), tokens)
            )
            found = max(whole, key=lambda each: each[1], default=None)
        if found is None or found[1] < self._policy.min_match_tokens:
            return None
        pool, matched = found
        pool.last_access_ts = now_ts
        return AttachPlan(pool, matched, matched)

    def too_many_automatic(self) -> bool:
        """Whether pools that come by themselves have taken the share of sequence ids that they may."""
        count = sum(pool.origin is PoolOrigin.AUTO and pool.occupies_sequence for pool in self.tree)
        return count >= max(1, int(self.tree.max_pools * self._policy.auto_share))

    def may_keep(self, tokens: int) -> bool:
        """Whether a pool may come of so many tokens that only one request has used so far.

        It saves nothing yet, so that it may not take cells from those who run: all pools that came by
        themselves hold at most their share of the cells, too.
        """
        facts = self._engine.facts
        if facts is None or not self._policy.auto_pools or not self._engine.capability.shares_cells:
            return False
        held = sum(pool.own_len for pool in self.tree if pool.origin is PoolOrigin.AUTO and pool.resident)
        return held + tokens <= facts.cells * self._policy.auto_share

    def on_attached(self, plan: AttachPlan, session: Session | None, cached_tokens: int | None) -> bool:
        """An attached request's answer proves itself; returns whether it fell short of the plan.

        Args:
            plan: what was intended.
            session: whose request it was.
            cached_tokens: prompt tokens that the engine says it did not compute; None if it did not say.
        """
        plan.pool.hits += plan.tokens > 0
        if session is not None and (cached_tokens == 0 or not plan.tokens):
            session.pool = None  # it was to ride on one, and shares nothing
        # the engine always computes the last prompt token, so a whole match may show one token less
        short = cached_tokens is not None and cached_tokens < plan.tokens - 1
        self.shortfalls += short
        return short


def _ask_again(pool: PrefixPool, wanted: Wanted, now_ts: float) -> None:
    """Somebody wants a pool that is there: what is asked for is added, nothing is taken away."""
    pool.pinned = pool.pinned or wanted.pin
    pool.label = wanted.label if wanted.label is not None else pool.label
    pool.ttl_s = wanted.ttl_s if wanted.ttl_s is not None else pool.ttl_s
    pool.last_access_ts = now_ts
    if pool.origin is PoolOrigin.AUTO:
        pool.origin = wanted.origin
