"""A graph that stops while the proxy is full, and goes on when there is room.

python docs/examples/capacity_gate.py http://127.0.0.1:8090
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from polykv_proxy.langgraph import CapacityGate, ChatPolyKV, PolyKVChannels, resume_when_free, when_saturated

FLOOR = {"mode": "enforced", "kv_headroom_ratio": 0.5, "settle_max_ms": 0}
"""The group's sessions come in only while half of the cells are free."""


class State(PolyKVChannels):
    """What the graph keeps."""

    answer: Any


def build(model: ChatPolyKV, pool_id: str) -> Any:
    """The graph: gate, then work; a refusal on the way leads back to the gate."""
    gate = CapacityGate(model, goto="work", pool_id=lambda _: pool_id)

    def work(_state: State) -> dict[str, Any]:
        return {"answer": model.invoke([HumanMessage("Say something about rivers.")], pool_id=pool_id)}

    builder = StateGraph(State)
    builder.add_node("gate", gate, destinations=gate.destinations)
    builder.add_node("work", work, error_handler=when_saturated("gate"))
    builder.add_edge(START, "gate")
    builder.add_edge("work", END)
    return builder.compile(checkpointer=InMemorySaver())


def main(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill the proxy, start the graph, make room, resume; the state at the interrupt and at the end."""
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=16)
    client = model.client
    group = client.create_pool(tokens=range(100, 164), label="group")
    client.set_admission(group.pool_id, FLOOR)
    total = client.list_pools().kv_cells_total or 0
    ballast = client.create_pool(tokens=[200 + number % 800 for number in range(total * 6 // 10)], pin=True)
    graph = build(model, group.pool_id)
    config = {"configurable": {"thread_id": "gate"}}
    stopped = graph.invoke({}, config)
    print("stopped:", stopped["__interrupt__"][0].value)
    client.release_pool(ballast.pool_id)
    done = resume_when_free(graph, config, client)
    print("went on:", done["answer"].text)
    client.release_pool(group.pool_id)
    return stopped, done


if __name__ == "__main__":
    main(sys.argv[1])
