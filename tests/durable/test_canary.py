"""Claims about ``durable.canary``: what does not go on from a file is found out before anybody needs it."""

import pytest

from durable.files import PAIRS, gguf_bytes


def reason(rig):
    """Why nothing is saved."""
    return rig.durable.shelf.reason


async def test_an_engine_that_goes_on_passes(proxies):
    """And keeps nothing of it."""
    rig = await proxies(slots=2)
    assert reason(rig) is None
    assert rig.engine.used == 0
    assert list(rig.engine.folder.iterdir()) == []


def windowed(fake):
    """It forgets what is beyond its window."""
    fake.window = 100
    fake.model_file.write_bytes(gguf_bytes([*PAIRS, ("gemma2.attention.sliding_window", 100)]))


def too_long(fake):
    """Its window is longer than its context."""
    fake.model_file.write_bytes(gguf_bytes([*PAIRS, ("gemma2.attention.sliding_window", 4096)]))


def recurrent(fake):
    """Nothing comes back."""
    fake.window = 0


def newer(fake):
    """It writes another format."""
    fake.version = 5


def full(fake):
    """Its disk is full."""
    fake.full = True


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (windowed, "reused 100 of"),
        (too_long, "too short to try a window of 4096"),
        (recurrent, "reused 0 of"),
        (newer, "version 5"),
        (full, "Unable to save"),
    ],
)
async def test_an_engine_that_does_not_is_served_without(proxies, prepare, says):
    """The reason is in ``/props``."""
    rig = await proxies(prepare=prepare)
    assert says in reason(rig)
    props = (await rig.ask("/props")).json["opencoti"]["durable_kv"]
    assert props["state"] == "off"
    assert says in props["reason"]
    assert list(rig.engine.folder.iterdir()) == []
    assert (await rig.ask("/v1/completions", {"prompt": "x" * 100})).status == 200
