"""Whether the loaded model goes on from a slot file: tried at every start, before anybody uses the engine.

Longer than any sliding window of the model, continued at its end, left before its end and before its last
window: models whose state is a window or has no parts do not pass, and then nothing is saved. Nor do those
that keep all cells of a window (``--swa-full``): a file has only the last of them, so that a pool which came
back from it could not be left further up.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from polykv_proxy.core.types import SlotId
from polykv_proxy.durable.names import temporary_name
from polykv_proxy.engine import slotfile, trial
from polykv_proxy.engine.disk import StuckError
from polykv_proxy.errors import BadRequestError, EngineGoneError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from polykv_proxy.core.types import EngineFacts
    from polykv_proxy.durable.shelf import Shelf
    from polykv_proxy.engine.client import EngineClient

BEYOND_WINDOW = 32
"""Tokens by which the canary is longer than the window."""


async def sings(client: EngineClient, shelf: Shelf, facts: EngineFacts, window: int | None) -> str | None:
    """Try it; returns why saved KV is of no use on this engine, or None.

    Args:
        client: the way to the engine, which nobody uses.
        shelf: where its files are.
        facts: its sizes.
        window: tokens of the model's sliding window, if it has one.

    Raises:
        EngineGoneError, UnavailableError: it went, or did not answer in time.
    """
    length = max(trial.TEST_TOKENS, (window or 0) + BEYOND_WINDOW)
    if length > facts.ctx_tokens // 2:
        if window:
            return f"a context of {facts.ctx_tokens} tokens is too short to try a window of {window}"
        length = facts.ctx_tokens // 2
    store, disk = shelf.store, shelf.disk
    name = temporary_name(("canary",))
    ends = SlotId(0), SlotId(facts.slots - 1)
    version: list[int] = []

    async def look() -> None:
        version.append(await disk.run(slotfile.read_version, store.folder / name))

    try:
        partial, reason = await trial.restore_works(
            client, name, ends, facts.ctx_tokens, length=length, window=window or 0, on_saved=look
        )
    except (BadRequestError, NotFoundError, UnavailableError) as error:
        if isinstance(error, EngineGoneError) or error.code == "engine_timeout":
            raise  # nothing is known; it is tried again
        return f"the engine does not save and restore: {error.message}"
    finally:
        with suppress(StuckError):
            await disk.in_time(shelf.discard(name))
    if reason is not None:
        return reason
    if not partial:
        return "the model goes on from a saved state only near its end"
    if version != [slotfile.STATE_VERSION]:
        return (
            f"the engine writes slot files of version {version[0]}, this proxy knows {slotfile.STATE_VERSION}"
        )
    return None
