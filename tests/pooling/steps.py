"""What tests of ``pooling`` do to a rig."""

import asyncio

from api.rig import until

from polykv_proxy.core.types import Scope, as_tokens

TOKENS = as_tokens(range(1, 41))
SCOPE = Scope("")


def create(rig, tokens=TOKENS):
    """Ask for a pool on the side."""
    return asyncio.get_running_loop().create_task(rig.pooling.create(tokens, SCOPE, label=None, pin=False))


def ids(*runs):
    """Token ids: so many of each."""
    return [number for number, count in runs for _ in range(count)]


async def talked(rig, name="me", **more):
    """A session whose slot holds 50 tokens."""
    body = {"prompt": ids((1, 40), (2, 10)), "session_id": name, **more}
    assert (await rig.ask("/completion", body)).status == 200


async def every_cell_has_its_owner(rig):
    """At rest nothing is unattributed, and sequence ids are those of the engine's pools."""
    await rig.quiet()
    await until(lambda: rig.runtime.plane.tree.sequences_used == len(rig.engine.pools))
    await rig.runtime.readings.take(max_age_s=0.0)
    assert rig.runtime.plane.ownership.unattributed == 0
