#!/usr/bin/env python3
"""Measure an operator's routes on this machine and write its result file.

    python bench/run.py --op gdn_decode --where batch_size=64 --rows 1 --out bench/results/cpu

Every row is judged by the oracle before it is timed; a wrong row makes the exit status 1 and is
recorded as wrong. On a CPU: wall clock, inputs as the first call left them in the caches, peak
memory of a call beyond its inputs and outputs as the kernel's resident high-water mark. GPU rows
need CUPTI and are refused here until that protocol stands.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch

from fastkernels import catalog, demo, force_route
from fastkernels.core.route import Operator
from fastkernels.core.spec import OpSpec
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts
from fastkernels.testing.compare import as_tuple
from fastkernels.testing.record import environment

ROOT = Path(__file__).parents[1]
SCHEMA = 1


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def resident_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"{field} is not in /proc/self/status")


def peak_extra_mb(operator: Operator, inputs: Any) -> float:
    """Resident memory that one call needs beyond its inputs and outputs."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier calls freed is not this call's to reuse
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc(5)
    outputs = as_tuple(operator.function(**inputs._asdict()))
    size = sum(tensor.numel() * tensor.element_size() for tensor in outputs) / 1e6
    return max(0.0, resident_mb("VmHWM") - before - size)


def measure(operator: Operator, case: Case, listed: str, route: str | None) -> dict[str, Any]:
    if route is not None:
        with force_route(operator.name, route):
            return measure(operator, case, listed, None)
    row = demo.measure(operator, case, torch.device("cpu"), lambda _: None)
    inputs = catalog.module(operator.name, "inputs").make_inputs(case)
    worst = max(row.errors, key=lambda e: e["value"] / e["limit"] if e["limit"] else e["value"])
    return {
        "list": listed,
        "id": case.source or case.name,
        "axes": case.axes,
        "mode": case.mode,
        "route": row.route,
        "config": row.config,
        "us": {"median": row.timing.median_us, "p10": row.timing.p10_us, "p90": row.timing.p90_us},
        "repeats": row.timing.repeats,
        "peak_extra_mb": round(peak_extra_mb(operator, inputs), 1),
        "error": worst,
        "errors": row.errors,
        "failures": 0 if row.ok else 1,
    }


def selected(spec: OpSpec, cases: list[Case], where: tuple[str, ...], limit: int) -> list[Case]:
    """Per `where` (all cases if there is none) the cases whose axes equal it, thinned to `limit`
    evenly spaced ones."""
    chosen: list[Case] = []
    for text in where or ("",):
        wanted = dict(pair.split("=") for pair in text.split(",") if pair)
        unknown = [name for name in wanted if name not in spec.axis]
        if unknown:
            raise click.UsageError(f"--where {unknown[0]}: not an axis of {spec.name}")
        found = [c for c in cases if all(c.axes[n] == int(size) for n, size in wanted.items())]
        if not found:
            raise click.UsageError(f"no case of {spec.name} has {text}")
        if limit and len(found) > limit:
            found = [found[i * (len(found) - 1) // max(limit - 1, 1)] for i in range(limit)]
        chosen += found
    return chosen


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option("--device", default="cpu", type=click.Choice(["cpu"]))
@click.option(
    "--where", multiple=True, metavar="AXIS=SIZE[,..]", help="Only these rows; repeatable."
)
@click.option("--route", default=None, help="Serve every row by this route.")
@click.option("--rows", "limit", default=0, help="At most this many rows per --where; 0: all.")
@click.option("--out", default=None, help="Folder of the result file; default: print it.")
def main(
    name: str,
    device: str,
    where: tuple[str, ...],
    route: str | None,
    limit: int,
    out: str | None,
) -> None:
    """Measure rows of one operator's contest and serving lists and write <out>/<op>.json."""
    operator = catalog.operator(name)
    lists = {
        case: listed
        for listed in ("contest", "serving")
        for case in contracts.cases(operator, listed.upper())
    }
    cases = selected(operator.spec, list(lists), where, limit)
    rows = []
    for case in cases:
        rows.append(measure(operator, case, lists[case], route))
        click.echo(f"{case.name} {case.axes}: {rows[-1]['us']['median'] / 1e3:.1f} ms", err=True)
    facts = environment(device)
    result = {
        "schema": SCHEMA,
        "op": name,
        "device": {"product": facts["device"], "arch": facts["arch"], "threads": facts["threads"]},
        "code": {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))},
        "versions": {key: facts[key] for key in ("fastkernels", "python", "torch")},
        "protocol": {"timer": "wall clock", "statistic": "median", "order": "one route at a time"},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        click.echo(text)
    else:
        path = Path(out) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    raise SystemExit(1 if any(row["failures"] for row in rows) else 0)


if __name__ == "__main__":
    main()
