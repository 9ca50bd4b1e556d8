"""The report as a page and as Markdown. Tests marked `service` open the page in Chromium."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pytest
from markdown_it import MarkdownIt
from PIL import Image, ImageStat
from pydantic import ValidationError

from fastkernels_tuner.model import Cause, Environment, Policy, digest
from fastkernels_tuner.report import (
    Aggregate,
    Budget,
    CampaignReport,
    Comparison,
    Cost,
    Curve,
    Curves,
    FittedRegime,
    Point,
    Problem,
    StageCost,
    Study,
    render_html,
    render_markdown,
    words,
)
from fastkernels_tuner.report.cast import NUM_COLOURS, Cast

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SECTIONS = [
    "routes", "ratios", "comparisons", "times", "search", "correctness", "failures", "cost",
    "environment",
]  # fmt: skip
SMALL, LARGE = "warp_rows(lanes=16, warps=8)", "warp_rows(lanes=32, warps=1)"
SLOW = "torch(chunk=64)"
POLICY = Policy(name="gpu", timer="cupti", is_promotable=True)
ENVIRONMENT = Environment(
    device="NVIDIA H200", arch="sm90", uuid="GPU-a5408410", driver="580.159.04",
    versions={"torch": "2.11.0", "triton": "3.6.0"}, code="f276691864fd", timer="cupti",
)  # fmt: skip


def curve(name: str, kind: Any, scale: float, sizes: tuple[int, ...] = (1, 4, 16, 64)) -> Curve:
    points = [
        Point(size=n, us=us, p10=0.95 * us, p90=1.1 * us)
        for n in sizes
        for us in [scale * (2 + n / 4)]
    ]
    return Curve(name=name, kind=kind, points=tuple(points))


def a_report(**changes: Any) -> CampaignReport:
    """One that has something in every place."""
    sizes = tuple({"batch_size": size} for size in (1, 4, 16, 64))
    two = tuple(
        FittedRegime(
            mode="ragged", bounds={"tokens": tokens, "num_seqs": seqs}, candidate=candidate,
            measured=({"tokens": tokens[1], "num_seqs": seqs[1]},),
        )
        for tokens, seqs, candidate in (
            ((0, 40), (0, 64), SMALL), ((41, 4096), (0, 8), LARGE), ((41, 4096), (9, 64), SMALL)
        )
    )  # fmt: skip
    whole: dict[str, Any] = {
        "campaign": "gdn_decode-3f9ac2d1-7k2m",
        "op": "gdn_decode",
        "environment": ENVIRONMENT,
        "policy": POLICY,
        "outcome": "promoted",
        "summary": "Faster than the table before it.",
        "started": datetime(2026, 11, 29, 19, 41, tzinfo=timezone.utc),
        "finished": datetime(2026, 11, 29, 19, 57, tzinfo=timezone.utc),
        "table": "dispatch_tables/gdn_decode/sm90-h200.toml",
        "champion": "sha256:c2283cbf",
        "protocol": {"l2": "cold", "iterations": 30},
        "ids": {SMALL: "7ea57f38983d1e7e"},
        "aggregates": (
            Aggregate(
                listed="contest", mode="functional", against="champion", rows=54,
                ratio_of_means=1.0142, mean_of_ratios=1.0218, geomean=1.0211, gated=1.0218,
                leave_one_out=(1.0198, 1.0223), worst=0.9982, worst_workload="b32",
            ),
            Aggregate(
                listed="serving", against="flashinfer", rows=5, ratio_of_means=0.991,
                mean_of_ratios=1.004, geomean=1.003, worst=0.95,
            ),
        ),
        "comparisons": (
            Comparison(
                about="functional[batch_size=0..10]", challenger=SMALL, baseline=SLOW,
                effect=0.0123, ci=(0.0067, 0.0173), gain_us=0.069, workloads=4, pairs=8,
                discarded=1, decision="promote", uuid=ENVIRONMENT.uuid,
            ),
            Comparison(
                about="functional[batch_size=11..64]", challenger=LARGE, baseline=SMALL,
                effect=-0.002, ci=(-0.004, 0.0), pairs=16, decision="keep", is_confirmation=True,
                uuid=ENVIRONMENT.uuid,
            ),
        ),
        "regimes": (
            FittedRegime(
                mode="functional", bounds={"batch_size": (0, 10)}, candidate=SMALL, previous=SLOW,
                measured=sizes[:2], slowdown=0.0156, runner_up=LARGE, margin=0.0872,
                at={"batch_size": 4}, spread_us=0.108, worst_us=5.857, trials=897,
            ),
            FittedRegime(
                mode="functional", bounds={"batch_size": (11, 64)}, candidate=LARGE,
                previous=LARGE, measured=sizes[2:], slowdown=0.0, trials=598,
            ),
            *two,
        ),
        "curves": (
            Curves(
                axis="batch_size", mode="functional",
                curves=(
                    curve(SMALL, "candidate", 1.0), curve(LARGE, "candidate", 1.03),
                    curve(SLOW, "candidate", 1.5), curve("sm90-h200.toml", "champion", 1.02),
                    curve("flashinfer", "peer", 1.3), curve("fla", "peer", 1.2),
                    curve("copy of the same bytes", "floor", 0.8, (1, 64)),
                ),
            ),
        ),
        "studies": (
            Study(
                regime="functional[batch_size=1..64]", route="warp_rows", sampler="TPE", space=96,
                trials={"complete": 31, "pruned": 8, "failed": 1}, best=SMALL, best_us=2.5,
                importances={"lanes": 0.72, "warps": 0.28},
            ),
            Study(regime="functional[batch_size=1..64]", route="torch", trials={"complete": 3}),
        ),
        "budgets": (
            Budget(
                candidate=SMALL, stratum="contest:b64", risk="high", trials=895, failures=0,
                upper_bound=0.00334, required=0.00334, verdict="pass", worst=0.21,
            ),
            Budget(
                candidate=SLOW, stratum="adversarial:ties", risk="high", trials=61, failures=2,
                upper_bound=0.0995, required=0.00334, verdict="fail",
            ),
            Budget(
                candidate=SMALL, stratum="adversarial:empty", risk="high", trials=3, failures=0,
                upper_bound=0.632, required=0.00334, verdict="pass", proof="nothing is computed",
            ),
        ),
        "problems": (
            Problem(
                cause=Cause.NUMERIC, candidate=SLOW, stage="verify", workload="adversarial:ties",
                seed=184467, message="output: 3.2e-02, limit 2.5e-03\nfirst bad (0, 3)", count=2,
            ),
            Problem(cause=Cause.THROTTLED, message="SM clock 1620 MHz of 1980 MHz", count=9),
        ),
        "cost": Cost(
            stages=(
                StageCost(stage="search", device_s=312.5, wall_s=401.8),
                StageCost(stage="compare", device_s=158.7, wall_s=181.3),
            ),
            budget_s=900, blocks=1824, discarded={"throttled": 9},
        ),
        "warnings": ("Only one GPU confirmed the promotion.",),
        "notes": ("Regimes of inplace and pool were merged.",),
    }  # fmt: skip
    return CampaignReport(**{**whole, **changes})


EMPTY = CampaignReport(
    campaign="moe-0", op="moe", environment=ENVIRONMENT, policy=POLICY, outcome="unfinished"
)


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(a_report())


@pytest.fixture(scope="module")
def markdown() -> str:
    return render_markdown(a_report())


# ---- reading what was written -------------------------------------------------------------------

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Document(HTMLParser):
    """Elements and text of a page; an end tag that closes another element is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def test_a_page_is_whole(html: str) -> None:
    page = Document(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [section["id"] for section in page.all("section")] == [*SECTIONS, "notes"]
    links = [a["href"] for a in page.all("a")]
    assert {f"#{section}" for section in SECTIONS} < set(links)
    assert {link.removeprefix("#") for link in links} <= set(ids)
    references = re.findall(r"url\(#([\w-]+)\)", html)
    references += [use["href"].removeprefix("#") for use in page.all("use")]
    assert references
    assert set(references) <= set(ids)


def test_a_page_can_be_read_without_eyes(html: str) -> None:
    page = Document(html)
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == 1
    assert len(page.all("caption")) == len(page.all("table")) > 8
    assert all(header["scope"] == "col" for header in page.all("th"))
    plots = [svg for svg in page.all("svg") if svg.get("aria-hidden") != "true"]
    assert len(plots) == 4  # bands, areas, times, losses
    assert all(svg["role"] == "img" for svg in plots)
    labels = [svg["aria-label"] for svg in plots]
    assert labels[0].startswith(
        "Route map over batch_size. functional: A for 0\u201310, B for 11\u201364"
    )
    assert labels[2].startswith("Median time in microseconds over batch_size from 1 to 64")
    scrolling = [div for div in page.all("div") if div.get("class") == "scroll"]
    assert all(div["tabindex"] == "0" and div["aria-label"] for div in scrolling)


def test_a_page_needs_nothing_but_itself(html: str) -> None:
    page = Document(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "video", "audio", "image"}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "srcset", "action"):
            assert attributes.get(name, "#").startswith("#") or attributes[name] == "data:,"
    assert not re.search(r"@import|url\((?!#)", html)
    [policy] = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert policy.startswith("default-src 'none';")


@pytest.mark.parametrize(
    "fact",
    [
        "Campaign gdn_decode-3f9ac2d1-7k2m · 2026-11-29 19:41 UTC to 2026-11-29 19:57 UTC",
        "gdn_decode on NVIDIA H200",
        "Faster than the table before it.",
        "580.159.04",
        "torch 2.11.0, triton 3.6.0",
        digest(POLICY.canonical()),
        "1.021 \u00d7",
        "geomean, contest list, functional, 54 rows",
        "1.020\u20131.022",
        "+1.23 % [+0.67 %, +1.73 %]",
        "\u22120.20 % [\u22120.40 %, +0.00 %]",
        "keep, confirmation",
        "Confirmations ran on the same GPU: no other one of the product took part.",
        "8 (+1 discarded)",
        "7ea57f38983d1e7e",
        "8.7 %",
        "31 complete, 8 pruned, 1 failed",
        "34 complete, 8 pruned, 1 failed",
        "72 %",
        "Of those that hold, the nearest to its limit: 0.334 % of at most 0.334 %",
        "nothing is computed",
        "3 bounds: 2 hold, 1 with wrong results, 0 open.",
        "9 throttled, 2 numeric.",
        "output: 3.2e-02, limit 2.5e-03",
        "7 min 51 s of at most 15 min 00 s",
        "9 timed blocks of 1 824 (0.5 %) were discarded, at most 30 % may be",
        "Aggregations disagree about flashinfer on the serving list: below 1 by ratio of means",
        "Only one GPU confirmed the promotion.",
        "Regimes of inplace and pool were merged.",
    ],
)
def test_both_forms_say(html: str, markdown: str, fact: str) -> None:
    assert fact in Document(html).words
    assert fact in Document(MARKDOWN.render(markdown)).words


def session(about: str, number: int, uuid: str) -> Comparison:
    return Comparison(
        about=about, challenger="fitted table", baseline="champion", effect=0.02, ci=(0.01, 0.03),
        pairs=4, decision="promote", is_confirmation=number > 1, uuid=uuid,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("inplace", "words"),
    [
        ("GPU-77aa0c11-2", "Each confirmation ran on another GPU of the same product"),
        ("GPU-a5408410-1", "ran on another GPU of the same product, but not of inplace."),
    ],
)
def test_gpus_of_confirmations(inplace: str, words: str) -> None:
    first, second = "GPU-a5408410-1", "GPU-77aa0c11-2"
    comparisons = (
        session("functional", 1, first), session("functional", 2, second),
        session("inplace", 1, first), session("inplace", 2, inplace),
        session("pool", 1, first),
    )  # fmt: skip
    text = render_markdown(a_report(comparisons=comparisons))
    assert words in text
    assert text.count("| `GPU-a5408410` |") + text.count("| `GPU-77aa0c11` |") == 5
    assert "Confirmations" not in render_markdown(a_report(comparisons=comparisons[-1:]))


def test_times_of_a_size(markdown: str) -> None:
    """What serves it, percentiles, loss, champion, peers, floor where there is one."""
    row = next(line for line in markdown.splitlines() if line.startswith("| 16 |"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "16", f"**B** `{LARGE}`", "6.18", "5.87\u20136.80", "3.0\u202f%", "6.12", "7.80", "7.20",
        "\u2013",
    ]  # fmt: skip


def test_a_letter_is_one_candidate_on_the_whole_page(html: str) -> None:
    badges = re.findall(
        r'<b class="badge" style="background:var\(--series-(\d)\)[^>]*>(\w+)<', html
    )
    assert set(badges) == {("0", "A"), ("1", "B")}
    looks = Cast(f"c{i}" for i in range(60)).looks.values()
    assert len({look.letter for look in looks}) == 60
    assert {look.colour for look in looks} == set(range(NUM_COLOURS))


# ---- hostile names ------------------------------------------------------------------------------

EVIL = (
    "<img src=x onerror=alert(1)></style><script>alert(2)</script>'\"&amp;|`` ` ```"
    "\n# pwned\n[a](http://evil.test)![b](http://evil.test/b.png)"
    " $\\frac{$ {{ 7*7 }}\0\x1b\u202e\u2028"
)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


def poisoned(value: Any, key: str = "") -> Any:
    """The same report with EVIL in every text without fixed choices, names of knobs included."""
    fixed = {"kind", "timer", "cause", "decision", "verdict", "outcome", "status", "started"}
    if isinstance(value, dict):
        named = {"ids", "importances", "versions", "protocol", "discarded"}
        return {
            (name + EVIL if key in named else name): poisoned(entry, name)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [poisoned(entry, key) for entry in value]
    return value + EVIL if isinstance(value, str) and key not in fixed | {"finished"} else value


@pytest.fixture(scope="module")
def hostile() -> CampaignReport:
    data = poisoned(json.loads(a_report().model_dump_json()))
    # Axes are names too: of bounds, sizes and curves alike.
    axis = f'"{json.dumps("batch_size" + EVIL)[1:-1]}"'
    return CampaignReport.model_validate_json(
        re.sub(r'"batch_size"(?=:)', lambda _: axis, json.dumps(data))
    )


def test_hostile_names_stay_text_on_the_page(html: str, hostile: CampaignReport) -> None:
    text = render_html(hostile)
    page, innocent = Document(text), Document(html)
    assert "batch_size<img" in page.text
    assert page.text.count("<img src=x onerror=alert(1)>") > 60
    assert "{{ 7*7 }}" in page.text
    tags = [tag for tag, _ in page.elements]
    assert set(tags) == {tag for tag, _ in innocent.elements}
    assert tags.count("section") == len(innocent.all("section"))
    assert not [name for _, attributes in page.elements for name in attributes if name[:2] == "on"]
    assert not re.search(r"[\0\x1b\u202e\u2028]", text)
    assert r"\x00\x1b\u202e\u2028" in page.text


def test_hostile_names_stay_text_in_markdown(hostile: CampaignReport) -> None:
    text = render_markdown(hostile)
    assert not re.search(r"[\0\x1b\u202e\u2028]", text)
    page = Document(MARKDOWN.render(text))
    innocent = Document(MARKDOWN.render(render_markdown(a_report())))
    tags = [tag for tag, _ in page.elements]
    for tag in ("table", "tr", "th", "td", "h1", "h2", "h3", "li", "blockquote"):
        assert tags.count(tag) == len(innocent.all(tag)), tag
    assert not {"img", "script", "style", "a"} & set(tags)
    assert "<img src=x onerror=alert(1)>" in page.text


# ---- the same data, the same bytes --------------------------------------------------------------


def test_the_same_bytes_in_another_process(html: str, tmp_path: Path) -> None:
    """Other hashes, another time zone, somebody's own matplotlib style."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.facecolor: red\nsvg.hashsalt: x\n")
    report = tmp_path / "report.json"
    report.write_text(a_report().model_dump_json(), encoding="utf-8")
    code = (
        "import pathlib, sys\n"
        "from fastkernels_tuner.report import *\n"
        "text = pathlib.Path(sys.argv[1]).read_text(encoding='utf-8')\n"
        "sys.stdout.buffer.write(render_html(CampaignReport.model_validate_json(text)).encode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(report)],
        capture_output=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "7",
            "TZ": "Asia/Kathmandu",
            "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        },
    )
    assert done.stdout.decode() == html


def test_matplotlib_is_left_as_it_was() -> None:
    with mpl.rc_context({"font.size": 23}):
        before = dict(mpl.rcParams)
        render_html(a_report())
        assert dict(mpl.rcParams) == before


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Point(size=1, us=float("nan"))
    with pytest.raises(ValidationError, match="greater than 0"):
        Point(size=1, us=0)


# ---- less than everything -----------------------------------------------------------------------

WHOLE = a_report()
[CURVES] = WHOLE.curves


def of(*curves: Curve, axis: str = "batch_size", mode: str = "functional") -> Curves:
    return Curves(axis=axis, mode=mode, curves=curves)


PARTIAL: dict[str, tuple[CampaignReport, tuple[str, ...], tuple[str, ...]]] = {
    "empty": (
        EMPTY,
        (
            "Unfinished", "has not ended", "No regimes were fitted.", "No times were measured.",
            "No paired comparison", "No study was run.", "Nothing failed.", "Nothing was spent.",
            "No candidate was judged", "No champion and no peer",
        ),
        ("geomean against", "Numbers:", "discarded:"),
    ),
    "one size": (
        a_report(
            regimes=WHOLE.regimes[:1], curves=(of(curve(SMALL, "candidate", 1, (4,))),)
        ),
        ("Numbers: functional", "functional"), ("fla,", "other candidate"),
    ),
    "nothing promoted": (
        a_report(outcome="kept", summary="", comparisons=(), regimes=()),
        ("Nothing promoted", "No candidate beat the champion", "fastest candidate of each size"),
        ("Candidates of the table",),
    ),
    "no peers": (
        a_report(
            aggregates=WHOLE.aggregates[:1], curves=(of(*CURVES.curves[:3]),)
        ),
        ("1 other candidate",),
        ("flashinfer", "champion: sm90"),
    ),
    "only a peer": (
        a_report(
            regimes=(),
            curves=(of(curve("fla", "peer", 1), axis="tokens", mode=""), of(axis="x", mode="")),
        ),
        ("fla, µs", "every mode", "Nothing was measured here."),
        ("fastest candidate of each size",),
    ),
    "three axes": (
        a_report(regimes=(FittedRegime(bounds=dict.fromkeys("abc", (1, 2)), candidate=SMALL),)),
        ("Regimes over 3 axes (a, b, c) have no map",),
        (),
    ),
    "on a CPU": (
        a_report(
            policy=Policy(name="cpu", timer="wall", is_promotable=False),
            environment=ENVIRONMENT.model_copy(update={"timer": "wall", "code": "abc+dirty"}),
            status="unmeasured",
            outcome="candidate",
            summary="",
        ),
        (
            "Tables of the policy cpu are never shipped.", "Times are wall times", "no, never",
            "changes that were not committed", "Status unmeasured",
        ),
        ("Medians, sums of kernel times",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTIAL)
def test_partial_campaigns(case: str) -> None:
    report, said, unsaid = PARTIAL[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib, over empty or single points
        page = Document(render_html(report))
    markdown = Document(MARKDOWN.render(render_markdown(report)))
    ids = [section["id"] for section in page.all("section")]
    assert ids[: len(SECTIONS)] == SECTIONS
    for words_ in said:
        assert words_ in page.words
    for words_ in unsaid:
        assert words_ not in page.words
        assert words_ not in markdown.words


# ---- numbers and colours ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (words.us(2.0484), "2.05"),
        (words.us(0.04821), "0.048"),
        (words.us(18.384), "18.4"),
        (words.us(1020.704), "1\u202f021"),
        (words.us(0.00004), "4e-05"),
        (words.us(0), "0"),
        (words.us(None), "\u2013"),
        (words.percent(-0.0156), "\u22121.6\u202f%"),
        (words.signed_percent(0.0213), "+2.13\u202f%"),
        (words.rate(0.00334), "0.334\u202f%"),
        (words.seconds(59.96), "1\u202fmin 00\u202fs"),
        (words.seconds(38.21), "38.2\u202fs"),
        (words.seconds(11100), "3\u202fh 05\u202fmin"),
        (words.span((41, 1024)), "41\u20131\u202f024"),
        (words.span((4, 4)), "4"),
        (words.some(1, "row"), "1 row"),
        (words.shorten("x" * 700), "x" * 600 + " … (100 characters more)"),
        (words.clean("a\u202eb\0\n"), "a\\u202eb\\x00\n"),
        (words.moment(datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)), "2026-01-02 03:04 UTC"),
    ],
)
def test_words(got: str, expected: str) -> None:
    assert got == expected


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for lines and areas that carry meaning."""
    folder = resources.files("fastkernels_tuner.report")
    style = folder.joinpath("templates/style.css").read_text("utf-8")
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", roots[scheme == "dark"]))
    texts = [("ink", "paper"), ("muted", "paper"), ("muted", "raised"), ("link", "paper")]
    texts += [(tone, f"{tone}-soft") for tone in ("good", "bad", "warn", "quiet")]
    texts += [(f"on-series-{i}", f"series-{i}") for i in range(NUM_COLOURS)]
    assert not [pair for pair in texts if contrast(colours[pair[0]], colours[pair[1]]) < 4.5]
    lines = [(f"series-{i}", "paper") for i in range(NUM_COLOURS)]
    assert not [pair for pair in lines if contrast(colours[pair[0]], colours[pair[1]]) < 3]
    assert f"series-{NUM_COLOURS}" not in colours


# ---- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a Chromium: none of {', '.join(names)} on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


def opened(
    browser: Browser, path: Path, width: int, scheme: Any = "light"
) -> tuple[Page, list[str]]:
    """The page, and what it must not do: messages of the console, errors, dialogs, requests."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen: list[str] = []
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("dialog", lambda dialog: seen.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: seen.append(f"request: {request.url}"))
    page.goto(path.as_uri())
    return page, [entry for entry in seen if entry != f"request: {path.as_uri()}"]


def colour(page: Page, selector: str, name: str) -> str:
    value = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{name}")
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", value)[:3])


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.service
@pytest.mark.parametrize("width", [1280, 390])
def test_in_chromium(chromium: Browser, html: str, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    brightness = {}
    for scheme in ("light", "dark"):
        page, seen = opened(chromium, path, width, scheme)
        assert seen == []
        assert page.evaluate(OVERFLOW) <= 0
        ink = colour(page, "figure svg text", "fill")
        assert contrast(ink, colour(page, "body", "backgroundColor")) >= 4.5
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("L")
        assert shot.width == width
        brightness[scheme] = ImageStat.Stat(shot).mean[0]
        assert ImageStat.Stat(shot).stddev[0] > 5  # not blank
        page.close()
    assert brightness["light"] > 200
    assert brightness["dark"] < 80


@pytest.mark.service
def test_every_table_and_plot_is_seen_in_chromium(
    chromium: Browser, html: str, tmp_path: Path
) -> None:
    """On the screen, folded tables after a click; on paper all of them, and no index."""
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    page, _ = opened(chromium, path, 1280)
    heights = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().height)"
    assert min(page.evaluate(heights.format("figure svg"))) > 100
    assert min(page.evaluate(heights.format("section > div > table"))) > 30
    page.locator("summary").first.click()
    assert page.locator("details table").first.is_visible()
    page.reload()
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert min(page.evaluate(heights.format("table"))) > 30
    page.close()


@pytest.mark.service
def test_hostile_names_in_chromium(
    chromium: Browser, hostile: CampaignReport, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(hostile), encoding="utf-8")
    for width in (1280, 390):
        page, seen = opened(chromium, path, width)
        assert seen == []
        assert page.evaluate(OVERFLOW) <= 0
        assert page.locator("img, script").count() == 0
        page.close()
