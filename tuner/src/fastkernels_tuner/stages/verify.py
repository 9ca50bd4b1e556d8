"""Verify: what the fitted table would serve, judged until its failure rate is known to be low.

Each candidate of the table meets the draws that any candidate ever failed, the adversarial
generators of the operator, and fresh draws of every workload that it would serve. One that is wrong
is out, everywhere and for good: the fit is made again without it, and what takes its place is
verified in turn.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from fastkernels_tuner import evidence, plan
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.gates import (
    FACTS,
    Decided,
    Evidence,
    Repeat,
    decide,
    floor_us,
    promises_bits,
    sources,
)
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import Candidate, Trials, Workload
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import fit
from fastkernels_tuner.trials import Corpus, Fail, Verdict, run_trials, strata

TRIALS = "trials"


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    served: dict[str, tuple[Candidate, list[Workload]]] = {}
    table = fit.fitted(campaign, fit.FINAL)
    operator = campaign.operator
    for workload in campaign.spec.workloads:
        key = plan.key_of(operator, workload, campaign.info)
        hit = table.lookup(dict(key.axes), key.mode)
        assert hit is not None
        candidate = make_candidate(operator.name, hit.entry.route, hit.entry.config or {})
        served.setdefault(candidate.id, (candidate, []))[1].append(workload)
    return [
        {
            "candidate": candidate.model_dump(),
            "workloads": [workload.model_dump(mode="json") for workload in workloads],
        }
        for candidate, workloads in served.values()
    ]


def corpus_of(campaign: Campaign) -> Corpus:
    """What failed once, beside the database or of all campaigns in this folder."""
    return Corpus(campaign.folder.parent / "regressions.jsonl")


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    candidate = Candidate(**payload["candidate"])
    corpus = corpus_of(campaign)
    found = strata(
        candidate,
        [Workload(**each) for each in payload["workloads"]],
        campaign.info,
        corpus,
    )
    until = time.monotonic() + campaign.policy.verify_s
    verdict = run_trials(
        bench.judge,
        candidate,
        found,
        campaign.policy,
        corpus=corpus,
        device=campaign.info,
        seed=campaign.spec.seed,
        stop=lambda: time.monotonic() > until,
        earlier=_earlier(campaign, candidate),
        record=lambda trials: _record(campaign, candidate, trials),
    )
    campaign.say(f"{candidate}: {verdict.outcome}")
    repeats = []
    if verdict.outcome.kind == "pass":
        for workload in _smoke(campaign, payload):
            if promises_bits(workload):
                seed = workload.case.get("seed", 0)
                try:
                    digests = bench.repeat(candidate, workload, seed)
                except Rejected as error:  # right so far, and wrong now: final all the same
                    verdict = verdict.model_copy(update={"outcome": Fail.of(error.failure)})
                    break
                repeats.append(Repeat(workload=workload.id, seed=seed, digests=digests))
    return {
        "verdict": verdict.model_dump(mode="json"),
        "repeats": [repeat.model_dump(mode="json") for repeat in repeats],
    }


def _smoke(campaign: Campaign, payload: dict[str, Any]) -> list[Workload]:
    """Of what a candidate would serve the first of each regime."""
    found: dict[str, Workload] = {}
    for each in payload["workloads"]:
        workload = Workload(**each)
        regime = next(
            r for r in campaign.spec.regimes if plan.inside(campaign.operator, r, workload)
        )
        found.setdefault(regime.id, workload)
    return list(found.values())


def _record(campaign: Campaign, candidate: Candidate, trials: Trials) -> None:
    """Into the ledger at once: a verdict that was reached is never reached again."""
    campaign.store.append(
        campaign.id,
        TRIALS,
        {"candidate": candidate.id, "trials": trials.model_dump(mode="json")},
    )


def _earlier(campaign: Campaign, candidate: Candidate) -> list[Trials]:
    return [
        Trials(**event.payload["trials"])
        for event in campaign.store.events(campaign.id, TRIALS)
        if event.payload["candidate"] == candidate.id
    ]


def verdicts(campaign: Campaign) -> dict[str, list[Verdict]]:
    """By candidate id; several where the fit gave a candidate other workloads later."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    for done in campaign.done("verify"):
        verdict = Verdict(**done.result["verdict"])
        found[verdict.candidate].append(verdict)
    return found


def decided(campaign: Campaign, payload: dict[str, Any]) -> Decided:
    """A candidate of the table through every gate, on all that is known of it."""
    candidate = Candidate(**payload["candidate"])
    workloads = tuple(Workload(**each) for each in payload["workloads"])
    ids = {workload.id for workload in workloads}
    done = [d for d in campaign.done("verify") if d.payload["candidate"] == payload["candidate"]]
    device = FACTS.get(campaign.info.product)
    evaluations = tuple(
        evaluation
        for workload, other, evaluation in evidence.evaluations(campaign)
        if other.id == candidate.id and workload.id in ids
    )
    return decide(
        candidate,
        Evidence(
            policy=campaign.policy,
            gathered_under=(campaign.policy.id,),
            environment=campaign.spec.environment,
            gpus=tuple(campaign.gpus()),
            workloads=workloads,
            strata=strata(candidate, workloads, campaign.info, corpus_of(campaign)),
            smoke=tuple(workload.id for workload in _smoke(campaign, payload)),
            sources=sources(candidate),
            is_built=any(evaluation.blocks for evaluation in evaluations),
            evaluations=evaluations,
            trials=tuple(t for d in done for t in Verdict(**d.result["verdict"]).trials),
            repeats=tuple(Repeat(**r) for d in done for r in d.result["repeats"]),
            floors={w.id: floor_us(w, device) for w in workloads} if device else {},
        ),
    )


def finish(campaign: Campaign) -> dict[str, Any]:
    """What the gates say of each candidate of the table; `unproven` are those that did not pass."""
    found = {payload["candidate"]["route"]: payload for payload in jobs(campaign)}
    gates = [decided(campaign, payload) for payload in jobs(campaign)]
    outcomes = {
        candidate: [verdict.outcome.model_dump(mode="json") for verdict in each]
        for candidate, each in verdicts(campaign).items()
    }
    for each in gates:
        campaign.say(f"{each.candidate}: gate {each.gate}: {each.outcome.kind}")
    return {
        "outcomes": outcomes,
        "routes": sorted(found),
        "gates": [each.model_dump(mode="json") for each in gates],
        "unproven": [each.candidate for each in gates if each.outcome.kind != "pass"],
    }
