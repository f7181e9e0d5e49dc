"""Claims about ``api.lint``: what is odd about a message list is named, whatever the API."""

import json

import pytest

from polykv_proxy.api.families import Dialect
from polykv_proxy.api.lint import judge

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "a"}


def call(*names):
    """An assistant's tool calls."""
    return {"role": "assistant", "tool_calls": [{"id": name} for name in names]}


def result(name):
    """A tool's result."""
    return {"role": "tool", "tool_call_id": name, "content": "r"}


def of(messages, dialect=Dialect.OPENAI_CHAT):
    """Violations as pairs."""
    key = "input" if dialect is Dialect.RESPONSES else "messages"
    return [
        (each["message_index"], each["rule"]) for each in judge(json.dumps({key: messages}).encode(), dialect)
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM, USER, SAID, USER],
        [{"role": "developer", "content": "d"}, USER],
        [SYSTEM, USER, call("a", "b"), result("b"), result("a")],
        [USER, call("a"), result("a"), call("b"), result("b"), SAID, USER],
        [],
    ],
)
def test_good_lists(messages):
    """Nothing to say."""
    assert of(messages) == []


@pytest.mark.parametrize(
    ("messages", "violations"),
    [
        ([USER, SYSTEM, USER], [(1, "system_first")]),
        ([SYSTEM, SYSTEM, USER], [(1, "system_once")]),
        ([SYSTEM, USER, SYSTEM, USER], [(2, "system_first"), (2, "system_once")]),
        ([USER, result("a")], [(1, "tool_after_caller")]),
        ([USER, call("a"), USER, result("a")], [(3, "tool_after_caller")]),
        ([USER, call("a"), result("b")], [(2, "tool_after_caller")]),
        ([USER, call("a"), result("a"), call("b"), result("a")], [(4, "tool_after_caller")]),
        ([USER, SAID], [(1, "last_is_user_or_tool")]),
        ([SYSTEM], [(0, "last_is_user_or_tool")]),
        ([USER, call("a")], [(1, "last_is_user_or_tool")]),
        ([7], [(0, "last_is_user_or_tool")]),
    ],
)
def test_odd_lists(messages, violations):
    """Each oddity where it is."""
    assert of(messages) == violations


@pytest.mark.parametrize("odd", [None, True, 1.5, "", [], [1], {}, {"a": [1]}])
def test_ids_and_roles_of_any_kind(odd):
    """The engine takes some that are no text, and answers; what is no text can be the same all the same."""
    asks = {"role": "assistant", "content": [{"type": "tool_use", "id": odd}]}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": odd}]}
    assert of([USER, asks, told], Dialect.ANTHROPIC) == []
    assert of([USER, call(odd), result(odd)]) == []
    assert of([USER, call("a"), result(odd)]) == [(2, "tool_after_caller")]
    items = [{"type": "function_call", "call_id": odd}, {"type": "function_call_output", "call_id": odd}]
    assert of([USER, *items], Dialect.RESPONSES) == []
    assert of([USER, {"role": odd, "content": "c"}]) == [(1, "last_is_user_or_tool")]


def test_blocks_of_anthropic():
    """Calls and results are blocks there, and results come from the user."""
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
    assert of([USER, used, told], Dialect.ANTHROPIC) == []
    assert of([USER, SAID, told], Dialect.ANTHROPIC) == [(2, "tool_after_caller")]
    assert of([USER, used], Dialect.ANTHROPIC) == [(1, "last_is_user_or_tool")]


def test_items_of_responses():
    """Calls and results are items; several calls in a row wait together."""
    calls = [{"type": "function_call", "call_id": name} for name in "ab"]
    results = [{"type": "function_call_output", "call_id": name} for name in "ba"]
    assert of([USER, *calls, *results], Dialect.RESPONSES) == []
    assert of([USER, calls[0], *results], Dialect.RESPONSES) == [(2, "tool_after_caller")]
    assert of([USER, *calls], Dialect.RESPONSES) == [(2, "last_is_user_or_tool")]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"prompt":"x"}', b'{"messages":"x"}', b'{"messages":[]}', b'{"input":"hi"}', b"[" * 5000],
)
def test_what_is_no_conversation_is_not_judged(body):
    """The engine will say what is wrong with it."""
    assert judge(body, Dialect.OPENAI_CHAT) == []
    assert judge(body, Dialect.RESPONSES) == []
