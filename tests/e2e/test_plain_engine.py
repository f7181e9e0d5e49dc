"""The chat model and its middleware on a plain llama-server: no proxy, no pools, no errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from e2e.harness import bare_engine
from e2e.test_pools import SYSTEM
from polykv_proxy.langgraph import ChatPolyKV, PolyKVMiddleware

TEMPLATE = Path(__file__).with_name("tool_calls.jinja")
SIZES = (
    "--threads",
    "1",
    "--parallel",
    "2",
    "--ctx-size",
    "4096",
    "--jinja",
    "--chat-template-file",
    str(TEMPLATE),
)
MESSAGES = [SystemMessage(SYSTEM), HumanMessage("Say hello.")]
OURS = {"pool_id", "session_id", "session_tps", "backpressure", "pool_unknown"}


class Parcel(BaseModel):
    """A parcel."""

    pieces: int


@tool
def weigh(grams: int) -> str:
    """Weigh a parcel."""
    return f"{grams} grams"


async def test_the_chat_model_works_unchanged(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """Whole and streamed, with tools and structure, in an agent; nothing is said about pools."""
    async with bare_engine(stock, smollm, tmp_path, *SIZES) as engine:
        model = await ChatPolyKV.afrom_server(base_url=engine.base, max_tokens=24, temperature=0)
        assert model.profile is not None
        assert model.profile["max_input_tokens"] in (2048, 4096)
        assert await asyncio.to_thread(model.get_num_tokens_from_messages, MESSAGES) > 300

        answer = await model.ainvoke(MESSAGES)
        assert answer.text
        again = await asyncio.to_thread(model.invoke, MESSAGES)
        assert again.usage_metadata["input_token_details"]["cache_read"] > 300
        full: Any = None
        async for piece in model.bind(pool_id="none", session_id="a", lease_id="b").astream(MESSAGES):
            full = piece if full is None else full + piece
        assert full.text
        assert full.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]
        for each in (answer, again, full):
            assert not OURS & set(each.response_metadata)

        parcel = await model.with_structured_output(Parcel).ainvoke("A parcel of 3 pieces.")
        assert isinstance(parcel, Parcel)
        called = await model.bind_tools([weigh, Parcel], tool_choice="weigh").ainvoke("Weigh 5 grams.")
        assert [call["name"] for call in called.tool_calls] == ["weigh"]

        agent = create_agent(
            model,
            [weigh],
            system_prompt=SYSTEM,
            middleware=[PolyKVMiddleware(model)],
            checkpointer=InMemorySaver(),
        )
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in range(2):
            done = await agent.ainvoke({"messages": [HumanMessage("Say hello.")]}, config)
        state = (await agent.aget_state(config)).values
        assert done["messages"][-1].type == "ai"
        assert state.get("polykv_pool") is None
        await model.async_client.aclose()
