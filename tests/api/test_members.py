"""Claims about ``api.members``: what came is read leniently, and not changed."""

import msgspec
import pytest

from polykv_proxy.api import members

SYSTEM, DEVELOPER = b'{"role": "system", "content": "a"}', b'{"content": [], "role": "developer"}'
USER = b'{"role":"user","content":"a"}'


class Body(msgspec.Struct):
    """Of which one member is looked at."""

    a: members.Raw = msgspec.UNSET


@pytest.mark.parametrize(
    ("body", "member"),
    [(b'{"a": [1,  2] }', b"[1,  2]"), (b'{"a": null}', b"null"), (b'{"b": 1}', b"")],
)
def test_a_member_keeps_its_bytes(body, member):
    """Blanks and all; one that is not there has none."""
    assert members.raw(msgspec.json.decode(body, type=Body).a) == member


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (b'[1, "a,b" ,{"c": [2, 3]}]', [b"1", b'"a,b"', b'{"c": [2, 3]}']),
        (b"[]", []),
        (b'"hello"', [b'"hello"']),
        (b'{"a": 1}', [b'{"a": 1}']),
        (b"", []),
        (b"[1, 2", []),
    ],
)
def test_a_list_has_items_and_all_else_is_one(text, items):
    """A bare string is one message; a broken list is nothing."""
    assert members.items(text) == items


def test_no_more_items_are_told_apart_than_there_is_time_for():
    """Behind so many stands the list itself, so that two long ones stay two."""
    most = members.MOST_ITEMS
    full, longer = (b"[" + b",".join([USER] * count) + b"]" for count in (most, most + 1))
    assert members.items(full) == [USER] * most
    assert members.items(longer) == [*[USER] * (most - 1), longer]


def test_what_no_window_holds_is_one_item():
    """Whatever it is a list of."""
    short, endless = (
        b"[" + b"1," * commas + b"1]" for commas in (members.MOST_COMMAS - 1, members.MOST_COMMAS)
    )
    assert (members.is_endless(short), len(members.items(short))) == (False, members.MOST_ITEMS)
    assert (members.is_endless(endless), members.items(endless)) == (True, [endless])
    assert (len(members.starts(short)), members.starts(endless)) == (members.MOST_COMMAS, [])


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        (b'[1, "a" ,{"c": [2]},[]]', [b"1", b'"', b"{", b"["]),
        (b"[]", []),
        (b"[1", []),
        (b'{"a":1}', []),
        (b"", []),
    ],
)
def test_items_show_what_they_are_by_how_they_start(text, starts):
    """Of a list that can be read."""
    assert members.starts(text) == starts


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([SYSTEM, DEVELOPER, USER, SYSTEM], 2),
        ([USER, SYSTEM], 0),
        ([SYSTEM], 1),
        ([], 0),
        ([SYSTEM, b'{"role": 5}', SYSTEM], 1),
        ([SYSTEM, b'"hello"'], 1),
        ([SYSTEM, b"{"], 1),
        ([b'{"content": "a"}'], 0),
    ],
)
def test_the_scene_is_what_comes_before_anybody_speaks(messages, count):
    """Up to the first message that is not the system's or the developer's, or that nobody can read."""
    assert members.scene(messages) == count
