"""Plots and the page: complete, self-contained, the same from the same file, true to the rows."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import compare, files, report, rows

pytest.importorskip("matplotlib")

from bench import figures, page

RESULTS = Path(__file__).parents[2] / "bench" / "results"
H200 = RESULTS / "h200" / "gdn_decode.json"
VOID = {"meta"}


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(H200.read_text())
    return found


@pytest.fixture(scope="module")
def built(published: dict[str, Any]) -> str:
    return page.build([published, files.read(str(RESULTS / "cpu" / "gdn_prefill.json"))])


class Reader(HTMLParser):
    """Ids, links, cells and texts; complains about elements that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src"):
                self.links.append(value or "")
            if value and "url(" in value:
                self.links += re.findall(r"url\(([^)]*)\)", value)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data


def test_the_page_needs_nothing_else(built: str) -> None:
    read = Reader(built)
    assert len(read.ids) == len(set(read.ids))
    assert read.links
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert "<script" not in built
    assert "@import" not in built
    style = re.findall(r"<style>(.*?)</style>", built, flags=re.DOTALL)
    assert len(style) == 1  # none of a plot's own
    used = set(re.findall(r"var\(--([\w-]+)\)", built))
    assert used <= set(re.findall(r"--([\w-]+):", style[0]))
    assert not re.findall(r"#[0-9a-f]{6}\b", re.sub(r"<style>.*?</style>", "", built, flags=re.S))


def test_every_row_stands_there(built: str, published: dict[str, Any]) -> None:
    (found,) = (t for t in Reader(built).tables if len(t) == len(published["rows"]) + 1)
    head = found[0]
    for line, row in zip(found[1:], published["rows"], strict=True):
        cells = dict(zip(head, line, strict=True))
        assert cells["list"] == row["list"]
        assert cells["id"] == row["id"][:24]
        assert cells["batch_size"] == str(row["axes"]["batch_size"])
        assert cells["ours, µs"] == f"{row['us']['median']:.4g}"
        assert cells["floor, µs"] == f"{row['floor_us']:.4g}"
        assert cells["regime and route"][1:] == f" {row['route']}"
        for name in ("flashinfer", "fla"):
            us = row["peers"].get(name, {}).get("sum_us")
            assert cells[f"{name}, µs"] == (f"{us:.4g}" if us else "")
            ratio = f"{us / row['us']['median']:.3f}" if us else ""
            assert cells[f"{name} / ours"] == ratio


def test_provenance_and_ratios_stand_there(built: str, published: dict[str, Any]) -> None:
    wanted = [
        published["code"]["commit"], published["code"]["table_sha256"], published["created"],
        published["device"]["uuid"], "driver 580.159.04", "torch 2.11.0+cu130", "l2 cold",
        "iterations 60", "flashinfer-python 0.7.4", "passed 1137", "racecheck clean",
    ]  # fmt: skip
    for text in wanted:
        assert text in built, text
    tables = Reader(built).tables
    (ratios,) = (t for t in tables if t[0][:3] == ["list", "mode", "peer"])
    flat = published["summary"]["contest"]["functional"]["flashinfer"]
    (line,) = (x for x in ratios if x[:3] == ["contest", "functional", "flashinfer"])
    assert line[3:8] == [
        "54", f"{flat['mean_of_ratios']:.3f}", f"{flat['ratio_of_means']:.3f}",
        f"{flat['geomean']:.3f}", f"{flat['worst']:.3f}",
    ]  # fmt: skip


def test_the_same_file_gives_the_same_page(built: str, published: dict[str, Any]) -> None:
    assert page.build([published]) == page.build([copy.deepcopy(published)])


def test_text_of_a_file_is_no_markup(published: dict[str, Any]) -> None:
    data = copy.deepcopy(published)
    data["rows"] = data["rows"][:2]
    data["rows"][0]["id"] = '<b>"x"</b>&'
    data["rows"][0]["reason"] = "regime 2 (mode functional, batch_size <3)"
    data["rows"][1]["peers"]["fla"] = {"left_out": "RuntimeError: <img src=x>"}
    data["peers_left_out"] = {"fa3": "No module named <i>vllm</i>"}
    data["missing"] = [
        {"list": "contest", "id": "y", "axes": {"batch_size": 9}, "mode": "pool", "why": "a < b"}
    ]
    text = page.build([data], [compare.compare(data, data)])
    Reader(text)
    for bad in ("<b>", "<img", "<i>"):
        assert bad not in text
    assert "No module named &lt;i&gt;vllm&lt;/i&gt;" in text
    assert "a &lt; b" in text
    assert "regime 2 (mode functional, batch_size &lt;3)" in text
    assert "gdn_decode: not worse" in text


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    names = [str(path) for path in sorted((RESULTS / "h200").glob("*.json"))]
    done = CliRunner().invoke(page.main, [*names, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert re.search(r"left out: \S*gdn_decode\.sweep\.json: a sweep", done.output)
    assert re.search(r"left out: \S*tests\.json: no result file", done.output)
    assert out.read_text().count("<section") >= 1
    none = CliRunner().invoke(page.main, [str(RESULTS / "h200" / "tests.json"), "--out", str(out)])
    assert none.exit_code == 2


# ---- plots --------------------------------------------------------------------------------------


def test_what_a_latency_plot_draws(published: dict[str, Any]) -> None:
    figure = figures.latency(published, "batch_size")
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "functional", "inplace", "pool",
    ]  # fmt: skip
    panel = figure.axes[0]
    own = [row for row in published["rows"] if row["mode"] == "functional"]
    drawn: set[Any] = set()
    for line in panel.lines:
        if line.get_linestyle() == "None":
            points: Any = line.get_data()
            drawn |= set(zip(*map(list, points), strict=True))
    assert drawn == {(row["axes"]["batch_size"], row["us"]["median"]) for row in own}
    labels = [text.get_text() for text in figure.legends[0].texts]
    assert labels[1:3] == ["fla", "flashinfer"]
    assert labels[3].startswith("floor")
    cast = rows.regimes(published["rows"])
    assert len(labels) == 4 + len(cast)
    colours = {
        line.get_color() for panel in figure.axes for line in panel.lines
        if line.get_linestyle() == "None"
    }  # fmt: skip
    assert colours == set(figures.SERIES[: len(cast)])


def test_what_a_histogram_counts(published: dict[str, Any]) -> None:
    figure: Any = figures.histogram(published)
    assert figure is not None
    bars = [sum(bar.get_height() for bar in panel.patches) for panel in figure.axes]
    assert bars == [105, 105, 105, 105, 5]  # fla, flashinfer, best; flashinfer in place, on a pool
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles[1].startswith("flashinfer, functional: 105 rows")
    right = sum(
        bar.get_height() for bar in figure.axes[1].patches if bar.get_x() >= 1 - 1e-9
    )  # fmt: skip
    ours = [r for r in published["rows"] if r["mode"] == "functional"]
    assert right == sum(r["peers"]["flashinfer"]["sum_us"] >= r["us"]["median"] for r in ours)
    cpu = files.read(str(RESULTS / "cpu" / "gdn_decode.json"))
    assert figures.histogram(cpu) is None


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.7], [1.2, 80.0], [0.999, 1.78]])
def test_bins_hold_every_ratio_and_part_at_one(values: list[float]) -> None:
    edges = figures._edges(values)
    assert min(abs(math.log(edge)) for edge in edges) < 1e-12
    assert sum(figures._counts(values, edges)) == len(values)


def test_letters() -> None:
    assert [rows.letter(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_report_draws_both_plots(tmp_path: Path, suffix: str) -> None:
    def draw(name: str) -> list[bytes]:
        both = [tmp_path / f"{name}{suffix}", tmp_path / f"{name}.ratios{suffix}"]
        arguments = [str(H200), "--plot", str(both[0]), "--ratios", str(both[1])]
        done = CliRunner().invoke(report.main, arguments)
        assert done.exit_code == 0, done.output
        return [path.read_bytes() for path in both]

    first = draw("a")
    assert first[0] != first[1]
    (tmp_path / "b").mkdir()
    assert draw("b/a") == first
    start = b"\x89PNG" if suffix == ".png" else b"<?xml"
    assert all(image.startswith(start) for image in first)


def test_no_ratios_without_peers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gdn_decode: no peer was measured"):
        report.plot_ratios(
            json.loads((RESULTS / "cpu" / "gdn_decode.json").read_text()), tmp_path / "x.svg"
        )


def test_numbers_in_text_are_not_rounded(published: dict[str, Any]) -> None:
    """Coordinates are; a title's figures are not."""
    figure = figures.histogram(published)
    assert figure is not None
    text = figures.inline(figure, "x", "y")
    for panel in figure.axes:
        assert panel.get_title(loc="left") in text
    assert not re.search(r'="[^"]*\d\.\d{3}', text)
