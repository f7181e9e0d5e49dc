"""Tools, choices and schemas, as the server wants them."""

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from typing_extensions import TypedDict

from polykv_proxy.langgraph import structured


class Inner(BaseModel):
    """Something inside."""

    depth: int


class Outer(BaseModel):
    """Something around it."""

    inner: Inner


@tool
def weather(place: str) -> str:
    """The weather of a place."""
    return place


TOOLS = structured.tool_definitions([weather, Outer])


def test_definitions_keep_their_order_or_are_sorted():
    """A list in another order is another prompt."""
    assert [structured.tool_name(each) for each in TOOLS] == ["weather", "Outer"]
    assert structured.tool_definitions([weather, Outer], in_order=True) == TOOLS[::-1]


@pytest.mark.parametrize("choice", [None, False])
def test_no_choice_says_nothing(choice):
    """The server's default."""
    assert structured.tool_choice_members(choice, TOOLS) == {}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_the_server_knows_is_passed_on(choice):
    """As a text."""
    assert structured.tool_choice_members(choice, TOOLS) == {"tool_choice": choice}


@pytest.mark.parametrize("choice", ["weather", {"type": "function", "function": {"name": "weather"}}])
def test_a_named_tool_is_forced_by_the_schema_of_its_arguments(choice):
    """All tools stay in the prompt, none may be called."""
    members = structured.tool_choice_members(choice, TOOLS)
    assert (members["tool_choice"], members["forced_tool"]) == ("none", "weather")
    schema = members["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["place"]["type"] == "string"


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_any_tool_is_forced_by_a_choice_of_schemas(choice):
    """Each names its tool; definitions of different tools do not meet."""
    members = structured.tool_choice_members(choice, TOOLS)
    assert members["forced_tool"] == structured.ANY
    schema = members["response_format"]["json_schema"]["schema"]
    assert [form["properties"]["name"]["const"] for form in schema["anyOf"]] == ["weather", "Outer"]
    references = schema["anyOf"][1]["properties"]["arguments"]["properties"]["inner"]
    name = references["$ref"].rpartition("/")[2] if "$ref" in references else None
    assert name is None or name in schema["$defs"]
    assert structured.tool_choice_members(choice, TOOLS[:1])["forced_tool"] == "weather"


def test_definitions_of_two_tools_do_not_meet():
    """Each reference leads to the definition of its own tool."""

    def with_definition(kind):
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}, "list": [{"$ref": "#/$defs/X"}]},
            "$defs": {"X": {"type": kind}},
        }
        return {"type": "function", "function": {"name": kind, "parameters": parameters}}

    members = structured.tool_choice_members("any", [with_definition("string"), with_definition("integer")])
    schema = members["response_format"]["json_schema"]["schema"]
    assert schema["$defs"] == {"0_X": {"type": "string"}, "1_X": {"type": "integer"}}
    for number, form in enumerate(schema["anyOf"]):
        properties = form["properties"]["arguments"]["properties"]
        assert properties["x"] == {"$ref": f"#/$defs/{number}_X"}
        assert properties["list"] == [{"$ref": f"#/$defs/{number}_X"}]


def test_a_tool_that_is_not_there_is_an_error():
    """And not silently another."""
    with pytest.raises(ValueError, match="none of"):
        structured.tool_choice_members("nowhere", TOOLS)


def test_a_tool_without_arguments_can_be_forced():
    """Its arguments are an empty object."""
    bare = [{"type": "function", "function": {"name": "f"}}]
    schema = structured.tool_choice_members("f", bare)["response_format"]["json_schema"]["schema"]
    assert schema == {"type": "object", "properties": {}}


class Point(TypedDict):
    """A place."""

    x: int


JSON = {"title": "Point", "type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        Point,
        JSON,
        {"name": "Point", "schema": JSON},
        {"type": "json_schema", "json_schema": {"name": "Point", "schema": JSON}},
    ],
)
def test_a_schema_in_any_form(schema):
    """The plain JSON schema is sent."""
    wanted = structured.schema_members(schema, "json_schema", strict=True)["response_format"]
    assert wanted["json_schema"]["strict"] is True
    assert wanted["json_schema"]["name"] == "Point"
    assert wanted["json_schema"]["schema"]["properties"]["x"]["type"] == "integer"
    assert isinstance(structured.parser(schema, "json_schema", None).parse('{"x": 1}'), dict)


def test_json_without_a_schema():
    """Any object."""
    members = structured.schema_members(None, "json_mode", strict=None)
    assert members == {"response_format": {"type": "json_object"}}


def test_pydantic_classes_come_back_as_instances():
    """By either way."""
    assert structured.parser(Outer, "json_schema", None).parse('{"inner": {"depth": 1}}') == Outer(
        inner=Inner(depth=1)
    )
    call = {"name": "Outer", "args": {"inner": {"depth": 1}}, "id": "1"}
    reader = structured.parser(Outer, "function_calling", "Outer")
    assert reader.invoke(AIMessage("", tool_calls=[call])) == Outer(inner=Inner(depth=1))
    plain = structured.parser(JSON, "function_calling", "Point")
    assert plain.invoke(AIMessage("", tool_calls=[{"name": "Point", "args": {"x": 1}, "id": "1"}])) == {
        "x": 1
    }
