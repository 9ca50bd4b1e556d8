#!/usr/bin/env python3
"""What an operator is meant to reach, against its result file of an H200.

    python bench/targets.py bench/results/h200/gdn_prefill.json

Exit status 1 if something is missed. Needs no GPU and no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.summary import BEST, peer_us, ratios

Row = Mapping[str, Any]


class Target(NamedTuple):
    """A figure and its limit; `at_least`: on which side of it the figure must be."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict}: {self.name} {self.value:.4g} {sign} {self.limit:.4g}"


def targets(data: Mapping[str, Any]) -> list[Target]:
    """Those of the operator of a result file, and what every one has: nothing wrong or missing."""
    rows: list[Row] = data["rows"]
    found = [
        Target("wrong calls", sum(row["failures"] for row in rows), 0),
        Target("missing rows", len(data["missing"]), 0),
    ]
    return found + list(OPERATORS.get(data["op"], lambda rows: iter(()))(rows))


# ---- gdn_prefill --------------------------------------------------------------------------------

# (tokens, sequences) to microseconds.
SMALL = {
    (6, 1): 4.0, (16, 1): 5.5, (35, 1): 6.5, (61, 1): 7.0, (134, 1): 10.0, (139, 3): 9.0,
    (525, 1): 18.0,
}  # fmt: skip
LARGEST = 8192


def gdn_prefill(rows: Sequence[Row]) -> Iterator[Target]:
    contest = [row for row in rows if row["list"] == "contest"]
    serving = [row for row in rows if row["list"] == "serving"]
    for row in contest:
        limit = prefill_us(row)
        if limit is not None:
            total, num_seqs = _size(row)
            name = f"us of {total}/{num_seqs} ({row['work']['chunks']} chunks, {row['id'][:8]})"
            yield Target(name, row["us"]["median"], limit)
    if _has_peers(contest):
        best = ratios(contest, BEST)
        yield Target("contest, mean of ratios to the best", best["mean_of_ratios"], 3.0, True)
        yield Target("the same by spans", best["mean_of_ratios_span"], 10.0, True)
        yield Target("contest, worst ratio", best["worst"], 1.0, True)
        yield Target("the same by spans", best["worst_span"], 1.0, True)
    if _has_peers(serving, "flashinfer"):
        worst = ratios(serving, "flashinfer")["worst"]
        yield Target("serving, worst ratio to flashinfer", worst, 1.3, True)
    skewed = {row["id"]: row["us"]["median"] for row in rows if row["id"].startswith("skewed")}
    if len(skewed) == 2:
        alone = skewed["skewed-alone"]
        yield Target("us of 8000 tokens among 30 of 6", skewed["skewed"], 1.3 * alone + 10)
    hosted = [row["host_us"] for row in rows if row["host_us"] is not None]
    if hosted:
        # Stricter than wanted: launches are in it.
        yield Target("host_us, worst", max(hosted), 15.0)


def prefill_us(row: Row) -> float | None:
    """What a contest row may take; None where nothing was asked."""
    size = _size(row)
    if size in SMALL:
        return SMALL[size]
    if size[0] <= max(total for total, _ in SMALL):
        return None
    least = 50.0 if size[0] == LARGEST else 0.0
    return max(least, 20.0 + 0.7 * row["work"]["chunks"])


def _size(row: Row) -> tuple[int, int]:
    return row["axes"]["total_seq_len"], row["axes"]["num_seqs"]


# ---- dsa_sparse_attention -----------------------------------------------------------------------

# Tokens to microseconds: contest rows up to so many; serving rows, all of whose indices are valid.
CONTEST_TOKENS_US = {2: 3.8, 8: 5.5}
FULL_US = {
    "local": {8: 9.0, 32: 26.0, 128: 80.0, 512: 230.0, 4096: 1600.0},
    "uniform": {8: 9.0, 32: 26.0, 128: 80.0, 512: 300.0, 4096: 2150.0},
}


def dsa_sparse_attention(rows: Sequence[Row]) -> Iterator[Target]:
    contest = [row for row in rows if row["list"] == "contest"]
    serving = [row for row in rows if row["list"] == "serving"]
    for row in contest + serving:
        limit = attention_us(row)
        if limit is not None:
            tokens, valid = row["axes"]["num_tokens"], row["work"]["valid"]
            name = f"us of {tokens} tokens, {valid} valid ({row['id'][:21]})"
            yield Target(name, row["us"]["median"], limit)
    if _has_peers(contest):
        best = ratios(contest, BEST)
        yield Target("contest, mean of ratios to the best", best["mean_of_ratios"], 2.7, True)
        yield Target("contest, worst ratio", best["worst"], 1.0, True)
    if _has_peers(contest, "flashmla"):
        mean = ratios(contest, "flashmla")["mean_of_ratios"]
        yield Target("contest, mean of ratios to flashmla", mean, 20.0, True)
    if _has_peers(serving):
        worst = ratios(serving, BEST)["worst"]
        yield Target("serving, worst ratio to the best", worst, 1.05, True)


def attention_us(row: Row) -> float | None:
    """What a row may take; None where nothing was asked."""
    tokens: int = row["axes"]["num_tokens"]
    if row["list"] == "contest":
        return next((us for most, us in CONTEST_TOKENS_US.items() if tokens <= most), None)
    for law, limits in FULL_US.items():
        if row["id"] == f"serving-{law}-t{tokens}":
            return limits.get(tokens)
    return None


# ---- every operator -----------------------------------------------------------------------------


def _has_peers(rows: Sequence[Row], name: str = BEST) -> bool:
    return any(peer_us(row, name, "sum_us") for row in rows)


OPERATORS: dict[str, Callable[[Sequence[Row]], Iterator[Target]]] = {
    "dsa_sparse_attention": dsa_sparse_attention,
    "gdn_prefill": gdn_prefill,
}


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
def main(result: Path) -> None:
    """Compare RESULT, a file that bench/run.py wrote for a GPU, with what was asked for."""
    found = targets(json.loads(result.read_text()))
    for target in found:
        click.echo(str(target))
    raise SystemExit(0 if all(target.is_met for target in found) else 1)


if __name__ == "__main__":
    main()
