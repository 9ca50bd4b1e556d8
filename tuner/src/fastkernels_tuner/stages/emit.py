"""Emit: the candidate table and the evidence that it is made from, in the campaign's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastkernels_tuner import emit, evidence, sweep
from fastkernels_tuner.campaign import Campaign, Measures
from fastkernels_tuner.model import digest
from fastkernels_tuner.stages import confirm


def jobs(campaign: Campaign) -> list[dict[str, Any]]:
    return []


def run(campaign: Campaign, payload: dict[str, Any], bench: Measures) -> dict[str, Any]:
    raise AssertionError("nothing to measure")


def finish(campaign: Campaign) -> dict[str, Any]:
    concluded = campaign.require("confirm")
    confirmation = {name: concluded[name] for name in ("gpus", "comparisons")}
    data = evidence.build(campaign, confirm.kept(campaign), confirmation=confirmation)
    path = evidence.write(data, campaign.folder / f"{campaign.spec.op}.sweep.json")
    draft = sweep.draft(path)
    text = emit.render(draft)
    table = campaign.folder / "dispatch_tables" / draft.file
    emit.write(table, text)
    campaign.say(f"candidate table: {table}")
    return {
        "table": str(table.relative_to(campaign.folder)),
        "table_sha256": digest(text),
        "evidence": path.name,
        "evidence_sha256": digest(path.read_bytes()),
        "table_blob": campaign.store.put(text.encode()),
        "evidence_blob": campaign.store.put(path.read_bytes()),
        "regimes": len(draft.regimes),
        "notes": list(draft.notes),
    }


def restore(campaign: Campaign) -> Path:
    """The evidence file, written again from the store where the folder does not have it."""
    found = campaign.require("emit")
    path = campaign.folder / str(found["evidence"])
    if not path.exists() or digest(path.read_bytes()) != found["evidence_sha256"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(campaign.store.get(found["evidence_blob"]))
    return path
