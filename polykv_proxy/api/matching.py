"""Which pool a request rides on, and how far: the one it names, the one it moves to, or the longest match."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import structlog

from polykv_proxy.api import asked as asking
from polykv_proxy.api.hold import done
from polykv_proxy.api.reading import Reader
from polykv_proxy.core.media import has_media
from polykv_proxy.core.types import text_prefix
from polykv_proxy.errors import EngineGoneError, PolyKVError

if TYPE_CHECKING:
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.api.hints import Hints
    from polykv_proxy.api.work import Work
    from polykv_proxy.core.types import PoolId, Scope, Tokens
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_LOOKS = 8
"""Times a request looks for somebody to share with before it runs on what there is."""

MIN_MATCH_BYTES = 256
"""A body below this cannot hold a prompt that is worth a match."""


class Matching:
    """Finds pools for requests.

    Args:
        runtime: the engine's control plane.
        pooling: what is done to pools.
        hints: where clients say that their prompts can be shared.
    """

    def __init__(self, runtime: Runtime, pooling: Pooling, hints: Hints) -> None:
        self._runtime = runtime
        self._pooling = pooling
        self._hints = hints
        self._reader = Reader(runtime)

    async def use_named(self, work: Work, pool_id: PoolId) -> None:
        """Find out how far the request can ride on the pool it names; never an error for the pool's sake."""
        plane = self._runtime.plane
        if not plane.serving:
            work.place = self._runtime.line.hold(work.place)
            await work.hold.in_line(self._serving)
        pool = plane.pools.find(pool_id, work.scope)
        if pool is None and plane.tree.get(pool_id) is not None:
            log.info("pool_of_another_key", pool_id=pool_id)
        if pool is not None and pool.comes_back:
            pool = await _in_time(work, self._runtime.background(self._pooling.revive(pool)))
        if pool is None or not pool.resident or not plane.capability.has_pools:
            work.pool_unknown = True
            return
        if self._runtime.backend.pins_in_body and asking.pinner(work.asked, work.family) is None:
            work.unpooled = "not_pinnable"
            return
        if (tokens := await self.tokens_of(work)) is None:
            work.unpooled = "media" if has_media(work.asked.body) else "not_tokenizable"
            return
        work.plan = plane.pools.plan_attach(
            pool,
            tokens,
            cap=work.asked.shared_prefix_tokens,
            strict=work.asked.strict,
            now_ts=self._runtime.now_ts(),
        )
        if work.plan is not None and work.plan.matched == text_prefix(tokens) == 0:
            work.unpooled = "media"  # it begins with an image: there is no text before it to share

    async def use_new(self, work: Work) -> bool:
        """Plan for the pool that the session was told to move to; whether it was told so and can."""
        assert work.lease is not None
        session = work.lease.session
        if session is None or session.moves_to is None or not work.asked.cache:
            return False
        await self.use_named(work, session.moves_to)
        if work.plan is None:  # it is gone, and was not asked for by this request
            session.moves_to, work.pool_unknown = None, False
        return work.plan is not None

    async def use_longest(self, work: Work) -> None:
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
        tokens = await self.tokens_of(work)
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
                plane.on_prompt(lease, tokens)  # from now on others share with it; it is sent later
                break
            slot, common = leader
            own = len(tokens) - matched
            share = self._pooling.share_from(slot, common, own_tokens=own, since=since)
            going = self._runtime.background(share)
            if not await _in_time(work, going):
                break  # 2: it was not to be
        work.plan = plane.pools.match(tokens, work.scope, now_ts=self._runtime.now_ts())  # 3

    async def count_media(self, work: Work) -> None:
        """Find out where media begin in a prompt: nothing that its slot holds from there on can be a pool's.

        Text alone is not worth the question where the slot goes on with it.
        """
        plane = self._runtime.plane
        sees = plane.facts is not None and plane.facts.media and plane.capability.has_pools
        if sees and work.family.pooled and has_media(work.asked.body):
            await self.tokens_of(work)

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

    def look_again(self, work: Work) -> None:
        """The world may have changed while the request waited: no await between this and the sending.

        Raises:
            EngineGoneError: the lease is of an engine that is gone.
        """
        assert work.lease is not None
        if work.lease.ended:
            raise EngineGoneError("the engine was restarted")
        self._forget_other_model(work)
        plane, tokens = self._runtime.plane, work.tokens
        if tokens is not None:
            plane.on_prompt(work.lease, tokens)
        if work.plan is not None:
            pool = work.plan.pool
            if not pool.resident or plane.pools.find(pool.pool_id, work.scope) is not pool:
                # its number may be another pool's by now
                work.plan, work.pool_unknown = None, work.asked.pool_id is not None
        if work.plan is not None and tokens is not None and self._is_beyond(tokens):
            # the engine attaches before it refuses: what another conversation left there would be gone
            work.plan = replace(work.plan, tokens=0)
        plan = work.plan
        plane.cells.settle(
            work.lease,
            prompt=None if tokens is None else len(tokens),
            shared=0 if plan is None else plan.tokens,
            pool=None if plan is None else plan.pool,
        )

    def _is_beyond(self, tokens: Tokens) -> bool:
        """Whether a prompt does not fit the window, so that the engine is going to refuse it."""
        facts = self._runtime.plane.facts
        return facts is not None and len(tokens) >= facts.ctx_tokens

    async def _serving(self, timeout_s: float) -> bool | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._runtime.serving.wait()
        except TimeoutError:
            return None

    async def tokens_of(self, work: Work) -> Tokens | None:
        """The exact tokens of a request on its way; whoever needs them first asks for them, once."""
        self._forget_other_model(work)
        if work.tokens is None and work.countable:
            work.tokens = await self.tokens(work.family, work.asked, work.scope)
            work.countable = work.tokens is not None
        return work.tokens

    def _forget_other_model(self, work: Work) -> None:
        """What a prompt was for the model before says nothing about this one."""
        model = self._runtime.plane.model_identity
        if work.model != model:
            work.model, work.tokens, work.countable, work.boundary = model, None, True, 0

    async def tokens(self, family: Family, asked: Asked, scope: Scope) -> Tokens | None:
        """A prompt's exact token ids; None where the engine will have to say what it made of it."""
        try:
            return await self._reader.tokens(family, asked, scope)
        except PolyKVError as error:
            # the engine will refuse the request itself, in its own words
            log.debug("prompt_not_tokenized", api=family.dialect.value, reason=error.message)
            return None


async def _in_time(work: Work, going: asyncio.Future[T]) -> T | None:
    """What others compute for a request; None: that takes longer than it may wait, and it goes on without."""
    try:
        return (await work.hold.in_line(done(going)))[0]
    except PolyKVError as error:
        log.info("not_waited_for", reason=error.message)
        return None
