"""A conversation that is longer than its window and compacts itself, as a graph of one's own.

python docs/examples/long_conversation.py http://127.0.0.1:8090
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from polykv_proxy.langgraph import ChatPolyKV, CompactionNode, Compactor, PolyKVChannels, riding

SYSTEM = SystemMessage(
    "You keep the log book of a lighthouse. You write down what the keeper tells you, you never invent "
    "weather, and you answer in one short sentence. Ships are named with their flag. Times are given in "
    "hours after noon."
)
WINDOW = 4096


class State(PolyKVChannels):
    """What the graph keeps."""

    messages: Annotated[list[Any], add_messages]


def report(day: int) -> HumanMessage:
    """What the keeper tells on one day: some 700 tokens."""
    seen = " ".join(
        f"At {hour} hours ship {day * 100 + hour} passed, wind {hour % 9}, flag {hour % 5}."
        for hour in range(1, 33)
    )
    return HumanMessage(f"Day {day}. {seen} What did you write down?")


def build(model: ChatPolyKV) -> Any:
    """The graph: compact if it is time, then answer; every turn goes through both."""
    compact = CompactionNode(Compactor(model, window=WINDOW, max_summary_tokens=48), system=SYSTEM)

    def answer(state: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [riding(model, state).invoke([SYSTEM, *compact.fit(state["messages"])])]}

    builder = StateGraph(State)
    builder.add_node("compact", compact)
    builder.add_node("answer", answer)
    builder.add_edge(START, "compact")
    builder.add_edge("compact", "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=InMemorySaver())


def main(url: str, days: int = 12) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """Talk for so many days; the graph, its compactions, and its state after each day."""
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=16, session_id="log-book")
    graph, compactions, states = build(model), [], []
    config = {"configurable": {"thread_id": "log-book"}}
    for day in range(1, days + 1):
        for event in graph.stream({"messages": [report(day)]}, config, stream_mode="custom"):
            compactions.append({**event, "day": day})
            before, after = event["tokens_before"], event["tokens_after"]
            print(f"day {day}: with its report {before} tokens of {WINDOW}, so compacted first: {after}")
        states.append(graph.get_state(config).values)
    return graph, compactions, states


class Told(logging.Formatter):
    """An event and what belongs to it: why a compaction was refused, say, or did without a fork."""

    usual = frozenset(vars(logging.makeLogRecord({})))

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        more = {name: value for name, value in vars(record).items() if name not in self.usual}
        return f"  {record.getMessage()} {more or ''}"


if __name__ == "__main__":
    handler, log = logging.StreamHandler(), logging.getLogger("polykv_proxy.langgraph")
    handler.setFormatter(Told())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    main(sys.argv[1])
