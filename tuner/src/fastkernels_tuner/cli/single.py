"""Commands about single candidates: numeric, eval, ab, verify; and prebuild and doctor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from fastkernels.core.device import named_device
from fastkernels_tuner import candidates, plan, prebuild
from fastkernels_tuner.cli.campaigns import drive_to, spec_of
from fastkernels_tuner.cli.common import (
    ANY_PATH,
    command,
    device_of,
    device_option,
    folder_option,
    json_option,
    op_option,
    opened,
    policy_of,
    policy_option,
    storage_option,
)
from fastkernels_tuner.doctor import findings
from fastkernels_tuner.errors import SourceError
from fastkernels_tuner.measure import Bench, Unstable
from fastkernels_tuner.model import Block, Candidate, Policy, Workload
from fastkernels_tuner.sessions import Sessions
from fastkernels_tuner.stats import PairedTest, calibrate, log_ratio
from fastkernels_tuner.terminal import Terminal
from fastkernels_tuner.trials import RISKS, Corpus, risk_class, run_trials, strata

REJECTED, INCONCLUSIVE, CHEAT = 5, 6, 8
LEVELS = ("smoke", "quick", "stride", "full")


@click.command()
@op_option
@click.option("--route", "routes", multiple=True, help="Only this route; repeatable.")
@click.option("--trials", type=click.IntRange(1), help="Configs per study.")
@click.option("--wall", type=click.FloatRange(1), help="Stop after so many seconds; resume later.")
@click.option("--seed", default=0, show_default=True)
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def numeric(
    op: str,
    routes: Sequence[str],
    trials: int | None,
    wall: float | None,
    seed: int,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Search knobs only; `resume` takes the campaign to its end."""
    where = device_of(device)
    policy = policy_of(where, policy_file, trials)
    with Bench(where, policy, seed=seed) as bench:
        spec = spec_of(op, where, policy, bench, routes, seed)
        with opened(folder, storage) as store:
            number = store.create(spec)
            terminal.say(f"campaign {number}")
            campaign = drive_to("search", store, number, bench, folder, wall, {}, terminal)
    found = campaign.require("search")
    lines = [f"campaign {number}: {found['trials']}"]
    for regime in spec.regimes:
        lines.append(str(regime))
        for entry in found["finalists"][regime.id]:
            lines.append(f"  {Candidate(**entry).id}  {Candidate(**entry)}")
    terminal.result({"campaign": number, **found}, "\n".join(lines))
    return 0


@click.command("eval")
@op_option
@click.argument("candidate")
@click.option("--level", type=click.Choice(LEVELS), default="quick", show_default=True)
@click.option("--mode", default=None, help="Only this mode.")
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def eval_command(
    op: str,
    candidate: str,
    level: str,
    mode: str | None,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Judge and time one candidate: `route`, `route:knob=value,...`, or an id."""
    where = device_of(device)
    policy = policy_of(where, policy_file)
    with opened(folder, storage) as store:
        chosen = candidates.parse(op, candidate, store)
    workloads = _at_level(_workloads(op, where, policy, chosen, mode), level)
    rows = []
    with Bench(where, policy, seed=0) as bench:
        for workload in workloads:
            found = bench.evaluate(
                chosen, workload, iterations=policy.iterations, trials=policy.search_trials
            )
            terminal.say(f"{workload}: {found.describe()}")
            rows.append({"name": str(workload), **found.model_dump(mode="json")})
    failed = [row for row in rows if row["failure"] is not None]
    status = REJECTED if failed else 0
    document = {"candidate": chosen.id, "level": level, "rows": rows, "exit_code": status}
    terminal.result(document, f"{chosen.id} {chosen}: {len(rows)} rows, {len(failed)} failed")
    return status


@click.command()
@op_option
@click.argument("first")
@click.argument("second")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--mode", default=None, help="Only this mode; default: the first one.")
@click.option("--limit", type=click.IntRange(1), help="At most so many workloads.")
@click.option("--sessions", type=ANY_PATH, help="Finished repeats are kept here, and count again.")
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def ab(
    op: str,
    first: str,
    second: str,
    repeats: int,
    mode: str | None,
    limit: int | None,
    sessions: Path | None,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Is FIRST faster than SECOND? Paired and sequential; `ab X X` calibrates the test itself."""
    where = device_of(device)
    policy = policy_of(where, policy_file)
    with opened(folder, storage) as store:
        a, b = (candidates.parse(op, text, store) for text in (first, second))
    wanted = mode or plan.operator_of(op).spec.modes[0]
    workloads = [w for w in _workloads(op, where, policy, a, wanted) if _serves(b, w, where)]
    workloads = workloads[:limit]
    if not workloads:
        raise SourceError(f"{op}: no workload is served by both {a} and {b}")
    is_same = a.id == b.id
    names = [str(workload) for workload in workloads]
    done = Sessions(sessions, a.id, b.id, policy.id, names)
    with Bench(where, policy, seed=len(done)) as bench:
        while len(done) < repeats:
            # A session is the candidates' processes and their data: fresh ones for every repeat.
            bench.renew()
            number = len(done)
            test, pairs = _session(bench, policy, a, b, workloads, number, every_look=is_same)
            if is_same and len(pairs) < policy.looks[-1]:  # those on file count when run again
                raise Unstable(
                    f"session {number}: {len(pairs)} pairs without a disturbance, expected"
                    f" {policy.looks[-1]}"
                )
            done.add(test.verdict(), pairs, bench.environment)
            terminal.say(f"session {number}: {test.verdict().reason}")
    verdicts = done.verdicts
    document: dict[str, Any] = {
        "first": a.id,
        "second": b.id,
        "verdicts": [verdict.model_dump(mode="json") for verdict in verdicts],
    }
    if is_same:
        found = calibrate(policy, done.pairs)
        terminal.result({**document, "calibration": found.model_dump(mode="json")}, found.reason)
        return REJECTED if found.state == "broken" else 0
    decision = verdicts[-1].decision
    status = {"promote": 0, "keep": 1}.get(decision, INCONCLUSIVE)
    terminal.result({**document, "exit_code": status}, f"{decision}: {verdicts[-1].reason}")
    return status


def _session(
    bench: Bench,
    policy: Policy,
    a: Candidate,
    b: Candidate,
    workloads: Sequence[Workload],
    repeat: int,
    *,
    every_look: bool,
) -> tuple[PairedTest, list[dict[str, Any]]]:
    """`every_look`: pairs up to the last look, also after the decision, as a calibration wants."""
    names = [str(workload) for workload in workloads]
    test = PairedTest(policy, names, session=str(repeat))
    pairs: list[dict[str, Any]] = []
    number = 0
    while test.verdict().more or (every_look and len(pairs) < policy.looks[-1]):
        ratios = {}
        for name, workload in zip(names, workloads, strict=True):
            blocks = bench.pair(
                a, b, workload.with_seed(1 + repeat), number=number, iterations=policy.iterations
            )
            if any(block.discarded for block in blocks):
                break
            ratios[name] = log_ratio(*_sides(blocks))
        number += 1
        if len(ratios) < len(names):
            if test.verdict().more:
                test.discard()
            elif number > 2 * policy.looks[-1]:
                break
            continue
        pairs.append(ratios)
        if test.verdict().more:
            test.add(ratios)
    return test, pairs


def _sides(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """Blocks of the first and of the second of a pair, which may be one candidate."""
    return [b for b in blocks if b.side == 0], [b for b in blocks if b.side == 1]


@click.command()
@op_option
@click.argument("candidate")
@click.option("--p-max", type=click.FloatRange(0, 1, min_open=True), help="Bound of the class.")
@click.option("--class", "risk", type=click.Choice(RISKS), help="Default: the operator's.")
@click.option("--wall", type=click.FloatRange(1), help="Seconds; more is no pass.")
@click.option("--mode", default=None, help="Only this mode.")
@click.option("--regressions", type=ANY_PATH, help="File of draws that failed once.")
@policy_option
@device_option
@folder_option
@storage_option
@json_option
@command
def verify(
    op: str,
    candidate: str,
    p_max: float | None,
    risk: str | None,
    wall: float | None,
    mode: str | None,
    regressions: Path | None,
    policy_file: Path | None,
    device: str | None,
    folder: Path,
    storage: str | None,
    terminal: Terminal,
) -> int:
    """Judge a candidate until its failure rate is bounded, on every workload and on the operator's
    adversarial generators."""
    where = device_of(device)
    policy = policy_of(where, policy_file)
    with opened(folder, storage) as store:
        chosen = candidates.parse(op, candidate, store)
    if p_max is not None:
        level = risk or risk_class(op, chosen.route)
        policy = policy.model_copy(update={"p_max": {**policy.p_max, level: p_max}})
    corpus = Corpus(regressions or folder / "regressions.jsonl")
    found = strata(
        chosen,
        _workloads(op, where, policy, chosen, mode),
        named_device(where),
        corpus,
    )
    if risk is not None:
        found = tuple(s if s.proof else s.model_copy(update={"risk": risk}) for s in found)
    with Bench(where, policy, seed=0) as bench:
        verdict = run_trials(
            bench.judge,
            chosen,
            found,
            policy,
            corpus=corpus,
            device=named_device(where),
            stop=_clock(wall or policy.verify_s),
            record=lambda trials: terminal.say(f"{trials.stratum}: {trials.trials} right"),
        )
    outcome = verdict.outcome
    status = {"pass": 0, "fail": REJECTED}.get(outcome.kind, INCONCLUSIVE)
    if outcome.kind == "fail" and outcome.is_quarantine:
        status = CHEAT
    judged = sum(each.trials for each in verdict.trials)
    words = getattr(outcome, "message", "every bound holds")
    terminal.result(
        {**verdict.model_dump(mode="json"), "exit_code": status},
        f"{chosen.id} {chosen}: {outcome.kind} after {judged} calls: {words}",
    )
    return status


def _clock(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def _workloads(
    op: str, device: str, policy: Policy, candidate: Candidate, mode: str | None
) -> list[Workload]:
    operator = plan.operator_of(op)
    if mode is not None and mode not in operator.spec.modes:
        raise SourceError(f"{op}: mode {mode!r}, expected one of {', '.join(operator.spec.modes)}")
    found = [
        workload
        for workload in plan.to_search(operator, named_device(device), policy)
        if (mode is None or workload.build().mode == mode) and _serves(candidate, workload, device)
    ]
    if not found:
        raise SourceError(f"{op}: {candidate} serves no workload on {device}")
    return found


def _serves(candidate: Candidate, workload: Workload, device: str) -> bool:
    route, config = candidate.bind()
    key = plan.key_of(candidate.operator(), workload, named_device(device))
    return route.declines(key, config) is None


def _at_level(workloads: list[Workload], level: str) -> list[Workload]:
    if level == "smoke":
        return workloads[:1]
    if level == "quick":
        return [workloads[0], workloads[-1]] if len(workloads) > 1 else workloads
    return workloads[::2] if level == "stride" else workloads


@click.command()
@json_option
@command
def doctor(terminal: Terminal) -> int:
    """What this machine has for measuring, and what each missing piece costs."""
    found = findings()
    width = max(len(f.what) for f in found)
    lines = [f"{'ok' if f.is_well else '--'}  {f.what:{width}}  {f.found}" for f in found]
    terminal.result({"findings": [f._asdict() for f in found]}, "\n".join(lines))
    return 0


@click.command("prebuild")
@op_option
@click.option("--device", required=True, help="Product or architecture, e.g. h200 or sm100.")
@click.option("--route", "routes", multiple=True, help="Only this route; repeatable.")
@click.option("--limit", type=click.IntRange(1), help="At most so many configs of each route.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at a time; default: one a core.")
@click.option("--out", required=True, type=ANY_PATH, help="Folder; FASTKERNELS_CACHE names it.")
@json_option
@command
def prebuild_command(
    op: str,
    device: str,
    routes: Sequence[str],
    limit: int | None,
    jobs: int | None,
    out: Path,
    terminal: Terminal,
) -> int:
    """Compile candidates on a machine without a GPU, for a machine without a compiler."""
    pairs = prebuild.candidates(plan.operator_of(op), device, routes)
    if limit is not None:
        taken: Counter[str] = Counter()
        pairs = [p for p in pairs if (taken.update([p[0].name]), taken[p[0].name] <= limit)[1]]
    summary = prebuild.build(pairs, device, out, jobs=jobs, say=terminal.say)
    document = {**summary._asdict(), "failed": [str(failed) for failed in summary.failed]}
    terminal.result(document, str(summary))
    return REJECTED if summary.failed else 0
