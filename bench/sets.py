"""The input sets of one problem on a GPU, what a call on each must give, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkernels.core import dispatch
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.ops._shared.compare import Error
from fastkernels.testing.compare import as_tuple
from fastkernels.testing.cupti import Variant
from fastkernels.testing.hostile import poison
from fastkernels.testing.workloads import Workloads

SETS = 4


def closeness(error: Error) -> float:
    """How far towards its limit an error is; above 1 is wrong."""
    if math.isnan(error.value):
        return math.inf
    if error.limit == 0:
        return math.inf if error.value else 0.0
    return error.value / error.limit


@dataclass
class Verdict:
    """What became of every judged call of one variant; `allowance` widens the limits."""

    allowance: float = 1.0
    trials: int = 0
    failures: int = 0
    worst: dict[tuple[str, str], Error] = field(default_factory=dict)

    def add(self, errors: Sequence[Error]) -> None:
        self.trials += 1
        self.failures += any(closeness(error) > self.allowance for error in errors)
        for error in errors:
            place = (error.output, error.metric)
            if place not in self.worst or closeness(error) > closeness(self.worst[place]):
                self.worst[place] = error

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [
            {"output": e.output, "metric": e.metric, "value": e.value, "limit": e.limit}
            for e in self.worst.values()
        ]

    @property
    def error(self) -> dict[str, Any] | None:
        """The one nearest its limit."""
        if not self.worst:
            return None
        nearest = max(self.worst.values(), key=closeness)
        return {
            "output": nearest.output, "metric": nearest.metric,
            "value": nearest.value, "limit": nearest.limit,
        }  # fmt: skip

    def __str__(self) -> str:
        worst = max((closeness(e) for e in self.worst.values()), default=0.0)
        return f"{self.failures} of {self.trials} wrong, {worst:.2g} of the limit"


class Sets:
    """Input sets of a problem, each with inputs that a call may overwrite, outputs to give, and the
    expected result."""

    def __init__(self, work: Workloads, case: Case, inputs: Sequence[Any]) -> None:
        self._work = work
        self.case = case
        self.inputs = list(inputs)
        self.live = [work.live(each) for each in inputs]
        self.outs = [work.outputs(each) for each in inputs]
        self.expected = [work.expect(each) for each in inputs]

    def __len__(self) -> int:
        return len(self.inputs)

    def prepare(self, which: int, is_checked: bool) -> None:
        """Fresh contents; before a checked call, outputs in which an element that nobody writes
        shows."""
        self._work.restore(self.live[which], self.inputs[which])
        if is_checked:
            for tensor in self.outs[which]:
                poison(tensor)

    def judge(self, which: int, result: tuple[torch.Tensor, ...]) -> list[Error]:
        found: list[Error] = self.expected[which].judge(result)
        return found

    def variant(self, call: Callable[..., Any], verdict: Verdict) -> Variant:
        """Our function as a variant; it is judged on what it returns."""
        last: list[Any] = [None]

        def bound(which: int) -> Callable[[], None]:
            inputs, out = self.live[which]._asdict(), self.outs[which]
            given = out if len(out) > 1 else out[0]

            def run() -> None:
                last[0] = call(**inputs, out=given)

            return run

        return Variant(
            [bound(which) for which in range(len(self))],
            self.prepare,
            lambda which: verdict.add(self.judge(which, as_tuple(last[0]))),
        )


def num_sets(work: Workloads, case: Case, free: int, most: int = SETS) -> int:
    """How many input sets fit, up to `most`; 0: none."""
    return next((n for n in range(most, 0, -1) if work.held_bytes(case, n) < 0.9 * free), 0)


def check(variant: Variant, which: int) -> None:
    """One judged call outside any measurement."""
    if variant.prepare is not None:
        variant.prepare(which, True)
    variant.calls[which]()
    if variant.check is not None:
        variant.check(which)


def forced(operator: Operator, route: Route, config: Any) -> Callable[..., Any]:
    """The operator's function, served by one route."""

    def call(**arguments: Any) -> Any:
        with dispatch.force_route(operator, route.name, config):
            return operator.function(**arguments)

    return call
