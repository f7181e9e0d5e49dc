"""Agents of ``create_agent`` on pools: one line of middleware, telemetry in the state.

python docs/examples/agent.py http://127.0.0.1:8090
"""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from polykv_proxy.langgraph import ChatPolyKV, PolyKVMiddleware

SYSTEM = (
    "You work for a mail-order shop. You are polite, you never promise a delivery date, and you note down "
    "every complaint with its order number. Refunds above fifty euros need the consent of the shift leader. "
    "Fragile goods travel in padded boxes only, and what is broken is replaced once. Answer in one sentence."
)


@tool
def find_order(number: int) -> str:
    """Find an order by its number, with what is in it and where it is."""
    return f"order {number} is on its way"


def build(model: ChatPolyKV) -> Any:
    """The agent."""
    return create_agent(
        model,
        [find_order],
        system_prompt=SYSTEM,
        middleware=[PolyKVMiddleware(model)],
        checkpointer=InMemorySaver(),
    )


def main(url: str, customers: int = 3) -> list[list[dict[str, Any]]]:
    """Each customer asks twice; the states after each answer, by customer."""
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=24)
    agent, states = build(model), []
    for customer in range(customers):
        config = {"configurable": {"thread_id": f"customer-{customer}"}}
        states.append([])
        for question in ("Where is my parcel?", "And what if the vase is broken?"):
            agent.invoke({"messages": [HumanMessage(question)]}, config)
            states[-1].append(agent.get_state(config).values)
        for state in states[-1]:
            answer = state["messages"][-1]
            read = answer.usage_metadata["input_token_details"]["cache_read"]
            print(f"customer {customer}: {read} of {answer.usage_metadata['input_tokens']} tokens were read")
    return states


if __name__ == "__main__":
    main(sys.argv[1])
