"""bench/profile.py, but for the device that it watches."""

from __future__ import annotations

import click
import pytest

from bench.profile import parse_choice, timeline
from fastkernels import catalog
from fastkernels.testing.cupti import Work

OPERATOR = catalog.operator("gdn_prefill")


def call(at: int, *kernels: tuple[str, int, int]) -> list[Work]:
    return [Work(name, at + begin, at + end, 0) for name, begin, end in kernels]


def test_kernels_stand_where_they_began_with_medians_over_the_calls() -> None:
    calls = [
        call(10_000, ("chain", 4_000, 9_000), ("prepare", 0, 5_000)),
        call(50_000, ("prepare", 0, 5_200), ("chain", 4_400, 9_000)),
        call(90_000, ("prepare", 0, 9_000), ("chain", 4_200, 90_000)),
        call(99_000, ("prepare", 0, 9_000)),  # half of its records are missing
    ]
    assert timeline(calls) == [("prepare", 0.0, 5.2), ("chain", 4.2, 9.0)]


def test_choices_are_routes_with_some_of_their_knobs() -> None:
    route, config = parse_choice(OPERATOR, 'chunk_split={"rows_per_block": 32}')
    assert (route.name, config.rows_per_block) == ("chunk_split", 32)
    assert config.stages == route.default_config.stages
    assert parse_choice(OPERATOR, "recurrent")[1] == parse_choice(OPERATOR, "recurrent={}")[1]


@pytest.mark.parametrize("text", ["nobody", "chunk_split={", 'chunk_split={"rows": 1}'])
def test_what_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="--choice"):
        parse_choice(OPERATOR, text)
