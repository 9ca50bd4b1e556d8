#!/usr/bin/env python3
"""A result file as a Markdown table and as a plot of latency over one axis.

    python bench/report.py bench/results/h200/gdn_decode.json --plot gdn_decode.svg
    python bench/report.py bench/results/h200/dsa_sparse_attention.json --only serving-local

Needs no GPU and no torch; the plot needs matplotlib (fastkernels[bench]).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

Row = Mapping[str, Any]
RATIOS = (
    "list", "mode", "peer", "rows", "mean of ratios", "ratio of means", "geomean", "worst",
    "mean of ratios, spans",
)  # fmt: skip


def groups(rows: Iterable[Row], axis: str) -> dict[str, dict[int, list[Row]]]:
    """Rows by mode, then by size of the axis, both in order."""
    found: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["mode"]][row["axes"][axis]].append(row)
    return {mode: dict(sorted(sizes.items())) for mode, sizes in found.items()}


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


def markdown(data: Mapping[str, Any], axis: str) -> str:
    """Where it was measured, the ratios, and per mode and size the median over rows."""
    device, code, protocol = data["device"], data["code"], data["protocol"]
    versions = data["versions"]
    packages = ", ".join(f"{n} {v}" for n, v in versions.get("peers", {}).items()) or "no peers"
    lines = [
        f"{data['op']} on {device['product']} (driver {device.get('driver')}, SM clock"
        f" {device.get('sm_clock_mhz')} MHz), commit {code['commit'][:12]}"
        f"{' (dirty)' if code.get('dirty') else ''}, torch {versions['torch']}, {packages}.",
        f"{protocol['timer']}, {protocol['l2']} L2, {protocol['order']}, {protocol['statistic']} of"
        f" {protocol['iterations']}, sums of kernel times; ratios are peer / ours.",
        "",
        _line(RATIOS),
        _line(["---"] * len(RATIOS)),
    ]
    for listed, modes in data["summary"].items():
        for mode, peers in modes.items():
            lines += [
                f"| {listed} | {mode} | {name} | {r['rows']} | {r['mean_of_ratios']:.3f} |"
                f" {r['ratio_of_means']:.3f} | {r['geomean']:.3f} | {r['worst']:.3f} |"
                f" {r['mean_of_ratios_span']:.3f} |"
                for name, r in peers.items()
            ]
    names = peer_names(data["rows"])
    for mode, sizes in groups(data["rows"], axis).items():
        head = [axis, "route", "ours, us", "floor", "ours / floor", *names, "host, us"]
        lines += ["", f"{mode}:", "", _line(head), _line(["---"] * len(head))]
        for size, rows in sizes.items():
            us, least = median(rows, ours), median(rows, floor)
            lines.append(
                _line(
                    [
                        str(size),
                        ", ".join(sorted({row["route"] for row in rows})),
                        _number(us),
                        _number(least),
                        _number(us / least if us and least else None),
                        *(_number(median(rows, peer(name))) for name in names),
                        _number(median(rows, lambda row: row.get("host_us"))),
                    ]
                )
            )
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def plot(data: Mapping[str, Any], axis: str, path: Path) -> None:
    """One panel per mode: ours, the floor and the peers over the axis, both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = data["op"]  # the same bytes from the same file
    import matplotlib.pyplot as plt

    modes = groups(data["rows"], axis)
    figure, panels = plt.subplots(
        1, len(modes), figsize=(5.2 * len(modes), 4.2), sharey=True, squeeze=False
    )
    names = peer_names(data["rows"])
    for panel, (mode, sizes) in zip(panels[0], modes.items(), strict=True):
        series: dict[str, Callable[[Row], float | None]] = {"fastkernels": ours}
        series |= {name: peer(name) for name in names}
        series["elementwise kernel, same bytes"] = floor
        for name, value in series.items():
            points = [(x, y) for x, rows in sizes.items() if (y := median(rows, value)) is not None]
            if points:
                style = "--" if value is floor else "-"
                width = 2.2 if value is ours else 1.2
                panel.plot(
                    *zip(*points, strict=True), style, marker="o", ms=3, lw=width, label=name
                )
        panel.set(title=mode, xlabel=axis, xscale="log", yscale="log")
        panel.set_xticks(list(sizes), [str(size) for size in sizes], rotation=90, fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("microseconds (sum of kernel times, cold L2)")
    panels[0][0].legend(fontsize=8)
    versions = data["versions"]
    packages = ", ".join(f"{n} {v}" for n, v in versions.get("peers", {}).items())
    figure.suptitle(
        f"{data['op']}, {data['device']['product']}, commit {data['code']['commit'][:12]}\n"
        f"torch {versions['torch']}; {packages}", fontsize=9,
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option("--axis", default="", help="Default: the one with most sizes.")
@click.option("--plot", "image", default=None, type=click.Path(path_type=Path), help="SVG or PNG.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Markdown; else stdout.")
@click.option(
    "--only", default="", help="Rows whose list and id have this in them; ratios are of all rows."
)
def main(result: Path, axis: str, image: Path | None, out: Path | None, only: str) -> None:
    """Report RESULT, a file that bench/run.py wrote for a GPU."""
    data = json.loads(result.read_text())
    data["rows"] = [row for row in data["rows"] if only in f"{row['list']} {row['id']}"]
    if not data["rows"]:
        raise click.UsageError(f"no row of {result} has {only!r} in its list and id")
    chosen = axis or _varying(data["rows"])
    text = markdown(data, chosen)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
    if image is not None:
        plot(data, chosen, image)


def _varying(rows: Iterable[Row]) -> str:
    sizes: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        for name, size in row["axes"].items():
            sizes[name].add(size)
    return max(sizes, key=lambda name: len(sizes[name]))


if __name__ == "__main__":
    main()
