"""Claims about ``api.openapi``: a valid document of this version, on file and served, that holds."""

import json
from pathlib import Path

import pytest
import yaml
from openapi_spec_validator import OpenAPIV31SpecValidator

from api import contract
from api.rig import Answer
from polykv_proxy import __version__
from polykv_proxy.api import openapi

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.yaml"


def test_the_file_is_current():
    """Regenerate with ``python -m polykv_proxy.api.openapi > docs/reference/openapi.yaml``."""
    assert FILE.read_text() == openapi.text()


def test_the_document_is_openapi():
    """By the rules of 3.1, references included."""
    OpenAPIV31SpecValidator(yaml.safe_load(FILE.read_text())).validate()


async def test_the_document_is_served(rig):
    """The same one, with this version."""
    answer = await rig.ask("/polykv/openapi.json")
    assert answer.json == yaml.safe_load(FILE.read_text())
    assert answer.json["info"]["version"] == __version__


async def test_the_document_needs_the_admin_key_as_everything_there_does(proxies):
    """Where there is one."""
    rig = await proxies(admin="secret")
    assert (await rig.ask("/polykv/openapi.json")).status == 401
    assert (await rig.ask("/polykv/openapi.json", X_PolyKV_Admin_Key="secret")).status == 200


# -- the contract that all tests of the API are under -------------------------------------------------------


def answer(status, document, kind="application/json"):
    """An answer as a client has it."""
    return Answer(status, {"Content-Type": kind}, json.dumps(document).encode())


def refusal(status, code):
    """An error of ours."""
    members = {"message": "no", "type": "t", "code": code, "param": None}
    return answer(status, {"error": members})


PIN = {"pool_id": "a", "pinned": True}


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("/polykv/pools/a/pin", answer(200, PIN)),
        ("/polykv/pools/a/pin", refusal(404, "pool_not_found")),
        ("/polykv/pools/a/pin", refusal(500, "internal_error")),
        ("/polykv/none", refusal(404, "route_not_found")),
        ("/slots/0?action=erase", answer(400, {"error": {"message": "no", "type": "t", "code": 400}})),
        ("/v1/embeddings", answer(200, [])),
    ],
)
def test_what_is_as_told_passes(target, given):
    """Ours by the document, and what is the engine's business not at all."""
    contract.check("POST", target, given)


@pytest.mark.parametrize(
    ("target", "given", "what"),
    [
        ("/polykv/pools/a/pin", answer(200, PIN | {"more": 1}), "'more' was unexpected"),
        ("/polykv/pools/a/pin", answer(200, {"pool_id": "a"}), "'pinned' is a required property"),
        ("/polykv/pools/a/pin", answer(200, PIN | {"pinned": 1}), "1 is not of type 'boolean'"),
        ("/polykv/pools/a/pin", answer(202, PIN), "202 application/json is not in the document"),
        ("/polykv/pools/a/pin", answer(200, PIN, "text/plain"), "text/plain is not in the document"),
        ("/polykv/pools/a/pin", refusal(409, "pool_pinned"), "pool_pinned is not in the document"),
        ("/polykv/pools/a/pin", answer(404, {"error": {"code": "x"}}), "'message' is a required property"),
        ("/polykv/none", answer(404, {}), "'error' is a required property"),
    ],
)
def test_what_is_not_as_told_is_caught(target, given, what):
    """A member more or less, another type, status or code."""
    with pytest.raises(contract.ContractError, match=what):
        contract.check("POST", target, given)


def test_members_deep_inside_are_looked_at():
    """Also in lists, and in what other types are made of."""
    rates = dict.fromkeys(
        ("ts", "aggregate_tps", "mean_active_tps", "prefill_tps", "pressure", "compaction_pressure"), 1.0
    )
    stream = "data: " + json.dumps(rates | {"sessions": [{"engine": "e"}]}) + "\n\n"
    given = Answer(200, {"Content-Type": "text/event-stream"}, stream.encode())
    with pytest.raises(contract.ContractError, match=r"sessions\[0\]"):
        contract.check("GET", "/polykv/tps", given)


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("/slots", [{"id": 0, "opencoti": {"pool_id": None}}]),
        ("/props", {"opencoti": {"version": "1"}}),
        ("/health", {"status": "ok", "engines": [{"name": "a"}]}),
    ],
)
def test_our_members_in_the_engines_documents_are_looked_at(target, given):
    """And nothing else of those."""
    with pytest.raises(contract.ContractError, match="is a required property"):
        contract.check("GET", target, answer(200, given))
    contract.check("GET", target, Answer(200, {"Content-Type": "text/plain"}, b"the engine's own"))


def test_what_bodies_may_be_is_what_is_read():
    """The types that the routes decode with; unknown members are refused, as the document says."""
    schemas = openapi.document()["components"]["schemas"]
    for name in ("PoolRequest", "ForkRequest", "Migration", "Places", "AdmissionKeys"):
        assert schemas[name]["additionalProperties"] is False
    assert set(schemas["ForkRequest"]["properties"]) - set(schemas["PoolRequest"]["properties"]) == {
        "branch_pos"
    }
