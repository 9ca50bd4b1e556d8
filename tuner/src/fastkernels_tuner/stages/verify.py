"""Verify: what the fitted table would serve, judged until its failure rate is known to be low.

Each candidate of the table meets the draws that any candidate ever failed, the adversarial
generators of the operator, and fresh draws of every workload that it would serve. One that is wrong
is out, everywhere and for good: the fit is made again without it, and what takes its place is
verified in turn.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
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
from fastkernels_tuner.stages import confirm, fit
from fastkernels_tuner.trials import (
    Corpus,
    Fail,
    Outcome,
    Pass,
    Subject,
    Verdict,
    run_together,
    strata,
)

TRIALS = "trials"
TOGETHER = 8  # candidates in a job


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    """What the fitted table serves and nobody has judged on what it serves, several at once: they
    share most draws."""
    judged = [subject for done in campaign.done("verify") for subject in done.payload["subjects"]]
    left = [subject for subject in served(campaign) if subject not in judged]
    return [{"subjects": left[i : i + TOGETHER]} for i in range(0, len(left), TOGETHER)]


def served(campaign: Campaign) -> list[dict[str, Any]]:
    """The candidates of the fitted table, each with the workloads that it would serve; where it
    promises no gain, those that serve today and stay."""
    found: dict[str, tuple[Candidate, list[Workload]]] = {}
    table = fit.fitted(campaign, fit.FINAL)
    operator = campaign.operator
    stays = {g for g, d in confirm.differences(campaign).items() if d.stays}
    for workload in campaign.spec.workloads:
        key = plan.key_of(operator, workload, campaign.info)
        hit = table.lookup(dict(key.axes), key.mode)
        assert hit is not None
        candidate = make_candidate(operator.name, hit.entry.route, hit.entry.config or {})
        if plan.group_of(operator, key) in stays:
            candidate = campaign.served(workload)
        found.setdefault(candidate.id, (candidate, []))[1].append(workload)
    return [
        {
            "candidate": candidate.model_dump(mode="json"),
            "workloads": [workload.model_dump(mode="json") for workload in workloads],
        }
        for candidate, workloads in found.values()
    ]


def corpus_of(campaign: Campaign) -> Corpus:
    """What failed once, beside the database or of all campaigns in this folder."""
    return Corpus(campaign.folder.parent / "regressions.jsonl")


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    corpus = corpus_of(campaign)
    subjects = []
    for each in payload["subjects"]:
        candidate, workloads = _parsed(each)
        found = strata(candidate, workloads, campaign.info, corpus)
        subjects.append(Subject(candidate, found, _earlier(campaign, candidate)))
    until = time.monotonic() + campaign.policy.verify_s * len(subjects)
    verdicts = run_together(
        bench.judge_all,
        subjects,
        campaign.policy,
        corpus=corpus,
        device=campaign.info,
        seed=campaign.spec.seed,
        stop=lambda: time.monotonic() > until or campaign.is_out_of_time,
        record=lambda candidate, trials: _record(campaign, candidate, trials),
    )
    if any(verdict.outcome.kind == "need_more" for verdict in verdicts):
        campaign.require_time()  # given back, the job goes on from the trials in the ledger
    repeats: dict[str, list[Repeat]] = {}
    for i, (each, verdict) in enumerate(zip(payload["subjects"], verdicts, strict=True)):
        if verdict.outcome.kind == "pass":
            try:
                repeats[verdict.candidate] = _repeated(campaign, each, bench)
            except Rejected as error:  # right so far, and wrong now: final all the same
                verdicts[i] = verdict.model_copy(update={"outcome": Fail.of(error.failure)})
        campaign.say(f"{subjects[i].candidate}: {_said(verdicts[i].outcome)}")
    return {
        "verdicts": [verdict.model_dump(mode="json") for verdict in verdicts],
        "repeats": {
            candidate: [repeat.model_dump(mode="json") for repeat in each]
            for candidate, each in repeats.items()
        },
    }


def _parsed(subject: dict[str, Any]) -> tuple[Candidate, list[Workload]]:
    return Candidate(**subject["candidate"]), [Workload(**each) for each in subject["workloads"]]


def _repeated(campaign: Campaign, subject: dict[str, Any], bench: Measures) -> list[Repeat]:
    """What equal calls gave, of workloads whose results are promised to the bit. Raises
    Rejected."""
    candidate, workloads = _parsed(subject)
    found = []
    for workload in _smoke(campaign, workloads):
        if promises_bits(workload):
            seed = workload.case.get("seed", 0)
            digests = bench.repeat(candidate, workload, seed)
            found.append(Repeat(workload=workload.id, seed=seed, digests=digests))
    return found


def _smoke(campaign: Campaign, workloads: Sequence[Workload]) -> list[Workload]:
    """Of what a candidate would serve the first of each regime."""
    found: dict[str, Workload] = {}
    for workload in workloads:
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
    """By candidate id; several where the fit gave a candidate other workloads later. The last one
    has the trials of all."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    for done in campaign.done("verify"):
        for each in done.result["verdicts"]:
            verdict = Verdict(**each)
            found[verdict.candidate].append(verdict)
    return found


def decided(campaign: Campaign, subject: dict[str, Any]) -> Decided:
    """A candidate of the table through every gate, on all that is known of it."""
    candidate, workloads = _parsed(subject)
    ids = {workload.id for workload in workloads}
    known = verdicts(campaign).get(candidate.id)
    repeats = [
        Repeat(**repeat)
        for done in campaign.done("verify")
        for repeat in done.result["repeats"].get(candidate.id, ())
    ]
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
            workloads=tuple(workloads),
            strata=strata(candidate, workloads, campaign.info, corpus_of(campaign)),
            smoke=tuple(workload.id for workload in _smoke(campaign, workloads)),
            sources=sources(candidate),
            is_built=any(evaluation.blocks for evaluation in evaluations),
            evaluations=evaluations,
            trials=known[-1].trials if known else (),
            repeats=tuple(repeats),
            floors={w.id: floor_us(w, device) for w in workloads} if device else {},
        ),
    )


def _said(outcome: Outcome) -> str:
    why = "" if isinstance(outcome, Pass) else f": {outcome.message}"
    return outcome.kind + why


def finish(campaign: Campaign) -> dict[str, Any]:
    """What the gates say of each candidate of the table; `unproven` are those that did not pass."""
    subjects = served(campaign)
    gates = [decided(campaign, subject) for subject in subjects]
    outcomes = {
        candidate: [verdict.outcome.model_dump(mode="json") for verdict in each]
        for candidate, each in verdicts(campaign).items()
    }
    for each in gates:
        campaign.say(f"{each.candidate}: gate {each.gate}: {_said(each.outcome)}")
    return {
        "outcomes": outcomes,
        "routes": sorted({subject["candidate"]["route"] for subject in subjects}),
        "gates": [each.model_dump(mode="json") for each in gates],
        "unproven": [each.candidate for each in gates if each.outcome.kind != "pass"],
    }
