"""What every route of every operator must hold, as functions that pytest parametrises.

Each takes `(operator, route, case, device)` and raises AssertionError with one line that reproduces
the failure. A new route passes through them by being listed in its operator's `ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastkernels import catalog
from fastkernels.core import dispatch
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import key_from_axes
from fastkernels.core.route import Operator, Route
from fastkernels.ops._shared.cases import Case
from fastkernels.testing import hostile
from fastkernels.testing.compare import as_tuple, clone, judge, run_case, same_bits

LISTS = ("CORRECTNESS", "CORNER", "CONTEST", "SERVING")


def cases(operator: Operator, name: str) -> tuple[Case, ...]:
    """One of an operator's lists of cases."""
    found: tuple[Case, ...] = getattr(catalog.module(operator.name, "inputs"), name)
    return found


def pairs(operator: Operator, name: str, device: DeviceInfo) -> Iterator[tuple[Route, Case]]:
    """Every (route, case) of a list that the route serves on `device`."""
    for case in cases(operator, name):
        key = key_from_axes(operator.spec, case.axes, device, case.mode)
        for route in operator.routes:
            if route.declines(key, route.default_config) is None:
                yield route, case


def check_oracle(
    operator: Operator,
    route: Route,
    case: Case,
    device: str,
    expect: Callable[[Any], Any] | None = None,
) -> None:
    """The result is within our tolerances, and within the official ones on contest draws. `expect`
    stands in for the oracle."""
    report = run_case(operator, case, route, device, expect=expect)
    assert report.ok, str(report)


def check_given_outputs(
    operator: Operator, route: Route, case: Case, device: str, layout: str
) -> None:
    """Poisoned outputs between guard bytes are written completely and nowhere else, inputs keep
    their bits, and the result is the same as with allocated outputs."""
    inputs = _inputs(operator, case, device)
    pristine = clone(inputs)
    spec = operator.spec
    updates = case.mode in ("inplace", "pool")
    wanted = spec.outputs[:1] if updates else spec.outputs
    axes = all_axes(operator, case)
    guards = hostile.guarded_outputs(wanted, axes, device, layout)
    watch = hostile.Watch(spec, inputs)
    out: Any = tuple(guard.tensor for guard in guards)
    with dispatch.force_route(operator, route.name):
        result = as_tuple(
            operator.function(**inputs._asdict(), out=out[0] if len(out) == 1 else out)
        )
    for guard, tensor in zip(guards, result, strict=False):
        assert tensor is guard.tensor, f"{spec.name}: out {guard.name!r} was not returned itself"
        guard.assert_intact()
    if updates:
        assert result[1] is inputs.state, f"{spec.name}: state was not returned itself"
    watch.assert_unchanged(except_for=spec.updated if updates else "")
    report = judge(operator, route, route.default_config, case, pristine, result)
    assert report.ok, str(report)


def check_fresh_outputs(operator: Operator, route: Route, case: Case, device: str) -> None:
    """Two calls return tensors of their own; the second leaves the first result's bits alone; equal
    inputs give equal bits."""
    inputs = _inputs(operator, case, device)
    with dispatch.force_route(operator, route.name):
        first = as_tuple(operator.function(**clone(inputs)._asdict()))
        kept = tuple(tensor.clone() for tensor in first)
        second = as_tuple(operator.function(**clone(inputs)._asdict()))
    for output, a, b, before in zip(operator.spec.outputs, first, second, kept, strict=True):
        where = f"{operator.name}: {output.name!r} of {case}"
        assert same_bits(a, before), f"{where} changed in a later call"
        assert a.numel() == 0 or a.data_ptr() != b.data_ptr(), f"{where} shares memory with another"
        assert same_bits(a, b), f"{where} differs between two calls"


def _inputs(operator: Operator, case: Case, device: str) -> Any:
    return catalog.module(operator.name, "inputs").make_inputs(case, torch.device(device))


def all_axes(operator: Operator, case: Case) -> dict[str, int]:
    spec = operator.spec
    axes = {axis.name: axis.value for axis in spec.axes if axis.value is not None} | case.axes
    for axis in spec.axes:
        if axis.derived is not None:
            axes[axis.name] = axis.derived.value(axes)
    return axes
