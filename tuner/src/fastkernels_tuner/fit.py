"""From measured times to regimes along one axis. Plain data in and out: no files, no torch.

Times are whole nanoseconds, so sums are exact and ties are ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A route with a config."""

    route: str
    knobs: tuple[tuple[str, Any], ...]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.knobs)

    def __str__(self) -> str:
        return f"{self.route}({', '.join(f'{name}={value}' for name, value in self.knobs)})"


class Sample(NamedTuple):
    """What was measured of one candidate at one size."""

    median_ns: int
    spread_ns: int  # how well the median is known
    cases: int
    trials: int


class Segment(NamedTuple):
    """Neighbouring measured sizes and the candidate that serves them."""

    sizes: tuple[int, ...]
    candidate: Candidate


@dataclass(frozen=True)
class Grid:
    """Samples by size, for one mode and one choice of constants. Every size has a sample."""

    samples: Mapping[int, Mapping[Candidate, Sample]]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.samples))

    @cached_property
    def best(self) -> dict[int, Sample]:
        return {
            size: min(row.items(), key=lambda item: (item[1].median_ns, str(item[0])))[1]
            for size, row in self.samples.items()
        }

    def time(self, candidate: Candidate, size: int) -> int:
        return self.samples[size][candidate].median_ns

    def total(self, candidate: Candidate, sizes: Iterable[int]) -> int:
        return sum(self.time(candidate, size) for size in sizes)

    def spread(self, size: int) -> int:
        """The spread of the best candidate: what a difference at this size has to exceed."""
        return max(self.best[size].spread_ns, 1)

    def measured_on(self, sizes: Iterable[int]) -> list[Candidate]:
        """The candidates with a sample at each of `sizes`, by name."""
        common = set.intersection(*(set(self.samples[size]) for size in sizes))
        return sorted(common, key=str)

    def is_admissible(self, candidate: Candidate, size: int) -> bool:
        """Within the spread of the best."""
        return self.time(candidate, size) - self.best[size].median_ns <= self.spread(size)

    def worst_loss(self, candidate: Candidate, sizes: Iterable[int]) -> float:
        """Against the best of each size, in spreads."""
        return max(
            (self.time(candidate, size) - self.best[size].median_ns) / self.spread(size)
            for size in sizes
        )


class Margin(NamedTuple):
    """How much slower a rival is, at the size where that shows most."""

    rival: Candidate
    size: int
    ratio: float  # of the served time; rounded as a table shows it
    spreads: float  # above 1 it counts


def margin(grid: Grid, segment: Segment, rival: Candidate) -> Margin:
    def spreads(size: int) -> float:
        lost = grid.time(rival, size) - grid.time(segment.candidate, size)
        return lost / grid.spread(size)

    size = max(segment.sizes, key=lambda size: (spreads(size), -size))
    served = grid.time(segment.candidate, size)
    # Judged after rounding, so that the table itself shows that a boundary is defended.
    ratio = round((grid.time(rival, size) - served) / served, 4)
    return Margin(rival, size, ratio, ratio * served / grid.spread(size))


def fit(grid: Grid) -> list[Segment]:
    """The fewest segments whose candidates are within the spread of the best at every size.

    Then a boundary goes, weakest first, as long as a neighbour's candidate could take over a
    segment and lose no more than the spread against what serves it: such a boundary would move from
    one measurement to the next. The joint segment takes the candidate that loses least at worst.
    """
    segments = _fewest(grid)
    while len(segments) > 1:
        strength, i = min(
            (_strength(grid, *segments[i : i + 2]), i) for i in range(len(segments) - 1)
        )
        if strength > 1:
            break
        sizes = segments[i].sizes + segments[i + 1].sizes
        candidate = min(
            grid.measured_on(sizes),
            key=lambda c: (grid.worst_loss(c, sizes), grid.total(c, sizes)),
        )
        segments[i : i + 2] = [Segment(sizes, candidate)]
    return segments


def _fewest(grid: Grid) -> list[Segment]:
    """Ties go to the lowest total time, then to the first name."""

    def served(sizes: tuple[int, ...]) -> Segment | None:
        legal = [
            candidate
            for candidate in grid.measured_on(sizes)
            if all(grid.is_admissible(candidate, size) for size in sizes)
        ]
        if not legal:
            return None
        return Segment(sizes, min(legal, key=lambda c: grid.total(c, sizes)))

    best: list[tuple[int, int, list[Segment]]] = [(0, 0, [])]  # up to each size: count, time
    for end in range(1, len(grid.sizes) + 1):
        options = []
        for start in range(end):
            segment = served(grid.sizes[start:end])
            if segment is not None:
                count, total, before = best[start]
                total += grid.total(segment.candidate, segment.sizes)
                options.append((count + 1, total, [*before, segment]))
        best.append(min(options, key=lambda o: (o[0], o[1], [str(s.candidate) for s in o[2]])))
    return best[-1][2]


def _strength(grid: Grid, lower: Segment, upper: Segment) -> float:
    """What it costs, in spreads, that the cheaper neighbour takes over; where neither was measured
    at the other's sizes, the boundary stands."""
    moves = ((lower, upper.candidate), (upper, lower.candidate))
    return min(
        (
            margin(grid, segment, rival).spreads
            for segment, rival in moves
            if rival in grid.measured_on(segment.sizes)
        ),
        default=float("inf"),
    )


def runner_up(grid: Grid, segments: list[Segment], i: int) -> Margin | None:
    """What nearly served a segment: of its neighbours' candidates the one that would lose less;
    where no neighbour was measured here, the next best of all; None where nothing else was."""
    segment = segments[i]
    measured = [c for c in grid.measured_on(segment.sizes) if c != segment.candidate]
    neighbours = {s.candidate for s in segments[max(i - 1, 0) : i + 2]}
    rivals = [c for c in measured if c in neighbours]
    if rivals:
        return min((margin(grid, segment, rival) for rival in rivals), key=lambda m: m.spreads)
    if not measured:
        return None
    return margin(grid, segment, min(measured, key=lambda c: grid.total(c, segment.sizes)))


def evidence(grid: Grid, segments: list[Segment], i: int, axis: str) -> dict[str, Any]:
    """The `evidence` of a regime; tuner/README.md says what each entry means."""
    sizes, candidate = segments[i]
    served = [grid.samples[size][candidate] for size in sizes]
    rival = runner_up(grid, segments, i)
    slowest = max(sizes, key=lambda size: (grid.time(candidate, size), -size))
    at = slowest if rival is None else rival.size
    return {
        "cases": sum(sample.cases for sample in served),
        "worst_us": grid.time(candidate, slowest) / 1000,
        "spread_us": grid.spread(at) / 1000,
        "runner_up": "none" if rival is None else str(rival.rival),
        "margin": 0.0 if rival is None else rival.ratio,
        "at": {axis: at},
        "slowdown": max(
            round(sample.median_ns / grid.best[size].median_ns - 1, 4)
            for size, sample in zip(sizes, served, strict=True)
        ),
        "trials": sum(sample.trials for sample in served),
        "failures": 0,
    }
