#!/usr/bin/env python3
"""A result file as a Markdown table, as a plot of latency over one axis and one of ratios.

    python bench/report.py bench/results/h200/gdn_decode.json --plot gdn_decode.svg \
        --ratios gdn_decode.ratios.svg
    python bench/report.py bench/results/h200/dsa_sparse_attention.json --only serving-local

Needs no GPU and no torch; the plots need matplotlib (fastkernels[bench]).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench.rows import floor, groups, median, ours, peer, peer_names, varying_axis

RATIOS = (
    "list", "mode", "peer", "rows", "mean of ratios", "ratio of means", "geomean", "worst",
    "mean of ratios, spans",
)  # fmt: skip


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
    """Ours, the floor and the peers over the axis."""
    from bench import figures

    figures.save(figures.latency(data, axis), path)


def plot_ratios(data: Mapping[str, Any], path: Path) -> None:
    """How many rows have which ratio. Raises ValueError where no peer has one."""
    from bench import figures

    figure = figures.histogram(data)
    if figure is None:
        raise ValueError(f"{data['op']}: no peer was measured on any row, so there are no ratios")
    figures.save(figure, path)


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option("--axis", default="", help="Default: the one with most sizes.")
@click.option("--plot", "image", default=None, type=click.Path(path_type=Path), help="SVG or PNG.")
@click.option(
    "--ratios", default=None, type=click.Path(path_type=Path), help="The same, of ratios."
)
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Markdown; else stdout.")
@click.option(
    "--only", default="", help="Rows whose list and id have this in them; ratios are of all rows."
)
def main(
    result: Path, axis: str, image: Path | None, ratios: Path | None, out: Path | None, only: str
) -> None:
    """Report RESULT, a file that bench/run.py wrote for a GPU."""
    data = json.loads(result.read_text())
    data["rows"] = [row for row in data["rows"] if only in f"{row['list']} {row['id']}"]
    if not data["rows"]:
        raise click.UsageError(f"no row of {result} has {only!r} in its list and id")
    chosen = axis or varying_axis(data["rows"])
    text = markdown(data, chosen)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
    if image is not None:
        plot(data, chosen, image)
    if ratios is not None:
        try:
            plot_ratios(data, ratios)
        except ValueError as error:
            raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
