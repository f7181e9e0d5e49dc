"""An orchestrator asks k sub-agents about one document: one nested pool for all, waves by headroom.

python docs/examples/fan_out.py http://127.0.0.1:8090
"""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from polykv_proxy.langgraph import ChatPolyKV, FanChannels, FanOut, PolyKVChannels, Pools

SYSTEM = SystemMessage(
    "You are one of several clerks of a mail-order shop. You are polite, you never promise a delivery date, "
    "and you note down every complaint with its order number. Refunds above fifty euros need the consent of "
    "the shift leader. Fragile goods travel in padded boxes only. Answer in one sentence."
)
DOCUMENT = " ".join(
    f"Order {number}: {number % 4 + 1} vases, paid on day {number}, shelf {number * 3}."
    for number in range(1, 25)
)
QUESTIONS = [f"What is in order {number}?" for number in (3, 7, 11, 15, 19)]


class State(PolyKVChannels, FanChannels):
    """What the graph keeps."""

    messages: Annotated[list[Any], add_messages]
    answers: Annotated[list[Any], operator.add]


def build(model: ChatPolyKV) -> Any:
    """The graph: spread, ask (k times), join."""

    def ask(work: dict[str, Any]) -> dict[str, Any]:
        on_pool = model.bind(pool_id=work["polykv_pool"]["id"], session_id=work["session_id"])
        return {"answers": [on_pool.invoke([SYSTEM, *work["messages"]])]}

    fan = FanOut(
        Pools(model),
        worker="ask",
        after="report",
        tasks=lambda _: QUESTIONS,
        shared=lambda state: state["messages"],
        system=SYSTEM,
    )
    builder = StateGraph(State)
    builder.add_node("ask", ask)
    builder.add_node("report", lambda _: {})
    fan.add_to(builder, "spread")
    builder.add_edge(START, "spread")
    builder.add_edge("report", END)
    return builder.compile(checkpointer=InMemorySaver())


def main(url: str) -> list[Any]:
    """Run it; the answers, with what each of them shared."""
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=24)
    shared = [HumanMessage(f"These are today's orders. {DOCUMENT}"), AIMessage("Which one is it about?")]
    config = {"configurable": {"thread_id": "orders"}}
    answers: list[Any] = build(model).invoke({"messages": shared, "answers": []}, config)["answers"]
    for answer in answers:
        read = answer.usage_metadata["input_token_details"]["cache_read"]
        print(f"{read} of {answer.usage_metadata['input_tokens']} prompt tokens were read: {answer.text}")
    return answers


if __name__ == "__main__":
    main(sys.argv[1])
