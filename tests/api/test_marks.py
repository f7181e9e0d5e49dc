"""Claims about ``api.marks``: which mark counts, and which bodies find its place in tokens."""

import json

import pytest

from polykv_proxy.api.families import INFERENCE
from polykv_proxy.api.marks import PROBES, deepest, group_of
from polykv_proxy.core.volatile import first_difference

CHAT, MESSAGES, RESPONSES = (
    INFERENCE[path] for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
)
MARK = {"cache_control": {"type": "ephemeral"}}
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def part(text, **mark):
    """A part of a message, a block of a system text."""
    return {"type": "text", "text": text, **mark}


def user(*parts):
    """A user's message."""
    return {"role": "user", "content": list(parts)}


def texts(content):
    """A message's text."""
    return content if isinstance(content, str) else "".join(each["text"] for each in content or [])


def rendered(body):
    """A template: system text, tools, messages; each message ends before the next begins."""
    parts = [f"<system>{texts(body[key])}</>" for key in ("system", "instructions") if key in body]
    parts += [f"<tool>{tool.get('name') or tool['function']['name']}</>" for tool in body.get("tools", [])]
    for message in body.get("messages", body.get("input", [])):
        parts.append(f"<{message['role']}>{texts(message['content'])}</>")
    return "".join(parts)


def before(body, family):
    """Text before the mark, as its bodies find it; None without one."""
    marked = deepest(json.dumps(body).encode(), family)
    if marked is None:
        return None
    assert len(marked.bodies) == len(PROBES)
    found = [rendered(body), *(rendered(json.loads(each)) for each in marked.bodies)]
    return found[0][: min(first_difference(found[0].encode(), each.encode()) for each in found[1:])]


QUESTION = user(part("Why?"))
SYSTEM_2 = [part("One. ", **MARK), part("Two. ")]


@pytest.mark.parametrize(
    ("family", "body", "expected"),
    [
        (
            MESSAGES,
            {"system": [part("One."), part("Two.", **MARK)], "messages": [QUESTION]},
            "<system>One.Two.</><user>",
        ),
        (MESSAGES, {"system": SYSTEM_2, "messages": [QUESTION]}, "<system>One. "),
        (
            MESSAGES,
            {"system": "S", "messages": [user(part("Doc.", **MARK), part("Why?"))]},
            "<system>S</><user>Doc.",
        ),
        (
            MESSAGES,
            {"system": SYSTEM_2, "messages": [user(part("Doc.", **MARK), part("Why?", **MARK))]},
            "<system>One. Two. </><user>Doc.",
        ),
        (
            MESSAGES,
            {
                "system": "S",
                "messages": [user(part("Doc.", **MARK)), {"role": "assistant", "content": "A"}, QUESTION],
            },
            "<system>S</><user>Doc.</><assistant>",
        ),
        (
            MESSAGES,  # a coding agent: its rules, and the prompt's end, which is this conversation's own
            {
                "system": [part("One.", **MARK), part("Two.", **MARK)],
                "messages": [user(part("Context."), part("Why?", **MARK))],
            },
            "<system>One.Two.</><user>",
        ),
        (MESSAGES, {"tools": [{"name": "a", **MARK}, {"name": "b"}], "messages": [QUESTION]}, "<tool>a</><"),
        (
            MESSAGES,
            {"system": "S", "tools": [{"name": "a", **MARK}, {"name": "b"}], "messages": [QUESTION]},
            "<system>",
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": [part("S", **MARK)]}, QUESTION]},
            "<system>S</><user>",
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": [part("S", **MARK), part("T")]}, QUESTION]},
            "<system>S",
        ),
        (CHAT, {"messages": [{"role": "system", "content": "S", **MARK}, QUESTION]}, "<system>S</><user>"),
        (CHAT, {"messages": [user(part("Doc.", **BREAK), part("Why?"))]}, "<user>Doc."),
        (
            CHAT,
            {
                "tools": [{"function": {"name": "a"}}, {"function": {"name": "b", **MARK}}],
                "messages": [QUESTION],
            },
            "<tool>a</><tool>b</><user>",
        ),
        (
            CHAT,
            {
                "tools": [{"function": {"name": "a"}, **MARK}],
                "messages": [{"role": "system", "content": "S"}, QUESTION],
            },
            "<tool>a</><system>",
        ),
        (
            RESPONSES,
            {"instructions": "S", "input": [user(part("Doc.", **BREAK), part("Why?"))]},
            "<system>S</><user>Doc.",
        ),
    ],
)
def test_the_bodies_agree_on_what_precedes_the_deepest_mark(family, body, expected):
    """Of tools, system blocks and the opening message, in each API."""
    assert before(body, family) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [QUESTION]},
        {"messages": [user(part("Why?", **MARK))]},
        {"messages": [user(part("cache_control"))]},
        {"messages": [QUESTION, {"role": "assistant", "content": "A"}, user(part("B", **MARK), part("C"))]},
        {"messages": [user(part("A", cache_control=None), part("B"))]},
        {"messages": "cache_control", **MARK},
        {"messages": [7, {"cache_control": 1}]},
        {"messages": [], "system": [["cache_control", "cache_control"], {"cache_control": 0}]},
        [{"cache_control": 1}],
    ],
    ids=[
        "none",
        "at the end",
        "a word",
        "further on",
        "null",
        "top level",
        "no messages",
        "odd",
        "no object",
    ],
)
def test_other_marks_do_not_count(body):
    """There is nothing behind them, or they follow one conversation, or they are none."""
    assert deepest(json.dumps(body).encode(), MESSAGES) is None


def test_broken_json_and_plain_prompts_have_no_marks():
    """Words alone are none."""
    assert deepest(b'{"cache_control" "messages": [', MESSAGES) is None
    assert deepest(b'{"messages": ' + b"[" * 5000 + b'"cache_control"', MESSAGES) is None
    assert deepest(b'{"prompt": "x", "cache_control": 1}', INFERENCE["/completion"]) is None


def test_the_key_is_that_of_the_prefix():
    """What follows the mark, and what no template sees, does not change it; all before it does."""

    def key(question="Why?", system="S", family=MESSAGES, **more):
        body = {"system": system, "messages": [user(part("Doc.", **MARK), part(question))], **more}
        marked = deepest(json.dumps(body).encode(), family)
        assert marked is not None
        return marked.key

    assert key() == key("What for?") == key(metadata={"user_id": "a"}, stream=True)
    assert len({key(), key(system="T"), key(tools=[{"name": "a"}]), key(family=CHAT)}) == 4


@pytest.mark.parametrize(
    ("body", "group"),
    [
        (b'{"prompt_cache_key": "g", "messages": []}', "g"),
        (b'{"prompt_cache_key": "%b"}' % (b"g" * 255), "g" * 255),
        (b'{"prompt_cache_key": "%b"}' % (b"g" * 256), None),
        (b'{"prompt_cache_key": ""}', None),
        (b'{"prompt_cache_key": null}', None),
        (b'{"prompt_cache_key": 5}', None),
        (b'{"messages": "\\"prompt_cache_key\\""}', None),
        (b'{"messages": []}', None),
        (b'"prompt_cache_key"', None),
        (b"[" * 5000 + b'"prompt_cache_key"', None),
    ],
)
def test_a_group_is_a_name(body, group):
    """Anything else is none."""
    assert group_of(body) == group
