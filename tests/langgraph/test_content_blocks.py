"""Content blocks: what core confuses stays apart."""

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk

from polykv_proxy.langgraph.content_blocks import PROVIDER, chunk, whole

OURS = {"model_provider": PROVIDER}


def piece(**options):
    """A chunk of our stream."""
    return AIMessageChunk(**{"content": "", "response_metadata": dict(OURS), **options})


def test_a_whole_message_is_read_as_ever():
    """Reasoning, text, calls."""
    message = AIMessage(
        "text",
        additional_kwargs={"reasoning_content": "why"},
        tool_calls=[{"name": "f", "args": {}, "id": "1"}],
        response_metadata=dict(OURS),
    )
    assert [block["type"] for block in whole(message)] == ["reasoning", "text", "tool_call"]
    assert message.content_blocks == whole(message)


def test_pieces_of_a_call_have_numbers_that_nothing_else_has():
    """By the server's number; by their place where it gives none."""
    calls = [
        tool_call_chunk(name="f", args="{", id="1", index=0),
        tool_call_chunk(name="g", args="{", id="2", index=None),
    ]
    blocks = chunk(piece(tool_call_chunks=calls))
    assert [(block["type"], block["index"]) for block in blocks] == [
        ("tool_call_chunk", "lc_tc_0"),
        ("tool_call_chunk", "lc_tc_1"),
    ]


def test_reasoning_and_the_first_call_of_a_stream_stay_apart():
    """The fault this module is for: both have number 0."""
    stream = [
        piece(additional_kwargs={"reasoning_content": "why"}),
        piece(tool_call_chunks=[tool_call_chunk(name="f", args='{"a"', id="1", index=0)]),
        piece(tool_call_chunks=[tool_call_chunk(name=None, args=": 1}", id=None, index=0)]),
        piece(chunk_position="last"),
    ]
    blocks = [each.content_blocks for each in stream]
    assert blocks[0][0]["type"] == "reasoning"
    assert blocks[1][0]["index"] == blocks[2][0]["index"] == "lc_tc_0"
    joined = stream[0] + stream[1] + stream[2] + stream[3]
    assert joined.tool_calls == [{"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}]
