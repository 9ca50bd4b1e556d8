"""What a person sees: lines on stderr, a bar where there is a terminal; one JSON document on stdout
with `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@dataclass
class Terminal:
    as_json: bool

    def __post_init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def result(self, document: Mapping[str, Any], lines: str) -> None:
        """The end of a command: the document, or what a person reads instead."""
        click.echo(json.dumps(document, indent=1, default=str) if self.as_json else lines)

    def error(self, message: str, exit_code: int) -> None:
        if self.as_json:
            click.echo(json.dumps({"error": message, "exit_code": exit_code}, indent=1))
        else:
            click.echo(f"error: {message}", err=True)

    @contextmanager
    def progress(self, label: str) -> Iterator[Bar]:
        """A bar whose total is not known at first; plain lines where stderr is no terminal."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
        )
        shown = sys.stderr.isatty()
        with Progress(*columns, console=self.console, disable=not shown) as progress:
            yield Bar(progress, progress.add_task(label, total=0))


@dataclass
class Bar:
    progress: Progress
    task: Any

    def update(self, label: str, done: int, total: int) -> None:
        self.progress.update(self.task, description=label, completed=done, total=total)
