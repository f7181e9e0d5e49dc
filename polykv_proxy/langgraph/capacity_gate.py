"""A node that lets a graph go on only when the proxy has room, and what resumes graphs that wait.

The gate is for pacing: what it saw may be over when the next node acts. The proxy's own 429 is the authority;
``when_saturated`` brings a node that got one back to the gate.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from langchain_core.runnables import Runnable
from langgraph.config import get_config
from langgraph.errors import NodeError  # noqa: TC002 - LangGraph looks for it in the signature
from langgraph.types import Command, interrupt

from polykv_proxy.client import calls
from polykv_proxy.client.errors import PoolNotFoundError
from polykv_proxy.client.errors import PoolSaturatedError as ClientSaturatedError
from polykv_proxy.client.procedures import Pause
from polykv_proxy.langgraph.channels import told
from polykv_proxy.langgraph.errors import PoolSaturatedError, model_errors
from polykv_proxy.langgraph.middleware import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from langchain_core.runnables import RunnableConfig
    from langgraph.graph.state import CompiledStateGraph

    from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
    from polykv_proxy.client.procedures import Procedure
    from polykv_proxy.client.results import Capacity
    from polykv_proxy.langgraph.chat_model import ChatPolyKV

INTERRUPT = "polykv.capacity"
"""``type`` of the value of the gate's interrupts."""

_CHECKPOINTER = "__pregel_checkpointer"
"""Where LangGraph tells a node about it; there is no public way to ask."""

OnFull = Literal["interrupt", "wait", "route", "raise"]


class NoCheckpointerError(RuntimeError):
    """A gate was to interrupt a graph that nobody could resume."""


class CapacityGate(Runnable[dict[str, Any], Command[Any]]):
    """Looks for room and goes on, with ``capacity_ok`` and ``headroom_sessions`` in the state.

    ::

        gate = CapacityGate(model, goto="work", on_full="interrupt")
        builder.add_node("gate", gate, destinations=gate.destinations)

    Without room it does one of four things:

    * ``interrupt``: the graph stops until it is resumed; with what, does not matter, the gate looks again.
      Needs a checkpointer, and says so where there is none.
    * ``wait``: ask again at the pace that the proxy names, at most ``max_wait_s``.
    * ``route``: go to ``goto_full``.
    * ``raise``: ``PoolSaturatedError``.

    Args:
        model: whose proxy is asked.
        goto: where the graph goes on.
        on_full: what happens without room.
        goto_full: where ``route`` goes.
        sessions: how many are to come in; a number, or a function of the state.
        pool_id: whose policy counts, by the state; None: the state's ``polykv_pool``, else the engine's.
        expected_tokens: that each session is going to need.
        max_wait_s: of ``wait``.
    """

    def __init__(  # noqa: PLR0913 - what to look for and what to do
        self,
        model: ChatPolyKV,
        *,
        goto: str,
        on_full: OnFull = "interrupt",
        goto_full: str | None = None,
        sessions: int | Callable[[Mapping[str, Any]], int] = 1,
        pool_id: Callable[[Mapping[str, Any]], str | None] | None = None,
        expected_tokens: int | None = None,
        max_wait_s: float = 300.0,
    ) -> None:
        if on_full == "route" and goto_full is None:
            raise ValueError("route needs goto_full")
        self._model = model
        self._goto = goto
        self._on_full = on_full
        self._goto_full = goto_full
        self._sessions = sessions
        self._pool_id = pool_id or _pool_of
        self._expected_tokens = expected_tokens
        self._max_wait_s = max_wait_s

    @property
    def destinations(self) -> tuple[str, ...]:
        """For ``add_node``."""
        return (self._goto,) if self._goto_full is None else (self._goto, self._goto_full)

    def invoke(
        self,
        input: dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,  # noqa: ARG002
        **_: Any,
    ) -> Command[Any]:
        """Look, and decide."""
        with model_errors():
            return self._model.client.run(self._deciding(input))

    async def ainvoke(
        self,
        input: dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,  # noqa: ARG002
        **_: Any,
    ) -> Command[Any]:
        """``invoke`` for asyncio."""
        with model_errors():
            return await self._model.async_client.run(self._deciding(input))

    def _deciding(self, state: Mapping[str, Any]) -> Procedure[Command[Any]]:
        pool_id = self._pool_id(state)
        wanted = self._sessions if isinstance(self._sessions, int) else self._sessions(state)
        left = self._max_wait_s
        while True:
            try:
                found: Capacity = yield calls.capacity(pool_id, expected_tokens=self._expected_tokens)
            except PoolNotFoundError:  # a reference is no truth; whoever needs the pool makes it again
                pool_id = None
                continue
            room = found.has_room_for(wanted)
            update = {"capacity_ok": room, **told(reading(found))}
            pause = float(found.retry_after_s or 1)
            if room:
                return Command(update=update, goto=self._goto)
            if self._on_full == "route":
                return Command(update=update, goto=str(self._goto_full))
            if self._on_full == "interrupt":
                _need_checkpointer()
                interrupt(_value(pool_id, wanted, found))
            elif self._on_full == "wait" and pause <= left:
                left -= pause
                yield Pause(pause)
            else:
                _refuse(wanted, found, pause)


def when_saturated(goto: str) -> Callable[[Any, NodeError], Command[Any]]:
    """An ``error_handler`` for ``add_node``: a 429 leads to the gate, every other error stays one.

    Args:
        goto: the gate's node.
    """

    def handle(_state: Any, error: NodeError) -> Command[Any]:
        if not isinstance(error.error, ClientSaturatedError):
            raise error.error
        return Command(update={"capacity_ok": False}, goto=goto)

    return handle


def resume_when_free(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    config: RunnableConfig,
    client: PolyKVClient,
    *,
    max_wait_s: float = 300.0,
) -> Any:
    """Resume a graph that gates interrupted, one gate after the other, each when there is room.

    Args:
        graph: with a checkpointer.
        config: of the thread.
        client: of the proxy.
        max_wait_s: for each gate.

    Returns:
        What the last resumption returned; None if no gate waits.

    Raises:
        PoolSaturatedError: there was no room in that time.
    """
    answer = None
    while (waiting := _waiting(graph.get_state(config))) is not None:
        interrupt_id, value = waiting
        with model_errors(), suppress(PoolNotFoundError):  # then the gate looks by itself
            client.wait_for_capacity(value["pool_id"], sessions=value["sessions"], max_wait_s=max_wait_s)
        answer = graph.invoke(Command(resume={interrupt_id: True}), config)
    return answer


async def aresume_when_free(
    graph: CompiledStateGraph[Any, Any, Any, Any],
    config: RunnableConfig,
    client: AsyncPolyKVClient,
    *,
    max_wait_s: float = 300.0,
) -> Any:
    """``resume_when_free`` for asyncio."""
    answer = None
    while (waiting := _waiting(await graph.aget_state(config))) is not None:
        interrupt_id, value = waiting
        with model_errors(), suppress(PoolNotFoundError):
            await client.wait_for_capacity(
                value["pool_id"], sessions=value["sessions"], max_wait_s=max_wait_s
            )
        answer = await graph.ainvoke(Command(resume={interrupt_id: True}), config)
    return answer


def _pool_of(state: Mapping[str, Any]) -> str | None:
    ref = state.get("polykv_pool")
    return None if ref is None else ref["id"]


def _value(pool_id: str | None, sessions: int, found: Capacity) -> dict[str, Any]:
    return {
        "type": INTERRUPT,
        "pool_id": pool_id,
        "sessions": sessions,
        "headroom_sessions": found.headroom_sessions,
        "reason": found.why_not,
        "retry_after_s": found.retry_after_s,
    }


def _need_checkpointer() -> None:
    # a thread id proves nothing: it can be configured without a checkpointer
    if not get_config()["configurable"].get(_CHECKPOINTER):
        raise NoCheckpointerError(
            "there is no room, and a graph without a checkpointer cannot be resumed: "
            "compile it with one, or let the gate wait, route or raise"
        )


def _refuse(sessions: int, found: Capacity, pause: float) -> NoReturn:
    raise PoolSaturatedError(
        f"no room for {sessions} more sessions: {found.why_not or 'not enough headroom'}",
        error={"capacity": {"headroom_sessions": found.headroom_sessions}, "reason": found.why_not},
        retry_after=pause,
    )


def _waiting(snapshot: Any) -> tuple[str, dict[str, Any]] | None:
    """The first gate that waits: the id of its interrupt, and its value."""
    for each in snapshot.interrupts:
        if isinstance(each.value, dict) and each.value.get("type") == INTERRUPT:
            return each.id, each.value
    return None
