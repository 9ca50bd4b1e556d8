"""Plots of a result file: times over an axis with peers, floor and regimes, and ratios to peers.

As SVG or PNG of their own, or inline in a page whose colours they take. Needs matplotlib
(fastkernels[bench]); the same bytes come from the same file.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from bench.rows import (
    Row,
    floor,
    groups,
    letter,
    median,
    ours,
    peer,
    peer_names,
    regimes,
    served_by,
)
from bench.summary import BEST, peer_us

# By name: as plots draw it and pages in daylight show it, and a page's in the dark.
PALETTE = {
    "paper": ("#ffffff", "#14171c"),
    "raised": ("#f5f6f8", "#1c2027"),
    "ink": ("#16191f", "#e8eaee"),
    "muted": ("#5a6270", "#a3abb8"),
    "line": ("#dfe2e7", "#2e343e"),
    "link": ("#1659bc", "#7cc4ff"),
    "bad": ("#b3261e", "#ffa39b"),
    "series-0": ("#1659bb", "#56c5ff"),
    "series-1": ("#db7112", "#f0e155"),
    "series-2": ("#690414", "#986501"),
    "series-3": ("#7389f2", "#84f6e1"),
    "series-4": ("#a6748e", "#6466c1"),
    "series-5": ("#082d74", "#b0ad05"),
    "series-6": ("#a53500", "#359f98"),
}
INK, MUTED, LINE, PAPER, BAD = (PALETTE[n][0] for n in ("ink", "muted", "line", "paper", "bad"))
SERIES = [light for name, (light, _) in PALETTE.items() if name.startswith("series")]
PEER_MARKERS = ("s", "^", "D", "v")

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are no formulas
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 8.5,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}
_PANEL = (4.4, 3.0)  # inches
_COLUMNS = 2
_BINS = 28


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults with ours, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


# ---- plots --------------------------------------------------------------------------------------


def latency(data: Mapping[str, Any], axis: str) -> Figure:
    """One panel per mode: every row in its regime's colour, medians of ours, the floor and the
    peers over the axis, both logarithmic."""
    rows, names = data["rows"], peer_names(data["rows"])
    modes, cast = groups(rows, axis), regimes(data["rows"])
    with style():
        figure, panels = _panels(len(modes), len(cast) + len(names) + 2)
        for panel, (mode, sizes) in zip(panels, modes.items(), strict=True):
            for name, marker in zip(names, _cycle(PEER_MARKERS, len(names)), strict=True):
                _line(panel, sizes, peer(name), color=MUTED, lw=0.9, marker=marker, ms=3)
            _line(panel, sizes, floor, color=MUTED, lw=1.2, ls=":")
            _line(panel, sizes, ours, color=INK, lw=0.9)
            for name, number in cast.items():
                points = [
                    (size, row["us"]["median"])
                    for size, own in sizes.items()
                    for row in own
                    if served_by(row) == name
                ]
                if points:
                    panel.plot(*zip(*points, strict=True), **_dots(number))
            panel.set_title(mode, loc="left", color=MUTED)
            panel.set(xlabel=axis, xscale="log", yscale="log")
            _ticks(panel.xaxis, LogLocator(2, numticks=12))
            if len(sizes) == 1:
                (size,) = sizes
                panel.set_xlim(size / 2, size * 2)
        _ticks(panels[0].yaxis, _round_numbers(*panels[0].get_ylim()))
        panels[0].set_ylabel("microseconds")
        keys = [Line2D([], [], color=INK, lw=0.9, label="fastkernels, median of a size")]
        keys += [
            Line2D([], [], color=MUTED, lw=0.9, marker=marker, ms=3, label=name)
            for name, marker in zip(names, _cycle(PEER_MARKERS, len(names)), strict=True)
        ]
        if any(floor(row) for row in rows):
            name = "floor: an elementwise kernel of the same bytes"
            keys.append(Line2D([], [], color=MUTED, lw=1.2, ls=":", label=name))
        keys += [
            Line2D([], [], **_dots(number), label=f"{letter(number)}: {name}")
            for name, number in cast.items()
        ]
        _legend(figure, keys)
    return figure


def histogram(data: Mapping[str, Any]) -> Figure | None:
    """How many rows have which ratio peer / ours: a panel per peer and mode, lists stacked. None
    without a peer that is right on any row."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
    modes = list(dict.fromkeys(row["mode"] for row in data["rows"]))
    names = peer_names(data["rows"])
    for mode in modes:
        own = [name for name in names if any(name in r["peers"] for r in _of(data, mode))]
        for name in [*own, BEST] if len(own) > 1 else own:
            by_list: dict[str, list[float]] = defaultdict(list)
            for row in _of(data, mode):
                us = peer_us(row, name, "sum_us")
                if us:
                    by_list[row["list"]].append(us / row["us"]["median"])
            if by_list:
                ratios[name, mode] = dict(by_list)
    if not ratios:
        return None
    every = [ratio for lists in ratios.values() for each in lists.values() for ratio in each]
    edges, listed = _edges(every), list(dict.fromkeys(row["list"] for row in data["rows"]))
    with style():
        figure, panels = _panels(len(ratios), len(listed), height=2.0)
        for panel, ((name, mode), lists) in zip(panels, ratios.items(), strict=True):
            bottom = [0] * (len(edges) - 1)
            for number, each in enumerate(listed):
                counts = _counts(lists.get(each, []), edges)
                for bin_, count in enumerate(counts):
                    if count:
                        panel.bar(
                            edges[bin_], count, edges[bin_ + 1] - edges[bin_], bottom[bin_],
                            align="edge", color=SERIES[number % len(SERIES)], ec=PAPER, lw=0.4,
                        )  # fmt: skip
                    bottom[bin_] += count
            panel.axvline(1.0, color=BAD, lw=1.0)
            flat = [ratio for each in lists.values() for ratio in each]
            mean = math.exp(statistics.fmean(map(math.log, flat)))
            panel.set_title(
                f"{name}, {mode}: {len(flat)} rows, geometric mean {mean:.3g},"
                f" worst {min(flat):.3g}", loc="left", color=MUTED, fontsize=7.5,
            )  # fmt: skip
            panel.set(xscale="log", xlim=(edges[0], edges[-1]), xlabel="peer / ours")
            _ticks(panel.xaxis, _round_numbers(edges[0], edges[-1]))
            panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            panel.grid(visible=False, axis="x")
        panels[0].set_ylabel("rows")
        _legend(
            figure,
            [
                Line2D([], [], color=SERIES[i % len(SERIES)], lw=5, label=each)
                for i, each in enumerate(listed)
            ],
        )
    return figure


def _panels(count: int, keys: int, height: float = _PANEL[1]) -> tuple[Figure, list[Axes]]:
    """Axes side by side that share their vertical scale, with room for a legend below."""
    columns = min(count, _COLUMNS)
    lines = -(-count // columns)
    size = (_COLUMNS * _PANEL[0], lines * height + 0.16 * keys + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for unused in grid[count:]:
        unused.remove()
    return figure, list(grid[:count])


def _line(
    panel: Axes,
    sizes: Mapping[int, Sequence[Row]],
    value: Callable[[Row], float | None],
    **how: Any,
) -> None:
    points = [(size, us) for size, own in sizes.items() if (us := median(own, value)) is not None]
    if points:
        panel.plot(*zip(*points, strict=True), mfc=PAPER, mew=0.8, **how)


def _dots(number: int) -> dict[str, Any]:
    """Full ones, and hollow ones once the colours are used up."""
    colour = SERIES[number % len(SERIES)]
    inside = colour if number < len(SERIES) else PAPER
    return {"ls": "", "marker": "o", "ms": 4, "mew": 0.9, "color": colour, "mfc": inside}


def _cycle(values: Sequence[str], count: int) -> list[str]:
    return [values[i % len(values)] for i in range(count)]


def _of(data: Mapping[str, Any], mode: str) -> list[Row]:
    return [row for row in data["rows"] if row["mode"] == mode]


def _ticks(axis: Axis, where: Locator) -> None:
    """Labels as plain numbers."""
    axis.set_major_locator(where)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_locator(NullLocator())


# The rounder first.
_ROUND = (1, 2, 5, 1.5, 3, 7, 1.2, 1.7, 2.5, 4, 1.1, 1.3, 1.4, 6, 8, 9)


def _round_numbers(low: float, high: float) -> FixedLocator:
    """Ticks between two limits of a logarithmic axis, no two closer than a fifteenth of it."""
    kept: list[float] = []
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for value in (digit * 10.0**decade for digit in _ROUND for decade in decades):
        apart = min((abs(math.log(value / other)) for other in kept), default=math.inf)
        if low <= value <= high and apart > math.log(high / low) / 15:
            kept.append(value)
    return FixedLocator(sorted(kept))


def _edges(values: Sequence[float]) -> list[float]:
    """Of bins equally wide on a logarithmic scale, one edge at exactly 1."""
    low, high = min(1.0, *values), max(1.0, *values)
    width = max(math.log(high / low), 0.05) / _BINS
    before = math.ceil(-math.log(low) / width - 1e-9)
    after = math.floor(math.log(high) / width) + 1  # the last bin is half open, too
    return [math.exp(i * width) for i in range(-before, after + 1)]


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    return [sum(low <= value < high for value in values) for low, high in pairwise(edges)]


def _legend(figure: Figure, keys: Sequence[Line2D]) -> None:
    fits = max(len(str(key.get_label())) for key in keys) < 55
    figure.legend(handles=list(keys), loc="outside lower left", ncols=2 if fits else 1)


# ---- files and pages ----------------------------------------------------------------------------


def save(figure: Figure, path: Path) -> None:
    """As SVG or PNG, by the name."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastkernels"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


_LONG = re.compile(r"-?\d+\.\d{3,}")


def _rounded(element: re.Match[str]) -> str:
    """Coordinates in a tag to hundredths of a point; what is text stays as it is."""
    return _LONG.sub(lambda number: f"{float(number[0]):.2f}", element[0])


def inline(figure: Figure, name: str, label: str) -> str:
    """The figure as an element of a page: `name` makes its ids unique there, colours are variables
    of the page's style, `label` is what it shows."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # A style sheet in here would be one of the whole page.
    text = re.sub(r"\s*<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"<[^>]*>", _rounded, text)
    for variable, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1).strip()
