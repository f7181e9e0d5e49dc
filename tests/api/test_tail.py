"""Claims about ``api.tail``: usage and beginning of answers that nobody else reads."""

import json

import pytest
from fake_engine import Script, token_events, whole_answer
from fake_polykv import _events, _whole
from recorded import reply

from polykv_proxy.api.answer import Usage, read_usage
from polykv_proxy.api.tail import BEGINNING_BYTES, LAST_PIECES, Tail, begins_with

SCRIPT = Script(tokens=30, text=" word", prompt_n=12, cache_n=5)
PATHS = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill")


TIMED = 0.6
"""Seconds of decoding by the timings, where an API has them."""


def took(path):
    """What an answer of this API says that it took."""
    return Usage(17, 5, 30, None if path in ("/v1/messages", "/v1/responses") else TIMED)


def watching(pieces, told=None):
    """A tail that saw these pieces; it is put into ``told`` when it begins."""
    tail = Tail(None if told is None else lambda: told.append(tail))
    for piece in pieces:
        tail.observe(piece)
    return tail


@pytest.mark.parametrize("path", PATHS)
def test_usage_of_streams(path):
    """In whatever pieces they come: events, several at once, all at once."""
    events = token_events(path, SCRIPT) if path == "/infill" else _events(path, SCRIPT)
    for pieces in (events, [b"".join(events[:9]), *events[9:]], [b"".join(events)]):
        assert watching(pieces).usage(stream=True) == took(path)


@pytest.mark.parametrize("path", PATHS)
def test_usage_of_plain_answers(path):
    """Compact or not."""
    answer = whole_answer(path, SCRIPT) if path == "/infill" else _whole(path, SCRIPT)
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps(answer, separators=separators).encode()
        assert watching([body]).usage(stream=False) == took(path)


@pytest.mark.parametrize("name", ["chat", "text", "completion", "responses", "messages"])
def test_usage_and_beginning_as_the_engine_words_them(name):
    """Recorded answers: a stream, event by event, and a plain one of the same request."""
    events = [event + b"\n\n" for event in reply(f"{name}_stream").removesuffix(b"\n\n").split(b"\n\n")]
    stream, plain = watching(events), watching([reply(name)])
    assert plain.usage(stream=False) == read_usage(json.loads(reply(name)))
    found = stream.usage(stream=True)
    assert found.generated_tokens == 5
    assert found.prompt_tokens == plain.usage(stream=False).prompt_tokens
    assert found.cached_tokens is not None
    text, start = begins_with(plain.beginning())[0], begins_with(stream.beginning())[0]
    assert start
    assert text.startswith(start)


def test_usage_of_a_plain_answer_whose_beginning_is_gone():
    """More pieces than are kept; what only looks like usage in its text does not count."""
    text = 'He said: {"usage":{"prompt_tokens":1}} ' * 300
    answer = {"choices": [{"text": text}], "usage": SCRIPT.usage(), "timings": SCRIPT.timings()}
    body = json.dumps(answer).encode()
    size = len(body) // (3 * LAST_PIECES)
    tail = watching([body[at : at + size] for at in range(0, len(body), size)])
    assert tail.usage(stream=False) == took("/completion")


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b""],
        [b"not json"],
        [b'{"usage": {"prompt'],
        [b'{"usage": 5}'],
        [b'{"timings": {"cache_n": 1}}'],
        [b'["usage"]'],
        [b'data: {"usage": [\n\n'],
        [b'{"error": {"message": "no usage"}}'],
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_answers_without_usage(pieces, stream):
    """Unknown is no error."""
    assert watching(pieces).usage(stream=stream) == Usage()


@pytest.mark.parametrize("path", PATHS)
def test_how_an_answer_begins(path):
    """Its first token at least; all of it, up to a bound, where it came at once."""
    if path != "/infill":
        text, reasoned = begins_with(watching(_events(path, SCRIPT)).beginning())
        assert text.startswith(" word")
        assert not reasoned
    answer = whole_answer(path, SCRIPT)
    if path != "/v1/responses":
        text, _ = begins_with(watching([json.dumps(answer).encode()]).beginning())
        assert text == (" word" * 30)[:80]


def test_reasoning_is_told():
    """In the engine's member for it, and in Anthropic's."""
    for member in ("reasoning_content", "thinking"):
        assert begins_with(b'data: {"delta": {"%b": "Hm"}}\n\n' % member.encode()) == (None, True)
    assert begins_with(b'data: {"delta": {"reasoning_content": ""}}\n\n') == (None, False)
    assert begins_with(b'{"content":"a\\"b"}') == ('a"b', False)
    assert begins_with(b'{"content":"\\ud800"}') == (None, False)


PING = b":\n\n"


@pytest.mark.parametrize("path", PATHS)
def test_comments_before_an_answer_are_none_of_it(path):
    """However many an engine sends while it computes the prompt; that the answer begins is told once."""
    events = token_events(path, SCRIPT) if path == "/infill" else _events(path, SCRIPT)
    told = []
    tail = watching([PING] * 20 + [PING * 2], told=told)
    assert (tail.begun, told, tail.beginning()) == (False, [], b"")
    tail.observe(PING + events[0])  # the first event may come with a comment
    assert (tail.begun, told) == (True, [tail])
    for piece in events[1:]:
        tail.observe(piece)
    assert told == [tail]
    assert tail.usage(stream=True) == took(path)
    assert tail.beginning().startswith(PING + events[0])
    assert watching(events).begun


def test_progress_before_an_answer_is_none_of_it():
    """A client may ask for it; what comes with it is read all the same."""
    events = _events("/v1/messages", SCRIPT)
    progress = b'event: message_delta\ndata: {"prompt_progress":{"total":9,"processed":3}}\n\n'
    tail = watching([events[0] + progress, PING, *[progress] * 9])
    assert not tail.begun
    for event in events[1:]:
        tail.observe(event)
    assert tail.begun
    assert tail.usage(stream=True) == took("/v1/messages")
    assert watching([progress, progress + b"".join(events)]).usage(stream=True) == took("/v1/messages")
    assert not watching([b""]).begun


def test_the_beginning_is_bounded():
    """A plain answer is one piece."""
    assert watching([b"x" * 10_000, b"y"]).beginning() == b"x" * BEGINNING_BYTES
    assert watching([]).beginning() == b""
