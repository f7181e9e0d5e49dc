"""Replies of a patched llama-server, tag b11434, as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path

WINDOW_OVERFLOW = {
    "code": 400,
    "message": "request (3000 tokens) exceeds the available context size (2048 tokens), try increasing it",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 3000,
    "n_ctx": 2048,
}
CELLS_OVERFLOW = {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}
"""Errors by which it tells that there is no more room, of a slot's window and of the KV cells."""

_FOLDER = Path(__file__).parent / "data" / "b11434"


def reply(name: str) -> bytes:
    """The body of a recorded reply."""
    return json.loads((_FOLDER / f"{name}.json").read_text())["body"].encode()
