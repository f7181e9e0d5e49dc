"""Claims about ``durable.store``: the old state or none after any crash, and nothing that is not believed."""

import errno
import os
from contextlib import suppress
from dataclasses import replace

import pytest

from durable.files import engine_saves, saved, state
from polykv_proxy.core.catalogue import Catalogue, Kind, Reason, Tombstone
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.durable.found import Scan
from polykv_proxy.durable.names import TOMBSTONES, sidecar_name, temporary_name
from polykv_proxy.durable.store import COMMIT_STEP, STEPS, Store, StoreError

OLD, NEW = list(range(50)), list(range(80))


class Crash(BaseException):
    """The machine stops."""


def opened(folder):
    """What a proxy that starts finds."""
    seen = Store(folder).open()
    return [list(one.state.tokens) for one in seen.found], seen.problems


def files(folder):
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_state_is_found_again(tmp_path):
    """With its file, and nothing else in the folder."""
    store = Store(tmp_path / "slots")
    assert store.open() == Scan()
    one = saved(store, state(OLD))
    seen = Store(store.folder).open()
    assert seen.problems == []
    assert [each.state for each in seen.found] == [one]
    assert files(store.folder) == sorted([one.file, sidecar_name(one)])
    assert store.check(one) is None


def test_what_is_saved_is_nobody_elses(tmp_path):
    """0600 in 0700, whatever was there before."""
    folder = tmp_path / "slots"
    folder.mkdir(mode=0o755)
    store = Store(folder)
    store.open()
    saved(store, state(OLD))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", [*STEPS, "behind it"])
def test_a_crash_at_any_step_leaves_the_old_state_or_the_new(tmp_path, step, before):
    """Old up to the commit, new from then on; never a mixture, and no litter after the next start."""
    first = Store(tmp_path)
    old = saved(first, state(OLD)) if before else None

    def crash(name):
        if name == step:
            raise Crash

    with suppress(Crash) if step == "behind it" else pytest.raises(Crash):
        saved(Store(tmp_path, crash), state(NEW))
    if before:
        assert Store(tmp_path).folder.joinpath(old.file).exists()  # somebody may read it
    committed = step not in STEPS or STEPS.index(step) > STEPS.index(COMMIT_STEP)
    expected = [NEW] if committed else [OLD] * before
    assert opened(tmp_path) == (expected, [])
    assert len(files(tmp_path)) == 2 * len(expected)
    for one in Store(tmp_path).open().found:
        assert Store(tmp_path).check(one.state) is None


@pytest.mark.parametrize("step", [step for step in STEPS if step != "sync_commit"])
def test_a_full_disk_at_any_step_is_an_error_and_no_more(tmp_path, step):
    """The old state counts, and nothing else is there."""
    saved(Store(tmp_path), state(OLD))
    before = files(tmp_path)

    def full(name):
        if name == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        saved(Store(tmp_path, full), state(NEW))
    assert files(tmp_path) == before
    assert opened(tmp_path)[0] == [OLD]


def test_a_disk_that_fails_after_the_commit_takes_nothing_back(tmp_path):
    """The sidecar names the new file by then."""
    saved(Store(tmp_path), state(OLD))

    def fails(name):
        if name == "sync_commit":
            raise OSError(errno.EIO, "Input/output error")

    one = saved(Store(tmp_path, fails), state(NEW))
    assert Store(tmp_path).check(one) is None
    assert opened(tmp_path) == ([NEW], [])


def test_what_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    """Who deleted it thinks that it is gone."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))

    def fails(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", fails)
        with pytest.raises(StoreError, match="Read-only"):
            store.delete(one)
    store.delete(one, replaced=True)
    assert files(tmp_path) == [sidecar_name(one)]


def test_what_nobody_waits_for_goes(tmp_path):
    """Slot files only, of ours, and old ones."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    late, young, known = (temporary_name(("x",)) for _ in range(3))
    for name in (late, young, known, "mine.tmp"):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (50.0, 50.0))
    os.utime(tmp_path / young, (150.0, 150.0))
    os.utime(tmp_path / one.file, (50.0, 50.0))
    before = files(tmp_path)
    assert store.litter({one.file, known}, 100.0) == 1
    assert files(tmp_path) == [name for name in before if name != late]
    with pytest.raises(StoreError):
        Store(tmp_path / "none").litter(set(), 100.0)


def test_being_written_is_no_use(tmp_path):
    """The time of a state is that of its use, also where its sidecar is written later."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    store.restate(one, used_ts=70.0, uses=0)
    assert store.open().found[0].used_ts == 70.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file_bytes": 1}, "bytes and said"),
        ({"tokens": as_tokens(range(51))}, "tokens and said"),
    ],
)
def test_what_the_engine_did_not_say_is_not_committed(tmp_path, change, says):
    """Size and count have to agree; the file goes."""
    store, draft = Store(tmp_path), state(OLD)
    name = temporary_name(draft.identity)
    size = engine_saves(tmp_path, name, OLD)
    with pytest.raises(StoreError, match=says):
        store.commit(
            replace(draft, file=name, file_bytes=size, **change)
            if "file_bytes" not in change
            else replace(draft, file=name, **change),
            used_ts=1.0,
        )
    assert files(tmp_path) == []


def test_another_slot_file_version_is_not_committed(tmp_path):
    """Nor is what is no slot file."""
    store, draft = Store(tmp_path), state(OLD)
    for at in (0, 4):
        name = temporary_name(draft.identity)
        size = engine_saves(tmp_path, name, OLD)
        raw = bytearray((tmp_path / name).read_bytes())
        raw[at] ^= 1
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(Exception, match=r"version|no slot file"):
            store.commit(replace(draft, file=name, file_bytes=size), used_ts=1.0)
    assert files(tmp_path) == []


def test_every_byte_of_the_file_is_checked_before_it_is_used(tmp_path):
    """Header, tokens and KV; cut or grown; gone."""
    store = Store(tmp_path)
    one = saved(store, state(OLD), kv=b"k" * 40)
    file, raw = tmp_path / one.file, (tmp_path / one.file).read_bytes()
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x40
        file.write_bytes(changed)
        assert store.check(one) is not None, at
    for other in (raw[:-1], raw + b"\0", b""):
        file.write_bytes(other)
        assert store.check(one) is not None
    file.write_bytes(raw)
    assert store.check(one) is None
    file.unlink()
    assert store.check(one) == "No such file or directory"


@pytest.mark.parametrize("at_token", [0, 25, 49])
def test_a_file_with_other_tokens_is_not_found(tmp_path, at_token):
    """Its sidecar says what they must be."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    raw = bytearray((tmp_path / one.file).read_bytes())
    raw[24 + 4 * at_token] ^= 1
    (tmp_path / one.file).write_bytes(raw)
    found, problems = opened(tmp_path)
    assert found == []
    assert "other tokens" in problems[0]
    assert files(tmp_path) == []


def test_a_sidecar_of_another_state_is_not_believed(tmp_path):
    """Renamed, it belongs to nobody."""
    store = Store(tmp_path)
    one, two = saved(store, state(OLD, "a")), state(NEW, "b")
    (tmp_path / sidecar_name(one)).rename(tmp_path / sidecar_name(two))
    assert opened(tmp_path)[0] == []


def test_what_is_not_ours_stays(tmp_path):
    """Whatever it looks like."""
    names = ["kv-x.bin", "mine.bin", "polykv-pool-ab-1.bin", "kv-" + "0" * 32 + ".txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    ours = "kv-" + "0" * 32 + "-" + "1" * 8 + ".tmp"
    (tmp_path / ours).write_bytes(b"x")
    store = Store(tmp_path)
    store.open()
    for name in names:
        store.discard(name)
    assert files(tmp_path) == sorted(names)


def test_looking_changes_nothing(tmp_path):
    """``scan`` is for those who only want to see."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    (tmp_path / one.file).write_bytes(b"damaged")
    before = files(tmp_path)
    assert store.scan().problems != []
    assert files(tmp_path) == before
    assert Store(tmp_path / "none").scan().found == []


def test_when_a_state_was_last_used_is_kept(tmp_path):
    """By the time of its sidecar."""
    store = Store(tmp_path)
    entry = Catalogue().add(saved(store, state(OLD)), used_ts=100.0)
    os.utime(tmp_path / sidecar_name(entry.state), (50.0, 50.0))
    assert store.open().found[0].used_ts == 100.0
    entry.used_ts = 5000.0
    store.touch(entry)
    assert store.open().found[0].used_ts == 5000.0


def test_what_is_said_of_a_state_can_change(tmp_path):
    """Its KV stays."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    store.restate(replace(one, created_ts=1.0), used_ts=7.0, uses=4)
    found = store.open().found[0]
    assert (found.state.created_ts, found.uses) == (1.0, 4)


def test_a_deleted_state_is_gone(tmp_path):
    """Both of its files; again is no error."""
    store = Store(tmp_path)
    one = saved(store, state(OLD))
    store.delete(one)
    store.delete(one)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_used_says_why(tmp_path):
    """A file stands in its place."""
    (tmp_path / "slots").write_bytes(b"")
    store = Store(tmp_path / "slots")
    with pytest.raises(StoreError, match=r"exists|directory"):
        store.open()
    assert Store(tmp_path / "none" / "none").free_bytes() is None


@pytest.mark.parametrize("what", ["sidecar", "file", "head"])
def test_what_cannot_be_read_now_is_left_alone(tmp_path, what, monkeypatch):
    """Too many files are open, or the disk is slow to come back: at the next start all is there."""
    one = saved(Store(tmp_path), state(OLD))
    other = saved(Store(tmp_path), state(NEW, key="other"))
    before = files(tmp_path)

    def fails(name):
        was = getattr(type(tmp_path), name)

        def method(path, *more, **named):
            if path.name == (sidecar_name(one) if what == "sidecar" else one.file):
                raise OSError(errno.EMFILE, "Too many open files")
            return was(path, *more, **named)

        return method

    with monkeypatch.context() as patch:
        name = {"sidecar": "read_bytes", "file": "stat", "head": "open"}[what]
        patch.setattr(type(tmp_path), name, fails(name))
        seen = Store(tmp_path).open()
    assert [each.state for each in seen.found] == [other]
    assert "Too many open files" in seen.problems[0]
    assert seen.wrong == []
    assert files(tmp_path) == before
    assert len(opened(tmp_path)[0]) == 2
    (tmp_path / one.file).unlink()
    assert len(opened(tmp_path)[0]) == 1
    assert sidecar_name(one) not in files(tmp_path)  # what is gone is no reason to wait


def test_whose_file_was_damaged_is_known(tmp_path):
    """Where its sidecar tells; a sidecar that was changed tells nothing."""
    one, two, three = (saved(Store(tmp_path), state(OLD, key=key)) for key in "abc")
    (tmp_path / one.file).unlink()
    (tmp_path / two.file).write_bytes(b"x")
    (tmp_path / sidecar_name(three)).write_bytes(b"{}")
    seen = Store(tmp_path).open()
    assert {told.key for told in seen.wrong} == {"a", "b"}
    assert len(seen.problems) == 3
    assert files(tmp_path) == []


def test_why_states_are_gone_is_kept(tmp_path):
    """In order, for nobody else to read; what is broken tells nothing, a disk that refuses is no error."""
    gone = [
        Tombstone(Kind.SESSION, key, Scope("s"), 70, Reason.SWEPT, 5.0, f"{key}.bin") for key in ("b", "a")
    ]
    store = Store(tmp_path)
    assert store.tombstones() == []
    assert store.keep_tombstones(gone)
    assert Store(tmp_path).tombstones() == gone
    assert (tmp_path / TOMBSTONES).stat().st_mode & 0o777 == 0o600
    assert store.open() == Scan()
    assert files(tmp_path) == [TOMBSTONES]
    raw = (tmp_path / TOMBSTONES).read_bytes()
    (tmp_path / TOMBSTONES).write_bytes(raw[:-9])
    assert store.tombstones() == []
    assert not Store(tmp_path / "none").keep_tombstones(gone)
