"""Claims about ``api.canonical``: billing headers become constant, and no other byte changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.api.canonical import without_billing_values

HEADER = "x-anthropic-billing-header: cc_version=2.1.101.{0}; cc_entrypoint=cli; cch={0};"
STEADY = "x-anthropic-billing-header: cc_version=2.1.101.000; cc_entrypoint=cli; cch=fffff;"
TALK = 'It says "' + HEADER.format("abc12") + '" \\ \n ü'
"""Somebody speaks of the header: not ours to change, wherever it stands."""

CHAT = [{"role": "user", "content": TALK}, {"role": "user", "content": HEADER.format("fed01")}]

SYSTEMS = {
    "string": lambda header: {"system": header + TALK, "messages": CHAT},
    "blocks": lambda header: {
        "messages": CHAT,
        "system": [{"type": "text", "text": header}, {"type": "text", "text": TALK, "cache_control": {}}],
    },
    "system message": lambda header: {"messages": [{"role": "system", "content": header + TALK}, *CHAT]},
    "later and in parts": lambda header: {
        "messages": [*CHAT, {"content": [{"type": "text", "text": header + TALK}], "role": "developer"}]
    },
    "instructions": lambda header: {"input": TALK, "instructions": header + TALK},
    "input": lambda header: {"input": [{"role": "developer", "content": header}, *CHAT], "system": header},
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_the_values_of_a_system_text_become_constant(name, style):
    """In every API's place for it; space, order, escapes and all that others say of it stay as they are."""
    body = {"model": "x", "stream": True, **SYSTEMS[name](HEADER.format("a5145")), "metadata": {"a": [1, {}]}}
    expected = {**body, **SYSTEMS[name](STEADY)}
    assert (
        without_billing_values(json.dumps(body, **style).encode()) == json.dumps(expected, **style).encode()
    )


def test_two_requests_that_differ_in_nothing_else_become_equal():
    """That is the purpose."""
    one, other = (
        without_billing_values(json.dumps(SYSTEMS["string"](HEADER.format(value))).encode())
        for value in ("a5145", "00001")
    )
    assert one == other


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x-anthropic-billing-header: cch=abc;"',
        json.dumps({"messages": CHAT}).encode(),
        json.dumps({"system": "cch=abc", "messages": CHAT}).encode(),
        json.dumps({"system": TALK, "messages": CHAT}).encode(),
        json.dumps(
            {"prompt": HEADER.format("abc"), "tools": [{"description": HEADER.format("abc")}]}
        ).encode(),
        json.dumps(
            {"messages": [{"role": 5, "content": HEADER.format("abc")}, HEADER.format("abc")]}
        ).encode(),
        json.dumps({"messages": {"role": "system", "content": HEADER.format("abc")}}).encode(),
        b'{"system": "x-anthropic-billing-header: cch=abc;"',
        b'{"system": "x-anthropic-billing-header: cch=abc;"} trailing',
        b'{"system": "x-anthropic-billing-header: cch=abc;", "system": "other"}',
        b'{"a": 12, "system": "x-anthropic-billing-header: cch=abc;", "a": 1}',
        b'{"system": "x-anthropic-billing-header: no fields"}',
        b'{"system": "x-anthropic-billing-header: cch=;"}',
        b"[" * 5000 + b'"x-anthropic-billing-header: cch=abc;"',
    ],
)
def test_what_is_no_system_text_is_left_alone(body):
    """User messages, prompts, tools, broken JSON and JSON that says things twice: the very same object."""
    assert without_billing_values(body) is body


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(HEADER.format("a5145")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["system", "messages", "input", "instructions", "tools", "prompt"]) | st.text(
    max_size=9
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": VALUES}), max_size=3
)


@given(st.dictionaries(NAMES, VALUES | MESSAGES), st.booleans(), st.sampled_from([None, 1]))
def test_only_system_texts_change_whatever_the_body(body, escaped, indent):
    """What comes out is the same text but for headers that open a string of a system text."""

    def steadied(value):
        if isinstance(value, str):
            return value.replace(HEADER.format("a5145"), STEADY, 1) if value.startswith("x-anth") else value
        if isinstance(value, list):
            return [steadied(item) for item in value]
        if isinstance(value, dict):
            return {steadied(name): steadied(item) for name, item in value.items()}
        return value

    def is_system(message):
        return isinstance(message, dict) and message.get("role") == "system"

    expected = dict(body)
    for name, value in body.items():
        if name in ("system", "instructions"):
            expected[name] = steadied(value)
        elif name in ("messages", "input") and isinstance(value, list):
            expected[name] = [steadied(each) if is_system(each) else each for each in value]
    before, after = (json.dumps(each, ensure_ascii=escaped, indent=indent) for each in (body, expected))
    assert without_billing_values(before.encode()) == after.encode()
