"""Confirm: the fitted choice against what serves today, paired, in two independent sessions.

Per mode and constants, on the workloads where the two differ. Only what wins in both sessions
changes; everywhere else the champion stays, so that tables do not flip from one campaign to the
next. Where there is no champion, or it serves by a fallback alone, there is nothing to be beaten.

The second session is another GPU's, of the same product, where one is at hand or has taken part;
the conclusion says which GPUs it rests on, and what each of them showed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastkernels_tuner import plan
from fastkernels_tuner.campaign import Campaign, Done, Measures
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import Candidate, Decision, Workload
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import fit
from fastkernels_tuner.stats import Budget, PairedTest, Verdict, confirm, log_ratio


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    """One comparison for each mode and constants; the second session follows a win in the first.
    The level of each is its share of what the whole campaign may promote wrongly."""
    if not campaign.spec.champion:
        return []
    differences = _differences(campaign)
    budget = Budget(alpha=campaign.policy.alpha, planned=max(len(differences), 1))
    second = _second_gpus(campaign)
    found = []
    for group in sorted(differences):
        budget = budget.reserve(str(group))
        mode, constants = group
        first = {
            "mode": mode,
            "constants": [list(pair) for pair in constants],
            "session": 1,
            "gpu": "",  # any
            "alpha": budget.levels[str(group)],
            "pairs": [
                [workload.model_dump(mode="json"), new.model_dump(), old.model_dump()]
                for workload, new, old in differences[group]
            ],
        }
        found.append(first)
        if group in second:
            found.append({**first, "session": 2, "gpu": second[group]})
    return found


def _second_gpus(campaign: Campaign) -> dict[plan.Group, str]:
    """Of what won its first session the GPU of the second one, empty where there is no other. What
    was asked for stays: GPUs come and go, and there is one second session."""
    known = campaign.gpus()
    found = {
        _group(done.payload): next((gpu for gpu in known if gpu != done.gpu), "")
        for done in campaign.done("confirm")
        if done.payload["session"] == 1 and verdict_of(done).decision == "promote"
    }
    for row in campaign.store.jobs(campaign.id):
        if row.kind == "confirm" and row.payload["session"] == 2:
            found[_group(row.payload)] = row.payload["gpu"]
    return found


def _group(payload: dict[str, Any]) -> plan.Group:
    return payload["mode"], tuple((name, value) for name, value in payload["constants"])


def _differences(
    campaign: Campaign,
) -> dict[plan.Group, list[tuple[Workload, Candidate, Candidate]]]:
    operator = campaign.operator
    table = fit.fitted(campaign, fit.FINAL)
    found: dict[plan.Group, list[tuple[Workload, Candidate, Candidate]]] = defaultdict(list)
    for workload in campaign.spec.workloads:
        key = plan.key_of(operator, workload, campaign.info)
        hit = table.lookup(dict(key.axes), key.mode)
        assert hit is not None
        new = make_candidate(operator.name, hit.entry.route, hit.entry.config or {})
        old = campaign.served(workload)
        if new != old:
            found[plan.group_of(operator, key)].append((workload, new, old))
    return found


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    policy = campaign.policy
    bench.close()  # a session has processes and data of its own
    pairs = [
        (Workload(**w).with_seed(1000 * payload["session"]), Candidate(**new), Candidate(**old))
        for w, new, old in payload["pairs"]
    ]
    names = [str(workload) for workload, _, _ in pairs]
    test = PairedTest(
        policy,
        names,
        session=f"{campaign.id}/{payload['session']}",
        alpha=payload["alpha"],
    )
    number = 0
    while test.verdict().more:
        ratios, is_refused = {}, False
        for name, (workload, new, old) in zip(names, pairs, strict=True):
            try:
                blocks = bench.pair(new, old, workload, number=number, iterations=policy.iterations)
            except Rejected as error:
                verdict = test.verdict().model_copy(
                    update={"decision": "reject", "reason": str(error), "more": 0}
                )
                return {"verdict": verdict.model_dump(mode="json")}
            if any(block.discarded for block in blocks):
                is_refused = True
                break
            ratios[name] = log_ratio(
                [block for block in blocks if block.side == 0],
                [block for block in blocks if block.side == 1],
            )
        number += 1
        verdict = test.discard() if is_refused else test.add(ratios)
        campaign.say(f"{payload['mode']} session {payload['session']}: {verdict.reason}")
    return {"verdict": test.verdict().model_dump(mode="json")}


def finish(campaign: Campaign) -> dict[str, Any]:
    """Per mode and constants whether the fitted choice is taken, or the champion stays."""
    sessions: dict[plan.Group, list[Done]] = defaultdict(list)
    for done in campaign.done("confirm"):
        sessions[_group(done.payload)].append(done)
    kept, comparisons = [], []
    for (mode, constants), each in sorted(sessions.items()):
        decision, reason = _together(each)
        where = ", then ".join(done.gpu for done in each)
        campaign.say(f"{mode}{dict(constants) or ''}: {decision}, on {where}: {reason}")
        comparisons.append(
            {
                "mode": mode,
                "constants": dict(constants),
                "decision": decision,
                "reason": reason,
                "sessions": [_shown(done) for done in each],
            }
        )
        if decision != "promote":
            kept.append([mode, [list(pair) for pair in constants]])
    gpus = sorted({done.gpu for each in sessions.values() for done in each})
    return {"kept": kept, "gpus": gpus, "comparisons": comparisons}


def _shown(done: Done) -> dict[str, Any]:
    verdict = verdict_of(done)
    gain = None if verdict.estimate is None else verdict.estimate.gain
    return {"gpu": done.gpu, "decision": verdict.decision, "gain": gain}


def _together(sessions: list[Done]) -> tuple[Decision, str]:
    """Both sessions have to promote, whichever GPUs they were on; two GPUs that disagree about the
    sign decide nothing."""
    first, *rest = (verdict_of(done) for done in sessions)
    if first.decision != "promote":
        return first.decision, first.reason
    if not rest:
        return "inconclusive", f"there was no second session; the first: {first.reason}"
    found = confirm(first, rest[0])
    gpus = [done.gpu for done in sessions]
    if gpus[0] != gpus[1] and found.decision == "keep" and (found.gain or 0.0) < 0:
        return "inconclusive", f"faster on {gpus[0]}, slower on {gpus[1]}: {found.reason}"
    return found.decision, found.reason


def verdict_of(done: Done) -> Verdict:
    return Verdict(**done.result["verdict"])


def kept(campaign: Campaign) -> list[plan.Group]:
    return [
        (mode, tuple((name, value) for name, value in constants))
        for mode, constants in campaign.require("confirm")["kept"]
    ]
