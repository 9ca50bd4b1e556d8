"""Specs against the contest definitions beside them, and case lists against the workloads."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from typing import Any

import pytest

import fastkernels
from fastkernels import catalog
from fastkernels.core.route import Operator
from fastkernels.core.spec import ScalarSpec, TensorSpec
from fastkernels.ops._shared.cases import contest_workloads
from fastkernels.testing import contracts

OPERATORS = pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)
WORKLOADS = {
    "gdn_decode": 54,
    "gdn_prefill": 100,
    "dsa_sparse_attention": 23,
    "dsa_topk_indexer": 128,
    "moe_fp8_block_scale": 19,
}


def definition(operator: Operator) -> dict[str, Any]:
    folder = resources.files(f"fastkernels.ops.{operator.name}")
    found: dict[str, Any] = json.loads(folder.joinpath("definition.json").read_text())
    return found


@OPERATORS
def test_the_spec_is_the_definitions_twin(operator: Operator) -> None:
    """Same axes with the same constants, same tensors in the same order, first dtype the same."""
    official, spec = definition(operator), operator.spec
    assert spec.definition == official["name"]
    for name, axis in official["axes"].items():
        ours = spec.axis[name]
        if axis["type"] == "const":
            sizes = {a.name: a.value for a in spec.axes if a.value is not None}
            value = ours.value if ours.derived is None else ours.derived.value(sizes)
            assert value == axis["value"], name
        else:
            assert ours.value is None, name
    assert [a.name for a in spec.inputs] == list(official["inputs"])
    for group, theirs in ((spec.inputs, official["inputs"]), (spec.outputs, official["outputs"])):
        for argument in group:
            entry = theirs[argument.name]
            if isinstance(argument, ScalarSpec):
                assert entry["shape"] is None
                assert entry["dtype"].startswith(argument.kind)
                continue
            assert list(argument.shape) == entry["shape"], argument.name
            assert argument.dtypes[0] == entry["dtype"], argument.name
            if entry.get("optional"):
                assert argument.optional, argument.name
    assert [o.name for o in spec.outputs] == list(official["outputs"])


@OPERATORS
def test_the_signature_is_the_spec(operator: Operator) -> None:
    """Definition arguments positional in order, options keyword-only, then out and workspace; the
    operator's Inputs carry the same names and defaults."""
    spec = operator.spec
    signature = inspect.signature(operator.function)
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    positional = [n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keywords = [n for n, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    assert positional == [a.name for a in spec.inputs]
    assert keywords == [*(a.name for a in spec.options), "out", "workspace"]
    problem = catalog.module(operator.name, "problem")
    assert list(problem.Inputs._fields) == [a.name for a in (*spec.inputs, *spec.options)]
    for name, default in problem.Inputs._field_defaults.items():
        assert signature.parameters[name].default == default, name
    for argument in spec.options:
        if isinstance(argument, ScalarSpec):
            assert signature.parameters[argument.name].default == argument.default
    assert getattr(fastkernels, operator.name) is operator.function
    assert operator.function.__doc__


@OPERATORS
def test_contest_lists_are_complete(operator: Operator) -> None:
    """Every recorded workload is a case, with its axes and its uuid."""
    workloads = contest_workloads(operator.name)
    cases = contracts.cases(operator, "CONTEST")
    assert len(cases) == len(workloads) == WORKLOADS.get(operator.name, len(workloads))
    for workload, case in zip(workloads, cases, strict=True):
        assert case.source == workload["uuid"]
        for axis, size in workload["axes"].items():
            derived = operator.spec.axis[axis].derived
            assert (case.axes[axis] if derived is None else derived.value(case.axes)) == size


@OPERATORS
@pytest.mark.parametrize("name", contracts.LISTS)
def test_cases_are_data_with_unique_names(operator: Operator, name: str) -> None:
    cases = contracts.cases(operator, name)
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.mode in operator.spec.modes
        hash(case)


@OPERATORS
def test_corner_lists_hold_what_they_promise(operator: Operator) -> None:
    """CORNER always holds empty, one, tail, strided, all-invalid and largest, where they exist."""
    names = " ".join(case.name for case in contracts.cases(operator, "CORNER"))
    wanted = {"empty", "one", "tail", "strided", "largest"}
    if operator.name not in ("gdn_decode", "moe_fp8_block_scale"):
        wanted.add("invalid")
    assert {word for word in wanted if word not in names} == set()


@OPERATORS
def test_every_accepted_size_is_written_down(operator: Operator) -> None:
    for axis in operator.spec.axes:
        assert axis.doc, axis.name
        assert axis.accepted()
    for tensor in operator.spec.tensors:
        assert isinstance(tensor, TensorSpec)
        assert all(name in operator.spec.axis for name in tensor.shape)


@OPERATORS
def test_gap_cases_surround_a_tables_boundaries(operator: Operator) -> None:
    """Seeded and repeatable, with sizes on both sides of each boundary."""
    from fastkernels.core import table

    inputs = catalog.module(operator.name, "inputs")
    axis = operator.spec.variable_axes[0]
    limits = "".join(f"{name} = [1, 64]\n" for name in operator.spec.variable_axes)
    boxes = [limits.replace(f"{axis} = [1, 64]", f"{axis} = {b}") for b in ([1, 16], [17, 64])]
    mode = f'mode = "{operator.spec.modes[0]}"\n'
    route = f'route = "{operator.safe_route.name}"\nconfig = {{}}\n'
    text = (
        f'schema = 1\nop = "{operator.name}"\nstatus = "unmeasured"\n'
        f'spec_digest = "{operator.spec.digest}"\n'
        '[device]\narch = "sm90"\nproduct = "NVIDIA H200"\nnum_sms = 132\n[provenance]\n[limits]\n'
        + limits
        + "".join(f"[[regime]]\n{mode}{box}{route}" for box in boxes)
        + f'[[fallback]]\nroute = "{operator.safe_route.name}"\nreason = "outside"\n'
    )
    parsed = table.parse(text, operator.spec)
    cases = inputs.gap_cases(parsed, seed=3)
    sizes = {case.axes[axis] for case in cases}
    assert {15, 16, 17, 18} <= sizes
    assert [c.axes for c in inputs.gap_cases(parsed, seed=3)] == [c.axes for c in cases]
    for case in cases:
        assert case.mode in operator.spec.modes
