"""Claims about ``durable.sidecar``: a state comes back as it was, or not at all."""

import json

import pytest

from durable.files import state
from polykv_proxy.core.catalogue import Kind, PoolRecord
from polykv_proxy.core.types import PoolId, as_tokens
from polykv_proxy.durable import sidecar
from polykv_proxy.durable.sidecar import BadSidecarError

POOL = PoolRecord(
    pool_id=PoolId("p"), origin="auto", label="l", pinned=True, ttl_s=5.0, parent=PoolId("q"), branch_pos=3
)
STATE = state(range(9), file="kv.bin", file_bytes=77, file_digest="dd")


@pytest.mark.parametrize("given", [STATE, state(range(4), "p", kind=Kind.POOL, pool=POOL, config={})])
def test_a_state_comes_back_as_it_was(given):
    """With what is known of its use."""
    document = sidecar.read(sidecar.write(given, used_ts=12.5, uses=3))
    assert sidecar.state_of(document, given.tokens) == given
    assert (document.used_ts, document.uses) == (12.5, 3)


def test_other_tokens_are_refused():
    """One more, one less, one changed."""
    document = sidecar.read(sidecar.write(STATE, used_ts=1.0, uses=0))
    for tokens in (range(8), range(10), [*range(8), 9]):
        with pytest.raises(BadSidecarError, match="other tokens"):
            sidecar.state_of(document, as_tokens(tokens))


def test_every_member_is_under_the_checksum():
    """Changed, left out or added: refused."""
    whole = json.loads(sidecar.write(STATE, used_ts=1.0, uses=0))
    for name, value in whole.items():
        changed = {
            int: lambda v: v + 1,
            float: lambda v: v + 1.0,
            str: lambda v: f"{v}x",
            dict: lambda v: v | {"system": "other"},
            type(None): lambda _: {},
        }[type(value)](value)
        for broken in ({**whole, name: changed}, {k: v for k, v in whole.items() if k != name}):
            with pytest.raises(BadSidecarError):
                sidecar.read(json.dumps(broken).encode())
    with pytest.raises(BadSidecarError):
        sidecar.read(json.dumps({**whole, "more": 1}).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff"])
def test_what_is_none_is_refused(raw):
    """Whatever it is."""
    with pytest.raises(BadSidecarError):
        sidecar.read(raw)


@pytest.mark.parametrize(
    ("member", "value", "says"),
    [("version", 2, "version 2"), ("state_version", 5, "version 5"), ("kind", "slot", "unknown kind")],
)
def test_another_version_is_refused_with_a_right_checksum(member, value, says):
    """It was written by another proxy or for another engine."""
    document = sidecar.read(sidecar.write(STATE, used_ts=1.0, uses=0))
    setattr(document, member, value)
    document.checksum = sidecar._checksum(document)
    with pytest.raises(BadSidecarError, match=says):
        sidecar.read(sidecar.msgspec.json.encode(document))
