"""What an engine can do for pools: the highest level that is seen to work on the model that it has loaded.

1. It shares cells: it has our patch, and a pool was computed, attached to and given back.
2. It goes on from slot files, and pools are allowed as such.
3. It relays.

What was tested once on a load of the model is not tested again, nor what would disturb others.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from polykv_proxy.core.types import Capability, PoolNumber
from polykv_proxy.engine.backend import Patched, Relaying
from polykv_proxy.engine.copies import Copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.types import EngineFacts, EngineSample
    from polykv_proxy.engine.backend import Backend
    from polykv_proxy.engine.client import EngineClient

SELF_TEST_TOKENS = 48

CALM_S = 20.0
"""What an earlier proxy left at work may take so long to end."""
CALM_LOOK_S = 0.2


async def find_backend(  # noqa: PLR0913 - what is known before anything is tried
    client: EngineClient,
    plane: ControlPlane,
    before: Backend,
    facts: EngineFacts,
    *,
    patched: bool,
    make_copies: Callable[[], Copies] | None,
) -> tuple[Backend, EngineFacts, str | None]:
    """Try what an engine claims.

    Args:
        client: the way to it.
        plane: what is known of it so far.
        before: what was seen to work on it so far.
        facts: what it says of itself.
        patched: whether it has the patch, with pools on.
        make_copies: makes a backend of slot files; None: they are not allowed.

    Returns:
        What it can do, its facts as far as they were seen, and why it is not a higher level.

    Raises:
        PolyKVError: it does not answer as engines do.
    """
    reason: str | None = "the engine has no prefix pools: it is not patched, or they are off"
    if patched:
        capability, reason = await _sharing(client, plane)
        if capability is Capability.ZERO_COPY:
            return Patched(client), facts, reason
    known = plane.facts
    if known is not None and isinstance(before, Copies) and await before.still_there():
        return before, known, plane.capability_reason  # tested already
    if make_copies is None:
        return Relaying(client), facts, reason
    copies = make_copies()
    if isinstance(before, Copies):
        copies.files.inherit(before.files)
    facts, missing = await copies.self_test(facts)
    if missing is None:
        return copies, facts, f"{reason}; a pool is a slot file, and who attaches gets a copy"
    return Relaying(client), facts, f"{reason}; and slot files do not work either: {missing}"


async def _sharing(client: EngineClient, plane: ControlPlane) -> tuple[Capability, str | None]:
    """What is claimed of a patched engine, and why not more."""
    sample = await client.counters()
    if plane.facts is not None and plane.facts.epoch == sample.epoch:
        return plane.capability, plane.capability_reason  # tested already
    sample = await _calm(client, sample)
    for pool in sample.pools:
        await client.release(pool.number)  # left by a proxy that is gone: nobody knows their ids
    if sample.busy:
        return Capability.ZERO_COPY, None  # in use by others: a test would disturb them
    for slot in sample.slots:
        if slot.tokens:  # left as well; a test, and what comes back from disk, needs cells
            await client.erase_slot(slot.slot)
    reason = await _self_test(client)
    return (Capability.ZERO_COPY, None) if reason is None else (Capability.RELAY, reason)


async def _calm(client: EngineClient, sample: EngineSample) -> EngineSample:
    """The engine when it has nothing to do, or when that took too long.

    It notices within a second or so that a proxy which was killed waits for no answer any more.
    """
    until = monotonic() + CALM_S
    while sample.busy and monotonic() < until:
        await asyncio.sleep(CALM_LOOK_S)
        sample = await client.counters()
    return sample


async def _self_test(client: EngineClient) -> str | None:
    """Compute a pool, attach to it, release it; returns what went wrong, or None."""
    words = await client.tokenize("The quick brown fox jumps over the lazy dog. " * 12)
    tokens, number = words[:SELF_TEST_TOKENS], PoolNumber(0)
    before = await client.counters()
    slot = before.slots[0].slot
    await client.materialize(number, tokens, slot, 0)
    headers = {"X-PolyKV-Slot": str(slot), "X-PolyKV-Attach": str(number)}
    answer = await client.complete(words[: SELF_TEST_TOKENS + 8], headers)
    attached = await client.counters()
    await client.release(number)
    await client.slot_action(slot, "action=erase", b"{}")  # not every engine may; the sum holds anyway
    after = await client.counters()
    cached = answer.get("timings", {}).get("cache_n")
    if cached != len(tokens):
        return f"self-test: an attached request reused {cached} of {len(tokens)} tokens"
    if attached.slots[0].shared_tokens != len(tokens):
        return f"self-test: the slot shares {attached.slots[0].shared_tokens} of {len(tokens)} cells"
    held = sum(one.tokens for one in after.slots) - sum(one.tokens for one in before.slots)
    if after.cells_used - before.cells_used != held:
        return f"self-test: {after.cells_used - before.cells_used - held} cells did not come back"
    return None
