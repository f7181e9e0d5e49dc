"""Which engine a request goes to, found from what it says and from what the engines hold.

What the core cannot know without I/O is the prompt's tokens. They are asked for only when nothing cheaper
tells where the request belongs: neither a pool it names, nor its conversation, nor a start seen before. And a
resumable stream is taken up, or stopped, where it was begun.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from polykv_proxy.core.routing import Scenes, choose, prospect
from polykv_proxy.core.types import PoolId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from polykv_proxy.api.asked import Asked
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import Tokens
    from polykv_proxy.fleet import Engine, Fleet

MAX_STREAMS = 10_000
"""Resumable streams that are remembered at once."""


class Placement:
    """Chooses among the engines of a fleet.

    Args:
        fleet: two engines or more; with one there is nothing to choose.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._scenes = Scenes()
        self._streams: OrderedDict[str, int] = OrderedDict()
        """Engine of each resumable stream; the engine itself forgets one minutes after its end."""

    async def choose(
        self, asked: Asked, ask: Ask, tokenize: Callable[[Engine], Awaitable[Tokens | None]] | None
    ) -> tuple[Engine, Tokens | None]:
        """The engine for a request, and its tokens there if they had to be asked for.

        See ``core.routing.choose`` for what counts.

        Args:
            asked: the request.
            ask: what it wants of an engine's slots.
            tokenize: finds its exact tokens with the help of an engine; None if no pool may be matched.
        """
        chosen, certain = self._choose(asked, ask, None, ())
        tokens = None
        if not certain and tokenize is not None:
            alike = self._fleet.like(chosen)  # tokens of another model are other tokens
            if len(alike) > 1 and any(engine.has_pools and len(engine.plane.tree) for engine in alike):
                tokens = await tokenize(chosen)
                chosen, _ = self._choose(asked, ask, tokens, alike)
                tokens = tokens if chosen in alike else None
        if asked.scene is not None:
            self._scenes.note(ask.scope, asked.scene, chosen.number)
        return chosen, tokens

    def note_stream(self, stream: str, engine: Engine) -> None:
        """A resumable stream begins."""
        self._streams[stream] = engine.number
        self._streams.move_to_end(stream)
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)

    def of_stream(self, query: str) -> Engine | None:
        """The engine of the stream that ``?conv_id=`` names; None if none is known."""
        names = parse_qs(query).get("conv_id", [""])
        number = self._streams.get(names[-1])
        return None if number is None else self._fleet[number]

    def _choose(
        self, asked: Asked, ask: Ask, tokens: Tokens | None, alike: Collection[Engine]
    ) -> tuple[Engine, bool]:
        """The engine as far as is known, and whether something that it holds decided.

        Args:
            asked: the request.
            ask: what it wants of an engine's slots.
            tokens: its prompt.
            alike: the engines on which those are its tokens.
        """
        model = asked.model
        seen = None if asked.scene is None else self._scenes.engine(ask.scope, asked.scene)
        prospects = [
            prospect(
                engine.plane,
                ask,
                serves_model=model is not None and engine.serves(model),
                pool_id=None if asked.pool_id is None else PoolId(asked.pool_id),
                tokens=tokens if engine in alike else None,
                scene=engine.number == seen,
            )
            for engine in self._fleet
        ]
        number = choose(prospects)
        best = prospects[number]
        return self._fleet[number], best.has_pool or best.links > 0 or best.scene
