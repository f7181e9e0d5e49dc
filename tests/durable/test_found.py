"""Claims about ``durable.found``: nothing is believed that is not what was saved."""

import errno
from dataclasses import replace

import pytest

from durable.files import saved, state
from polykv_proxy.durable import sidecar
from polykv_proxy.durable.found import Scan, digest_of, look, read, tells, what_is_wrong
from polykv_proxy.durable.names import sidecar_name
from polykv_proxy.durable.sidecar import BadSidecarError
from polykv_proxy.durable.store import Store
from polykv_proxy.engine.slotfile import UnreadableError
from polykv_proxy.errors import UnavailableError

TOKENS = list(range(50))


@pytest.fixture
def one(tmp_path):
    """A saved state."""
    return saved(Store(tmp_path), state(TOKENS))


def files(folder):
    """Names and bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def refused(folder, name):
    """Why a state is not believed."""
    with pytest.raises((BadSidecarError, UnavailableError)) as caught:
        read(folder, name)
    return str(caught.value)


def test_a_state_is_read_with_its_use(tmp_path, one):
    """By the later of what its sidecar says and the time of that file."""
    found = read(tmp_path, sidecar_name(one))
    assert (found.state, found.used_ts, found.uses) == (one, 100.0, 0)
    assert what_is_wrong(tmp_path / one.file, one) is None
    assert digest_of(tmp_path / one.file) == one.file_digest


def test_a_file_that_was_changed_is_not_believed(tmp_path, one):
    """Another length, other tokens; the KV behind them is looked at before each use."""
    name, file = sidecar_name(one), tmp_path / one.file
    raw = file.read_bytes()
    file.write_bytes(raw + b"!")
    assert "not as long" in refused(tmp_path, name)
    assert what_is_wrong(file, one) == "it is not as long as it was saved"
    changed = bytearray(raw)
    changed[24] ^= 1
    file.write_bytes(changed)
    assert "other tokens" in refused(tmp_path, name)
    assert what_is_wrong(file, one) == "it holds other tokens"
    file.write_bytes(raw[:-1] + b"!")
    assert read(tmp_path, name).state == one
    assert what_is_wrong(file, one) == "its digest is wrong"
    changed = bytearray(raw)
    changed[4] ^= 1
    file.write_bytes(changed)
    assert what_is_wrong(file, one) == "it has another version"


def test_a_sidecar_that_names_what_is_not_ours_is_not_believed(tmp_path, one):
    """It could be any file of this host."""
    name = sidecar_name(one)
    (tmp_path / name).write_bytes(sidecar.write(replace(one, file="../passwd"), used_ts=0.0, uses=0))
    assert "not ours" in refused(tmp_path, name)


def test_a_sidecar_under_another_name_is_not_believed(tmp_path, one):
    """It would take another state's place."""
    other = sidecar_name(state(TOKENS, "other"))
    (tmp_path / sidecar_name(one)).rename(tmp_path / other)
    assert "another name" in refused(tmp_path, other)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), True),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (UnreadableError(OSError(errno.EIO, "Input/output error")), False),
        (BadSidecarError("changed"), True),
        (UnavailableError("no slot file"), True),
    ],
)
def test_what_cannot_be_read_now_says_nothing(error, told):
    """Of what it is; a file that is gone does."""
    assert tells(error) is told


def test_a_look_changes_nothing_and_tells_the_wrong_from_the_unread(tmp_path, one, monkeypatch):
    """The oldest first; of those that are wrong what their sidecars say, of the unread their names."""
    newer = saved(Store(tmp_path), replace(state(TOKENS, "newer"), created_ts=200.0))
    damaged, unread = (saved(Store(tmp_path), state(TOKENS, key)) for key in ("damaged", "unread"))
    (tmp_path / damaged.file).write_bytes(b"x")
    before = files(tmp_path)
    open_file = type(tmp_path).open

    def fails(path, *more, **named):
        if path.name == unread.file:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", fails)
        seen = look(tmp_path, sorted(before))
    assert [each.state for each in seen.found] == [one, newer]
    assert [told.key for told in seen.wrong] == ["damaged"]
    assert seen.unread == {sidecar_name(unread).removesuffix(".json")}
    assert len(seen.problems) == 2
    assert files(tmp_path) == before
    assert look(tmp_path, []) == Scan()
