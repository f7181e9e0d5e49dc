"""Pools as tools: LangChain's suites, the real proxy's answers, and errors that are data."""

import asyncio
import json

import pytest
from client.stub import StubProxy
from langchain_core.messages import AIMessage
from langchain_tests.unit_tests import ToolsUnitTests
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from polykv_proxy.langgraph import ChatPolyKV, polykv_tools
from polykv_proxy.langgraph.pool_tools import NAMES

SYSTEM = "You are a helper with a long system prompt. " * 4
ARGUMENTS = {
    "create_pool": {"system_prompt": SYSTEM},
    "fork_pool": {"pool_id": "p", "system_prompt": SYSTEM, "shared_text": "More. " * 20},
    "pool_status": {"pool_id": "p"},
    "session_tps": {},
    "capacity": {},
    "release_pool": {"pool_id": "p"},
}


def tools_of(url="http://127.0.0.1:9", **options):
    """By name."""
    return {tool.name: tool for tool in polykv_tools(ChatPolyKV(base_url=url, max_retries=0), **options)}


@pytest.mark.parametrize("name", NAMES)
class TestUnits(ToolsUnitTests):
    """LangChain's suite, for each tool. Its cases that need a server are with the engine."""

    chosen = "capacity"

    @pytest.fixture(autouse=True)
    def _choose(self, name):
        type(self).chosen = name

    tool_constructor = property(lambda self: tools_of()[self.chosen])
    tool_invoke_params_example = property(lambda self: ARGUMENTS[self.chosen])


async def test_an_orchestrator_looks_after_its_pools(rig):
    """Create, fork, look, release; the artifact is the answer, the text is for the model."""
    tools = tools_of(rig.url)

    def work():
        def use(tool, **arguments):
            call = {"name": tool, "args": arguments, "id": "1", "type": "tool_call"}
            message = tools[tool].invoke(call)
            assert json.loads(message.content) == message.artifact
            return message.artifact

        root = use("create_pool", system_prompt=SYSTEM, label="root")
        assert root["ok"]
        child = use("fork_pool", pool_id=root["pool_id"], system_prompt=SYSTEM, shared_text="More. " * 20)
        assert child["parent"] == root["pool_id"]
        status = use("pool_status", pool_id=root["pool_id"])
        assert [each["pool_id"] for each in status["subtree"]] == [child["pool_id"]]
        assert use("capacity", pool_id=root["pool_id"])["can_admit"]
        assert use("session_tps", session_id="nobody")["sessions"] == []
        refused = use("release_pool", pool_id=root["pool_id"])
        assert (refused["ok"], refused["error"]) == (False, "pool_has_children")
        released = use("release_pool", pool_id=root["pool_id"], recursive=True)
        assert set(released["released"]) == {root["pool_id"], child["pool_id"]}
        return root["pool_id"]

    gone = await asyncio.to_thread(work)
    assert (await tools["pool_status"].ainvoke({"pool_id": gone})).startswith('{"ok": false')
    await tools["capacity"].ainvoke({})


async def test_an_error_does_not_end_the_graph():
    """In a ``ToolNode``, with and without a server."""
    node = ToolNode(list(tools_of().values()))
    builder = StateGraph(MessagesState).add_node("tools", node)
    graph = builder.add_edge(START, "tools").add_edge("tools", END).compile()
    call = {"name": "capacity", "args": {}, "id": "1", "type": "tool_call"}
    done = await graph.ainvoke({"messages": [AIMessage("", tool_calls=[call])]})
    answer = json.loads(done["messages"][-1].content)
    assert (answer["ok"], answer["error"]) == (False, "ConnectionFailedError")


async def test_saturation_says_when_to_come_again():
    """The model can wait for it."""
    async with StubProxy() as proxy:
        tools = tools_of(proxy.url)
        missing = json.loads(await tools["fork_pool"].ainvoke(ARGUMENTS["fork_pool"]))
        assert (missing["ok"], missing["error"]) == (False, "pool_not_found")


def test_one_can_choose():
    """And not what is not there."""
    assert set(tools_of(include=["capacity"])) == {"capacity"}
    assert set(tools_of()) == set(NAMES) == set(ARGUMENTS)
    with pytest.raises(ValueError, match="no tools"):
        tools_of(include=["magic"])


async def test_they_can_be_bound():
    """As any tool."""
    bound = ChatPolyKV().bind_tools(list(tools_of().values()))
    assert [tool["function"]["name"] for tool in bound.kwargs["tools"]] == list(NAMES)
