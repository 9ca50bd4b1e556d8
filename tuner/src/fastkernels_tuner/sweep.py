"""A sweep file of `bench/run.py --sweep`, fitted into the draft of a measured table."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import ProblemKey, key_from_axes
from fastkernels.core.route import Decline, Operator
from fastkernels.core.table import Regime
from fastkernels.errors import ArgumentError
from fastkernels_tuner import read
from fastkernels_tuner.emit import Draft, Source
from fastkernels_tuner.errors import EvidenceError, SourceError
from fastkernels_tuner.fit import (
    Bounded,
    Candidate,
    Grid,
    Sample,
    Segment,
    evidence,
    fit,
    fit_boxes,
)

SCHEMA = 1
# CUPTI's time stamps come in steps of 32 ns: nothing below is known, however often it was measured.
TICK_NS = 32
Constants = tuple[tuple[str, int], ...]  # those that differ from the definition's
Group = tuple[str, Constants]  # mode, constants


class Row(NamedTuple):
    """One problem served by one candidate; no times where it failed."""

    problem: str
    group: Group
    size: Any  # on the variable axis; a tuple of sizes where there are several
    candidate: Candidate
    times_us: tuple[float, float, float] | None  # median, p10, p90
    trials: int
    calls: int  # behind each of the times
    serves_today: bool


@dataclass(frozen=True)
class Setting:
    """What every row of a file has in common."""

    where: str
    operator: Operator
    device: DeviceInfo
    axes: tuple[str, ...]  # those that vary
    iterations: int  # calls behind each median, where a row does not say it
    slowdown: float  # that a regime may cost against the best at a size

    def key(self, axes: dict[str, int], mode: str) -> ProblemKey:
        return key_from_axes(self.operator.spec, axes, self.device, mode)

    def size(self, key: ProblemKey) -> Any:
        sizes = tuple(key.axis(name) for name in self.axes)
        return sizes if len(sizes) > 1 else sizes[0]

    def corner(self, rows: list[Row], pick: Callable[[Iterable[int]], int]) -> tuple[int, ...]:
        """The smallest or largest measured size on each axis."""
        sizes = [row.size if isinstance(row.size, tuple) else (row.size,) for row in rows]
        return tuple(pick(column) for column in zip(*sizes, strict=True))

    def group(self, key: ProblemKey) -> Group:
        sizes = dict(key.axes)
        constants = self.operator.spec.constants.items()
        return key.mode, tuple((n, sizes[n]) for n, value in constants if sizes[n] != value)

    def unsuited(self, key: ProblemKey, candidate: Candidate) -> Decline | None:
        route = self.operator.route(candidate.route)
        assert route is not None
        return route.unsuited(key, route.make_config(candidate.config))


def draft(path: Path) -> Draft:
    return draft_from(Source.read(path))


def draft_from(source: Source) -> Draft:
    where = str(source.path)
    try:
        data = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{where}: expected a JSON object")
    read.expect(data, "schema", SCHEMA, where)
    read.expect(data, "kind", "sweep", where)
    operator = read.operator(data, where)
    axes = operator.spec.variable_axes
    read.expect(data, "spec_digest", operator.spec.digest, f"{where}: stale")
    setting = Setting(
        where,
        operator,
        _device(data, where),
        axes,
        _iterations(data, where),
        _slowdown(data, where),
    )
    rows = _rows(data, setting)
    failed = _failed(rows) | _crashed(data, setting)
    grids = _grids(rows, failed, setting)
    limits = tuple(
        (operator.spec.axis[name].at_least, high)
        for name, high in zip(axes, setting.corner(rows, max), strict=True)
    )
    if len(axes) == 1:
        _check_coverage(grids, limits[0], setting)
    kept = _kept(data, _failed(rows), setting)
    return Draft(
        source=source,
        option="sweep",
        operator=operator,
        status="measured",
        device=setting.device,
        provenance=_provenance(source, data, where),
        limits=dict(zip(axes, limits, strict=True)),
        regimes=tuple(
            regime
            for group, grid in grids.items()
            for regime in (kept[group] if group in kept else _regimes(grid, group, limits, setting))
        ),
        notes=(*failed.values(), *_unmeasured(data)),
    )


def _device(data: dict[str, Any], where: str) -> DeviceInfo:
    device = read.get(data, "device", dict, where)
    where = f"{where}: device"
    return DeviceInfo(
        read.get(device, "arch", str, where),
        read.get(device, "product", str, where),
        read.get(device, "num_sms", int, where),
    )


def _provenance(source: Source, data: dict[str, Any], where: str) -> dict[str, Any]:
    code = read.get(data, "code", dict, where)
    commit = read.get(code, "commit", str, f"{where}: code")
    dirty = read.get(code, "dirty", bool, f"{where}: code")
    versions = read.get(data, "versions", dict, where) | {"driver": data["device"].get("driver")}
    return source.provenance(
        commit=f"{commit}-dirty" if dirty else commit,
        created=read.moment(data, where),
        # Peers are no part of a table; a null says that a package was absent.
        versions={n: version for n, version in sorted(versions.items()) if type(version) is str},
        protocol=read.get(data, "protocol", dict, where),
    )


# ---- rows ---------------------------------------------------------------------------------------


def _rows(data: dict[str, Any], setting: Setting) -> list[Row]:
    rows, seen = [], set()
    for entry, where in _entries(data, "rows", setting.where):
        row = _row(entry, setting, where)
        identity = row._replace(times_us=None, trials=0, calls=0)
        if identity in seen:
            raise SourceError(f"{where}: {row.candidate} is there twice for {row.problem}")
        seen.add(identity)
        rows.append(row)
    if not rows:
        raise EvidenceError(f"{setting.where}: no rows")
    return rows


def _entries(data: dict[str, Any], name: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    for i, entry in enumerate(read.get(data, name, list, where)):
        if not isinstance(entry, dict):
            raise SourceError(f"{where}: {name}[{i}] is {entry!r}, expected an object")
        yield entry, f"{where}: {name}[{i}]"


def _row(entry: dict[str, Any], setting: Setting, where: str) -> Row:
    key = _key(entry, setting, where)
    is_right = read.get(entry, "failures", int, where) == 0 and _is_within(
        read.get(entry, "error", dict, where), f"{where}: error"
    )
    return Row(
        f"{read.get(entry, 'list', str, where)} {read.get(entry, 'id', str, where)}",
        setting.group(key),
        setting.size(key),
        _candidate(entry, setting, where),
        _times(read.get(entry, "us", dict, where), f"{where}: us") if is_right else None,
        read.get(entry, "trials", int, where),
        _count(entry.get("calls", setting.iterations), "calls", where),
        entry.get("serves_today") is True,
    )


def _key(entry: dict[str, Any], setting: Setting, where: str) -> ProblemKey:
    try:
        return setting.key(
            read.get(entry, "axes", dict, where), read.get(entry, "mode", str, where)
        )
    except ArgumentError as error:
        raise SourceError(f"{where}: {error}") from None


def _candidate(entry: dict[str, Any], setting: Setting, where: str) -> Candidate:
    name, knobs = read.get(entry, "route", str, where), read.get(entry, "config", dict, where)
    return read.candidate(setting.operator, name, knobs, where)


def _is_within(error: dict[str, Any], where: str) -> bool:
    value, limit = _number(error.get("value"), where), _number(error.get("limit"), where)
    return value <= limit  # NaN is not


def _iterations(data: dict[str, Any], where: str) -> int:
    return _count(data.get("protocol", {}).get("iterations"), "iterations", f"{where}: protocol")


def _count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or value < 1:
        raise SourceError(f"{where} has {name} = {value!r}, expected a count")
    return value


def _slowdown(data: dict[str, Any], where: str) -> float:
    """`fit` in the protocol says what a regime may cost; without it, nothing beyond the spread."""
    value = data.get("protocol", {}).get("slowdown", 0.0)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise SourceError(f"{where}: protocol has slowdown = {value!r}, expected a fraction")
    return float(value)


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise SourceError(f"{where} has {value!r}, expected a number")
    return float(value)


def _times(data: dict[str, Any], where: str) -> tuple[float, float, float]:
    middle, low, high = (_number(data.get(name), where) for name in ("median", "p10", "p90"))
    if not 0.001 <= low <= middle <= high < math.inf:
        raise SourceError(f"{where} is {data}, expected 0.001 <= p10 <= median <= p90")
    return middle, low, high


# ---- failures -----------------------------------------------------------------------------------


def _failed(rows: list[Row]) -> dict[Candidate, str]:
    """Candidates that were wrong somewhere, each with a note. They are out everywhere: a kernel
    that is wrong at one size is not trusted at another."""
    return {
        row.candidate: f"{row.candidate} is out: wrong on {row.problem}, {_describe(row.group)}"
        for row in reversed(rows)
        if row.times_us is None
    }


def _crashed(data: dict[str, Any], setting: Setting) -> dict[Candidate, str]:
    """Candidates that could not be measured on a problem that they should serve: out as well."""
    notes = {}
    for entry, where in _entries({"left_out": []} | data, "left_out", setting.where):
        if "route" in entry:
            key, candidate = _key(entry, setting, where), _candidate(entry, setting, where)
            if setting.unsuited(key, candidate) is None:
                notes[candidate] = f"{candidate} is out: {entry.get('why')} ({key.describe()})"
    return notes


def _unmeasured(data: dict[str, Any]) -> Iterator[str]:
    """Problems that were not measured at all."""
    for entry in data.get("left_out", ()):
        if "route" not in entry:
            yield f"not measured: {entry.get('id')}, mode {entry.get('mode')}: {entry.get('why')}"


# ---- grids --------------------------------------------------------------------------------------


def _grids(rows: list[Row], failed: dict[Candidate, str], setting: Setting) -> dict[Group, Grid]:
    pools: dict[Group, dict[Any, dict[Candidate, list[Row]]]] = defaultdict(dict)
    today: dict[Group, dict[Any, Candidate]] = defaultdict(dict)
    for row in rows:
        if row.serves_today:
            today[row.group][row.size] = row.candidate
        pool = pools[row.group].setdefault(row.size, {})
        if row.candidate not in failed:
            pool.setdefault(row.candidate, []).append(row)
    for group, sizes in pools.items():
        for size, pool in sizes.items():
            if not pool:
                raise EvidenceError(
                    "\n  ".join(
                        [
                            f"{setting.where}: no candidate without failures serves "
                            f"{_describe(group)}: {', '.join(setting.axes)} = {size}",
                            *failed.values(),
                        ]
                    )
                )
    return {
        group: Grid(
            {
                size: {candidate: _pool(found) for candidate, found in pool.items()}
                for size, pool in sizes.items()
            },
            setting.slowdown,
            today[group],
        )
        for group, sizes in sorted(pools.items(), key=lambda item: item[0])
    }


# Of normal scatter: p90 lies 1.2816 sigma from the median, and the median of n calls is known to
# 1.96 * 1.2533 sigma / sqrt(n) with 95 % confidence.
_P90_TO_MEDIAN = 1.96 * 1.2533 / 1.2816


def _pool(rows: list[Row]) -> Sample:
    """Problems of one size are one sample: the median of what each of them shows. Its spread is how
    well that median is known, not how far single calls scatter."""
    times = [row.times_us for row in rows if row.times_us is not None]
    middle, low, high = (1000 * median(column) for column in zip(*times, strict=True))
    calls = min(row.calls for row in rows)
    spread = max(high - middle, middle - low) * min(1.0, _P90_TO_MEDIAN / math.sqrt(calls))
    spread = max(round(spread), TICK_NS)
    return Sample(round(middle), spread, len(rows), sum(row.trials for row in rows))


def _check_coverage(grids: dict[Group, Grid], limits: tuple[int, int], setting: Setting) -> None:
    """Every mode, and both ends of the limits in every group: nothing is extrapolated upwards."""
    low, high = limits
    low = max(low, 1)  # a call with nothing in it launches nothing
    missing = []
    for group in sorted({*grids, *((mode, ()) for mode in setting.operator.spec.modes)}):
        sizes = grids[group].sizes if group in grids else ()
        if not sizes or sizes[0] > low:
            missing.append(f"{_describe(group)}: {setting.axes[0]} = {low}")
        if not sizes or sizes[-1] < high:
            missing.append(f"{_describe(group)}: {setting.axes[0]} = {high}")
    if missing:
        raise EvidenceError(
            "\n  ".join(
                [
                    f"{setting.where}: rows are missing, since every mode and choice of constants "
                    f"must reach from {low} to {high}:",
                    *missing,
                ]
            )
        )


def _describe(group: Group) -> str:
    mode, constants = group
    return ", ".join([f"mode {mode}", *(f"{name} = {size}" for name, size in constants)])


# ---- regimes ------------------------------------------------------------------------------------


def _kept(
    data: dict[str, Any], failed: dict[Candidate, str], setting: Setting
) -> dict[Group, list[Regime]]:
    """Regimes that stay as they were, with the evidence of their own time: what was fitted here has
    not beaten them. None of their candidates may have been wrong since."""
    found: dict[Group, list[Regime]] = {}
    for entry, where in _entries({"kept": []} | data, "kept", setting.where):
        mode, constants = (
            read.get(entry, "mode", str, where),
            read.get(entry, "constants", dict, where),
        )
        regimes = []
        for each, place in _entries(entry, "regimes", where):
            candidate = _candidate(each, setting, place)
            if candidate in failed:
                raise EvidenceError(f"{place} serves today, and {failed[candidate]}")
            axes = {
                name: (int(low), int(high))
                for name, (low, high) in read.get(each, "axes", dict, place).items()
            }
            regimes.append(
                Regime(
                    mode=mode,
                    axes=axes,
                    constants={name: (size, size) for name, size in constants.items()},
                    route=candidate.route,
                    config=candidate.config,
                    evidence=read.get(each, "evidence", dict, place),
                )
            )
        found[mode, tuple(constants.items())] = regimes
    return found


def _regimes(
    grid: Grid, group: Group, limits: tuple[tuple[int, int], ...], setting: Setting
) -> list[Regime]:
    mode, constants = group
    boxes = _boxes(grid, group, limits, setting)
    segments = [segment for _, segment in boxes]
    return [
        Regime(
            mode=mode,
            axes=dict(zip(setting.axes, bounds, strict=True)),
            constants={name: (size, size) for name, size in constants},
            route=segment.candidate.route,
            config=segment.candidate.config,
            evidence=evidence(grid, segments, i, setting.axes),
        )
        for i, (bounds, segment) in enumerate(boxes)
    ]


def _boxes(
    grid: Grid, group: Group, limits: tuple[tuple[int, int], ...], setting: Setting
) -> list[Bounded]:
    if len(limits) > 1:
        return fit_boxes(grid, limits)
    mode, constants = group

    def takes(candidate: Candidate, size: int) -> bool:
        key = setting.key({setting.axes[0]: size, **dict(constants)}, mode)
        return setting.unsuited(key, candidate) is None

    segments = fit(grid)
    lasts = [boundary(lower, upper, takes) for lower, upper in pairwise(segments)]
    lows = [limits[0][0], *(last + 1 for last in lasts)]
    highs = [*lasts, limits[0][1]]
    return [
        Bounded(((low, high),), segment)
        for segment, low, high in zip(segments, lows, highs, strict=True)
    ]


def boundary(lower: Segment, upper: Segment, takes: Callable[[Candidate, int], bool]) -> int:
    """The last size of `lower`: nothing was measured between the two, so the midpoint, or what is
    nearest to it such that each side takes the size that the boundary gives it."""
    last, first = lower.sizes[-1], upper.sizes[0]
    middle = (last + first) // 2
    legal = (
        size
        for size in range(last, first)
        if takes(lower.candidate, size) and takes(upper.candidate, size + 1)
    )
    return min(legal, key=lambda size: abs(size - middle), default=middle)
