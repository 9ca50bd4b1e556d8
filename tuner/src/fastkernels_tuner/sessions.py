"""Finished sessions of `ab` in a file, one JSON line each: what was measured is not lost with the
process, and a calibration of many sessions goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.model import Environment, Model, read_line
from fastkernels_tuner.stats import Pair, Ratio, Verdict
from fastkernels_tuner.store.bundle import writing


class Session(Model):
    """Pairs of blocks of two candidates in processes of their own. `pairs` are by workload the
    logarithm of the ratio and the second's time in microseconds, as `stats.Ratio`."""

    first: str
    second: str
    policy: str  # id of the rules that it was measured under
    number: int  # its data are drawn from
    environment: Environment
    verdict: Verdict
    pairs: tuple[dict[str, Ratio], ...]


class Sessions:
    """Sessions of one comparison. Without a path they are held in memory.

    Raises SourceError over a line that is no session, or one of another comparison."""

    def __init__(
        self, path: Path | None, first: str, second: str, policy: str, workloads: Sequence[str]
    ) -> None:
        self._path = path
        self._of = {"first": first, "second": second, "policy": policy}
        self._workloads = set(workloads)
        self._sessions: list[Session] = []
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._sessions = [
                self._checked(f"{path}:{number}", line)
                for number, line in enumerate(lines, start=1)
            ]

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pairs(self) -> list[tuple[dict[str, Ratio], ...]]:
        return [session.pairs for session in self._sessions]

    @property
    def verdicts(self) -> list[Verdict]:
        return [session.verdict for session in self._sessions]

    def add(self, verdict: Verdict, pairs: Sequence[Pair], environment: Environment) -> None:
        """The next one, on disk when this returns."""
        session = Session(
            **self._of,
            number=len(self),
            environment=environment,
            verdict=verdict,
            pairs=tuple(dict(pair) for pair in pairs),
        )
        self._sessions.append(session)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with writing(self._path) as file:
                for each in self._sessions:
                    file.write(each.canonical().encode() + b"\n")

    def _checked(self, place: str, line: str) -> Session:
        session = read_line(line, place, Session, "a session", SourceError)
        for name, expected in self._of.items():
            if getattr(session, name) != expected:
                raise SourceError(
                    f"{place}: {name} is {getattr(session, name)!r}, this comparison's {expected!r}"
                )
        for pair in session.pairs:
            if set(pair) != self._workloads:
                raise SourceError(
                    f"{place}: workloads {sorted(pair)}, this comparison's are"
                    f" {sorted(self._workloads)}"
                )
        return session
