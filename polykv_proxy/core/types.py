"""The words of the core: ids, token arrays, and the frozen values that cross its border.

Times are seconds. ``now`` is monotonic; names that end in ``_ts`` are epoch seconds for the wire.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

PoolId = NewType("PoolId", str)
"""Opaque to clients: a digest of what the pool holds, so the same content always has the same id."""

SessionId = NewType("SessionId", str)
"""A client conversation across requests."""

SessionKey: TypeAlias = "tuple[Scope, SessionId]"
"""A session among those of all callers: each key names its own as it likes."""

SlotId = NewType("SlotId", int)
"""The engine's place for one running request, from 0."""

PoolNumber = NewType("PoolNumber", int)
"""The engine's number of a pool, 0 to max_pools - 1; reused, and internal."""

PoolUid = NewType("PoolUid", int)
"""The engine's name of one materialization; never reused within an epoch."""

LeaseId = NewType("LeaseId", int)
"""One request's hold on its slots; counts up and travels to the engine as the request's tag."""

Scope = NewType("Scope", str)
"""Digest of a caller's API key: KV is shared within a scope only. Empty when sharing is unscoped."""

Tokens: TypeAlias = "array[int]"
"""Token ids as 32-bit integers: a quarter of a list's memory, and equality at memory speed."""


def as_tokens(ids: Iterable[int]) -> Tokens:
    """Pack token ids.

    Raises:
        OverflowError: an id does not fit 32 bits.
        TypeError: an item is no integer.
    """
    return array("i", ids)


Row = TypeVar("Row", "array[int]", str, bytes)


def common_prefix(a: Row, b: Row) -> int:
    """Number of leading tokens, or characters, on which both agree.

    Halves the interval around the first difference. Slices of arrays are copied and compared at memory
    speed, so 131,072 equal tokens take a tenth of a millisecond; views compare element by element.
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


MEDIUM = -1
"""Stands for a position that is no text; two of them are not the same because they are equal."""


def text_prefix(tokens: Tokens) -> int:
    """Leading positions that are text: all, or those before the first image or sound."""
    try:
        return tokens.index(MEDIUM)
    except ValueError:
        return len(tokens)


def agreement(then: Tokens, now: Tokens, compared: int | None) -> int | None:
    """Leading positions on which two prompts agree; None where that cannot be known.

    Two media are not the same because both are media. Where a request went on in the slot of the other, the
    engine has compared them; but what is known of a prompt may end with its first one, while it goes on.

    Args:
        then: the earlier prompt.
        now: the later one.
        compared: leading positions that the engine found to agree, all there are; None: it did not look.
    """
    common = common_prefix(then, now)
    text = text_prefix(now[:common])
    if text == common:
        return common
    if compared is None or (
        compared >= common and common in (len(then), len(now)) and now[common - 1] == MEDIUM
    ):
        return None
    return min(common, max(text, compared))


class PoolState(StrEnum):
    """Where a pool is in its life."""

    MATERIALIZING = "materializing"
    """Being computed; nobody can attach yet."""
    RESIDENT = "resident"
    EVICTED = "evicted"
    """Its cells were given back; computed again when a request attaches."""
    LOST = "lost"
    """The engine lost its memory (restart, reload); tokens and id are kept."""


class PoolOrigin(StrEnum):
    """Why a pool exists."""

    EXPLICIT = "explicit"
    SNAPSHOT = "snapshot"
    AUTO = "auto"


class SlotState(StrEnum):
    """What the engine says a slot is doing."""

    IDLE = "idle"
    WAIT = "wait"
    PROMPT = "prompt"
    GEN = "gen"


@dataclass(frozen=True, slots=True)
class SlotSample:
    """One slot as the engine reported it."""

    slot: SlotId
    state: SlotState
    task: int
    """Engine task id of the current or last request; -1 before the first."""
    tag: int
    """Lease of the current or last request; 0 if it had none."""
    gen_total: int
    """Tokens generated since the engine started, all requests of this slot together."""
    prompt_total: int
    """Prompt tokens computed since the engine started."""
    cached_total: int
    """Prompt tokens not computed thanks to resident KV, since the engine started."""
    tokens: int
    """Tokens that the slot's sequence holds now."""
    shared_tokens: int
    """Leading tokens whose cells it shares with the pool ``pool_uid``."""
    pool_uid: PoolUid
    ctx_tokens: int
    """The slot's window."""
    last_token_s: float | None = None
    """Seconds of the engine's clock at which the last token was accepted; None if it did not say."""
    waits: bool | None = None
    """Whether its prompt is held back for want of cells; None if the engine does not say."""


@dataclass(frozen=True, slots=True)
class PoolSample:
    """One pool as the engine reported it."""

    number: PoolNumber
    uid: PoolUid
    tokens: int


@dataclass(frozen=True, slots=True)
class OverflowSample:
    """What became of those for whom the engine had no cells, since it loaded its model."""

    waited: int
    """Tasks whose prompt had to wait for cells."""
    slots_cleared: int
    """Idle slots that lost what they held."""
    pools_released: int
    """Pools given up, all of them marked as ones that may go."""
    ended: int
    """Tasks that stopped early, with the text they had, as at a context limit."""
    refused: int
    """Tasks answered with 503 before they generated anything."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One reading of an engine's counters document."""

    epoch: str
    """Changes when the engine loads its model again; pools do not survive that."""
    taken_at: float
    """Monotonic seconds at which the proxy received it."""
    cells_used: int
    cells_total: int
    deferred: int
    """Tasks that wait inside the engine; stays 0 when every request is sent to an idle slot."""
    slots: tuple[SlotSample, ...]
    pools: tuple[PoolSample, ...]
    clock_s: float | None = None
    """Seconds of the engine's clock at which it was taken; None if the engine did not say."""
    overflow: OverflowSample | None = None
    """None if the engine does not count it."""

    @property
    def cells_free(self) -> int:
        """Cells that hold nothing."""
        return self.cells_total - self.cells_used

    @property
    def busy(self) -> bool:
        """Whether any slot works."""
        return any(slot.state is not SlotState.IDLE for slot in self.slots)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while a model is loaded."""

    epoch: str
    slots: int
    max_pools: int
    cells: int
    ctx_tokens: int
    """Window of one slot."""
    bytes_per_cell: int
    build: str
    model_tokens: int | None = None
    """Context that the model was trained with; None if the engine does not say."""
    models: tuple[str, ...] = ()
    """Names under which it answers, aliases included."""
    partial_match: bool = True
    """Whether a request can ride on a part of a pool. A recurrent state has no parts."""
    media: bool = False
    """Whether prompts may have images or sounds in them."""


class Capability(StrEnum):
    """How much an engine can do for pools; claimed only after it was seen to work."""

    ZERO_COPY = "zero_copy"
    """Patched engine: attached requests share the pool's cells."""
    COPY = "copy"
    """Engine without the patch: a pool is a slot file, and who attaches gets cells of its own from it."""
    RELAY = "relay"
    """Requests pass through; no pools."""

    @property
    def has_pools(self) -> bool:
        """Whether there are pools at all."""
        return self is not Capability.RELAY

    @property
    def shares_cells(self) -> bool:
        """Whether those who attach hold the pool's own cells."""
        return self is Capability.ZERO_COPY
