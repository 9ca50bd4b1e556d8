"""The full sweep before a promotion: every workload of the contest, serving and gap lists, judged
on what the candidate table would serve. No stage of a campaign: `promote` asks for it."""

from __future__ import annotations

from typing import Any

from fastkernels.core import table as tables
from fastkernels.core.table import Table
from fastkernels_tuner import plan
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.model import Candidate, Trials, Workload
from fastkernels_tuner.space import candidate as make_candidate

CHUNK = 16  # workloads in a job: a lost one costs seconds


def table_of(campaign: Campaign) -> Table:
    text = campaign.store.get(campaign.require("emit")["table_blob"]).decode()
    return tables.parse(text, campaign.operator.spec, f"{campaign.id}: candidate table")


def served(campaign: Campaign, table: Table, workload: Workload) -> Candidate:
    """What the candidate table gives a workload, as dispatch would decide."""
    operator = campaign.operator
    key = plan.key_of(operator, workload, campaign.info)
    hit = table.lookup(dict(key.axes), key.mode)
    route = operator.route(hit.entry.route) if hit is not None else None
    if hit is not None and route is not None:
        config = route.make_config(hit.entry.config)
        if route.declines(key, config) is None:
            return make_candidate(operator.name, route.name, hit.entry.config or {})
    safe = operator.safe_route
    return make_candidate(operator.name, safe.name, {})


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    table = table_of(campaign)
    digest = campaign.require("emit")["table_sha256"]
    rows = [
        [workload.model_dump(mode="json"), served(campaign, table, workload).model_dump()]
        for workload in plan.to_promote(campaign.operator, campaign.info, table)
    ]
    return [{"table": digest, "rows": rows[i : i + CHUNK]} for i in range(0, len(rows), CHUNK)]


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    found = []
    for workload_data, candidate_data in payload["rows"]:
        workload, candidate = Workload(**workload_data), Candidate(**candidate_data)
        trials = bench.judge(candidate, workload, [workload.build().seed])
        found.append({"workload": workload.id, **trials.model_dump(mode="json")})
        if trials.failures:
            campaign.say(f"{workload} {candidate}: {trials.failures[0].message}")
    return {"rows": found}


def finish(campaign: Campaign) -> dict[str, Any]:
    """How many rows there are, were judged, and are wrong."""
    digest = campaign.require("emit")["table_sha256"]
    done = [d for d in campaign.done("promote") if d.payload["table"] == digest]
    rows = [Trials(**{k: v for k, v in row.items() if k != "workload"})
            for d in done for row in d.result["rows"]]  # fmt: skip
    table = table_of(campaign)
    expected = sum(1 for _ in plan.to_promote(campaign.operator, campaign.info, table))
    wrong = [failure for row in rows for failure in row.failures]
    return {
        "expected": expected,
        "judged": sum(1 for row in rows if row.trials and not row.failures),
        "wrong": [f.model_dump(mode="json") for f in wrong if not f.cause.is_infrastructure],
    }
