"""What reports, plots and pages ask of a result file's rows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def groups(rows: Iterable[Row], axis: str) -> dict[str, dict[int, list[Row]]]:
    """Rows by mode, then by size of the axis, both in order."""
    found: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["mode"]][row["axes"][axis]].append(row)
    return {mode: dict(sorted(sizes.items())) for mode, sizes in found.items()}


def varying_axis(rows: Iterable[Row]) -> str:
    """The one with most sizes."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for name, size in row["axes"].items():
            sizes[name].add(size)
    return max(sizes, key=lambda name: len(sizes[name]))


def median(rows: Iterable[Row], value: Callable[[Row], float | None]) -> float | None:
    values = [each for row in rows if (each := value(row)) is not None]
    return statistics.median(values) if values else None


def ours(row: Row) -> float | None:
    found: float = row["us"]["median"]
    return found


def floor(row: Row) -> float | None:
    return row.get("floor_us")


def peer(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get("peers", {}).get(name, {}).get("sum_us")


def peer_names(rows: Iterable[Row]) -> list[str]:
    return sorted({name for row in rows for name in row.get("peers", {})})


def served_by(row: Row) -> str:
    """Route and config, which are what a regime of a table chooses."""
    knobs = ", ".join(f"{name}={value}" for name, value in row.get("config", {}).items())
    return f"{row['route']}({knobs})"


def regimes(rows: Sequence[Row]) -> dict[str, int]:
    """What serves, by a number, in the order of the axis with most sizes."""
    axis = varying_axis(rows)
    ordered = sorted(rows, key=lambda row: row["axes"][axis])
    return {name: i for i, name in enumerate(dict.fromkeys(map(served_by, ordered)))}


def letter(number: int) -> str:
    """A, B, .., Z, AA, AB, .."""
    return (letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
