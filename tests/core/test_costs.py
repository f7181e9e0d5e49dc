"""Claims about ``core.costs``: what a request adds to the cache, counted or not."""

import pytest

from polykv_proxy.core.costs import Asked, Cost, cost_of, upper_bound_tokens
from polykv_proxy.core.lengths import ASSUMED_TOKENS, LengthBook


def cost(prompt, shared=0, window=8192, lengths=None, **asked):
    """The cost of a request of 4,000 bytes."""
    return cost_of(
        Asked(kind="k", body_bytes=4000, **asked),
        lengths or LengthBook(),
        window,
        prompt=prompt,
        shared=shared,
    )


def test_a_counted_prompt_costs_what_no_pool_holds():
    """And its answer what it may have, or what is assumed."""
    assert cost(900, 400, max_tokens=64) == Cost(prompt=500, expected=64, bound=64)
    assert cost(900, 400) == Cost(prompt=500, expected=ASSUMED_TOKENS, bound=7292)
    assert cost(900, 400, max_tokens=100_000).bound == 7292


def test_an_answer_is_as_long_as_its_kind():
    """Not as long as it may be."""
    lengths = LengthBook()
    for _ in range(20):
        lengths.on_answer("k", 128)
    assert cost(900, lengths=lengths, max_tokens=32_000) == Cost(prompt=900, expected=128, bound=7292)


def test_several_answers_share_their_prompt():
    """Only what they produce is multiplied."""
    assert cost(900, max_tokens=50, answers=4) == Cost(prompt=900, expected=200, bound=200, answers=4)


def test_what_nobody_counted_is_bounded_by_body_and_window():
    """A prompt that may be long may be short too, so its answer may still be long."""
    assert cost(None, max_tokens=64) == Cost(prompt=5024, expected=64, bound=64, exact=False)
    assert cost(None, window=2048, shared=48) == Cost(prompt=2000, expected=1024, bound=2048, exact=False)


def test_a_prompt_beyond_its_window_leaves_no_room():
    """It is the engine's to refuse; it costs what it is."""
    assert cost(9000) == Cost(prompt=9000, expected=0, bound=0)


@pytest.mark.parametrize("media", [0, 2])
def test_what_nobody_counted_is_bounded_by_its_bytes(media):
    """A byte is a token at worst, plus what the template and things pointed at may add."""
    assert upper_bound_tokens(5000, media) >= 5000 + 1000 * media
    assert upper_bound_tokens(5001, media) - upper_bound_tokens(5000, media) == 1


def test_the_bound_holds_for_a_real_tokenizer_at_its_worst():
    """A byte-level tokenizer that merges nothing: every byte of the text is a token."""
    text = "žluťoučký kůň 🐎" * 100
    body = f'{{"messages":[{{"role":"user","content":"{text}"}}]}}'.encode()
    assert upper_bound_tokens(len(body)) >= len(text.encode())
