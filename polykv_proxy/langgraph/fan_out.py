"""Many workers on one shared context: a nested pool for all, waves by headroom, release at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.runtime import get_runtime
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from polykv_proxy.client import calls
from polykv_proxy.client.errors import PolyKVError, PoolNotFoundError
from polykv_proxy.client.procedures import fork_or_create
from polykv_proxy.langgraph.channels import PoolRef  # noqa: TC001 - LangGraph reads the annotations
from polykv_proxy.langgraph.errors import model_errors
from polykv_proxy.langgraph.messages import to_openai
from polykv_proxy.langgraph.nodes import prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from langchain_core.messages import BaseMessage, SystemMessage
    from langgraph.graph import StateGraph

    from polykv_proxy.client.procedures import Procedure
    from polykv_proxy.client.results import Capacity, Pool
    from polykv_proxy.langgraph.pools import Pools


class Fan(TypedDict):
    """A fan-out that is going on."""

    pool: PoolRef
    pending: list[Any]
    """Tasks of later waves."""
    name: str
    """What the names of the workers' sessions begin with."""
    sent: int
    waves: list[int]
    """How many workers each wave had so far."""


class FanChannels(TypedDict, total=False):
    """The key that a graph with a fan-out needs."""

    polykv_fan: Annotated[Fan | None, PrivateStateAttr]


class FanOut:
    """k workers that share a context.

    ::

        fan = FanOut(pools, worker="ask", after="report", tasks=lambda state: state["questions"],
                     shared=lambda state: state["messages"], system=SYSTEM)
        builder.add_node("ask", ask)
        fan.add_to(builder, "spread")

    The first node makes one pool: system and tools, which is the stable ancestor, and the shared messages
    below it. All workers ride on that; they need a session each, not a pool. A wave has as many workers as
    the proxy has headroom for, at least one; they take turns in its slots. When a wave is done, its sessions
    are closed and the next one starts; after the last the pool is released and the graph goes on.

    A worker gets ``task``, ``messages`` (the shared ones and the task), ``polykv_pool`` and ``session_id``:

    ::

        def ask(work):
            on_pool = model.bind(pool_id=work["polykv_pool"]["id"], session_id=work["session_id"])
            return {"answers": [on_pool.invoke([system, *work["messages"]])]}

    Args:
        pools: of the workers' model.
        worker: node of the workers.
        after: node to go on with.
        tasks: one for each worker, by the state; values that a checkpoint can hold.
        shared: the messages that all workers begin with, by the state; the last one better not the user's,
            because the task follows it.
        system: message before them.
        tools: of the workers, in their order.
        question: the message that a task becomes.
    """

    def __init__(  # noqa: PLR0913 - who works on what
        self,
        pools: Pools,
        *,
        worker: str,
        after: str,
        tasks: Callable[[Mapping[str, Any]], Sequence[Any]],
        shared: Callable[[Mapping[str, Any]], Sequence[BaseMessage]],
        system: str | SystemMessage | None = None,
        tools: Sequence[Any] = (),
        question: Callable[[Any], BaseMessage] = lambda task: HumanMessage(str(task)),
    ) -> None:
        self._pools = pools
        self._worker = worker
        self._after = after
        self._tasks = tasks
        self._shared = shared
        self._prefix = prefix_of(pools.model, system, tools)
        self._question = question
        self._join = ""

    def add_to(self, builder: StateGraph[Any, Any, Any, Any], name: str) -> None:
        """Add the node that starts it as ``name``, the one that joins as ``name_join``, and the edges."""
        join = f"{name}_join"
        builder.add_node(name, self._node(self._spreading), destinations=(self._worker, join))
        builder.add_node(
            join, self._node(self._joining), defer=True, destinations=(self._worker, self._after)
        )
        builder.add_edge(self._worker, join)
        self._join = join

    def _node(self, step: Callable[[Mapping[str, Any]], Procedure[Command[Any]]]) -> RunnableLambda[Any, Any]:
        model = self._pools.model

        def run(state: Mapping[str, Any]) -> Command[Any]:
            with model_errors():
                return model.client.run(step(state))

        async def arun(state: Mapping[str, Any]) -> Command[Any]:
            with model_errors():
                return await model.async_client.run(step(state))

        return RunnableLambda(run, arun)

    def _spreading(self, state: Mapping[str, Any]) -> Procedure[Command[Any]]:
        info = get_runtime().execution_info
        key = None if info is None else info.task_id  # the same when the node is repeated or resumed
        pool = yield from self._having(state, key)
        pending = list(self._tasks(state))
        fan: Fan = {"pool": pool, "pending": pending, "name": f"fan/{key}", "sent": 0, "waves": []}
        return (yield from self._wave(state, fan))

    def _having(self, state: Mapping[str, Any], key: str | None = None) -> Procedure[PoolRef]:
        """The pool of the shared messages; the ancestor itself where there are none."""
        history = self._pools.history(self._prefix)
        root: Pool = yield calls.create_pool(**history.content(()), idempotency_key=key)
        below = to_openai(self._shared(state))
        pool = root
        if below:
            pool = yield from fork_or_create(root.pool_id, history, below)
        return {"id": pool.pool_id, "root": root.pool_id, "n_tokens": pool.prefix_len}

    def _joining(self, state: Mapping[str, Any]) -> Procedure[Command[Any]]:
        fan: Fan = state["polykv_fan"]
        last = fan["waves"][-1] if fan["waves"] else 0
        for number in range(fan["sent"] - last, fan["sent"]):
            try:
                yield calls.close_session(f"{fan['name']}/{number}")
            except PolyKVError:
                continue  # a worker that asked nothing, or under another name
        if fan["pending"]:
            return (yield from self._wave(state, fan))
        if fan["pool"]["id"] != fan["pool"]["root"]:
            yield from self._pools.releasing([fan["pool"]["id"]])
        return Command(update={"polykv_fan": None}, goto=self._after)

    def _wave(self, state: Mapping[str, Any], fan: Fan) -> Procedure[Command[Any]]:
        """As many workers as there is room for."""
        if not fan["pending"]:
            return Command(update={"polykv_fan": fan}, goto=self._join)
        try:
            found: Capacity = yield calls.capacity(fan["pool"]["id"])
        except PoolNotFoundError:  # it went between two waves
            fan = {**fan, "pool": (yield from self._having(state))}
            found = yield calls.capacity(fan["pool"]["id"])
        room = len(fan["pending"]) if found.headroom_sessions is None else found.headroom_sessions
        size = max(1, min(len(fan["pending"]), room))
        tasks, later = fan["pending"][:size], fan["pending"][size:]
        shared = list(self._shared(state))
        sends = [
            Send(
                self._worker,
                {
                    "task": task,
                    "messages": [*shared, self._question(task)],
                    "polykv_pool": fan["pool"],
                    "session_id": f"{fan['name']}/{fan['sent'] + number}",
                },
            )
            for number, task in enumerate(tasks)
        ]
        going: Fan = {
            **fan,
            "pending": later,
            "sent": fan["sent"] + size,
            "waves": [*fan["waves"], size],
        }
        return Command(update={"polykv_fan": going, "headroom_sessions": found.headroom_sessions}, goto=sends)
