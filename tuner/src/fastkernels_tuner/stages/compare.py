"""Compare: on every workload the finalists of its mode, what serves it today and the peers, in one
interleaved measurement."""

from __future__ import annotations

from typing import Any

from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.model import Candidate, Workload


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    """Finalists of all regimes of a mode on all of its workloads: a boundary between two regimes is
    defended only where both sides' candidates were measured on both sides."""
    finalists = campaign.require("search")["finalists"]
    found = []
    for regime in campaign.spec.regimes:
        group = (regime.mode, regime.constants)
        candidates = {
            candidate.id: candidate
            for other in campaign.spec.regimes
            if (other.mode, other.constants) == group
            for candidate in (Candidate(**each) for each in finalists[other.id])
        }
        found += [job(workload, list(candidates.values())) for workload in campaign.inside(regime)]
    return found


def job(workload: Workload, candidates: list[Candidate]) -> dict[str, Any]:
    return {
        "workload": workload.model_dump(mode="json"),
        "candidates": [candidate.model_dump() for candidate in candidates],
    }


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    workload = Workload(**payload["workload"])
    candidates = [Candidate(**each) for each in payload["candidates"]]
    found = bench.interleave(
        candidates, workload, iterations=campaign.policy.iterations, peers=campaign.peers
    )
    ours = {evaluation.candidate: evaluation for evaluation in found}
    for candidate in candidates:
        campaign.say(f"{workload} {candidate}: {ours[candidate.id].describe()}")
    return {
        "evaluations": [
            {"candidate": c.model_dump(), "evaluation": ours.pop(c.id).model_dump(mode="json")}
            for c in candidates
        ],
        "peers": {name: e.model_dump(mode="json") for name, e in ours.items()},
    }


def finish(campaign: Campaign) -> dict[str, Any]:
    return {"workloads": len(campaign.done("compare"))}
