"""Claims about ``core.volatile``: which change between two texts is named, and what is made steady."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.volatile import (
    BILLING_MARKER,
    SNIPPET_CHARS,
    VolatileKind,
    as_engine_masks,
    first_difference,
    steady,
    volatile_part,
)

BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;You are Claude."
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"a": [1, "x,]"]}}} for name in "abc"]

HEX = st.text("0123456789abcdef", min_size=1, max_size=8)


def raw(value):
    """As it stands in a JSON body."""
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (BILLING, BILLING.replace("a5145", "a9fff"), ("cch=a5145", "cch=a9fff")),
        (BILLING, BILLING.replace(".e51", ".e6"), ("cc_version=2.1.101.e51", "cc_version=2.1.101.e6")),
        (BILLING, BILLING.replace("=cli", "=sdk-cli"), ("cc_entrypoint=cli", "cc_entrypoint=sdk-cli")),
        (
            [{"type": "text", "text": BILLING}, {"type": "text", "text": "more"}],
            [{"type": "text", "text": BILLING.replace("a5145", "00000")}, {"type": "text", "text": "else"}],
            ("cch=a5145", "cch=00000"),
        ),
    ],
)
def test_a_billing_header_is_recognised_by_the_field_that_differs(old, new, parts):
    """In a system prompt that is a string, and in one of blocks."""
    found = volatile_part(raw(old), raw(new))
    assert found is not None
    assert (found.kind, found.old, found.new) == (VolatileKind.BILLING_HEADER, *parts)
    assert raw(old)[: found.at] == raw(new)[: found.at]
    assert raw(old)[found.at] != raw(new)[found.at]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2026-11-30", "2026-12-01"),
        ("2026-11-30T06:26:00Z", "2026-11-30T06:26:01Z"),
        ("2026-11-30T06:26:00.123456+01:00", "2026-11-30T06:26:00.123999+01:00"),
        ("2026-11-30 06:26", "2026-11-30 07:00"),
        ("11/30/2026", "12/1/2026"),
        ("30.11.2026", "01.12.2026"),
        ("6:26 AM", "10:01 PM"),
        ("06:26:00", "06:26:59"),
        ("Monday", "Tuesday"),
        ("Monday, November 30, 2026", "Tuesday, December 1, 2026"),
        ("Nov 9", "Nov 10"),
        ("30 November 2026", "1 December 2026"),
        ("November 2026", "December 2026"),
        ("Mon Nov 30 06:26:00 UTC 2026", "Mon Nov 30 06:27:12 UTC 2026"),
        ("1796020000", "1796020123"),
        ("1796020000123", "1796020000999"),
        ("1796020000.25", "1796020000.75"),
    ],
)
@pytest.mark.parametrize("before", ["Today's date is ", "Env:\nDate:\t", "Hello.\n", '<time a="'])
def test_a_clock_is_recognised_wherever_it_stands(before, old, new):
    """Behind words, quotes and escaped line breaks; the snippet is the time and nothing else."""
    text = before + "{}.\nYou are a helper for things of 1999."
    found = volatile_part(raw(text.format(old)), raw(text.format(new)))
    assert found is not None
    assert (found.kind, found.old, found.new) == (VolatileKind.CLOCK, old, new)


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_tools_in_another_order_are_recognised(order):
    """Named by the first tool that is not where it was."""
    found = volatile_part(raw(TOOLS), raw([TOOLS[at] for at in order]))
    assert found is not None
    moved = next(at for at in range(3) if order[at] != at)
    assert (found.kind, found.old, found.new) == (
        VolatileKind.TOOLS_REORDERED,
        "abc"[moved],
        "abc"[order[moved]],
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"", b"anything"),
        (b"the same", b"the same"),
        (b"it goes on 2026-11-30", b"it goes on 2026-11-30, and on"),
        (b"You are A. 2026-11-30", b"You are B. 2026-12-01"),
        (b"version 12 of it", b"version 13 of it"),
        (b"a 2026-11-30 then one", b"a 2026-11-30 then two"),
        (b"Marvin helps", b"Monty helps"),
        (raw(BILLING), raw(BILLING.replace("You are", "I am"))),
        (raw(BILLING), raw("x-anthropic-other: " + BILLING)),
        (raw(TOOLS), raw(TOOLS[:2])),
        (raw(TOOLS), raw([TOOLS[0], TOOLS[1], {**TOOLS[2], "type": "functioN"}])),
        (raw(["a,b", "c"]), raw(["a", "b,c"])),
    ],
)
def test_what_was_meant_is_not_named(old, new):
    """A changed word, a longer text, another tool: nothing is said."""
    assert volatile_part(old, new) is None


def test_a_snippet_is_short():
    """Whatever stands there."""
    old, new = (b"x-anthropic-billing-header: cch=" + bytes([sign]) * 5000 + b";" for sign in b"ab")
    found = volatile_part(old, new)
    assert found is not None
    assert len(found.old) == len(found.new) == SNIPPET_CHARS


@given(st.permutations(range(4)), st.lists(st.text(max_size=8), min_size=4, max_size=4, unique=True))
def test_only_a_true_permutation_counts_as_reordered(order, texts):
    """Strings with every sign that JSON gives a meaning."""
    before = [{"name": f"t{number}", "description": text} for number, text in enumerate(texts)]
    found = volatile_part(raw(before), raw([before[at] for at in order]))
    if list(order) == [0, 1, 2, 3]:
        assert found is None
    else:
        assert found is not None
        assert found.kind is VolatileKind.TOOLS_REORDERED


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_any_two_texts_can_be_compared(start, one, other):
    """What is named lies at the first difference."""
    old, new = start + one, start + other
    found = volatile_part(old, new)
    if found is not None:
        assert old[: found.at] == new[: found.at]
        assert old[found.at] != new[found.at]


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_the_first_difference_is_what_a_loop_finds(one, other):
    """Halving gives the same."""
    expected = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        expected += 1
    assert first_difference(one, other) == expected


@given(HEX, HEX, st.text(max_size=30))
def test_steady_texts_of_two_requests_are_equal(one, other, rest):
    """Whatever follows the header, in a JSON string with its escapes."""
    texts = [
        raw(f"x-anthropic-billing-header: cc_version=2.1.101.{value}; cc_entrypoint=cli; cch={value};{rest}")
        for value in (one, other)
    ]
    assert steady(texts[0]) == steady(texts[1])
    assert json.loads(steady(texts[0])).endswith(f"; cc_entrypoint=cli; cch=fffff;{rest}")
    assert steady(steady(texts[0])) == steady(texts[0])


@given(st.binary(max_size=80))
def test_a_text_without_the_header_is_steady_already(text):
    """Also one that speaks of cch."""
    if BILLING_MARKER not in text:
        assert steady(text + b"cch=abc; cc_version=2.1.3.abc") == text + b"cch=abc; cc_version=2.1.3.abc"


def test_only_the_values_of_the_header_change():
    """The version itself, other fields and all text behind keep their bytes."""
    text = BILLING.replace("You", " Yöu") + " cch=abc; cc_version=2.1.101.e51;"
    expected = text.replace(".e51; cc_e", ".000; cc_e").replace("cch=a5145", "cch=fffff")
    assert steady(text.encode()) == expected.encode()


def test_the_engine_masks_the_stamp_only():
    """What changes from one conversation to the next still does."""
    assert as_engine_masks(BILLING.encode()) == BILLING.replace("a5145", "fffff").encode()
    assert as_engine_masks(b"cch=a5145;") == b"cch=a5145;"
