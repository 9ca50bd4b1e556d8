"""Confirm: the fitted choice against what serves today, paired, in two independent sessions.

Per mode and constants, on the workloads where the two differ. Only what wins in both sessions
changes; everywhere else the champion stays, so that tables do not flip from one campaign to the
next. Where there is no champion, or it serves by a fallback alone, there is nothing to be beaten.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastkernels_tuner import plan
from fastkernels_tuner.campaign import Campaign, Done, Measures
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import Candidate, Workload
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import fit
from fastkernels_tuner.stats import Budget, PairedTest, Verdict, confirm, log_ratio

SESSIONS = (1, 2)


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    """One comparison for each mode and constants; the second session follows a win in the first.
    The level of each is its share of what the whole campaign may promote wrongly."""
    if not campaign.spec.champion:
        return []
    differences = _differences(campaign)
    budget = Budget(alpha=campaign.policy.alpha, planned=max(len(differences), 1))
    won = {
        _group(done) for done in campaign.done("confirm") if verdict_of(done).decision == "promote"
    }
    found = []
    for group in sorted(differences):
        budget = budget.reserve(str(group))
        mode, constants = group
        for session in SESSIONS:
            if session == 1 or group in won:
                found.append(
                    {
                        "mode": mode,
                        "constants": [list(pair) for pair in constants],
                        "session": session,
                        "alpha": budget.levels[str(group)],
                        "pairs": [
                            [workload.model_dump(mode="json"), new.model_dump(), old.model_dump()]
                            for workload, new, old in differences[group]
                        ],
                    }
                )
    return found


def _group(done: Done) -> plan.Group:
    return done.payload["mode"], tuple((name, value) for name, value in done.payload["constants"])


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
    sessions: dict[plan.Group, list[Verdict]] = defaultdict(list)
    for done in campaign.done("confirm"):
        sessions[_group(done)].append(verdict_of(done))
    kept, comparisons = [], []
    for (mode, constants), verdicts in sorted(sessions.items()):
        decision, reason = _together(verdicts)
        comparisons.append(
            {"mode": mode, "constants": dict(constants), "decision": decision, "reason": reason}
        )
        if decision != "promote":
            kept.append([mode, [list(pair) for pair in constants]])
    return {"kept": kept, "comparisons": comparisons}


def _together(verdicts: list[Verdict]) -> tuple[str, str]:
    first, *rest = verdicts
    if first.decision != "promote" or not rest:
        return first.decision if first.decision != "promote" else "inconclusive", first.reason
    found = confirm(first, rest[0])
    return found.decision, found.reason


def verdict_of(done: Done) -> Verdict:
    return Verdict(**done.result["verdict"])


def kept(campaign: Campaign) -> list[plan.Group]:
    return [
        (mode, tuple((name, value) for name, value in constants))
        for mode, constants in campaign.require("confirm")["kept"]
    ]
