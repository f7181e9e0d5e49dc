"""When KV is worth a file, and when a file is worth reading."""

from __future__ import annotations

ENOUGH_SHARE = 0.95
"""Of a conversation: where so much of it is on disk, the rest is computed as soon as all is written anew."""

LARGEST_FILE = 16
"""Tokens that are written to each that need not be computed, at most: a file has its pool's, too."""

LARGEST_REST = 8
"""Tokens that are read for nothing to each token that need not be computed, at most."""


def pays(  # noqa: PLR0913 - all that counts
    *,
    matched: int,
    held: int,
    saved: int,
    free_cells: int,
    window: int,
    min_gain: int,
) -> str | None:
    """Why restoring a state would not pay; None where it does.

    1. Pools or the slot hold as much, or nearly.
    2. Nearly all of it is another conversation's: it would be read, and fill cells, for nothing.
    3. It does not fit: for a moment the engine needs cells for all of it, whatever it shares afterwards.

    Args:
        matched: leading tokens that the state and the request have in common.
        held: leading tokens that the request would have anyway.
        saved: tokens of the state.
        free_cells: cells that nobody uses or counts on.
        window: of a slot.
        min_gain: tokens that are worth reading a file.
    """
    if matched - held < min_gain:
        return "no_gain"  # 1
    if saved - matched > LARGEST_REST * (matched - held):
        return "too_long"  # 2
    if saved > free_cells or saved >= window:
        return "no_room"  # 3
    return None


def goes_on(matched: int, saved: int) -> bool:
    """Whether so many common tokens make it that conversation, not one that began alike: half of it."""
    return 2 * matched > saved


def is_worth_a_file(*, held: int, own: int, kept: int, least: int) -> bool:
    """Whether what a slot holds is to be written, as long as nobody asks for it.

    1. What it has of its own is computed as soon as read.
    2. Nearly all of the file would be its pool's.
    3. Nearly all of it is on disk.

    Args:
        held: tokens of the slot.
        own: those that are not its pool's.
        kept: leading tokens of it that are on disk.
        least: tokens that are worth a file.
    """
    return own >= least and held <= LARGEST_FILE * own and not is_kept(kept, held)


def is_kept(kept: int, held: int) -> bool:
    """Whether a state on disk has so much of what a slot holds that it need not be written again.

    Each file has all of a conversation: written anew on each turn, a long one would be written a thousand
    times. Like this its files grow by a twentieth each, and are about twenty times the last, all together.

    Args:
        kept: leading tokens that both have.
        held: tokens of the slot.
    """
    return kept >= ENOUGH_SHARE * held
