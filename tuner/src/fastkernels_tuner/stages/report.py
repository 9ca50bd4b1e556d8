"""Report: one static page and its Markdown twin, from what the ledger holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Literal

from fastkernels.core import table as tables
from fastkernels.core.table import Table
from fastkernels.testing.cupti import Spread
from fastkernels_tuner import evidence, plan
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.model import Cause, Evaluation, Failure, Workload
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
)
from fastkernels_tuner.report.data import Outcome
from fastkernels_tuner.search import TrialResult
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.space import ordered
from fastkernels_tuner.stages import confirm, search, verify
from fastkernels_tuner.stats import aggregate

Kind = Literal["candidate", "champion", "peer", "floor"]


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    return []


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    raise AssertionError("nothing to measure")


def finish(campaign: Campaign) -> dict[str, Any]:
    return write(campaign)


def write(campaign: Campaign) -> dict[str, Any]:
    """As far as the campaign has come; the paths of both files."""
    report = build(campaign)
    campaign.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, text in (
        ("report.html", render_html(report)),
        ("report.md", render_markdown(report)),
    ):
        path = campaign.folder / name
        path.write_text(text, encoding="utf-8")
        found[name.rpartition(".")[2]] = str(path)
    return found


def build(campaign: Campaign) -> CampaignReport:
    emitted = campaign.conclusion("emit")
    table = _table(campaign, emitted)
    events = campaign.store.events(campaign.id)
    champion = campaign.spec.champion.get("path", "")
    return CampaignReport(
        campaign=campaign.id,
        op=campaign.spec.op,
        environment=campaign.spec.environment,
        policy=campaign.policy,
        outcome=_outcome(campaign),
        started=events[0].created,
        finished=events[-1].created if emitted else None,
        table=emitted["table"] if emitted else "",
        champion=str(champion),
        ids=_ids(campaign),
        aggregates=_aggregates(campaign, table),
        comparisons=_comparisons(campaign),
        regimes=_regimes(campaign, table),
        curves=_curves(campaign),
        studies=_studies(campaign),
        budgets=_budgets(campaign),
        problems=_problems(campaign),
        cost=_cost(campaign),
        warnings=_warnings(campaign),
        notes=tuple(emitted["notes"]) if emitted else (),
    )


def _table(campaign: Campaign, emitted: dict[str, Any] | None) -> Table | None:
    if emitted is None:
        return None
    text = campaign.store.get(emitted["table_blob"]).decode()
    return tables.parse(text, campaign.operator.spec, emitted["table"])


def _outcome(campaign: Campaign) -> Outcome:
    if any(e.kind == "promotion.ended" for e in campaign.store.events(campaign.id)):
        return "promoted"
    if campaign.conclusion("emit") is None:
        return "unfinished"
    if campaign.require("verify")["unproven"]:
        return "inconclusive"
    comparisons = campaign.require("confirm")["comparisons"]
    if not campaign.spec.champion or any(c["decision"] == "promote" for c in comparisons):
        return "candidate"
    return "kept"


def _ids(campaign: Campaign) -> dict[str, str]:
    return {
        str(ordered(candidate)): candidate.id for _, candidate, _ in evidence.evaluations(campaign)
    }


def _warnings(campaign: Campaign) -> tuple[str, ...]:
    """Beyond what the page sees by itself."""
    verified = campaign.conclusion("verify")
    if verified and verified["unproven"]:
        return ("Some candidates of the table did not pass every gate: it is not promoted.",)
    return ()


# ---- times --------------------------------------------------------------------------------------


def _us(evaluation: Evaluation) -> Spread | None:
    times = [us for block in evaluation.blocks if not block.discarded for us in block.us]
    return Spread.of(times) if times and evaluation.failure is None else None


def _curves(campaign: Campaign) -> tuple[Curves, ...]:
    """Over the first variable axis, one figure for each mode, constants and other sizes."""
    axis, *others = campaign.operator.spec.variable_axes
    figures: dict[Any, dict[tuple[Kind, str], dict[int, Point]]] = defaultdict(
        lambda: defaultdict(dict)
    )

    def add(workload: Workload, kind: Kind, name: str, spread: Spread | None) -> None:
        if spread is None:
            return
        key = plan.key_of(campaign.operator, workload, campaign.info)
        mode, constants = plan.group_of(campaign.operator, key)
        fixed = tuple((other, key.axis(other)) for other in others)
        size = key.axis(axis)
        point = Point(size=size, us=spread.median, p10=spread.p10, p90=spread.p90)
        figures[mode, constants, fixed][kind, name][size] = point

    for workload, candidate, evaluation in evidence.evaluations(campaign):
        spread = _us(evaluation)
        add(workload, "candidate", str(ordered(candidate)), spread)
        if campaign.spec.champion and candidate == campaign.served(workload):
            add(workload, "champion", "serves today", spread)
    for stage in evidence.STAGES:
        for done in campaign.done(stage):
            for peer, data in done.result.get("peers", {}).items():
                add(Workload(**done.payload["workload"]), "peer", peer, _us(Evaluation(**data)))
    return tuple(
        Curves(
            axis=axis,
            mode=mode,
            constants=dict(constants),
            fixed=dict(fixed),
            curves=tuple(
                Curve(name=name, kind=kind, points=tuple(points[s] for s in sorted(points)))
                for (kind, name), points in sorted(curves.items())
            ),
        )
        for (mode, constants, fixed), curves in sorted(figures.items(), key=lambda i: str(i[0]))
    )


def _aggregates(campaign: Campaign, table: Table | None) -> tuple[Aggregate, ...]:
    """The candidate table against the champion's and each peer, by list and mode."""
    if table is None:
        return ()
    ours: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    theirs: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for done in campaign.done("compare"):
        workload = Workload(**done.payload["workload"])
        key = plan.key_of(campaign.operator, workload, campaign.info)
        hit = table.lookup(dict(key.axes), key.mode)
        if hit is None:
            continue
        chosen = make_candidate(campaign.spec.op, hit.entry.route, hit.entry.config or {})
        old = campaign.served(workload)
        place = workload.listed, key.mode
        for entry in done.result["evaluations"]:
            spread = _us(Evaluation(**entry["evaluation"]))
            name = entry["candidate"]
            if spread is None:
                continue
            if make_candidate(campaign.spec.op, name["route"], name["config"]) == chosen:
                ours[place][workload.id] = spread.median
            if make_candidate(campaign.spec.op, name["route"], name["config"]) == old:
                theirs[workload.listed, key.mode, "champion"][workload.id] = spread.median
        for peer, data in done.result.get("peers", {}).items():
            spread = _us(Evaluation(**data))
            if spread is not None:
                theirs[workload.listed, key.mode, peer][workload.id] = spread.median
    found = []
    for (listed, mode, against), times in sorted(theirs.items()):
        both = sorted(set(times) & set(ours[listed, mode]))
        if both:
            a = aggregate({n: ours[listed, mode][n] for n in both}, {n: times[n] for n in both})
            found.append(
                Aggregate(
                    listed=listed, mode=mode, against=against, rows=len(both),
                    ratio_of_means=a.ratio_of_means, mean_of_ratios=a.mean_of_ratios,
                    geomean=a.geomean, gated=a.gated,
                    leave_one_out=a.leave_one_out.get("geomean"),
                    worst=a.worst_ratio, worst_workload=str(campaign.workloads[a.worst]),
                )
            )  # fmt: skip
    return tuple(found)


# ---- decisions ----------------------------------------------------------------------------------


def _comparisons(campaign: Campaign) -> tuple[Comparison, ...]:
    found = []
    for done in campaign.done("confirm"):
        verdict = confirm.verdict_of(done)
        estimate = verdict.estimate
        if estimate is None:
            continue
        constants = "".join(f", {name} = {value}" for name, value in done.payload["constants"])
        found.append(
            Comparison(
                about=f"{done.payload['mode']}{constants}",
                challenger="fitted table",
                baseline="champion",
                effect=estimate.gain,
                ci=(estimate.low, estimate.high),
                workloads=len(verdict.workloads),
                pairs=verdict.pairs,
                discarded=verdict.discarded,
                decision=verdict.decision,
                is_confirmation=done.payload["session"] > 1,
                uuid=done.gpu,
            )
        )
    return tuple(found)


def _regimes(campaign: Campaign, table: Table | None) -> tuple[FittedRegime, ...]:
    if table is None:
        return ()
    found = []
    for regime in table.regimes:
        shown = regime.evidence
        found.append(
            FittedRegime(
                mode=regime.mode,
                constants={name: low for name, (low, _) in regime.constants.items()},
                bounds=regime.axes,
                candidate=str(make_candidate(campaign.spec.op, regime.route, regime.config)),
                slowdown=shown["slowdown"],
                runner_up="" if shown["runner_up"] == "none" else shown["runner_up"],
                margin=shown["margin"],
                at=shown["at"],
                spread_us=shown["spread_us"],
                worst_us=shown["worst_us"],
                trials=shown["trials"],
                failures=shown["failures"],
            )
        )
    return tuple(found)


def _studies(campaign: Campaign) -> tuple[Study, ...]:
    found = []
    for done in campaign.done("search"):
        results = [TrialResult(**result) for result in done.result["results"]]
        fastest = search.best(done)[:1]
        found.append(
            Study(
                regime=str(campaign.regimes[done.payload["regime"]]),
                route=done.payload["route"],
                sampler=done.result.get("sampler", ""),
                space=done.result.get("space"),
                trials=dict(sorted(Counter(result.state for result in results).items())),
                best=str(ordered(fastest[0].candidate)) if fastest else "",
                best_us=fastest[0].us if fastest else None,
                importances=done.result["importances"],
            )
        )
    return tuple(found)


def _budgets(campaign: Campaign) -> tuple[Budget, ...]:
    names = {identity: label for label, identity in _ids(campaign).items()}
    found = []
    for candidate, each in verify.verdicts(campaign).items():
        for budget in each[-1].budgets:
            found.append(
                Budget(
                    candidate=names.get(candidate, candidate),
                    stratum=budget.name,
                    risk=budget.risk,
                    trials=budget.trials,
                    failures=budget.failures,
                    upper_bound=budget.upper_bound,
                    required=budget.required,
                    verdict=budget.verdict,
                    worst=budget.worst,
                    proof=budget.proof,
                )
            )
    return tuple(found)


def _problems(campaign: Campaign) -> tuple[Problem, ...]:
    counts: Counter[tuple[str, str, str, str]] = Counter()

    def add(stage: str, candidate: str, failure: Failure | None) -> None:
        if failure is not None:
            counts[failure.cause.value, candidate, stage, failure.message] += 1

    for done in campaign.done("search"):
        for data in done.result["results"]:
            result = TrialResult(**data)
            add("search", str(ordered(result.candidate)), result.failure)
    for _, candidate, evaluation in evidence.evaluations(campaign):
        add("compare", str(ordered(candidate)), evaluation.failure)
    names = {identity: label for label, identity in _ids(campaign).items()}
    for identity, each in verify.verdicts(campaign).items():
        for trials in each[-1].trials:
            for failure in trials.failures:
                add("verify", names.get(identity, identity), failure)
    for row in campaign.store.jobs(campaign.id, "failed"):
        add(row.kind, "", row.failure)
    return tuple(
        Problem(cause=Cause(cause), candidate=candidate, stage=stage, message=message, count=count)
        for (cause, candidate, stage, message), count in counts.most_common()
    )


def _cost(campaign: Campaign) -> Cost:
    spent = campaign.device_s()
    walls = {
        name: None if (conclusion := campaign.conclusion(name)) is None else conclusion["seconds"]
        for name in ("search", "compare", "fit", "verify", "confirm")
    }
    blocks = [b for _, _, evaluation in evidence.evaluations(campaign) for b in evaluation.blocks]
    concluded = campaign.conclusion("search")
    return Cost(
        stages=tuple(
            StageCost(stage=name, device_s=spent.get(name, 0.0), wall_s=wall)
            for name, wall in walls.items()
            if name in spent or wall is not None
        ),
        trials=concluded["trials"] if concluded else {},
        blocks=len(blocks),
        discarded=dict(Counter(block.discarded for block in blocks if block.discarded)),
    )
