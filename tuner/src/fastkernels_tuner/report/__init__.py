"""A campaign as one static page, or as Markdown, from plain data.

    report = CampaignReport(...)          # the stages fill it; JSON in and out
    Path("report.html").write_text(render_html(report), encoding="utf-8")

The page needs no script and no network. The same data gives the same bytes.
"""

from __future__ import annotations

from fastkernels_tuner.report.data import (
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
)
from fastkernels_tuner.report.render import render_html, render_markdown

__all__ = [
    "Aggregate",
    "Budget",
    "CampaignReport",
    "Comparison",
    "Cost",
    "Curve",
    "Curves",
    "FittedRegime",
    "Point",
    "Problem",
    "StageCost",
    "Study",
    "render_html",
    "render_markdown",
]
