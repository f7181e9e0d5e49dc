"""Claims about ``durable.tombstones``: what is read is what was written, or nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.catalogue import Kind, Reason, Tombstone
from polykv_proxy.core.types import Scope
from polykv_proxy.durable import tombstones

STONE = Tombstone(Kind.POOL, "p", Scope("s"), 70, Reason.DELETED, 5.5, "kv.bin", "v")
stones = st.builds(
    Tombstone,
    st.sampled_from(Kind),
    st.text(max_size=20),
    st.text(max_size=8).map(Scope),
    st.integers(0, 1 << 30),
    st.sampled_from(Reason),
    st.floats(0, 1e11),
    st.text(max_size=20),
)


@given(st.lists(stones, max_size=5))
def test_they_come_back_as_they_were(gone):
    """All of each, in order."""
    assert tombstones.read(tombstones.write(gone)) == gone


def test_every_member_is_under_the_checksum():
    """None can be changed."""
    document = json.loads(tombstones.write([STONE]))
    for name, value in document["tombstones"][0].items():
        other = {"kind": "session", "reason": "swept"}.get(name, "x" if isinstance(value, str) else value + 1)
        changed = document | {"tombstones": [document["tombstones"][0] | {name: other}]}
        with pytest.raises(tombstones.BadTombstonesError, match="changed"):
            tombstones.read(json.dumps(changed).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"version": 2}', b"\xff"])
def test_what_is_none_is_refused(raw):
    """Whatever it is."""
    with pytest.raises(tombstones.BadTombstonesError):
        tombstones.read(raw)


def test_another_version_is_refused():
    """Nobody guesses."""
    document = json.loads(tombstones.write([STONE])) | {"version": tombstones.VERSION + 1}
    with pytest.raises(tombstones.BadTombstonesError):
        tombstones.read(json.dumps(document).encode())
