"""Fetching pinned files, and what pip's complaints mean."""

import errno
import hashlib
import os

import pytest

from polykv_proxy.engine import download
from polykv_proxy.errors import BuildError

REQUIREMENT = "tiny-engine==1.0"


@pytest.fixture
def sha256(world):
    """The pin of that file."""
    return hashlib.sha256(world.archive.read_bytes()).hexdigest()


def test_fetched_file_is_kept_under_its_hash(world, sha256):
    """Later calls need no index."""
    file = download.fetch(REQUIREMENT, sha256, world.cache)
    assert file == world.cache / sha256 / world.archive.name
    world.archive.unlink()
    assert download.fetch(REQUIREMENT, sha256, world.cache) == file
    assert sorted(path.name for path in world.cache.iterdir()) == [sha256]


def test_kept_file_that_was_damaged_is_fetched_again(world, sha256):
    """The hash is checked on every use."""
    file = download.fetch(REQUIREMENT, sha256, world.cache)
    file.write_bytes(b"damaged")
    assert download.file_sha256(download.fetch(REQUIREMENT, sha256, world.cache)) == sha256


def test_wrong_file_is_refused_before_its_code_runs(world):
    """The build backend of an sdist is code; pip must not reach it."""
    with pytest.raises(BuildError, match="not the pinned file"):
        download.fetch(REQUIREMENT, "0" * 64, world.cache)
    assert list(world.cache.rglob("*.gz")) == []


def test_hash_is_checked_by_us_too(world, sha256, monkeypatch):
    """Whatever pip let through."""
    monkeypatch.setattr(download, "_pip_download", lambda *_: world.archive.rename(world.folder / "other"))
    (world.archive).write_bytes(b"other")
    with pytest.raises(BuildError, match="expected"):
        download.fetch(REQUIREMENT, sha256, world.cache)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution",
            "cannot be reached; check",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found",
            "no such file or cannot be reached",
        ),
        ("/usr/bin/python: No module named pip", "this Python has no pip; install it with"),
        (
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            "the disk is full; free some space",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n   Got        " + "a" * 64, "sha256 " + "a" * 64),
        ("x\nERROR: something new\n", "pip download failed: something new"),
        ("", "pip download failed: no output"),
    ],
)
def test_pips_complaints_in_one_line(output, message):
    """Each with what to do about it, where something can be done."""
    text = download._why_pip_failed("x==1", output)
    assert text.startswith("x==1: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_says_what_to_do(tmp_path, number):
    """A quota is a disk too."""
    error = OSError(number, os.strerror(number))
    assert (
        "is full; free some space or set POLYKV_CACHE_DIR" in download.storage_error(error, tmp_path).message
    )
    other = OSError(errno.EACCES, os.strerror(errno.EACCES), "/x")
    assert download.storage_error(other, tmp_path).message == "/x: Permission denied"
