"""Errors of llama-server that mean: there is no more room for this conversation. Pure.

The pinned version says it in several ways, with several statuses. They are recognised as whole messages, so
that nothing that merely mentions a context is taken for one. A batch that is too small for an input is no
overflow: no compaction would help.

Rule 1: what the engine said stays: message, ``n_prompt_tokens``, ``n_ctx``. Only status and type become one.
Rule 2: a figure that the engine did not give is null.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STATUS = 400
TYPE = "exceed_context_size_error"
"""llama-server's own; what clients look for."""


class OverflowKind(StrEnum):
    """What ran out."""

    WINDOW = "window"
    """The context that the model, or the whole cache, has for one sequence."""
    SEQUENCE_CAP = "sequence_cap"
    """A cap on one sequence below that: ``--kv-unified-per-slot``."""
    CELLS = "cells"
    """The KV cells that all sequences share."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """One overflow as the engine told it."""

    required_tokens: int | None
    """Tokens of the request; may equal ``ctx_size``: the engine needs one more for its answer."""
    ctx_size: int | None
    """Tokens that there is room for."""
    cells: bool
    """Whether the cells were used up, by whomever, and not the request's own window."""


# tools/server/server-context.cpp, and the safety valve of the patch
_ONE_SEQUENCE = (
    re.compile(
        r"request \((\d+) tokens\) exceeds the available context size \((\d+) tokens\), try increasing it"
    ),
    re.compile(r"input \((\d+) tokens\) is larger than the max context size \((\d+) tokens\)\. skipping"),
)
_NO_FIGURES = frozenset({"context shift is disabled", "context shift cannot be used for shared prompt"})
_CELLS = frozenset({"Context size has been exceeded."})
_NEVER_FITS = re.compile(
    r"the KV cache is full: the prompt needs (\d+) cells, pools and kept slots leave (\d+)"
)
"""The other refusal of the valve, that others need the cells now, passes: asking again later is the cure."""


def recognise(error: Mapping[str, Any]) -> Overflow | None:
    """What an error object of the engine says about room; None if it is about something else.

    1. A wording that we know: its figures.
    2. An overflow by its type, in words that we do not know: what figures it carries, if any.
    """
    message = error.get("message")
    if not isinstance(message, str):
        message = ""
    for wording in _ONE_SEQUENCE:  # 1
        if (found := wording.fullmatch(message)) is not None:
            return Overflow(int(found[1]), int(found[2]), cells=False)
    if (found := _NEVER_FITS.fullmatch(message)) is not None:
        return Overflow(int(found[1]), int(found[2]), cells=True)
    if message in _CELLS or message in _NO_FIGURES:
        return Overflow(None, None, cells=message in _CELLS)
    if error.get("type") == TYPE:  # 2
        return Overflow(_count(error.get("n_prompt_tokens")), _count(error.get("n_ctx")), cells=False)
    return None


def kind_of(found: Overflow, *, ctx_tokens: int, cells: int, model_tokens: int | None) -> OverflowKind:
    """What ran out.

    Args:
        found: the overflow.
        ctx_tokens: window of one slot.
        cells: cells of the engine.
        model_tokens: the context that the model was trained with; None if that is not known.
    """
    if found.cells:
        return OverflowKind.CELLS
    natural = cells if model_tokens is None else min(cells, model_tokens)
    return OverflowKind.SEQUENCE_CAP if ctx_tokens < natural else OverflowKind.WINDOW


def typed(
    error: Mapping[str, Any], found: Overflow, kind: OverflowKind | None, *, cached_tokens: int | None
) -> dict[str, Any]:
    """The error object as clients get it: one type for every overflow, and its figures in one place.

    Args:
        error: the engine's.
        found: what it says.
        kind: what ran out; None if that cannot be told.
        cached_tokens: tokens of the request that are resident, as far as is known.
    """
    figures = {
        "required_tokens": found.required_tokens,
        "cached_tokens": cached_tokens,
        "ctx_size": found.ctx_size,
        "ctx_kind": None if kind is None else kind.value,
    }
    return {**error, "code": STATUS, "type": TYPE, "opencoti": figures}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
