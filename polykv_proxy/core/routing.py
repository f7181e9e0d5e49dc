"""Which engine of several answers a request.

Rule 1: state decides before load: a pool or a conversation is on one engine, and elsewhere it would have to
be computed again.
Rule 2: state that is only likely, such as a system prompt that an engine saw before, is worth no waiting
while another engine has an idle slot.
Rule 3: asking changes nothing; what was decided is remembered by ``Scenes.note``, and that is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.core.types import PoolId, Scope, Tokens

MAX_SCENES = 10_000
"""Starts of conversations that are remembered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What one engine could do for a request."""

    serving: bool
    serves_model: bool
    """Whether it has the model that the request names."""
    slots: int
    idle: int
    """Slots that may be given away."""
    waiting: int
    """Requests in its queue."""
    has_pool: bool = False
    """Whether the pool that the request names lives there."""
    links: int = 0
    """Links of the request's conversation that one of its slots holds."""
    named: bool = False
    """Whether the conversation that the request names was there last."""
    matched: int = 0
    """Leading tokens of the prompt that one of its pools holds."""
    scene: bool = False
    """Whether the request begins like those that it answered before."""

    @property
    def would_wait(self) -> bool:
        """Whether the request would find no slot."""
        return self.waiting > 0 or self.idle == 0

    @property
    def load(self) -> float:
        """Requests for each slot; 1.0 is full."""
        return (self.slots - self.idle + self.waiting) / max(1, self.slots)


def choose(prospects: Sequence[Prospect]) -> int:
    """The engine for a request, by its number.

    Each step keeps those that are best in one respect; the first that leaves one decides.

    1. The model that was named; if none has it, all stay: llama-server ignores a name that it does not know.
    2. Those that serve; if none does, the request waits for one of all.
    3. The pool that was named.
    4. The conversation that a slot holds, longest part first.
    5. Those with a free slot: the rest is not worth a wait.
    6. The longest match among the pools, then where the conversation of that name was last, then where a
       request with the same start was.
    7. The least load, then the first.
    """
    left = list(range(len(prospects)))

    def keep(wanted: Callable[[Prospect], bool]) -> None:
        nonlocal left
        left = [number for number in left if wanted(prospects[number])] or left

    def keep_most(value: Callable[[Prospect], float]) -> None:
        most = max(value(prospects[number]) for number in left)
        keep(lambda each: value(each) == most)

    keep(lambda each: each.serves_model)  # 1
    keep(lambda each: each.serving)  # 2
    keep(lambda each: each.has_pool)  # 3
    keep_most(lambda each: each.links)  # 4
    keep(lambda each: not each.would_wait)  # 5
    keep_most(lambda each: each.matched)  # 6
    keep(lambda each: each.named)
    keep(lambda each: each.scene)
    keep_most(lambda each: -each.load)  # 7
    return left[0]


def prospect(  # noqa: PLR0913 - what a request brings along
    plane: ControlPlane,
    ask: Ask,
    *,
    serves_model: bool,
    pool_id: PoolId | None = None,
    tokens: Tokens | None = None,
    scene: bool = False,
) -> Prospect:
    """What an engine could do for a request; asking takes nothing.

    Args:
        plane: the engine's state.
        ask: what the request wants.
        serves_model: whether the engine has the model that it names.
        pool_id: the pool that it names.
        tokens: its prompt, where that is known.
        scene: whether it begins like those that went there before.
    """
    pool = None if pool_id is None else plane.pools.find(pool_id, ask.scope)
    found = None if tokens is None else plane.tree.index.match(tokens, ask.scope)
    return Prospect(
        serving=plane.serving,
        serves_model=serves_model,
        slots=len(plane.board.slots),
        idle=plane.board.idle_count,
        waiting=plane.leases.waiting,
        has_pool=pool is not None,
        links=plane.board.held_links(ask),
        named=plane.sessions.idle_namesake(ask.scope, ask.name) is not None,
        matched=0 if found is None else found[1],
        scene=scene,
    )


class Scenes:
    """Which engine last answered a request with a certain start; the least recently noted are forgotten."""

    def __init__(self) -> None:
        self._engines: OrderedDict[tuple[Scope, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def engine(self, scope: Scope, start: int) -> int | None:
        """Number of the engine; None for a start that is not known.

        Args:
            scope: whose request.
            start: fingerprint of what comes before the conversation proper.
        """
        return self._engines.get((scope, start))

    def note(self, scope: Scope, start: int, engine: int) -> None:
        """Such a request goes to this engine."""
        self._engines[scope, start] = engine
        self._engines.move_to_end((scope, start))
        if len(self._engines) > MAX_SCENES:
            self._engines.popitem(last=False)
