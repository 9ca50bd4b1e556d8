"""The fit by its properties: what it covers, what it admits, which boundaries it keeps."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fastkernels_tuner.fit import (
    Candidate,
    Grid,
    Sample,
    Segment,
    evidence,
    fit,
    fit_boxes,
    margin,
)
from fastkernels_tuner.sweep import boundary

A, B, C = (Candidate(name, (("tile", 1),)) for name in "abc")


def grid(spread: int = 10, **times: list[int]) -> Grid:
    """Times of candidates by name at sizes 1, 2, 4, ...; 0: not measured."""
    sizes = [2**i for i in range(max(map(len, times.values())))]
    return Grid(
        {
            size: {
                Candidate(name, (("tile", 1),)): Sample(column[i], spread, 1, 50)
                for name, column in times.items()
                if column[i]
            }
            for i, size in enumerate(sizes)
        }
    )


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Every size has at least one sample; times close enough for ties and weak boundaries."""
    names = [*"abcd"][: draw(st.integers(1, 4))]
    sizes = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=6, unique=True))
    sample = st.builds(Sample, st.integers(100, 160), st.integers(0, 30), st.just(1), st.just(50))
    samples = {}
    for size in sizes:
        measured = [n for n in names if draw(st.integers(0, 9))] or names[:1]
        samples[size] = {Candidate(n, (("tile", 1),)): draw(sample) for n in measured}
    return Grid(samples)


@given(grids())
def test_segments_partition_the_sizes_in_order(found: Grid) -> None:
    assert sum((segment.sizes for segment in fit(found)), ()) == found.sizes


@given(grids())
def test_every_boundary_is_defended_from_both_sides(found: Grid) -> None:
    """The spread rule, and that the numbers a table shows satisfy its lint."""
    segments = fit(found)
    for i, (lower, upper) in enumerate(pairwise(segments)):
        assert lower.candidate != upper.candidate
        for j, segment, rival in ((i, lower, upper.candidate), (i + 1, upper, lower.candidate)):
            if rival not in found.measured_on(segment.sizes):
                continue
            assert margin(found, segment, rival).spreads > 1
            shown = evidence(found, segments, j, ("rows",))
            assert shown["margin"] * shown["worst_us"] > shown["spread_us"]


@given(grids())
def test_every_size_gets_an_admissible_candidate_unless_a_boundary_was_too_weak(
    found: Grid,
) -> None:
    segments = fit(found)
    for segment in segments:
        if all(found.is_admissible(segment.candidate, size) for size in segment.sizes):
            continue
        # Then it came from a merge, and nothing else would lose less at worst.
        assert len(segment.sizes) > 1
        worst = found.worst_loss(segment.candidate, segment.sizes)
        others = found.measured_on(segment.sizes)
        assert worst == min(found.worst_loss(other, segment.sizes) for other in others)


@given(grids())
def test_neighbours_could_not_be_one_admissible_segment(found: Grid) -> None:
    segments = fit(found)
    for lower, upper in pairwise(segments):
        sizes = lower.sizes + upper.sizes
        for candidate in found.measured_on(sizes):
            assert not all(found.is_admissible(candidate, size) for size in sizes)


@given(grids(), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(found: Grid, shuffle: random.Random) -> None:
    sizes = list(found.samples.items())
    shuffle.shuffle(sizes)
    shuffled = {}
    for size, row in sizes:
        candidates = list(row.items())
        shuffle.shuffle(candidates)
        shuffled[size] = dict(candidates)
    segments, again = fit(found), fit(Grid(shuffled))
    assert segments == again
    for i in range(len(segments)):
        assert evidence(found, segments, i, ("rows",)) == evidence(
            Grid(shuffled), again, i, ("rows",)
        )


@given(grids())
def test_evidence_is_what_the_lint_takes(found: Grid) -> None:
    segments = fit(found)
    for i, segment in enumerate(segments):
        shown = evidence(found, segments, i, ("rows",))
        assert shown["margin"] >= 0
        assert shown["spread_us"] > 0
        assert shown["at"]["rows"] in segment.sizes
        assert shown["cases"] == len(segment.sizes)


@given(st.integers(0, 50), st.integers(1, 100), st.integers(-5, 150), st.integers(-5, 150))
def test_a_boundary_is_near_the_middle_and_legal(
    last: int, gap: int, lower_max: int, upper_min: int
) -> None:
    first = last + gap
    lower, upper = Segment((last,), A), Segment((first,), B)

    def takes(candidate: Candidate, size: int) -> bool:
        return size <= lower_max if candidate == A else size >= upper_min

    found = boundary(lower, upper, takes)
    assert last <= found < first
    legal = [s for s in range(last, first) if takes(A, s) and takes(B, s + 1)]
    middle = (last + first) // 2
    assert found == (min(legal, key=lambda s: (abs(s - middle), s)) if legal else middle)


def test_as_few_segments_as_the_spread_allows() -> None:
    # b is best only at size 2, and there by no more than the spread.
    assert fit(grid(a=[100, 110, 100], b=[150, 100, 150])) == [Segment((1, 2, 4), A)]
    # By one nanosecond more it is a regime of its own.
    assert [s.candidate for s in fit(grid(a=[100, 111, 100], b=[150, 100, 150]))] == [A, B, A]


def test_a_compromise_beats_two_regimes() -> None:
    found = grid(a=[100, 150], b=[150, 100], c=[109, 109])
    assert fit(found) == [Segment((1, 2), C)]


def test_ties_go_to_the_lower_total_then_to_the_name() -> None:
    assert fit(grid(a=[101, 100], b=[100, 100])) == [Segment((1, 2), B)]
    assert fit(grid(b=[100, 100], a=[100, 100])) == [Segment((1, 2), A)]


def test_a_weak_boundary_goes() -> None:
    """a is within the spread at 1 and 2, d is not, though it loses only 3 against a: too little for
    a boundary, with a spread of 10."""
    found = grid(a=[109, 109, 200], b=[100, 200, 200], c=[200, 100, 200], d=[112, 112, 100])
    (segment,) = fit(found)
    assert segment.candidate.route == "d"
    assert evidence(found, [segment], 0, ("rows",))["slowdown"] == 0.12


def test_a_candidate_that_takes_part_of_the_sizes_may_serve_them() -> None:
    segments = fit(grid(a=[50, 60, 0], b=[100, 110, 120]))
    assert segments == [Segment((1, 2), A), Segment((4,), B)]


def test_boxes_tile_the_limits_and_lose_no_more_than_allowed() -> None:
    """Two axes: a large first axis wants B, a small one A, whatever the second is."""
    a, b = Candidate("a", ()), Candidate("b", ())
    samples = {
        (x, y): {
            a: Sample(1000 + 10 * x, 10, 1, 1),
            b: Sample(1200 + 2 * x + y, 10, 1, 1),
        }
        for x in (1, 8, 64, 200)
        for y in (1, 4)
    }
    boxes = fit_boxes(Grid(samples, slowdown=0.02), ((0, 200), (0, 4)))
    assert [(box.bounds, box.segment.candidate) for box in boxes] == [
        (((0, 36), (0, 4)), a),
        (((37, 200), (0, 4)), b),
    ]
    assert sorted(size for box in boxes for size in box.segment.sizes) == sorted(samples)


def test_a_slowdown_that_is_allowed_saves_a_box() -> None:
    a, b = Candidate("a", ()), Candidate("b", ())
    samples = {
        (1, 1): {a: Sample(1000, 1, 1, 1), b: Sample(1015, 1, 1, 1)},
        (9, 1): {a: Sample(1100, 1, 1, 1), b: Sample(1000, 1, 1, 1)},
    }
    limits = ((0, 9), (0, 1))
    assert len(fit_boxes(Grid(samples), limits)) == 2
    (box,) = fit_boxes(Grid(samples, slowdown=0.02), limits)
    assert box.segment.candidate == b


def test_a_box_that_nothing_serves_as_a_whole_is_cut() -> None:
    """What is kept of a champion was measured where it serves, and nowhere else."""
    a, b = Candidate("a", ()), Candidate("b", ())
    samples = {
        (1, 1): {a: Sample(1000, 1, 1, 1)},
        (4, 1): {a: Sample(1000, 1, 1, 1)},
        (9, 1): {b: Sample(1000, 1, 1, 1)},
    }
    boxes = fit_boxes(Grid(samples, slowdown=0.02), ((0, 9), (0, 1)))
    assert [(box.bounds[0], box.segment.candidate) for box in boxes] == [((0, 6), a), ((7, 9), b)]


def square(served: str, *, other: int = 150) -> Grid:
    """A size for each letter, on a second axis of one value: its candidate takes 100, all others
    take `other`."""
    candidates = {name: Candidate(name, ()) for name in sorted(set(served))}
    return Grid({
        (x, 1): {c: Sample(100 if n == name else other, 1, 1, 1) for n, c in candidates.items()}
        for x, name in enumerate(served, 1)
    })  # fmt: skip


def test_a_candidate_may_serve_several_boxes() -> None:
    """What serves elsewhere, too, keeps its box where everything else is slower."""
    for served in ("aba", "abcab", "aabbaa"):
        boxes = fit_boxes(square(served), ((0, len(served)), (0, 1)))
        by_size = {size: box.segment.candidate for box in boxes for size in box.segment.sizes}
        assert "".join(c.route for _, c in sorted(by_size.items())) == served


def test_a_cut_between_equals_goes() -> None:
    """Either candidate serves both sizes within the spread of what serves them."""
    found = square("aab", other=101)
    (box,) = fit_boxes(found, ((0, 3), (0, 1)))
    assert box.segment.candidate.route == "a"


def test_of_cuts_that_lose_the_same_the_one_that_leaves_least() -> None:
    """Not a box for each of the sizes that one candidate serves."""
    boxes = fit_boxes(square("aaaaab"), ((0, 6), (0, 1)))
    assert [box.bounds[0] for box in boxes] == [(0, 5), (6, 6)]
    a, b, c = (Candidate(name, ()) for name in "abc")
    times = {(x, y): (100, 150, 150) for x in (1, 2, 3, 4) for y in (1, 2)}
    times |= {(5, 1): (100, 150, 150), (5, 2): (150, 100, 150), (6, 1): (100, 150, 150)}
    times |= {(6, 2): (150, 100, 150)}
    samples = {
        size: {x: Sample(time, 1, 1, 1) for x, time in zip((a, b, c), row, strict=True)}
        for size, row in times.items()
    }
    assert len(fit_boxes(Grid(samples), ((0, 6), (0, 2)))) == 3


def test_between_equals_what_serves_today_stays() -> None:
    """As far as the sum of times is known; beyond that the faster one is taken."""
    found = grid(a=[100, 100, 100], b=[104, 108, 101])
    assert fit(found) == [Segment((1, 2, 4), A)]
    today = dict.fromkeys(found.sizes, B)
    assert fit(replace(found, today=today)) == [Segment((1, 2, 4), B)]
    assert fit(replace(found, today={1: B})) == [Segment((1, 2, 4), B)]
    slower = grid(a=[100, 100, 100], b=[109, 110, 120], spread=10)
    assert fit(replace(slower, slowdown=0.3, today=today)) == [Segment((1, 2, 4), A)]
    boxes = fit_boxes(
        Grid({(1, 1): {A: Sample(100, 10, 1, 1), B: Sample(104, 10, 1, 1)}}, today={(1, 1): B}),
        ((0, 1), (0, 1)),
    )
    assert [box.segment.candidate for box in boxes] == [B]
