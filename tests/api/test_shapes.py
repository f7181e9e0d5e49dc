"""Claims about ``api.shapes``: each is told whole, with the values that the code knows.

That answers have these shapes is seen by every test that asks a ``rig``, see ``contract``.
"""

import inspect
from typing import NotRequired, get_origin, get_type_hints

import pytest

from polykv_proxy.api import openapi, shapes, shapes_kept
from polykv_proxy.core.types import PoolState
from polykv_proxy.engine.state import EngineState

SCHEMAS = openapi.document()["components"]["schemas"]
KINDS = {
    name: kind
    for module in (shapes, shapes_kept)
    for name, kind in inspect.getmembers(module, inspect.isclass)
    if hasattr(kind, "__required_keys__") and not name.startswith("_")
}
PARTS = {"Figures", "PoolFiles"}
"""What others are made of; never an answer by itself."""


@pytest.mark.parametrize("name", sorted(set(KINDS) - PARTS))
def test_a_shape_is_in_the_document(name):
    """With all its members, those that are always there marked, and a sentence about it."""
    schema, members = SCHEMAS[name], get_type_hints(KINDS[name], include_extras=True)
    assert set(schema["properties"]) == set(members)
    assert set(schema["required"]) == {
        member for member, kind in members.items() if get_origin(kind) is not NotRequired
    }
    assert schema["description"].endswith(".")


def test_values_are_those_of_the_code():
    """An enumeration that grows is told at once; null where it may be unknown."""
    assert SCHEMAS["Pool"]["properties"]["residency"]["enum"] == list(PoolState)
    assert SCHEMAS["EngineHealth"]["properties"]["state"]["enum"] == [*EngineState, None]
