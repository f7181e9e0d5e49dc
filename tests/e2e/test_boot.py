"""What the engine refuses at boot, in one clear line each."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from e2e.tiny_models import mamba, sliding_window

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def boot(binary: Path, model: Path, *args: str) -> tuple[int, str]:
    """Start an engine that must exit by itself; status and what it printed about pools."""
    command = [str(binary), "-m", str(model), "--port", "0", "-c", "512", "--no-warmup", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "--polykv-max-pools: " in line]
    return done.returncode, "\n".join(line.partition("--polykv-max-pools: ")[2] for line in said)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--parallel", "2"), "--kv-unified"),
        (("--kv-unified",), "--parallel"),
        (("--kv-unified", "--parallel", "250"), "256"),
        (("--kv-unified", "--parallel", "2", "--embedding"), "embedding"),
        (("--kv-unified", "--parallel", "2", "--polykv-prefill-cap", "-1"), "--polykv-prefill-cap"),
    ],
)
def test_settings_that_cannot_share_cells_are_refused(
    patched: Path, smollm: Path, args: tuple[str, ...], reason: str
) -> None:
    """ENG-3: exit 1 before the model is loaded, and the line names the way out."""
    status, said = boot(patched, smollm, "--polykv-max-pools", "8", *args)
    assert status == 1
    assert said.count("\n") == 0
    assert reason in said


@pytest.mark.parametrize(
    ("write", "reason"),
    [(mamba, "no attention cells"), (sliding_window, "--swa-full")],
    ids=["mamba", "gemma2"],
)
def test_memories_that_cannot_share_cells_are_refused(
    patched: Path, smollm: Path, tmp_path: Path, write: Callable[[Path, Path], None], reason: str
) -> None:
    """ENG-3: recurrent and sliding-window memories are refused by what they are, not by their names."""
    model = tmp_path / "tiny.gguf"
    write(model, smollm)
    args = ("--polykv-max-pools", "2", "--kv-unified", "--parallel", "2")
    status, said = boot(patched, model, *args)
    assert status == 1
    assert reason in said
