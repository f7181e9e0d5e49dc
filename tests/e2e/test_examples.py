"""The examples of the documentation, on the real engine: they run, and what they claim to share is shared."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from e2e.hosting import Hosted

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def clean(hosted: Hosted) -> Hosted:
    """No pool and nothing in the slots."""
    hosted.clear()
    assert hosted.cells() == 0
    return hosted


def example(name: str) -> Any:
    """An example as a module; LangGraph reads the annotations of its classes through ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cache_read(answer: Any) -> int:
    """Prompt tokens that an answer did not compute."""
    return answer.usage_metadata["input_token_details"]["cache_read"]


def computed(answer: Any) -> int:
    """Prompt tokens that an answer did compute."""
    return answer.usage_metadata["input_tokens"] - cache_read(answer)


def test_every_example_is_tested() -> None:
    """None is left to rot."""
    source = Path(__file__).read_text()
    assert all(f'example("{path.stem}")' in source for path in EXAMPLES.glob("*.py"))


def test_fan_out(clean: Hosted) -> None:
    """Five workers compute the document once, and nothing of them is left but the ancestor."""
    module = example("fan_out")
    before = clean.computed()
    answers = module.main(clean.url)
    assert len(answers) == len(module.QUESTIONS)
    (pool_id,) = {answer.response_metadata["pool_id"] for answer in answers}
    (shared,) = {answer.response_metadata["n_pool_shared"] for answer in answers}
    assert shared > 400
    assert all(cache_read(answer) == shared for answer in answers)
    assert clean.computed() - before == shared + sum(map(computed, answers))
    listing = clean.listing()
    (root,) = listing["pools"]
    assert root["pool_id"] != pool_id
    assert root["prefix_len"] < shared
    assert clean.cells() == root["prefix_len"]


def test_toolsets(clean: Hosted) -> None:
    """Each group's tools are computed once, the prompt that both share once for all."""
    module = example("toolsets")
    before = clean.computed()
    done = module.main(clean.url)
    root = done["root"]
    answers = []
    for group, tools in module.GROUPS.items():
        pool, of_group = done[group]
        answers += of_group
        assert pool.parent == root.pool_id
        assert 64 < pool.branch_pos <= root.prefix_len < pool.prefix_len
        for answer in of_group:
            assert cache_read(answer) >= pool.prefix_len
            (call,) = answer.tool_calls
            assert call["name"] in {each.name for each in tools}
    pools = {pool["pool_id"]: pool for pool in clean.listing()["pools"]}
    own = sum(pool["own_len"] for pool in pools.values())
    assert own == root.prefix_len + sum(
        done[group][0].prefix_len - done[group][0].branch_pos for group in module.GROUPS
    )
    assert clean.computed() - before == own + sum(map(computed, answers))


def test_long_conversation(quick_hosted: Hosted) -> None:
    """It outlives its window, loses no turn's integrity, frees what it left, and can be replayed."""
    module = example("long_conversation")
    graph, compactions, states = module.main(quick_hosted.url, days=11)
    assert len(compactions) >= 2
    assert all(event["tokens_after"] < event["tokens_before"] for event in compactions)
    sizes = [state["messages"][-1].usage_metadata["total_tokens"] for state in states]
    assert max(sizes) < module.WINDOW
    assert sum(computed(state["messages"][-1]) for state in states) > module.WINDOW
    (first, second, *_) = [event["day"] - 1 for event in compactions]

    # each summary was written in place: nearly all of its prompt was there
    requests = quick_hosted.run(
        quick_hosted.served.http.get("/polykv/requests?session_id=log-book&limit=100")
    ).json["requests"]
    in_place = [
        each
        for each in requests
        if each["prompt_tokens"] > module.WINDOW * 0.7
        and each["computed_tokens"] < each["prompt_tokens"] * 0.1
    ]
    assert len(in_place) == len(compactions)

    # the day of a compaction begins on the new branch, and reads all of it; the conversation is smaller
    for day in (first, second):
        pool = states[day]["polykv_pool"]
        answer = states[day]["messages"][-1]
        assert answer.response_metadata["pool_id"] == pool["id"]
        assert cache_read(answer) >= pool["n_tokens"] - 1
        assert sizes[day] < sizes[day - 1]
        assert {state["messages"][-1].response_metadata["session_id"] for state in states} == {"log-book"}

    # the branch of the first compaction outlived the step that replaced it, and went after that
    left = states[first]["polykv_pool"]["id"]
    assert states[second]["polykv_retire"] == [left]
    assert states[second + 1]["polykv_retire"] == []
    known = {pool["pool_id"] for pool in quick_hosted.listing()["pools"]}
    assert left not in known
    assert states[-1]["polykv_pool"]["id"] in known

    # a checkpoint from before names it; replaying it makes it again, under the same id
    before = quick_hosted.computed()
    *_, old = (
        state
        for state in graph.get_state_history({"configurable": {"thread_id": "log-book"}})
        if (state.values.get("polykv_pool") or {}).get("id") == left and state.next == ("__start__",)
    )  # the earliest, when there was room for more
    again = graph.invoke({"messages": [module.report(30)]}, old.config)
    assert again["polykv_pool"]["id"] == left
    answer = again["messages"][-1]
    assert answer.response_metadata["pool_id"] == left
    assert "pool_unknown" not in answer.response_metadata
    assert cache_read(answer) >= again["polykv_pool"]["n_tokens"] - 1
    assert quick_hosted.computed() > before


def test_capacity_gate(quick_hosted: Hosted) -> None:
    """It stops without room, says why, and goes on when there is."""
    stopped, done = example("capacity_gate").main(quick_hosted.url)
    (interrupt,) = stopped["__interrupt__"]
    assert interrupt.value["type"] == "polykv.capacity"
    assert interrupt.value["reason"] == "kv headroom exhausted"
    assert (done["capacity_ok"], done["answer"].type) == (True, "ai")
    assert done["answer"].response_metadata["session_id"] == "gate/work"


def test_agent(clean: Hosted) -> None:
    """Three customers, one computed prefix; telemetry in the state of each."""
    module = example("agent")
    before = clean.computed()
    states = module.main(clean.url)
    (pool_id,) = {state["polykv_pool"]["id"] for of_one in states for state in of_one}
    shared = states[0][0]["polykv_pool"]["n_tokens"]
    answers = [state["messages"][-1] for of_one in states for state in of_one]
    assert all(answer.response_metadata["pool_id"] == pool_id for answer in answers)
    assert all(cache_read(answer) >= shared for answer in answers)
    assert clean.computed() - before == shared + sum(map(computed, answers))
    for of_one in states:
        assert cache_read(of_one[1]["messages"][-1]) > cache_read(of_one[0]["messages"][-1])
        assert of_one[1]["polykv"]["ts"] > of_one[0]["polykv"]["ts"]
        assert 0 <= of_one[1]["compaction_pressure"] <= 1
    listing = clean.listing()
    assert [pool["pool_id"] for pool in listing["pools"] if pool["origin"] == "explicit"] == [pool_id]
