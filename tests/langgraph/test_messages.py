"""Messages to bodies and back."""

import json

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage

from polykv_proxy.langgraph.messages import StreamedAnswer, forced_call, to_openai, to_result
from polykv_proxy.langgraph.structured import ANY

USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 5,
    "total_tokens": 35,
    "prompt_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
BLOCK = {
    "request_id": "req-1-2",
    "pool_id": "p",
    "session_id": "s#2",
    "session_tps": 9.5,
    "backpressure": None,
    "pool_match": 3,
}


def test_messages_become_a_body():
    """Reasoning in its own member, tool calls and results by their ids."""
    messages = [
        SystemMessage("rules"),
        HumanMessage("hi"),
        AIMessage(
            "",
            additional_kwargs={"reasoning_content": "why"},
            tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}],
        ),
        ToolMessage("done", tool_call_id="1"),
    ]
    system, user, assistant, tool = to_openai(messages)
    assert (system, user) == ({"role": "system", "content": "rules"}, {"role": "user", "content": "hi"})
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "why")
    (call,) = assistant["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("1", "f")
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "1", "done")


def test_blocks_of_an_answer_become_text_and_reasoning():
    """As ``output_version="v1"`` leaves them in the content."""
    blocks = [{"type": "reasoning", "reasoning": "why"}, {"type": "text", "text": "yes"}]
    (body,) = to_openai([AIMessage(content=blocks)])
    assert (body["content"], body["reasoning_content"]) == ("yes", "why")


def test_an_answer_becomes_a_message():
    """With usage, what the proxy said, and the name it was asked under."""
    document = {
        "id": "c1",
        "model": "m",
        "choices": [{"finish_reason": "stop", "message": {"content": "yes", "reasoning_content": "why"}}],
        "usage": USAGE,
        "opencoti": BLOCK,
    }
    (generation,) = to_result(document, session_name="s").generations
    message = generation.message
    assert (message.text, message.additional_kwargs) == ("yes", {"reasoning_content": "why"})
    assert message.usage_metadata["input_token_details"] == {"cache_read": 20, "cache_creation": 4}
    assert message.usage_metadata["output_token_details"] == {"reasoning": 2}
    told = message.response_metadata
    assert (told["pool_id"], told["session_id"], told["session_name"]) == ("p", "s#2", "s")
    assert (told["finish_reason"], told["model_name"], told["model_provider"]) == ("stop", "m", "polykv")
    assert told["request_id"] == "req-1-2"
    assert "pool_match" not in told


def test_a_plain_engine_says_nothing_about_pools():
    """And nothing is made up."""
    (generation,) = to_result({"choices": [{"message": {"content": "yes"}}]}).generations
    assert generation.message.usage_metadata is None
    assert set(generation.message.response_metadata) == {"finish_reason", "model_provider"}


def test_calls_are_parsed_and_broken_ones_kept():
    """Arguments that are no JSON are the model's fault, and shown as such."""
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "function": {"name": "g", "arguments": '{"a"'}},
    ]
    (generation,) = to_result({"choices": [{"message": {"tool_calls": calls}}]}).generations
    assert [call["args"] for call in generation.message.tool_calls] == [{"a": 1}]
    assert [call["name"] for call in generation.message.invalid_tool_calls] == ["g"]


@pytest.mark.parametrize(
    ("forced", "text", "name", "arguments"),
    [
        ("f", '{"a": 1}', "f", '{"a": 1}'),
        (ANY, '{ "name" : "g", "arguments": {"a": {"b": 1}} }', "g", '{"a": {"b": 1}} '),
        (ANY, '{"name": "g", "arguments": {"a": ', "g", '{"a":'),
        (ANY, '{"na', "", '{"na'),
    ],
)
def test_a_forced_call_is_in_the_text(forced, text, name, arguments):
    """Complete or cut off."""
    assert forced_call(forced, text) == (name, arguments)


@pytest.mark.parametrize("forced", ["f", ANY])
def test_a_forced_call_of_an_answer(forced):
    """The text is gone, the call is there, and that is why it ended."""
    text = '{"a": 1}' if forced == "f" else '{"name": "f", "arguments": {"a": 1}}'
    document = {"choices": [{"finish_reason": "stop", "message": {"content": text}}]}
    (generation,) = to_result(document, forced).generations
    (call,) = generation.message.tool_calls
    assert (call["name"], call["args"], generation.message.text) == ("f", {"a": 1}, "")
    assert generation.message.response_metadata["finish_reason"] == "tool_calls"


def stream(*deltas, forced=None):
    """Chunks of a stream of these deltas."""
    answer = StreamedAnswer(forced, session_name="s")
    documents = [{"model": "m", "id": "c1", "choices": [{"delta": delta}]} for delta in deltas]
    documents.append({"model": "m", "id": "c1", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    documents.append({"model": "m", "choices": [], "usage": USAGE, "timings": {"x": 1.5}, "opencoti": BLOCK})
    chunks = [chunk for document in documents if (chunk := answer.feed(document)) is not None]
    return [*chunks, answer.finish()]


def joined(chunks):
    """The message that core makes of chunks."""
    full = None
    for chunk in chunks:
        full = chunk.message if full is None else full + chunk.message
    return full


def test_a_stream_says_what_is_about_the_whole_on_its_last_chunk_only():
    """Core would put texts together and choke on differing numbers."""
    chunks = stream({"content": "a"}, {"content": "b"}, {"reasoning_content": "w"})
    assert [set(chunk.message.response_metadata) for chunk in chunks[:-1]] == [{"model_provider"}] * 3
    assert chunks[-1].message.chunk_position == "last"
    full = joined(chunks)
    assert (full.text, full.additional_kwargs["reasoning_content"]) == ("ab", "w")
    told = full.response_metadata
    assert (told["pool_id"], told["session_tps"], told["model_name"]) == ("p", 9.5, "m")
    assert (told["finish_reason"], told["session_name"], told["timings"]) == ("stop", "s", {"x": 1.5})
    assert full.usage_metadata["input_tokens"] == 30


def test_calls_of_a_stream_come_in_pieces():
    """And are put together."""
    first = {"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"a"'}}
    second = {"index": 0, "function": {"arguments": ": 1}"}}
    full = joined(stream({"tool_calls": [first]}, {"tool_calls": [second]}))
    assert full.tool_calls == [{"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}]


@pytest.mark.parametrize("forced", ["f", ANY])
def test_a_forced_call_of_a_stream(forced):
    """A named tool's arguments stream; of an open choice the call comes at the end."""
    pieces = ['{"a"', ": 1}"] if forced == "f" else ['{"name": "f", ', '"arguments": {"a": 1}}']
    chunks = stream(*({"content": piece} for piece in pieces), forced=forced)
    full = joined(chunks)
    (call,) = full.tool_calls
    assert (call["name"], call["args"], full.text) == ("f", {"a": 1}, "")
    assert full.response_metadata["finish_reason"] == "tool_calls"
    assert len(chunks) == (3 if forced == "f" else 1)
    assert isinstance(full, AIMessageChunk)


def test_probabilities_are_kept():
    """Where they were asked for."""
    answer = StreamedAnswer()
    chunk = answer.feed({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": []}}]})
    assert chunk.generation_info == {"logprobs": {"content": []}}
    document = {"choices": [{"message": {"content": "a"}, "logprobs": {"content": []}}]}
    assert to_result(document).generations[0].generation_info == {"logprobs": {"content": []}}
