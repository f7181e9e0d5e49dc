"""The OpenAPI document as a contract: an answer of ours is what the document says it is, and no more.

The document lets newer versions add members; here every member that it does not name is an error.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator

from polykv_proxy.api import openapi

if TYPE_CHECKING:
    from api.rig import Answer

Json = dict[str, Any]


class ContractError(AssertionError):
    """An answer that the document does not have."""


def check(method: str, target: str, answer: Answer) -> None:
    """Hold an answer to the document; routes that are the engine's alone are none of its business.

    Raises:
        ContractError: it is something else.
    """
    raw = target.partition("?")[0]
    path = unquote(raw)
    found = _operation(method.lower(), raw) or _operation(method.lower(), path)
    if method in ("HEAD", "OPTIONS") or not (found or path.startswith("/polykv")):
        return
    if not path.startswith("/polykv") and not _is_ours(answer):
        return
    where = f"{method} {target}: {answer.status}"
    if found is None:
        _require(where, _schema("Error"), answer.json)
        return
    if answer.status < 400:
        kinds = found["responses"].get(str(answer.status), {"content": {}})["content"]
        kind = answer.headers["Content-Type"].partition(";")[0]
        if kind not in kinds:
            raise ContractError(f"{where} {kind} is not in the document")
        if kind == "application/json":
            _require(where, kinds[kind]["schema"], answer.json)
        else:
            for _, event in answer.events:
                _require(where, kinds["application/json"]["schema"], event)
        return
    _require(where, _schema("Error"), answer.json)
    code = answer.json["error"]["code"]
    if code not in codes_of(found, str(answer.status)) | codes_of(found, "default"):
        raise ContractError(f"{where} {code} is not in the document")


def _is_ours(answer: Answer) -> bool:
    """Whether an answer on one of the engine's routes is the proxy's, or has a member of its."""
    if answer.status < 400:
        return b'"opencoti"' in answer.body or b'"engines"' in answer.body
    try:
        return isinstance(answer.json["error"]["code"], str)
    except (ValueError, TypeError, KeyError):
        return False


def codes_of(operation: Json, status: str) -> set[str]:
    """The codes that the document has for a status of an operation."""
    answer = operation["responses"].get(status, {})
    if reference := answer.get("$ref"):
        answer = openapi.document()["components"]["responses"][reference.rpartition("/")[2]]
    return set(re.findall(r"`(\w+)`", answer.get("description", "")))


@functools.cache
def _templates() -> list[tuple[re.Pattern[str], Json]]:
    """Paths as patterns, those without parameters first."""
    paths = sorted(openapi.document()["paths"].items(), key=lambda each: "{" in each[0])
    return [
        (re.compile(re.sub(r"\{key\}", ".+", re.sub(r"\{(?!key)\w+\}", "[^/]+", path))), operations)
        for path, operations in paths
    ]


def _operation(method: str, path: str) -> Json | None:
    for pattern, operations in _templates():
        if pattern.fullmatch(path) and method in operations:
            return operations[method]
    return None


def _schema(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


@functools.cache
def _components() -> Json:
    return closed(openapi.document()["components"])


def closed(value: Any) -> Any:
    """A schema whose objects have no members but those that they name."""
    if isinstance(value, list):
        return [closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    inside = {key: closed(each) for key, each in value.items()}
    if isinstance(value.get("properties"), dict) and value.get("type") == "object":
        inside.setdefault("additionalProperties", False)
    return inside


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**closed(json.loads(schema)), "components": _components()})


def _require(where: str, schema: Json, document: Any) -> None:
    for error in _validator(json.dumps(schema)).iter_errors(document):
        raise ContractError(f"{where} at {error.json_path}: {error.message}")
