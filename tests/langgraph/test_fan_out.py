"""Fan-out: one pool, waves by headroom, nothing left."""

import asyncio
import operator
from typing import Annotated, Any

from client.stub import StubProxy
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from polykv_proxy.langgraph import ChatPolyKV, FanChannels, FanOut, PolyKVChannels, Pools

THREAD = {"configurable": {"thread_id": "t"}}


class State(PolyKVChannels, FanChannels, total=False):
    """What the graph keeps."""

    seen: Annotated[list[Any], operator.add]


def graph_of(model, tasks, *, shared=("context",)):
    """Spread, ask, join, and a node after it."""

    def work(given):
        return {"seen": [given]}

    fan = FanOut(
        Pools(model),
        worker="ask",
        after="after",
        tasks=lambda _: tasks,
        shared=lambda _: [HumanMessage(text) for text in shared],
        system="rules",
        question=lambda task: HumanMessage(f"about {task}"),
    )
    builder = StateGraph(State)
    builder.add_node("ask", work)
    builder.add_node("after", lambda state: {"seen": [len(state["seen"])]})
    fan.add_to(builder, "spread")
    builder.add_edge(START, "spread").add_edge("after", END)
    return builder.compile(checkpointer=InMemorySaver())


async def test_all_workers_share_one_pool():
    """Below the ancestor; each has a session of its own; both are given up at the end."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        done = await graph_of(model, ["a", "b", "c"]).ainvoke({}, THREAD)
        *works, count = done["seen"]
        assert count == 3
        assert [work["task"] for work in works] == ["a", "b", "c"]
        assert [message.text for message in works[1]["messages"]] == ["context", "about b"]
        (pool,) = {work["polykv_pool"]["id"] for work in works}
        root, child = proxy.happened("created")
        assert pool == child
        names = [work["session_id"] for work in works]
        assert len(set(names)) == 3
        assert proxy.happened("close") == names
        assert proxy.happened("released") == [child]
        assert list(proxy.pools) == [root]
        assert done["polykv_fan"] is None
        await model.async_client.aclose()


async def test_a_wave_is_as_large_as_the_headroom():
    """The rest comes later; with none at all, one by one."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        for headroom, sizes in ((2, [2, 2, 1]), (0, [1] * 5), (None, [5])):
            proxy.headroom = headroom
            config = {"configurable": {"thread_id": str(headroom)}}
            graph, waves = graph_of(model, list("abcde")), []
            async for update in graph.astream({}, config, stream_mode="updates"):
                for each in update.values():
                    if each and each.get("polykv_fan"):
                        waves = each["polykv_fan"]["waves"]
            assert waves == sizes
            seen = (await graph.aget_state(config)).values["seen"]
            assert sorted(work["task"] for work in seen[:-1]) == list("abcde")
        assert len(set(proxy.happened("close"))) == 15
        await model.async_client.aclose()


async def test_a_pool_that_goes_between_two_waves_is_had_again():
    """Under the same id."""
    async with StubProxy() as proxy:
        proxy.headroom = 1
        model = ChatPolyKV(base_url=proxy.url)
        seen = []
        graph = graph_of(model, ["a", "b"])
        async for update in graph.astream({}, THREAD, stream_mode="updates"):
            seen += [
                each["polykv_fan"]["pool"]["id"]
                for each in update.values()
                if each and each.get("polykv_fan")
            ]
            if "ask" in update and len(seen) == 1:
                proxy.pools.clear()
        assert len(seen) == 2
        assert len(set(seen)) == 1
        assert proxy.happened("created").count(seen[0]) == 2
        await model.async_client.aclose()


async def test_without_asyncio():
    """The same in threads."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        proxy.headroom = 2
        done = await asyncio.to_thread(graph_of(model, ["a", "b", "c"]).invoke, {}, THREAD)
        assert done["seen"][-1] == 3
        assert len(proxy.pools) == 1


async def test_nothing_to_share_is_the_ancestor_itself():
    """Which stays."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        await graph_of(model, ["a"], shared=()).ainvoke({}, THREAD)
        assert len(proxy.happened("created")) == 1
        assert proxy.happened("released") == []
        await model.async_client.aclose()


async def test_nothing_to_do_goes_on():
    """No worker, and the pool is given up."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        done = await graph_of(model, []).ainvoke({}, THREAD)
        assert done["seen"] == [0]
        assert len(proxy.pools) == 1
        await model.async_client.aclose()
