"""Search: one Optuna study for each route and regime, knobs by their measured time.

A study starts from what is known: the default, what the shipped table has for the route, and what
won in regimes of the same mode that are searched already.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from fastkernels.core import dispatch
from fastkernels_tuner import plan
from fastkernels_tuner.campaign import Campaign, Done, Measures
from fastkernels_tuner.model import Candidate, Evaluation, Regime, Workload
from fastkernels_tuner.search import Search, TrialResult
from fastkernels_tuner.space import space_of

INHERITED = 2  # candidates that a regime of other constants takes from each that is searched


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    return [
        {"route": route, "regime": regime.id}
        for regime in campaign.spec.regimes
        for route in campaign.spec.routes
        if _is_searched(campaign, regime) and _serves(campaign, route, regime)
    ]


def _is_searched(campaign: Campaign, regime: Regime) -> bool:
    return campaign.policy.search_constants or not regime.constants


def _serves(campaign: Campaign, name: str, regime: Regime) -> bool:
    route = campaign.operator.route(name)
    assert route is not None
    return all(
        route.declines(plan.key_of(campaign.operator, w, campaign.info), route.default_config)
        is None
        for w in campaign.inside(regime)
    )


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    regime = campaign.regimes[payload["regime"]]
    route = campaign.operator.route(payload["route"])
    assert route is not None
    space = space_of(route, campaign.spec.op)
    study = Search(
        campaign.store.url,
        campaign.id,
        space,
        regime,
        campaign.spec.device,
        campaign.policy,
        seed=campaign.spec.seed,
        environment=campaign.spec.environment.id,
        known=_known(campaign, payload["route"], regime),
    )

    def measure(candidate: Candidate, workload: Workload, iterations: int) -> Evaluation:
        return bench.evaluate(
            candidate, workload, iterations=iterations, trials=campaign.policy.search_trials
        )

    results = study.run(
        measure,
        campaign.inside(regime),
        stop=lambda: False,
        progress=lambda result: campaign.say(_line(regime, result)),
    )
    return {
        "results": [result.model_dump(mode="json") for result in results],
        "importances": study.importances(),
        "sampler": study.sampler,
        "space": study.num_legal,
    }


def _line(regime: Regime, result: TrialResult) -> str:
    if result.us is not None:
        return f"{regime} {result.candidate}: {result.us:.3f} us, {result.state}"
    why = result.failure.message if result.failure else ""
    return f"{regime} {result.candidate}: {result.state} {why}"


def _known(campaign: Campaign, route: str, regime: Regime) -> list[dict[str, Any]]:
    known: list[dict[str, Any]] = []
    table, _ = dispatch.find_table(campaign.operator, campaign.info)
    if table is not None:
        known += [r.config for r in table.regimes if r.route == route and r.mode == regime.mode]
    definition = campaign.operator.route(route)
    assert definition is not None
    known.append(dataclasses.asdict(definition.default_config))
    for done in campaign.done("search"):
        other = campaign.regimes[done.payload["regime"]]
        if done.payload["route"] == route and other.mode == regime.mode:
            known += [result.candidate.config for result in best(done)[:1]]
    return known


def best(done: Done) -> list[TrialResult]:
    """The complete trials of a study, fastest first."""
    results = [TrialResult(**result) for result in done.result["results"]]
    complete = [r for r in results if r.state == "complete" and r.us is not None]
    return sorted(complete, key=lambda r: (r.us or 0.0, str(r.candidate)))


def _fastest(results: list[TrialResult]) -> list[Candidate]:
    return [r.candidate for r in sorted(results, key=lambda r: (r.us or 0.0, str(r.candidate)))]


def finish(campaign: Campaign) -> dict[str, Any]:
    """Per regime the finalists: the fastest configs over all routes, and what serves it today."""
    found: dict[str, list[TrialResult]] = {regime: [] for regime in campaign.regimes}
    states: Counter[str] = Counter()
    for done in campaign.done("search"):
        states.update(result["state"] for result in done.result["results"])
        found[done.payload["regime"]] += best(done)
    finalists = {}
    for name, regime in campaign.regimes.items():
        if _is_searched(campaign, regime):
            chosen = _fastest(found[name])[: campaign.policy.finalists]
        else:  # the best of every searched regime of the mode
            alike = [n for n, r in campaign.regimes.items() if r.mode == regime.mode]
            chosen = [candidate for n in alike for candidate in _fastest(found[n])[:INHERITED]]
        chosen += [campaign.served(workload) for workload in campaign.inside(regime)]
        finalists[name] = [c.model_dump() for c in {c.id: c for c in chosen}.values()]
    return {"finalists": finalists, "trials": dict(sorted(states.items()))}
