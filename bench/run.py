#!/usr/bin/env python3
r"""Measure operators' routes on this machine and write their result files.

    python bench/run.py --op all --device cuda --out results --page
    python bench/run.py --op all --device cuda --quick --out results --against bench/results/h200
    python bench/run.py --op gdn_decode --where batch_size=64 --rows 1 --out bench/results/cpu
    python bench/run.py --op gdn_decode --device cuda --stamp stamp.json --junit gpu.xml \
        --sanitizer-log memcheck=memcheck.log --out bench/results/h200
    python bench/run.py --op gdn_decode --device cuda --sweep configs.json --out bench/results/h200

Every row is judged before it is timed. The exit status is 1 if one is wrong or missing or, with
`--against`, slower than the reference beyond the spread (`bench/compare.py` says what that is).

On a CPU: wall clock, inputs as the first call left them in the caches, peak memory of a call beyond
its inputs and outputs as the kernel's resident high-water mark.

On a GPU: kernel times from CUPTI on a cold L2, interleaved with every peer that is installed and
with an elementwise kernel of the same bytes, written to <out>/<op>.json; with `--variants` every
other route's errors and times stand beside them. `--quick` looks at few rows, within a budget of
170 s that all operators share, and writes <out>/<op>.quick.json. `--sweep` times every (route,
config) of a file (route to a list of knobs; `all`: every candidate) on its own list of problems,
written to <out>/<op>.sweep.json. `--page` adds plots, <op>.svg and <op>.ratios.svg, and index.html.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a script finds what lies beside it, not itself

from bench import facts, peers
from bench.compare import Comparison, Incomparable, compare
from bench.files import NotAResult, Result, read
from bench.gpu import UNHOSTED, Bench, Options
from bench.progress import Progress, Say
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
# What a quick run leaves out is iterations and draws: rows are judged and timed as ever. Its
# budget leaves ten seconds for the start of Python and torch.
QUICK_BUDGET_S = 170.0
QUICK: dict[str, Any] = {
    "iterations": 10, "trials": 0, "sets": 2, "host_rounds": 1, "host_calls": 50,
    "growth_calls": 500,
}  # fmt: skip

LISTS = ("contest", "serving", UNHOSTED)
Rows = Sequence[tuple[str, Case]]


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


def quick(rows: Rows, operator: Operator) -> list[tuple[str, Case]]:
    """Of each list and mode the smallest row and the middle one, by bytes. Larger ones are left to
    the full run, since the oracles of some take minutes; rows around a table's boundaries, too."""
    work = workloads.load(operator.name)
    groups: dict[tuple[str, str], list[tuple[str, Case]]] = defaultdict(list)
    for listed, case in rows:
        if listed != UNHOSTED:
            groups[listed, case.mode].append((listed, case))
    chosen: list[tuple[str, Case]] = []
    for own in groups.values():
        own.sort(key=lambda row: work.moved_bytes(row[1]))
        chosen += [own[place] for place in sorted({0, len(own) // 2})]
    return chosen


def run_cpu(
    operator: Operator, rows: Rows, route: str | None, progress: Progress, say: Say
) -> dict[str, Any]:
    measured = []
    progress.ready()
    for listed, case in rows:
        measured.append(measure(operator, case, listed, route))
        ms = measured[-1]["us"]["median"] / 1e3
        say(f"{progress.row()} {operator.name} {case.name} {case.axes}: {ms:.1f} ms")
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
        "rows": measured,
    }


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
    names: Sequence[str] | None,
    rows: Rows,
    options: Options,
    stamp: Path | None,
    tests: dict[str, Any],
    path: Path,
    progress: Progress,
    say: Say,
) -> dict[str, Any]:
    """The published file. Whatever ends the run early, what was measured is written."""
    started = time.monotonic()
    bench = Bench(
        operator, workloads.load(operator.name), peers.load(operator.name, names), options, say,
        started=started, progress=progress,
    )  # fmt: skip
    _say_left_out(bench, say)
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
    data = bench.result(stamp, clocks, tests)
    say(json.dumps(data["summary"], indent=1))
    for target in targets(data):
        say(str(target))
    for each in bench.missing:
        say(f"missing: {each}")
    _say_left_out(bench, say)
    return data


def _say_left_out(bench: Bench, say: Say) -> None:
    for name, why in bench.peers.left_out.items():
        say(f"missing peer {name} of {bench.operator.name}: {why}")


def run_sweep(
    operator: Operator,
    configs: Path | None,
    problems: Rows,
    options: Options,
    stamp: Path | None,
    path: Path,
    say: Say,
) -> dict[str, Any]:
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
    say(f"{len(sweep.left_out)} left out")
    return sweep.result(stamp, clocks)


def clock(device: torch.device) -> int | None:
    buffer = torch.empty(1 << 28, dtype=torch.int8, device=device)
    return facts.sm_clock(device, partial(buffer.fill_, 1))


def started_for(device: str) -> torch.device:
    """The GPU to measure on, made current."""
    index = torch.device(device if ":" in device else f"{device}:0")
    torch.cuda.set_device(index)
    torch.set_num_threads(min(16, os.cpu_count() or 1))  # for the oracle
    cupti.load()  # before anything is measured in vain
    return index


# ---- what is asked for --------------------------------------------------------------------------


def named(name: str, index: torch.device | None) -> list[Operator]:
    """One operator, or `all`: on a GPU those with a route that is compiled for it."""
    if name != "all":
        return [catalog.operator(name)]
    if index is None:
        return list(catalog.OPERATORS)
    arch = device_info(index).arch
    return [
        operator
        for operator in catalog.OPERATORS
        if any(route.language != "torch" and arch in route.archs for route in operator.routes)
    ]


def thorough(
    index: torch.device,
    is_quick: bool,
    iterations: int | None,
    trials: int | None,
    variants: bool,
    budget_s: float,
) -> Options:
    """Defaults of `--quick` or of a full run, where nothing else was asked for."""
    options = Options(index, variants=variants, budget_s=budget_s)
    given = {"iterations": iterations, "trials": trials}
    asked = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(options, **({**QUICK, **asked} if is_quick else asked))


@dataclass(frozen=True)
class Filter:
    """Which of an operator's rows: empty is all of them."""

    where: tuple[str, ...]
    limit: int
    modes: tuple[str, ...]
    lists: tuple[str, ...]
    is_quick: bool

    def rows(
        self, operator: Operator, index: torch.device | None, is_sweep: bool
    ) -> list[tuple[str, Case]]:
        rows = _all_rows(operator, index, self.modes or operator.spec.modes, is_sweep)
        if self.lists:
            rows = [(listed, case) for listed, case in rows if listed in self.lists]
        if self.where or self.limit:
            kept = set(selected(operator.spec, [case for _, case in rows], self.where, self.limit))
            rows = [(listed, case) for listed, case in rows if case in kept]
        return quick(rows, operator) if self.is_quick else rows


def planned(
    wanted: Filter, operators: Sequence[Operator], index: torch.device | None, is_sweep: bool
) -> list[tuple[Operator, list[tuple[str, Case]]]]:
    """Operators with their rows, those without one left out."""
    modes = {mode for operator in operators for mode in operator.spec.modes}
    for option, given, known in (
        ("--modes", wanted.modes, modes), ("--lists", wanted.lists, LISTS),
    ):  # fmt: skip
        unknown = [each for each in given if each not in known]
        if unknown:
            raise click.UsageError(f"{option} {unknown[0]}: expected of {', '.join(sorted(known))}")
    plans = [(operator, wanted.rows(operator, index, is_sweep)) for operator in operators]
    plans = [(operator, rows) for operator, rows in plans if rows]
    if not plans:
        raise click.UsageError("no row is left of these lists, modes and sizes")
    return plans


def _all_rows(
    operator: Operator, index: torch.device | None, modes: Sequence[str], is_sweep: bool
) -> list[tuple[str, Case]]:
    if index is None:  # the lists as they stand
        return [
            (listed, case)
            for listed in ("contest", "serving")
            for case in contracts.cases(operator, listed.upper())
            if case.mode in modes
        ]
    work = workloads.load(operator.name)
    if is_sweep:
        return list(work.sweep_rows(modes))
    return list(work.rows(operator, device_info(index), modes))


def references(text: str, operators: Sequence[Operator], suffix: str) -> dict[str, Result]:
    """By operator: of a file, or of a folder of result files, where one may lack an operator. Read
    before anything is measured: a run may write to where its reference lies."""
    is_file = text.endswith(".json")
    found: dict[str, Result] = {}
    why = f"{text} is of another operator"
    for operator in operators:
        try:
            data = read(text if is_file else f"{text}/{operator.name}{suffix}")
        except NotAResult as error:
            why = str(error)
            continue
        if data["op"] == operator.name:
            found[operator.name] = data
    if not found:
        raise click.UsageError(f"--against: {why}")
    return found


# ---- what becomes of it -------------------------------------------------------------------------


def compared(data: Result, reference: Result, across_devices: bool) -> Comparison | str:
    """Or why the two cannot be compared."""
    try:
        return compare(data, reference, across_devices)
    except Incomparable as error:
        return f"{data['op']}: not compared: {error}"


def draw(results: Mapping[Path, Result], comparisons: Sequence[Comparison], out: Path) -> None:
    """The plots of each file beside it, and a page over all."""
    from bench import figures, page, rows

    for path, data in results.items():
        times = figures.latency(data, rows.varying_axis(data["rows"]))
        figures.save(times, path.with_suffix(".svg"))
        ratios = figures.histogram(data)
        if ratios is not None:
            figures.save(ratios, path.with_suffix(".ratios.svg"))
    (out / "index.html").write_text(page.build(list(results.values()), comparisons))


def verdict(data: Result) -> tuple[str, bool]:
    """A line, and whether everything is right and there."""
    wrong = sum(row["failures"] for row in data["rows"])
    missing = len(data.get("missing", ()))
    text = f"{data['op']}: {len(data['rows'])} rows, {missing} missing, {wrong} wrong calls"
    return text, not (wrong or missing)


@click.command()
@click.option("--op", "name", required=True, help="Operator, or `all`.")
@click.option("--device", default="cpu", help="cpu, or cuda (or cuda:1).")
@click.option(
    "--where", multiple=True, metavar="AXIS=SIZE[,..]", help="Only these rows; repeatable."
)
@click.option("--route", default=None, help="Serve every row by this route (CPU).")
@click.option("--rows", "limit", default=0, help="At most this many rows per --where; 0: all.")
@click.option("--quick", "is_quick", is_flag=True, help="Few rows and iterations.")
@click.option("--out", default=None, help="Folder of the result files; default on a CPU: print it.")
@click.option("--peers", "peer_names", default="all", help="Peers beside ours, by comma, or none.")
@click.option("--modes", default="", help="Only these modes, by comma.")
@click.option("--lists", "listed", default="", help="Only these lists, by comma.")
@click.option("--iterations", type=int, help="Timed calls per variant; default 30, quick 10.")
@click.option("--trials", type=int, help="Judged calls on fresh draws per row; default 5, quick 0.")
@click.option("--variants", is_flag=True, help="Judge and time every other route, too.")
@click.option(
    "--budget-s", type=float, help="Start no further row after so many seconds; quick: 170."
)
@click.option("--stamp", default=None, type=click.Path(path_type=Path, exists=True))
@click.option("--junit", multiple=True, type=click.Path(path_type=Path, exists=True))
@click.option("--sanitizer-log", multiple=True, metavar="TOOL=FILE", help="Repeatable.")
@click.option("--sweep", default=None, metavar="FILE", help="Configs by route, or `all`.")
@click.option(
    "--against",
    default=None,
    metavar="REF",
    help="Compare with a result file, a folder of them, or <commit>:<path> of either.",
)
@click.option("--across-devices", is_flag=True, help="Compare also where the devices differ.")
@click.option("--page", "has_page", is_flag=True, help="Plots, and a page over all results.")
def main(
    name: str, device: str, where: tuple[str, ...], route: str | None, limit: int, is_quick: bool,
    out: str | None, peer_names: str, modes: str, listed: str, iterations: int | None,
    trials: int | None, variants: bool, budget_s: float | None, stamp: Path | None,
    junit: tuple[Path, ...], sanitizer_log: tuple[str, ...], sweep: str | None,
    against: str | None, across_devices: bool, has_page: bool,
) -> None:  # fmt: skip
    """Measure operators and write <out>/<op>.json, <op>.quick.json or <op>.sweep.json."""
    is_gpu = device.startswith("cuda")
    if is_gpu and (out is None or route is not None):
        raise click.UsageError("on a GPU: --out is needed, and --route is a matter of --sweep")
    if out is None and (has_page or name == "all"):
        raise click.UsageError("--page and --op all: --out is needed")
    if sweep is not None and (not is_gpu or name == "all" or is_quick or has_page):
        raise click.UsageError("--sweep: on a GPU, of one operator, without --quick and --page")
    if has_page and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--page needs matplotlib: pip install 'matplotlib>=3.8,<4'")
    tests = facts.tests(junit, sanitizer_logs(sanitizer_log))
    names = None if peer_names == "all" else [each for each in _split(peer_names) if each != "none"]
    configs = None if sweep in (None, "all") else Path(sweep)
    index = started_for(device) if is_gpu else None
    wanted = Filter(where, limit, _split(modes), _split(listed), is_quick)
    plans = planned(wanted, named(name, index), index, sweep is not None)
    operators = [operator for operator, _ in plans]
    ending = ".sweep.json" if sweep else ".json"
    before = references(against, operators, ending) if against else {}
    progress = Progress({operator.name: len(rows) for operator, rows in plans})
    budget = budget_s or (QUICK_BUDGET_S if is_quick else 1e9)

    def measured(operator: Operator, rows: Rows, path: Path, budget_s: float, say: Say) -> Result:
        if index is None:
            return run_cpu(operator, rows, route, progress, say)
        options = thorough(index, is_quick, iterations, trials, variants, budget_s)
        if sweep is not None:
            return run_sweep(operator, configs, rows, options, stamp, path, say)
        return run_gpu(operator, names, rows, options, stamp, tests, path, progress, say)

    results: dict[Path, Result] = {}
    comparisons: list[Comparison] = []
    verdicts: list[tuple[str, bool]] = []
    with progress.shown(sys.stdout if is_gpu else sys.stderr) as say:
        if index is not None:
            say(f"{torch.cuda.get_device_name(index)}, torch {torch.__version__}")
        for number, (operator, rows) in enumerate(plans):
            progress.start(operator.name)
            path = Path(out or ".") / f"{operator.name}{'.quick' if is_quick else ''}{ending}"
            # What an operator leaves of its share goes to the others.
            share = (budget - progress.elapsed) / (len(plans) - number)
            try:
                data = measured(operator, rows, path, share, say)
            except Exception as error:
                if len(plans) == 1:
                    raise
                verdicts.append((f"{operator.name}: STOPPED: {cupti.describe(error)}", False))
                continue
            if index is None and out is not None:
                write(path, dict(data))
            results[path] = data
            verdicts.append(verdict(data))
            if operator.name in before:
                found = compared(data, before[operator.name], across_devices)
                comparisons += [found] if isinstance(found, Comparison) else []
                verdicts.append((str(found), isinstance(found, Comparison) and not found.is_worse))
            elif against:
                verdicts.append((f"{operator.name}: {against} has no result of it", True))
    if out is None:
        click.echo(json.dumps(next(iter(results.values())), indent=1) + "\n")
    for text, _ in verdicts:
        click.echo(text, err=not is_gpu)
    drawn = {path: data for path, data in results.items() if data["rows"]}
    if has_page and drawn:
        draw(drawn, comparisons, Path(out or "."))
        click.echo(f"page: {out}/index.html", err=not is_gpu)
    raise SystemExit(0 if all(is_good for _, is_good in verdicts) else 1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(each for each in text.split(",") if each)


if __name__ == "__main__":
    main()
