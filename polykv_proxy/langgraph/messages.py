"""Messages of LangChain to chat bodies, answers and streams back to messages. No I/O."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from polykv_proxy.langgraph.content_blocks import PROVIDER
from polykv_proxy.langgraph.structured import ANY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from langchain_core.messages import BaseMessage
    from langchain_core.messages.tool import ToolCallChunk

_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(.*)', re.DOTALL)

_TOLD = (
    "request_id",
    "pool_id",
    "session_id",
    "session_tps",
    "backpressure",
    "n_pool_shared",
    "ctx_used",
    "ctx_headroom_tokens",
    "pool_unknown",
    "unpooled_reason",
    "context_full",
    "divergence",
    "lint",
)
"""Members of the proxy's block that go into ``response_metadata``, under the same names."""


def to_openai(messages: Iterable[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as a chat body has them."""
    return [_one_to_openai(message) for message in messages]


def _one_to_openai(message: BaseMessage) -> dict[str, Any]:
    converted = dict(convert_to_openai_messages(message))
    if isinstance(message, AIMessage):
        converted["content"] = message.text  # not its reasoning, and no other blocks
        reasoning = message.additional_kwargs.get("reasoning_content")
        if not reasoning and not isinstance(message.content, str):
            blocks = [block for block in message.content_blocks if block["type"] == "reasoning"]
            reasoning = "".join(block.get("reasoning", "") for block in blocks)
        if reasoning:
            converted["reasoning_content"] = reasoning
    return converted


def to_result(
    document: Mapping[str, Any], forced: str | None = None, *, session_name: str | None = None
) -> ChatResult:
    """A complete answer.

    Args:
        document: the JSON.
        forced: name of the tool whose arguments the answer's text is, or ``ANY``; None: it is text.
        session_name: under which it was asked.
    """
    told = response_metadata(document, session_name)
    usage = usage_metadata(document.get("usage"))
    generations = []
    for choice in document.get("choices") or ():
        message = _to_message(choice.get("message") or {}, forced)
        reason = _reason(choice.get("finish_reason"), forced)
        message.response_metadata = {**told, "finish_reason": reason}
        message.usage_metadata = usage
        info = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else None
        generations.append(ChatGeneration(message=message, generation_info=info))
    output = {"model_name": document.get("model"), "token_usage": document.get("usage")}
    return ChatResult(generations=generations, llm_output=output)


def _to_message(raw: Mapping[str, Any], forced: str | None) -> AIMessage:
    text = raw.get("content") or ""
    calls = list(raw.get("tool_calls") or ())
    if forced is not None and not calls:
        name, arguments = forced_call(forced, text)
        calls, text = [{"id": _call_id(), "function": {"name": name, "arguments": arguments}}], ""
    good, bad = [], []
    for call in calls:
        try:
            parsed = parse_tool_call(dict(call), return_id=True)
        except OutputParserException as error:
            bad.append(make_invalid_tool_call(dict(call), str(error)))
            continue
        if parsed is not None:
            good.append(tool_call(name=parsed["name"], args=parsed["args"], id=parsed["id"]))
    reasoning = raw.get("reasoning_content")
    return AIMessage(
        content=text,
        additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
        tool_calls=good,
        invalid_tool_calls=bad,
    )


def forced_call(forced: str, text: str) -> tuple[str, str]:
    """Name and arguments of a call that an answer was forced to be.

    Args:
        forced: the tool, whose arguments the text is; or ``ANY``: the text names it.
        text: complete, or cut off.
    """
    if forced != ANY:
        return forced, text
    found = _CALL.match(text)
    if found is None:
        return "", text
    arguments = found[2].rstrip()
    return json.loads(found[1]), arguments.removesuffix("}") if _is_json(text) else arguments


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:16]}"


def response_metadata(document: Mapping[str, Any], session_name: str | None = None) -> dict[str, Any]:
    """What is said about an answer; the proxy's members only where the proxy said something."""
    known = {
        "model_name": document.get("model"),
        "id": document.get("id"),
        "system_fingerprint": document.get("system_fingerprint"),
        "timings": document.get("timings"),
        "session_name": session_name,
    }
    block = document.get("opencoti") or {}
    told = {name: block[name] for name in _TOLD if name in block}
    given = {name: value for name, value in known.items() if value is not None}
    return {**given, **told, "model_provider": PROVIDER}


def usage_metadata(usage: Mapping[str, Any] | None) -> UsageMetadata | None:
    """Tokens that an answer took, with those that were not computed; None where nobody counted."""
    if not usage:
        return None
    prompt, generated = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    of_prompt = usage.get("prompt_tokens_details") or {}
    of_answer = usage.get("completion_tokens_details") or {}
    inputs, outputs = InputTokenDetails(), OutputTokenDetails()
    if (cached := of_prompt.get("cached_tokens")) is not None:
        inputs["cache_read"] = cached
    if (written := of_prompt.get("cache_write_tokens")) is not None:
        inputs["cache_creation"] = written
    if (reasoning := of_answer.get("reasoning_tokens")) is not None:
        outputs["reasoning"] = reasoning
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=generated,
        total_tokens=int(usage.get("total_tokens") or prompt + generated),
        input_token_details=inputs,
        output_token_details=outputs,
    )


def _reason(reason: str | None, forced: str | None) -> str | None:
    return "tool_calls" if forced is not None and reason == "stop" else reason


class StreamedAnswer:
    """A streamed answer: documents in, chunks out.

    Core joins the metadata of chunks: texts are put together, numbers added, and other values that differ are
    an error. So what is said about the whole answer stands on one chunk, the last.

    Args:
        forced: name of the tool whose arguments the answer's text is, or ``ANY``; None: it is text.
        session_name: under which it was asked.
    """

    def __init__(self, forced: str | None = None, *, session_name: str | None = None) -> None:
        self._forced = forced
        self._session_name = session_name
        self._begun = False
        self._held = ""
        self._reason: str | None = None
        self._said: dict[str, Any] = {}

    def feed(self, document: Mapping[str, Any]) -> ChatGenerationChunk | None:
        """One document; None if there is nothing to show of it."""
        self._said |= {name: value for name, value in document.items() if value is not None}
        choices: Sequence[Mapping[str, Any]] = document.get("choices") or ()
        if not choices:
            return None
        choice = choices[0]
        self._reason = choice.get("finish_reason") or self._reason
        message = self._piece(choice.get("delta") or {})
        logprobs = choice.get("logprobs")
        if message is None and not logprobs:
            return None
        info = {"logprobs": logprobs} if logprobs else None
        return ChatGenerationChunk(message=message or AIMessageChunk(content=""), generation_info=info)

    def finish(self) -> ChatGenerationChunk:
        """The last chunk, with everything that is said about the whole answer."""
        told = response_metadata(self._said, self._session_name)
        message = AIMessageChunk(
            content="",
            tool_call_chunks=self._call(),
            chunk_position="last",
            usage_metadata=usage_metadata(self._said.get("usage")),
            response_metadata={**told, "finish_reason": _reason(self._reason, self._forced)},
        )
        return ChatGenerationChunk(message=message)

    def _call(self) -> list[ToolCallChunk]:
        if self._forced is None or not self._held:
            return []
        name, arguments = forced_call(self._forced, self._held)
        return [tool_call_chunk(name=name, args=arguments, id=_call_id(), index=0)]

    def _piece(self, delta: Mapping[str, Any]) -> AIMessageChunk | None:
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content")
        pieces = [
            tool_call_chunk(
                name=(call.get("function") or {}).get("name"),
                args=(call.get("function") or {}).get("arguments"),
                id=call.get("id"),
                index=call.get("index"),
            )
            for call in delta.get("tool_calls") or ()
        ]
        if self._forced == ANY:  # which tool it is shows when it is complete
            self._held += text
            text = ""
        elif self._forced is not None and text:
            name, call_id = (None, None) if self._begun else (self._forced, _call_id())
            pieces, text, self._begun = [tool_call_chunk(name=name, args=text, id=call_id, index=0)], "", True
        if not (text or reasoning or pieces):
            return None
        return AIMessageChunk(
            content=text,
            additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
            tool_call_chunks=pieces,
            response_metadata={"model_provider": PROVIDER},
        )
