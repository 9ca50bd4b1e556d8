"""How far a run is and how long it still takes, by a clock of the test's own."""

from __future__ import annotations

import io

import pytest

from bench.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_left_counts_rows_and_starts(clock: Clock) -> None:
    progress = Progress({"a": 2, "b": 3}, clock)
    progress.start("a")
    clock.now += 20
    progress.ready()
    clock.now += 1
    # 4 rows of 1 s, and a start of 20 s.
    assert progress.row() == "[1/5 21 s, 0:24 left]"
    clock.now += 3
    assert progress.row() == "[2/5 24 s, 0:26 left]"
    progress.start("b")
    clock.now += 40
    assert progress.left == pytest.approx(3 * 2)
    progress.ready()
    for _ in range(3):
        clock.now += 2
        last = progress.row()
    assert last == "[5/5 70 s, 0:00 left]"


def test_rows_that_never_came_are_not_waited_for(clock: Clock) -> None:
    progress = Progress({"a": 100, "b": 1}, clock)
    progress.start("a")  # which stops
    progress.start("b")
    progress.ready()
    clock.now += 90
    assert progress.row() == "[101/101 90 s, 0:00 left]"


def test_a_long_time_is_in_minutes(clock: Clock) -> None:
    progress = Progress({"a": 3}, clock)
    progress.start("a")
    progress.ready()
    clock.now += 100
    assert progress.row().endswith("3:20 left]")


def test_there_is_no_bar_but_on_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    line = "[1/2] " + "x" * 200
    stream = io.StringIO()
    with Progress({"a": 2}, clock).shown(stream) as say:
        say(line)
    assert stream.getvalue() == line + "\n"
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress({"a": 2}, clock)
    with progress.shown(stream) as say:
        progress.start("a")
        progress.ready()
        clock.now += 7
        progress.row()
        say(line)
    shown = stream.getvalue().removeprefix(line + "\n")
    assert line in shown  # neither wrapped nor read as markup
    assert "1/2" in shown
    assert "0:07 left" in shown
