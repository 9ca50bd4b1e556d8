"""Workloads of operators without a module of their own, and of cases that need the oracle."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.core.device import CPU as CPU_INFO
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import Case
from fastkernels.ops.gdn_decode.inputs import make_inputs
from fastkernels.testing import contracts, workloads
from fastkernels.testing.compare import as_tuple, clone, same_bits
from fastkernels.testing.workloads import gdn_decode
from fastkernels.testing.workloads.generic import Generic

CPU = torch.device("cpu")
CASES = [
    ("gdn_decode", "pool"),
    ("gdn_decode", "no-state"),
    ("gdn_prefill", "definition"),
    ("gdn_prefill", "inplace"),
    ("gdn_prefill", "pool"),
    ("dsa_topk_indexer", ""),
    ("dsa_sparse_attention", ""),
    ("moe_fp8_block_scale", ""),
]


def case_of(op: str, name: str) -> Case:
    cases = contracts.cases(catalog.operator(op), "CORRECTNESS")
    return next(case for case in cases if name in ("", case.name))


@pytest.mark.parametrize(("op", "name"), CASES)
def test_a_call_is_given_outputs_judged_and_undone(op: str, name: str) -> None:
    case, operator = case_of(op, name), catalog.operator(op)
    work: Any = Generic(operator)
    inputs = work.fresh_inputs(case, 7, CPU)
    pristine, live, out = clone(inputs), work.live(inputs), work.outputs(inputs)
    result = as_tuple(operator.function(**live._asdict(), out=out if len(out) > 1 else out[0]))
    errors = work.expect(inputs).judge(result)
    assert errors
    assert all(error.ok for error in errors), [str(error) for error in errors]
    assert len(result) == len(operator.spec.outputs)
    assert len(out) == len(result) - work.updates(case)
    work.restore(live, inputs)
    for now, before in zip((*live, *inputs), (*pristine, *pristine), strict=True):
        assert now is before or not isinstance(now, torch.Tensor) or same_bits(now, before)


def test_another_seed_draws_other_numbers() -> None:
    case, work = case_of("gdn_prefill", "definition"), workloads.load("gdn_prefill")
    own, same, other = (work.fresh_inputs(case, seed, CPU) for seed in (case.seed, case.seed, 99))
    drawn = work.own_inputs(case, CPU)
    assert torch.equal(own.q, drawn.q)
    assert torch.equal(own.q, same.q)
    assert not torch.equal(own.q, other.q)


def test_rows_are_the_operators_lists() -> None:
    operator = catalog.operator("gdn_prefill")
    work = Generic(operator)
    count = Counter(listed for listed, _ in work.rows(operator, CPU_INFO, operator.spec.modes))
    assert (count["contest"], count["serving"]) == (100, 6)
    assert sum(1 for _ in work.sweep_rows(operator.spec.modes)) == 106
    assert list(work.sweep_rows(("pool",))) == []


def test_bytes_are_those_of_the_functional_call() -> None:
    case: Any = case_of("gdn_decode", "definition-b8")
    assert Generic(catalog.operator("gdn_decode")).moved_bytes(case) == pytest.approx(
        gdn_decode.moved_bytes(case), rel=1e-3
    )
    assert Generic(catalog.operator("gdn_decode")).held_bytes(case, 4) > gdn_decode.moved_bytes(
        case
    )


def test_who_has_a_module() -> None:
    assert workloads.load("gdn_decode") is gdn_decode
    assert workloads.load("gdn_prefill") == Generic(catalog.operator("gdn_prefill"))
    with pytest.raises(ArgumentError, match="unknown"):
        workloads.load("nothing")


@pytest.mark.parametrize(
    "name", ["definition-b4", "no-state", "pool", "pool-int64", "extreme", "raw-keys", "scale"]
)
def test_cases_that_shape_their_contents_are_drawn_as_written(name: str) -> None:
    """Through the oracle where the device's way does not reach."""
    case: Any = case_of("gdn_decode", name)
    inputs: Any = gdn_decode.fresh_inputs(case, 5, CPU)
    result = as_tuple(catalog.operator("gdn_decode").function(**gdn_decode.live(inputs)._asdict()))
    assert all(error.ok for error in gdn_decode.expect(inputs).judge(result))
    as_written = make_inputs(dataclasses.replace(case, seed=5), CPU)
    if name in ("definition-b4", "pool"):  # plain contents: drawn as the contest draws them
        assert inputs.write_indices is None
    else:
        assert torch.equal(inputs.v, as_written.v)
        own = gdn_decode.own_inputs(dataclasses.replace(case, seed=5), CPU)
        assert torch.equal(own.v, as_written.v)
        assert (own.write_indices is None) == (name != "pool-int64")
