"""Confirm: the fitted choice against what serves today, paired, in two independent sessions.

Per mode and constants, on the workloads where the two differ, those beside boundaries among them.
Only what wins in both sessions changes; everywhere else the champion stays, so that tables do not
flip from one campaign to the next. Where the sweep shows no gain there is nothing to confirm. Where
there is no champion, or it serves by a fallback alone, or is wrong, there is nothing to be beaten.

The second session is another GPU's, of the same product, where one is at hand or has taken part;
the conclusion says which GPUs it rests on, and what each of them showed.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastkernels_tuner import evidence, plan
from fastkernels_tuner.campaign import Campaign, Done, Measures
from fastkernels_tuner.measure import Rejected
from fastkernels_tuner.model import Candidate, Decision, Workload
from fastkernels_tuner.space import candidate as make_candidate
from fastkernels_tuner.stages import fit
from fastkernels_tuner.stats import Budget, PairedTest, Verdict, confirm, log_ratio

MOST_WORKLOADS = 8  # in a session: a pair of one takes an H200 0.6 s, and six pairs are made


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    """One comparison for each mode and constants that may have gained; the second session follows a
    win in the first. The level of each is its share of what the whole campaign may promote
    wrongly."""
    compared = {g: d for g, d in differences(campaign).items() if d.is_compared}
    budget = Budget(alpha=campaign.policy.alpha, planned=max(len(compared), 1))
    second = _second_gpus(campaign)
    found = []
    for group, difference in sorted(compared.items()):
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
                for workload, new, old in _spread(difference.pairs)
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


@dataclass
class Difference:
    """Of a mode and constants: workload, the fitted choice, the champion's where they differ; the
    mean of the log ratios that the sweep shows of those measured under both; and what of the
    champion's was wrong since."""

    pairs: list[tuple[Workload, Candidate, Candidate]]
    gain: float
    min_gain: float
    wrong: list[Candidate]

    @property
    def is_compared(self) -> bool:
        return self.gain >= self.min_gain and not self.wrong

    @property
    def stays(self) -> bool:
        """The champion, without a comparison."""
        return self.gain < self.min_gain and not self.wrong


def differences(campaign: Campaign) -> dict[plan.Group, Difference]:
    """In the order of the campaign's workloads, and then of the probes beside boundaries."""
    if campaign.champion is None:
        return {}
    operator = campaign.operator
    table = fit.fitted(campaign, fit.FINAL)
    times = evidence.times(campaign)
    probes = [Workload(**done.payload["workload"]) for done in campaign.done("fit")]
    found: dict[plan.Group, list[tuple[Workload, Candidate, Candidate]]] = defaultdict(list)
    for workload in (*campaign.spec.workloads, *probes):
        key = plan.key_of(operator, workload, campaign.info)
        hit = table.lookup(dict(key.axes), key.mode)
        assert hit is not None
        new = make_candidate(operator.name, hit.entry.route, hit.entry.config or {})
        old = campaign.served(workload)
        if new != old:
            found[plan.group_of(operator, key)].append((workload, new, old))
    out = evidence.rejected(campaign)
    differences = {}
    for group, pairs in found.items():
        champions = [
            make_candidate(operator.name, r.route, r.config) for r in campaign.reigning(group)
        ]
        if champions:  # else a fallback serves, or nothing: nobody to be beaten
            differences[group] = Difference(
                pairs,
                _gain(pairs, times),
                campaign.policy.min_gain,
                [old for old in champions if old.id in out],
            )
    return differences


def _spread(
    pairs: Sequence[tuple[Workload, Candidate, Candidate]],
) -> list[tuple[Workload, Candidate, Candidate]]:
    """At most MOST_WORKLOADS of them, evenly over all, so that probes are among them."""
    if len(pairs) <= MOST_WORKLOADS:
        return list(pairs)
    step = (len(pairs) - 1) / (MOST_WORKLOADS - 1)
    return [pairs[round(i * step)] for i in range(MOST_WORKLOADS)]


def _gain(
    pairs: Sequence[tuple[Workload, Candidate, Candidate]], times: Mapping[tuple[str, str], float]
) -> float:
    """Without any time to compare, a session has to say: inf."""
    ratios = [
        math.log(times[workload.id, old.id] / times[workload.id, new.id])
        for workload, new, old in pairs
        if {(workload.id, old.id), (workload.id, new.id)} <= times.keys()
    ]
    return statistics.mean(ratios) if ratios else math.inf


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
                return {"verdict": verdict.model_dump(mode="json"), "wrong": error.candidate}
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
    wrong = [done.result["wrong"] for done in campaign.done("confirm") if "wrong" in done.result]
    kept, comparisons = [], []
    for group, difference in sorted(differences(campaign).items()):
        (mode, constants), each = group, sessions[group]
        decision, reason = _together(each) if each else _uncompared(difference)
        if wrong:
            decision, reason = "reject", f"{wrong[0]} was wrong in a session: nothing changes"
        where = ", then ".join(done.gpu for done in each) or "nothing"
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
    if wrong:  # also where it serves and nothing was compared
        groups = {
            plan.group_of(campaign.operator, plan.key_of(campaign.operator, w, campaign.info))
            for w in campaign.spec.workloads
        }
        kept = [[mode, [list(pair) for pair in pairs]] for mode, pairs in sorted(groups)]
    gpus = sorted({done.gpu for each in sessions.values() for done in each})
    return {"kept": kept, "gpus": gpus, "comparisons": comparisons}


def _uncompared(difference: Difference) -> tuple[Decision, str]:
    if difference.wrong:
        return "promote", f"what serves today is wrong: {difference.wrong[0]}"
    if difference.is_compared:
        return "inconclusive", "no session came to its end"
    return "keep", f"the sweep shows a gain of {math.expm1(difference.gain):.2%}: not compared"


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
