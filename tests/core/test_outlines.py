"""Claims about ``core.outlines``: where a request goes on otherwise, and what is no change."""

import pytest

from core.outlines import outline, part, prompt
from polykv_proxy.core.outlines import Outline, Section, first_change, is_related

CHAT = outline("Hello", "Hi", tools=("a", "b"), template="thinking")


def test_messages_may_become_more():
    """Nothing else may, and nothing may become less."""
    more = outline("Hello", "Hi", "Where?", tools=("a", "b"), template="thinking")
    assert first_change(CHAT, CHAT) is None
    assert first_change(CHAT, more) is None
    gone, nothing = first_change(more, CHAT)
    assert (gone.text, nothing) == ("Where?", None)
    nothing, came = first_change(outline("Hello"), outline("Hello", tools=("a",)))
    assert (nothing, came.section) == (None, Section.TOOLS)


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"system": "Be long."}, Section.SYSTEM),
        ({"tools": ("b", "a")}, Section.TOOLS),
        ({"template": "none"}, Section.TEMPLATE),
        ({}, Section.MESSAGES),
    ],
)
def test_of_several_changes_the_first_in_the_prompt_is_named(changes, section):
    """A message changes in each case; what comes before it is the change."""
    facts = {"tools": ("a", "b"), "template": "thinking"} | changes
    before, after = first_change(CHAT, outline("Ho", "Hi", **facts))
    assert before.section is after.section is section


def test_a_plain_prompts_end_may_go_on():
    """What stands before it may not; without text it is taken for unchanged if it grew."""
    grown = prompt("Once upon")
    assert first_change(prompt("Once"), grown) is None
    assert first_change(prompt("Once"), prompt("Twice upon")) is not None
    assert first_change(prompt("Once", "upon"), prompt("Once a", "upon")) is not None
    assert first_change(prompt("Once").without_text(), grown) is None
    assert first_change(grown.without_text(), prompt("Once")) is not None


def test_a_compact_outline_has_no_text():
    """And all else that it had."""
    compact = CHAT.without_text()
    assert {each.text for each in compact.parts} == {None}
    assert first_change(compact, CHAT) is None
    assert [each.digest for each in compact.parts] == [each.digest for each in CHAT.parts]


def test_media_anywhere_are_media():
    """In one of its parts."""
    assert outline("Hello", "[image 1]").media
    assert not CHAT.media
    assert CHAT.of(Section.TEMPLATE) == (part(Section.TEMPLATE, "thinking"),)


def test_a_conversation_is_known_by_what_was_said():
    """At least one message in its place, whatever it begins with; a common system prompt says nothing."""
    assert is_related(outline("Hello", "Hi"), outline("Hello", "Ho", system="Be long."))
    assert not is_related(outline("Hello"), outline("Good day"))
    assert not is_related(outline("Hello"), outline("So", "Hello"))
    assert not is_related(Outline(()), outline("Hello"))
