#!/usr/bin/env python3
"""Two result files of an operator, row by row: what became slower, what faster.

    python bench/compare.py NEW REF
    python bench/compare.py bench/results/h200/gdn_decode.json \
        1448ec9:bench/results/h200/gdn_decode.json

A file may also be one of history, `<commit>:<path>`. Rows are matched by (list, id, axes, mode),
and in them what serves ("ours") and, where both files have it, every other route of `--variants`,
or every (route, config) of a sweep.

A time is slower where it is by more than both spreads together allow. Files hold the median, the
10th and the 90th percentile over single calls; the new median may lie above the reference's by
what the reference scatters upwards and the new one downwards:

    new.median - ref.median <= (ref.p90 - ref.median) + (new.median - new.p10)

Beyond that, where new.p10 > ref.p90, it is a regression, and where new.p90 < ref.p10 an
improvement. That is a rule for single rows: a shift smaller than the spread, of many rows, shows in
the means of each list, beside what the floor and the same version of a peer did meanwhile.

Exit status 1 if something is slower, wrong, or measured by the reference and failed now; 2 if the
files cannot be compared. Needs no GPU and no torch.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.files import NotAResult, Result, is_sweep, provenance, read

OURS = "ours"
# What makes another device; a driver, a clock or another specimen of the same product is named.
DEVICE = ("product", "arch", "num_sms", "threads")
MOST_LINES = 8  # of rows that only one file has


class Incomparable(ValueError):
    """Times of these files say nothing about each other."""


class Key(NamedTuple):
    """A row; axes in the file's order."""

    listed: str
    id: str
    axes: tuple[tuple[str, int], ...]
    mode: str

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.listed} {self.id} {sizes} {self.mode}"


@dataclass(frozen=True)
class Time:
    """Of one variant of a row: microseconds, and the route that served."""

    median: float
    p10: float
    p90: float
    route: str
    is_wrong: bool

    def __str__(self) -> str:
        return f"{self.median:.5g} us ({self.p10:.5g}..{self.p90:.5g})"


@dataclass(frozen=True)
class Pair:
    """The same variant of the same row in both files."""

    key: Key
    variant: str
    new: Time
    ref: Time

    @property
    def ratio(self) -> float:
        return self.new.median / self.ref.median

    @property
    def is_right(self) -> bool:
        return not (self.new.is_wrong or self.ref.is_wrong)

    @property
    def is_slower(self) -> bool:
        return self.is_right and self.new.p10 > self.ref.p90

    @property
    def is_faster(self) -> bool:
        return self.is_right and self.new.p90 < self.ref.p10

    def __str__(self) -> str:
        route = self.new.route
        if route != self.ref.route:
            route = f"{route} instead of {self.ref.route}"
        own = route if self.variant == OURS else self.variant
        return f"{self.key}, {own}: {self.new} instead of {self.ref}, x{self.ratio:.3f}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **_row(self.key),
            "variant": self.variant,
            "ratio": round(self.ratio, 4),
            **{
                name: {"route": t.route, "median": t.median, "p10": t.p10, "p90": t.p90}
                for name, t in (("new", self.new), ("ref", self.ref))
            },
        }


@dataclass(frozen=True)
class Comparison:
    """`wrong`: rows and variants that give wrong results now; those beside ours that the reference
    does not call wrong, too. `failed`: rows of the reference that were tried now and not measured,
    and why. `drift`: of what is not ours and should not have changed."""

    op: str
    new: str
    ref: str
    differences: dict[str, tuple[Any, Any]]
    pairs: list[Pair]
    wrong: list[tuple[Key, str]]
    failed: dict[Key, str]
    only_new: list[Key]
    only_ref: list[Key]
    variants_only: dict[str, Counter[str]]  # "new", "ref": variant to rows
    drift: dict[str, tuple[float, int]]  # name to geometric mean of new / ref, and rows

    @property
    def slower(self) -> list[Pair]:
        return sorted((p for p in self.pairs if p.is_slower), key=lambda p: -p.ratio)

    @property
    def faster(self) -> list[Pair]:
        return sorted((p for p in self.pairs if p.is_faster), key=lambda p: p.ratio)

    @property
    def is_worse(self) -> bool:
        return bool(self.slower or self.wrong or self.failed)

    def means(self) -> dict[tuple[str, str], tuple[float, int]]:
        """By list and mode the geometric mean of new / ref of ours, and of how many times."""
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        right = [pair for pair in self.pairs if pair.is_right]
        for pair in [pair for pair in right if pair.variant == OURS] or right:  # or all of a sweep
            found[pair.key.listed, pair.key.mode].append(pair.ratio)
        return {group: (_geomean(each), len(each)) for group, each in found.items()}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.op}: {self.new}"
        yield f"  against {self.ref}"
        for name, (new, ref) in self.differences.items():
            yield f"  other {name}: {new} instead of {ref}"
        for (listed, mode), (mean, rows) in self.means().items():
            yield f"  {listed} {mode}: x{mean:.3f} of the reference's time over {rows} times"
        for name, (mean, rows) in self.drift.items():
            yield f"  meanwhile {name}: x{mean:.3f} over {rows} rows"
        yield from _some("only new", self.only_new)
        yield from _some("only in the reference", self.only_ref)
        for where, counts in self.variants_only.items():
            for variant, rows in counts.items():
                yield f"  only {where}: {variant} on {rows} rows"
        yield from (f"  faster: {pair}" for pair in self.faster)
        yield from (f"  SLOWER: {pair}" for pair in self.slower)
        yield from (f"  WRONG: {key}, {variant}" for key, variant in self.wrong)
        yield from (f"  FAILED: {key}: {why}" for key, why in self.failed.items())
        same = sum(pair.is_right for pair in self.pairs) - len(self.slower) - len(self.faster)
        yield (
            f"  {len(self.slower)} slower, {len(self.faster)} faster, {same} within the spread;"
            f" {len(self.wrong)} wrong, {len(self.failed)} failed"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "new": self.new,
            "ref": self.ref,
            "differences": {
                name: {"new": new, "ref": ref} for name, (new, ref) in self.differences.items()
            },
            "means": [
                {"list": listed, "mode": mode, "ratio": round(mean, 4), "times": rows}
                for (listed, mode), (mean, rows) in self.means().items()
            ],
            "drift": {
                name: {"ratio": round(mean, 4), "rows": rows}
                for name, (mean, rows) in self.drift.items()
            },
            "slower": [pair.to_dict() for pair in self.slower],
            "faster": [pair.to_dict() for pair in self.faster],
            "compared": len(self.pairs),
            "wrong": [{**_row(key), "variant": variant} for key, variant in self.wrong],
            "failed": [{**_row(key), "why": why} for key, why in self.failed.items()],
            "only_new": [_row(key) for key in self.only_new],
            "only_ref": [_row(key) for key in self.only_ref],
            "variants_only": {where: dict(counts) for where, counts in self.variants_only.items()},
        }


def compare(new: Result, ref: Result, across_devices: bool = False) -> Comparison:
    """Raises Incomparable over files of two operators, of two kinds, with a row twice, without a
    row in common or, unless `across_devices`, of two devices."""
    for name in ("op", "kind"):
        if new.get(name) != ref.get(name):
            raise Incomparable(f"{name}: {new.get(name)} and {ref.get(name)} cannot be compared")
    differences = _differences(new, ref)
    others = [name for name in DEVICE if f"device {name}" in differences]
    if others and not across_devices:
        what = "; ".join(
            f"{name} {new['device'].get(name)} and {ref['device'].get(name)}" for name in others
        )
        raise Incomparable(f"two devices: {what} (--across-devices compares nevertheless)")
    times, before = _times(new), _times(ref)
    pairs = [
        Pair(key, variant, times[key][variant], before[key][variant])
        for key in times
        if key in before
        for variant in times[key]
        if variant in before[key] and not _is_ours(variant, times[key], before[key])
    ]
    failed = {_key(each): each["why"] for each in new.get("missing", ())}
    if not pairs and not failed.keys() & before.keys():
        raise Incomparable("no row is in both files")
    return Comparison(
        op=new["op"],
        new=provenance(new),
        ref=provenance(ref),
        differences=differences,
        pairs=pairs,
        wrong=[
            (key, variant)
            for key, each in times.items()
            for variant, time in each.items()
            if time.is_wrong and (variant == OURS or not _was_wrong(before.get(key, {}), variant))
        ],
        failed={key: why for key, why in failed.items() if key in before},
        only_new=[key for key in times if key not in before],
        only_ref=[key for key in before if key not in times and key not in failed],
        variants_only={
            "new": _variants_only(times, before),
            "in the reference": _variants_only(before, times),
        },
        drift=_drift(new, ref),
    )


def _differences(new: Result, ref: Result) -> dict[str, tuple[Any, Any]]:
    both = [_facts(data) for data in (new, ref)]
    names = list(dict.fromkeys([*both[0], *both[1]]))
    found = {name: (both[0].get(name), both[1].get(name)) for name in names}
    return {name: (one, other) for name, (one, other) in found.items() if one != other}


def _facts(data: Result) -> dict[str, Any]:
    """Everything beside the code that makes times differ, flat."""
    versions = dict(data["versions"])
    peers = versions.pop("peers", {})
    return {
        **{f"device {name}": value for name, value in data["device"].items()},
        **{f"protocol {name}": value for name, value in data["protocol"].items()},
        **{f"version of {name}": value for name, value in {**versions, **peers}.items()},
        "spec_digest": data.get("spec_digest"),
    }


def _times(data: Result) -> dict[Key, dict[str, Time]]:
    found: dict[Key, dict[str, Time]] = defaultdict(dict)
    for row in data["rows"]:
        key, is_wrong = _key(row), bool(row.get("failures"))
        each = {OURS: _time(row["us"], row["route"], is_wrong)}
        if is_sweep(data):
            each = {f"{row['route']} {json.dumps(row['config'])}": each[OURS]}
        for route, entry in row.get("variants", {}).items():
            if "us" in entry:
                each[route] = _time(entry["us"], route, bool(entry.get("failures")))
        twice = found[key].keys() & each.keys()
        if twice:
            raise Incomparable(f"{', '.join(sorted(twice))} of {key} stands there twice")
        found[key] |= each
    return dict(found)


def _time(us: Mapping[str, float], route: str, is_wrong: bool) -> Time:
    return Time(us["median"], us["p10"], us["p90"], route, is_wrong)


def _is_ours(variant: str, new: Mapping[str, Time], ref: Mapping[str, Time]) -> bool:
    """A route that serves in both files: its time is that of ours, compared already."""
    return all(OURS in each and each[OURS].route == variant for each in (new, ref))


def _was_wrong(before: Mapping[str, Time], variant: str) -> bool:
    return variant in before and before[variant].is_wrong


def _variants_only(
    times: Mapping[Key, Mapping[str, Time]], others: Mapping[Key, Mapping[str, Time]]
) -> Counter[str]:
    return Counter(
        variant
        for key, each in times.items()
        if key in others
        for variant in each
        if variant not in others[key]
    )


def _drift(new: Result, ref: Result) -> dict[str, tuple[float, int]]:
    """Of the floor and, where both files have them in the same versions, of the peers."""
    rows, before = ({_key(row): row for row in data["rows"]} for data in (new, ref))
    versions = [data["versions"].get("peers", {}) for data in (new, ref)]
    is_same = versions[0] == versions[1]
    ratios: dict[str, list[float]] = defaultdict(list)
    for key in rows.keys() & before.keys():
        row, old = rows[key], before[key]
        if row.get("floor_us") and old.get("floor_us"):
            ratios["the floor"].append(row["floor_us"] / old["floor_us"])
        for name, peer in row.get("peers", {}).items() if is_same else ():
            us, earlier = peer.get("sum_us"), old.get("peers", {}).get(name, {}).get("sum_us")
            if us and earlier:
                ratios[name].append(us / earlier)
    return {name: (_geomean(each), len(each)) for name, each in sorted(ratios.items())}


def _geomean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def _key(row: Mapping[str, Any]) -> Key:
    return Key(row["list"], row["id"], tuple(row["axes"].items()), row["mode"])


def _row(key: Key) -> dict[str, Any]:
    return {"list": key.listed, "id": key.id, "axes": dict(key.axes), "mode": key.mode}


def _some(name: str, keys: Sequence[Key]) -> Iterator[str]:
    yield from (f"  {name}: {key}" for key in keys[:MOST_LINES])
    if len(keys) > MOST_LINES:
        yield f"  {name}: {len(keys) - MOST_LINES} more rows (--json has all)"


@click.command()
@click.argument("new")
@click.argument("ref")
@click.option("--across-devices", is_flag=True, help="Also where the devices differ.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def main(new: str, ref: str, across_devices: bool, as_json: bool) -> None:
    """Compare NEW with REF, files that bench/run.py wrote, or <commit>:<path> of such ones."""
    try:
        found = compare(read(new), read(ref), across_devices)
    except (NotAResult, Incomparable) as error:
        raise click.UsageError(str(error)) from error
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    raise SystemExit(1 if found.is_worse else 0)


if __name__ == "__main__":
    main()
