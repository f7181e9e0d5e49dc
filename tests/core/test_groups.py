"""Claims about ``core.groups``: what conversations under one name are seen to begin with."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.groups import MAX_GROUPS, MAX_TOKENS, GroupBook
from polykv_proxy.core.types import Scope, as_tokens, common_prefix

MINE, THEIRS = Scope("mine"), Scope("theirs")


def prompt(*ids):
    """Tokens."""
    return as_tokens(ids)


def test_a_group_is_what_its_conversations_have_in_common():
    """It only shrinks: what the third has in common with both."""
    book = GroupBook()
    assert book.meet(MINE, "g", (1, 10), prompt(1, 2, 3, 4, 10)) == 0
    assert book.meet(MINE, "g", (1, 11), prompt(1, 2, 3, 4, 11)) == 4
    assert book.meet(MINE, "g", (1, 12), prompt(1, 2, 3, 9)) == 3
    assert book.meet(MINE, "g", (1, 13), prompt(1, 2, 3, 4, 10)) == 3


def test_turns_of_one_conversation_are_no_group():
    """Its name is a session's then; a second conversation makes it a group."""
    book = GroupBook()
    assert book.meet(MINE, "g", (1, 10), prompt(1, 2, 3)) == 0
    assert book.meet(MINE, "g", (1, 10, 20), prompt(1, 2, 3, 4, 5)) == 0
    assert book.meet(MINE, "g", (1, 11), prompt(1, 2, 7)) == 2


def test_a_fingerprint_too_short_to_tell_is_another_conversation():
    """A common first link says that they begin alike, and that is what a group is."""
    book = GroupBook()
    assert book.meet(MINE, "g", (1,), prompt(1, 2, 3)) == 0
    assert book.meet(MINE, "g", (1,), prompt(1, 2, 4)) == 2


def test_nothing_in_common_begins_the_group_anew():
    """The name means something else by now."""
    book = GroupBook()
    book.meet(MINE, "g", (1, 10), prompt(1, 2))
    assert book.meet(MINE, "g", (2, 20), prompt(5, 6, 7)) == 0
    assert book.meet(MINE, "g", (2, 21), prompt(5, 6, 8)) == 2


def test_names_of_different_keys_are_different_groups():
    """What one client sends says nothing to another."""
    book = GroupBook()
    book.meet(MINE, "g", (1, 10), prompt(1, 2))
    assert book.meet(THEIRS, "g", (1, 11), prompt(1, 2)) == 0


def test_the_group_met_longest_ago_is_forgotten():
    """Not the one that was entered first."""
    book = GroupBook()
    for number in range(MAX_GROUPS):
        book.meet(MINE, f"g{number}", (1, 10), prompt(1, 2))
    book.meet(MINE, "g0", (1, 11), prompt(1, 2))
    book.meet(MINE, "new", (1, 10), prompt(1, 2))
    assert len(book) == MAX_GROUPS
    assert book.meet(MINE, "g0", (1, 12), prompt(1, 2)) == 2
    assert book.meet(MINE, "g1", (1, 12), prompt(1, 2)) == 0


def test_long_prompts_are_kept_to_a_bound():
    """No more is promised than is kept."""
    book = GroupBook()
    long = as_tokens([7] * (MAX_TOKENS + 5))
    book.meet(MINE, "g", (1, 10), long)
    assert book.meet(MINE, "g", (1, 11), long) == MAX_TOKENS


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=6))
def test_the_answer_is_never_more_than_is_shared_with_the_one_before(prompts):
    """Whatever the order of prompts."""
    book = GroupBook()
    for number, ids in enumerate(prompts):
        shared = book.meet(MINE, "g", (1, 100 + number), as_tokens(ids))
        if number:
            assert shared <= common_prefix(as_tokens(prompts[number - 1]), as_tokens(ids))
