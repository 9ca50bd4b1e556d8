"""A candidate table into `dispatch_tables/`: judged on every workload, written in two phases.

The new files are written beside the old ones and checked by a fresh process; then the ledger says
that the promotion begins, the files are moved into place, and the ledger says that it ended. What
finds a promotion that began and did not end (`repair`) completes it if the table is in place, and
takes everything back otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels import envs
from fastkernels.core.archs import product_slug
from fastkernels.core.table import file_name
from fastkernels_tuner import emit, policy, sweep
from fastkernels_tuner.campaign import Campaign
from fastkernels_tuner.errors import EvidenceError, TunerError, UnfitError
from fastkernels_tuner.model import Policy, digest
from fastkernels_tuner.stages import emit as emit_stage
from fastkernels_tuner.store import Lease

BEGUN, ENDED, UNDONE = "promotion.begun", "promotion.ended", "promotion.undone"


class NotPromoted(TunerError):
    """Healthy, but nothing that may be promoted."""

    exit_code = 1


class Unproven(TunerError):
    """Nothing is known to be wrong, and not enough to be right."""

    exit_code = 6


class NotInstalled(UnfitError):
    """The new table does not hold in a fresh process."""


def require_promotable(campaign: Campaign, current: Policy) -> None:
    """Raises NotPromoted or EvidenceError with the reason."""
    own = campaign.policy
    if campaign.conclusion("emit") is None:
        raise NotPromoted(f"{campaign.id} has not ended: fastkernels-tune resume {campaign.id}")
    if not own.is_promotable:
        raise NotPromoted(f"{campaign.id}: tables of the policy {own.name!r} are never shipped")
    if own.id != current.id:
        raise EvidenceError(
            f"{campaign.id} was judged under the policy {own.name!r} ({own.id}), the current one "
            f"is {current.name!r} ({current.id}): run the campaign again"
        )
    if campaign.spec.environment.timer != own.timer:
        raise EvidenceError(
            f"{campaign.id} was timed by {campaign.spec.environment.timer}, expected {own.timer}"
        )
    for each in campaign.require("verify")["gates"]:
        if each["outcome"]["kind"] != "pass":
            raise Unproven(
                f"{campaign.id}: candidate {each['candidate']} of the table did not pass the gate"
                f" {each['gate']!r}: {each['outcome']['message']}"
            )
    comparisons = campaign.require("confirm")["comparisons"]
    if campaign.spec.champion and not any(c["decision"] == "promote" for c in comparisons):
        raise NotPromoted(f"{campaign.id}: nothing is faster than what serves today")


def require_right(campaign: Campaign, swept: Mapping[str, Any]) -> None:
    if swept["wrong"]:
        first = swept["wrong"][0]
        raise EvidenceError(
            f"{campaign.id}: {len(swept['wrong'])} workloads are wrong, e.g. {first['message']}"
        )
    if swept["judged"] != swept["expected"]:
        raise Unproven(
            f"{campaign.id}: {swept['judged']} of {swept['expected']} workloads were judged right"
        )


def current_policy(campaign: Campaign, path: Path | None) -> Policy:
    return policy.read(path) if path is not None else policy.default(campaign.spec.device)


# ---- files --------------------------------------------------------------------------------------


def targets(campaign: Campaign, checkout: Path | None) -> dict[str, Path]:
    """Where table and evidence go: into a checkout, else the user's folder of tables."""
    op, info = campaign.spec.op, campaign.info
    table = Path(op, file_name(info.arch, info.product))
    evidence = Path(product_slug(info.product), f"{op}.sweep.json")
    if checkout is not None:
        if not (checkout / "dispatch_tables").is_dir():
            raise UnfitError(f"{checkout} is no checkout of fastkernels: it has no dispatch_tables")
        return {
            "table": checkout / "dispatch_tables" / table,
            "evidence": checkout / "bench" / "results" / evidence,
        }
    folder = envs.user_tables_folder()
    if folder is None:
        raise UnfitError("there is no folder for a user's tables: set HOME or name a checkout")
    return {"table": folder / table, "evidence": folder / "evidence" / evidence}


def install(campaign: Campaign, lease: Lease, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Writes both files. After a crash anywhere in here, `repair` finishes or undoes it."""
    source = emit_stage.restore(campaign)
    new = {name: _beside(path) for name, path in paths.items()}
    before = {name: _store(campaign, path) for name, path in paths.items()}
    try:
        for path in new.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        # Emitted from where it will lie, so that emitting it again gives the same bytes.
        evidence = source.read_bytes()
        draft = sweep.draft_from(emit.Source(paths["evidence"], evidence))
        text = emit.render(draft)
        _write(new["evidence"], evidence)
        _write(new["table"], text.encode())
        _check_in_a_fresh_process(new["table"], campaign.spec.op)
    except OSError as error:
        raise UnfitError(f"the new files cannot be written: {error}") from error
    except TunerError:
        _clear(paths)
        raise
    begun = {
        "paths": {name: str(path) for name, path in paths.items()},
        "sha256": {"table": digest(text), "evidence": digest(evidence)},
        "before": before,
    }
    campaign.store.append(campaign.id, BEGUN, begun, lease)
    for name in ("evidence", "table"):  # the table last: it is what counts
        os.replace(new[name], paths[name])
        new[name].parent.rmdir()
    campaign.store.append(campaign.id, ENDED, begun, lease)
    return begun


def repair(campaign: Campaign, lease: Lease) -> str:
    """Ends a promotion that was interrupted: `completed`, `undone`, or `` where there was none."""
    events = [e for e in campaign.store.events(campaign.id) if e.kind in (BEGUN, ENDED, UNDONE)]
    if not events or events[-1].kind != BEGUN:
        return ""
    begun = events[-1].payload
    paths = {name: Path(path) for name, path in begun["paths"].items()}
    if all(_digest(path) == begun["sha256"][name] for name, path in paths.items()):
        campaign.store.append(campaign.id, ENDED, begun, lease)
        return "completed"
    _clear(paths)
    for name, path in paths.items():
        blob = begun["before"][name]
        if _digest(path) == begun["sha256"][name]:
            if blob:
                _write(path, campaign.store.get(blob))
            else:
                path.unlink()
    campaign.store.append(campaign.id, UNDONE, begun, lease)
    return "undone"


def _beside(path: Path) -> Path:
    """Where the new file waits, on the same file system and under its name, which is checked."""
    return path.parent / f".new-{path.stem}" / path.name


def _clear(paths: Mapping[str, Path]) -> None:
    for path in paths.values():
        shutil.rmtree(_beside(path).parent, ignore_errors=True)


def _store(campaign: Campaign, path: Path) -> str:
    """The blob of what lies at a path now; empty where nothing does."""
    return campaign.store.put(path.read_bytes()) if path.exists() else ""


def _digest(path: Path) -> str:
    return digest(path.read_bytes()) if path.exists() else ""


def _write(path: Path, data: bytes) -> None:
    """Complete and on the disk when it returns; others see the old file or the new one."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


_CHECK = """
import sys
from pathlib import Path
from fastkernels import catalog
from fastkernels.core import dispatch, table
operator = catalog.operator(sys.argv[2])
problems = dispatch.lint_table(operator, table.read(Path(sys.argv[1]), operator.spec))
sys.exit("; ".join(problems) if problems else 0)
"""


def _check_in_a_fresh_process(path: Path, op: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(path), op], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotInstalled(f"{path}: {done.stderr.strip()[-2000:]}")
