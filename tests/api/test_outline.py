"""Claims about ``api.outline``: what bodies of each API are taken apart into."""

import json

import pytest

from polykv_proxy.api import outline
from polykv_proxy.api.families import Dialect
from polykv_proxy.core.divergence import Cause, Now, Then, diagnose
from polykv_proxy.core.outlines import Section, first_change


def read(body, dialect=Dialect.OPENAI_CHAT):
    """The outline of a body."""
    return outline.read(json.dumps(body).encode(), dialect)


def shape(found):
    """Sections, indexes and texts."""
    return [(part.section.value, part.message_index, part.text) for part in found.parts]


def user(content):
    """A user's message."""
    return {"role": "user", "content": content}


def test_a_chat():
    """Leading system messages are the system prompt; a later one is a message."""
    system, late = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Now."}
    found = read({"messages": [system, user("Hello"), late], "tools": [{"a": 1}], "model": "m"})
    assert shape(found) == [
        ("system", 0, "Be brief."),
        ("tools", None, '[{"a": 1}]'),
        ("messages", 1, "Hello"),
        ("messages", 2, "Now."),
    ]
    assert len(found.of(Section.TOOLS)[0].items) == 1


def test_anthropic_and_responses():
    """The system prompt has a member of its own; its blocks are one text."""
    blocks = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    found = read({"system": blocks, "messages": [user("Hello")]}, Dialect.ANTHROPIC)
    assert shape(found) == [("system", None, "One.\nTwo."), ("messages", 0, "Hello")]
    found = read({"instructions": "Be brief.", "input": "Hello"}, Dialect.RESPONSES)
    assert shape(found) == [("system", None, "Be brief."), ("messages", 0, "Hello")]


def test_template_settings():
    """They are a part of their own."""
    found = read({"messages": [user("Hello")], "chat_template_kwargs": {"enable_thinking": False}})
    assert [part.section for part in found.parts] == [Section.TEMPLATE, Section.MESSAGES]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        user([{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:"}}]),
        "Hello",
    ],
)
def test_what_is_not_only_text_is_shown_as_json(message):
    """So that every difference shows."""
    part = read({"messages": [message]}).parts[0]
    assert (part.text, part.verbatim) == (
        (message, True) if isinstance(message, str) else (json.dumps(message), False)
    )


def test_media_are_seen_and_words_about_them_are_not():
    """By the type of a content item."""
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert read({"messages": [user([image])]}).media
    assert not read({"messages": [user('Why does {"type": "image_url"} fail?')]}).media


def test_a_billing_header_is_masked():
    """As a text or as a block of its own; what follows it still counts."""

    def system(version, rest="Be brief."):
        return {
            "system": f"x-anthropic-billing-header: cc_version={version}; cch=abc;\n{rest}",
            "messages": [user("Hello")],
        }

    def cause(one, other):
        then = Then(outline=one, epoch="", prompt_tokens=9, resident_tokens=9, held=True, taken=False)
        now = Now(
            outline=other,
            epoch="",
            prompt_tokens=20,
            cached_tokens=1,
            attached_tokens=0,
            cache=True,
            continues=True,
        )
        return diagnose(then, now).cause

    assert cause(read(system("1"), Dialect.ANTHROPIC), read(system("2"), Dialect.ANTHROPIC)) is (
        Cause.VOLATILE_HEADER
    )
    other = read(system("2", "Be long."), Dialect.ANTHROPIC)
    assert cause(read(system("1"), Dialect.ANTHROPIC), other) is Cause.SYSTEM_CHANGED
    blocks = [
        {"system": [{"type": "text", "text": f"x-anthropic-billing-header: v={version}"}, {"text": "Be"}]}
        for version in (1, 2)
    ]
    assert cause(*(read(each, Dialect.ANTHROPIC) for each in blocks)) is Cause.VOLATILE_HEADER


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_plain_prompt_may_go_on(kind):
    """Whatever its length: it is cut into runs, and the last one may become longer."""
    long = "word " * 2000 if kind == "text" else list(range(3000))
    more = long + (" and more" if kind == "text" else [7])
    one = read({"prompt": long}, Dialect.LLAMA)
    assert len(one.parts) > 1
    assert first_change(one, read({"prompt": more}, Dialect.LLAMA)) is None
    other = read({"prompt": "W" + long[1:] if kind == "text" else [1, *long[1:]]}, Dialect.LLAMA)
    assert first_change(one, other)[0] is one.parts[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": 5}', b"[" * 3000])
def test_a_body_that_cannot_be_read_is_no_error(body):
    """The engine refuses it, or nobody compares it."""
    for dialect in Dialect:
        assert all(part.section is Section.MESSAGES for part in outline.read(body, dialect).parts)
    assert outline.prompt_of(body) == b""


def test_the_prompt_as_it_was_sent():
    """Raw; other kinds of requests have no outline."""
    assert outline.prompt_of(b'{"prompt": ["a", 5]}') == b'["a", 5]'
    assert read({"prompt": "x", "input_prefix": "y"}, Dialect.OTHER).parts == ()


def test_an_answer_as_it_comes_back():
    """With what the Responses API wraps it in, too."""
    item = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
    }
    part = read({"input": [item]}, Dialect.RESPONSES).parts[0]
    assert (part.text, part.verbatim) == ("Hello", True)
