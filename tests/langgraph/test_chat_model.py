"""``ChatPolyKV``: requests, errors, connections. LangChain's own suites are with the engine."""

import asyncio
import gc

import pytest
from client.serving import Scripted, hang_up, stream
from client.stub import StubProxy
from langchain_core.exceptions import ContextOverflowError as CoreOverflowError
from langchain_core.exceptions import ModelRateLimitError
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from polykv_proxy.langgraph import ChatPolyKV, OpencotiChatModel, PoolSaturatedError
from polykv_proxy.langgraph.errors import ConnectionFailedError, ContextOverflowError, TruncatedStreamError

QUESTION = [SystemMessage("rules"), HumanMessage("hi there")]


class Place(BaseModel):
    """A place."""

    name: str


def body_of(chat, /, **kwargs):
    """The body of a call."""
    return chat.request(QUESTION, None, kwargs)[0]


def test_the_original_design_has_another_name_for_it():
    """Both are the same class."""
    assert OpencotiChatModel is ChatPolyKV


def test_a_body_has_what_was_given_and_nothing_else():
    """Unset fields leave the server's defaults; an empty stop list is none."""
    body = body_of(ChatPolyKV(stop=[], temperature=0, model_kwargs={"cache_prompt": True}))
    assert body == {
        "model": "default",
        "messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "hi there"}],
        "temperature": 0,
        "cache_prompt": True,
        "opencoti": {},
    }


def test_a_setting_that_there_is_not_is_refused():
    """Others' names for things, and slips, would have no effect, and nobody would know."""
    with pytest.raises(ValueError, match="extra_body"):
        ChatPolyKV(extra_body={"top_k": 3})


def test_arguments_of_a_call_come_before_the_models_own():
    """Ours go into our block, what is not ours into the body."""
    model = ChatPolyKV(model_name="m", pool_id="p", session_id="s", max_tokens=5, stop=["x"])
    assert body_of(model)["opencoti"] == {"pool_id": "p", "session_id": "s"}
    body = body_of(
        model, model="n", pool_id="q", session_id=None, lease_id="l", top_k=3, max_tokens=9, tools=[]
    )
    assert body["opencoti"] == {"pool_id": "q", "lease_id": "l"}
    assert (body["model"], body["top_k"], body["max_tokens"], body["stop"]) == ("n", 3, 9, ["x"])
    assert "tools" not in body
    assert model.request(QUESTION, ["y"], {})[0]["stop"] == ["y"]


def test_the_admin_key_is_a_secret_that_may_come_from_the_environment(monkeypatch):
    """Of the same name as the proxy's own, so that one variable does for both."""
    assert ChatPolyKV().admin_key is None
    monkeypatch.setenv("POLYKV_ADMIN_API_KEY", "over")
    model = ChatPolyKV()
    assert model.admin_key.get_secret_value() == "over"
    assert "over" not in repr(model)


def test_a_stream_asks_for_usage_unless_told_not_to():
    """Without it there is no usage chunk."""
    model = ChatPolyKV()
    assert model.request(QUESTION, None, {}, stream=True)[0]["stream_options"] == {"include_usage": True}
    assert "stream_options" not in model.request(QUESTION, None, {"stream_usage": False}, stream=True)[0]


def test_a_name_that_the_proxy_does_not_take_becomes_one_that_it_does():
    """Always the same."""
    body = body_of(ChatPolyKV(session_id="ü"))
    assert len(body["opencoti"]["session_id"]) == 64


async def test_in_a_graph_the_conversation_has_a_name():
    """Thread and node, without anybody saying so; the answer knows it."""
    async with StubProxy() as proxy:
        model = ChatPolyKV(base_url=proxy.url)

        async def answer(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        builder = StateGraph(MessagesState).add_node("model", answer)
        graph = builder.add_edge(START, "model").add_edge("model", END).compile(checkpointer=InMemorySaver())
        for _ in range(2):
            done = await graph.ainvoke({"messages": QUESTION}, {"configurable": {"thread_id": "t"}})
        assert [chat["opencoti"]["session_id"] for chat in proxy.chats] == ["t/model"] * 2
        assert done["messages"][-1].response_metadata["session_name"] == "t/model"
        await model.async_client.aclose()


async def test_answers_and_streams_say_the_same():
    """With threads and with asyncio."""
    async with StubProxy("one two") as proxy:
        model = ChatPolyKV(base_url=proxy.url, pool_id="p", session_id="s")
        proxy.pools["p"] = 2
        whole = await model.ainvoke(QUESTION)
        threaded = await asyncio.to_thread(model.invoke, QUESTION)
        pieces = [piece async for piece in model.astream(QUESTION)]
        more = await asyncio.to_thread(lambda: list(model.stream(QUESTION)))
        assert len(pieces) == 3
        for parts in (pieces, more):
            full = parts[0]
            for part in parts[1:]:
                full += part
            assert full.text.strip() == whole.text == threaded.text == "one two"
            assert full.usage_metadata == whole.usage_metadata
            for name in ("pool_id", "session_id", "session_tps", "session_name", "finish_reason"):
                assert full.response_metadata[name] == whole.response_metadata[name]
        assert whole.usage_metadata["input_token_details"] == {"cache_read": 2}
        await model.async_client.aclose()


async def test_a_plain_engine_is_enough():
    """No pools, no errors, nothing said about either."""
    async with StubProxy(plain=True) as engine:
        model = await ChatPolyKV.afrom_server(base_url=engine.url, pool_id="p")
        answer = await model.ainvoke(QUESTION)
        assert answer.text == "yes"
        assert "pool_id" not in answer.response_metadata
        assert await asyncio.to_thread(model.get_num_tokens_from_messages, QUESTION) == 5
        await model.async_client.aclose()


async def test_the_server_knows_the_window():
    """The constructor does not ask; a profile that was given stays."""
    assert ChatPolyKV(base_url="http://127.0.0.1:9").profile is None
    async with StubProxy(window=512) as proxy:
        model = await asyncio.to_thread(lambda: ChatPolyKV.from_server(base_url=proxy.url))
        assert model.profile["max_input_tokens"] == 512
        mine = await ChatPolyKV.afrom_server(base_url=proxy.url, profile={"max_input_tokens": 9})
        assert mine.profile["max_input_tokens"] == 9
        await mine.async_client.aclose()


async def test_saturation_is_a_rate_limit_after_bounded_waiting():
    """It waits as long as it is told to, and no longer than it may."""
    full = (429, {"code": "pool_saturated", "message": "full", "arm": "tps"}, {"Retry-After": "0"})
    async with StubProxy(full, full, "yes") as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        assert (await model.ainvoke(QUESTION)).text == "yes"
        assert len(proxy.chats) == 3
        await model.async_client.aclose()
    long = (429, {"code": "pool_saturated", "message": "full"}, {"Retry-After": "60"})
    async with StubProxy(long) as proxy:
        model = ChatPolyKV(base_url=proxy.url, max_retry_wait=5)
        with pytest.raises(ModelRateLimitError) as caught:
            await model.ainvoke(QUESTION)
        assert isinstance(caught.value, PoolSaturatedError)
        assert caught.value.retry_after == 60.0
        assert caught.value.response.status_code == 429
        assert len(proxy.chats) == 1
        await model.async_client.aclose()


async def test_an_overflow_is_one_that_langchain_knows():
    """With its figures."""
    async with StubProxy(window=4) as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        with pytest.raises(CoreOverflowError) as caught:
            await model.ainvoke(QUESTION)
        assert isinstance(caught.value, ContextOverflowError)
        assert (caught.value.required_tokens, caught.value.ctx_size) == (5, 4)
        await model.async_client.aclose()


async def test_a_request_that_may_have_reached_decode_is_not_repeated():
    """Neither whole nor streamed."""
    async with Scripted(hang_up) as server:
        model = ChatPolyKV(base_url=server.url, max_retries=5)
        with pytest.raises(ConnectionFailedError):
            await model.ainvoke(QUESTION)
        with pytest.raises(ConnectionFailedError):
            _ = [piece async for piece in model.astream(QUESTION)]
        assert len(server.requests) == 2


async def test_a_stream_without_its_end_is_an_error():
    """Not a short answer."""
    async with Scripted(stream({"choices": [{"delta": {"content": "a"}}]}, end=b"")) as server:
        model, seen = ChatPolyKV(base_url=server.url), []

        async def read():
            async for piece in model.astream(QUESTION):
                seen.append(piece.text)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(TruncatedStreamError):
            await read()
        assert seen == ["a"]


async def test_two_runs_in_a_row_leave_no_connection_behind():
    """One model, two event loops, nobody closes anything."""
    answer = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    async with Scripted((200, {}, answer)) as server:
        model = ChatPolyKV(base_url=server.url)

        async def ask():
            return await asyncio.gather(*(model.ainvoke(QUESTION) for _ in range(3)))

        for _ in range(2):
            assert len(await asyncio.to_thread(asyncio.run, ask())) == 3
        await server.all_closed()


async def test_a_node_that_is_cancelled_leaves_no_connection_behind():
    """In the middle of a stream, and before the first byte."""
    waiting = asyncio.Event()

    async def silent(reader, writer):
        waiting.set()
        await reader.read()
        return False

    for answer in (silent, stream({"choices": [{"delta": {"content": "a"}}]}, hold=waiting)):
        waiting.clear()
        async with Scripted(answer) as server:
            model = ChatPolyKV(base_url=server.url, streaming=True)

            async def node(_state, model=model):
                return {"messages": [await model.ainvoke(QUESTION)]}

            builder = StateGraph(MessagesState).add_node("model", node)
            graph = builder.add_edge(START, "model").add_edge("model", END).compile()
            run = asyncio.ensure_future(graph.ainvoke({"messages": []}))
            await asyncio.wait_for(waiting.wait(), 20.0)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            await server.all_closed()


async def test_a_model_that_is_gone_has_closed_its_connections():
    """Those of threads have no loop that ends."""
    answer = {"choices": [{"message": {"content": "a"}}]}
    async with Scripted((200, {}, answer)) as server:

        def work():
            model = ChatPolyKV(base_url=server.url)
            model.invoke(QUESTION)
            del model
            gc.collect()

        await asyncio.to_thread(work)
        await server.all_closed()


async def test_structure_is_asked_for_and_read():
    """By grammar, which leaves the prompt alone; by a tool only if that is wanted."""
    async with StubProxy('{"name": "Rome"}') as proxy:
        model = ChatPolyKV(base_url=proxy.url)
        for method in ("json_schema", "function_calling"):
            assert await model.with_structured_output(Place, method=method).ainvoke("where?") == Place(
                name="Rome"
            )
        raw = await model.with_structured_output(Place, include_raw=True).ainvoke("where?")
        assert (raw["parsed"], raw["parsing_error"]) == (Place(name="Rome"), None)
        assert await model.with_structured_output(method="json_mode").ainvoke("where?") == {"name": "Rome"}
        assert ["tools" in chat for chat in proxy.chats] == [False, True, False, False]
        await model.async_client.aclose()
    with pytest.raises(ValueError, match="needs a schema"):
        ChatPolyKV().with_structured_output(method="function_calling")
    with pytest.raises(ValueError, match="none of"):
        ChatPolyKV().with_structured_output(Place, method="magic")


async def test_tools_are_bound():
    """In order, with what was said about them."""
    model = ChatPolyKV(sort_tools=True)
    bound = model.bind_tools(
        [Place, {"type": "function", "function": {"name": "A"}}], parallel_tool_calls=False
    )
    assert [tool["function"]["name"] for tool in bound.kwargs["tools"]] == ["A", "Place"]
    assert bound.kwargs["parallel_tool_calls"] is False
