"""What the documentation of the Python client tells users to write works as written."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

import polykv_proxy.langgraph as package
from e2e.harness import LOOK_S, PATIENCE_S
from polykv_proxy.client import AsyncPolyKVClient

if TYPE_CHECKING:
    from e2e.hosting import Hosted

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(block: str, proxy: Hosted) -> list[str]:
    """What a block prints."""
    script = block.replace("http://127.0.0.1:8090", proxy.url)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_page_of_the_client(quick_hosted: Hosted) -> None:
    """Pools are shared, room is waited for, a conversation is compacted; nothing is left."""
    pools, room, compaction = blocks("python-client.md")
    created, forked, read = run(pools, quick_hosted)
    _, length, is_new = created.split()
    assert is_new == "True"
    assert int(forked.split()[0]) <= int(length)
    cached, of = re.findall(r"[0-9]+", read)
    assert int(length) < int(cached) < int(of)
    leases, rate = run(room, quick_hosted)
    assert leases.count("'") == 4
    assert rate == "None" or float(rate) >= 0
    (done,) = run(compaction, quick_hosted)
    migrated, freed, *_ = done.split()
    assert (migrated, int(freed) > 0) == ("True", True)
    for key in (None, "none"):
        assert quick_hosted.listing(key)["pools"] == []
    assert quick_hosted.cells() == 0


def test_names_on_the_page_of_langgraph_exist() -> None:
    """Its longer examples are files, which are run; these are excerpts."""
    text = "\n".join(blocks("langgraph.md"))
    for line in re.findall(r"^from polykv_proxy.langgraph import (.*)$", text, re.MULTILINE):
        for name in line.split(","):
            assert hasattr(package, name.strip())
    for name in re.findall(r"\b([A-Z]\w+|riding|when_saturated|a?resume_when_free)\(", text):
        assert hasattr(package, name)


def connections(proxy: Hosted) -> int:
    """Connections of this process to the proxy."""
    found = psutil.Process().net_connections("tcp")
    return sum(
        each.status == psutil.CONN_ESTABLISHED and each.raddr.port == proxy.served.port for each in found
    )


def graph_of(model: package.ChatPolyKV) -> Any:
    """One node that asks the model."""

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("model", answer)
    return builder.add_edge(START, "model").add_edge("model", END).compile()


def test_two_runs_in_a_row_leave_nothing_behind(quick_hosted: Hosted) -> None:
    """One model, two event loops: both work, and no connection outlives its loop."""
    model = package.ChatPolyKV(base_url=quick_hosted.url, max_tokens=8)
    graph = graph_of(model)

    async def ask() -> list[Any]:
        question = {"messages": [HumanMessage("Where is my parcel?")]}
        answers = await asyncio.gather(*(graph.ainvoke(question) for _ in range(2)))
        assert connections(quick_hosted) > 0
        return answers

    for _ in range(2):
        assert all(answer["messages"][-1].type == "ai" for answer in asyncio.run(ask()))
        assert connections(quick_hosted) == 0


def test_a_cancelled_node_stops_the_engine(quick_hosted: Hosted) -> None:
    """In the middle of an answer that would go on for long: connection and slot are free again."""
    model = package.ChatPolyKV(base_url=quick_hosted.url, model_kwargs={"ignore_eos": True}, max_tokens=3500)
    graph = graph_of(model)

    async def leave() -> None:
        run = asyncio.ensure_future(graph.ainvoke({"messages": [HumanMessage("Tell me everything.")]}))
        async with AsyncPolyKVClient(quick_hosted.url) as client:
            async with asyncio.timeout(PATIENCE_S):
                while not any(session.state == "running" for session in await client.list_sessions()):
                    await asyncio.sleep(LOOK_S)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    decoded = sum(slot["n_gen_total"] for slot in quick_hosted.run(quick_hosted.served.quiet())["slots"])
    asyncio.run(leave())
    assert connections(quick_hosted) == 0
    after = sum(slot["n_gen_total"] for slot in quick_hosted.run(quick_hosted.served.quiet())["slots"])
    assert after - decoded < 3500
