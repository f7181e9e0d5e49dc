"""Compaction at work: what is asked of the proxy, and in which order."""

import asyncio

import pytest
from client.playing import play
from client.stub import StubProxy
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage

from polykv_proxy.client import errors
from polykv_proxy.client.procedures import SUMMARISE
from polykv_proxy.client.results import Chat, Migrated, Pool, Released
from polykv_proxy.langgraph import ChatPolyKV, Compactor
from polykv_proxy.langgraph.compactor import Conversation, session_id, session_name

TOOL = {"type": "function", "function": {"name": "f"}}
PREFIX = {"system": {"role": "system", "content": "rules"}, "tools": [TOOL]}
ROOT = {"id": "root", "root": "root", "n_tokens": 40, "content": "c"}
LEAF = {"id": "leaf", "root": "root", "n_tokens": 60, "content": "d"}
CHILD = Pool(pool_id="child", prefix_len=50)
SHORT = Chat.read({"choices": [{"message": {"content": "short"}}]})


def said(text, tokens=None, name="t/model", number=""):
    """An answer that the engine counted, of a conversation with a name."""
    usage = None if tokens is None else {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    told = {"session_id": f"{name}{number}", "session_name": name} if name else {"session_id": "auto-1"}
    return AIMessage(text, usage_metadata=usage, response_metadata=told)


FULL = [HumanMessage("1"), said("2"), HumanMessage("3"), said("4", 3900, number="#2")]


@pytest.fixture
def compactor():
    """With a window of 4,096; its server is never asked."""
    return Compactor(ChatPolyKV(base_url="http://127.0.0.1:9"), window=4096, max_summary_tokens=99)


def conversation(messages=FULL, pool=ROOT, retired=()):
    """Between two turns."""
    return Conversation(messages=messages, prefix=PREFIX, pool=pool, retired=retired)


def test_summary_in_place_then_fork_then_migration(compactor):
    """CTX-6: the same session and tools, one more message; then the branch; then the session moves."""
    moved = Migrated(session_id="t/model#2", pool_id="child")
    steps, update = play(compactor._tending(conversation()), SHORT, 100, 50, CHILD, moved)
    summarise, before, after, fork, migrate = steps
    contents = [message["content"] for message in summarise.body["messages"]]
    assert contents == ["rules", "1", "2", "3", "4", SUMMARISE]
    assert (summarise.body["tools"], summarise.body["tool_choice"]) == ([TOOL], "none")
    assert summarise.body["opencoti"] == {"session_id": "t/model"}
    assert summarise.body["max_tokens"] == 99
    for count in (before, after):
        assert set(count.body) == {"model", "messages", "tools"}
        assert count.path == "/v1/chat/completions/input_tokens"
    assert fork.path == "/polykv/pools/root/fork"
    assert [message["content"] for message in fork.body["messages"]] == [
        "rules",
        SUMMARISE,
        "short",
        "3",
        "4",
    ]
    assert fork.body["tools"] == [TOOL]
    assert migrate.path == "/polykv/sessions/t%2Fmodel%232/migrate"
    first, *messages = update["messages"]
    assert isinstance(first, RemoveMessage)
    assert [message.text for message in messages] == [SUMMARISE, "short", "3", "4"]
    assert (update["polykv_pool"]["id"], update["polykv_pool"]["root"]) == ("child", "root")
    assert "polykv_retire" not in update, "the ancestor is never retired"
    assert compactor.pools.have(PREFIX, messages) == update["polykv_pool"]


def test_the_old_branch_is_named_now_and_released_the_next_time(compactor):
    """First everything that names the new one must be committed."""
    moved = Migrated(session_id="t/model#2", pool_id="child")
    steps, update = play(compactor._tending(conversation(pool=LEAF)), SHORT, 100, 50, CHILD, moved)
    assert update["polykv_retire"] == ["leaf"]
    assert all(step.method != "DELETE" for step in steps)
    calm = [HumanMessage("1"), said("2", 60)]
    steps, update = play(
        compactor._tending(conversation(calm, LEAF, retired=["leaf"])), Released(pool_id="leaf")
    )
    assert [(step.method, step.path) for step in steps] == [("DELETE", "/polykv/pools/leaf")]
    assert update == {"polykv_retire": []}


def test_what_cannot_be_released_is_tried_again(compactor):
    """Somebody forked it."""
    calm = [HumanMessage("1"), said("2", 60)]
    _, update = play(
        compactor._tending(conversation(calm, retired=["leaf"])), errors.ConflictError("children")
    )
    assert update == {"polykv_retire": ["leaf"]}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage("1"), said("2", 3000)],
        [HumanMessage("1"), said("2")],
        [HumanMessage("1"), said("2", 3900)],
    ],
)
def test_most_times_nothing_is_asked(compactor, messages):
    """It is not time, nobody counted, or there is nothing before the last turn."""
    with pytest.raises(StopIteration) as end:
        next(compactor._tending(conversation(messages)))
    assert end.value.value == {}


def test_below_a_small_window_nothing_is_compacted():
    """The ladder serves."""
    compactor = Compactor(ChatPolyKV(base_url="http://127.0.0.1:9"), window=2048)
    with pytest.raises(StopIteration) as end:
        next(compactor._tending(conversation()))
    assert end.value.value == {}


def test_without_a_pool_the_messages_are_compacted_all_the_same(compactor):
    """Behind a plain engine."""
    steps, update = play(compactor._tending(conversation(pool=None)), SHORT, 100, 50)
    assert len(steps) == 3
    assert set(update) == {"messages"}


def test_a_branch_that_cannot_be_had_is_no_reason_to_stay_long(compactor, caplog):
    """The next call makes one, or goes without; the log has it."""
    caplog.set_level("INFO", "polykv_proxy.langgraph")
    _, update = play(
        compactor._tending(conversation(pool=LEAF)), SHORT, 100, 50, errors.PoolCapacityError("x")
    )
    assert update["polykv_pool"] is None
    assert update["polykv_retire"] == ["leaf"]
    assert len(update["messages"]) == 5
    assert [record.msg for record in caplog.records] == ["fork_failed", "compacted"]


def test_a_failure_changes_nothing_either(compactor):
    """The conversation goes on as it is."""
    _, update = play(compactor._tending(conversation()), errors.UnavailableError("loading"))
    assert update == {}
    refused = errors.ContextOverflowError("long", error={"n_ctx": 400})
    _, messages = play(compactor._fitting(FULL, PREFIX, refused), errors.NotFoundError("no such route"))
    assert messages is FULL


def test_a_refusal_changes_nothing(compactor):
    """And is logged by its reason."""
    _, update = play(compactor._tending(conversation()), SHORT, 50, 50)
    assert update == {}


def test_the_window_is_given_or_known_or_asked_for():
    """In this order."""
    model = ChatPolyKV(base_url="http://127.0.0.1:9", profile={"max_input_tokens": 8192})
    for compactor, window in ((Compactor(model, window=4096), 4096), (Compactor(model), 8192)):
        with pytest.raises(StopIteration) as end:
            next(compactor._knowing_window())
        assert end.value.value == window
    asking = Compactor(ChatPolyKV(base_url="http://127.0.0.1:9"))
    _, window = play(asking._knowing_window(), {"default_generation_settings": {"n_ctx": 512}})
    assert window == 512
    _, window = play(Compactor(asking.model)._knowing_window(), errors.ServerError("x"))
    assert window is None


def test_names_come_from_the_last_answer():
    """The proxy numbers conversations under one name; without a name there is none to move."""
    assert (session_id(FULL), session_name(FULL)) == ("t/model#2", "t/model")
    assert session_id([said("2", name=None)]) is None
    assert session_name([HumanMessage("1")]) is None


CHAIN = [HumanMessage("9"), AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])]
RESULT = ToolMessage("long " * 300, tool_call_id="1")


async def test_what_cannot_be_compacted_is_made_to_fit(caplog):
    """By the engine's counts: oldest turns first, then results; which rungs, is logged, and no content."""
    caplog.set_level("INFO")
    async with StubProxy(window=100) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        compactor = Compactor(model)
        turns = [each for number in range(9) for each in (HumanMessage(f"{number} " * 9), said("yes", 95))]
        fitting = await compactor.afit(turns, PREFIX)
        assert 0 < len(fitting) < len(turns)
        assert list(fitting) == turns[-len(fitting) :]
        assert await compactor.afit(fitting[:1], PREFIX) == fitting[:1]
        refused = errors.ContextOverflowError("long", error={"n_ctx": 400})
        cut = await asyncio.to_thread(compactor.fit, [*turns, *CHAIN, RESULT], PREFIX, refused=refused)
        assert cut[-1].text.startswith("long long")
        assert len(cut[-1].text) < len(RESULT.text)
        assert [record.rung for record in caplog.records if record.msg == "ladder"] == [
            "drop_turns",
            "drop_turns",
            "cut_tool_results",
        ]
        assert not any("long long" in str(vars(record)) for record in caplog.records)
        await model.async_client.aclose()


async def test_both_ways_to_ask():
    """With threads and with asyncio; one event in the log."""
    async with StubProxy("short") as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        proxy.pools["root"] = 3
        past = [HumanMessage("1 " * 200), said("2 " * 200), HumanMessage("3"), said("4", 3900)]
        compactor = Compactor(model, window=4096)
        one = await compactor.atend(conversation(past))
        other = await asyncio.to_thread(compactor.tend, conversation(past))
        assert [m.text for m in one["messages"][1:]] == [m.text for m in other["messages"][1:]]
        assert one["polykv_pool"]["id"] == other["polykv_pool"]["id"]
        assert proxy.happened("migrate") == ["t/model", "t/model"]
        await model.async_client.aclose()
