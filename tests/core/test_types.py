"""Claims about ``core.types``: token arrays and the values that samples are made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.types import (
    Capability,
    EngineSample,
    PoolUid,
    SlotId,
    SlotSample,
    SlotState,
    agreement,
    as_tokens,
    common_prefix,
    text_prefix,
)

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def slot(state):
    """A slot of a sample in this state."""
    return SlotSample(SlotId(0), state, 1, 0, 0, 0, 0, 5, 0, PoolUid(0), 100)


def sample(*states):
    """A sample whose slots are in these states."""
    return EngineSample("e", 1.0, 30, 100, 0, tuple(map(slot, states)), ())


@given(TOKENS, TOKENS)
def test_common_prefix_is_what_a_loop_finds(a, b):
    """Halving the interval gives the same length as comparing item by item."""
    expected = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        expected += 1
    assert common_prefix(as_tokens(a), as_tokens(b)) == expected


@given(TOKENS, st.integers(0, 40))
def test_common_prefix_of_a_changed_copy_ends_at_the_change(tokens, at):
    """One changed token is found wherever it is."""
    changed = [token + 7 if index == at else token for index, token in enumerate(tokens)]
    assert common_prefix(as_tokens(tokens), as_tokens(changed)) == min(at, len(tokens))


def test_media_never_agree_with_a_pool():
    """A -1 that stands for media ends the common prefix with any token id."""
    assert common_prefix(as_tokens([1, 2, -1, 4]), as_tokens([1, 2, 3, 4])) == 2


def test_ids_beyond_32_bits_are_refused():
    """A number that is no token id raises; it is not cut."""
    with pytest.raises(OverflowError):
        as_tokens([1 << 31])
    with pytest.raises(TypeError):
        as_tokens(["a"])


def test_sample_knows_free_cells_and_work():
    """Free cells are what is not used; busy means that one slot at least is at work."""
    assert sample(SlotState.IDLE).cells_free == 70
    assert not sample(SlotState.IDLE, SlotState.IDLE).busy
    assert sample(SlotState.IDLE, SlotState.PROMPT).busy


def test_common_prefix_of_texts():
    """Characters instead of tokens."""
    assert common_prefix("way to the harbour", "way to the house") == 12
    assert common_prefix("", "a") == 0


def test_levels_say_what_they_have():
    """Pools exist on two of three levels, and share cells on one."""
    assert [level.has_pools for level in Capability] == [True, True, False]
    assert [level.shares_cells for level in Capability] == [True, False, False]


def test_text_ends_at_the_first_medium():
    """What follows an image cannot be told from what follows another one."""
    assert text_prefix(as_tokens([1, 2, -1, -1, 3])) == 2
    assert text_prefix(as_tokens([-1, 1])) == 0
    assert text_prefix(as_tokens([1, 2])) == 2
    assert text_prefix(as_tokens([])) == 0


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.sampled_from([-1, 0, 1]), max_size=8),
    st.lists(st.sampled_from([-1, 0, 1]), max_size=8),
    st.integers(0, 20),
)
def test_media_agree_only_where_the_engine_says_so(text, one, other, compared):
    """Text is compared here, whatever the engine saw; beyond it the engine's word is a bound."""
    then, now = as_tokens(text + one), as_tokens(text + other)
    common = common_prefix(then, now)
    found, seen = agreement(then, now, None), agreement(then, now, compared)
    if -1 not in now[:common]:
        assert found == seen == common
        return
    assert found is None
    if common in (len(then), len(now)) and now[common - 1] == -1 and compared >= common:
        assert seen is None, "one of them is known up to its first medium only, as far as anybody can tell"
        return
    first = now.index(-1)
    assert seen is not None
    assert first <= seen <= common
    assert seen in (first, compared, common)
