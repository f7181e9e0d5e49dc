"""Claims about ``durable.names``: whose a file is shows in its name."""

from dataclasses import replace

import pytest

from durable.files import state
from polykv_proxy.durable.names import (
    TOMBSTONES,
    final_name,
    is_of,
    is_ours,
    sidecar_name,
    stem,
    temporary_name,
)

MINE, OTHER = state([1], "me"), state([1], "other")


def test_every_name_that_is_given_is_ours():
    """The temporary one, the final one, the sidecar's, and what it is written as."""
    temporary = temporary_name(MINE.identity)
    for name in (temporary, final_name(temporary), sidecar_name(MINE), f"{sidecar_name(MINE)}.tmp"):
        assert is_ours(name)
        assert stem(name) == stem(sidecar_name(MINE)) != stem(sidecar_name(OTHER))
    assert final_name(temporary).endswith(".bin")


@pytest.mark.parametrize(
    "name",
    [
        "kv-x.bin",
        "mine.bin",
        "polykv-pool-ab-1.bin",
        f"kv-{'0' * 32}.txt",
        f"kv-{'0' * 31}.json",
        f"kv-{'0' * 32}-{'1' * 7}.bin",
        f"kv-{'0' * 32}-{'1' * 8}.json",
        f"kv-{'G' * 32}.json",
        f"old-kv-{'0' * 32}.json",
        TOMBSTONES,
    ],
)
def test_what_only_looks_like_one_is_not_ours(name):
    """However close."""
    assert not is_ours(name)


def test_states_that_take_each_others_place_have_one_sidecar():
    """Whatever their tokens; another key, scope or configuration is another state."""
    assert sidecar_name(replace(MINE, tokens=OTHER.tokens, created_ts=9.0)) == sidecar_name(MINE)
    assert sidecar_name(OTHER) != sidecar_name(MINE)


def test_each_save_has_a_name_of_its_own():
    """All of them of one identity, and of no other."""
    names = {temporary_name(MINE.identity) for _ in range(20)}
    assert len(names) == 20
    assert all(is_of(name, MINE.identity) and is_of(final_name(name), MINE.identity) for name in names)
    assert not any(is_of(name, OTHER.identity) for name in names)
    assert not is_of(sidecar_name(MINE), MINE.identity)
