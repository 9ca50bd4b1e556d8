"""A rule file, written by a person for a GPU that we cannot measure, as the draft of an unmeasured
table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fastkernels.core import archs
from fastkernels.core.device import DeviceInfo
from fastkernels.core.route import Operator
from fastkernels.core.table import Box, Regime
from fastkernels_tuner import read
from fastkernels_tuner.emit import Draft, Source
from fastkernels_tuner.errors import SourceError

SCHEMA = 1


def draft(path: Path) -> Draft:
    source = Source.read(path)
    where = str(path)
    try:
        data = tomlkit.parse(source.text).unwrap()
    except (TOMLKitError, ValueError, RecursionError) as error:
        raise SourceError(f"{where}: not TOML: {error}") from error
    read.only(data, ("schema", "op", "product", "created", "limits", "rule"), where)
    read.expect(data, "schema", SCHEMA, where)
    operator = read.operator(data, where)
    product = archs.PRODUCTS.get(read.get(data, "product", str, where))
    if product is None:
        known = ", ".join(archs.PRODUCTS)
        raise SourceError(f"{where}: product is {data['product']!r}, expected one of {known}")
    limits = _box(read.get(data, "limits", dict, where), operator.spec.variable_axes, where)
    rules = read.get(data, "rule", list, where)
    return Draft(
        source=source,
        option="rules",
        operator=operator,
        status="unmeasured",
        device=DeviceInfo(product.arch, product.name, product.num_sms),
        provenance=source.provenance(created=read.moment(data, where)),
        limits=limits,
        regimes=tuple(
            regime
            for i, rule in enumerate(rules, 1)
            for regime in _regimes(rule, operator, limits, f"{where}: rule {i}")
        ),
    )


def _regimes(rule: Any, operator: Operator, limits: Box, where: str) -> Iterator[Regime]:
    """One regime a mode. An axis that a rule does not name spans the limits, a config that it does
    not name is the route's default."""
    if not isinstance(rule, dict):
        raise SourceError(f"{where}: expected a [[rule]] table")
    spec = operator.spec
    axes, constants = spec.variable_axes, tuple(spec.constants)
    read.only(rule, (*axes, *constants, "modes", "route", "config", "reason"), where)
    config = read.get(rule, "config", dict, where) if "config" in rule else None
    candidate = read.candidate(operator, read.get(rule, "route", str, where), config, where)
    box = _box({n: v for n, v in rule.items() if n in axes or n in constants}, tuple(rule), where)
    modes = read.get({"modes": [*spec.modes]} | rule, "modes", list, where)
    for mode in modes:
        if mode not in spec.modes:
            raise SourceError(f"{where}: mode {mode!r} is unknown, expected one of {spec.modes}")
        yield Regime(
            mode=mode,
            axes={name: box.get(name, limits[name]) for name in limits},
            constants={name: box[name] for name in constants if name in box},
            route=candidate.route,
            config=candidate.config,
            evidence={"reason": read.get(rule, "reason", str, where)},
        )


def _box(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> Box:
    read.only(data, known, where)
    box: Box = {}
    for name, bounds in data.items():
        ends = bounds if isinstance(bounds, list) else [bounds, bounds]
        if len(ends) != 2 or any(type(end) is not int for end in ends):
            raise SourceError(f"{where}: {name} is {bounds!r}, expected [low, high]")
        box[name] = (ends[0], ends[1])
    return {name: box[name] for name in known if name in box}  # in the order of the spec
