"""A promotion as a patch that a person can review, with what it rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.kernels import knobs
from fastkernels_tuner.agent import memory, proposal, sources
from fastkernels_tuner.agent.memory import Decided, Experiment, History
from fastkernels_tuner.agent.workspace import Patch
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.errors import EvidenceError
from fastkernels_tuner.model import Policy, canonical, digest
from fastkernels_tuner.policy import default
from fastkernels_tuner.promote import NotPromoted


def write(campaign: Campaign, path: Path) -> dict[str, Path]:
    """The patch at `path` and the evidence beside it. Raises NotPromoted where there is nothing,
    EvidenceError where the files have changed since."""
    store = campaign.store
    history = History.of(store.events(campaign.id))
    best, begun = history.best(), history.begun
    if begun is None:
        raise NotPromoted(f"{campaign.id} is no campaign of agents")
    if best is None:
        raise NotPromoted(f"{campaign.id}: nothing was promoted")
    shipped = json.loads(store.get(begun.files))
    route = campaign.operator.route(begun.route)
    if route is None or sources.editable(campaign.operator, route) != shipped:
        raise EvidenceError(
            f"{campaign.id}: {', '.join(shipped)} changed since the campaign began: a patch would "
            "be of something that nobody measured"
        )
    files = json.loads(store.get(best.files))
    changed = {
        name: files.get(name) for name in {*shipped, *files} if files.get(name) != shipped.get(name)
    }
    patch = Patch(files=changed)
    evidence = _evidence(campaign, history, begun, best)
    text = _head(campaign, history, best, knobs(route.default_config)) + patch.diff(shipped)
    beside = path.with_name(f"{path.stem}.evidence.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    beside.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    return {"patch": path, "evidence": beside}


def _lineage(history: History, best: Decided) -> list[Experiment]:
    """The promotions that led to the last one; a new beginning from what is shipped cuts it off."""
    found: list[Experiment] = []
    by_files = {d.files: d.experiment for d in history.decisions if d.is_promotion}
    by_number = {each.number: each for each in history.experiments}
    at: int | None = best.experiment
    while at is not None and by_number[at] not in found:
        found.insert(0, by_number[at])
        at = by_files.get(by_number[at].reserved.base)
    return found


def _head(
    campaign: Campaign, history: History, best: Decided, default_config: Mapping[str, Any]
) -> str:
    """What a reviewer reads first; `git apply` skips it."""
    spec = campaign.spec
    lines = [
        f"{spec.op}: {len(_lineage(history, best))} promoted changes on {spec.environment.device}",
        "",
    ]
    for each in _lineage(history, best):
        assert each.decided is not None
        lines.append(f"Experiment {each.number}, {each.decided.choice}: {each.decided.message}")
        if each.plan is not None:
            lines += ["", proposal.render(each.plan)]
    if dict(best.config) != dict(default_config):
        lines += [f"Measured with the config {dict(best.config)}; the default is another one."]
    regimes = [str(campaign.regimes[name]) for name in best.regimes if name in campaign.regimes]
    lines += [f"It serves {', '.join(regimes)}."]
    if best.choice == "promote_dispatch":
        lines += ["Elsewhere what served before stays: make it a route of its own."]
    lines += [
        "",
        f"Campaign {campaign.id}, policy {best.policy}, constitution {best.constitution}.",
        f"{len(history.experiments)} experiments, ${history.account.spent_usd:.2f},"
        f" {history.device_s():.1f} s on the device.",
        "",
        "",
    ]
    # A line that looks like a patch's would be taken for one.
    return "\n".join(line.replace("--- ", "-- ").replace("+++ ", "++ ") for line in lines)


def _evidence(
    campaign: Campaign, history: History, begun: memory.Begun, best: Decided
) -> dict[str, Any]:
    current: Policy = default(campaign.spec.device)
    return {
        "campaign": campaign.id,
        "op": campaign.spec.op,
        "route": begun.route,
        "environment": campaign.spec.environment.model_dump(mode="json"),
        "policy": {"digest": best.policy, "is_current": best.policy == current.id},
        "constitution": {"digest": best.constitution},
        "sandboxed": begun.is_safe,
        "lineage": [
            {
                "experiment": each.number,
                "plan": None if each.plan is None else each.plan.model_dump(mode="json"),
                "decided": each.decided.model_dump(mode="json") if each.decided else None,
                "levels": {
                    name: level.model_dump(mode="json") for name, level in each.levels.items()
                },
            }
            for each in _lineage(history, best)
        ],
        "attempts": [
            {"experiment": d.experiment, "choice": d.choice, "cause": d.cause, "message": d.message}
            for d in history.decisions
        ],
        "ledger_sha256": digest(canonical([e.digest for e in campaign.store.events(campaign.id)])),
    }
