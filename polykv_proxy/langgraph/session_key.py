"""Which conversation a call belongs to, as LangGraph's own configuration tells.

A thread is a conversation, and so is each sub-agent and each parallel worker in it. LangGraph names them in
the checkpoint namespace: a path of ``node:task`` segments. The task id of the last segment changes with every
step of a node that simply follows another, so it is left out there; a worker that was started by ``Send`` is
told from its siblings by just that id, so it stays.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from langchain_core.runnables.config import ensure_config

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CHARS = 200
"""The proxy takes names of 255 characters, and numbers them."""

_SENT = "__pregel_push"


def session_key(config: Mapping[str, Any] | None = None) -> str | None:
    """A stable name for the conversation of this call; None outside a graph with threads.

    Args:
        config: the call's configuration; None: that of the running node.
    """
    found = ensure_config() if config is None else config
    settings, metadata = found.get("configurable") or {}, found.get("metadata") or {}
    thread = settings.get("thread_id") or metadata.get("thread_id")
    if not thread:
        return None
    namespace = metadata.get("langgraph_checkpoint_ns") or settings.get("checkpoint_ns") or ""
    segments = [segment for segment in str(namespace).split("|") if segment]
    path, node = metadata.get("langgraph_path") or (), metadata.get("langgraph_node")
    if segments and not (path and path[0] == _SENT):
        segments = [*segments[:-1], *([node] if node else [])]
    return header_safe("/".join([str(thread), *segments]))


def header_safe(name: str) -> str:
    """A name that the proxy takes: short and printable; a digest of one that is not."""
    if len(name) <= MAX_CHARS and name.isprintable() and name.isascii() and name == name.strip():
        return name
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
