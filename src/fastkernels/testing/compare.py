"""Running one case on one route and judging it, at our tolerances and the official ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.problem import dtype_name
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.ops._shared.compare import Error


@dataclass(frozen=True)
class Report:
    """The verdict on one call, with everything that reproduces it."""

    op: str
    route: str
    config: Any
    case: Case
    device: str
    errors: tuple[Error, ...]
    official: tuple[Error, ...]

    @property
    def ok(self) -> bool:
        return all(error.ok for error in (*self.errors, *self.official))

    @property
    def nearest(self) -> Error:
        """The error nearest its limit."""
        return max(self.errors, key=_closeness)

    def __str__(self) -> str:
        lines = [
            f"{self.op} route={self.route} config={self.config} device={self.device} {self.case}"
        ]
        lines += [f"  ours      {error}" for error in self.errors]
        lines += [f"  official  {error}" for error in self.official]
        return "\n".join(lines)


def _closeness(error: Error) -> float:
    if error.value != error.value:
        return float("inf")
    return error.value / error.limit if error.limit else (error.value and float("inf"))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """An operator's result as a tuple of tensors."""
    return result if isinstance(result, tuple) else (result,)


def judge(
    operator: Operator,
    route: Route,
    config: Any,
    case: Case,
    inputs: Any,
    outputs: tuple[torch.Tensor, ...],
    expect: Callable[[Any], Any] | None = None,
) -> Report:
    """Compare outputs with the oracle, or with what `expect` makes of the inputs. `inputs` must be
    as they were before the call.

    The official tolerances are checked on inputs drawn as the contest draws them (a case with a
    `source`); elsewhere they do not apply.
    """
    for output, tensor in zip(operator.spec.outputs, outputs, strict=True):
        assert dtype_name(tensor.dtype) in output.dtypes, f"{output.name} is {tensor.dtype}"
    if expect is None:
        expect = catalog.module(operator.name, "reference").reference
    expected = expect(inputs)
    return Report(
        operator.name,
        route.name,
        config,
        case,
        str(outputs[0].device),
        tuple(expected.judge(outputs)),
        tuple(expected.judge_official(outputs)) if case.source else (),
    )


def run_case(
    operator: Operator,
    case: Case,
    route: Route | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    expect: Callable[[Any], Any] | None = None,
) -> Report:
    """Make a case's inputs, call the public function (on `route`, or dispatched), judge it."""
    make_inputs = catalog.module(operator.name, "inputs").make_inputs
    inputs = make_inputs(case, device)
    pristine = clone(inputs)
    with dispatch.attest() as served:
        if route is None:
            outputs = as_tuple(operator.function(**inputs._asdict()))
        else:
            with dispatch.force_route(operator, route.name, config):
                outputs = as_tuple(operator.function(**inputs._asdict()))
    ((_, selection),) = served
    return judge(operator, selection.route, selection.config, case, pristine, outputs, expect)


def clone(inputs: Any) -> Any:
    """A copy of every tensor argument, strides kept."""
    return type(inputs)(*(_clone(x) if isinstance(x, torch.Tensor) else x for x in inputs))


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality, NaN payloads and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # A copy: a view of one element may keep a stride that `view` refuses.
    a, b = (t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (a, b))
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
