"""Two groups of agents with one system prompt and different tools: a pool for each, one prefix below both.

python docs/examples/toolsets.py http://127.0.0.1:8090

The model's chat template has to have tools in it. The built-in model's has not; start the proxy with
--engine-arg --chat-template-file --engine-arg docs/tutorial-tools.jinja
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool

from polykv_proxy.langgraph import ChatPolyKV
from polykv_proxy.langgraph.messages import to_openai
from polykv_proxy.langgraph.structured import tool_definitions

SYSTEM = SystemMessage(
    "You work for a mail-order shop. You are polite, you never promise a delivery date, and you note down "
    "every complaint with its order number. Refunds above fifty euros need the consent of the shift leader. "
    "Fragile goods travel in padded boxes only, and what is broken is replaced once."
)


@tool
def find_order(number: int) -> str:
    """Find an order by its number, with what is in it and where it is."""
    return f"order {number} is on its way"


@tool
def refund(number: int, euros: float) -> str:
    """Give money back for an order."""
    return f"{euros} euros for order {number}"


@tool
def shelf(article: int) -> str:
    """Find the shelf that an article lies on, by the article's number."""
    return f"article {article} is on shelf 4"


@tool
def restock(article: int, pieces: int) -> str:
    """Order pieces of an article from its maker, by the article's number."""
    return f"{pieces} of article {article} are coming"


GROUPS = {"clerks": [find_order, refund], "stock": [shelf, restock]}


def main(url: str) -> dict[str, Any]:
    """Make the pools, let two agents of each group work; what each group's pool is, and the answers."""
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=64)
    system = to_openai([SYSTEM])
    root = model.client.create_pool(messages=system, label="shop")
    done: dict[str, Any] = {"root": root}
    for group, tools in GROUPS.items():
        definitions = tool_definitions(tools)
        pool = model.client.fork_pool(root.pool_id, messages=system, tools=definitions, label=group)
        agent = model.bind_tools(tools, tool_choice="any", pool_id=pool.pool_id)
        answers = [
            agent.invoke(
                [SYSTEM, HumanMessage(f"Article 9, order {number}.")], session_id=f"{group}-{number}"
            )
            for number in (5, 6)
        ]
        done[group] = pool, answers
        print(f"{group}: {pool.prefix_len} tokens, {pool.branch_pos} of them the shop's")
        if pool.warning:
            print(" ", pool.warning)
        for answer in answers:
            print(" ", answer.tool_calls, answer.usage_metadata["input_token_details"])
    return done


if __name__ == "__main__":
    main(sys.argv[1])
