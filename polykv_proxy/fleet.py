"""All engines of one proxy, and finding the one that something belongs to.

Rule: a pool or a session is on one engine. What does not say where it belongs goes to the first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from polykv_proxy.core.sessions import require_one
from polykv_proxy.errors import BadRequestError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.pools import PrefixPool
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import PoolId, Scope, SessionId
    from polykv_proxy.durable.service import Durable
    from polykv_proxy.edge.upstream import Upstream
    from polykv_proxy.pooling import Pooling
    from polykv_proxy.runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """One engine and everything that works for it."""

    number: int
    """From 0, in the order of the configuration."""
    name: str
    runtime: Runtime
    pooling: Pooling
    upstream: Upstream
    key: str | None = None
    """What it demands of its clients."""
    patch: str | None = None
    """Identity of the patches that it was built with, where that is known."""
    durable: Durable | None = None
    """Who saves its KV."""

    @property
    def plane(self) -> ControlPlane:
        """Its state."""
        return self.runtime.plane

    @property
    def has_pools(self) -> bool:
        """Whether pools work on it now."""
        return self.plane.serving and self.plane.capability.has_pools

    def serves(self, model: str) -> bool:
        """Whether it answers to this name."""
        return self.plane.facts is not None and model in self.plane.facts.models


class Fleet:
    """The engines, in the order of the configuration.

    Args:
        engines: one at least.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, number: int) -> Engine:
        return self._engines[number]

    @property
    def first(self) -> Engine:
        """Where everything goes that does not say where it belongs."""
        return self._engines[0]

    @property
    def serving(self) -> bool:
        """Whether at least one engine takes requests."""
        return any(engine.plane.serving for engine in self)

    @property
    def planes(self) -> dict[str, ControlPlane]:
        """The engines' states by the engines' names."""
        return {engine.name: engine.plane for engine in self}

    async def sample(self) -> None:
        """Have a fresh picture of every engine that gives one soon."""
        await asyncio.gather(*(engine.runtime.readings.glance() for engine in self))

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Returns when one engine takes requests, or so many seconds have passed."""
        if self.serving:
            return
        waits = [asyncio.get_running_loop().create_task(engine.runtime.serving.wait()) for engine in self]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def named(self, name: str) -> Engine:
        """An engine by its name.

        Raises:
            BadRequestError: there is none.
        """
        for engine in self:
            if engine.name == name:
                return engine
        names = ", ".join(engine.name for engine in self)
        raise BadRequestError(
            f"there is no engine {name!r}; there are {names}", code="no_such_engine", param="engine"
        )

    def of_query(self, query: str) -> Engine:
        """The engine that ``?engine=`` names, else the first that has the ``?model=``, else the first.

        Raises:
            BadRequestError: there is no engine of that name.
        """
        if len(self) == 1 or not query:
            return self.first
        asked = parse_qs(query)
        if names := asked.get("engine"):
            return self.named(names[-1])
        for model in asked.get("model", ())[-1:]:
            return next((engine for engine in self if engine.serves(model)), self.first)
        return self.first

    def with_pools(self, name: str | None) -> Engine:
        """Where a new pool is made: the engine that is named, else the one with most sequence ids free.

        Only engines with the first one's model come into question unless one is named: tokens of another
        model are other tokens.

        Raises:
            BadRequestError: there is no engine of that name.
            DisabledError, UnavailableError: pools do not work there; see ``PoolPlanner.require``.
        """
        if name is not None:
            chosen = self.named(name)
        else:
            alike = [each for each in self.like(self.first) if each.has_pools] or [self.first]
            chosen = max(alike, key=lambda each: each.plane.tree.max_pools - each.plane.tree.sequences_used)
        chosen.plane.pools.require()
        return chosen

    def like(self, engine: Engine) -> list[Engine]:
        """The engines with the same model, itself among them."""
        identity = engine.plane.model_identity
        return [each for each in self if each is engine or (each.plane.model_identity == identity != "")]

    def find_pool(self, pool_id: PoolId, scope: Scope | None) -> tuple[Engine, PrefixPool] | None:
        """A pool and its engine, as seen from a scope (None: an administrator, who sees all)."""
        for engine in self:
            if (pool := engine.plane.pools.find(pool_id, scope)) is not None:
                return engine, pool
        return None

    def need_pool(self, pool_id: PoolId, scope: Scope | None) -> tuple[Engine, PrefixPool]:
        """Like ``find_pool``.

        Raises:
            NotFoundError: there is none, or it is another key's.
            DisabledError, UnavailableError: pools work on no engine.
        """
        self.require_pools()
        found = self.find_pool(pool_id, scope)
        if found is None:
            raise NotFoundError(f"pool {pool_id} does not exist", code="pool_not_found", param="pool_id")
        return found

    def require_pools(self) -> None:
        """Raise what the first engine says, unless pools work on one at least.

        Raises:
            DisabledError, UnavailableError: see there.
        """
        if not any(engine.has_pools for engine in self):
            self.first.plane.pools.require()

    def need_session(
        self, session_id: SessionId, scope: Scope | None, *, param: str = "session_id"
    ) -> tuple[Engine, Session]:
        """A session and the engine that knows it, best the one that still holds it; seen as by ``find_pool``.

        Raises:
            NotFoundError: there is none, or it is another key's.
            AmbiguousSessionError: several keys have one.
        """
        known = [
            (engine, session) for engine in self for session in engine.plane.sessions.seen(session_id, scope)
        ]
        require_one(session_id, (session for _, session in known), param=param)
        return next((each for each in known if each[1].slot is not None), known[0])
