"""Random work on the real engine: every cell has its owner at every rest, and in the end none is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e.harness import Served, serve
from e2e.mob import Mob, Scale
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_240
OPERATIONS = 10_000
OPERATIONS_SMOLLM = 300
SLOTS, POOLS, CELLS = 4, 9, 12_288
SIZES = ("--parallel", str(SLOTS), "--ctx-size", str(CELLS), "--max-pools", str(POOLS))

TINY = Scale(vocabulary=1000, clients=8, bout=70, segment=50, talk=100, head=300)
SMOLLM = Scale(vocabulary=40_000, clients=6, bout=20, segment=20, talk=16, head=100)
GRACE = {"POLYKV_POOLS__GRACE_S": "1"}
"""So that what is released while in use lingers, is taken up, makes room, and goes."""
SMALL_POOLS = {**GRACE, "POLYKV_POOLS__AUTO_MIN_TOKENS": "80", "POLYKV_POOLS__AUTO_GAIN_TOKENS": "20"}
"""So that pools come by themselves on prompts that a real model computes in a moment."""


def check(mob: Mob, operations: int) -> None:
    """What was drawn did happen: each kind of operation succeeded often enough to mean something."""
    least = {
        "attach": 20,
        "run plain": 20,
        "create": 60,
        "fork": 60,
        "snapshot": 150,
        "pin": 150,
        "unpin": 60,
        "evict": 60,
        "flush": 150,
        "release": 30,
        "leave": 30,
    }
    seldom = {kind: mob.done[kind] for kind, one_in in least.items() if mob.done[kind] < operations / one_in}
    assert not seldom
    assert mob.looks > operations / 150


async def unleash(served: Served, scale: Scale, operations: int) -> Mob:
    """Run a mob; tell what it did when it found something."""
    async with served.http.keeping() as http:
        mob = Mob(served, http, scale, SEED)
        try:
            await mob.work(operations)
            await mob.go_home()
        except BaseException:
            print(*mob.log, *served.log[-400:], mob.last, *mob.problems, sep="\n")
            raise
        finally:
            print(mob.done, mob.refused, mob.looks, len(mob.automatic))
    for event in ("pool_release_failed", "internal_error"):
        assert not served.events(event)
    return mob


@pytest.mark.timeout(900)
async def test_random_work_on_a_tiny_model_leaves_no_cell_behind(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """Thousands of operations: the sums hold at every rest, and in the end nothing is left."""
    model = tmp_path / "llama.gguf"
    llama(model, smollm)
    async with serve(tmp_path, "--model", str(model), *SIZES, env=GRACE) as served:
        mob = await unleash(served, TINY, OPERATIONS)
    check(mob, OPERATIONS)
    assert mob.automatic


@pytest.mark.timeout(900)
async def test_random_work_on_a_real_model_leaves_no_cell_behind(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """The same with the built-in model, where computing takes time and requests overlap more."""
    async with serve(tmp_path, *SIZES, env=SMALL_POOLS) as served:
        mob = await unleash(served, SMOLLM, OPERATIONS_SMOLLM)
    check(mob, OPERATIONS_SMOLLM)
