#!/usr/bin/env python3
r"""Measure an operator's routes on this machine and write its result file.

    python bench/run.py --op gdn_decode --where batch_size=64 --rows 1 --out bench/results/cpu
    python bench/run.py --op gdn_decode --device cuda --peers flashinfer,fla --stamp stamp.json \
        --junit gpu.xml --sanitizer-log memcheck=memcheck.log --out bench/results/h200
    python bench/run.py --op gdn_decode --device cuda --sweep configs.json --out bench/results/h200

Every row is judged before it is timed, and the exit status is 1 if one is wrong.

On a CPU: wall clock, inputs as the first call left them in the caches, peak memory of a call beyond
its inputs and outputs as the kernel's resident high-water mark.

On a GPU: kernel times from CUPTI on a cold L2, interleaved with peers and with an elementwise
kernel of the same bytes, written to <out>/<op>.json; with `--variants` every other route's errors
and times stand beside them. `--sweep` times every (route, config) of a file (route to a list of
knobs; `all`: every candidate) on its own list of problems, written to <out>/<op>.sweep.json.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench import facts, peers
from bench.gpu import UNHOSTED, Bench, Options
from bench.sweep import Sweep, choices
from bench.targets import targets
from fastkernels import catalog, demo, force_route
from fastkernels.core.device import device_info
from fastkernels.core.route import Operator
from fastkernels.core.spec import OpSpec
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import contracts, cupti, workloads
from fastkernels.testing.compare import as_tuple
from fastkernels.testing.record import environment

SCHEMA = 1


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


def run_cpu(
    operator: Operator, cases: Sequence[Case], lists: dict[Case, str], route: str | None
) -> dict[str, Any]:
    rows = []
    for case in cases:
        rows.append(measure(operator, case, lists[case], route))
        click.echo(f"{case.name} {case.axes}: {rows[-1]['us']['median'] / 1e3:.1f} ms", err=True)
    found = environment("cpu")
    return {
        "schema": SCHEMA,
        "op": operator.name,
        "device": {"product": found["device"], "arch": found["arch"], "threads": found["threads"]},
        "code": {
            "commit": facts.git("rev-parse", "HEAD"),
            "dirty": bool(facts.git("status", "--porcelain")),
        },
        "versions": {key: found[key] for key in ("fastkernels", "python", "torch")},
        "protocol": {"timer": "wall clock", "statistic": "median", "order": "one route at a time"},
        "created": facts.now(),
        "rows": rows,
    }


def say(text: str) -> None:
    print(text, flush=True)


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def sanitizer_logs(texts: Sequence[str]) -> dict[str, list[Path]]:
    """`tool=path`, repeatable, also for one tool."""
    found: dict[str, list[Path]] = defaultdict(list)
    for text in texts:
        tool, _, path = text.partition("=")
        if tool not in facts.SANITIZERS or not Path(path).is_file():
            known = "|".join(facts.SANITIZERS)
            raise click.UsageError(f"--sanitizer-log {text}: expected {known}=<a file>")
        found[tool].append(Path(path))
    return found


def run_gpu(
    operator: Operator,
    names: Sequence[str],
    rows: Sequence[tuple[str, Case]],
    options: Options,
    stamp: Path | None,
    tests: dict[str, Any],
    path: Path,
) -> int:
    """The published file. Whatever ends the run early, what was measured is written."""
    work = workloads.load(operator.name)
    bench = Bench(operator, work, peers.load(operator.name, names), options, say)
    for name, why in bench.peers.left_out.items():
        say(f"peer {name} left out: {why}")
    clocks: list[int | None] = [clock(options.device)]

    def save() -> None:
        write(path, bench.result(stamp, clocks, tests))

    try:
        bench.measure_host([case for listed, case in rows if listed != UNHOSTED])
        with cupti.recording(options.device) as recorder:
            bench.measure(rows, recorder, save)
        clocks.append(clock(options.device))
    finally:
        save()
    wrong = sum(row["failures"] for row in bench.rows)
    data = bench.result(stamp, clocks, tests)
    say(json.dumps(data["summary"], indent=1))
    for target in targets(data):
        say(str(target))
    say(f"{len(bench.rows)} rows, {len(bench.missing)} missing, {wrong} wrong calls: {path}")
    for each in bench.missing:
        say(f"missing: {each}")
    return 1 if wrong or bench.missing else 0


def run_sweep(
    operator: Operator,
    configs: Path | None,
    problems: Sequence[tuple[str, Case]],
    options: Options,
    stamp: Path | None,
    path: Path,
) -> int:
    """The sweep file, rewritten after every problem."""
    started = time.monotonic()
    sweep = Sweep(
        operator, workloads.load(operator.name), choices(operator, configs), options, say,
        lambda: time.monotonic() - started,
    )  # fmt: skip
    say(f"{len(sweep.choices)} configs on {len(problems)} problems")
    clocks: list[int | None] = [clock(options.device)]

    def save() -> None:
        write(path, sweep.result(stamp, clocks))

    try:
        with cupti.recording(options.device) as recorder:
            sweep.measure(problems, recorder, save)
        clocks.append(clock(options.device))
    finally:
        save()
    wrong = sum(row["failures"] for row in sweep.rows)
    say(f"{len(sweep.rows)} rows, {len(sweep.left_out)} left out, {wrong} wrong calls: {path}")
    return 1 if wrong else 0


def clock(device: torch.device) -> int | None:
    buffer = torch.empty(1 << 28, dtype=torch.int8, device=device)
    return facts.sm_clock(device, partial(buffer.fill_, 1))


def started_for(device: str) -> torch.device:
    """The GPU to measure on, made current."""
    index = torch.device(device if ":" in device else f"{device}:0")
    torch.cuda.set_device(index)
    torch.set_num_threads(min(16, os.cpu_count() or 1))  # for the oracle
    cupti.load()  # before anything is measured in vain
    say(f"{torch.cuda.get_device_name(index)}, torch {torch.__version__}")
    return index


@click.command()
@click.option("--op", "name", required=True, help="Operator.")
@click.option("--device", default="cpu", help="cpu, or cuda (or cuda:1).")
@click.option(
    "--where", multiple=True, metavar="AXIS=SIZE[,..]", help="Only these rows; repeatable."
)
@click.option("--route", default=None, help="Serve every row by this route (CPU).")
@click.option("--rows", "limit", default=0, help="At most this many rows per --where; 0: all.")
@click.option("--out", default=None, help="Folder of the result file; default on a CPU: print it.")
@click.option("--peers", "peer_names", default="", help="Peers to measure beside ours, by comma.")
@click.option("--modes", default="", help="Only these modes, by comma.")
@click.option("--lists", "listed", default="", help="Only these lists, by comma.")
@click.option("--iterations", default=30, help="Timed calls per variant.")
@click.option("--trials", default=5, help="Judged calls on fresh draws per row.")
@click.option("--variants", is_flag=True, help="Judge and time every other route, too.")
@click.option("--budget-s", default=1e9, help="Start no further row after so many seconds.")
@click.option("--stamp", default=None, type=click.Path(path_type=Path, exists=True))
@click.option("--junit", multiple=True, type=click.Path(path_type=Path, exists=True))
@click.option("--sanitizer-log", multiple=True, metavar="TOOL=FILE", help="Repeatable.")
@click.option("--sweep", default=None, metavar="FILE", help="Configs by route, or `all`.")
def main(
    name: str, device: str, where: tuple[str, ...], route: str | None, limit: int, out: str | None,
    peer_names: str, modes: str, listed: str, iterations: int, trials: int, variants: bool,
    budget_s: float, stamp: Path | None, junit: tuple[Path, ...], sanitizer_log: tuple[str, ...],
    sweep: str | None,
) -> None:  # fmt: skip
    """Measure one operator and write <out>/<op>.json, or <out>/<op>.sweep.json."""
    operator = catalog.operator(name)
    if not device.startswith("cuda"):
        lists = {
            case: each
            for each in ("contest", "serving")
            for case in contracts.cases(operator, each.upper())
        }
        result = run_cpu(operator, selected(operator.spec, list(lists), where, limit), lists, route)
        if out is None:
            click.echo(json.dumps(result, indent=1) + "\n")
        else:
            write(Path(out) / f"{name}.json", result)
        raise SystemExit(1 if any(row["failures"] for row in result["rows"]) else 0)
    if out is None or route is not None:
        raise click.UsageError("on a GPU: --out is needed, and --route is a matter of --sweep")
    logs = sanitizer_logs(sanitizer_log)
    index = started_for(device)
    options = Options(index, iterations, trials, budget_s, variants=variants)
    wanted = tuple(modes.split(",")) if modes else operator.spec.modes
    work = workloads.load(name)
    if sweep is None:
        rows = list(work.rows(operator, device_info(index), wanted))
    else:
        rows = list(work.sweep_rows(wanted))
    if listed:
        rows = [(each, case) for each, case in rows if each in listed.split(",")]
    if where or limit:
        kept = set(selected(operator.spec, [case for _, case in rows], where, limit))
        rows = [(each, case) for each, case in rows if case in kept]
    if sweep is None:
        raise SystemExit(
            run_gpu(
                operator, [each for each in peer_names.split(",") if each], rows, options, stamp,
                facts.tests(junit, logs), Path(out) / f"{name}.json",
            )
        )  # fmt: skip
    configs = None if sweep == "all" else Path(sweep)
    path = Path(out) / f"{name}.sweep.json"
    raise SystemExit(run_sweep(operator, configs, rows, options, stamp, path))


if __name__ == "__main__":
    main()
