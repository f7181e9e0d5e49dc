"""State of graphs: what is read from the proxy, and which pool a conversation rides on.

Telemetry flows every way, and the newest reading wins. The reference of a pool flows down: a sub-agent may be
given one, and never hands its own back, where it would replace its parent's. Values are plain, so any
checkpointer can keep them. A key that was never written is not there: unknown is not 0.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypeVar

from langchain.agents.middleware.types import AgentState, OmitFromSchema, PrivateStateAttr
from typing_extensions import TypedDict

T = TypeVar("T")

Down = OmitFromSchema(input=False, output=True)
"""Annotation of keys that a sub-agent may be given and never hands back."""


class PoolRef(TypedDict):
    """The pool of a conversation. A handle, not truth: who uses it must bear that the pool is gone."""

    id: str
    root: str
    """The stable ancestor, of system and tools; the pool itself before the first compaction."""
    n_tokens: int
    content: NotRequired[str]
    """Digest of what it was made of; missing where somebody else made it."""


class Telemetry(TypedDict, total=False):
    """One reading; None for what the proxy did not know."""

    ts: float
    """Epoch seconds."""
    headroom_sessions: int | None
    mean_active_tps: float | None
    compaction_pressure: float | None
    session_tps: float | None
    backpressure: str | None


class Prefix(TypedDict):
    """What preceded the messages in the last request, as it stood in the body."""

    system: dict[str, Any] | None
    tools: list[dict[str, Any]]


def newest(old: Telemetry | None, new: Telemetry | None) -> Telemetry | None:
    """The later of two readings, by their own time."""
    if old is None or new is None:
        return old if new is None else new
    return new if new.get("ts", 0.0) >= old.get("ts", 0.0) else old


def last_known(old: T | None, new: T | None) -> T | None:
    """What was told last; a reading that knows nothing takes nothing away."""
    return old if new is None else new


class PolyKVChannels(TypedDict, total=False):
    """Keys for any ``StateGraph``: inherit from it."""

    polykv: Annotated[Telemetry | None, newest]
    headroom_sessions: Annotated[int | None, last_known]
    mean_active_tps: Annotated[float | None, last_known]
    compaction_pressure: Annotated[float | None, last_known]
    capacity_ok: Annotated[bool | None, last_known]
    polykv_pool: Annotated[PoolRef | None, Down]
    polykv_retire: Annotated[list[str] | None, PrivateStateAttr]
    """Pools to release once the state that no longer needs them is committed."""
    polykv_prefix: Annotated[Prefix | None, PrivateStateAttr]


class PolyKVState(AgentState[Any], PolyKVChannels):
    """State of an agent of ``create_agent`` with ``PolyKVMiddleware``."""


def told(reading: Telemetry) -> dict[str, Any]:
    """A reading as a state update: as a whole, and its three figures under their own names."""
    names = ("headroom_sessions", "mean_active_tps", "compaction_pressure")
    return {"polykv": reading, **{name: reading.get(name) for name in names}}
