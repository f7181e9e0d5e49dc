"""Running build steps."""

import io
import os
import sys

import pytest

from polykv_proxy.engine.shell import run_logged


def test_output_goes_to_the_log_and_line_by_line_to_the_caller():
    """Both streams, in order, after the command itself."""
    log, lines = io.StringIO(), []
    code = "import sys; print('a', flush=True); print('b', file=sys.stderr, flush=True); sys.exit(3)"
    assert run_logged([sys.executable, "-c", code], log, on_line=lines.append) == 3
    assert lines == ["a", "b"]
    assert log.getvalue() == f"$ {sys.executable} -c {code}\na\nb\n"


def test_output_that_is_no_text_passes():
    """Compilers quote what they find."""
    log = io.StringIO()
    run_logged([sys.executable, "-c", r"import os; os.write(1, b'\xff\n')"], log)
    assert log.getvalue().endswith("\ufffd\n")


def test_input_is_empty():
    """No step may wait for somebody to type."""
    assert run_logged([sys.executable, "-c", "input()"], io.StringIO()) == 1


def test_interrupted_step_is_ended_and_waited_for():
    """An exception in the middle leaves no process behind."""
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_logged([sys.executable, "-c", code], io.StringIO(), on_line=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_program_that_does_not_exist():
    """The caller says what it was for."""
    with pytest.raises(FileNotFoundError):
        run_logged(["/nonexistent"], io.StringIO())
