"""The settings as documents for people, made of their names, types, defaults and docstrings. Pure.

``config/polykv.yaml`` and ``docs/reference/configuration.md`` are generated from this file, as the schemas
are from ``config`` and ``policy``; tests hold them to it::

    python -m polykv_proxy.reference example > config/polykv.yaml
    python -m polykv_proxy.reference configuration > docs/reference/configuration.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import yaml

from polykv_proxy.policy import PolicyDocument
from polykv_proxy.settings import ENV_PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 108
"""Columns of the example."""

_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_tokens": "tokens"}
"""What the end of a key's name says about its number."""
_TYPES = {
    "boolean": "`true` or `false`",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "array": "list",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_SIZES = {1024**3: "GiB", 1024**2: "MiB"}

_EXAMPLE_HEAD = """\
# polykv-proxy: every key, its unit and its default. Copy what you change; a key that is left out keeps
# its default, an unknown one is refused. Environment variables win over this file
# (POLYKV_LISTEN, POLYKV_ENGINE__PARALLEL, lists as JSON), the command line wins over both.
# Use it with `polykv-proxy serve --config FILE`; `polykv-proxy config show` prints what is in force.
# An editor that knows JSON Schema checks this file with config/schema.json.
# Made of the settings' own words; docs/reference/configuration.md has the same as tables.
"""

_REFERENCE_HEAD = """\
# Configuration

Every key of the configuration file and of policy files. Made of the code's own words by
`python -m polykv_proxy.reference`; a test holds it to them. The same as files to copy from:
[polykv.yaml](../../config/polykv.yaml) and the [policies](../../config/policies).

A key comes from the command line, else from its environment variable, else from the file that `--config` or
`POLYKV_CONFIG` names, else it has its default. In variables, lists and mappings are written as JSON. Unknown
keys and unknown `POLYKV_` variables are refused. `polykv-proxy config show` prints what is in force. Unset is
`null` in a file. Editors check files with the schemas beside them.
"""

_POLICY_HEAD = """\
## Policy files

`policy_file` names one; it is read again when it changes and on SIGHUP. The log says what came of that:
`policy_changed`, `policy_refused` or, after SIGHUP, `policy_unchanged`. `polykv-proxy policy check FILE` says
what it puts in force, and warns where an enforced policy judges nobody. The keys of `default` are also those
of `POST /polykv/pools/{id}/admission`, and of each name under `models` and `labels`. What they do:
[keep a floor](../how-to/keep-a-floor.md).
"""

Property = dict[str, Any]
"""What a schema says of one key."""


# -- the example -------------------------------------------------------------------------------------------


def example() -> str:
    """The configuration file with every key at its default, each with its description above it."""
    schema = Settings.model_json_schema()
    parts = [_EXAMPLE_HEAD]
    for key, entry in schema["properties"].items():
        section = _section(schema, entry)
        if section is None:
            parts.append("".join(_commented(key, entry, "")))
            continue
        lines = [*_comment(section["description"], ""), f"{key}:\n"]
        for name, each in section["properties"].items():
            lines += _commented(name, each, "  ")
        parts.append("".join(lines))
    return "\n".join(parts)


def _commented(key: str, entry: Property, indent: str) -> Iterator[str]:
    yield from _comment(entry["description"], indent)
    if unnamed := [each for each in entry.get("enum", ()) if each not in entry["description"]]:
        yield from _comment(f"One of {', '.join(unnamed)}.", indent)
    for sample in entry.get("examples", ()):
        if any(isinstance(item, dict) for item in sample):
            dumped = yaml.safe_dump(sample, default_flow_style=None, sort_keys=False)
            yield from (f"{indent}#   {line}\n" for line in dumped.splitlines())
        else:
            yield from _comment(f"Such as {_flow(sample)}.", indent)
    value = _default(entry)
    size = _size(value)
    yield f"{indent}{key}: {_flow(value)}{f'  # {size}' if size else ''}\n"


def _comment(text: str, indent: str) -> Iterator[str]:
    plain = text.replace("``", "").replace("Unset:", "null:")
    for line in textwrap.wrap(plain, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False):
        yield f"{indent}# {line}\n"


def _flow(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _size(value: Any) -> str | None:
    """A round number of bytes, in words."""
    if isinstance(value, int) and value >= 1024**2:
        for unit, name in _SIZES.items():
            if value % unit == 0:
                return f"{value // unit} {name}"
    return None


# -- the reference -----------------------------------------------------------------------------------------


def configuration() -> str:
    """All keys as tables, section by section."""
    schema = Settings.model_json_schema()
    items = schema["properties"].items()
    plain = {key: entry for key, entry in items if _section(schema, entry) is None}
    parts = [_REFERENCE_HEAD, "## Keys without a section\n", _table(plain, ENV_PREFIX)]
    for key, entry in items:
        section = _section(schema, entry)
        if section is not None:
            parts += [f"## `{key}`\n", _prose(section["description"]) + "\n"]
            parts.append(_table(section["properties"], f"{ENV_PREFIX}{key.upper()}__"))
    one, common = schema["$defs"]["NamedEngine"], schema["$defs"]["EngineSettings"]["properties"]
    own = {key: entry for key, entry in one["properties"].items() if key not in common}
    parts += ["## An item of `engines`\n", _prose(one["description"]) + "\n", _table(own, None)]
    return "\n".join([*parts, _POLICY_HEAD, *_policies()])


def _policies() -> Iterator[str]:
    schema = PolicyDocument.model_json_schema()
    for key, entry in schema["properties"].items():
        section = _section(schema, entry)
        yield f"### `{key}`\n"
        yield _prose(entry["description"]) + "\n"
        if section is not None:
            yield _table(section["properties"], None, schema)


def _table(entries: dict[str, Property], prefix: str | None, schema: Property | None = None) -> str:
    columns = ["key", "type", "default", "meaning"]
    if prefix is not None:
        columns.insert(3, "variable")
    rows = [columns, ["---"] * len(columns)]
    for key, entry in entries.items():
        row = [f"`{key}`", _kind(key, entry, schema or {}), _shown(_default(entry)), _meaning(entry)]
        if prefix is not None:
            row.insert(3, f"`{prefix}{key.upper()}`")
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _kind(key: str, entry: Property, schema: Property) -> str:
    """Type, unit and bounds."""
    choices = [each for each in entry.get("anyOf", [entry]) if each.get("type") != "null"]
    (kind,) = (_resolved(schema, each) for each in choices)
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    words = _TYPES[kind["type"]]
    if kind["type"] in ("integer", "number"):
        words = next((unit for end, unit in _UNITS.items() if key.endswith(end)), words)
    if kind.get("format") == "path":
        words = "path"
    if kind.get("format") == "password":
        words = "text, secret"
    bounds = [f"{said} {kind[name]}" for name, said in _BOUNDS.items() if name in kind]
    return ", ".join([words, *bounds])


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    size = _size(value)
    return f"`{_flow(value)}`" + (f" ({size})" if size else "")


def _meaning(entry: Property) -> str:
    said = _prose(entry["description"])
    samples = [f"Such as `{_flow(sample)}`." for sample in entry.get("examples", ())]
    return " ".join([said, *samples]).replace("|", "\\|")


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


# -- what a schema says ------------------------------------------------------------------------------------


def _section(schema: Property, entry: Property) -> Property | None:
    """What a key leads to if that is a section, not a value."""
    found = _resolved(schema, entry)
    return found if "properties" in found else None


def _default(entry: Property) -> Any:
    """The default; one that a factory makes is not told, and ours make empty mappings."""
    return entry.get("default", {})


def _resolved(schema: Property, entry: Property) -> Property:
    name = re.fullmatch(r"#/\$defs/(\w+)", entry.get("$ref", ""))
    found: Property = schema["$defs"][name[1]] if name else entry
    return found


DOCUMENTS = {"example": example, "configuration": configuration}

if __name__ == "__main__":
    sys.stdout.write(DOCUMENTS[sys.argv[1]]())
