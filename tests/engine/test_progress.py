"""What is shown while a build runs."""

import io

from polykv_proxy.engine.progress import Progress


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self):
        """Yes."""
        return True


class Clock:
    """Seconds that a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        """The time."""
        return self.now


def test_sparse_lines_where_nobody_watches():
    """One line in half a minute, and the last one always."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, clock)
    progress.begin("building")
    for done in range(1, 101):
        clock.now = done * 3.0
        progress.count(done, 100)
    progress.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == "building"
    assert lines[1] == "[10/100] 30s elapsed, about 4m30s left"
    assert lines[-1] == "[100/100] 5m00s elapsed"
    assert len(lines) == 11


def test_no_estimate_where_steps_differ():
    """What the first ones took says nothing about the rest."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, clock, estimates=False)
    progress.begin("answers")
    clock.now = 30.0
    progress.count(50, 100)
    assert out.getvalue().splitlines()[1] == "[50/100] 30s elapsed"


def test_one_moving_line_on_a_terminal():
    """It is redrawn in place and left standing at the end."""
    out, clock = Terminal(), Clock()
    progress = Progress(out, clock)
    progress.begin("building")
    for done in (1, 5, 10):
        clock.now += 1
        progress.count(done, 10)
    progress.end()
    assert out.getvalue().split("\r") == [
        "building\n",
        "[1/10] 1s elapsed",
        "[5/10] 2s elapsed, about 2s left",
        "[10/10] 3s elapsed".ljust(len("[5/10] 2s elapsed, about 2s left")) + "\n",
    ]


def test_moving_line_is_not_redrawn_for_every_step():
    """Hundreds of quick steps are no reason to flicker."""
    out = Terminal()
    progress = Progress(out, Clock())
    progress.begin("building")
    for done in range(1, 100):
        progress.count(done, 100)
    assert "\r" not in out.getvalue()


def test_note_interrupts_the_moving_line_cleanly():
    """The line is wiped first."""
    out, clock = Terminal(), Clock()
    progress = Progress(out, clock)
    progress.begin("building")
    clock.now = 1.0
    progress.count(1, 9)
    progress.note("something happened")
    assert out.getvalue().endswith("\r" + " " * len("[1/9] 1s elapsed") + "\rsomething happened\n")
