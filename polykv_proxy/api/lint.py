"""Message lists are judged, never mended: what is odd about a conversation is reported, and goes through.

Most of what breaks a long agent run is in its message list: a compaction that parted a tool's result from its
call, a second system message in the middle. Templates render such lists in surprising ways, or refuse them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from polykv_proxy.api.families import Dialect

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCENE = ("system", "developer")


class _Conversation(msgspec.Struct):
    messages: list[Any] | None = None
    input: list[Any] | str | None = None


_conversation = msgspec.json.Decoder(_Conversation)


def judge(body: bytes, dialect: Dialect) -> list[dict[str, Any]]:
    """What is odd about the conversation in a request body, in order; empty if nothing is.

    1. ``system_first``: a system message behind others.
    2. ``system_once``: more than one.
    3. ``tool_after_caller``: a tool's result that does not follow the message with its call.
    4. ``last_is_user_or_tool``: the last message is neither, so that there is nothing to answer.

    Args:
        body: as the engine gets it.
        dialect: the API it came in on; plain prompts are not judged.

    Returns:
        ``rule`` and ``message_index`` (from 0) of each violation.
    """
    try:
        conversation = _conversation.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []
    items = conversation.input if dialect is Dialect.RESPONSES else conversation.messages
    if not isinstance(items, list) or not items:
        return []
    messages = [item if isinstance(item, dict) else {} for item in items]
    return [
        {"rule": rule, "message_index": index}
        for index, rule in sorted([*_scene(messages), *_tools(messages), *_last(messages)])
    ]


def _scene(messages: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    scenes = [index for index, message in enumerate(messages) if message.get("role") in _SCENE]
    for number, index in enumerate(scenes):
        if number > 0:
            yield index, "system_once"
        if index > number:
            yield index, "system_first"


def _tools(messages: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Results must answer calls of the message before them; other results may stand in between."""
    open_calls: set[object] = set()
    for index, message in enumerate(messages):
        results = _results(message)
        if results and not results <= open_calls:
            yield index, "tool_after_caller"
        calls = _calls(message)
        if calls:
            # several calls in a row, each an item of its own, wait together
            together = message.get("type") == "function_call" and index > 0 and _calls(messages[index - 1])
            if together:
                open_calls |= calls
            else:
                open_calls = calls
        elif not results:
            open_calls = set()


def _last(messages: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    last = messages[-1]
    if last.get("role") not in ("user", "tool") and not _results(last):
        yield len(messages) - 1, "last_is_user_or_tool"


def _calls(message: dict[str, Any]) -> set[object]:
    """Ids of the tool calls in a message, of whichever API."""
    if message.get("type") == "function_call":
        return {_id(message, "call_id")}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        return {_id(call, "id") for call in calls if isinstance(call, dict)}
    return {_id(block, "id") for block in _blocks(message, "tool_use")}


def _results(message: dict[str, Any]) -> set[object]:
    """Ids of the calls whose results a message carries."""
    if message.get("type") == "function_call_output":
        return {_id(message, "call_id")}
    if message.get("role") == "tool":
        return {_id(message, "tool_call_id")}
    return {_id(block, "tool_use_id") for block in _blocks(message, "tool_result")}


def _id(item: dict[str, Any], name: str) -> object:
    """A call's id, which may be anything: the engine takes what is no text for none."""
    value = item.get(name)
    return msgspec.json.encode(value) if isinstance(value, list | dict) else value


def _blocks(message: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [block for block in content if isinstance(block, dict) and block.get("type") == kind]
