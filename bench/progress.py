"""How far a run is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

Say = Callable[[str], None]


class Progress:
    """Over the rows of one or several operators. Each of these starts (peers are imported and
    compile, hosts are timed) before its first row: what starts took so far stands for those to
    come, and likewise for rows."""

    def __init__(
        self, rows: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rows`: how many each operator has."""
        self.total = sum(rows.values())
        self.done = 0
        self._rows = dict(rows)
        self._clock = clock
        self._began = self._event = clock()
        self._starts: list[float] = []
        self._row_seconds = 0.0
        self._expected = 0  # rows done once the present operator is
        self._to_start = len(rows)
        self._bar: Any = None

    def start(self, operator: str) -> None:
        """An operator's turn; rows of the one before that were not measured count as done."""
        self.done = self._expected
        self._expected += self._rows[operator]
        self._to_start -= 1
        self._event = self._clock()

    def ready(self) -> None:
        """Its rows come now."""
        self._starts.append(self._since())

    def row(self) -> str:
        """One more row; says how far the run is."""
        self._row_seconds += self._since()
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, left=_clock(self.left))
        return f"[{self.done}/{self.total} {self.elapsed:.0f} s, {_clock(self.left)} left]"

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds; a guess before the first row is done."""
        a_row = self._row_seconds / self.done if self.done else 1.0
        a_start = sum(self._starts) / len(self._starts) if self._starts else 0.0
        return a_row * (self.total - self.done) + a_start * self._to_start

    def _since(self) -> float:
        now = self._clock()
        seconds, self._event = now - self._event, now
        return seconds

    @contextmanager
    def shown(self, stream: TextIO) -> Iterator[Say]:
        """What says a line there; on a terminal with a bar below."""
        console = Console(file=stream)
        if not console.is_terminal:
            yield partial(print, file=stream, flush=True)
            return
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("rows, {task.fields[left]} left")
        with Bar(*columns, console=console, transient=True) as bar:
            bar.add_task("", total=self.total, left="?")
            self._bar = bar
            try:
                yield lambda text: console.print(
                    text, markup=False, highlight=False, soft_wrap=True
                )
            finally:
                self._bar = None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
