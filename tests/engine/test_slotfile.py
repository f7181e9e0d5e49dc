"""Claims about ``engine.slotfile``: the tokens of a file, or a clear no."""

import io
import struct

import pytest
from fake_stock import slot_file

from polykv_proxy.core.types import as_tokens
from polykv_proxy.engine import slotfile
from polykv_proxy.errors import UnavailableError

RECORDED = bytes.fromhex("71736767 04000000 06000000 ffffffff 01000000 02000000 f8010000 65020000 00000000")
"""The head of a file that the pinned engine wrote, cut to two tokens; the last word is padding."""


def test_tokens_of_a_recorded_file():
    """Head, tokens, padding; the KV behind them is not looked at."""
    assert slotfile.read_tokens(io.BytesIO(RECORDED + b"kv" * 50)) == as_tokens([504, 613])


def test_an_older_file_is_a_bare_list():
    """Without the words in front."""
    raw = struct.pack("<4sII2i", b"qsgg", 3, 2, 504, 613)
    assert slotfile.read_tokens(io.BytesIO(raw)) == as_tokens([504, 613])


def test_a_file_is_read_from_disk(tmp_path):
    """As many tokens as it says."""
    path = tmp_path / "f"
    path.write_bytes(slot_file(list(range(1000))))
    assert slotfile.read_file(path) == as_tokens(range(1000))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "no slot file"),
        (b"GGUF" + RECORDED[4:], "no slot file"),
        (RECORDED[:20], "ends within"),
        (RECORDED[:12] + RECORDED[12:20] + b"\x09\0\0\0" + RECORDED[24:], "ends within"),
        (struct.pack("<4sII", b"qsgg", 4, 1 << 30), "ends within"),
        (struct.pack("<4sII", b"qsgg", 4, 0), "ends within"),
        (slot_file([1, -1, 2]), "media"),
    ],
)
def test_what_is_no_such_file_is_refused(raw, says):
    """Truncated, foreign, or with tokens that are none."""
    with pytest.raises(UnavailableError, match=says):
        slotfile.read_tokens(io.BytesIO(raw))


def test_a_missing_file_is_refused(tmp_path):
    """With the system's reason."""
    with pytest.raises(UnavailableError, match="No such file"):
        slotfile.read_file(tmp_path / "none")


def test_the_version_of_a_file(tmp_path):
    """Whatever it is; what is no slot file has none."""
    path = tmp_path / "f"
    path.write_bytes(slot_file([1, 2], version=7))
    assert slotfile.read_version(path) == 7
    path.write_bytes(RECORDED)
    assert slotfile.read_version(path) == slotfile.STATE_VERSION
    path.write_bytes(b"qsgg")
    with pytest.raises(UnavailableError, match="no slot file"):
        slotfile.read_version(path)
    with pytest.raises(UnavailableError, match="No such file"):
        slotfile.read_version(tmp_path / "none")
