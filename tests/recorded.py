"""Replies of a patched llama-server, tag b11434, as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path

_FOLDER = Path(__file__).parent / "data" / "b11434"


def reply(name: str) -> bytes:
    """The body of a recorded reply."""
    return json.loads((_FOLDER / f"{name}.json").read_text())["body"].encode()
