"""Claims about ``core.divergence``: each cause, what is told of it, and what is not."""

import pytest

from core.outlines import outline, part, prompt
from polykv_proxy.core.divergence import (
    SNIPPET_CHARS,
    Cause,
    Divergence,
    Now,
    Then,
    diagnose,
    fell_short,
    refined,
    snippets,
)
from polykv_proxy.core.outlines import Outline, Section

BEFORE = outline("Hello", "Hi", "Where?", tools=("a", "b"))
LONGER = outline("Hello", "Hi", "Where?", "There.", "When?", tools=("a", "b"))


def then(of=BEFORE, **more):
    """A request of 100 tokens whose slot held 109 when it was answered."""
    facts = {"epoch": "e", "prompt_tokens": 100, "resident_tokens": 109, "held": True, "taken": False}
    return Then(outline=of, **facts | more)


def now(of=LONGER, **more):
    """A request of 150 tokens that reused 40."""
    facts = {"epoch": "e", "prompt_tokens": 150, "cached_tokens": 40, "attached_tokens": 0}
    return Now(outline=of, **facts | {"cache": True, "continues": True} | more)


@pytest.mark.parametrize(
    ("cached", "prompt_tokens", "resident", "short"),
    [
        (109, 150, 109, False),
        (108, 150, 109, True),
        (99, 100, 109, False),  # the last token is always computed
        (98, 100, 109, True),
        (0, 1, 109, False),
        (1, 150, None, False),  # something was there, and something was reused
        (0, 150, None, True),
    ],
)
def test_what_counts_as_short(cached, prompt_tokens, resident, short):
    """Less than what there was, short of the last token."""
    assert fell_short(cached, prompt_tokens, resident) is short


CASES = {
    "new": (None, now(cached_tokens=0), Cause.NEW_SESSION),
    "new, with what another left": (None, now(cached_tokens=3), Cause.NEW_SESSION),
    "new, on a pool": (None, now(cached_tokens=40, attached_tokens=40), Cause.NEW_SESSION),
    "no cache": (then(), now(cache=False, cached_tokens=0), Cause.CACHE_DISABLED),
    "restarted": (then(epoch="old", held=False), now(cached_tokens=0), Cause.RESTARTED),
    "evicted": (then(held=False, taken=True), now(continues=False), Cause.EVICTED),
    "forgotten": (then(held=False), now(continues=False), Cause.SLOT_LOST),
    "busy": (then(), now(continues=False), Cause.SLOT_LOST),
    "emptied": (then(), now(cached_tokens=0), Cause.SLOT_LOST),
    "emptied, on a pool": (then(), now(attached_tokens=40), Cause.SLOT_LOST),
    "system": (then(), now(outline("Hello", system="Be long.")), Cause.SYSTEM_CHANGED),
    "no system": (then(), now(Outline(BEFORE.parts[1:])), Cause.SYSTEM_CHANGED),
    "one more system": (
        then(outline("Hello")),
        now(Outline((*outline().parts, part(Section.SYSTEM, "And be nice."), *outline("Hello").parts[1:]))),
        Cause.SYSTEM_CHANGED,
    ),
    "header": (
        then(outline("Hello", header="v1 ")),
        now(outline("Hello", header="v2 ")),
        Cause.VOLATILE_HEADER,
    ),
    "header gone": (then(outline("Hello", header="v1 ")), now(outline("Hello")), Cause.VOLATILE_HEADER),
    "header and system": (
        then(outline("Hello", header="v1 ")),
        now(outline("Hello", header="v2 ", system="Be long.")),
        Cause.SYSTEM_CHANGED,
    ),
    "tools reordered": (then(), now(outline("Hello", tools=("b", "a"))), Cause.TOOLS_REORDERED),
    "tools changed": (then(), now(outline("Hello", tools=("a", "c"))), Cause.TOOLS_CHANGED),
    "tools gone": (then(), now(outline("Hello")), Cause.TOOLS_CHANGED),
    "tools come": (then(outline("Hello")), now(outline("Hello", tools=("a",))), Cause.TOOLS_CHANGED),
    "template settings": (
        then(outline("Hello", template="thinking")),
        now(outline("Hello", template="none")),
        Cause.TEMPLATE_REWROTE_HISTORY,
    ),
    "message": (then(), now(outline("Hello", "Ho", "Where?", tools=("a", "b"))), Cause.HISTORY_EDITED),
    "message gone": (then(), now(outline("Hello", "Hi", tools=("a", "b"))), Cause.HISTORY_EDITED),
    "image": (then(outline("[image 1]")), now(outline("[image 2]")), Cause.MEDIA),
    "plain prompt": (then(prompt("Once", "upon")), now(prompt("Once", "under")), Cause.HISTORY_EDITED),
    "answer's other tokens": (then(answer="There"), now(cached_tokens=103), Cause.RETOKENISED),
    "answer with a call of a tool": (
        then(answer="There."),
        now(
            Outline((*BEFORE.parts, part(Section.MESSAGES, '{"content": "There."}', 3, verbatim=False))),
            cached_tokens=100,
        ),
        Cause.RETOKENISED,
    ),
    "answer unknown": (then(), now(cached_tokens=100), Cause.RETOKENISED),
    "answer edited": (then(answer="Nowhere."), now(cached_tokens=100), Cause.HISTORY_EDITED),
    "answer left out": (then(answer="There."), now(BEFORE, cached_tokens=100), Cause.HISTORY_EDITED),
    "answer without reasoning": (
        then(answer="There", reasoned=True),
        now(cached_tokens=101),
        Cause.TEMPLATE_REWROTE_HISTORY,
    ),
    "answer without its blank": (
        then(answer=" There"),
        now(outline("Hello", "Hi", "Where?", " There.", tools=("a", "b")), cached_tokens=100),
        Cause.TEMPLATE_REWROTE_HISTORY,
    ),
    "plain answer": (then(prompt("Once")), now(prompt("Once upon"), cached_tokens=101), Cause.RETOKENISED),
    "plain tokens": (then(prompt("Once")), now(prompt("Once upon")), Cause.RETOKENISED),
    "template": (then(), now(), Cause.TEMPLATE_REWROTE_HISTORY),
    "media in an unchanged history": (
        then(outline("[image 1]")),
        now(outline("[image 1]", "Nice.", "Thanks")),
        Cause.MEDIA,
    ),
}


@pytest.mark.parametrize(("before", "after", "cause"), CASES.values(), ids=CASES)
def test_each_cause(before, after, cause):
    """The table of the decision."""
    assert diagnose(before, after).cause is cause


def test_every_cause_is_reached():
    """By the table above."""
    assert {cause for _, _, cause in CASES.values()} == set(Cause)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (then(), now(cached_tokens=109)),
        (then(), now(outline("Else"), cached_tokens=120)),
        (None, now(cached_tokens=149)),
        (then(epoch="old"), now(cached_tokens=149)),
    ],
)
def test_nothing_is_said_where_nothing_fell_short(before, after):
    """Whatever changed: it cost nothing."""
    assert diagnose(before, after) is None


def test_nothing_left_comes_before_what_changed():
    """What is evicted was lost by that, edited or not; of several changes the system prompt comes first."""
    edited = now(outline("Ho", system="Be long."))
    assert diagnose(then(held=False, taken=True), edited).cause is Cause.EVICTED
    assert diagnose(then(), edited).section is Section.SYSTEM


def test_a_changed_message_is_shown():
    """Its place, both texts around the difference, and the token that the engine found."""
    text = "It is a long way to the harbour, " * 5
    before, after = outline("Hello", text + "Monday"), outline("Hello", text + "Tuesday")
    found = diagnose(then(before), now(after))
    assert (found.section, found.message_index, found.token_index) == (Section.MESSAGES, 1, 40)
    assert found.expected_text == "way to the harbour, Monday"
    assert found.got_text == "way to the harbour, Tuesday"


@pytest.mark.parametrize("facts", [{"continues": False}, {"attached_tokens": 40}])
def test_a_token_index_is_given_only_where_it_is_exact(facts):
    """In another slot, or on a pool, the engine compared with something else."""
    assert diagnose(then(), now(outline("Ho", tools=("a", "b")), **facts)).token_index is None


def test_causes_without_a_place_have_none():
    """Nobody changed anything."""
    assert diagnose(then(held=False, taken=True), now()) == Divergence(Cause.EVICTED)


def test_snippets_are_short_and_may_be_one_sided():
    """At most so many characters; from the start where there is nothing to compare with."""
    one, other = snippets("a" * 500 + "b" * 500, "a" * 500 + "c" * 500)
    assert (len(one), len(other)) == (SNIPPET_CHARS, SNIPPET_CHARS)
    assert one[:20] == other[:20] == "a" * 20
    assert one[20] == "b"
    assert snippets(None, "x" * 100) == (None, "x" * SNIPPET_CHARS)
    assert snippets("x", None) == ("x", None)


def test_an_outline_without_text_tells_the_same():
    """But for the texts."""
    for before, after, cause in CASES.values():
        if before is None or after.outline is LONGER:
            continue
        compact = Then(
            **{name: getattr(before, name) for name in Then.__slots__}
            | {"outline": before.outline.without_text()}
        )
        if not before.outline.of(Section.PROMPT):
            assert diagnose(compact, after).cause is cause


def test_tokens_give_a_changed_part_its_index():
    """Once; texts and an index that were there stay."""
    changed = Divergence(Cause.SYSTEM_CHANGED, section=Section.SYSTEM, expected_text="a", got_text="b")
    facts = {"then_tokens": 100, "expected_text": "x", "got_text": "y"}
    found = refined(changed, common=7, **facts)
    assert (found.token_index, found.expected_text, found.got_text) == (7, "a", "b")
    assert refined(found, common=9, **facts) == found


@pytest.mark.parametrize(
    ("expected", "got", "cause"),
    [
        ("<think>", "Well", Cause.TEMPLATE_REWROTE_HISTORY),
        ("world and", "world", Cause.RETOKENISED),
        ("", "Well", Cause.TEMPLATE_REWROTE_HISTORY),
    ],
)
def test_tokens_tell_a_template_from_a_tokenizer(expected, got, cause):
    """By the texts of what differs, which are shown."""
    found = Divergence(Cause.TEMPLATE_REWROTE_HISTORY, token_index=40, section=Section.MESSAGES)
    found = refined(found, common=50, then_tokens=100, expected_text=expected, got_text=got)
    assert (found.cause, found.token_index, found.expected_text, found.got_text) == (cause, 50, expected, got)


def test_tokens_that_all_agree_mean_that_the_slot_held_something_else():
    """Unless it was the answer that differed, of which only one side is known."""
    inside = Divergence(Cause.TEMPLATE_REWROTE_HISTORY, token_index=40, section=Section.MESSAGES)
    facts = {"common": 100, "then_tokens": 100, "expected_text": "", "got_text": "Well"}
    assert refined(inside, **facts) == Divergence(Cause.SLOT_LOST)
    answer = Divergence(Cause.RETOKENISED, token_index=104, section=Section.MESSAGES)
    found = refined(answer, **facts)
    assert (found.cause, found.token_index, found.got_text) == (Cause.RETOKENISED, 104, "Well")
