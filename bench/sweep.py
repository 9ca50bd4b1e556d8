"""Every route and config on every problem, interleaved: what a table is made from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import facts
from bench.gpu import PROTOCOL, Options
from bench.sets import Sets, Verdict, check, forced, num_sets
from bench.summary import finite
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import cupti
from fastkernels.testing.workloads import Workloads

Choice = tuple[Route, Any]

# A config so many times slower than the best of a problem in a first look is not timed there.
HOPELESS = 10.0


def choices(operator: Operator, path: Path | None) -> list[Choice]:
    """(route, config) of a file (route to a list of knobs, missing ones as in the default; null:
    all candidates), or all candidates of every route that is compiled."""
    if path is not None:
        wanted: dict[str, Any] = json.loads(path.read_text())
    else:
        wanted = {route.name: None for route in operator.routes if route.language != "torch"}
    found: list[Choice] = []
    for name, knobs in wanted.items():
        route = operator.route(name)
        if route is None:
            raise ValueError(f"{operator.name} has no route {name!r}")
        configs = candidates(route) if knobs is None else [_config(route, each) for each in knobs]
        found += [(route, config) for config in dict.fromkeys(configs)]
    return found


def candidates(route: Route) -> Iterator[Any]:
    """The default, then every combination of candidate values that is a legal config."""
    yield route.default_config
    names = list(route.candidates)
    for values in itertools.product(*(route.candidates[name] for name in names)):
        try:
            yield _config(route, dict(zip(names, values, strict=True)))
        except ValueError:
            continue


def _config(route: Route, knobs: dict[str, Any]) -> Any:
    return route.make_config({**dataclasses.asdict(route.default_config), **knobs})


def label(choice: Choice) -> str:
    route, config = choice
    return f"{route.name} {json.dumps(dataclasses.asdict(config))}"


@dataclass
class Sweep:
    """One run over problems."""

    operator: Operator
    work: Workloads
    choices: Sequence[Choice]
    options: Options
    say: Callable[[str], None]
    elapsed: Callable[[], float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def measure(
        self,
        problems: Sequence[tuple[str, Case]],
        recorder: cupti.Recorder,
        save: Callable[[], None],
    ) -> None:
        device = self.options.device
        for number, (listed, case) in enumerate(problems, 1):
            name = f"[{number}/{len(problems)} {self.elapsed():.0f} s] {case.name} {case.mode}"
            if self.elapsed() > self.options.budget_s:
                self._leave_out(case, "time budget used up")
                continue
            before = len(self.rows)
            try:
                self._problem(listed, case, recorder)
            except Exception as error:
                torch.cuda.synchronize(device)  # raises if the device is lost
                self._leave_out(case, cupti.describe(error))
                self.say(f"{name}: LEFT OUT: {cupti.describe(error)}")
                continue
            self.say(f"{name}: {_line(self.rows[before:])}")
            save()

    def _leave_out(self, case: Case, why: str, choice: Choice | None = None) -> None:
        entry: dict[str, Any] = {"id": case.name, "axes": case.axes, "mode": case.mode, "why": why}
        if choice is not None:
            route, config = choice
            entry |= {"route": route.name, "config": dataclasses.asdict(config)}
        self.left_out.append(entry)

    def _problem(self, listed: str, case: Case, recorder: cupti.Recorder) -> None:
        device, work = self.options.device, self.work
        torch.cuda.empty_cache()
        count = num_sets(work, case, torch.cuda.mem_get_info(device)[0])
        if count == 0:
            self._leave_out(case, "does not fit into the device's memory")
            return
        drawn = [work.fresh_inputs(case, 1 + i, device) for i in range(count)]
        sets = Sets(work, case, drawn)
        variants: dict[str, cupti.Variant] = {}
        verdicts: dict[str, Verdict] = {}
        seconds: dict[str, float] = {}
        by_label = {label(choice): choice for choice in self.choices}
        for name, (route, config) in by_label.items():
            verdict = Verdict()
            variant = sets.variant(forced(self.operator, route, config), verdict)
            started = self.elapsed()
            try:
                check(variant, 0)
            except Exception as error:
                torch.cuda.synchronize(device)
                self._leave_out(case, cupti.describe(error), (route, config))
                continue
            if self.elapsed() - started > 2:
                self.say(f"  {name}: ready after {self.elapsed() - started:.0f} s")
            if verdict.failures:
                self.say(f"  WRONG: {name} on {case.name} {case.mode}: {verdict.errors}")
            variants[name], verdicts[name] = variant, verdict
            seconds[name] = self._seconds(variant)
        for name, each in seconds.items():
            if each > HOPELESS * min(seconds.values()) and not verdicts[name].failures:
                self.say(f"  {name}: not timed, takes {1e6 * each:.0f} us")
                del variants[name]
        timings, errors = cupti.measure(
            variants, recorder, iterations=self.options.iterations, seed=case.seed
        )
        for name, why in errors.items():
            self._leave_out(case, why, by_label[name])
        for name, timing in timings.items():
            self.rows.append(sweep_row(listed, case, by_label[name], timing, verdicts[name]))

    def _seconds(self, variant: cupti.Variant) -> float:
        """Wall clock of one call: what tells a factor of ten where that is worth something."""
        torch.cuda.synchronize(self.options.device)
        start = time.perf_counter()
        variant.calls[0]()
        torch.cuda.synchronize(self.options.device)
        return time.perf_counter() - start

    def result(self, stamp: Path | None, clocks: Sequence[int | None]) -> dict[str, Any]:
        data = {
            "schema": 1,
            "op": self.operator.name,
            "spec_digest": self.operator.spec.digest,
            "kind": "sweep",
            "device": facts.device(self.options.device, clocks),
            "code": facts.code(stamp),
            "versions": facts.versions({}),
            "protocol": PROTOCOL | {"iterations": self.options.iterations},
            "created": facts.now(),
            "rows": self.rows,
            "left_out": self.left_out,
        }
        found: dict[str, Any] = finite(data)
        return found


def sweep_row(
    listed: str, case: Case, choice: Choice, timing: cupti.Timing, verdict: Verdict
) -> dict[str, Any]:
    """One (problem, route, config); a wrong one is timed, too, and says so in `failures`."""
    route, config = choice
    return {
        "list": listed,
        "id": case.name,
        "axes": case.axes,
        "mode": case.mode,
        "route": route.name,
        "config": dataclasses.asdict(config),
        "us": timing.us.to_dict(),
        "span_us": round(timing.span.median, 3),
        "kernels": timing.kernels,
        "trials": verdict.trials,
        "failures": verdict.failures,
        "error": verdict.error,
    }


def _line(rows: Sequence[dict[str, Any]]) -> str:
    right = sorted((row for row in rows if not row["failures"]), key=lambda r: r["us"]["median"])
    best = "; ".join(f"{r['us']['median']} {r['route']} {r['config']}" for r in right[:3])
    return f"{len(right)} of {len(rows)} right; {best}"
