"""Dispatch tables: TOML to typed regimes, checks, lookup by named integers. Imports no torch.

A regime is a box over variable axes, a mode, and any constant axis it names (unnamed constants
equal the definition's). `lookup` knows sizes and names only; what a route is, is none of its
business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels.core.archs import product_slug
from fastkernels.core.spec import OpSpec
from fastkernels.errors import TableError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
STATUSES = ("measured", "unmeasured")
EVIDENCE = ("cases", "worst_us", "spread_us", "margin", "trials", "failures")

Interval = tuple[int, int]
Box = dict[str, Interval]


@dataclass(frozen=True)
class Regime:
    """`axes` bound variable axes, `constants` the constant axes that differ from the definition."""

    mode: str
    axes: Box
    constants: Box
    route: str
    config: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    def contains(self, axes: Mapping[str, int], mode: str, constants: Mapping[str, int]) -> bool:
        return (
            mode == self.mode
            and _inside(self.axes, axes)
            and _constants_match(self.constants, axes, constants)
        )

    def describe(self) -> str:
        bounds = [
            f"{name} {low}..{high}" for name, (low, high) in (self.axes | self.constants).items()
        ]
        return ", ".join([f"mode {self.mode}", *bounds])


@dataclass(frozen=True)
class Fallback:
    """What serves problems outside every regime; `constants` and `mode` narrow it where given."""

    mode: str | None
    constants: Box
    route: str
    config: dict[str, Any] | None
    reason: str


class Hit(NamedTuple):
    """The entry that serves a problem."""

    entry: Regime | Fallback
    where: str  # for people: which entry of the file this is

    @property
    def is_fallback(self) -> bool:
        return isinstance(self.entry, Fallback)


@dataclass(frozen=True)
class Table:
    """One file of `dispatch_tables/<op>/`, checked against its operator's spec."""

    path: str
    op: str
    status: str
    arch: str
    product: str
    num_sms: int
    provenance: dict[str, Any]
    limits: Box
    regimes: tuple[Regime, ...]
    fallbacks: tuple[Fallback, ...]
    constants: dict[str, int]  # the definition's

    def lookup(self, axes: Mapping[str, int], mode: str) -> Hit | None:
        """The regime that contains the problem, else the first fallback that matches, else None."""
        for position, regime in enumerate(self.regimes, 1):
            if regime.contains(axes, mode, self.constants):
                return Hit(regime, f"regime {position} ({regime.describe()})")
        for position, fallback in enumerate(self.fallbacks, 1):
            if fallback.mode in (None, mode) and _inside(fallback.constants, axes):
                return Hit(fallback, f"fallback {position}: {fallback.reason}")
        return None

    @property
    def versions(self) -> dict[str, Any]:
        """Package versions that the table was measured with."""
        return dict(self.provenance.get("versions", {}))

    def configs(self, route: str) -> Iterator[dict[str, Any]]:
        """Every config that this table names for a route."""
        entries: tuple[Regime | Fallback, ...] = (*self.regimes, *self.fallbacks)
        for entry in entries:
            if entry.route == route and entry.config is not None:
                yield entry.config


def file_name(arch: str, product: str) -> str:
    """`sm90-h200.toml`; a device whose product says no more than its architecture is `cpu.toml`."""
    slug = product_slug(product)
    return f"{arch}.toml" if slug == arch else f"{arch}-{slug}.toml"


def gap_values(table: Table | None, axis: str, at_least: int = 0) -> list[int]:
    """The integers around every regime boundary and limit of an axis, and their neighbours."""
    if table is None:
        return []
    edges: set[int] = set()
    for box in (table.limits, *(regime.axes for regime in table.regimes)):
        edges.update(box.get(axis, ()))
    return sorted({v for edge in edges for v in (edge - 1, edge, edge + 1) if v >= at_least})


# ---- reading ------------------------------------------------------------------------------------


def read(path: Path, spec: OpSpec) -> Table:
    """Read and check one file. Raises TableError naming the file and what is wrong."""
    try:
        return parse(path.read_text(encoding="utf-8"), spec, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read: {error}") from error


def parse(text: str, spec: OpSpec, path: str = "<text>") -> Table:
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        raise TableError(f"{path}: not TOML: {error}") from error
    try:
        return _table(_plain(data), spec, path)
    except _Wrong as error:
        raise TableError(f"{path}: {error}") from None


class _Wrong(Exception):
    pass


def _plain(value: Any) -> Any:
    """TOML's dates and times as text, so that everything that is kept can be printed as JSON."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.isoformat() if isinstance(value, (date, time)) else value


def _table(data: dict[str, Any], spec: OpSpec, path: str) -> Table:
    _only(
        data,
        {
            "schema",
            "op",
            "status",
            "spec_digest",
            "device",
            "provenance",
            "limits",
            "regime",
            "fallback",
        },
        "the file",
    )
    if _get(data, "schema", int, "the file") != SCHEMA:
        raise _Wrong(f"schema is {data.get('schema')!r}, expected {SCHEMA}")
    if data.get("op") != spec.name:
        raise _Wrong(f"op is {data.get('op')!r}, expected {spec.name!r}")
    if data.get("status") not in STATUSES:
        raise _Wrong(f"status is {data.get('status')!r}, expected one of {STATUSES}")
    if data.get("spec_digest") != spec.digest:
        raise _Wrong(
            f"spec_digest is {data.get('spec_digest')!r}, but {spec.name} is now {spec.digest!r}: "
            "the table was made for another version of the operator"
        )
    device = _get(data, "device", dict, "the file")
    _only(device, {"arch", "product", "num_sms"}, "[device]")
    provenance = _get(data, "provenance", dict, "the file")
    _get({"versions": {}} | provenance, "versions", dict, "[provenance]")
    fallbacks = data.get("fallback", [])
    fallbacks = _tables_of("fallback", [fallbacks] if isinstance(fallbacks, dict) else fallbacks)
    return Table(
        path=path,
        op=spec.name,
        status=data["status"],
        arch=_get(device, "arch", str, "[device]"),
        product=_get(device, "product", str, "[device]"),
        num_sms=_get(device, "num_sms", int, "[device]"),
        provenance=provenance,
        limits=_box(
            _get({"limits": {}} | data, "limits", dict, "the file"),
            set(spec.variable_axes),
            "[limits]",
        ),
        regimes=tuple(
            _regime(entry, spec, f"regime {i}")
            for i, entry in enumerate(_tables_of("regime", data.get("regime", [])), 1)
        ),
        fallbacks=tuple(
            _fallback(entry, spec, f"fallback {i}") for i, entry in enumerate(fallbacks, 1)
        ),
        constants=dict(spec.constants),
    )


def _tables_of(name: str, entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _Wrong(f"{name} is {entries!r}, expected [[{name}]] tables")
    return entries


def _regime(data: dict[str, Any], spec: OpSpec, where: str) -> Regime:
    constants = set(spec.constants)
    _only(data, {*spec.variable_axes, *constants, "mode", "route", "config", "evidence"}, where)
    return Regime(
        mode=_mode(data, spec, where, required=True) or spec.modes[0],
        axes=_box({k: v for k, v in data.items() if k in spec.variable_axes}, set(data), where),
        constants=_constants(data, spec, where),
        route=_get(data, "route", str, where),
        config=_get(data, "config", dict, where),
        evidence=_get({"evidence": {}} | data, "evidence", dict, where),
    )


def _fallback(data: dict[str, Any], spec: OpSpec, where: str) -> Fallback:
    _only(data, {*spec.constants, "mode", "route", "config", "reason"}, where)
    return Fallback(
        mode=_mode(data, spec, where, required=False),
        constants=_constants(data, spec, where),
        route=_get(data, "route", str, where),
        config=_get(data, "config", dict, where) if "config" in data else None,
        reason=_get(data, "reason", str, where),
    )


def _constants(data: dict[str, Any], spec: OpSpec, where: str) -> Box:
    """The constant axes an entry names, those equal to the definition's left out."""
    box = _box({k: v for k, v in data.items() if k in spec.constants}, set(data), where)
    return {k: v for k, v in box.items() if v != (spec.constants[k], spec.constants[k])}


def _mode(data: dict[str, Any], spec: OpSpec, where: str, required: bool) -> str | None:
    mode = data.get("mode")
    if mode is None:
        if required and len(spec.modes) > 1:
            raise _Wrong(f"{where} names no mode, expected one of {spec.modes}")
        return None
    if mode not in spec.modes:
        raise _Wrong(f"{where} has mode {mode!r}, expected one of {spec.modes}")
    return str(mode)


def _box(data: dict[str, Any], known: set[str], where: str) -> Box:
    _only(data, known, where)
    box: Box = {}
    for name, bounds in data.items():
        ends = bounds if isinstance(bounds, list) else [bounds, bounds]
        if (
            len(ends) != 2
            or any(type(end) is not int for end in ends)
            or not 0 <= ends[0] <= ends[1]
        ):
            raise _Wrong(
                f"{where} bounds {name} by {bounds!r}, expected [low, high] with 0 <= low <= high"
            )
        box[name] = (ends[0], ends[1])
    return box


def _get(data: dict[str, Any], name: str, kind: type, where: str) -> Any:
    value = data.get(name)
    if type(value) is not kind:
        raise _Wrong(f"{where} has {name} = {value!r}, expected {kind.__name__}")
    return value


def _only(data: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise _Wrong(f"{where} has the unknown entry {unknown[0]!r}")


def _inside(box: Box, axes: Mapping[str, int]) -> bool:
    return all(low <= axes[name] <= high for name, (low, high) in box.items())


def _constants_match(box: Box, axes: Mapping[str, int], constants: Mapping[str, int]) -> bool:
    return _inside(box, axes) and all(
        axes[name] == value for name, value in constants.items() if name not in box
    )


# ---- lint ---------------------------------------------------------------------------------------


def lint(table: Table) -> list[str]:
    """What is wrong with a table that could be read: order, overlap, gaps, evidence, file name.

    Whether its routes exist and support their corners is checked in `core.dispatch.lint_table`.
    """
    problems = [*_lint_geometry(table), *_lint_evidence(table)]
    if not table.fallbacks:
        problems.append("no [[fallback]]: problems outside the regimes would have no entry")
    elif not _is_catch_all(table.fallbacks[-1]):
        problems.append(
            "the last [[fallback]] is narrowed by mode or constants, expected a catch-all"
        )
    for position, fallback in enumerate(table.fallbacks[:-1], 1):
        if _is_catch_all(fallback):
            problems.append(f"fallback {position} is a catch-all, so no later one ever applies")
    name = file_name(table.arch, table.product)
    if table.path != "<text>" and Path(table.path).name != name:
        problems.append(f"the file is named {Path(table.path).name}, expected {name}")
    return problems


def _is_catch_all(fallback: Fallback) -> bool:
    return not fallback.constants and fallback.mode is None


def _group(regime: Regime) -> tuple[str, tuple[tuple[str, Interval], ...]]:
    return regime.mode, tuple(sorted(regime.constants.items()))


def _corner(regime: Regime) -> tuple[Any, ...]:
    return (*_group(regime), tuple(low for low, _ in regime.axes.values()))


def _lint_geometry(table: Table) -> Iterator[str]:
    if table.regimes and not table.limits:
        yield "[limits] is missing: it bounds the measured range of every variable axis"
        return
    for position, regime in enumerate(table.regimes, 1):
        if set(regime.axes) != set(table.limits):
            yield f"regime {position} bounds {sorted(regime.axes)}, expected {sorted(table.limits)}"
            return
        for name, (low, high) in regime.axes.items():
            if low < table.limits[name][0] or high > table.limits[name][1]:
                yield f"regime {position} leaves [limits] on {name}"
    if list(table.regimes) != sorted(table.regimes, key=_corner):
        yield "regimes are not sorted by mode, constants and lower corner"
    for (i, a), (j, b) in combinations(enumerate(table.regimes, 1), 2):
        if a.mode == b.mode and _boxes_meet(a, b, table.constants):
            yield f"regimes {i} and {j} overlap"
    volume = math.prod(high - low + 1 for low, high in table.limits.values())
    covered: dict[Any, int] = {}
    for regime in table.regimes:
        size = math.prod(high - low + 1 for low, high in regime.axes.values())
        covered[_group(regime)] = covered.get(_group(regime), 0) + size
    for (mode, constants), size in covered.items():
        if size < volume:
            where = "".join(f", {name} {low}..{high}" for name, (low, high) in constants)
            yield f"gap: mode {mode}{where} covers {size} of {volume} problems in [limits]"


def _boxes_meet(a: Regime, b: Regime, constants: Mapping[str, int]) -> bool:
    def bounds(regime: Regime, name: str) -> Interval:
        fixed = (constants[name], constants[name]) if name in constants else (0, sys.maxsize)
        return (regime.axes | regime.constants).get(name, fixed)

    names = {*a.axes, *b.axes, *a.constants, *b.constants}
    pairs = [(bounds(a, name), bounds(b, name)) for name in names]
    return all(x[0] <= y[1] and y[0] <= x[1] for x, y in pairs)


def _is_number(value: Any, is_count: bool) -> bool:
    if type(value) not in (int, float) or not math.isfinite(value):
        return False
    return bool(value >= (1 if is_count else 0))


def _lint_evidence(table: Table) -> Iterator[str]:
    if table.status != "measured":
        return
    for name in ("tool", "commit", "created", "versions", "protocol", "evidence_sha256"):
        if name not in table.provenance:
            yield f"[provenance] has no {name}, expected one in a measured table"
    sizes: dict[Any, int] = {}
    for regime in table.regimes:
        sizes[_group(regime)] = sizes.get(_group(regime), 0) + 1
    for position, regime in enumerate(table.regimes, 1):
        missing = [name for name in EVIDENCE if name not in regime.evidence]
        if missing:
            yield f"regime {position} has no evidence of {missing[0]}"
            continue
        evidence = regime.evidence
        wrong = [n for n in EVIDENCE if not _is_number(evidence[n], n in ("cases", "trials"))]
        if wrong:
            yield f"regime {position} has {wrong[0]} = {evidence[wrong[0]]!r}, expected a number"
            continue
        if evidence["failures"]:
            yield f"regime {position} has {evidence['failures']} failures, expected 0"
        if (
            sizes[_group(regime)] > 1
            and evidence["margin"] * evidence["worst_us"] <= evidence["spread_us"]
        ):
            yield (
                f"regime {position} has margin {evidence['margin']} of {evidence['worst_us']} us,"
                f" expected more than the spread of {evidence['spread_us']} us for a boundary"
            )
