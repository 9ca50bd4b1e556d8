"""What a report says, in order, before it is HTML or Markdown: sections of paragraphs, facts,
tables and figures. Both forms are made from this, so they cannot disagree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from markupsafe import Markup

from fastkernels_tuner.model import digest
from fastkernels_tuner.report import figures, words
from fastkernels_tuner.report.cast import Cast, Look
from fastkernels_tuner.report.data import (
    CampaignReport,
    Comparison,
    Curve,
    Curves,
    FittedRegime,
    Study,
)

Tone = Literal["good", "bad", "warn", "quiet"]

# ---- parts of a page ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """A candidate: its letter, if it has one, and its label, which HTML cuts to the route where the
    letter is explained elsewhere."""

    label: str
    look: Look | None = None
    is_full: bool = False
    kind: str = "name"


@dataclass(frozen=True)
class Code:
    text: str
    kind: str = "code"


@dataclass(frozen=True)
class Tag:
    text: str
    tone: Tone = "quiet"
    kind: str = "tag"


@dataclass(frozen=True)
class Bar:
    """A number with a bar: `share` of the column's width."""

    text: str
    share: float
    kind: str = "bar"


@dataclass(frozen=True)
class Interval:
    """A confidence interval; positions are shares of the column's width."""

    text: str
    low: float
    middle: float
    high: float
    zero: float
    kind: str = "interval"


Cell = str | Name | Code | Tag | Bar | Interval


@dataclass(frozen=True)
class Column:
    title: str
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """`caption` says what it is to who cannot see it; folded, it hides behind that."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_folded: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Facts:
    items: tuple[tuple[str, Cell], ...]
    kind: str = "facts"


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Heading:
    text: str
    kind: str = "heading"


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line or a patch as style.css draws it."""

    look: Look | Literal["peer", "champion", "floor", "rest", "fastest"]
    label: str
    marker: int = 0  # of peers


@dataclass(frozen=True)
class Plots:
    """SVG elements side by side, under what explains them. Markdown leaves all of it out, so they
    are drawn when they are called."""

    svgs: tuple[Callable[[], Markup], ...]
    text: str = ""
    legend: tuple[Key, ...] = ()
    titles: tuple[str, ...] = ()
    is_wide: bool = False
    kind: str = "plots"


Block = Text | Heading | Facts | Table | Plots


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Figure:
    """A headline figure."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    verdict: str
    tone: Tone
    summary: str
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]


# ---- from a report ------------------------------------------------------------------------------

_OUTCOMES: dict[str, tuple[str, Tone, str]] = {
    "promoted": ("Promoted", "good", "The table is now the one that is shipped."),
    "candidate": (
        "Candidate table",
        "warn",
        "A table was written; nothing is shipped before fastkernels-tune promote.",
    ),
    "kept": ("Nothing promoted", "quiet", "No candidate beat the champion, which stays."),
    "rejected": ("Rejected", "bad", "A candidate of the table failed a gate."),
    "inconclusive": ("Inconclusive", "warn", "The evidence does not carry a decision."),
    "unfinished": ("Unfinished", "warn", "The campaign stopped before its end; it can be resumed."),
}
_DECISIONS: dict[str, tuple[str, Tone]] = {
    "promote": ("promote", "good"),
    "keep": ("keep", "quiet"),
    "inconclusive": ("inconclusive", "warn"),
    "reject": ("reject", "bad"),
}
_VERDICTS: dict[str, tuple[str, Tone]] = {
    "pass": ("holds", "good"),
    "fail": ("wrong", "bad"),
    "need_more": ("more trials needed", "warn"),
    "inconclusive": ("inconclusive", "warn"),
}


def build(report: CampaignReport) -> Page:
    cast = Cast.of(report)
    verdict, tone, usual = _OUTCOMES[report.outcome]
    env = report.environment
    dates = [words.moment(when) for when in (report.started, report.finished) if when is not None]
    return Page(
        title=f"{report.op} on {env.device}",
        subtitle=" · ".join(filter(None, (f"Campaign {report.campaign}", " to ".join(dates)))),
        verdict=verdict,
        tone=tone,
        summary=report.summary or usual,
        figures=tuple(_figures(report)),
        warnings=tuple(_warnings(report)),
        sections=(
            Section("routes", "Route map", tuple(_routes(report, cast))),
            Section("ratios", "Against champion and peers", tuple(_ratios(report))),
            Section("comparisons", "Paired comparisons", tuple(_comparisons(report, cast))),
            Section("times", "Times", tuple(_times(report, cast))),
            Section("search", "Search", tuple(_search(report, cast))),
            Section("correctness", "Correctness", tuple(_correctness(report, cast))),
            Section("failures", "Failures", tuple(_failures(report, cast))),
            Section("cost", "Cost", tuple(_cost(report))),
            Section("environment", "Environment and policy", tuple(_environment(report))),
            *([Section("notes", "Notes", tuple(map(Text, report.notes)))] if report.notes else []),
        ),
    )  # fmt: skip


def _figures(report: CampaignReport) -> Iterable[Figure]:
    if report.aggregates:
        first = report.aggregates[0]
        yield Figure(
            f"against {first.against}",
            words.ratio(first.geomean),
            ", ".join(
                part
                for part in (
                    "geomean",
                    f"{first.listed} list",
                    first.mode,
                    words.some(first.rows, "row"),
                )
                if part
            ),
        )
    if report.regimes:
        known = [regime for regime in report.regimes if regime.previous is not None]
        changed = sum(regime.previous != regime.candidate for regime in known)
        candidates = len({regime.candidate for regime in report.regimes})
        yield Figure(
            "regimes",
            words.count(len(report.regimes)),
            words.some(candidates, "candidate") + (f", {changed} changed" if known else ""),
        )
    trials = _trial_states(report)
    if trials:
        yield Figure("search trials", words.count(sum(trials.values())), _counts(trials))
    if report.budgets:
        wrong = sum(budget.failures for budget in report.budgets)
        held = sum(budget.verdict == "pass" for budget in report.budgets)
        yield Figure(
            "judged calls",
            words.count(sum(budget.trials for budget in report.budgets)),
            f"{words.count(wrong)} wrong; {held} of {len(report.budgets)} bounds hold",
        )
    if report.cost.stages:
        budget = report.cost.budget_s
        yield Figure(
            "device time",
            words.seconds(report.cost.device_s),
            "" if budget is None else f"of at most {words.seconds(budget)}",
        )


def _warnings(report: CampaignReport) -> Iterable[str]:
    policy, env, cost = report.policy, report.environment, report.cost
    if report.finished is None or report.outcome == "unfinished":
        yield "The campaign has not ended: what follows is what is known so far."
    if report.status == "unmeasured":
        yield (
            "Status unmeasured: the table was made by rule, and nobody has timed it on this device."
        )
    if not policy.is_promotable:
        yield f"Tables of the policy {policy.name} are never shipped."
    if env.timer == "wall":
        yield "Times are wall times of calls, not sums of kernel times."
    if env.code.endswith("+dirty"):
        yield "The tree had changes that were not committed: this cannot be repeated from it alone."
    discarded = sum(cost.discarded.values())
    if discarded:
        share = f" ({words.percent(discarded / cost.blocks)})" if cost.blocks else ""
        yield (
            f"{words.some(discarded, 'timed block')} of {words.count(cost.blocks)}{share} were "
            f"discarded, at most {words.percent(policy.max_discarded, 0)} may be: "
            f"{_counts(cost.discarded)}."
        )
    for row in report.aggregates:
        means = {
            "ratio of means": row.ratio_of_means,
            "mean of ratios": row.mean_of_ratios,
            "geomean": row.geomean,
        }
        slower = [name for name, value in means.items() if value < 1]
        if 0 < len(slower) < len(means):
            yield (
                f"Aggregations disagree about {row.against} on the {row.listed} list"
                f"{f', {row.mode}' if row.mode else ''}: below 1 by {', '.join(slower)} only."
            )
    yield from report.warnings


def _ratios(report: CampaignReport) -> Iterable[Block]:
    if not report.aggregates:
        yield Text("No champion and no peer was measured beside the candidates.")
        return
    has_gated = any(row.gated is not None for row in report.aggregates)
    has_range = any(row.leave_one_out is not None for row in report.aggregates)
    yield Text(
        "Times theirs / ours: above 1, the new table is faster."
        + (" Leave one out: the geomean's range without any one row." if has_range else "")
    )
    yield Table(
        "Ratios by list, mode and opponent",
        (
            Column("list"),
            Column("mode"),
            Column("against"),
            *(Column(title, True) for title in ("rows", "geomean", "mean of ratios")),
            Column("ratio of means", True),
            *([Column("gated score", True)] if has_gated else []),
            *([Column("leave one out", True)] if has_range else []),
            Column("worst row", True),
            Column("which"),
        ),
        tuple(
            (
                row.listed,
                row.mode or words.NOTHING,
                row.against,
                words.count(row.rows),
                _toned(row.geomean),
                _plain(row.mean_of_ratios),
                _plain(row.ratio_of_means),
                *([_plain(row.gated)] if has_gated else []),
                *([_range(row.leave_one_out)] if has_range else []),
                _plain(row.worst),
                Code(row.worst_workload) if row.worst_workload else words.NOTHING,
            )
            for row in report.aggregates
        ),
    )


def _plain(ratio: float | None) -> str:
    return words.NOTHING if ratio is None else f"{ratio:.3f}"


def _toned(geomean: float) -> Tag:
    return Tag(_plain(geomean), "good" if geomean > 1 else "bad" if geomean < 1 else "quiet")


def _range(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return words.NOTHING
    return f"{ends[0]:.3f}{words.NOTHING}{ends[1]:.3f}"


def _comparisons(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.comparisons:
        yield Text("No paired comparison was made.")
        return
    policy = report.policy
    yield Text(
        f"Interleaved blocks, A B B A. Promoted if the gain exceeds "
        f"{words.percent(policy.min_gain)} and {policy.min_gain_us * 1000:.0f}{words.NARROW}ns and "
        f"its confidence interval excludes less; looks after "
        f"{', '.join(map(str, policy.looks))} pairs at a joint level of "
        f"{words.percent(policy.alpha, 0)}. Positive: the challenger is faster."
    )
    if text := _confirmed_on(report.comparisons):
        yield Text(text)
    has_gpu = any(each.uuid for each in report.comparisons)
    scale = _Scale.of(report.comparisons)
    yield Table(
        "Paired comparisons",
        (
            Column("regime or workload"),
            Column("challenger"),
            Column("baseline"),
            Column("gain, with interval"),
            Column("gain, µs", True),
            Column("workloads", True),
            Column("pairs", True),
            *([Column("GPU")] if has_gpu else []),
            Column("decision"),
        ),
        tuple(
            (
                each.about,
                Name(each.challenger, cast.look(each.challenger)),
                Name(each.baseline, cast.look(each.baseline)),
                scale.interval(each),
                words.NOTHING if each.gain_us is None else _signed_us(each.gain_us),
                words.count(each.workloads),
                words.count(each.pairs)
                + (f" (+{each.discarded} discarded)" if each.discarded else ""),
                *([_code(_short(each.uuid))] if has_gpu else []),
                Tag(
                    _DECISIONS[each.decision][0]
                    + (", confirmation" if each.is_confirmation else ""),
                    _DECISIONS[each.decision][1],
                ),
            )
            for each in report.comparisons
        ),
    )


def _confirmed_on(comparisons: Sequence[Comparison]) -> str:
    """Whether confirmations ran on other GPUs; empty where there are none, or nobody says where."""
    confirmed = {each.about for each in comparisons if each.is_confirmation and each.uuid}
    gpus = {a: {each.uuid for each in comparisons if each.about == a} for a in confirmed}
    single = sorted(about for about in confirmed if len(gpus[about]) == 1)
    if not confirmed:
        return ""
    if not single:
        return "Each confirmation ran on another GPU of the same product than what it confirms."
    if len(single) == len(confirmed):
        return "Confirmations ran on the same GPU: no other one of the product took part."
    return f"Confirmations ran on another GPU of the same product, but not of {', '.join(single)}."


def _short(uuid: str) -> str:
    """As much of a GPU's UUID as tells one from another; a CPU has its host's name."""
    return uuid[:12] if uuid.startswith("GPU-") else uuid


@dataclass(frozen=True)
class _Scale:
    """Of the intervals of all comparisons, so that they can be compared by eye."""

    low: float
    high: float

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> _Scale:
        """Cut at a fifth: one huge gain must not flatten the rest."""
        low = max(min(0.0, *(each.ci[0] for each in comparisons)), -0.2)
        high = min(max(0.0, *(each.ci[1] for each in comparisons)), 0.2)
        pad = 0.05 * (high - low) or 0.01
        return cls(low - pad, high + pad)

    def _share(self, value: float) -> float:
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def interval(self, each: Comparison) -> Interval:
        low, high = each.ci
        text = (
            f"{words.signed_percent(each.effect)} "
            f"[{words.signed_percent(low)}, {words.signed_percent(high)}]"
        )
        low, middle, high, zero = map(self._share, (low, each.effect, high, 0.0))
        return Interval(text, low, middle, high, zero)


def _signed_us(value: float) -> str:
    return ("+" if value >= 0 else words.MINUS) + words.us(abs(value))


# ---- routes -------------------------------------------------------------------------------------


def _routes(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.regimes:
        yield Text("No regimes were fitted.")
        return
    yield from _maps(report.regimes, cast)
    used = Counter(regime.candidate for regime in report.regimes)
    yield Table(
        "Candidates of the table",
        (Column("candidate"), Column("regimes", True), Column("id")),
        tuple(
            (
                Name(label, look, is_full=True),
                words.count(used[label]),
                _code(report.ids.get(label, "")),
            )
            for label, look in cast.looks.items()
        ),
    )
    yield Heading("Regimes")
    axes = list(dict.fromkeys(axis for regime in report.regimes for axis in regime.bounds))
    has_previous = any(regime.previous is not None for regime in report.regimes)
    yield Table(
        "Regimes of the table",
        (
            Column("mode and constants"),
            *(Column(axis, True) for axis in axes),
            Column("candidate"),
            *([Column("before")] if has_previous else []),
            Column("slowdown", True),
            Column("runner-up"),
            Column("margin", True),
            Column("at", True),
            Column("worst, µs", True),
            Column("spread, µs", True),
            Column("judged", True),
        ),
        tuple(
            (
                words.group(regime.mode, regime.constants),
                *(_bounds(regime, axis) for axis in axes),
                Name(regime.candidate, cast.look(regime.candidate)),
                *([_previous(regime, cast)] if has_previous else []),
                words.percent(regime.slowdown),
                Name(regime.runner_up, cast.look(regime.runner_up))
                if regime.runner_up
                else words.NOTHING,
                words.percent(regime.margin),
                _at(regime.at),
                words.us(regime.worst_us),
                words.us(regime.spread_us),
                words.count(regime.trials)
                + (f", {words.count(regime.failures)} wrong" if regime.failures else ""),
            )
            for regime in report.regimes
        ),
    )


def _maps(regimes: Sequence[FittedRegime], cast: Cast) -> Iterable[Block]:
    """By variable axes: one plot for all groups over one axis, one per group over two."""
    by_axes: dict[tuple[str, ...], dict[str, list[FittedRegime]]] = defaultdict(dict)
    for regime in regimes:
        group = words.group(regime.mode, regime.constants)
        by_axes[tuple(regime.bounds)].setdefault(group, []).append(regime)
    for number, (axes, groups) in enumerate(by_axes.items()):
        if len(axes) == 1:
            yield Plots(
                (partial(figures.bands, f"map{number}", axes[0], groups, cast),),
                "Each band is served by one candidate; ticks below it were measured.",
                is_wide=True,
            )
        elif len(axes) == 2:
            plots = (
                partial(figures.areas, f"map{number}-{i}", axes, group, members, cast)
                for i, (group, members) in enumerate(groups.items())
            )
            text = "Each area is served by one candidate; dots were measured."
            yield Plots(tuple(plots), text, titles=tuple(groups))
        else:
            yield Text(
                f"Regimes over {len(axes)} axes ({', '.join(axes) or 'none'}) have no map; they "
                "stand in the table below."
            )


def _at(size: dict[str, int]) -> str:
    if len(size) == 1:
        return words.count(*size.values())
    return words.pairs(size) or words.NOTHING


def _bounds(regime: FittedRegime, axis: str) -> str:
    return words.span(regime.bounds[axis]) if axis in regime.bounds else words.NOTHING


def _previous(regime: FittedRegime, cast: Cast) -> Cell:
    if regime.previous is None:
        return words.NOTHING
    if regime.previous == regime.candidate:
        return Tag("the same")
    return Name(regime.previous, cast.look(regime.previous))


def _code(text: str) -> Cell:
    return Code(text) if text else words.NOTHING


# ---- times --------------------------------------------------------------------------------------


def _times(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.curves:
        yield Text("No times were measured.")
        return
    unit = "wall times of calls" if report.environment.timer == "wall" else "sums of kernel times"
    yield Text(f"Medians, {unit}. Loss: how much slower than the fastest candidate of that size.")
    text = (
        "Thick: what serves a size, with the 10th to 90th percentile of its calls as a pale bar. "
        "The strip on top shows the regimes."
    )
    for number, curves in enumerate(report.curves):
        regimes = figures.of_curves(curves, report.regimes)
        yield Heading(words.group(curves.mode, curves.constants, curves.fixed))
        if not any(curve.points for curve in curves.curves):
            yield Text("Nothing was measured here.")
            continue
        svgs = [partial(figures.times, f"times{number}", curves, regimes, cast)]
        if figures.fastest(curves):
            svgs.append(partial(figures.losses, f"losses{number}", curves, regimes, cast))
        yield Plots(tuple(svgs), text, tuple(_legend(curves, regimes, cast)))
        text = ""  # the first one explains them all
        yield _numbers(curves, regimes, cast)


def _legend(curves: Curves, regimes: Sequence[FittedRegime], cast: Cast) -> Iterable[Key]:
    for name in dict.fromkeys(regime.candidate for regime in regimes):
        look = cast.look(name)
        if look is not None:
            yield Key(look, name)
    if not regimes and figures.fastest(curves):
        yield Key("fastest", "fastest candidate of each size")
    for curve in curves.curves:
        if curve.kind == "champion":
            yield Key("champion", f"champion: {curve.name}")
    for i, curve in enumerate(_of(curves, "peer")):
        yield Key("peer", curve.name, i % len(figures.PEER_MARKERS))
    for curve in _of(curves, "floor"):
        yield Key("floor", f"floor: {curve.name}")
    chosen = {regime.candidate for regime in regimes}
    others = sum(curve.name not in chosen for curve in _of(curves, "candidate"))
    if others:
        yield Key("rest", words.some(others, "other candidate"))


def _of(curves: Curves, kind: str) -> list[Curve]:
    return [curve for curve in curves.curves if curve.kind == kind]


def _numbers(curves: Curves, regimes: Sequence[FittedRegime], cast: Cast) -> Table:
    best = figures.fastest(curves)
    opponents = [curve for kind in ("champion", "peer", "floor") for curve in _of(curves, kind)]
    at = {(c.kind, c.name, p.size): p for c in curves.curves for p in c.points}
    sizes = sorted({size for _, _, size in at})
    rows: list[tuple[Cell, ...]] = []
    for size in sizes:
        name = figures.served(curves, regimes, size)
        if name is None and not regimes and size in best:
            name = min(
                c.name
                for c in _of(curves, "candidate")
                if (p := at.get((c.kind, c.name, size))) and p.us == best[size]
            )
        point = None if name is None else at.get(("candidate", name, size))
        rows.append(
            (
                words.count(size),
                words.NOTHING if name is None else Name(name, cast.look(name)),
                words.us(point.us if point else None),
                words.NOTHING
                if point is None or point.p10 is None or point.p90 is None
                else f"{words.us(point.p10)}{words.NOTHING}{words.us(point.p90)}",
                words.percent(point.us / best[size] - 1) if point else words.NOTHING,
                *(
                    words.us(other.us if (other := at.get((c.kind, c.name, size))) else None)
                    for c in opponents
                ),
            )
        )
    where = words.group(curves.mode, curves.constants, curves.fixed)
    return Table(
        f"Numbers: {where}",
        (
            Column(curves.axis, True),
            Column("served by" if regimes else "fastest"),
            Column("median, µs", True),
            Column("p10 to p90, µs", True),
            Column("loss", True),
            *(Column(f"{c.kind if c.kind != 'peer' else c.name}, µs", True) for c in opponents),
        ),
        tuple(rows),
        is_folded=True,
    )


# ---- search, gates, cost ------------------------------------------------------------------------


def _trial_states(report: CampaignReport) -> dict[str, int]:
    if report.cost.trials:
        return report.cost.trials
    total: Counter[str] = Counter()
    for study in report.studies:
        total.update(study.trials)
    return dict(total)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{words.count(n)} {name}" for name, n in counts.items() if n)


def _search(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.studies:
        yield Text("No study was run.")
        return
    yield Table(
        "Studies",
        (
            Column("regime"),
            Column("route"),
            Column("sampler"),
            Column("space", True),
            Column("trials"),
            Column("best"),
            Column("best, µs", True),
        ),
        tuple(
            (
                study.regime,
                study.route,
                study.sampler or words.NOTHING,
                words.NOTHING if study.space is None else words.count(study.space),
                _counts(study.trials) or words.NOTHING,
                Name(study.best, cast.look(study.best)) if study.best else words.NOTHING,
                words.us(study.best_us),
            )
            for study in report.studies
        ),
    )
    by_route: dict[str, list[Study]] = defaultdict(list)
    for study in report.studies:
        if study.importances:
            by_route[study.route].append(study)
    if not by_route:
        yield Text("No study had enough trials to say which knob matters.")
        return
    yield Heading("Importance of knobs")
    yield Text("Share of the variance of times that a knob explains, by study.")
    for route, studies in by_route.items():
        knobs = list(dict.fromkeys(knob for study in studies for knob in study.importances))
        yield Table(
            f"Importances of the knobs of {route}",
            (Column(route), *(Column(knob) for knob in knobs)),
            tuple(
                (study.regime, *(_importance(study.importances.get(knob)) for knob in knobs))
                for study in studies
            ),
        )


def _importance(value: float | None) -> Cell:
    if value is None:
        return words.NOTHING
    return Bar(words.percent(value, 0), min(max(value, 0.0), 1.0))


def _correctness(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.budgets:
        yield Text("No candidate was judged beyond the search.")
        return
    wrong = [budget for budget in report.budgets if budget.failures]
    open_ = [budget for budget in report.budgets if budget.verdict not in ("pass", "fail")]
    nearest = max(
        (budget for budget in report.budgets if budget.verdict == "pass" and not budget.proof),
        key=lambda budget: budget.upper_bound / budget.required,
        default=None,
    )
    yield Text(
        "Upper bounds of the rate of wrong results at "
        f"{words.percent(report.policy.confidence, 0)} confidence, each stratum by itself. "
        f"{words.some(len(report.budgets), 'bound')}: "
        f"{len(report.budgets) - len(wrong) - len(open_)} hold, {len(wrong)} with wrong results, "
        f"{len(open_)} open."
        + (
            f" Of those that hold, the nearest to its limit: {words.rate(nearest.upper_bound)} of "
            f"at most {words.rate(nearest.required)} ({nearest.stratum})."
            if nearest
            else ""
        )
    )
    order = {"fail": 0, "inconclusive": 1, "need_more": 2, "pass": 3}
    has_proof = any(budget.proof for budget in report.budgets)
    yield Table(
        "Budgets by candidate and stratum",
        (
            Column("candidate"),
            Column("stratum"),
            Column("risk"),
            Column("calls", True),
            Column("wrong", True),
            Column("rate at most", True),
            Column("required", True),
            Column("worst error / limit", True),
            Column("verdict"),
            *([Column("trivial because")] if has_proof else []),
        ),
        tuple(
            (
                Name(budget.candidate, cast.look(budget.candidate)),
                Code(budget.stratum),
                budget.risk,
                words.count(budget.trials),
                Tag(words.count(budget.failures), "bad") if budget.failures else "0",
                words.rate(budget.upper_bound),
                words.rate(budget.required),
                words.us(budget.worst),
                Tag(*_VERDICTS[budget.verdict]),
                *([budget.proof or words.NOTHING] if has_proof else []),
            )
            for budget in sorted(report.budgets, key=lambda budget: order[budget.verdict])
        ),
    )


def _failures(report: CampaignReport, cast: Cast) -> Iterable[Block]:
    if not report.problems:
        yield Text("Nothing failed.")
        return
    causes: Counter[str] = Counter()
    for problem in report.problems:
        causes[problem.cause.value] += problem.count
    yield Text(f"{_counts(dict(causes.most_common()))}.")
    yield Table(
        "Failures",
        (
            Column("cause"),
            Column("candidate"),
            Column("stage"),
            Column("workload"),
            Column("seed", True),
            Column("times", True),
            Column("message"),
        ),
        tuple(
            (
                Tag(each.cause.value, "quiet" if each.cause.is_infrastructure else "bad"),
                Name(each.candidate, cast.look(each.candidate))
                if each.candidate
                else words.NOTHING,
                each.stage or words.NOTHING,
                _code(each.workload),
                words.NOTHING if each.seed is None else str(each.seed),
                words.count(each.count),
                Code(words.shorten(each.message)) if each.message.strip() else words.NOTHING,
            )
            for each in report.problems
        ),
    )


def _cost(report: CampaignReport) -> Iterable[Block]:
    cost, total = report.cost, report.cost.device_s
    states = _trial_states(report)
    items: list[tuple[str, Cell]] = []
    if cost.stages:
        limit = "" if cost.budget_s is None else f" of at most {words.seconds(cost.budget_s)}"
        items.append(("Device time", words.seconds(total) + limit))
    if states:
        items.append(("Trials", f"{words.count(sum(states.values()))}: {_counts(states)}"))
    if cost.blocks:
        discarded = _counts(cost.discarded) or "none"
        items.append(("Timed blocks", f"{words.count(cost.blocks)}, discarded: {discarded}"))
    if not items:
        yield Text("Nothing was spent.")
        return
    yield Facts(tuple(items))
    if not cost.stages:
        return
    has_wall = any(stage.wall_s is not None for stage in cost.stages)
    yield Table(
        "Time by stage",
        (
            Column("stage"),
            Column("device time", True),
            *([Column("wall time", True)] if has_wall else []),
            Column("share of device time"),
        ),
        tuple(
            (
                stage.stage,
                words.seconds(stage.device_s),
                *([words.seconds(stage.wall_s)] if has_wall else []),
                Bar(
                    words.percent(stage.device_s / total if total else None, 0),
                    stage.device_s / total if total else 0.0,
                ),
            )
            for stage in cost.stages
        ),
    )


def _environment(report: CampaignReport) -> Iterable[Block]:
    env, policy = report.environment, report.policy
    versions = ", ".join(f"{name} {version}" for name, version in sorted(env.versions.items()))
    yield Facts(
        (
            ("Device", f"{env.device} ({env.arch})"),
            ("UUID", _code(env.uuid)),
            ("Driver", env.driver or words.NOTHING),
            ("Timer", "CUPTI, kernel times" if env.timer == "cupti" else "wall clock"),
            ("Commit", _code(env.code)),
            ("Versions", versions or words.NOTHING),
            *((name, str(value)) for name, value in report.protocol.items()),
            ("Table", _code(report.table)),
            ("Champion", _code(report.champion)),
            ("Started", words.moment(report.started)),
            ("Finished", words.moment(report.finished)),
        )
    )
    yield Heading(f"Policy {policy.name}")
    yield Facts(
        (
            ("Digest", Code(digest(policy.canonical()))),
            ("May be shipped", "yes" if policy.is_promotable else "no, never"),
            (
                "Correctness",
                f"{words.percent(policy.confidence, 0)} confidence; rate of wrong results at most "
                + ", ".join(f"{words.rate(p)} ({risk})" for risk, p in policy.p_max.items()),
            ),
            (
                "Comparison",
                f"level {words.percent(policy.alpha, 0)}, looks after "
                f"{', '.join(map(str, policy.looks))} pairs, {policy.iterations} calls a block, "
                f"gain over {words.percent(policy.min_gain)} and "
                f"{policy.min_gain_us * 1000:.0f}{words.NARROW}ns",
            ),
            ("Fit", f"a regime may lose {words.percent(policy.slowdown)} against the fastest"),
            (
                "Search",
                f"at most {words.count(policy.max_trials)} trials a study, every config where "
                f"there are up to {policy.exhaustive_below}, {policy.finalists} finalists a regime",
            ),
            (
                "Guard",
                f"clock at least {words.percent(policy.min_clock, 0)} of its target, at most "
                f"{words.percent(policy.max_discarded, 0)} of blocks discarded",
            ),
        )
    )
