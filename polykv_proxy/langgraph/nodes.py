"""Compaction in graphs of one's own: ``CompactionNode``, and a hook for ``create_react_agent``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import SystemMessage
from langchain_core.runnables import Runnable

from polykv_proxy.langgraph import compaction, structured
from polykv_proxy.langgraph.compactor import Compactor, Conversation
from polykv_proxy.langgraph.messages import to_openai

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langchain_core.runnables import RunnableConfig

    from polykv_proxy.langgraph.channels import PoolRef, Prefix
    from polykv_proxy.langgraph.chat_model import ChatPolyKV

State = dict[str, Any]


class CompactionNode(Runnable[State, State]):
    """A node that keeps a conversation within its window, and on a pool.

    Put it before the node that calls the model, on every way to it. The state needs the keys of
    ``PolyKVChannels`` and ``messages`` with the reducer ``add_messages``. Afterwards ``polykv_pool`` is the
    pool to call the model on, ``riding(model, state)`` does that.

    Args:
        compactor: of the model that is called.
        system: the system message that is sent before the messages, as it is sent.
        tools: that are bound to the model, in the same order.
    """

    def __init__(
        self, compactor: Compactor, *, system: str | SystemMessage | None = None, tools: Sequence[Any] = ()
    ) -> None:
        self.compactor = compactor
        self.prefix = prefix_of(compactor.model, system, tools)

    def invoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> State:  # noqa: A002, ARG002
        """Release, compact, and name the pool."""
        pool = self.compactor.pools.have(self.prefix, branch(input["messages"]))
        return self._named(input, pool, self.compactor.tend(self._conversation(input, pool)))

    async def ainvoke(
        self,
        input: State,  # noqa: A002
        config: RunnableConfig | None = None,  # noqa: ARG002
        **_: Any,
    ) -> State:
        """``invoke`` for asyncio."""
        pool = await self.compactor.pools.ahave(self.prefix, branch(input["messages"]))
        return self._named(input, pool, await self.compactor.atend(self._conversation(input, pool)))

    def fit(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Messages for one call that fit, where compaction could not help; see ``Compactor.fit``."""
        return self.compactor.fit(messages, self.prefix)

    async def afit(self, messages: Sequence[Any]) -> Sequence[Any]:
        """``fit`` for asyncio."""
        return await self.compactor.afit(messages, self.prefix)

    def _conversation(self, state: State, pool: PoolRef | None) -> Conversation:
        return Conversation(
            messages=state["messages"],
            prefix=self.prefix,
            pool=pool,
            retired=state.get("polykv_retire") or (),
        )

    @staticmethod
    def _named(state: State, pool: PoolRef | None, update: State) -> State:
        if "polykv_pool" not in update and pool != state.get("polykv_pool"):
            update["polykv_pool"] = pool
        return update


class _Hook(Runnable[State, State]):
    def __init__(self, node: CompactionNode) -> None:
        self._node = node

    def invoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> State:  # noqa: A002
        update = self._node.invoke(input, config)
        return {**update, "llm_input_messages": self._node.fit(_messages(input, update))}

    async def ainvoke(self, input: State, config: RunnableConfig | None = None, **_: Any) -> State:  # noqa: A002
        update = await self._node.ainvoke(input, config)
        return {**update, "llm_input_messages": await self._node.afit(_messages(input, update))}


def pre_model_hook(
    compactor: Compactor, *, system: str | SystemMessage | None = None, tools: Sequence[Any] = ()
) -> Runnable[State, State]:
    """The same for the ``pre_model_hook`` of ``create_react_agent``; new agents take the middleware.

    The agent's ``state_schema`` needs the keys of ``PolyKVChannels`` and ``llm_input_messages``.

    Args:
        compactor: of the model that is called.
        system: the agent's ``prompt``.
        tools: the agent's tools, in the same order.
    """
    return _Hook(CompactionNode(compactor, system=system, tools=tools))


def riding(model: ChatPolyKV, state: Mapping[str, Any]) -> Runnable[Any, Any]:
    """The model on the state's pool; as it is where there is none."""
    ref = state.get("polykv_pool")
    return model if ref is None else model.bind(pool_id=ref["id"])


def prefix_of(model: ChatPolyKV, system: str | SystemMessage | None, tools: Sequence[Any]) -> Prefix:
    """What precedes the messages, as the model sends it."""
    message = SystemMessage(system) if isinstance(system, str) else system
    return {
        "system": None if message is None else to_openai([message])[0],
        "tools": structured.tool_definitions(tools, in_order=model.sort_tools),
    }


def branch(messages: Sequence[Any]) -> Sequence[Any]:
    """What the last compaction left, which has a pool of its own; nothing before the first."""
    return messages[: compaction.known_messages(messages)]


def _messages(state: State, update: State) -> Sequence[Any]:
    """The conversation after an update of a compaction, whose first message removes the old ones."""
    messages: Sequence[Any] = update["messages"][1:] if "messages" in update else state["messages"]
    return messages
