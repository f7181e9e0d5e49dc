"""Tools and schemas as the server wants them, and answers as the caller wants them. No I/O."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from langchain_core.output_parsers import BaseOutputParser
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

ANY = "*"
"""``forced_tool`` of an answer that names its tool itself."""

Method = Literal["json_schema", "function_calling", "json_mode"]

Schema = dict[str, Any] | type


def tool_definitions(
    tools: Iterable[dict[str, Any] | type | Callable[..., Any] | BaseTool],
    *,
    strict: bool | None = None,
    in_order: bool = False,
) -> list[dict[str, Any]]:
    """Tools as they stand in a chat body, and in the prompt.

    Args:
        tools: in any form that LangChain knows.
        strict: as OpenAI's.
        in_order: sort them by name; a list that comes in another order is another prompt.
    """
    converted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    return sorted(converted, key=tool_name) if in_order else converted


def tool_name(definition: dict[str, Any]) -> str:
    """The name of a tool's definition."""
    return str(definition["function"]["name"])


def tool_choice_members(choice: object, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Call arguments for a choice of tools.

    What llama-server makes of ``required`` depends on the chat template, and a named tool it takes for
    ``auto``. Sending only one tool would change the prompt: tools precede the conversation, and a pool would
    end before them. So a call is forced in a way that leaves the prompt alone and suits any template: all
    tools stay, none may be called, and the answer must be a call, by its grammar. ``messages`` makes a tool
    call of it. It is one call, never several.

    Raises:
        ValueError: the choice names no tool of these.
    """
    if isinstance(choice, dict):
        choice = (choice.get("function") or {}).get("name") or choice.get("name") or choice.get("type")
    if choice in (None, False) or not tools:
        return {}
    if choice in ("auto", "none"):
        return {"tool_choice": choice}
    if choice in (True, "any", "required"):
        choice = tool_name(tools[0]) if len(tools) == 1 else ANY
    if choice == ANY:
        schema = _any_call(tools)
    else:
        found = next((tool for tool in tools if tool_name(tool) == choice), None)
        if found is None:
            raise ValueError(f"tool_choice {choice!r} is none of {[tool_name(tool) for tool in tools]}")
        schema = _parameters(found)
    return {
        "tool_choice": "none",
        "forced_tool": choice,
        "response_format": response_format("call", schema),
    }


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _any_call(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """An object of the name of one of the tools and its arguments, in this order."""
    shared: dict[str, Any] = {}
    forms = []
    for number, tool in enumerate(tools):
        parameters = dict(_parameters(tool))
        for name, definition in parameters.pop("$defs", {}).items():
            shared[f"{number}_{name}"] = _renamed(definition, number)
        members = {"name": {"const": tool_name(tool)}, "arguments": _renamed(parameters, number)}
        forms.append(
            {
                "type": "object",
                "properties": members,
                "required": list(members),
                "additionalProperties": False,
            }
        )
    return {"anyOf": forms, **({"$defs": shared} if shared else {})}


def _renamed(schema: Any, number: int) -> Any:
    """A schema whose references to its own definitions bear the number of its tool."""
    if isinstance(schema, list):
        return [_renamed(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {name: _renamed(value, number) for name, value in schema.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        renamed["$ref"] = f"#/$defs/{number}_{reference.removeprefix('#/$defs/')}"
    return renamed


def response_format(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An answer that a schema describes."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def schema_members(schema: Schema | None, method: Method, *, strict: bool | None) -> dict[str, Any]:
    """Call arguments for an answer in the form of a schema, for the methods that leave the prompt alone."""
    if method == "json_mode" or schema is None:
        return {"response_format": {"type": "json_object"}}
    described = _json_schema(schema)
    wanted = response_format(str(described.get("title") or "answer"), described)
    if strict is not None:
        wanted["json_schema"]["strict"] = strict
    return {"response_format": wanted}


def _json_schema(schema: Schema) -> dict[str, Any]:
    """The plain JSON Schema of anything that describes one, OpenAI's wrappers included."""
    if isinstance(schema, dict):
        inner = schema.get("json_schema") if schema.get("type") == "json_schema" else schema
        if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
            return {"title": inner.get("name", "answer"), **inner["schema"]}
    return convert_to_json_schema(schema)


def parser(schema: Schema | None, method: Method, name: str | None) -> BaseOutputParser[Any]:
    """Reads an answer: an instance of a pydantic class, else the JSON value.

    Args:
        schema: of the answer.
        method: by which it was asked for.
        name: of the tool, for ``function_calling``.
    """
    pydantic = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
    if method == "function_calling":
        if pydantic is not None:
            return PydanticToolsParser(tools=[pydantic], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=str(name), first_tool_only=True)
    return JsonOutputParser() if pydantic is None else PydanticOutputParser(pydantic_object=pydantic)


def parsed(
    answers: Runnable[Any, Any], reader: BaseOutputParser[Any], *, include_raw: bool
) -> Runnable[Any, Any]:
    """Answers, read; with ``include_raw`` a dict of ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return answers | reader
    good = RunnablePassthrough.assign(parsed=itemgetter("raw") | reader, parsing_error=lambda _: None)
    bad = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=answers) | good.with_fallbacks([bad], exception_key="parsing_error")
