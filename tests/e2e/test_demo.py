"""The demo command, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_demo_shows_that_the_prefix_is_computed_and_stored_once(patched: Path, smollm: Path) -> None:
    """Prompt tokens within 5 % of the ideal, cells within 8 an agent, the unshared run beside it.

    Both runs tell how far they are, and not where programs read the figures.
    """
    environment = {
        **os.environ,
        "POLYKV_ENGINE__BINARY": str(patched),
        "POLYKV_ENGINE__MODEL": str(smollm),
    }
    command = [sys.executable, "-m", "polykv_proxy", "demo", "--k", "3", "--prefix-tokens", "250"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    demo = json.loads(done.stdout.splitlines()[-1])["demo"]
    shared, unshared, ideal = demo["shared"], demo["unshared"], demo["ideal_prompt_tokens"]
    assert done.stderr.count("[192/192]") == 2
    assert "192]" not in done.stdout
    assert shared["prompt_tokens_computed"] <= 1.05 * ideal
    own = ideal - demo["prefix_tokens"] + demo["k"] * 64
    assert shared["kv_cells"] <= demo["prefix_tokens"] + own + 8 * demo["k"]
    assert unshared["prompt_tokens_computed"] > shared["prompt_tokens_computed"]
    assert unshared["kv_cells"] > shared["kv_cells"]
    assert all(run[key] > 0 for run in (shared, unshared) for key in ("ttft_mean_s", "wall_s", "tps_mean"))
