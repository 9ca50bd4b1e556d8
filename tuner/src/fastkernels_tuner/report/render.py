"""A report as one static HTML page, and as Markdown. No clock, no environment, no network."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fastkernels_tuner.report import page as pages
from fastkernels_tuner.report import words
from fastkernels_tuner.report.data import CampaignReport
from fastkernels_tuner.report.page import Key, Name


def render_html(report: CampaignReport) -> str:
    """One page with its style and plots in it; everything from the report is escaped."""
    style = resources.files(__package__).joinpath("templates/style.css").read_text("utf-8")
    template = _environment(html=True).get_template("page.html.j2")
    return template.render(page=pages.build(report), style=Markup(style)).strip() + "\n"


def render_markdown(report: CampaignReport) -> str:
    """The same sections without the plots: their numbers stand in tables."""
    text = _environment(html=False).get_template("page.md.j2").render(page=pages.build(report))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment(*, html: bool) -> Environment:
    env = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_clean if html else None,
    )
    env.filters.update(
        breakable=_breakable,
        parts=_parts,
        swatch=_swatch,
        share=_share,
        md=_markdown,
        md_code=_code,
    )
    return env


# ---- HTML ---------------------------------------------------------------------------------------


def _clean(value: Any) -> Any:
    return words.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(text: str) -> Markup:
    """Lines may break after the separators of names that have no spaces."""
    return Markup(re.sub(r"([,:/](?=\S))", r"\1<wbr>", str(escape(words.clean(text)))))


_LABEL = re.compile(r"(?P<route>[^()]+)\((?P<config>.*)\)", re.DOTALL)


def _parts(name: Name) -> tuple[str, list[str]]:
    """Route and knobs of a label, to be set apart; of any other name, all of it and none."""
    match = _LABEL.fullmatch(name.label)
    if match is None:
        return name.label, []
    return match["route"], match["config"].split(", ")


def _share(value: float) -> str:
    return f"{100 * value:.2f}%"


# Around (14, 6); in the order of `figures.PEER_MARKERS`.
_MARKERS = ("M11 3h6v6h-6z", "M14 2l3.5 7h-7z", "M14 2l4 4-4 4-4-4z", "M14 10l3.5-7h-7z")


def _swatch(key: Key) -> Markup:
    """The line of a legend as the plots draw it."""
    line = {
        "champion": ("--ink", 1.6, "5 3"),
        "peer": ("--muted", 1.4, ""),
        "floor": ("--muted", 1.8, "1.5 3"),
        "rest": ("--faint", 1.2, ""),
        "fastest": ("--ink", 2.6, ""),
    }
    if isinstance(key.look, str):
        colour, width, dashes = line[key.look]
    else:
        colour, width = f"--series-{key.look.colour}", 3.0
        dashes = "6 3" if key.look.is_broken else ""
    marker = ""
    if key.look == "peer":
        marker = f'<path d="{_MARKERS[key.marker]}" style="fill:var(--paper)"/>'
    return Markup(
        f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true" style="stroke:var({colour});'
        f'stroke-width:{width};stroke-dasharray:{dashes or "none"}"><path d="M1 6h26"/>{marker}'
        "</svg>"
    )


# ---- Markdown -----------------------------------------------------------------------------------

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#&~!$])")


def _line(text: str) -> str:
    """No line ends; the narrow spaces in numbers stay."""
    return re.sub(r"[ \t\n]+", " ", words.clean(text)).strip(" ")


def _markdown(text: str) -> str:
    """Text on one line, in which nothing means anything."""
    return _SPECIAL.sub(r"\\\1", _line(text))


def _code(text: str) -> str:
    """A code span on one line, fit for a cell; its fence is longer than any run of backticks."""
    line = _line(text).replace("|", r"\|")
    if not line:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"
