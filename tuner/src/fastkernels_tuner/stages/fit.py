"""Fit: the fewest regimes within the policy's slowdown, their boundaries measured more closely.

Between two measured sizes a boundary is a guess. What lies around it (t - 1, t, t + 1, and a sample
in between) is measured under the candidates of all regimes of that mode and under what serves it
today, and the fit is made again, `policy.probe_rounds` times or until no boundary has anything
unmeasured beside it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fastkernels import catalog
from fastkernels.core import table as tables
from fastkernels.core.table import Table
from fastkernels_tuner import emit, evidence, plan, sweep
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.model import Candidate, Workload
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import compare

FINAL = Path("final.sweep.json")


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    done = campaign.done("fit")
    rounds = max((each.payload["round"] for each in done), default=0)
    if rounds >= campaign.policy.probe_rounds:
        return []
    table = fitted(campaign, Path(f"fit-{rounds}.sweep.json"))
    return [
        {**compare.job(workload, candidates), "round": rounds + 1}
        for workload, candidates in _probes(campaign, table)
    ]


def fitted(campaign: Campaign, name: Path) -> Table:
    """The table that what is measured and verified so far gives."""
    path = evidence.write(evidence.build(campaign), campaign.folder / "fit" / name)
    return tables.parse(emit.render(sweep.draft(path)), campaign.operator.spec, str(name))


def _probes(campaign: Campaign, table: Table) -> list[tuple[Workload, list[Candidate]]]:
    operator = campaign.operator
    measured = {
        (plan.key_of(operator, workload, campaign.info).axes, workload.build().mode)
        for workload, _, _ in evidence.evaluations(campaign)
    }
    found = []
    for mode in operator.spec.modes:
        own = [r for r in table.regimes if r.mode == mode and not r.constants]
        candidates = {
            c.id: c for c in (make_candidate(operator.name, r.route, r.config) for r in own)
        }
        if len(candidates) < 2:  # one candidate: its boundaries are the limits
            continue
        for case in catalog.module(operator.name, "inputs").gap_cases(
            dataclasses.replace(table, regimes=tuple(own))
        ):
            workload = Workload.of(operator.name, "gap", dataclasses.replace(case, mode=mode))
            axes = plan.key_of(operator, workload, campaign.info).axes
            inside = all(
                low <= case.axes[name] <= high for name, (low, high) in table.limits.items()
            )
            if inside and all(size > 0 for _, size in axes) and (axes, mode) not in measured:
                measured.add((axes, mode))
                under = dict(candidates)
                if campaign.spec.champion:
                    reigning = campaign.served(workload)
                    under[reigning.id] = reigning
                found.append((workload, list(under.values())))
    return found[: campaign.policy.max_probes]


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    return compare.run(campaign, payload, bench)


def finish(campaign: Campaign) -> dict[str, Any]:
    table = fitted(campaign, FINAL)
    return {
        "regimes": len(table.regimes),
        "probed": len(campaign.done("fit")),
    }
