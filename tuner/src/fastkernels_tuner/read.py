"""Typed access to parsed JSON and TOML, with errors that name the place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from typing import Any, TypeVar

from fastkernels import catalog
from fastkernels.core.route import Operator
from fastkernels.errors import ArgumentError
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.fit import Candidate

T = TypeVar("T")


def get(data: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    value = data.get(name)
    if type(value) is not kind:
        raise SourceError(f"{where}: {name} is {value!r}, expected {kind.__name__}")
    return value


def only(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise SourceError(f"{where}: the entry {unknown[0]!r} is unknown")


def expect(data: Mapping[str, Any], name: str, value: Any, where: str) -> None:
    if data.get(name) != value:
        raise SourceError(f"{where}: {name} is {data.get(name)!r}, expected {value!r}")


def operator(data: Mapping[str, Any], where: str) -> Operator:
    try:
        return catalog.operator(get(data, "op", str, where))
    except ArgumentError as error:
        raise SourceError(f"{where}: {error}") from None


def moment(data: Mapping[str, Any], where: str) -> date:
    """`created`: a TOML date, or ISO 8601 text; it is copied into the table, never taken anew."""
    value = data.get("created")
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value.replace("Z", "+00:00"))  # "Z": from Python 3.11
        if isinstance(value, date):
            return value
    except ValueError:
        pass
    raise SourceError(f"{where}: created is {value!r}, expected a date or time of ISO 8601")


def candidate(found: Operator, name: str, knobs: dict[str, Any] | None, where: str) -> Candidate:
    """The route and config of these names, knobs in the route's order."""
    route = found.route(name)
    if route is None:
        known = ", ".join(route.name for route in found.routes)
        raise SourceError(f"{where}: the route {name!r} is unknown, expected one of {known}")
    try:
        config = route.make_config(knobs)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{where}: {error}") from None
    return Candidate(name, tuple(dataclasses.asdict(config).items()))
