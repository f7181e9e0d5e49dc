"""Pools as tools, for an orchestrator that looks after them itself.

Errors are data: a tool answers ``{"ok": false, "error": …, "retry_after": …}`` instead of ending the graph,
so the model can react. Bind them to the orchestrator only; on workers they would be part of every prompt.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.tools import StructuredTool
from pydantic import BaseModel, Field

from polykv_proxy.client import calls
from polykv_proxy.client.errors import PolyKVError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from langchain_core.tools import BaseTool

    from polykv_proxy.langgraph.chat_model import ChatPolyKV


class _Create(BaseModel):
    system_prompt: str = Field(description="The system prompt that all agents of the group begin with.")
    label: str | None = Field(default=None, description="A name for people.")


class _Fork(BaseModel):
    pool_id: str = Field(description="The pool to extend.")
    system_prompt: str = Field(description="The system prompt that the pool was created with.")
    shared_text: str = Field(
        description="What the agents of the new group share beyond it, as a user message."
    )
    label: str | None = Field(default=None, description="A name for people.")


class _OnePool(BaseModel):
    pool_id: str = Field(description="The pool.")


class _Release(BaseModel):
    pool_id: str = Field(description="The pool to release.")
    recursive: bool = Field(default=False, description="Release the pools below it, too.")


class _Room(BaseModel):
    pool_id: str | None = Field(default=None, description="A pool; without it, the engine.")


class _Speed(BaseModel):
    session_id: str | None = Field(default=None, description="One session; without it, all.")


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    description: str
    arguments: type[BaseModel]
    call: Callable[..., calls.Call[Any]]
    shown: Callable[[Any, dict[str, Any]], dict[str, Any]] = lambda found, _: dataclasses.asdict(found)
    """The answer, from the result and the arguments."""


def _create(system_prompt: str, label: str | None = None) -> calls.Call[Any]:
    return calls.create_pool(messages=[{"role": "system", "content": system_prompt}], label=label)


def _fork(pool_id: str, system_prompt: str, shared_text: str, label: str | None = None) -> calls.Call[Any]:
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": shared_text}]
    return calls.fork_pool(pool_id, messages=messages, label=label)


def _speeds(found: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    document = dataclasses.asdict(found)
    session_id = arguments.get("session_id")
    if session_id is not None:
        document["sessions"] = [each for each in document["sessions"] if each["session_id"] == session_id]
    return document


_TOOLS = (
    _Tool(
        "create_pool",
        "Compute a system prompt once for many agents. Answers its pool_id and its length in tokens.",
        _Create,
        _create,
    ),
    _Tool(
        "fork_pool",
        "Extend a pool by text that a group of agents shares. Only the new text is computed.",
        _Fork,
        _fork,
    ),
    _Tool("pool_status", "Who uses a pool, what it holds, and what is below it.", _OnePool, calls.show_pool),
    _Tool(
        "session_tps",
        "Tokens per second that sessions experience now.",
        _Speed,
        lambda session_id=None: calls.rates(),  # noqa: ARG005 - all are asked for, one is shown
        _speeds,
    ),
    _Tool(
        "capacity",
        "Whether there is room for more sessions, and for how many.",
        _Room,
        lambda pool_id=None: calls.capacity(pool_id),
    ),
    _Tool("release_pool", "Give a pool up when its agents are done.", _Release, calls.release_pool),
)

NAMES = tuple(tool.name for tool in _TOOLS)


def polykv_tools(model: ChatPolyKV, include: Iterable[str] = NAMES) -> list[BaseTool]:
    """The tools; for ``ToolNode`` and ``bind_tools``.

    Args:
        model: whose proxy they speak to, with its key.
        include: names of those that are wanted.

    Raises:
        ValueError: there is no tool of that name.
    """
    wanted = list(include)
    if unknown := set(wanted) - set(NAMES):
        raise ValueError(f"there are no tools {sorted(unknown)}; there are {list(NAMES)}")
    return [_made(tool, model) for tool in _TOOLS if tool.name in wanted]


def _made(tool: _Tool, model: ChatPolyKV) -> BaseTool:
    def run(**arguments: Any) -> tuple[str, dict[str, Any]]:
        try:
            found = model.client.send(tool.call(**arguments))
            return _told({"ok": True, **tool.shown(found, arguments)})
        except PolyKVError as error:
            return _told(as_data(error))

    async def arun(**arguments: Any) -> tuple[str, dict[str, Any]]:
        try:
            found = await model.async_client.send(tool.call(**arguments))
            return _told({"ok": True, **tool.shown(found, arguments)})
        except PolyKVError as error:
            return _told(as_data(error))

    return StructuredTool.from_function(
        run,
        arun,
        name=tool.name,
        description=tool.description,
        args_schema=tool.arguments,
        response_format="content_and_artifact",
    )


def as_data(error: PolyKVError) -> dict[str, Any]:
    """An error as a tool answers it."""
    told = {
        "error": error.code or type(error).__name__,
        "message": error.message,
        "retry_after": error.retry_after,
    }
    return {"ok": False, **{name: value for name, value in told.items() if value is not None}}


def _told(document: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = json.dumps(document, ensure_ascii=False)
    return text, json.loads(text)
