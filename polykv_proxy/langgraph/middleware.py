"""``PolyKVMiddleware``: an agent of ``create_agent`` that rides on pools and compacts itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from langchain.agents.middleware.types import AgentMiddleware, ExtendedModelResponse
from langchain.agents.structured_output import OutputToolBinding, ToolStrategy
from langgraph.types import Command

from polykv_proxy.client.errors import PolyKVError
from polykv_proxy.langgraph import structured
from polykv_proxy.langgraph.channels import PolyKVState, PoolRef, Prefix, Telemetry, told
from polykv_proxy.langgraph.compaction import known_messages
from polykv_proxy.langgraph.compactor import Compactor, Conversation
from polykv_proxy.langgraph.errors import ContextOverflowError
from polykv_proxy.langgraph.messages import to_openai

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from langchain.agents.middleware.types import ModelRequest, ModelResponse
    from langchain_core.messages import BaseMessage
    from langgraph.runtime import Runtime

    from polykv_proxy.client.results import Capacity
    from polykv_proxy.langgraph.chat_model import ChatPolyKV


class PolyKVMiddleware(AgentMiddleware[PolyKVState, Any, Any]):
    """Pools, telemetry and compaction for ``create_agent``. Goes last in the list of middleware.

    Before each call of the model, once system, tools and messages are final, the conversation is attached to
    the pool of its system and tools, or of what a compaction left. A pool that is gone (an old checkpoint is
    replayed, the proxy was restarted) is made again from the messages. A sub-agent may be given a pool in
    ``polykv_pool``; it never hands one back.

    After each call, what the proxy says is in the state: ``polykv``, ``headroom_sessions``,
    ``mean_active_tps``, ``compaction_pressure``.

    Between two calls, a conversation that comes close to its window is compacted (CTX-9); one that cannot be
    is shortened for the call only. A call that is refused as too long is shortened and sent once more.

    Args:
        model: that of the agent.
        compactor: None: a new one with the model's window.
        telemetry: whether to ask for the headroom after each call.
    """

    state_schema = PolyKVState

    def __init__(
        self, model: ChatPolyKV, compactor: Compactor | None = None, *, telemetry: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.compactor = Compactor(model) if compactor is None else compactor
        self._telemetry = telemetry
        self.tools = []

    @property
    def _pools(self) -> Any:
        return self.compactor.pools

    # -- between two calls -------------------------------------------------------------------------------

    def before_model(self, state: PolyKVState, runtime: Runtime[Any]) -> dict[str, Any] | None:  # noqa: ARG002
        """Compact if it is time, and release what an earlier compaction left."""
        conversation = _conversation(state)
        return None if conversation is None else self.compactor.tend(conversation) or None

    async def abefore_model(self, state: PolyKVState, runtime: Runtime[Any]) -> dict[str, Any] | None:  # noqa: ARG002
        """``before_model`` for asyncio."""
        conversation = _conversation(state)
        return None if conversation is None else await self.compactor.atend(conversation) or None

    # -- a call ------------------------------------------------------------------------------------------

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        """Attach, call, and keep what is told."""
        prefix, given = self._prefix(request), _given(request)
        ref = given or self._pools.have(prefix, _branch(request))
        messages = self.compactor.fit(request.messages, prefix)
        try:
            response = handler(_attached(request, ref, messages))
        except ContextOverflowError as error:
            messages = self.compactor.fit(messages, prefix, refused=error)
            response = handler(_attached(request, ref, messages))
        capacity = None
        if self._telemetry and ref is not None:
            capacity = _or_none(lambda: self.model.client.capacity(ref["id"]))
        return self._kept(request, response, prefix, ref, capacity)

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ExtendedModelResponse[Any]:
        """``wrap_model_call`` for asyncio."""
        prefix, given = self._prefix(request), _given(request)
        ref = given or await self._pools.ahave(prefix, _branch(request))
        messages = await self.compactor.afit(request.messages, prefix)
        try:
            response = await handler(_attached(request, ref, messages))
        except ContextOverflowError as error:
            messages = await self.compactor.afit(messages, prefix, refused=error)
            response = await handler(_attached(request, ref, messages))
        capacity = None
        if self._telemetry and ref is not None:
            try:
                capacity = await self.model.async_client.capacity(ref["id"])
            except PolyKVError:
                capacity = None
        return self._kept(request, response, prefix, ref, capacity)

    # -- inside ------------------------------------------------------------------------------------------

    def _prefix(self, request: ModelRequest[Any]) -> Prefix:
        """What stands before the messages, as the model is going to send it."""
        tools: list[Any] = list(request.tools)
        if isinstance(request.response_format, ToolStrategy):  # create_agent adds these behind our back
            specs = request.response_format.schema_specs
            tools += [OutputToolBinding.from_schema_spec(spec).tool for spec in specs]
        system = request.system_message
        return {
            "system": None if system is None else to_openai([system])[0],
            "tools": structured.tool_definitions(tools, in_order=self.model.sort_tools),
        }

    def _kept(
        self,
        request: ModelRequest[Any],
        response: ModelResponse[Any],
        prefix: Prefix,
        ref: PoolRef | None,
        capacity: Capacity | None,
    ) -> ExtendedModelResponse[Any]:
        answer = next((each for each in response.result if each.type == "ai"), None)
        metadata = {} if answer is None else answer.response_metadata
        update: dict[str, Any] = {}
        if ref is not None and metadata.get("pool_unknown"):
            self._pools.forget(ref["id"])
            ref = None
        if ref != request.state.get("polykv_pool"):
            update["polykv_pool"] = ref
        if prefix != request.state.get("polykv_prefix"):
            update["polykv_prefix"] = prefix
        if capacity is not None:
            update |= told(reading(capacity, metadata))
        return ExtendedModelResponse(response, Command(update=update) if update else None)


def reading(capacity: Capacity, metadata: dict[str, Any] | None = None) -> Telemetry:
    """Telemetry of now, from what the proxy says about room and about the last answer."""
    metadata = metadata or {}
    return {
        "ts": datetime.now(UTC).timestamp(),
        "headroom_sessions": capacity.headroom_sessions,
        "mean_active_tps": capacity.mean_active_tps,
        "compaction_pressure": capacity.compaction_pressure,
        "session_tps": metadata.get("session_tps"),
        "backpressure": metadata.get("backpressure"),
    }


def _conversation(state: PolyKVState) -> Conversation | None:
    """None before the first call: nothing was counted yet."""
    prefix = state.get("polykv_prefix")
    if prefix is None:
        return None
    return Conversation(
        messages=state["messages"],
        prefix=prefix,
        pool=state.get("polykv_pool"),
        retired=state.get("polykv_retire") or (),
    )


def _given(request: ModelRequest[Any]) -> PoolRef | None:
    """A pool that somebody else made for this conversation."""
    ref = cast("PolyKVState", request.state).get("polykv_pool")
    return ref if ref is not None and "content" not in ref else None


def _branch(request: ModelRequest[Any]) -> Sequence[BaseMessage]:
    """What the last compaction left; it has a pool of its own."""
    return request.messages[: known_messages(request.messages)]


def _attached(request: ModelRequest[Any], ref: PoolRef | None, messages: Sequence[Any]) -> ModelRequest[Any]:
    settings = dict(request.model_settings)
    if ref is not None:
        settings["pool_id"] = ref["id"]
    return request.override(messages=list(messages), model_settings=settings)


def _or_none(ask: Callable[[], Capacity]) -> Capacity | None:
    try:
        return ask()
    except PolyKVError:
        return None
