"""Compaction in graphs of one's own."""

import asyncio
from typing import Annotated, Any

import pytest
from client.stub import StubProxy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import create_react_agent
from langgraph.prebuilt.chat_agent_executor import AgentState

from polykv_proxy.client.procedures import SUMMARISE
from polykv_proxy.langgraph import (
    ChatPolyKV,
    CompactionNode,
    Compactor,
    PolyKVChannels,
    pre_model_hook,
    riding,
)
from polykv_proxy.langgraph.nodes import prefix_of

THREAD = {"configurable": {"thread_id": "t"}}
LONG = "word " * 1200


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


class State(PolyKVChannels, total=False):
    """What the graph keeps."""

    messages: Annotated[list[Any], add_messages]


def graph_of(model, **options):
    """Compact, then answer."""
    node = CompactionNode(Compactor(model, window=4096), system="rules", tools=[look], **options)

    async def answer(state):
        on_pool = riding(model, state).bind(tools=node.prefix["tools"])
        return {
            "messages": [await on_pool.ainvoke([SystemMessage("rules"), *await node.afit(state["messages"])])]
        }

    builder = StateGraph(State).add_node("compact", node).add_node("answer", answer)
    builder.add_edge(START, "compact").add_edge("compact", "answer").add_edge("answer", END)
    return builder.compile(checkpointer=InMemorySaver())


def short(body):
    """What the pretended model says."""
    return "short" if body["messages"][-1]["content"] == SUMMARISE else "yes"


async def test_a_conversation_keeps_within_its_window_and_on_a_pool():
    """Many long turns; each compaction moves it to a new branch, and the old one goes a turn later."""
    async with StubProxy(short) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        graph, branches = graph_of(model), []
        for turn in range(12):
            state = await graph.ainvoke({"messages": [HumanMessage(f"{turn} {LONG}")]}, THREAD)
            assert state["messages"][-1].usage_metadata["input_tokens"] < 4096 + 1300
            branches.append(state["polykv_pool"]["id"])
            assert proxy.chats[-1]["opencoti"]["pool_id"] == branches[-1]
            assert branches[-1] in proxy.pools
        left = list(dict.fromkeys(branches))
        assert len(left) >= 4
        assert proxy.happened("released") == left[1 : 1 + len(proxy.happened("released"))]
        assert len(proxy.happened("released")) >= len(left) - 3
        assert left[0] in proxy.pools, "the ancestor stays"
        assert state["messages"][1].text == "short"
        summaries = [chat for chat in proxy.chats if chat["messages"][-1]["content"] == SUMMARISE]
        assert {chat["opencoti"]["session_id"] for chat in proxy.chats} == {"t/answer"}
        assert all(chat["tools"] == proxy.chats[0]["tools"] for chat in summaries)
        await model.async_client.aclose()


async def test_a_checkpoint_of_long_ago_has_its_pool_again():
    """It names one that was released; the same content has the same id."""
    async with StubProxy(short) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        graph = graph_of(model)
        for turn in range(9):
            await graph.ainvoke({"messages": [HumanMessage(f"{turn} {LONG}")]}, THREAD)
        gone = proxy.happened("released")[0]
        assert gone not in proxy.pools
        old = [
            each
            async for each in graph.aget_state_history(THREAD)
            if (each.values.get("polykv_pool") or {}).get("id") == gone and each.next == ("__start__",)
        ]
        state = await graph.ainvoke({"messages": [HumanMessage("again")]}, old[-1].config)  # the earliest
        assert gone in proxy.pools
        assert state["polykv_pool"]["id"] == gone
        assert state["messages"][-1].response_metadata["pool_id"] == gone
        assert "pool_unknown" not in state["messages"][-1].response_metadata
        await model.async_client.aclose()


async def test_behind_a_plain_engine_there_is_no_pool_and_no_error():
    """Messages are compacted all the same."""
    async with StubProxy(short, plain=True) as engine:
        model = ChatPolyKV(base_url=engine.url)
        graph = graph_of(model)
        for turn in range(5):
            state = await graph.ainvoke({"messages": [HumanMessage(f"{turn} {LONG}")]}, THREAD)
        assert state.get("polykv_pool") is None
        assert state["messages"][1].text == "short"
        await model.async_client.aclose()


async def test_the_hook_gives_what_is_sent():
    """In threads and with asyncio: all of it, and after a compaction the state's new messages."""
    async with StubProxy(short) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        hook = pre_model_hook(Compactor(model, window=4096), system="rules")
        calm = [HumanMessage("1")]
        assert (await hook.ainvoke({"messages": calm}))["llm_input_messages"] == calm
        usage = {"input_tokens": 3900, "output_tokens": 0, "total_tokens": 3900}
        full = [HumanMessage(LONG), AIMessage("2"), HumanMessage("3"), AIMessage("4", usage_metadata=usage)]
        update = await asyncio.to_thread(hook.invoke, {"messages": full})
        assert [each.text for each in update["llm_input_messages"]] == [SUMMARISE, "short", "3", "4"]
        assert tuple(update["messages"][1:]) == tuple(update["llm_input_messages"])
        assert update["polykv_pool"]["id"] in proxy.pools
        await model.async_client.aclose()


class ReactState(AgentState, PolyKVChannels, total=False):
    """What an agent of ``create_react_agent`` keeps."""

    llm_input_messages: list[Any]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
async def test_create_react_agent_takes_the_hook():
    """The deprecated way in."""
    async with StubProxy(short) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        hook = pre_model_hook(Compactor(model, window=4096), system="rules")
        agent = create_react_agent(
            model,
            [],
            prompt="rules",
            pre_model_hook=hook,
            state_schema=ReactState,
            checkpointer=InMemorySaver(),
        )
        for turn in range(5):
            state = await agent.ainvoke({"messages": [HumanMessage(f"{turn} {LONG}")]}, THREAD)
        assert state["messages"][1].text == "short"
        await model.async_client.aclose()


def test_riding_is_binding():
    """Or nothing."""
    model = ChatPolyKV()
    assert riding(model, {}) is model
    assert riding(model, {"polykv_pool": {"id": "p"}}).kwargs == {"pool_id": "p"}


def test_a_prefix_is_what_is_sent():
    """In any form that it is given."""
    model = ChatPolyKV()
    assert prefix_of(model, None, []) == {"system": None, "tools": []}
    assert prefix_of(model, SystemMessage("rules"), [look]) == prefix_of(model, "rules", [look])
