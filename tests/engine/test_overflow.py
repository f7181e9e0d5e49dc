"""Claims about ``engine.overflow``: every wording of the pinned engine, and nothing else."""

import pytest
from recorded import CELLS_OVERFLOW, WINDOW_OVERFLOW

from polykv_proxy.engine.overflow import Overflow, OverflowKind, kind_of, recognise, typed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WINDOW_OVERFLOW, Overflow(3000, 2048, cells=False)),
        (
            {"message": "input (5 tokens) is larger than the max context size (4 tokens). skipping"},
            Overflow(5, 4, cells=False),
        ),
        (CELLS_OVERFLOW, Overflow(None, None, cells=True)),
        (
            {
                "code": 503,
                "message": "the KV cache is full: the prompt needs 900 cells, pools and kept slots leave 300",
                "type": "kv_cache_full_error",
            },
            Overflow(900, 300, cells=True),
        ),
        ({"message": "context shift is disabled", "type": "server_error"}, Overflow(None, None, cells=False)),
        (
            {"message": "context shift cannot be used for shared prompt", "type": "server_error"},
            Overflow(None, None, cells=False),
        ),
        (
            {"type": "exceed_context_size_error", "message": "new words", "n_prompt_tokens": 7, "n_ctx": 6},
            Overflow(7, 6, cells=False),
        ),
        ({"type": "exceed_context_size_error", "n_ctx": "6"}, Overflow(None, None, cells=False)),
        ({"type": "exceed_context_size_error", "n_ctx": True}, Overflow(None, None, cells=False)),
    ],
)
def test_overflows_are_recognised(error, expected):
    """By their whole message, else by their type."""
    assert recognise(error) == expected


@pytest.mark.parametrize(
    "message",
    [
        (
            "input (900 tokens) is too large to process. increase the physical batch size "
            "(current batch size: 512)"
        ),
        (
            "the question and its options (900 tokens) are too large to process. increase the batch size "
            "(current batch size: 512)"
        ),
        "Tell me: Context size has been exceeded.",
        "Context size has been exceeded. Why?",
        "request (1 tokens) exceeds the available context size (2 tokens), try increasing it, they said",
        "the KV cache is full: other requests need the cells, try again later",
        "Compute error.",
        "Invalid input batch.",
        "",
    ],
)
def test_other_errors_are_not(message):
    """A batch that is too small, an echo of what somebody wrote, a defect."""
    assert recognise({"message": message, "type": "server_error", "code": 500}) is None
    assert recognise({"code": 500}) is None


@pytest.mark.parametrize(
    ("found", "sizes", "kind"),
    [
        (Overflow(None, None, cells=True), (512, 1024, None), OverflowKind.CELLS),
        (Overflow(1, 1, cells=False), (1024, 1024, None), OverflowKind.WINDOW),
        (Overflow(1, 1, cells=False), (512, 1024, None), OverflowKind.SEQUENCE_CAP),
        (Overflow(1, 1, cells=False), (512, 1024, 512), OverflowKind.WINDOW),
        (Overflow(1, 1, cells=False), (256, 1024, 512), OverflowKind.SEQUENCE_CAP),
    ],
)
def test_what_ran_out(found, sizes, kind):
    """A cap is one only where model and cache would allow more."""
    ctx_tokens, cells, model_tokens = sizes
    assert kind_of(found, ctx_tokens=ctx_tokens, cells=cells, model_tokens=model_tokens) is kind


def test_one_form_for_all():
    """The engine's own members stay; status and type become one."""
    found = recognise(CELLS_OVERFLOW)
    assert typed(CELLS_OVERFLOW, found, OverflowKind.CELLS, cached_tokens=5) == {
        "code": 400,
        "message": "Context size has been exceeded.",
        "type": "exceed_context_size_error",
        "opencoti": {"required_tokens": None, "cached_tokens": 5, "ctx_size": None, "ctx_kind": "cells"},
    }
    whole = typed(WINDOW_OVERFLOW, recognise(WINDOW_OVERFLOW), OverflowKind.WINDOW, cached_tokens=None)
    assert {key: whole[key] for key in WINDOW_OVERFLOW} == WINDOW_OVERFLOW
    assert whole["opencoti"] == {
        "required_tokens": 3000,
        "cached_tokens": None,
        "ctx_size": 2048,
        "ctx_kind": "window",
    }
    assert (
        typed(WINDOW_OVERFLOW, recognise(WINDOW_OVERFLOW), None, cached_tokens=None)["opencoti"]["ctx_kind"]
        is None
    )
