"""Rows on a GPU: judged first, then timed with CUPTI beside peers and floor, on a cold L2."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import facts, floor
from bench.peers import TOLERANCE, Found, Peer
from bench.progress import Progress
from bench.sets import SETS, Sets, Verdict, check, forced, num_sets
from bench.summary import finite, summarise
from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import cupti, timing
from fastkernels.testing.compare import as_tuple, clone
from fastkernels.testing.workloads import Workloads

OURS, ADAPTED, ROUTE = "ours", "adapted:", "route:"
PROTOCOL = {
    "timer": "cupti", "l2": "cold", "order": "interleaved", "statistic": "median",
    "inputs": f"fresh pool of {SETS}",
}  # fmt: skip
HOST = (
    "host_us (outputs allocated) and host_out_us (outputs given): microseconds until an eager call"
    " returns, without synchronisation, no profiler attached, in inference mode, without garbage"
    " collection; median of {rounds} rounds over all (axes, mode), each the median of 3 batches of"
    " up to {calls} calls (fewer where these take 10 ms, a single batch where one call does) after"
    " 10 that are not counted; copied to the rows of it; not of the gap list"
)
HOST_BATCHES = 3
# Rows around a table's boundaries, whose host time is that of their neighbours.
UNHOSTED = "gap"
# A GPU that falls further behind slows a launch down.
LONGEST_BATCH_S = 0.01
LONGEST_GROWTH_S = 20.0


class RowFailed(Exception):
    """A row that is not published, and why."""


@dataclass(frozen=True)
class Options:
    """What to measure, and how thoroughly. `trials`: judged calls on fresh draws before timing.
    `sets`: input sets that calls take in turn, each of them judged. `variants`: beside the route
    that serves a row, each other one with its default config."""

    device: torch.device
    iterations: int = 30
    trials: int = 5
    budget_s: float = 1e9
    sets: int = SETS
    host_rounds: int = 7
    host_calls: int = 200
    growth_calls: int = 10_000
    variants: bool = False


class _HostCalls(NamedTuple):
    """Calls of one (axes, mode) by name, each with how many make a batch."""

    label: str
    calls: dict[str, tuple[Callable[[], object], int]]


class _Judged(NamedTuple):
    """A route or peer beside ours, ready to be timed."""

    variant: cupti.Variant
    verdict: Verdict
    config: dict[str, Any] | None = None  # a route's
    adapted: cupti.Variant | None = None  # a peer's, from our inputs on
    is_timed: bool = True


@dataclass
class Bench:
    """One run over an operator's rows."""

    operator: Operator
    work: Workloads
    peers: Found
    options: Options
    say: Callable[[str], None]
    host: dict[Any, dict[str, Any]] = field(default_factory=dict)
    growth: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)
    table: str | None = None
    started: float = field(default_factory=time.monotonic)
    progress: Progress | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    # ---- host times, without a profiler ---------------------------------------------------------

    def measure_host(self, cases: Sequence[Case]) -> None:
        """Once per (axes, mode), all in turn over several rounds: a host is slow for a while rather
        than for a call. What fails here fails again, and is recorded, with its row."""
        timed: dict[Any, _HostCalls] = {}
        for case in cases:
            if _identity(case) in timed:
                continue
            try:
                timed[_identity(case)] = self._host_calls(case)
            except Exception as error:
                torch.cuda.synchronize(self.options.device)  # raises if the device is lost
                self.say(f"host {case.axes} {case.mode}: {cupti.describe(error)}")
        synchronize = partial(torch.cuda.synchronize, self.options.device)
        samples: dict[Any, dict[str, list[float]]] = {}
        with torch.inference_mode():
            for _ in range(self.options.host_rounds):
                for identity, each in timed.items():
                    for name, (call, count) in tuple(each.calls.items()):
                        try:
                            batches = HOST_BATCHES if count > 1 else 1
                            us = timing.host_us(call, synchronize, count, batches)
                        except Exception as error:
                            synchronize()  # raises if the device is lost
                            del each.calls[name]
                            self.say(f"host of {name}, {each.label}: {cupti.describe(error)}")
                        else:
                            samples.setdefault(identity, {}).setdefault(name, []).append(us)
        for identity, found in samples.items():
            medians = {name: round(statistics.median(each), 2) for name, each in found.items()}
            if not {"host_us", "host_out_us"} <= timed[identity].calls.keys():
                continue
            ours = {name: medians.pop(name) for name in ("host_us", "host_out_us")}
            self.host[identity] = {**ours, "peers": medians}
            self.say(f"host {timed[identity].label}: {ours}, {medians}")
        try:
            self.growth = self._growth(cases)
        except Exception as error:
            torch.cuda.synchronize(self.options.device)
            self.say(f"host growth: {cupti.describe(error)}")

    def _host_calls(self, case: Case) -> _HostCalls:
        """Ours with outputs allocated and given, and each peer's; every one of them was called."""
        work, function = self.work, self.operator.function
        inputs = work.fresh_inputs(case, case.seed, self.options.device)
        live, out = work.live(inputs)._asdict(), work.outputs(inputs)
        _, selection = _served(partial(function, **live))
        call = _as_written(self.operator, live)
        calls: dict[str, Callable[[], object]] = {
            "host_us": call,
            "host_out_us": partial(call, out=out if len(out) > 1 else out[0]),
        }
        for peer in self.peers.peers:
            if case.mode not in peer.modes:
                continue
            try:
                calls[peer.name] = peer.bind(inputs, case.mode).run
                calls[peer.name]()
            except Exception as error:
                calls.pop(peer.name, None)
                torch.cuda.synchronize(self.options.device)
                self.say(f"host of {peer.name}, {case.axes}: {cupti.describe(error)}")
        with torch.inference_mode():
            counted = {name: (each, self._batch(each)) for name, each in calls.items()}
        return _HostCalls(f"{_sizes(case)} {case.mode} ({selection.route.name})", counted)

    def _batch(self, call: Callable[[], object]) -> int:
        """How many calls make a batch: as many as `LONGEST_BATCH_S` has room for, launches and GPU
        together."""
        return min(self.options.host_calls, int(LONGEST_BATCH_S / self._seconds(call)) + 1)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of one call, launch and GPU, after it was warmed up; a slow one needs no second look."""
        for calls in (1, 2, 20, 20):
            torch.cuda.synchronize(self.options.device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize(self.options.device)
            seconds = (time.perf_counter() - start) / calls
            if calls == 2 and seconds > 10 * LONGEST_BATCH_S:
                break
        return seconds

    def _growth(self, cases: Sequence[Case]) -> dict[str, Any]:
        case = min(cases, key=lambda case: self.work.moved_bytes(case))
        inputs = self.work.live(self.work.fresh_inputs(case, case.seed, self.options.device))
        call = _as_written(self.operator, inputs._asdict())
        device = self.options.device
        with torch.inference_mode():
            affordable = int(LONGEST_GROWTH_S / self._seconds(call))
            grown = timing.host_growth(
                call,
                partial(torch.cuda.synchronize, device),
                partial(torch.cuda.memory_allocated, device),
                min(self.options.growth_calls, max(50, affordable)),
            )
        found = dataclasses.asdict(grown) | {"axes": case.axes, "mode": case.mode}
        self.say(f"host over {grown.calls} calls: {found}")
        return found

    # ---- rows -----------------------------------------------------------------------------------

    def measure(
        self, rows: Sequence[tuple[str, Case]], recorder: cupti.Recorder, save: Callable[[], None]
    ) -> None:
        progress = self.progress
        if progress is None:
            progress = Progress({self.operator.name: len(rows)})
            progress.start(self.operator.name)
        progress.ready()
        for number, (listed, case) in enumerate(rows, 1):
            name = f"{listed} {_sizes(case)} {case.mode}"
            if self.elapsed() > self.options.budget_s:
                self._miss(listed, case, "time budget used up")
                progress.row()
                continue
            try:
                row = self.row(listed, case, recorder)
            except Exception as error:
                torch.cuda.synchronize(self.options.device)  # raises if the device is lost
                why = str(error) if isinstance(error, RowFailed) else cupti.describe(error)
                self._miss(listed, case, why)
                self.say(f"{progress.row()} {name}: MISSING: {why}")
                continue
            self.rows.append(row)
            self.say(f"{progress.row()} {name}: {_line(row)}")
            if number % 20 == 0:
                save()

    def _miss(self, listed: str, case: Case, why: str) -> None:
        self.missing.append(
            {"list": listed, "id": _id(case), "axes": case.axes, "mode": case.mode, "why": why}
        )

    def row(self, listed: str, case: Case, recorder: cupti.Recorder) -> dict[str, Any]:
        device, work = self.options.device, self.work
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        count = num_sets(work, case, free, self.options.sets)
        if count == 0:
            raise RowFailed(f"needs more than the {free / 1e9:.0f} GB that are free")
        own = work.own_inputs(case, device)
        drawn = [work.fresh_inputs(case, case.seed + i, device) for i in range(1, count)]
        sets = Sets(work, case, [own, *drawn])
        verdict = Verdict()
        key, selection = self._gate(case, sets, verdict)
        variants = {OURS: sets.variant(self.operator.function, verdict)}
        judged, left_out = self._peers(case, sets)
        for name, peer in judged.items():
            variants[name] = peer.variant
            if peer.adapted is not None:
                variants[ADAPTED + name] = peer.adapted
        routes = self._routes(key, selection, sets) if self.options.variants else {}
        variants |= {ROUTE + name: each.variant for name, each in routes.items() if each.is_timed}
        variants |= self._floors(case, len(sets))
        timings, errors = cupti.measure(
            variants, recorder, iterations=self.options.iterations, seed=case.seed
        )
        if OURS not in timings:
            raise RowFailed(errors[OURS])
        for name, why in errors.items():
            left_out[name] = why
            self.say(f"{name} {case.axes} {case.mode}: {why}")
        host = self.host.get(_identity(case), {"peers": {}})
        if "host_us" not in host and listed != UNHOSTED:
            raise RowFailed("its host time could not be measured")
        ours = timings[OURS]
        floors = {
            name.removeprefix(floor.PREFIX): each.us.median
            for name, each in timings.items()
            if name.startswith(floor.PREFIX)
        }
        fastest = min(floors, key=lambda name: floors[name], default=None)
        kind = "update" if work.updates(case) else "copy"
        bytes_ = work.moved_bytes(case)
        row = {
            "list": listed,
            "id": _id(case),
            "axes": case.axes,
            "mode": case.mode,
            "work": work.details(case),
            "route": selection.route.name,
            "config": dataclasses.asdict(selection.config),
            "reason": selection.reason,
            "us": ours.us.to_dict(),
            "span_us": round(ours.span.median, 3),
            "kernels": ours.kernels,
            "kernel_names": list(ours.names),
            "host_us": host.get("host_us"),
            "host_out_us": host.get("host_out_us"),
            "bytes": bytes_,
            "tb_per_s": round(bytes_ / ours.us.median / 1e6, 3),
            "floor_us": round(floors[fastest], 3) if fastest else None,
            "floor": f"elementwise {kind} kernel of the same bytes, same run: {fastest}",
            "floors": {name: round(us, 3) for name, us in floors.items()},
            "error": verdict.error,
            "errors": verdict.errors,
            "trials": verdict.trials,
            "failures": verdict.failures,
            "judged_by": ("oracle, " if work.oracle(case) else "") + "float64 on the GPU",
            "peers": {
                peer.name: self._peer(peer, case, judged, timings, left_out, host)
                for peer in self.peers.peers
                if case.mode in peer.modes
            },
        }  # fmt: skip
        if self.options.variants:
            own = _Judged(variants[OURS], verdict, dataclasses.asdict(selection.config))
            row["variants"] = {selection.route.name: _route(own, ours)} | {
                name: _route(each, timings.get(ROUTE + name)) for name, each in routes.items()
            }
        return row

    def _gate(
        self, case: Case, sets: Sets, verdict: Verdict
    ) -> tuple[ProblemKey, dispatch.Selection]:
        """Our results on the row's own inputs (by the oracle where it is affordable), on the other
        sets, and on fresh draws. Raises RowFailed."""
        function, work = self.operator.function, self.work
        variant = sets.variant(function, verdict)
        given, result = clone(sets.inputs[0]), list[Any]()
        key, selection = _served(lambda: result.append(function(**given._asdict())))
        expected, outputs = sets.expected[0], as_tuple(result[0])
        if work.oracle(case):
            expected = catalog.module(self.operator.name, "reference").reference(sets.inputs[0])
        official = expected.judge_official(outputs) if case.source else []
        verdict.add([*expected.judge(outputs), *official])
        for which in range(len(sets)):
            check(variant, which)
        for trial in range(self.options.trials):
            seed = case.seed + 1000 + trial
            fresh = Sets(work, case, [work.fresh_inputs(case, seed, self.options.device)])
            check(fresh.variant(function, verdict), 0)
        if verdict.failures:
            raise RowFailed(f"wrong: {verdict}: {verdict.errors}")
        if selection.table is not None:
            self.table = selection.table.path
        return key, selection

    def _peers(self, case: Case, sets: Sets) -> tuple[dict[str, _Judged], dict[str, str]]:
        """Peers that compute this row's numbers, ready to be timed, and why others are left out."""
        judged: dict[str, _Judged] = {}
        left_out: dict[str, str] = {}
        for peer in self.peers.peers:
            if case.mode not in peer.modes:
                continue
            verdict = Verdict(TOLERANCE)
            try:
                found = _bound(peer, case, sets, verdict)
                for which in range(len(sets)):
                    check(found.variant, which)
            except Exception as error:
                torch.cuda.synchronize(self.options.device)
                left_out[peer.name] = cupti.describe(error)
                self.say(f"{peer.name} {case.axes} {case.mode}: {left_out[peer.name]}")
                continue
            judged[peer.name] = found
        return judged, left_out

    def _routes(
        self, key: ProblemKey, selection: dispatch.Selection, sets: Sets
    ) -> dict[str, _Judged]:
        """Every other route that takes the row, judged once; one that raises is said and left
        out."""
        judged: dict[str, _Judged] = {}
        for route in self.operator.routes:
            config = route.default_config
            if route is selection.route or route.declines(key, config) is not None:
                continue
            verdict = Verdict()
            variant = sets.variant(forced(self.operator, route, config), verdict)
            try:
                check(variant, 0)
            except Exception as error:
                torch.cuda.synchronize(self.options.device)  # raises if the device is lost
                self.say(f"{route.name} {dict(key.axes)}: {cupti.describe(error)}")
                continue
            is_timed = route.language != "torch"  # hundreds of launches, known to be slow
            judged[route.name] = _Judged(
                variant, verdict, dataclasses.asdict(config), is_timed=is_timed
            )
        return judged

    def _floors(self, case: Case, count: int) -> dict[str, cupti.Variant]:
        is_update = self.work.updates(case)
        pairs = floor.buffers(self.work.moved_bytes(case), is_update, self.options.device, count)
        return {
            floor.PREFIX + name: cupti.Variant([partial(kernel, *pair) for pair in pairs])
            for name, kernel in floor.candidates(is_update).items()
        }

    @staticmethod
    def _peer(
        peer: Peer,
        case: Case,
        judged: dict[str, _Judged],
        timings: dict[str, cupti.Timing],
        left_out: dict[str, str],
        host: dict[str, Any],
    ) -> dict[str, Any]:
        """A peer's entry; without `sum_us` where it raised or was wrong, so that no ratio counts
        it."""
        entry: dict[str, Any] = {"mode": peer.modes[case.mode], "adapted": peer.adapted}
        verdict = judged[peer.name].verdict if peer.name in judged else Verdict()
        error = verdict.error
        entry["error"] = error["value"] if error else None
        entry["errors"] = verdict.errors
        if verdict.failures:
            return entry | {"left_out": f"wrong: {verdict} (limits times {verdict.allowance:g})"}
        if peer.name not in timings:
            return entry | {"left_out": left_out.get(peer.name, "not timed")}
        measured = timings[peer.name]
        return {
            "sum_us": round(measured.us.median, 3),
            "span_us": round(measured.span.median, 3),
            "host_us": host["peers"].get(peer.name),
            **entry,
            "us": measured.us.to_dict(),
            "kernels": measured.kernels,
            **_adapted(timings.get(ADAPTED + peer.name)),
        }

    # ---- the file -------------------------------------------------------------------------------

    def result(
        self, stamp: Path | None, clocks: Sequence[int | None], tests: dict[str, Any]
    ) -> dict[str, Any]:
        data = {
            "schema": 1,
            "op": self.operator.name,
            "spec_digest": self.operator.spec.digest,
            "device": facts.device(self.options.device, clocks),
            "code": facts.code(stamp, self.table),
            "versions": facts.versions(self.peers.versions),
            "protocol": PROTOCOL
            | {
                "inputs": f"fresh pool of {self.options.sets}",
                "iterations": self.options.iterations,
            },
            "created": facts.now(),
            "host": {
                "how": HOST.format(rounds=self.options.host_rounds, calls=self.options.host_calls),
                "growth": self.growth,
            },
            "tests": tests,
            "rows": self.rows,
            "missing": self.missing,
            "peers_left_out": self.peers.left_out,
            "summary": summarise(self.rows),
        }
        found: dict[str, Any] = finite(data)
        return found


def _bound(peer: Peer, case: Case, sets: Sets, verdict: Verdict) -> _Judged:
    calls = [peer.bind(inputs, case.mode) for inputs in sets.inputs]

    def restore(which: int, is_checked: bool) -> None:
        calls[which].restore()

    adapted = [call.adapt_and_run for call in calls if call.adapt_and_run is not None]
    return _Judged(
        cupti.Variant(
            [call.run for call in calls],
            restore,
            lambda which: verdict.add(sets.judge(which, calls[which].outputs())),
        ),
        verdict,
        adapted=cupti.Variant(adapted, restore) if adapted else None,
    )


def _adapted(measured: cupti.Timing | None) -> dict[str, float]:
    """What of a peer's entry is about calls that start from our inputs."""
    if measured is None:
        return {}
    return {
        "adapted_sum_us": round(measured.us.median, 3),
        "adapted_span_us": round(measured.span.median, 3),
    }


def _route(judged: _Judged, measured: cupti.Timing | None) -> dict[str, Any]:
    """A route's entry; without times where it was judged alone."""
    entry: dict[str, Any] = {"config": judged.config}
    if measured is not None:
        entry |= {
            "us": measured.us.to_dict(),
            "span_us": round(measured.span.median, 3),
            "kernels": measured.kernels,
        }
    verdict = judged.verdict
    return entry | {
        "errors": verdict.errors, "trials": verdict.trials, "failures": verdict.failures,
    }  # fmt: skip


def _as_written(operator: Operator, arguments: dict[str, Any]) -> partial[Any]:
    """The call as a person writes it: the definition's arguments by position, options by name where
    they differ from the default."""
    spec = operator.spec
    options = {option.name: arguments[option.name] for option in spec.options}
    return partial(
        operator.function,
        *(arguments[argument.name] for argument in spec.inputs),
        **{
            name: value
            for name, value in options.items()
            if value is not None and value is not False
        },
    )


def _served(call: Callable[[], object]) -> tuple[ProblemKey, dispatch.Selection]:
    """What served a call."""
    with dispatch.attest() as served:
        call()
    return served[-1]


def _identity(case: Case) -> Any:
    return case.mode, tuple(sorted(case.axes.items()))


def _id(case: Case) -> str:
    return case.source or case.name


def _sizes(case: Case) -> str:
    return " ".join(f"{name}={size}" for name, size in case.axes.items())


def _line(row: dict[str, Any]) -> str:
    spread = row["us"]
    text = f"{row['route']} {spread['median']} us ({spread['p10']}..{spread['p90']})"
    if row["floor_us"]:
        ratio = spread["median"] / row["floor_us"]
        text += f", {ratio:.3f} of the floor {row['floor_us']} ({row['floor'].rpartition(': ')[2]})"
    for name, peer in row["peers"].items():
        if peer.get("sum_us"):
            text += f", {name} {peer['sum_us']} (x{peer['sum_us'] / spread['median']:.3f})"
        else:
            text += f", {name} left out: {peer['left_out']}"
    error = row["error"]
    text += f", {error['metric']} {error['value']:.2g} of {error['limit']:.2g}"
    return f"{text}, {row['kernels']} kernels"
