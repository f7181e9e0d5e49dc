"""Names of conversations, in graphs as LangGraph really runs them."""

import operator
from typing import Annotated

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from polykv_proxy.langgraph.session_key import header_safe, session_key


class State(TypedDict, total=False):
    """Names that nodes saw."""

    names: Annotated[list, operator.add]


def look(_state):
    """A node that tells its name."""
    return {"names": [session_key()]}


THREAD = {"configurable": {"thread_id": "t"}}


def test_a_node_has_one_name_over_all_turns():
    """The task id of each step is noise."""
    builder = StateGraph(State).add_node("model", look).add_edge(START, "model").add_edge("model", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    for _ in range(3):
        names = graph.invoke({"names": []}, THREAD)["names"]
    assert names == ["t/model"] * 3


def test_parallel_workers_have_names_of_their_own():
    """Of workers that were sent, the id is what tells them apart."""
    builder = StateGraph(State).add_node("w", look)
    builder.add_conditional_edges(START, lambda _: [Send("w", {}) for _ in range(3)], ["w"])
    names = builder.compile(checkpointer=InMemorySaver()).invoke({"names": []}, THREAD)["names"]
    assert len(set(names)) == 3
    assert all(name.startswith("t/w:") for name in names)


def test_a_sub_agent_is_another_conversation():
    """And each call of it, too; inside, its steps share one name."""
    inner = StateGraph(State).add_node("a", look).add_node("b", look)
    inner = inner.add_edge(START, "a").add_edge("a", "b").add_edge("b", END).compile()
    outer = StateGraph(State).add_node("sub", inner).add_edge(START, "sub").add_edge("sub", END)
    names = outer.compile(checkpointer=InMemorySaver()).invoke({"names": []}, THREAD)["names"]
    parents = {name.rpartition("/")[0] for name in names}
    assert len(parents) == 1
    assert parents.pop().startswith("t/sub:")
    assert [name.rpartition("/")[2] for name in names] == ["a", "b"]


def test_outside_a_graph_there_is_no_name():
    """Then messages tell."""
    assert session_key() is None
    assert session_key({"configurable": {}}) is None


def test_names_are_fit_for_the_proxy():
    """Short and printable ones stay, the others become digests, the same each time."""
    assert header_safe("thread/model") == "thread/model"
    for name in ("x" * 300, "a\nb", "ü", " a"):
        assert len(header_safe(name)) == 64
        assert header_safe(name) == header_safe(name)
    assert header_safe("ü") != header_safe("ö")
