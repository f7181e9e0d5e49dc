"""CTX-9, rule by rule: no model, no server; counts and summaries are given by hand."""

import pytest
from client.playing import play
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from polykv_proxy.client.errors import ContextOverflowError
from polykv_proxy.client.procedures import SUMMARISE
from polykv_proxy.langgraph import compaction
from polykv_proxy.langgraph.compaction import MARK, Compacted, Count, Refused, Rung, Summarise


def human(text="q"):
    """A question."""
    return HumanMessage(text)


def ai(text="a", *calls, tokens=None):
    """An answer, which may call tools, and what the engine counted."""
    usage = (
        None if tokens is None else {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    )
    made = [{"name": "f", "args": {}, "id": call} for call in calls]
    return AIMessage(text, tool_calls=made, usage_metadata=usage)


def result(call, text="r"):
    """A tool's result."""
    return ToolMessage(text, tool_call_id=call)


TURNS = [human("1"), ai("2"), human("3"), ai("4"), human("5"), ai("6", tokens=3900)]


def compacted(messages, *answers):
    """A compaction, and its outcome."""
    return play(compaction.compact(messages), *answers)


# -- when -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "tokens"), [(8192, 7782), (4097, 3892), (4096, 3686), (1000, 900), (131072, 124518)]
)
def test_the_threshold_is_95_percent_of_the_window_or_90_of_a_small_one(window, tokens):
    """Up to 4,096 it is the smaller one."""
    assert compaction.threshold(window) == tokens
    assert compaction.is_due([human(), ai(tokens=tokens)], window)
    assert not compaction.is_due([human(), ai(tokens=tokens - 1)], window)


def test_below_a_small_window_nothing_is_compacted():
    """A summary would not pay for itself."""
    assert compaction.may_compact(4096)
    assert not compaction.may_compact(4095)


def test_only_the_engine_counts():
    """The last completed turn's count, whatever came since; none before the first."""
    assert compaction.occupancy([human(), ai(tokens=10), human("long " * 900)]) == 10
    assert compaction.occupancy([human(), ai(tokens=10), human(), ai(tokens=20)]) == 20
    assert compaction.occupancy([human(), ai()]) is None
    assert not compaction.is_due([human("long " * 9000)], 4096)


def test_after_a_compaction_old_counts_are_void():
    """CTX-7: the turn that was kept was counted on the old pool."""
    _, done = compacted(TURNS, "short", 100, 50)
    assert done.messages[-1].usage_metadata["total_tokens"] == 3900
    assert compaction.occupancy(done.messages) is None
    assert compaction.occupancy([*done.messages, human(), ai(tokens=70)]) == 70


# -- what is kept -----------------------------------------------------------------------------------------


def test_the_last_turn_is_kept_and_the_rest_becomes_a_summary():
    """In place: the same messages, one more at the end."""
    steps, done = compacted(TURNS, " short \n", 100, 50)
    assert steps[0] == Summarise((*TURNS, HumanMessage(SUMMARISE)))
    assert [type(step) for step in steps] == [Summarise, Count, Count]
    assert steps[1].messages == tuple(TURNS)
    assert isinstance(done, Compacted)
    assert done.messages[2:] == tuple(TURNS[4:])
    assert [message.text for message in done.messages[:2]] == [SUMMARISE, "short"]
    assert (done.replaced, done.tokens_before, done.tokens_after) == (4, 100, 50)
    assert done.messages[1].additional_kwargs[MARK] == {
        "n_messages": 4,
        "replaced": 4,
        "tokens_before": 100,
        "tokens_after": 50,
    }


def test_a_question_without_an_answer_belongs_to_the_turn_before_it():
    """So a "yes, do that" finds what it speaks of; the summary is asked for without it."""
    messages = [*TURNS, human("yes, do that")]
    steps, done = compacted(messages, "short", 100, 50)
    assert steps[0].messages == (*TURNS, HumanMessage(SUMMARISE))
    assert [message.text for message in done.messages[2:]] == ["5", "6", "yes, do that"]


def test_a_running_turn_stays_whole():
    """Calls and results of the chain that goes on, and its question with its upload."""
    chain = [human("see file"), human("why?"), ai("", "x", "y"), result("x"), result("y")]
    _, done = compacted([*TURNS, *chain], "short", 100, 50)
    assert done.messages[2:] == tuple(chain)


@st.composite
def conversations(draw):
    """Turns with uploads, chains of calls, several calls at once, and perhaps a question at the end."""
    messages, number = [], 0
    for _ in range(draw(st.integers(1, 6))):
        messages += [human(f"{len(messages)}") for _ in range(draw(st.integers(1, 3)))]
        for _ in range(draw(st.integers(0, 3))):
            calls = [str(number + at) for at in range(draw(st.integers(1, 3)))]
            number += len(calls)
            messages += [ai("", *calls), *map(result, calls)]
        messages.append(ai("done"))
    return messages + [human("?")] * draw(st.integers(0, 1))


def whole(messages):
    """Whether every result follows its call and every call has its result."""
    called = [
        call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls
    ]
    answered = [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]
    return called == answered


@given(conversations(), st.integers(0, 4))
def test_tool_calls_are_never_parted_from_their_results(messages, overflows):
    """Wherever it is cut, also after overflows."""
    answers = [ContextOverflowError("long")] * overflows + ["short", 100, 50]
    procedure = compaction.compact(messages)
    try:
        step = next(procedure)
        while True:
            if isinstance(step, Summarise):
                assert whole(step.messages)
                assert not isinstance(step.messages[-2], HumanMessage)
            answer = answers.pop(0)
            step = procedure.throw(answer) if isinstance(answer, Exception) else procedure.send(answer)
    except StopIteration as end:
        done = end.value
    if isinstance(done, Refused):
        assert done.reason in ("nothing_to_summarise", "summary_overflow")
        return
    assert whole(done.messages)
    kept = done.messages[2:]
    assert kept == tuple(messages[done.replaced :])
    assert not isinstance(kept[0], ToolMessage)


@given(conversations())
def test_what_is_cut_is_parted_well(messages):
    """Neither a call from its result, nor an upload or a question from what follows it."""
    for cut in compaction.safe_cuts(messages):
        assert whole(messages[:cut])
        assert not isinstance(messages[cut - 1], HumanMessage)


# -- what is refused --------------------------------------------------------------------------------------


def test_one_turn_is_nothing_to_summarise():
    """The last turn stays."""
    procedure = compaction.compact([human(), ai()])
    with pytest.raises(StopIteration) as end:
        next(procedure)
    assert end.value.value == Refused("nothing_to_summarise")


def test_a_boundary_not_later_than_the_last_one_is_refused():
    """Right after a compaction there is nothing but its summary; one turn later there is."""
    _, done = compacted(TURNS, "short", 100, 50)
    with pytest.raises(StopIteration) as end:
        next(compaction.compact(done.messages))
    assert end.value.value == Refused("already_compacted")
    steps, again = compacted([*done.messages, human("7"), ai("8")], "shorter", 90, 40)
    assert [message.text for message in again.messages] == [SUMMARISE, "shorter", "7", "8"]
    assert steps[0].messages[1].text == "short"
    assert again.replaced == 4


@pytest.mark.parametrize(("before", "after"), [(100, 100), (100, 101)])
def test_a_summary_that_is_not_smaller_is_refused(before, after):
    """By the engine's count of both."""
    _, done = compacted(TURNS, "long " * 99, before, after)
    assert done == Refused("summary_not_smaller")


def test_an_empty_summary_is_refused():
    """The conversation would lose its past."""
    _, done = compacted(TURNS, " \n")
    assert done == Refused("summary_empty")


def test_an_overflow_halves_what_is_summarised():
    """The older half; what is not in the summary stays as it is."""
    messages = [each for number in range(8) for each in (human(str(number)), ai(str(number)))]
    long = ContextOverflowError("long")
    steps, done = compacted(messages, long, long, "short", 100, 50)
    lengths = [len(step.messages) - 1 for step in steps if isinstance(step, Summarise)]
    assert lengths == [16, 6, 2]
    assert done.replaced == 2
    assert done.messages[2:] == tuple(messages[2:])


def test_an_overflow_that_cannot_be_halved_is_refused():
    """Nothing is lost."""
    _, done = compacted(TURNS, ContextOverflowError("long"), ContextOverflowError("long"))
    assert done == Refused("summary_overflow")


# -- the ladder -------------------------------------------------------------------------------------------


def trimmed(messages, window, tokens_of):
    """The ladder, with tokens counted by a function of messages."""
    procedure, step, counts = compaction.trim(messages, window), None, 0
    try:
        step = next(procedure)
        while True:
            counts += 1
            step = procedure.send(tokens_of(step.messages))
    except StopIteration as end:
        return end.value, counts


def size(messages):
    """Ten tokens a message, and one for each character."""
    return sum(10 + len(message.text) for message in messages)


def test_the_oldest_turns_are_left_out_first():
    """As few as it takes; the last turn stays, and so does a summary."""
    messages = [each for number in range(10) for each in (human("x" * 15), ai("y" * 15))]
    done, counts = trimmed(messages, 250, size)  # 60 %: 150 tokens, three turns
    assert done.messages == tuple(messages[-6:])
    assert done.rungs == (Rung("drop_turns", 14),)
    assert counts <= 6
    _, summary = compacted(messages, "short", 100, 50)
    done, _ = trimmed([*summary.messages, *messages], 250, lambda few: size(few) - len(SUMMARISE))
    assert done.messages[:2] == summary.messages[:2]
    assert done.messages[2:] == tuple(messages[-4:])


def test_then_results_of_the_running_turn_are_cut():
    """The oldest first, and only long ones; calls keep their results."""
    chain = [human("?"), ai("", "1"), result("1", "x" * 2000), ai("", "2"), result("2", "y" * 2000)]
    done, _ = trimmed([*TURNS, *chain], 5000, size)
    assert done.rungs[0] == Rung("drop_turns", 6)
    assert done.rungs[1] == Rung("cut_tool_results", 1)
    first, second = done.messages[2].text, done.messages[4].text
    assert first.startswith("x" * 400)
    assert "1600 characters" in first
    assert second == "y" * 2000
    assert whole(done.messages)


def test_what_does_not_fit_at_all_is_sent_as_small_as_it_gets():
    """The engine has the last word."""
    done, _ = trimmed([human("x" * 9000)], 100, size)
    assert done.rungs == ()
    assert len(done.messages) == 1


def test_the_state_is_not_touched():
    """Outgoing messages are others."""
    chain = [human("?"), ai("", "1"), result("1", "x" * 2000)]
    done, _ = trimmed(chain, 1000, size)
    assert done.rungs == (Rung("cut_tool_results", 1),)
    assert chain[2].text == "x" * 2000
