"""Random conversations with tools, images and thoughts, as each API says them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from e2e.tiny_projectors import base64_png, data_url

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
TEXT = "/v1/completions"
COMPLETION = "/completion"

BITS = (
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "end|>",
        "<s>",
        "</s>",
        "\n",
        "\n\n",
        " ",
        "  ",
        "\t",
        " a",
        "b",
    ),
    *("The ferry is late.", " Ω", "日本語", "🚢", "é", "1234567", "user\n", "don't", "\u200b", "<", ">"),
)
"""Text is made of these: special tokens, halves of them, and what tokenizers join."""

IMAGES = 3


def some_text(dice: random.Random, most: int) -> str:
    """Something that may be said."""
    return "".join(dice.choice(BITS) for _ in range(dice.randrange(most)))


@dataclass(frozen=True, slots=True)
class Call:
    """Of a tool, with what comes of it."""

    name: str
    arguments: dict[str, str]
    result: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What somebody says: texts, and images by number."""

    role: str
    parts: tuple[str | int, ...]
    thought: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation."""

    system: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[Turn, ...] = field(default=())


def _parts(dice: random.Random, *, media: bool) -> tuple[str | int, ...]:
    texts: list[str | int] = [some_text(dice, 30) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    if media and dice.random() < 0.06:
        texts.insert(dice.randrange(len(texts) + 1), dice.randrange(IMAGES))
    return tuple(texts)


def _call(dice: random.Random, *, media: bool) -> Call:
    arguments = {"where": some_text(dice, 5), "when": "now"}
    return Call(f"look{dice.randrange(3)}", arguments, _parts(dice, media=media))


def _grown(dice: random.Random, talk: Talk, *, media: bool) -> Talk:
    """With a question, and often an answer to it."""
    turns = [*talk.turns, Turn("user", _parts(dice, media=media))]
    if dice.random() < 0.7:
        calls = tuple(_call(dice, media=media) for _ in range(dice.choice((0, 0, 1, 2))))
        thought = some_text(dice, 10) if dice.random() < 0.2 else ""
        turns.append(Turn("assistant", _parts(dice, media=False), thought, calls if talk.tools else ()))
    return replace(talk, turns=tuple(turns))


def _begun(dice: random.Random) -> Talk:
    tools = tuple(
        {"name": f"look{at}", "description": some_text(dice, 20), "schema": {"type": "object"}}
        for at in range(dice.choice((0, 0, 1, 3)))
    )
    return Talk(tuple(some_text(dice, 40) for _ in range(dice.choice((0, 1, 1, 3)))), tools)


def talks(dice: random.Random, count: int, *, media: bool) -> Iterator[Talk]:
    """Conversations that begin, go on, branch off and are edited."""
    known = [_begun(dice)]
    for _ in range(count):
        talk = _begun(dice) if dice.random() < 0.1 else dice.choice(known[-4:])
        for _ in range(dice.randrange(1, 3)):
            talk = _grown(dice, talk, media=media)
        if dice.random() < 0.3:
            place = dice.randrange(len(talk.turns))
            edited = replace(talk.turns[place], parts=_parts(dice, media=False))
            talk = replace(talk, turns=(*talk.turns[:place], edited, *talk.turns[place + 1 :]))
        known.append(talk)
        yield talk


def said(dice: random.Random, talk: Talk, path: str, marker: str) -> dict[str, Any]:
    """The body of a request.

    Args:
        dice: chooses among the forms that an API has for the same.
        talk: the conversation.
        path: the API.
        marker: what stands for an image in a plain prompt; empty where the model takes none.
    """
    if path == CHAT:
        return _chat(dice, talk)
    if path == MESSAGES:
        return _messages(dice, talk)
    if path == RESPONSES:
        return _responses(dice, talk)
    images: list[int] = []
    text = "".join(
        f"<|im_start|>{one.role}\n{_marked(one.parts, marker, images)}<|im_end|>" for one in talk.turns
    )
    if path == TEXT or not marker:
        return {"prompt": text if not images else "".join(text.split(marker))}
    data = [base64_png(number) for number in images]
    return {"prompt": {"prompt_string": text, "multimodal_data": data}}


def _marked(parts: tuple[str | int, ...], marker: str, images: list[int]) -> str:
    words = []
    for part in parts:
        if isinstance(part, int):
            images.append(part)
            words.append(marker)
        else:
            words.append(part)
    return "".join(words)


def _content(dice: random.Random, parts: tuple[str | int, ...], text: str, image: Any) -> Any:
    """A bare text where it is one and nobody minds, or parts."""
    if len(parts) == 1 and isinstance(parts[0], str) and dice.random() < 0.6:
        return parts[0]
    return [{"type": text, "text": part} if isinstance(part, str) else image(part) for part in parts]


def _chat(dice: random.Random, talk: Talk) -> dict[str, Any]:
    def image(number: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(number)}}

    made: list[dict[str, Any]] = []
    if talk.system:
        made.append({"role": "system", "content": _content(dice, talk.system, "text", image)})
    for at, turn in enumerate(talk.turns):
        message = {"role": turn.role, "content": _content(dice, turn.parts, "text", image)}
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [
                {"id": _id(at, n), "type": "function", "function": _function(call)}
                for n, call in enumerate(turn.calls)
            ]
        made.append(message)
        made += [
            {
                "role": "tool",
                "tool_call_id": _id(at, n),
                "content": _content(dice, call.result, "text", image),
            }
            for n, call in enumerate(turn.calls)
        ]
    return _with(talk, {"messages": made}, lambda tool: {"type": "function", "function": _declared(tool)})


def _messages(dice: random.Random, talk: Talk) -> dict[str, Any]:
    def image(number: int) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": base64_png(number)}
        return {"type": "image", "source": source}

    def text(part: str | int) -> dict[str, Any]:
        block = image(part) if isinstance(part, int) else {"type": "text", "text": part}
        return block | ({"cache_control": {"type": "ephemeral"}} if dice.random() < 0.2 else {})

    made: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for at, turn in enumerate(talk.turns):
        blocks = results + [text(part) for part in turn.parts]
        results = []
        if turn.thought:
            blocks.insert(0, {"type": "thinking", "thinking": turn.thought, "signature": "x"})
        for n, call in enumerate(turn.calls):
            blocks.append({"type": "tool_use", "id": _id(at, n), "name": call.name, "input": call.arguments})
            result = {"type": "tool_result", "tool_use_id": _id(at, n)}
            if dice.random() < 0.9:
                result["content"] = _content(dice, call.result, "text", image)
            results.append(result)
        bare = len(blocks) == 1 and blocks[0]["type"] == "text" and dice.random() < 0.5
        made.append({"role": turn.role, "content": blocks[0]["text"] if bare else blocks})
    if results:
        made.append({"role": "user", "content": results})
    body: dict[str, Any] = {"messages": made, "max_tokens": 1}
    if talk.system:
        body["system"] = _content(dice, talk.system, "text", image)
    return _with(talk, body, lambda tool: _declared(tool, "input_schema"))


def _responses(dice: random.Random, talk: Talk) -> dict[str, Any]:
    def image(number: int) -> dict[str, Any]:
        return {"type": "input_image", "image_url": data_url(number)}

    made: list[dict[str, Any]] = []
    for at, turn in enumerate(talk.turns):
        if turn.thought:
            thought = [{"type": "reasoning_text", "text": turn.thought}]
            made.append({"type": "reasoning", "summary": [], "content": thought})
        if turn.role == "assistant":
            content = [{"type": "output_text", "text": part} for part in turn.parts]
            made.append({"type": "message", "role": "assistant", "content": content})
        else:
            made.append({"role": turn.role, "content": _content(dice, turn.parts, "input_text", image)})
        for n, call in enumerate(turn.calls):
            made.append({"type": "function_call", "call_id": _id(at, n), **_function(call)})
        for n, call in enumerate(turn.calls):
            output = _content(dice, call.result, "input_text", image)
            made.append({"type": "function_call_output", "call_id": _id(at, n), "output": output})
    body: dict[str, Any] = {"input": made}
    if talk.system:
        body["instructions"] = "".join(talk.system)
    return _with(talk, body, lambda tool: {"type": "function", **_declared(tool)})


def _id(turn: int, number: int) -> str:
    return f"call{turn}x{number}"


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}


def _declared(tool: dict[str, Any], schema: str = "parameters") -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], schema: tool["schema"]}


def _with(talk: Talk, body: dict[str, Any], declared: Any) -> dict[str, Any]:
    """A body with its tools, where it has any."""
    return body | ({"tools": [declared(tool) for tool in talk.tools]} if talk.tools else {})
