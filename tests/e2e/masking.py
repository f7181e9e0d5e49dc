"""What may differ between two answers to the same request: ids, clocks and speeds."""

from __future__ import annotations

import json
import re
from typing import Any

_MASKED = frozenset(
    {
        "id",
        "created",
        "created_at",
        "completed_at",
        "item_id",
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
        "system_fingerprint",
        "build_info",
        "id_task",
        "model_path",
        "time_ms",
    }
)
_HEADERS = frozenset({"date", "connection", "keep-alive", "transfer-encoding", "content-length"})


def masked(value: Any) -> Any:
    """A JSON document with those members blanked."""
    if isinstance(value, dict):
        return {key: "*" if key in _MASKED else masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return value


def masked_body(body: bytes) -> str:
    """A body of any kind: JSON, an event stream, text; framing and order of members kept."""
    text = body.decode("utf-8", "replace")
    try:
        return json.dumps(masked(json.loads(text)))
    except json.JSONDecodeError:
        pass
    lines = []
    for line in text.split("\n"):
        if line.startswith("data: {"):
            line = "data: " + json.dumps(masked(json.loads(line[6:])))  # noqa: PLW2901
        lines.append(re.sub(r"^(llamacpp:\S*) .*", r"\1 *", line))
    return "\n".join(lines)


def kept_headers(headers: Any) -> dict[str, str]:
    """End-to-end headers, without those that name us or a moment."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() not in _HEADERS and not name.lower().startswith("x-session-id")
    }
