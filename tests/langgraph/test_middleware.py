"""Agents of ``create_agent`` on pools."""

import asyncio
import json

import pytest
from client.stub import StubProxy
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from polykv_proxy.client.procedures import SUMMARISE
from polykv_proxy.langgraph import ChatPolyKV, Compactor, PolyKVMiddleware
from polykv_proxy.langgraph.compactor import EVENT

THREAD = {"configurable": {"thread_id": "t"}}
LONG = "word " * 1200


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"{place} is empty"


def agent_of(model, *, window=4096, tools=(look,), **options):
    """An agent with our middleware."""
    middleware = [PolyKVMiddleware(model, Compactor(model, window=window))]
    return create_agent(
        model,
        list(tools),
        system_prompt="rules",
        middleware=middleware,
        checkpointer=InMemorySaver(),
        **options,
    )


def short(body):
    """What the pretended model says."""
    return "short" if body["messages"][-1]["content"] == SUMMARISE else "yes"


def calling(name, **arguments):
    """A message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


async def test_agents_with_the_same_prompt_and_tools_ride_on_one_pool():
    """It is asked for once; the state knows it, and how much room there is."""
    async with StubProxy() as proxy:
        proxy.headroom = 5
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        for thread in "ab":
            config = {"configurable": {"thread_id": thread}}
            for _ in range(2):
                await agent.ainvoke({"messages": [HumanMessage("hi")]}, config)
            state = (await agent.aget_state(config)).values
        (pool,) = proxy.happened("created")
        assert proxy.happened("found") == []
        assert [chat["opencoti"]["pool_id"] for chat in proxy.chats] == [pool] * 4
        assert [chat["opencoti"]["session_id"] for chat in proxy.chats] == ["a/model"] * 2 + ["b/model"] * 2
        assert state["polykv_pool"]["id"] == pool
        assert (state["headroom_sessions"], state["mean_active_tps"], state["compaction_pressure"]) == (
            5,
            5.0,
            0.25,
        )
        assert state["polykv"]["session_tps"] == 9.5
        await model.async_client.aclose()


async def test_without_asyncio():
    """The same in threads, with a tool on the way."""
    async with StubProxy(calling("look", place="cellar"), "yes") as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        done = await asyncio.to_thread(agent.invoke, {"messages": [HumanMessage("hi")]}, THREAD)
        assert [message.type for message in done["messages"]] == ["human", "ai", "tool", "ai"]
        assert done["messages"][2].text == "cellar is empty"
        assert len(proxy.happened("created")) == 1
        assert "polykv_pool" not in done


async def test_a_pool_that_is_gone_is_made_again():
    """The proxy says so in one answer; the next one rides again."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        proxy.pools.clear()
        await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert (await agent.aget_state(THREAD)).values["polykv_pool"] is None
        done = await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert len(proxy.happened("created")) == 2
        assert "pool_unknown" not in done["messages"][-1].response_metadata
        await model.async_client.aclose()


async def test_a_long_conversation_compacts_itself():
    """Between two calls; one event for each; the branch that is left goes one turn later."""
    async with StubProxy(short) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent, events, left = agent_of(model), [], []
        for turn in range(12):
            question = {"messages": [HumanMessage(f"{turn} {LONG}")]}
            async for mode, event in agent.astream(question, THREAD, stream_mode=["custom", "values"]):
                if mode == "custom":
                    events.append(event)
            state = (await agent.aget_state(THREAD)).values
            left.append(state["polykv_pool"]["id"])
            assert left[-1] in proxy.pools
            for retired in state.get("polykv_retire") or ():
                assert retired in proxy.pools, "it goes after the state is committed that no longer needs it"
        branches = list(dict.fromkeys(left))
        assert len(events) == len(branches) - 1 >= 3
        assert all(event["type"] == EVENT for event in events)
        assert branches[0] in proxy.pools
        assert proxy.happened("released") == branches[1 : 1 + len(proxy.happened("released"))]
        assert len(proxy.happened("released")) >= len(branches) - 3
        assert {chat["opencoti"]["session_id"] for chat in proxy.chats} == {"t/model"}
        await model.async_client.aclose()


async def test_compaction_keeps_calls_with_their_results():
    """In the middle of a chain of tools."""

    def answer(body):
        last = body["messages"][-1]
        if last["content"] == SUMMARISE:
            return "short"
        return calling("look", place="x " * 900) if last["role"] == "user" else "yes"

    async with StubProxy(answer) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        for turn in range(6):
            await agent.ainvoke({"messages": [HumanMessage(f"{turn} {LONG}")]}, THREAD)
        assert any(chat["messages"][-1]["content"] == SUMMARISE for chat in proxy.chats)
        for chat in proxy.chats:
            called = [call["id"] for message in chat["messages"] for call in message.get("tool_calls") or ()]
            answered = [message["tool_call_id"] for message in chat["messages"] if message["role"] == "tool"]
            assert called == answered
        await model.async_client.aclose()


@pytest.mark.parametrize("threads", [False, True])
async def test_what_is_refused_as_too_long_is_shortened_and_sent_once_more(threads):
    """The state keeps everything."""
    async with StubProxy(window=2000) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model, window=None)
        for turn in range(3):
            question = {"messages": [HumanMessage(f"{turn} {'word ' * 900}")]}
            if threads:
                done = await asyncio.to_thread(agent.invoke, question, THREAD)
            else:
                done = await agent.ainvoke(question, THREAD)
        assert len(done["messages"]) == 6
        assert len(proxy.chats[-1]["messages"]) < 6
        assert proxy.chats[-1]["messages"][0]["content"] == "rules"
        await model.async_client.aclose()


async def test_behind_a_plain_engine_agents_work_unchanged():
    """No pool, no telemetry, no error."""
    async with StubProxy(plain=True) as engine:
        model = ChatPolyKV(base_url=engine.url)
        agent = agent_of(model)
        done = await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert done["messages"][-1].text == "yes"
        assert (await agent.aget_state(THREAD)).values.get("polykv_pool") is None
        await model.async_client.aclose()


async def test_with_the_admin_key_agents_ride_on_pools():
    """The model has it, and everything that uses the model's client."""
    async with StubProxy(admin_key="over") as proxy:
        proxy.headroom = 5
        model = ChatPolyKV(base_url=proxy.url, api_key="agents", admin_key="over")
        agent = agent_of(model)
        await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert [chat["opencoti"]["pool_id"] for chat in proxy.chats] == proxy.happened("created")
        assert (await agent.aget_state(THREAD)).values["headroom_sessions"] == 5
        assert await asyncio.to_thread(lambda: model.client.capacity().headroom_sessions) == 5
        await model.async_client.aclose()


async def test_without_the_admin_key_agents_work_and_are_warned_once(caplog):
    """No pool and no telemetry; a compaction still puts its summary in the place of the past."""
    async with StubProxy(short, admin_key="over") as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        for question in ("hi", LONG, LONG, LONG, LONG, "and now?"):
            done = await agent.ainvoke({"messages": [HumanMessage(question)]}, THREAD)
        assert done["messages"][0].text == SUMMARISE
        assert [chat["opencoti"].get("pool_id") for chat in proxy.chats] == [None] * len(proxy.chats)
        assert (await agent.aget_state(THREAD)).values.get("headroom_sessions") is None
        assert len([each for each in caplog.records if "admin_key=" in each.message]) == 1
        await model.async_client.aclose()


class Verdict(BaseModel):
    """What the agent thinks."""

    good: bool


async def test_tools_for_structure_are_part_of_the_prefix():
    """``create_agent`` adds them after us, so the pool must have them, too."""
    async with StubProxy('{"name": "Verdict", "arguments": {"good": true}}') as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model, response_format=ToolStrategy(Verdict))
        done = await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert done["structured_response"] == Verdict(good=True)
        sent = [tool["function"] for tool in proxy.chats[0]["tools"]]
        state = (await agent.aget_state(THREAD)).values
        assert [tool["function"] for tool in state["polykv_prefix"]["tools"]] == sent
        await model.async_client.aclose()


async def test_a_sub_agent_rides_on_the_pool_that_it_is_given():
    """Somebody else made it, with more in it; what it makes itself it keeps to itself."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        proxy.pools["shared"] = 7
        agent = agent_of(model)
        ref = {"id": "shared", "root": "root", "n_tokens": 7}
        done = await agent.ainvoke({"messages": [HumanMessage("hi")], "polykv_pool": ref}, THREAD)
        assert proxy.chats[0]["opencoti"]["pool_id"] == "shared"
        assert proxy.happened("created") == []
        assert "polykv_pool" not in done
        await model.async_client.aclose()


async def test_an_unknown_headroom_is_no_headroom_of_0():
    """And an error of telemetry is none of the agent's."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        agent = agent_of(model)
        await agent.ainvoke({"messages": [HumanMessage("hi")]}, THREAD)
        assert (await agent.aget_state(THREAD)).values.get("headroom_sessions") is None
        silent = create_agent(model, middleware=[PolyKVMiddleware(model, telemetry=False)])
        assert "polykv" not in await silent.ainvoke({"messages": [HumanMessage("hi")]})
        await model.async_client.aclose()
