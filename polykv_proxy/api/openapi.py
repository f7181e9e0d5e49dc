"""The proxy's own routes as an OpenAPI 3.1 document.

What a route reads is made of the type that it reads, what it answers of the types in ``shapes``; which
routes there are, and how they refuse, is told in ``operations``. Tests hold it to the router, to every answer
that they get, and to the reference of errors. ``docs/reference/openapi.yaml`` is generated from it
(``python -m polykv_proxy.api.openapi > docs/reference/openapi.yaml``).
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from aiohttp import web

from polykv_proxy import __version__
from polykv_proxy.api import shapes
from polykv_proxy.api.operations import ANYWHERE, OPERATIONS, Operation, reference
from polykv_proxy.policy import AdmissionKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

    Json = dict[str, Any]

NAME_LENGTH = 72
"""Of a refusal that several routes have."""

_ABOUT = (
    "What polykv-proxy adds to llama-server's API, whose routes all pass through. Members of ours in requests"
    " and answers of the engine's routes, and what it is all for: docs/reference/http-api.md. Error codes:"
    " docs/reference/errors.md. Newer versions may add members to answers. Unknown is null."
)


# -- the document ------------------------------------------------------------------------------------------


@functools.cache
def document() -> Json:
    """All of it."""
    paths: Json = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    common = _common_refusals(paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "polykv-proxy",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": common,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-PolyKV-Admin-Key"},
            },
        },
    }


def _operation(one: Operation) -> Json:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", one.path)
    ]
    for place, given in (("query", one.query), ("header", one.headers)):
        for name, schema in given.items():
            plain = {key: value for key, value in schema.items() if key != "description"}
            described = {"description": schema["description"]} if "description" in schema else {}
            parameters.append({"name": name, "in": place, **described, "schema": plain})
    found: Json = {"operationId": one.name, "tags": [one.path.split("/")[2 if one.guarded else 1]]}
    found |= {"summary": one.says}
    if parameters:
        found["parameters"] = parameters
    if one.body is not None:
        found["requestBody"] = {"required": one.guarded, "content": _json(one.body)}
    found["responses"] = {str(status): _answer(one, status) for status in one.statuses}
    found["responses"] |= {str(status): _refusal(status, codes) for status, codes in one.codes.items()}
    if one.guarded:
        found["responses"]["default"] = _refusal(0, ANYWHERE.split())
    return found


def _answer(one: Operation, status: int) -> Json:
    content = _json(one.answer)
    if one.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "Created." if status == 201 else "Done.", "content": content}


def _refusal(status: int, codes: list[str]) -> Json:
    answer: Json = {
        "description": ", ".join(f"`{code}`" for code in codes),
        "content": _json(reference("Error")),
    }
    if status in (429, 503):
        said = {"type": "integer", "minimum": 1}
        answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": said}}
    return answer


def _common_refusals(paths: Json) -> Json:
    """Refusals that several operations have; there, references to them are left."""
    every = [one["responses"] for path in paths.values() for one in path.values()]
    times = Counter(json.dumps(answer) for answers in every for answer in answers.values())
    common: Json = {}
    for answers in every:
        for status, answer in answers.items():
            if times[json.dumps(answer)] > 1 and not status.startswith("2"):
                name = _refusal_name(status, answer)
                assert common.setdefault(name, answer) == answer, name
                answers[status] = {"$ref": f"#/components/responses/{name}"}
    return common


def _refusal_name(status: str, answer: Json) -> str:
    """Says which codes it has, at least the first of them."""
    codes = answer["description"].replace("`", "").split(", ")
    name = ".".join([status, *codes])
    return name if len(name) <= NAME_LENGTH else f"{status}.{codes[0]}.and_{len(codes) - 1}_more"


def _json(kind: Any) -> Json:
    schema = kind if isinstance(kind, dict) else reference(kind.__name__)
    return {"application/json": {"schema": schema}}


# -- types -------------------------------------------------------------------------------------------------

_ERROR = {
    "description": "An error of the proxy. `message` is for people and may change, `code` is for programs.",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
            },
            "required": ["message", "type", "code"],
            "additionalProperties": True,
        }
    },
    "required": ["error"],
}


def _schemas() -> Json:
    names = reference("{name}")["$ref"]
    given = [one.body for one in OPERATIONS] + [one.answer for one in OPERATIONS]
    kinds = [kind for kind in given if isinstance(kind, type)]
    kinds += [shapes.Properties, shapes.SlotMember, shapes.EngineHealth]
    _, found = msgspec.json.schema_components(kinds, ref_template=names)
    keys = AdmissionKeys.model_json_schema(ref_template=reference("{model}")["$ref"])
    enums = keys.pop("$defs")
    effective = keys | {"required": list(keys["properties"])}
    effective["description"] = "A policy in force."
    found |= {"Error": _ERROR, "AdmissionKeys": keys, "Effective": effective, **enums}
    return {name: _tidied(found[name]) for name in sorted(found)}


def _tidied(value: Any) -> Any:
    """The same with plain text, without titles that repeat names, and with types in a list where they can."""
    if isinstance(value, list):
        return [_tidied(each) for each in value]
    if not isinstance(value, dict):
        return " ".join(value.replace("``", "`").split()) if isinstance(value, str) else value
    value = {key: each for key, each in value.items() if key != "title" or not isinstance(each, str)}
    kinds = value.get("anyOf")
    if isinstance(kinds, list) and all(set(each) == {"type"} for each in kinds):
        rest = {key: each for key, each in value.items() if key != "anyOf"}
        value = rest | {"type": [each["type"] for each in kinds]}
    return {key: _tidied(each) for key, each in value.items()}


# -- the routes' own face ----------------------------------------------------------------------------------


def routes() -> Iterator[web.RouteDef]:
    """What the control application serves of it."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(body=_rendered())

    yield web.get("/polykv/openapi.json", show)


@functools.cache
def _rendered() -> bytes:
    return msgspec.json.encode(document())


def text() -> str:
    """The document as it stands in ``docs/reference/openapi.yaml``."""
    plain = json.loads(json.dumps(document()))  # without what stands in several places as one value
    dumped: str = yaml.safe_dump(plain, sort_keys=False, width=110, default_flow_style=None)
    return dumped


if __name__ == "__main__":
    sys.stdout.write(text())
