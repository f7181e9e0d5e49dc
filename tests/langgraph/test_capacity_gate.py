"""The gate: on, interrupt, wait, route, raise; and who resumes."""

import asyncio

import pytest
from client.stub import StubProxy
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send

from polykv_proxy.langgraph import (
    CapacityGate,
    ChatPolyKV,
    NoCheckpointerError,
    PolyKVChannels,
    PoolSaturatedError,
    aresume_when_free,
    resume_when_free,
    when_saturated,
)

THREAD = {"configurable": {"thread_id": "t"}}


class State(PolyKVChannels, total=False):
    """What the graphs keep."""

    done: str


def graph_of(gate, *, checkpointer=True, work=lambda _: {"done": "work"}, **options):
    """The gate, then work; or another way."""
    builder = StateGraph(State)
    builder.add_node("gate", gate, destinations=gate.destinations)
    builder.add_node("work", work, **options)
    builder.add_node("rest", lambda _: {"done": "rest"})
    builder.add_edge(START, "gate").add_edge("work", END).add_edge("rest", END)
    return builder.compile(checkpointer=InMemorySaver() if checkpointer else None)


async def test_with_room_the_graph_goes_on():
    """And the state knows how much there was; unknown is not 0."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        done = await graph_of(CapacityGate(model, goto="work")).ainvoke({}, THREAD)
        assert (done["done"], done["capacity_ok"], done.get("headroom_sessions")) == ("work", True, None)
        proxy.headroom = 3
        gate = CapacityGate(model, goto="work", sessions=lambda _: 3)
        done = await asyncio.to_thread(graph_of(gate).invoke, {}, THREAD)
        assert (done["headroom_sessions"], done["mean_active_tps"], done["compaction_pressure"]) == (
            3,
            5.0,
            0.25,
        )
        await model.async_client.aclose()


async def test_it_stops_and_is_resumed_when_there_is_room():
    """Resumed too early it looks again, and stops again."""
    async with StubProxy() as proxy:
        proxy.headroom = 0
        model = ChatPolyKV(base_url=proxy.url)
        graph = graph_of(CapacityGate(model, goto="work", sessions=2))
        (interrupt,) = (await graph.ainvoke({}, THREAD))["__interrupt__"]
        assert interrupt.value == {
            "type": "polykv.capacity",
            "pool_id": None,
            "sessions": 2,
            "headroom_sessions": 0,
            "reason": None,
            "retry_after_s": 1,
        }
        assert "__interrupt__" in await graph.ainvoke(Command(resume="now"), THREAD)
        proxy.headroom = 1
        assert "__interrupt__" in await graph.ainvoke(Command(resume="now"), THREAD)
        with pytest.raises(PoolSaturatedError):
            await aresume_when_free(graph, THREAD, model.async_client, max_wait_s=0)
        proxy.headroom = 2
        done = await aresume_when_free(graph, THREAD, model.async_client)
        assert (done["done"], done["headroom_sessions"]) == ("work", 2)
        assert await aresume_when_free(graph, THREAD, model.async_client) is None
        await model.async_client.aclose()


async def test_several_gates_are_resumed_one_after_the_other():
    """Each by the id of its own interrupt."""
    async with StubProxy() as proxy:
        proxy.headroom = 0
        model = ChatPolyKV(base_url=proxy.url)
        gate = CapacityGate(model, goto=END)
        builder = StateGraph(State).add_node("gate", gate, destinations=(END,))
        builder.add_conditional_edges(START, lambda _: [Send("gate", {}) for _ in range(3)], ["gate"])
        graph = builder.compile(checkpointer=InMemorySaver())
        stopped = await asyncio.to_thread(graph.invoke, {}, THREAD)
        assert len({each.id for each in stopped["__interrupt__"]}) == 3
        proxy.headroom = 1

        def resume():
            return resume_when_free(graph, THREAD, model.client)

        done = await asyncio.to_thread(resume)
        assert done["capacity_ok"] is True
        assert graph.get_state(THREAD).next == ()


async def test_without_a_checkpointer_it_says_so():
    """Instead of a graph that nobody can resume."""
    async with StubProxy() as proxy:
        proxy.headroom = 0
        model = ChatPolyKV(base_url=proxy.url)
        graph = graph_of(CapacityGate(model, goto="work"), checkpointer=False)
        for config in (None, THREAD):
            with pytest.raises(NoCheckpointerError, match="checkpointer"):
                await graph.ainvoke({}, config)
        await model.async_client.aclose()


async def test_it_waits_at_the_pace_of_the_proxy():
    """And only so long."""
    async with StubProxy() as proxy:
        proxy.headroom = 0
        model = ChatPolyKV(base_url=proxy.url)
        gate = CapacityGate(model, goto="work", on_full="wait", max_wait_s=60)
        run = asyncio.ensure_future(graph_of(gate, checkpointer=False).ainvoke({}))
        await asyncio.sleep(0.2)
        assert not run.done()
        proxy.headroom = 1
        assert (await asyncio.wait_for(run, 20))["done"] == "work"
        proxy.headroom = 0
        short = CapacityGate(model, goto="work", on_full="wait", max_wait_s=0.5)
        with pytest.raises(PoolSaturatedError):
            await graph_of(short, checkpointer=False).ainvoke({})
        await model.async_client.aclose()


async def test_it_takes_another_way_or_raises():
    """As it was told."""
    async with StubProxy() as proxy:
        proxy.headroom = 0
        model = ChatPolyKV(base_url=proxy.url)
        gate = CapacityGate(model, goto="work", on_full="route", goto_full="rest")
        done = await graph_of(gate).ainvoke({}, THREAD)
        assert (done["done"], done["capacity_ok"]) == ("rest", False)
        with pytest.raises(PoolSaturatedError) as caught:
            await graph_of(CapacityGate(model, goto="work", on_full="raise")).ainvoke({}, THREAD)
        assert (caught.value.headroom_sessions, caught.value.retry_after) == (0, 1.0)
        await model.async_client.aclose()
    with pytest.raises(ValueError, match="goto_full"):
        CapacityGate(model, goto="work", on_full="route")


async def test_a_429_leads_back_to_the_gate():
    """Which stops the graph until there is room; any other error stays one."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        attempts = []

        def work(_state):
            attempts.append(1)
            if len(attempts) == 1:
                proxy.headroom = 0
                raise PoolSaturatedError("full")
            return {"done": "work"}

        graph = graph_of(CapacityGate(model, goto="work"), work=work, error_handler=when_saturated("gate"))
        stopped = await graph.ainvoke({}, THREAD)
        assert stopped["__interrupt__"]
        proxy.headroom = 1
        assert (await aresume_when_free(graph, THREAD, model.async_client))["done"] == "work"

        def broken(_state):
            raise ZeroDivisionError

        graph = graph_of(CapacityGate(model, goto="work"), work=broken, error_handler=when_saturated("gate"))
        with pytest.raises(ZeroDivisionError):
            await graph.ainvoke({}, THREAD)
        await model.async_client.aclose()


async def test_it_asks_for_the_states_pool():
    """Whose policy counts; one that is gone is no reason to stop a graph."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        ref = {"id": "p", "root": "p", "n_tokens": 3}
        proxy.pools["p"] = 3
        proxy.headroom = 0
        graph = graph_of(CapacityGate(model, goto="work"))
        (interrupt,) = (await graph.ainvoke({"polykv_pool": ref}, THREAD))["__interrupt__"]
        assert interrupt.value["pool_id"] == "p"
        proxy.pools.clear()
        proxy.headroom = 1
        done = await aresume_when_free(graph, THREAD, model.async_client)
        assert done["done"] == "work"
        done = await graph.ainvoke({"polykv_pool": ref}, {"configurable": {"thread_id": "u"}})
        assert done["capacity_ok"]
        await model.async_client.aclose()
