#!/usr/bin/env python3
"""Result files as one static HTML page, with its style and plots in it: no script, no network.

    python bench/page.py bench/results/h200/*.json --out page.html

Per file: where, when and with what it was measured, ratios to the peers, times over the axis, how
ratios are distributed, every row, and what is missing. Files that hold no rows of `bench/run.py`,
and sweeps, are named and left out. The same bytes come from the same files. Needs no GPU and no
torch; the plots need matplotlib (fastkernels[bench]).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import click

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench import figures
from bench.compare import Comparison
from bench.files import NotAResult, Result, is_sweep, provenance, read
from bench.rows import Row, letter, peer_names, regimes, served_by, varying_axis


class Html(str):
    """Text that is markup already."""


def tag(name: str, *children: Any, **attributes: str | None) -> Html:
    """An element. Strings are escaped, Html is not, iterables are flattened; `class_` is class."""
    text = "".join(
        f' {key.rstrip("_")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{''.join(_flat(children))}</{name}>")


def _flat(children: Iterable[Any]) -> Iterator[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str):
            yield escape(child, quote=False)
        elif isinstance(child, Iterable):
            yield from _flat(child)
        elif child is not None:
            yield escape(str(child), quote=False)


# ---- the page -----------------------------------------------------------------------------------


def build(results: Sequence[Result], comparisons: Sequence[Comparison] = ()) -> str:
    """A page over files of `bench/run.py`, in their order, and comparisons of some of them."""
    names = [f"{data['op']}, {data['device']['product']}" for data in results]
    sections = [
        _section(f"r{i}", name, data)
        for i, (name, data) in enumerate(zip(names, results, strict=True))
    ]
    links = [(f"r{i}", name) for i, name in enumerate(names)]
    if comparisons:
        links.append(("against", "Against a reference"))
        sections.append(_comparisons(comparisons))
    body = tag(
        "div",
        tag("nav", tag("ol", [tag("li", tag("a", n, href=f"#{i}")) for i, n in links])),
        tag(
            "main",
            tag("h1", "fastkernels benchmark"),
            tag("p", Html(_PREFACE)),
            _overview(results),
            sections,
        ),
        class_="frame",
    )
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
        tag("title", "fastkernels benchmark"),
        tag("style", Html(_style())),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}<body>{body}</body></html>\n'


_PREFACE = (
    "Times are microseconds of one call: on a GPU the sum of its kernels' times, on a CPU wall"
    " clock; the protocol stands with each file. A row is timed only after its results were judged"
    " right. Ratios are peer / ours: above 1 ours is faster. A peer that is wrong or fails on a row"
    " has no ratio there."
)


def _overview(results: Sequence[Result]) -> Html:
    def cells(number: int, data: Result) -> list[Any]:
        wrong = sum(bool(row.get("failures")) for row in data["rows"])
        contest = data.get("summary", {}).get("contest", {})
        ratios = [
            f"{mode} {peers['best']['mean_of_ratios']:.2f} (worst {peers['best']['worst']:.2f})"
            for mode, peers in contest.items()
            if "best" in peers
        ]
        routes = Counter(row["route"] for row in data["rows"])
        return [
            tag("a", data["op"], href=f"#r{number}"),
            data["device"]["product"],
            tag("code", data["code"]["commit"][:12]),
            data["created"],
            ", ".join(f"{route} ({rows})" for route, rows in routes.most_common()),
            _count(len(data["rows"])),
            _count(wrong, is_bad=wrong > 0),
            _count(len(data.get("missing", ())), is_bad=bool(data.get("missing"))),
            "; ".join(ratios) or "no peers",
        ]

    head = (
        "operator", "device", "commit", "date", "routes (rows)", "#rows", "#wrong", "#missing",
        "contest: mean ratio to the best peer",
    )  # fmt: skip
    return _table(head, [cells(i, data) for i, data in enumerate(results)])


def _section(anchor: str, name: str, data: Result) -> Html:
    axis = varying_axis(data["rows"])
    times = figures.inline(
        figures.latency(data, axis), f"{anchor}t", f"Median times of {name} over {axis}"
    )
    parts: list[Any] = [tag("h2", name), _facts(data)]
    if _ratios(data):
        parts += [tag("h3", "Ratios"), _table(_RATIOS, _ratios(data))]
    parts += [tag("h3", f"Times over {axis}"), tag("figure", Html(times))]
    ratios = figures.histogram(data)
    if ratios is not None:
        drawn = figures.inline(ratios, f"{anchor}h", f"How many rows of {name} have which ratio")
        parts += [tag("h3", "Rows by ratio"), tag("figure", Html(drawn))]
    parts += [tag("h3", "What serves"), _regimes(data), tag("h3", "Rows"), _rows(data)]
    left_out = [
        *((name, "", "", why) for name, why in data.get("peers_left_out", {}).items()),
        *(_missing(each) for each in data.get("missing", ())),
    ]
    if left_out:
        head = ("peer or row", "axes", "mode", "why")
        parts += [tag("h3", "Missing"), _table(head, left_out)]
    return tag("section", parts, id=anchor)


def _missing(each: Row) -> tuple[str, str, str, str]:
    sizes = ", ".join(f"{name}={size}" for name, size in each["axes"].items())
    return f"{each['list']} {each['id']}", sizes, each["mode"], each["why"]


def _facts(data: Result) -> Html:
    """Everything that stands beside the rows."""
    versions = dict(data["versions"])
    peers = versions.pop("peers", {})
    code = data["code"]
    facts = {
        "commit": code["commit"] + (" (dirty)" if code.get("dirty") else ""),
        "measured": data["created"],
        "device": _pairs(data["device"]),
        "protocol": _pairs(data["protocol"]),
        "versions": _pairs(versions),
        "peers": _pairs(peers) or "none",
        **{name: value for name, value in code.items() if name.endswith("sha256") and value},
    }
    if "spec_digest" in data:
        facts["spec"] = data["spec_digest"]
    if "tests" in data:
        tests = dict(data["tests"])
        sanitizer = tests.pop("sanitizer", {})
        facts["tests"] = _pairs(tests)
        facts["sanitizer"] = _pairs(sanitizer) or "not run"
    if "host" in data:
        facts["host times"] = data["host"]["how"]
        facts["host growth"] = _pairs(data["host"]["growth"] or {}) or "not measured"
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", str(x))) for name, x in facts.items()],
        class_="facts",
    )  # fmt: skip


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {json.dumps(value) if isinstance(value, (dict, list)) else value}"
        for name, value in values.items()
        if value is not None
    )


_RATIOS = (
    "list", "mode", "peer", "#rows", "#mean of ratios", "#ratio of means", "#geometric mean",
    "#worst", "worst row", "#mean of ratios, spans", "#worst, spans",
)  # fmt: skip


def _ratios(data: Result) -> list[list[Any]]:
    return [
        [
            listed, mode, name, _count(r["rows"]),
            *(_ratio(r[key]) for key in ("mean_of_ratios", "ratio_of_means", "geomean", "worst")),
            r["worst_id"], *(_ratio(r[key]) for key in ("mean_of_ratios_span", "worst_span")),
        ]
        for listed, modes in data.get("summary", {}).items()
        for mode, peers in modes.items()
        for name, r in peers.items()
    ]  # fmt: skip


def _regimes(data: Result) -> Html:
    """Letters of the plots; why, where the file has it."""
    rows: list[list[Any]] = []
    for name, number in regimes(data["rows"]).items():
        own = [row for row in data["rows"] if served_by(row) == name]
        reasons = sorted({row["reason"] for row in own if row.get("reason")})
        rows.append([_badge(number), tag("code", name), _count(len(own)), "; ".join(reasons)])
    if not any(row[-1] for row in rows):
        return _table(("", "route and config", "#rows"), [row[:-1] for row in rows])
    return _table(("", "route and config", "#rows", "why"), rows)


# ---- rows ---------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A `#` before the name: numbers. `cell` gives None where a row has nothing to say."""

    name: str
    cell: Callable[[Row], Any]


def _rows(data: Result) -> Html:
    rows: list[Row] = data["rows"]
    columns = [
        _Column("list", lambda row: row["list"]),
        _Column("id", lambda row: tag("code", row["id"][:24], title=row["id"])),
        *(_axis(name) for name in rows[0]["axes"] if len({r["axes"][name] for r in rows}) > 1),
        _Column("mode", lambda row: row["mode"]),
        *_measured(data),
    ]
    columns = [column for column in columns if any(column.cell(row) is not None for row in rows)]
    return _table(
        [column.name for column in columns],
        [[column.cell(row) for column in columns] for row in rows],
    )


def _axis(name: str) -> _Column:
    return _Column(f"#{name}", lambda row: row["axes"].get(name))


def _measured(data: Result) -> Iterator[_Column]:
    cast = regimes(data["rows"])
    yield _Column(
        "regime and route",
        lambda row: [_badge(cast[served_by(row)]), " ", row["route"]],
    )
    yield _Column("#ours, µs", lambda row: _us(row["us"]["median"]))
    yield _Column("#10th..90th", lambda row: f"{_us(row['us']['p10'])}..{_us(row['us']['p90'])}")
    yield _Column("#floor, µs", lambda row: _us(row.get("floor_us")))
    yield _Column("#ours / floor", _over_floor)
    for name in peer_names(data["rows"]):
        yield from _peer(name)
    yield _Column("#host, µs", lambda row: _us(row.get("host_us")))
    yield _Column("#host, out=, µs", lambda row: _us(row.get("host_out_us")))
    yield _Column("#peak memory, MB", lambda row: row.get("peak_extra_mb"))
    yield _Column("error of its limit", _error)
    yield _Column("#wrong", lambda row: row.get("failures"))


def _peer(name: str) -> Iterator[_Column]:
    def entry(row: Row) -> Row:
        found: Row = row.get("peers", {}).get(name, {})
        return found

    def ratio(row: Row) -> Html | None:
        us = entry(row).get("sum_us")
        return _ratio(us / row["us"]["median"]) if us else None

    def time(row: Row) -> str | Html | None:
        why = entry(row).get("left_out")
        return tag("span", "left out", title=why) if why else _us(entry(row).get("sum_us"))

    yield _Column(f"#{name}, µs", time)
    yield _Column(f"#{name} / ours", ratio)


def _over_floor(row: Row) -> str | None:
    return f"{row['us']['median'] / row['floor_us']:.3f}" if row.get("floor_us") else None


def _error(row: Row) -> str | None:
    error = row.get("error")
    if not error or error["value"] is None:
        return None
    return f"{error['value']:.2g} of {error['limit']:.2g} ({error['output']}, {error['metric']})"


def _us(value: float | None) -> str | None:
    """Four digits, of large numbers all."""
    return None if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float) -> Html:
    return tag("span", f"{value:.3f}", class_="slow" if value < 1 else None)


def _count(value: int, is_bad: bool = False) -> Html:
    return tag("span", str(value), class_="slow" if is_bad else None)


def _badge(number: int) -> Html:
    colour = number % len(figures.SERIES)
    is_hollow = number >= len(figures.SERIES)
    style = f"color: var(--series-{colour}); border: 1px solid var(--series-{colour})"
    if not is_hollow:
        style = f"color: var(--paper); background: var(--series-{colour})"
    return tag("span", letter(number), class_="badge", style=style)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A `#` before a column's name: numbers, to the right."""
    classes = ["number" if name.startswith("#") else None for name in head]
    return tag(
        "div",
        tag(
            "table",
            tag(
                "thead",
                tag(
                    "tr",
                    [
                        tag("th", name.removeprefix("#"), class_=class_)
                        for name, class_ in zip(head, classes, strict=True)
                    ],
                ),
            ),
            tag(
                "tbody",
                [
                    tag(
                        "tr",
                        [
                            tag("td", cell, class_=class_)
                            for cell, class_ in zip(row, classes, strict=True)
                        ],
                    )
                    for row in rows
                ],
            ),
        ),
        class_="scroll",
    )


def _comparisons(comparisons: Sequence[Comparison]) -> Html:
    parts = [tag("h2", "Against a reference")]
    for each in comparisons:
        verdict = "worse" if each.is_worse else "not worse"
        parts += [tag("h3", f"{each.op}: {verdict}"), tag("pre", str(each))]
    return tag("section", parts, id="against")


# ---- its style ----------------------------------------------------------------------------------


def _style() -> str:
    def variables(which: int) -> str:
        return " ".join(f"--{name}: {both[which]};" for name, both in figures.PALETTE.items())

    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(1)} }} }}"
    return f":root {{ {variables(0)} }}\n{dark}\n{_STYLE}"


_STYLE = """
* { box-sizing: border-box; }
html { color-scheme: light dark; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
.frame { display: grid; grid-template-columns: 12.5rem minmax(0, 1fr); gap: 3rem; max-width: 86rem;
  margin: 0 auto; padding: 0 2rem; }
main { padding: 3rem 0 5rem; min-width: 0; }
a { color: var(--link); }
nav { position: sticky; top: 0; align-self: start; padding: 3.2rem 0; max-height: 100vh;
  overflow-y: auto; font-size: .875rem; }
nav ol { list-style: none; margin: 0; padding: 0; border-left: 1px solid var(--line); }
nav a { display: block; padding: .3rem 0 .3rem 1rem; color: var(--muted); text-decoration: none; }
nav a:hover { color: var(--ink); }
h1 { font-size: 2.1rem; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 1rem; }
h2 { font-size: 1.3rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 2rem 0 .5rem; }
p { max-width: 46rem; color: var(--muted); font-size: .925rem; }
section { margin-top: 3rem; padding-top: 1.75rem; border-top: 1px solid var(--line); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 0 2rem; margin: 0; font-size: .8125rem; }
.facts div { display: grid; grid-template-columns: 7.5rem minmax(0, 1fr); gap: .75rem;
  padding: .35rem 0; border-bottom: 1px solid var(--line); }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; max-width: 62rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-variant-numeric: tabular-nums; }
.scroll { overflow: auto; max-height: 36rem; margin: 0 0 1.25rem; border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .8125rem; line-height: 1.45;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; white-space: nowrap; }
th { position: sticky; top: 0; background: var(--raised); color: var(--muted); font-weight: 560;
  white-space: normal; vertical-align: bottom; }
tbody tr + tr td { border-top: 1px solid var(--line); }
th.number, td.number { text-align: right; }
td:last-child { white-space: normal; min-width: 12rem; }
.badge { display: inline-block; min-width: 1.5em; padding: 0 .3em; border-radius: 4px;
  text-align: center; font-size: .75rem; line-height: 1.5em; font-weight: 700; }
.slow { color: var(--bad); font-weight: 600; }
code, pre { font: .92em/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { overflow: auto; padding: 1rem; background: var(--raised); border-radius: 10px;
  font-size: .78rem; }
@media (max-width: 62rem) { .frame { display: block; padding: 0 1.1rem; } nav { display: none; } }
@media print { .frame { display: block; max-width: none; } nav { display: none; }
  .scroll { overflow: visible; max-height: none; } th { position: static; } }
"""


@click.command()
@click.argument("results", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(results: tuple[str, ...], out: Path) -> None:
    """Write OUT, one page over RESULTS, files that bench/run.py wrote."""
    found: list[Result] = []
    for name in results:
        try:
            data = read(name)
        except NotAResult as error:
            click.echo(f"left out: {error}", err=True)
            continue
        if is_sweep(data) or not data["rows"]:
            what = "a sweep" if is_sweep(data) else "without rows"
            click.echo(f"left out: {name}: {what}", err=True)
            continue
        click.echo(f"{name}: {len(data['rows'])} rows, {provenance(data)}", err=True)
        found.append(data)
    if not found:
        raise click.UsageError("no result file among these")
    out.write_text(build(found))
    click.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB", err=True)


if __name__ == "__main__":
    main()
