"""The engine's log: rotation and reasons."""

import pytest

from polykv_proxy.engine import logfile
from polykv_proxy.engine.logfile import failure_reason, rotate

NO_BIND = """\
0.00.004.457 E srv         start: couldn't bind HTTP server socket, hostname: /x.sock
0.00.004.458 I srv    operator(): operator(): cleaning up before exit...
0.00.004.557 E srv  llama_server: exiting due to HTTP server error
"""
NO_MODEL = """\
0.00.006.211 E gguf_init_from_file: failed to open GGUF file 'm' (No such file or directory)
0.00.006.330 E llama_model_load_from_file_impl: failed to load model
0.00.006.375 E srv    load_model: failed to load model, 'm'
0.00.009.164 E srv  llama_server: exiting due to model loading error
"""


@pytest.fixture
def log(tmp_path):
    """Write a log and return its path."""

    def log(text):
        file = tmp_path / "engine-0.log"
        file.write_text(text)
        return file

    return log


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("error: invalid argument: --frob\n", "error: invalid argument: --frob"),
        (NO_BIND, "couldn't bind HTTP server socket, hostname: /x.sock"),
        (
            NO_MODEL,
            "failed to open GGUF file 'm' (No such file or directory); failed to load model, 'm'",
        ),
        ("E failed for a reason without a function\n", "failed for a reason without a function"),
        (
            "/src/llama-context.cpp:2275: GGML_ASSERT(n <= m) failed\n",
            "/src/llama-context.cpp:2275: GGML_ASSERT(n <= m) failed",
        ),
        ("0.00.002.709 I srv  llama_server: initializing ...\n\n", "initializing ..."),
        ("", None),
    ],
)
def test_reason_of_a_failed_start(log, text, reason):
    """Cause and consequence, without what every failure says."""
    assert failure_reason(log(text), 0, was_ready=False) == reason


def test_only_this_start_counts(log):
    """The log of earlier ones lies before the offset."""
    earlier = "error: old\n"
    assert failure_reason(log(earlier + "error: new\n"), len(earlier), was_ready=False) == "error: new"


def test_content_of_requests_stays_out_of_the_reason(log):
    """Once ready, the log is about requests; only a crash is looked for."""
    text = "0.01 E srv: secret prompt\nggml.c:1: GGML_ASSERT(x) failed\n0.02 E srv: secret\n"
    assert failure_reason(log(text), 0, was_ready=True) == "ggml.c:1: GGML_ASSERT(x) failed"
    assert failure_reason(log("0.00.000.001 E srv  f: secret\nlast words\n"), 0, was_ready=True) is None


def test_missing_log_gives_no_reason(tmp_path):
    """It may have been removed."""
    assert failure_reason(tmp_path / "none", 0, was_ready=False) is None


def test_large_log_is_put_aside_and_the_oldest_dropped(log, monkeypatch):
    """Three old ones are kept, the newest first."""
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 4)
    for number in range(6):
        rotate(log(f"log {number}"))
    folder = log("now").parent
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert texts == {
        "engine-0.log": "now",
        "engine-0.log.1": "log 5",
        "engine-0.log.2": "log 4",
        "engine-0.log.3": "log 3",
    }


def test_a_log_that_is_written_is_emptied_in_place(log, monkeypatch):
    """Its writer goes on in the file that it has, at its beginning; reasons are found there."""
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 40)
    file = log("")
    with file.open("ab", buffering=0) as writer:
        writer.write(b"of the first hour, and quite a lot of it\n")
        offset = file.stat().st_size
        rotate(file, in_use=True)
        writer.write(b"error: new\n")
        rotate(file, in_use=True)  # it is short
    assert {each.name: each.read_text() for each in file.parent.iterdir()} == {
        "engine-0.log": "error: new\n",
        "engine-0.log.1": "of the first hour, and quite a lot of it\n",
    }
    assert failure_reason(file, offset, was_ready=False) == "error: new"


def test_a_log_that_cannot_be_copied_is_left(log, monkeypatch):
    """A full disk: nothing is lost, nothing is left over."""
    monkeypatch.setattr(logfile, "ROTATE_BYTES", 1)
    file = log("all of it")

    def full(source, target):
        target.write_text("all")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logfile.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        rotate(file, in_use=True)
    assert {each.name: each.read_text() for each in file.parent.iterdir()} == {"engine-0.log": "all of it"}


def test_small_or_missing_log_is_left(log, tmp_path):
    """A restart appends."""
    file = log("short")
    rotate(file)
    assert file.read_text() == "short"
    rotate(tmp_path / "none.log")
