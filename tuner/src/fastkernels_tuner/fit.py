"""From measured times to regimes: segments of one axis, or boxes over several (`fit_boxes`). Plain
data in and out: no files, no torch.

A size is an integer on one axis, a tuple of them on several. Times are whole nanoseconds, so sums
are exact and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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

    sizes: tuple[Any, ...]
    candidate: Candidate


@dataclass(frozen=True)
class Grid:
    """Samples by size, for one mode and one choice of constants. Every size has a sample.

    slowdown: the fraction that a regime's candidate may lose against the best of a size, where that
    is more than the spread. today: what serves a size until now, where that is known.
    """

    samples: Mapping[Any, Mapping[Candidate, Sample]]
    slowdown: float = 0.0
    today: Mapping[Any, Candidate] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[Any, ...]:
        return tuple(sorted(self.samples))

    @cached_property
    def best(self) -> dict[Any, Sample]:
        return {
            size: min(row.items(), key=lambda item: (item[1].median_ns, str(item[0])))[1]
            for size, row in self.samples.items()
        }

    def time(self, candidate: Candidate, size: Any) -> int:
        return self.samples[size][candidate].median_ns

    def total(self, candidate: Candidate, sizes: Iterable[Any]) -> int:
        return sum(self.time(candidate, size) for size in sizes)

    def spread(self, size: Any) -> int:
        """What a difference at this size has to exceed: the spread of the best candidate, or the
        slowdown that is allowed."""
        best = self.best[size]
        return max(best.spread_ns, round(self.slowdown * best.median_ns), 1)

    def measured_on(self, sizes: Iterable[Any]) -> list[Candidate]:
        """The candidates with a sample at each of `sizes`, by name."""
        common = set.intersection(*(set(self.samples[size]) for size in sizes))
        return sorted(common, key=str)

    def is_admissible(self, candidate: Candidate, size: Any) -> bool:
        """Within the spread of the best."""
        return self.time(candidate, size) - self.best[size].median_ns <= self.spread(size)

    def pick(self, legal: Sequence[Candidate], sizes: Iterable[Any]) -> Candidate:
        """The fastest in total; of those that are as fast, as far as totals are known, the one that
        serves most of the sizes today: between equals a table should not flip."""
        sizes = tuple(sizes)
        totals = {candidate: self.total(candidate, sizes) for candidate in legal}
        known = math.hypot(*(self.best[size].spread_ns for size in sizes))
        alike = [c for c in legal if totals[c] - min(totals.values()) <= known]
        return min(
            alike, key=lambda c: (-sum(self.today.get(size) == c for size in sizes), totals[c])
        )

    def worst_loss(self, candidate: Candidate, sizes: Iterable[Any]) -> float:
        """Against the best of each size, in spreads."""
        return max(
            (self.time(candidate, size) - self.best[size].median_ns) / self.spread(size)
            for size in sizes
        )


class Margin(NamedTuple):
    """How much slower a rival is, at the size where that shows most."""

    rival: Candidate
    size: Any
    ratio: float  # of the served time; rounded as a table shows it
    spreads: float  # above 1 it counts


def margin(grid: Grid, segment: Segment, rival: Candidate) -> Margin:
    def spreads(size: Any) -> float:
        lost = grid.time(rival, size) - grid.time(segment.candidate, size)
        return lost / grid.spread(size)

    size = max(sorted(segment.sizes), key=spreads)
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
    """Of as many segments, those with the lowest total time, then the first names."""

    def served(sizes: tuple[Any, ...]) -> Segment | None:
        legal = [
            candidate
            for candidate in grid.measured_on(sizes)
            if all(grid.is_admissible(candidate, size) for size in sizes)
        ]
        if not legal:
            return None
        return Segment(sizes, grid.pick(legal, sizes))

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


class Bounded(NamedTuple):
    """A box over several axes, both ends of an interval included, and what serves it."""

    bounds: tuple[tuple[int, int], ...]
    segment: Segment


def fit_boxes(grid: Grid, limits: Sequence[tuple[int, int]]) -> list[Bounded]:
    """Boxes that tile `limits`, by a shallow tree over the axes.

    A box whose measured sizes one candidate serves (within the spread or slowdown) is not divided.
    Else it is cut where the two halves, each under its fastest candidate, lose least in total; the
    cut lies midway between two measured sizes. A cut that divides two boxes goes where one
    candidate loses no more than the spread on both sides against what serves them, and one that
    leaves a box in which no other box's candidate loses more: such a cut would move from one
    measurement to the next. The joint box takes the candidate that loses least at worst, if one was
    measured on all of it. Other boxes, elsewhere, may have a box's candidate, too.
    """
    root = _divide(grid, grid.sizes, tuple(limits))
    while (weak := _weakest(grid, root)) is not None:
        weak.halves = None
    return [leaf.box for leaf in root.leaves() if leaf.box is not None]


@dataclass
class _Node:
    """A box, and the two that it is cut into; `box` is what serves it if it is not: None where
    nothing was measured on all of it, so that it has to be cut."""

    box: Bounded | None
    halves: tuple[_Node, _Node] | None = None

    def leaves(self) -> list[_Node]:
        return [self] if self.halves is None else [n for half in self.halves for n in half.leaves()]

    def parents(self) -> list[_Node]:
        if self.halves is None:
            return []
        return [self, *(node for half in self.halves for node in half.parents())]


def _divide(grid: Grid, sizes: tuple[Any, ...], limits: tuple[tuple[int, int], ...]) -> _Node:
    whole = Bounded(limits, _serve(grid, sizes)) if grid.measured_on(sizes) else None
    if whole and all(grid.is_admissible(whole.segment.candidate, size) for size in sizes):
        return _Node(whole)
    options = []
    for axis in range(len(limits)):
        values = sorted({size[axis] for size in sizes})
        for low, high in pairwise(values):
            halves = (
                tuple(size for size in sizes if size[axis] <= low),
                tuple(size for size in sizes if size[axis] > low),
            )
            # Of cuts that lose the same the one that leaves least to divide.
            left = sum(len(half) for half in halves if not _is_served(grid, half))
            loss = sum(_loss(grid, half) for half in halves)
            options.append((round(loss, 9), left, axis, (low + high) // 2))
    if not options:  # one size, and every size has a candidate
        return _Node(whole)
    *_, axis, cut = min(options)
    low, high = limits[axis]
    found = []
    for interval in ((low, cut), (cut + 1, high)):
        own = tuple(size for size in sizes if interval[0] <= size[axis] <= interval[1])
        found.append(_divide(grid, own, (*limits[:axis], interval, *limits[axis + 1 :])))
    return _Node(whole, (found[0], found[1]))


def _weakest(grid: Grid, root: _Node) -> _Node | None:
    """The node whose halves should be one box again; of several that where it costs least."""
    segments = [leaf.box.segment for leaf in root.leaves() if leaf.box is not None]
    weak = []
    for i, node in enumerate(root.parents()):
        above = [half for half in node.halves or () if half.halves is None]
        if node.box is None or not above:
            continue
        cost = math.inf
        if len(above) == 2:
            cost = _cost(grid, node, [half.box.segment for half in above if half.box is not None])
        if cost > 1 and all(_is_defended(grid, half, segments) for half in above):
            continue
        weak.append((cost, i, node))
    return min(weak, key=lambda found: found[:2])[2] if weak else None


def _cost(grid: Grid, node: _Node, halves: Sequence[Segment]) -> float:
    """What one candidate for both halves costs at worst against what serves them, in spreads; that
    one becomes the node's own."""
    assert node.box is not None
    served = {size: segment.candidate for segment in halves for size in segment.sizes}

    def lost(candidate: Candidate) -> float:
        return max(
            (grid.time(candidate, size) - grid.time(own, size)) / grid.spread(size)
            for size, own in served.items()
        )

    best = min(grid.measured_on(served), key=lambda c: (lost(c), grid.total(c, served)))
    cost = lost(best)
    if cost <= 1:
        node.box = node.box._replace(segment=node.box.segment._replace(candidate=best))
    return cost


def _is_defended(grid: Grid, leaf: _Node, segments: Sequence[Segment]) -> bool:
    """Whether some other box's candidate is slower here by more than the spread."""
    assert leaf.box is not None
    found = _rival(grid, leaf.box.segment, {segment.candidate for segment in segments})
    return found is not None and found.spreads > 1


def _rival(grid: Grid, segment: Segment, others: Iterable[Candidate]) -> Margin | None:
    """Of other boxes' candidates that are slower by more than the spread the one that is so least:
    those that are as fast would change nothing. Where there is none such, the nearest one."""
    measured = {*others} & {*grid.measured_on(segment.sizes)} - {segment.candidate}
    margins = [margin(grid, segment, rival) for rival in sorted(measured, key=str)]
    slower = [each for each in margins if each.spreads > 1]
    return min(slower or margins, key=lambda m: m.spreads, default=None)


def _serve(grid: Grid, sizes: tuple[Any, ...]) -> Segment:
    """The pick of those that serve all sizes within what is allowed; where none does, the one that
    loses least at worst."""
    measured = grid.measured_on(sizes)
    legal = [c for c in measured if all(grid.is_admissible(c, size) for size in sizes)]
    if legal:
        return Segment(sizes, grid.pick(legal, sizes))
    return Segment(
        sizes, min(measured, key=lambda c: (grid.worst_loss(c, sizes), grid.total(c, sizes)))
    )


def _is_served(grid: Grid, sizes: tuple[Any, ...]) -> bool:
    """Whether one candidate serves all sizes within what is allowed."""
    return any(
        all(grid.is_admissible(candidate, size) for size in sizes)
        for candidate in grid.measured_on(sizes)
    )


def _loss(grid: Grid, sizes: tuple[Any, ...]) -> float:
    """The least sum of log slowdowns that one candidate gives; a large one where none was measured
    on all of them."""
    return min(
        (
            sum(math.log(grid.time(c, size) / grid.best[size].median_ns) for size in sizes)
            for c in grid.measured_on(sizes)
        ),
        default=1e3 * len(sizes),
    )


def runner_up(grid: Grid, segments: list[Segment], i: int) -> Margin | None:
    """What nearly served a segment: of its neighbours' candidates the one that would lose less;
    where no neighbour was measured here, the next best of all; None where nothing else was."""
    segment = segments[i]
    measured = [c for c in grid.measured_on(segment.sizes) if c != segment.candidate]
    if isinstance(segment.sizes[0], tuple):  # any box may lie beside it
        found = _rival(grid, segment, {other.candidate for other in segments})
        if found is not None:
            return found
    neighbours = {s.candidate for s in segments[max(i - 1, 0) : i + 2]}
    rivals = [c for c in measured if c in neighbours]
    if rivals:
        return min((margin(grid, segment, rival) for rival in rivals), key=lambda m: m.spreads)
    if not measured:
        return None
    return margin(grid, segment, min(measured, key=lambda c: grid.total(c, segment.sizes)))


def evidence(grid: Grid, segments: list[Segment], i: int, axes: Sequence[str]) -> dict[str, Any]:
    """The `evidence` of a regime; tuner/README.md says what each entry means."""
    sizes, candidate = segments[i]
    served = [grid.samples[size][candidate] for size in sizes]
    rival = runner_up(grid, segments, i)
    slowest = max(sorted(sizes), key=lambda size: grid.time(candidate, size))
    at = slowest if rival is None else rival.size
    return {
        "cases": sum(sample.cases for sample in served),
        "worst_us": grid.time(candidate, slowest) / 1000,
        "spread_us": max(grid.best[at].spread_ns, 1) / 1000,
        "runner_up": "none" if rival is None else str(rival.rival),
        # What serves today may lose to it by less than is known.
        "margin": 0.0 if rival is None else max(rival.ratio, 0.0),
        "at": dict(zip(axes, at if isinstance(at, tuple) else (at,), strict=True)),
        "slowdown": max(
            round(sample.median_ns / grid.best[size].median_ns - 1, 4)
            for size, sample in zip(sizes, served, strict=True)
        ),
        "trials": sum(sample.trials for sample in served),
        "failures": 0,
    }
