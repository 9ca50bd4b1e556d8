"""What a campaign measured, as a sweep file: the one source that tables are made from.

The rows of the stages `compare` and `fit`; the format is that of `bench/run.py --sweep`, so that a
table is emitted from either by the same code, and can be emitted again from the file alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastkernels.testing.cupti import Spread
from fastkernels_tuner import plan
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.model import Candidate, Evaluation, Workload

STAGES = ("compare", "fit")
WRONG = 1e9  # of the limit: JSON has no infinity


def evaluations(campaign: Campaign) -> Iterable[tuple[Workload, Candidate, Evaluation]]:
    for stage in STAGES:
        for done in campaign.done(stage):
            workload = Workload(**done.payload["workload"])
            for entry in done.result["evaluations"]:
                yield workload, Candidate(**entry["candidate"]), Evaluation(**entry["evaluation"])


def times(campaign: Campaign) -> dict[tuple[str, str], float]:
    """Medians in microseconds by the ids of workload and candidate, of what was measured."""
    found = {}
    for workload, candidate, evaluation in evaluations(campaign):
        us = [us for block in evaluation.blocks if not block.discarded for us in block.us]
        if evaluation.failure is None and us:
            found[workload.id, candidate.id] = statistics.median(us)
    return found


def build(
    campaign: Campaign, kept: Iterable[plan.Group] = (), **more: dict[str, Any]
) -> dict[str, Any]:
    """The sweep. `kept`: modes and constants in which the champion stays, whose regimes are part of
    it as they are. `more`: what else the file says."""
    out = rejected(campaign)
    environment = campaign.spec.environment
    commit, _, dirt = environment.code.partition("+")
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for workload, candidate, evaluation in evaluations(campaign):
        case = workload.build()
        head: dict[str, Any] = {
            "list": workload.listed, "id": case.name, "axes": case.axes, "mode": case.mode,
            "route": candidate.route, "config": candidate.config,
        }  # fmt: skip
        if campaign.spec.champion and candidate == campaign.served(workload):
            head["serves_today"] = True
        found = _outcome(evaluation, is_out=candidate.id in out)
        (left_out if "why" in found else rows).append(head | found)
    return {
        "schema": 1,
        "kind": "sweep",
        "op": campaign.spec.op,
        "spec_digest": campaign.operator.spec.digest,
        "device": {
            "product": campaign.info.product,
            "arch": campaign.info.arch,
            "num_sms": campaign.info.num_sms,
            "uuid": environment.uuid,
            "driver": environment.driver,
        },
        "code": {"commit": commit, "dirty": bool(dirt)},
        "versions": environment.versions,
        "protocol": {
            "timer": environment.timer,
            "l2": "cold" if campaign.info.is_gpu else "as it is",
            "order": "interleaved",
            "statistic": "median",
            "iterations": campaign.policy.iterations,
            "slowdown": campaign.policy.slowdown,
        },
        "campaign": campaign.id,
        "policy": {"name": campaign.policy.name, "digest": campaign.policy.id},
        "created": created(campaign),
        **more,
        "kept": [_reigning(campaign, group) for group in kept],
        "rows": rows,
        "left_out": left_out,
    }


def _reigning(campaign: Campaign, group: plan.Group) -> dict[str, Any]:
    mode, constants = group
    found = [
        {"axes": r.axes, "route": r.route, "config": r.config, "evidence": r.evidence}
        for r in campaign.reigning(group)
    ]
    return {"mode": mode, "constants": dict(constants), "regimes": found}


def _outcome(evaluation: Evaluation, *, is_out: bool) -> dict[str, Any]:
    """Of a row: times, or that it is wrong, or why it was not measured."""
    trials = sum(each.trials for each in evaluation.trials)
    failures = sum(len(each.failures) for each in evaluation.trials)
    failure = evaluation.failure
    if is_out:
        return {"trials": trials, "failures": max(failures, 1), "error": _error(WRONG)}
    times = [us for block in evaluation.blocks if not block.discarded for us in block.us]
    if failure is not None or not times:
        return {"why": failure.message if failure else "every block was discarded"}
    return {
        "us": Spread.of(times).to_dict(),
        "calls": len(times),
        "kernels": max(block.kernels for block in evaluation.blocks),
        "trials": trials,
        "failures": 0,
        "error": _error(max((each.worst for each in evaluation.trials), default=0.0)),
    }


def _error(value: float) -> dict[str, Any]:
    return {"metric": "share of the limit", "value": value, "limit": 1.0}


def rejected(campaign: Campaign) -> set[str]:
    """Ids of the candidates that were wrong when they were compared, verified or confirmed."""
    verdicts = (each for done in campaign.done("verify") for each in done.result["verdicts"])
    found = {each["candidate"] for each in verdicts if each["outcome"]["kind"] == "fail"}
    found |= {done.result["wrong"] for done in campaign.done("confirm") if "wrong" in done.result}
    return found | {c.id for _, c, evaluation in evaluations(campaign) if _is_wrong(evaluation)}


def _is_wrong(evaluation: Evaluation) -> bool:
    failure = evaluation.failure
    is_blamed = failure is not None and not failure.cause.is_infrastructure
    return is_blamed or any(each.failures for each in evaluation.trials)


def created(campaign: Campaign) -> str:
    """When the campaign was: the time of its first event, so that building again is the same."""
    moment: datetime = campaign.store.events(campaign.id)[0].created
    return moment.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def write(data: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path
