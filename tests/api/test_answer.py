"""Claims about ``api.answer``: one block, in the right event, and every other byte as it was."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import reply

from polykv_proxy.api import answer
from polykv_proxy.api.answer import AnswerReader, Usage, insert_member, read_answer, read_usage
from polykv_proxy.api.families import INFERENCE

CHAT = INFERENCE["/v1/chat/completions"]
TEXT = INFERENCE["/v1/completions"]
LLAMA = INFERENCE["/completion"]
RESPONSES = INFERENCE["/v1/responses"]
MESSAGES = INFERENCE["/v1/messages"]
OTHER = INFERENCE["/infill"]

STREAMS = {
    "chat_stream": (CHAT, {}, b'"finish_reason":"length"'),
    "chat_stream_usage": (CHAT, {"include_usage": True}, b'"usage":{'),
    "chat_stream_n2": (CHAT, {"completions": 2}, b'"finish_reason":"length"'),
    "chat_stream_n2_usage": (CHAT, {"completions": 2, "include_usage": True}, b'"usage":{'),
    "text_stream": (TEXT, {}, b'"finish_reason":"length"'),
    "text_stream_usage": (TEXT, {"include_usage": True}, b'"usage":{'),
    "completion_stream": (LLAMA, {}, b'"stop":true'),
    "responses_stream": (RESPONSES, {}, b"event: response.completed"),
    "messages_stream": (MESSAGES, {}, b"event: message_delta"),
}
WHOLE = {"chat": CHAT, "text": TEXT, "completion": LLAMA, "responses": RESPONSES, "messages": MESSAGES}


def block(usage):
    """A block that shows what was known when it was made."""
    return {"cached": usage.cached_tokens, "used": usage.context_tokens}


def run(reader, *pieces):
    """Everything that comes out."""
    return b"".join([*(reader.feed(piece) for piece in pieces), reader.finish()])


def cut(data, places):
    """``data`` in pieces."""
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


# -- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_the_block_goes_into_the_last_event_once(name):
    """Taken out again, the stream is the engine's, byte for byte; the figures are the engine's too."""
    family, options, mark = STREAMS[name]
    stream = reply(name)
    reader = AnswerReader(family, stream=True, block=block, **options)
    changed = run(reader, stream)
    events = [event for event in changed.split(b"\n\n") if b'"opencoti":' in event]
    assert len(events) == 1
    assert mark in events[0]
    document = json.loads(events[0][events[0].index(b"{") :])
    assert document["opencoti"] == block(reader.usage)
    assert None not in document["opencoti"].values()
    member = b',"opencoti":' + json.dumps(document["opencoti"], separators=(",", ":")).encode()
    assert changed.replace(member, b"") == stream


@settings(max_examples=150)
@given(st.sampled_from(sorted(STREAMS)), st.data())
def test_any_split_gives_the_same_bytes(name, data):
    """Where the pieces end does not matter, in the middle of an event or of its end."""
    family, options, _ = STREAMS[name]
    stream = reply(name)
    ends = [at + 1 for at in range(len(stream)) if stream.startswith(b"\n\n", at)]
    places = data.draw(st.lists(st.integers(0, len(stream)) | st.sampled_from(ends), max_size=12))
    expected = run(AnswerReader(family, stream=True, block=block, **options), stream)
    assert run(AnswerReader(family, stream=True, block=block, **options), *cut(stream, places)) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_single_bytes_give_the_same_bytes(name):
    """The hardest split of all."""
    family, options, _ = STREAMS[name]
    stream = reply(name)
    expected = run(AnswerReader(family, stream=True, block=block, **options), stream)
    single = [stream[at : at + 1] for at in range(len(stream))]
    assert run(AnswerReader(family, stream=True, block=block, **options), *single) == expected


def test_an_event_goes_out_when_it_is_complete():
    """Nothing is kept longer than its event, also where the empty line comes in two pieces."""
    reader = AnswerReader(CHAT, stream=True, block=block)
    assert reader.feed(b"data: {}\n") == b""
    assert reader.feed(b"") == b""
    assert reader.feed(b"\ndata: {") == b"data: {}\n\n"
    assert reader.feed(b"}\n\n") == b"data: {}\n\n"


def test_what_follows_the_block_keeps_its_order():
    """A piece that ends behind the last event, in the middle of the next, loses nothing."""
    stream = reply("chat_stream")
    at = stream.index(b"data: [DONE]") + 4
    out = run(AnswerReader(CHAT, stream=True, block=block), stream[:at], stream[at:])
    assert out.endswith(b"}\n\ndata: [DONE]\n\n")


def test_an_event_without_its_empty_line_is_read_at_the_end():
    """A stream may end with one newline."""
    stream = reply("completion_stream")[:-1]
    out = run(AnswerReader(LLAMA, stream=True, block=block), stream)
    assert out.count(b'"opencoti":') == 1
    assert out.endswith(b"}\n")


def test_comments_and_errors_pass():
    """Pings, broken JSON, other lines and error events are not changed."""
    stream = (
        b':\n\nid: 1\n\ndata: {"finish_reason":"x\n\nevent: y\ndata: 3\n\n"finish_reason":" {}\n\n'
        b'data: {"error":{"message":"no"},"finish_reason":"stop"}\n\n'
    )
    assert run(AnswerReader(CHAT, stream=True, block=block), stream) == stream


def test_a_huge_event_is_passed_on_unread(monkeypatch):
    """Memory is bounded; the bytes stay."""
    monkeypatch.setattr(answer, "EVENT_LIMIT_BYTES", 100)
    reader = AnswerReader(LLAMA, stream=True, block=block)
    piece = b'data: {"stop":true,"prompt":"' + b"x" * 60
    assert reader.feed(piece) == b""
    assert reader.feed(b"y" * 60) == piece + b"y" * 60
    assert run(reader, b'"}\n\n') == b'"}\n\n'


def test_a_mere_observer_learns_the_usage():
    """Without a block nothing is written, and the figures are read all the same."""
    reader = AnswerReader(CHAT, stream=True)
    reader.feed(reply("chat_stream"))
    assert reader.usage.generated_tokens == 5
    assert run(AnswerReader(CHAT, stream=True), reply("chat_stream")) == reply("chat_stream")


def test_an_answer_of_another_kind_is_left_alone():
    """Infill has no block."""
    stream = reply("completion_stream")
    assert run(AnswerReader(OTHER, stream=True, block=block), stream) == stream


# -- whole answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_the_block_is_the_last_member_of_a_whole_answer(name):
    """The other bytes are the engine's, whatever the pieces."""
    body = reply(name)
    reader = AnswerReader(WHOLE[name], stream=False, block=block)
    out = run(reader, *cut(body, [1, 50]))
    document = json.loads(out)
    assert list(document)[-1] == "opencoti"
    assert document.pop("opencoti") == block(reader.usage)
    assert out.startswith(body[:-1] + b',"opencoti":')
    assert document == json.loads(body)
    assert reader.usage.generated_tokens == 5


@pytest.mark.parametrize("name", ["completion_prompts", "chat_refused"])
def test_lists_and_errors_have_no_block(name):
    """An answer to several prompts is no object, an error is the engine's."""
    assert run(AnswerReader(CHAT, stream=False, block=block), reply(name)) == reply(name)


def test_an_observer_of_a_whole_answer_is_told_at_the_end():
    """The figures are known after ``finish``; nothing is written."""
    reader = AnswerReader(CHAT, stream=False)
    reader.feed(reply("chat"))
    assert reader.finish() == reply("chat")
    assert reader.usage == read_answer(json.loads(reply("chat")))
    assert reader.usage.prompt_tokens == 22
    assert AnswerReader(CHAT, stream=False, block=block).finish() == b""


# -- figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "usage"),
    [
        ({"timings": {"cache_n": 3, "prompt_n": 4, "predicted_n": 5}}, Usage(7, 3, 5)),
        (
            {"timings": {"cache_n": 3, "prompt_n": 4, "predicted_n": 5, "predicted_ms": 80.0}},
            Usage(7, 3, 5, 0.08),
        ),
        ({"usage": {"prompt_tokens": 7, "completion_tokens": 5}}, Usage(7, None, 5)),
        (
            {"usage": {"input_tokens": 7, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 3}}},
            Usage(7, 3, 5),
        ),
        (
            {"usage": {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 5}},
            Usage(7, 3, 5),
        ),
        (
            {"message": {"usage": {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 0}}},
            Usage(7, 3, 0),
        ),
        ({"usage": {"output_tokens": 5}}, Usage(None, None, 5)),
        ({"response": {"usage": {"input_tokens": 7, "output_tokens": 5}}}, Usage(7, None, 5)),
        ({"usage": None}, Usage()),
        ({"message": "text"}, Usage()),
        ({}, Usage()),
    ],
)
def test_usage_of_every_dialect(document, usage):
    """What an answer says it took; None where it does not say."""
    assert read_usage(document) == usage


def test_unknown_usage_is_no_zero():
    """The context is known only when both parts are."""
    assert Usage(7, 0, 5).context_tokens == 12
    assert Usage(7, 0, None).context_tokens is None
    assert Usage(None, 0, 5).context_tokens is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(max_size=5).filter(lambda key: key != "opencoti"), VALUES, max_size=4),
    st.sampled_from([None, 2]),
    st.sampled_from(["", "\n", "  \r\n"]),
)
def test_a_member_is_added_and_nothing_else(document, indent, tail):
    """The object has one member more, at its end; all other bytes stay, in any layout."""
    raw = (json.dumps(document, indent=indent) + tail).encode()
    changed = insert_member(raw, "opencoti", {"a": 1})
    assert json.loads(changed) == {**document, "opencoti": {"a": 1}}
    at = raw.rindex(b"}")
    assert changed.startswith(raw[:at])
    assert changed.endswith(raw[at:])


@pytest.mark.parametrize(
    ("document", "cut"),
    [
        ({"choices": [{"finish_reason": "length"}]}, True),
        ({"choices": [{"finish_reason": "stop"}]}, False),
        ({"choices": [{"finish_reason": None}]}, None),
        ({"choices": []}, None),
        ({"stop_type": "limit"}, True),
        ({"stop_type": "eos"}, False),
        ({"stop_reason": "max_tokens"}, True),
        ({"stop_reason": "end_turn"}, False),
        ({"delta": {"stop_reason": "max_tokens"}}, True),
        ({"delta": "text"}, None),
        ({"response": {"status": "completed"}}, None),
    ],
)
def test_answers_that_ended_for_their_length(document, cut):
    """In the words of every API; one that does not say why it ended was not cut for all we know."""
    assert read_answer(document).cut is cut


def test_the_engines_word_for_a_cut_is_kept():
    """Through the events that follow, too."""
    assert read_answer({"truncated": True}).updated(Usage()).truncated is True
    assert read_answer({"truncated": "x"}).truncated is None


@pytest.mark.parametrize(
    ("usage", "most", "full"),
    [
        (Usage(50, 0, 5, truncated=True), 5, True),
        (Usage(94, 0, 5), 5, True),
        (Usage(93, 0, 5, cut=True), 5, False),
        (Usage(50, 0, 5, cut=True), 6, True),
        (Usage(50, 0, 5, cut=False), 6, False),
        (Usage(50, 0, 5, cut=True), None, False),
        (Usage(50, 0, None, cut=True), 6, False),
    ],
)
def test_a_wall_is_told_from_a_bound_that_was_asked_for(usage, most, full):
    """CTX-3: the engine's word, a full window, or an answer cut though its client allows more."""
    assert usage.hit_wall(100, most) is full
    assert Usage(99, 0, 5).hit_wall(None, None) is False
