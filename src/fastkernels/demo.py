"""`fastkernels demo`: contest workloads of every operator, run, timed, judged by the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.testing.compare import as_tuple, judge
from fastkernels.testing.record import Measurement
from fastkernels.testing.timing import time_call

# The largest contest workload of the axis that fits a demonstration on two CPU cores, oracle
# included.
CPU_LIMITS = {"moe_fp8_block_scale": ("seq_len", 901)}

Progress = Callable[[str], None]


def chosen_cases(operator: Operator, device: torch.device) -> tuple[Case, ...]:
    """The smallest, the median and the largest contest workload that fits the device."""
    contest: tuple[Case, ...] = catalog.module(operator.name, "inputs").CONTEST
    axis, limit = CPU_LIMITS.get(operator.name, ("", 0))
    if device.type == "cpu" and axis:
        contest = tuple(case for case in contest if case.axes[axis] <= limit)
    names = operator.spec.variable_axes
    ordered = sorted(contest, key=lambda case: [case.axes[name] for name in names])
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]


def plan(operators: tuple[Operator, ...], device: torch.device) -> list[tuple[Operator, Case]]:
    return [(op, case) for op in operators for case in chosen_cases(op, device)]


def measure(
    operator: Operator, case: Case, device: torch.device, progress: Progress
) -> Measurement:
    """Draw, call, time and judge one workload on the route that dispatch chooses."""
    progress("drawing inputs")
    inputs = catalog.module(operator.name, "inputs").make_inputs(case, device)

    def call() -> Any:
        return operator.function(**inputs._asdict())

    progress("running")
    with dispatch.attest() as served:
        outputs = as_tuple(call())
    kept = tuple(output.clone() for output in outputs)
    ((key, selection),) = served
    timing = time_call(call, device)
    progress("checking against the oracle")
    report = judge(operator, selection.route, selection.config, case, inputs, kept)
    reason = dispatch.explain(operator, key).reason
    return Measurement.of(report, reason, dataclasses.asdict(selection.config), timing)
