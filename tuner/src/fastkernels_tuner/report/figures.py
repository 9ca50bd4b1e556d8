"""Plots as SVG to stand inside a page: colours are its CSS variables, text is text in its font.

Names of candidates stay out of them, so that a legend beside a plot can wrap; letters stand in.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fastkernels_tuner.report import words
from fastkernels_tuner.report.cast import NUM_COLOURS, Cast, Look
from fastkernels_tuner.report.data import Curve, Curves, FittedRegime

# Colours that matplotlib writes and `_inline` replaces by variables of style.css.
INK, MUTED, LINE, PAPER = "#000001", "#000002", "#000003", "#000004"
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", PAPER: "--paper"}
SERIES = [f"#0001{i:02x}" for i in range(NUM_COLOURS)]
ON_SERIES = [f"#0002{i:02x}" for i in range(NUM_COLOURS)]
_VARIABLES |= {colour: f"--series-{i}" for i, colour in enumerate(SERIES)}
_VARIABLES |= {colour: f"--on-series-{i}" for i, colour in enumerate(ON_SERIES)}

# Of peers in turn; style.css has the same for legends (`render.swatch`).
PEER_MARKERS = ("s", "^", "D", "v")
BROKEN = (0, (5, 2))
DASHED = (0, (4, 2.5))
DOTTED = (0, (1, 2))

_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fastkernels",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of axes are no formulas
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that measures are the same
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "hatch.color": PAPER,
    "hatch.linewidth": 1.2,
}

_MAX_LOSS = 0.3  # what is slower than that runs out of the plot of losses


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's defaults with ours, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


# ---- plots --------------------------------------------------------------------------------------


def of_curves(curves: Curves, regimes: Iterable[FittedRegime]) -> list[FittedRegime]:
    """The regimes that these curves run through, by size."""
    found = [
        regime
        for regime in regimes
        if regime.mode == curves.mode
        and regime.constants == curves.constants
        and curves.axis in regime.bounds
        and all(
            low <= curves.fixed[axis] <= high
            for axis, (low, high) in regime.bounds.items()
            if axis in curves.fixed
        )
    ]
    return sorted(found, key=lambda regime: regime.bounds[curves.axis])


def served(curves: Curves, regimes: Iterable[FittedRegime], size: int) -> str | None:
    """The candidate that serves a size."""
    for regime in of_curves(curves, regimes):
        low, high = regime.bounds[curves.axis]
        if low <= size <= high:
            return regime.candidate
    return None


def fastest(curves: Curves) -> dict[int, float]:
    """The least median of any candidate, by size in order."""
    best: dict[int, float] = {}
    for curve in curves.curves:
        if curve.kind == "candidate":
            for point in curve.points:
                best[point.size] = min(point.us, best.get(point.size, math.inf))
    return dict(sorted(best.items()))


def times(name: str, curves: Curves, regimes: Sequence[FittedRegime], cast: Cast) -> Markup:
    """Median times over the axis: what serves, its 10th to 90th percentile, and everything else."""
    with style():
        axes = _panel()
        for curve in _rest(curves, regimes):
            axes.plot(*_line(curve), color=MUTED, lw=0.6, alpha=0.35)
        peers = [curve for curve in curves.curves if curve.kind == "peer"]
        for i, curve in enumerate(peers):
            marker = PEER_MARKERS[i % len(PEER_MARKERS)]
            axes.plot(*_line(curve), color=MUTED, lw=0.9, marker=marker, ms=3, mfc=PAPER, mew=0.8)
        for curve in curves.curves:
            if curve.kind == "floor":
                axes.plot(*_line(curve), color=MUTED, lw=1.2, ls=DOTTED)
            elif curve.kind == "champion":
                axes.plot(*_line(curve), color=INK, lw=1.1, ls=DASHED)
        if regimes:  # a thin line holds the thick ones together
            axes.plot(*_served_line(curves, regimes), color=INK, lw=0.7)
        for regime in regimes:
            _emphasise(axes, curves, regime, cast, dict.fromkeys(_sizes(curves), 1.0), 0)
        if not regimes:
            best = fastest(curves)
            axes.plot(list(best), list(best.values()), color=INK, lw=1.8, marker="o", ms=2.5)
        _size_axis(axes, axes.xaxis, _sizes(curves), pad=0.03)
        axes.set_xlabel(words.clean(curves.axis), labelpad=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_subs(axes.get_ylim())))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        _head(axes, "median, µs")
        _strip(axes, curves.axis, regimes, cast)
        return _inline(axes, name, _describe("Median time in microseconds", curves, regimes))


def losses(name: str, curves: Curves, regimes: Sequence[FittedRegime], cast: Cast) -> Markup:
    """How much slower each candidate and the champion is than the fastest candidate of a size."""
    with style():
        best = fastest(curves)
        axes = _panel()
        for curve in _rest(curves, regimes):
            axes.plot(*_line(curve, best), color=MUTED, lw=0.6, alpha=0.35)
        shown = [0.04]
        for curve in curves.curves:
            if curve.kind == "champion":
                axes.plot(*_line(curve, best), color=INK, lw=1.1, ls=DASHED)
                shown += _line(curve, best)[1]
        for curve in _chosen(curves, regimes):
            look = cast.look(curve.name)
            if look is not None:
                dashes = BROKEN if look.is_broken else "-"
                axes.plot(*_line(curve, best), color=SERIES[look.colour], lw=0.9, ls=dashes)
                shown += _line(curve, best)[1]
        for regime in regimes:
            shown += _emphasise(axes, curves, regime, cast, best, 1)
        axes.axhline(0, color=MUTED, lw=0.8)
        _size_axis(axes, axes.xaxis, list(best), pad=0.03)
        axes.set_xlabel(words.clean(curves.axis), labelpad=2)
        axes.set_ylim(max(min(shown), -0.12) - 0.01, min(max(shown), _MAX_LOSS) + 0.01)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{100 * y:.3g} %".replace("-", words.MINUS))
        )
        _head(axes, "slower than the fastest candidate")
        _strip(axes, curves.axis, regimes, cast)
        return _inline(axes, name, _describe("Loss against the fastest candidate", curves, regimes))


def bands(name: str, axis: str, groups: Mapping[str, Sequence[FittedRegime]], cast: Cast) -> Markup:
    """The route map over one axis: a row of bands per mode and choice of constants."""
    with style():
        height = 0.44 * len(groups) + 0.5
        axes = _axes(7.6, height, left=0.05, right=0.22, top=0.05, bottom=0.42)
        edges = [
            edge
            for regimes in groups.values()
            for regime in regimes
            for edge in _edges(regime.bounds[axis])
        ]
        _size_axis(axes, axes.xaxis, edges)
        axes.set_xlabel(words.clean(axis), labelpad=2)
        for i, (group, regimes) in enumerate(groups.items()):
            axes.text(
                0, -i + 0.33, words.clean(group), transform=axes.get_yaxis_transform(),
                fontsize=7.5, va="bottom", color=MUTED,
            )  # fmt: skip
            for regime in regimes:
                low, high = _edges(regime.bounds[axis])
                _band(axes, (low, -i - 0.22), high - low, 0.5, cast.look(regime.candidate))
                if _share(axes.xaxis, low, high) > 0.018:
                    middle = _middle(axes.xaxis, low, high)
                    _letter(axes, middle, -i + 0.02, cast.look(regime.candidate))
                sizes = sorted({size[axis] for size in regime.measured if axis in size})
                axes.plot(
                    sizes, [-i - 0.29] * len(sizes), "|", color=MUTED, ms=3, mew=0.8, clip_on=False
                )
        axes.set_ylim(-len(groups) + 0.6, 0.75)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        text = "; ".join(
            f"{group}: "
            + ", ".join(
                f"{_spoken(cast, regime)} for {words.span(regime.bounds[axis])}"
                for regime in regimes
            )
            for group, regimes in groups.items()
        )
        return _inline(axes, name, f"Route map over {axis}. {text}")


def areas(
    name: str, both: tuple[str, ...], group: str, regimes: Sequence[FittedRegime], cast: Cast
) -> Markup:
    """The route map over two axes, for one mode and choice of constants."""
    with style():
        x, y = both
        axes = _axes(4.7, 3.5, left=0.62, right=0.15, top=0.3, bottom=0.45)
        for variable, axis in zip(both, (axes.xaxis, axes.yaxis), strict=True):
            edges = [edge for regime in regimes for edge in _edges(regime.bounds[variable])]
            _size_axis(axes, axis, edges)
        axes.set_xlabel(words.clean(x), labelpad=2)
        for regime in regimes:
            (left, right), (low, high) = (_edges(regime.bounds[axis]) for axis in both)
            look = cast.look(regime.candidate)
            _band(axes, (left, low), right - left, high - low, look)
            if min(_share(axes.xaxis, left, right), _share(axes.yaxis, low, high)) > 0.04:
                middle = _middle(axes.xaxis, left, right), _middle(axes.yaxis, low, high)
                _letter(axes, *middle, look)
        measured = sorted(
            {
                (size[x], size[y])
                for regime in regimes
                for size in regime.measured
                if x in size and y in size
            }
        )
        axes.plot(
            [a for a, _ in measured], [b for _, b in measured], "o", color=PAPER, ms=2.6,
            mec=INK, mew=0.5, clip_on=False,
        )  # fmt: skip
        axes.grid(visible=False)
        _head(axes, words.clean(y))
        text = "; ".join(
            f"{_spoken(cast, regime)} for "
            + " and ".join(f"{axis} {words.span(regime.bounds[axis])}" for axis in both)
            for regime in regimes
        )
        return _inline(axes, name, f"Route map over {x} and {y}, {group}. {text}")


# ---- parts --------------------------------------------------------------------------------------


def _axes(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> Axes:
    """Axes with margins in inches."""
    figure = Figure(figsize=(width, height))
    figure.patch.set_visible(False)
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    axes.patch.set_visible(False)
    return axes


def _figure(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def _height(axes: Axes) -> float:
    """In inches."""
    return float(axes.get_position().height * _figure(axes).get_figheight())


def _panel() -> Axes:
    return _axes(4.7, 3.1, left=0.5, right=0.15, top=0.52, bottom=0.42)


def _head(axes: Axes, text: str) -> None:
    """What the vertical axis shows, above it: read without turning one's head."""
    height = _height(axes)
    axes.text(-0.02, 1 + 0.19 / height, text, transform=axes.transAxes, color=MUTED, va="bottom")


def _sizes(curves: Curves) -> list[int]:
    return sorted({point.size for curve in curves.curves for point in curve.points})


def _line(curve: Curve, best: Mapping[int, float] | None = None) -> tuple[list[int], list[float]]:
    """Sizes and times; with `best`, losses against it where it is known."""
    points = sorted(curve.points, key=lambda point: point.size)
    if best is None:
        return [p.size for p in points], [p.us for p in points]
    points = [point for point in points if point.size in best]
    return [p.size for p in points], [p.us / best[p.size] - 1 for p in points]


def _served_line(curves: Curves, regimes: Sequence[FittedRegime]) -> tuple[list[int], list[float]]:
    points = sorted(
        (point.size, point.us)
        for curve in curves.curves
        if curve.kind == "candidate"
        for point in curve.points
        if served(curves, regimes, point.size) == curve.name
    )
    return [size for size, _ in points], [us for _, us in points]


def _chosen(curves: Curves, regimes: Sequence[FittedRegime]) -> list[Curve]:
    names = {regime.candidate for regime in regimes}
    return [c for c in curves.curves if c.kind == "candidate" and c.name in names]


def _rest(curves: Curves, regimes: Sequence[FittedRegime]) -> list[Curve]:
    names = {regime.candidate for regime in regimes}
    return [c for c in curves.curves if c.kind == "candidate" and c.name not in names]


def _emphasise(
    axes: Axes,
    curves: Curves,
    regime: FittedRegime,
    cast: Cast,
    unit: Mapping[int, float],
    less: int,
) -> list[float]:
    """Draws a candidate thick where it serves, with the 10th to 90th percentile: `us / unit - less`
    of each size. Returns the ends of what it drew."""
    look = cast.look(regime.candidate)
    curve = next((c for c in _chosen(curves, [regime])), None)
    if look is None or curve is None:
        return []
    low, high = regime.bounds[curves.axis]
    points = sorted(
        (p for p in curve.points if low <= p.size <= high and p.size in unit),
        key=lambda point: point.size,
    )
    sizes = [p.size for p in points]
    middle, least, most = (
        [value / unit[p.size] - less for p, value in zip(points, values, strict=True)]
        for values in (
            [p.us for p in points],
            [p.us if p.p10 is None else p.p10 for p in points],
            [p.us if p.p90 is None else p.p90 for p in points],
        )
    )
    colour = SERIES[look.colour]
    axes.vlines(sizes, least, most, color=colour, lw=3.5, alpha=0.3)
    axes.plot(
        sizes, middle, color=colour, lw=2.2, marker="o", ms=3.2,
        ls=BROKEN if look.is_broken else "-", solid_capstyle="round",
    )  # fmt: skip
    return least + most


def _strip(axes: Axes, axis: str, regimes: Sequence[FittedRegime], cast: Cast) -> None:
    """The regimes above a panel, as in the route map."""
    limits = axes.get_xlim()
    height = _height(axes)
    for regime in regimes:
        ends = [min(max(edge, limits[0]), limits[1]) for edge in _edges(regime.bounds[axis])]
        if ends[0] >= ends[1]:
            continue
        look = cast.look(regime.candidate)
        rectangle = _band(
            axes, (ends[0], 1 + 0.03 / height), ends[1] - ends[0], 0.13 / height, look
        )
        rectangle.set(transform=axes.get_xaxis_transform(), clip_on=False)
        if _share(axes.xaxis, *ends) > 0.03:
            text = _letter(axes, _middle(axes.xaxis, *ends), 1 + 0.09 / height, look)
            text.set(transform=axes.get_xaxis_transform(), fontsize=6.5)


def _band(
    axes: Axes, corner: tuple[float, float], width: float, height: float, look: Look | None
) -> Rectangle:
    rectangle = Rectangle(
        corner, width, height, lw=1, edgecolor=PAPER,
        facecolor=MUTED if look is None else SERIES[look.colour],
        hatch="///" if look is not None and look.is_broken else None,
    )  # fmt: skip
    axes.add_patch(rectangle)
    return rectangle


def _letter(axes: Axes, x: float, y: float, look: Look | None) -> Any:
    if look is None:
        return axes.text(x, y, "")
    return axes.text(
        x, y, look.letter, ha="center", va="center", color=ON_SERIES[look.colour],
        fontweight="bold", fontsize=7.5,
        # Readable on a hatch.
        bbox={"facecolor": SERIES[look.colour], "lw": 0, "pad": 0.8} if look.is_broken else None,
    )  # fmt: skip


def _edges(bounds: tuple[int, int]) -> tuple[float, float]:
    """Where a band of whole numbers ends; 0 has no place on a logarithmic axis and goes with 1."""
    return max(bounds[0] - 0.5, 0.5), max(bounds[1] + 0.5, 1.5)


def _share(axis: Axis, low: float, high: float) -> float:
    """Of an axis, as drawn."""
    change = axis.get_transform().transform
    (first, last), ends = change(axis.get_view_interval()), change([low, high])
    return float((ends[1] - ends[0]) / (last - first))


def _middle(axis: Axis, low: float, high: float) -> float:
    """As drawn."""
    change = axis.get_transform()
    return float(change.inverted().transform([change.transform([low, high]).mean()])[0])


def _size_axis(axes: Axes, axis: Axis, sizes: Sequence[float], *, pad: float = 0.0) -> None:
    """Scale, limits and ticks of an axis of sizes, `pad` of its length wider than they are."""
    low = max(min(sizes, default=1), 0.5)
    high = max(*sizes, low) if sizes else 2.0
    is_log = high >= 8 * low or low == high
    if low == high:
        low, high = low / 2, high * 2
    ratio, length = (high / low) ** pad, pad * (high - low)
    limits = (low / ratio, high * ratio) if is_log else (low - length, high + length)
    if axis is axes.xaxis:
        axes.set(xscale="log" if is_log else "linear", xlim=limits)
    else:
        axes.set(yscale="log" if is_log else "linear", ylim=limits)
    if is_log:
        first, last = max(math.ceil(math.log2(low)), 0), math.floor(math.log2(high))
        step = max(1, -(-(last - first + 1) // 8))
        axis.set_major_locator(FixedLocator([2.0**i for i in range(first, last + 1, step)]))
    else:
        axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))


def _size(value: float) -> str:
    """4096, but 16K, as long as that is exact."""
    if value >= 8192 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{value:g}" if value < 1e5 else words.count(round(value))


def _subs(limits: tuple[float, float]) -> tuple[float, ...]:
    decades = math.log10(limits[1] / limits[0])
    return (1, 2, 5) if decades < 3.2 else (1,)


def _spoken(cast: Cast, regime: FittedRegime) -> str:
    look = cast.look(regime.candidate)
    return regime.candidate if look is None else look.letter


def _describe(what: str, curves: Curves, regimes: Sequence[FittedRegime]) -> str:
    """For who does not see the plot; the numbers stand in the table below it."""
    sizes, best = _sizes(curves), fastest(curves)
    where = words.group(curves.mode, curves.constants, curves.fixed)
    if not sizes:
        return f"{what}, {where}: nothing measured"
    text = f"{what} over {curves.axis} from {sizes[0]} to {sizes[-1]}, {where}"
    if best:
        ends = list(best.values())
        text += f": the fastest candidate takes {words.us(ends[0])} to {words.us(ends[-1])} µs"
    return f"{text}; {words.some(len(regimes), 'regime')}"


# ---- SVG ----------------------------------------------------------------------------------------

_COLOUR = re.compile("|".join(_VARIABLES))
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"(?<=#)[A-Za-z][\w-]*")


def _inline(axes: Axes, name: str, label: str) -> Markup:
    """The figure as an element of a page: `name` makes its ids unique there."""
    file = io.StringIO()
    _figure(axes).savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # A style sheet in here would be one of the whole page.
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    references = {
        reference
        for element in root.iter()
        for key, value in element.attrib.items()
        if "url(#" in value or key.endswith("href")
        for reference in _REFERENCE.findall(value)
    }
    names = {old: f"{name}-{i}" for i, old in enumerate(sorted(references))}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        # Hatches have their colours as attributes, and only a style can hold a variable.
        parts = [f"{key}: {attributes.pop(key)}" for key in ("fill", "stroke") if key in attributes]
        if parts:
            attributes["style"] = "; ".join([*parts, attributes.get("style", "")])
        for key, value in attributes.items():
            if key == "id":
                if value in names:
                    element.set(key, names[value])
                continue
            if "url(#" in value or key == "href":
                value = _REFERENCE.sub(lambda match: names[match[0]], value)
            if key == "style":
                value = _COLOUR.sub(lambda match: f"var({_VARIABLES[match[0]]})", value)
            element.set(key, _NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", words.clean(label))
    return Markup(ElementTree.tostring(root, encoding="unicode"))
