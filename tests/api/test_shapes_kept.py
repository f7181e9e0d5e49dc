"""Claims about ``api.shapes_kept``: the values that records, findings and saved states can have.

That answers have these shapes is seen by every test that asks a ``rig``, see ``contract``.
"""

import pytest

from polykv_proxy.api import openapi
from polykv_proxy.core.catalogue import Kind, Reason
from polykv_proxy.core.divergence import Cause
from polykv_proxy.core.outlines import Section
from polykv_proxy.core.records import RequestState
from polykv_proxy.core.volatile import VolatileKind

SCHEMAS = openapi.document()["components"]["schemas"]


@pytest.mark.parametrize(
    ("shape", "member", "values"),
    [
        ("Divergence", "cause", list(Cause)),
        ("Divergence", "section", [*Section, None]),
        ("Request", "state", list(RequestState)),
        ("SavedState", "kind", list(Kind)),
        ("Tombstone", "reason", list(Reason)),
        ("Finding", "kind", list(VolatileKind)),
    ],
)
def test_values_are_those_of_the_code(shape, member, values):
    """An enumeration that grows is told at once; null where it may be unknown."""
    assert SCHEMAS[shape]["properties"][member]["enum"] == values


def test_only_pools_have_a_place_in_a_tree():
    """What a saved conversation does not have need not be there."""
    schema = SCHEMAS["SavedState"]
    assert set(schema["properties"]) - set(schema["required"]) == {"label", "pinned", "parent"}
