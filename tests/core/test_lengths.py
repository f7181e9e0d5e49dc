"""Claims about ``core.lengths``: what an answer is expected to be, and how much memory that takes."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core import lengths
from polykv_proxy.core.lengths import ASSUMED_TOKENS, LengthBook


def test_an_unknown_class_is_assumed_and_an_assumption_grows_with_the_answer():
    """Twice what is there, once that is more; never more than is allowed."""
    book = LengthBook()
    assert book.expected("chat", 100_000) == ASSUMED_TOKENS
    assert book.expected("chat", 100_000, generated=900) == 1800
    assert book.expected("chat", 1500, generated=900) == 1500
    assert book.expected("chat", 50) == 50


def test_a_few_answers_prove_nothing():
    """The eighth one does."""
    book = LengthBook()
    for _ in range(7):
        book.on_answer("chat", 16)
    assert book.expected("chat", 100_000) == ASSUMED_TOKENS
    book.on_answer("chat", 16)
    book.on_answer("chat", 16)
    assert book.expected("chat", 100_000) == 16


def test_an_estimate_covers_nine_tenths_of_the_class():
    """And is not much longer than that: a bucket is a fifth."""
    book = LengthBook()
    for _ in range(10):
        for tokens in (*[100] * 8, *[400] * 3, 3000):
            book.on_answer("chat", tokens)
    assert 400 <= book.expected("chat", 100_000) <= 480
    assert book.expected("other", 100_000) == ASSUMED_TOKENS


def test_an_answer_that_outlives_others_is_compared_with_those_that_did_too():
    """What is known of short ones says nothing about it."""
    book = LengthBook()
    for _ in range(40):
        book.on_answer("chat", 100)
    for _ in range(10):
        book.on_answer("chat", 5000)
    assert book.expected("chat", 100_000, generated=200) in range(5000, 6000)
    assert book.expected("chat", 100_000, generated=8000) == 16_000


def test_old_answers_are_outweighed():
    """A class that changed is known anew after some hundred answers."""
    book = LengthBook()
    for _ in range(2000):
        book.on_answer("chat", 4000)
    for _ in range(600):
        book.on_answer("chat", 20)
    assert book.expected("chat", 100_000) <= 24


def test_weights_stay_finite():
    """However many answers come."""
    book = LengthBook()
    for _ in range(20_000):
        book.on_answer("chat", 64)
    assert book.expected("chat", 100_000) == 64
    assert book._classes["chat"].scale <= 1e9


def test_the_class_unused_for_longest_is_forgotten(monkeypatch):
    """Names that clients make up cannot fill the memory."""
    monkeypatch.setattr(lengths, "MAX_CLASSES", 2)
    book = LengthBook()
    for kind in ("a", "b", "a", "c"):
        for _ in range(10):
            book.on_answer(kind, 8)
    assert len(book) == 2
    assert book.expected("a", 1000) == 8
    assert book.expected("b", 10_000) == ASSUMED_TOKENS


@given(st.lists(st.integers(0, 3_000_000), max_size=60), st.integers(0, 3_000_000), st.integers(1, 3_000_000))
def test_an_estimate_is_within_its_bounds(answers, generated, bound):
    """Not above what may come, and above what has come, if more may."""
    book = LengthBook()
    for tokens in answers:
        book.on_answer("chat", tokens)
    expected = book.expected("chat", bound, generated)
    assert expected <= bound
    assert expected > generated or expected == bound
