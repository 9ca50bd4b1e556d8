"""Workloads of operators without a module of their own, of cases that need the oracle, and of the
operator whose cases share their weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.core.device import CPU as CPU_INFO
from fastkernels.core.route import Operator
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import Case
from fastkernels.ops.gdn_decode.inputs import make_inputs
from fastkernels.ops.moe_fp8_block_scale import inputs as moe_inputs
from fastkernels.testing import contracts, workloads
from fastkernels.testing.compare import as_tuple, clone, same_bits
from fastkernels.testing.workloads import gdn_decode, gdn_prefill
from fastkernels.testing.workloads import moe_fp8_block_scale as moe
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
    case: Any = case_of("gdn_prefill", "definition")
    work: Any = Generic(catalog.operator("gdn_prefill"))
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
    assert workloads.load("gdn_prefill") is gdn_prefill
    assert workloads.load("moe_fp8_block_scale") is moe
    assert workloads.load("dsa_topk_indexer") == Generic(catalog.operator("dsa_topk_indexer"))
    with pytest.raises(ArgumentError, match="unknown"):
        workloads.load("nothing")


@pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda operator: operator.name)
def test_nothing_is_missing_from_a_module(operator: Operator) -> None:
    work = workloads.load(operator.name)
    wanted = {name for name in vars(workloads.Workloads) if not name.startswith("_")}
    assert {name for name in wanted if not callable(getattr(work, name, None))} == set()


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


# ---- moe_fp8_block_scale ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["logits", "precomputed"])
def test_moe_draws_its_weights_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[moe_inputs.Case] = []

    def make_weights(case: moe_inputs.Case) -> moe_inputs.Weights:
        made.append(case)
        return moe_inputs.make_weights(case)

    monkeypatch.setattr(moe, "make_weights", make_weights)
    moe._weights.cache_clear()
    first = moe_inputs.Case("first", 3, mode=mode, weight_seed=5, **moe_inputs.SMALL)
    second = dataclasses.replace(first, name="second", seq_len=7, logits="ties")
    drawn = [
        moe.own_inputs(first, CPU),
        moe.fresh_inputs(first, 1, CPU),
        moe.fresh_inputs(second, 2, CPU),
    ]
    assert len(made) == 1
    for name in moe_inputs.Weights._fields:
        assert len({id(getattr(inputs, name)) for inputs in drawn}) == 1
    assert not same_bits(drawn[0].hidden_states, drawn[1].hidden_states)
    other = moe.own_inputs(dataclasses.replace(first, weight_seed=6), CPU)
    assert len(made) == 2
    assert not same_bits(other.gemm1_weights, drawn[0].gemm1_weights)
    assert moe._weights.cache_info().currsize == 1


@pytest.mark.parametrize(
    "case", [*moe_inputs.CORRECTNESS, *moe_inputs.CORNER], ids=lambda c: c.name
)
def test_moe_on_shared_weights_is_the_case_as_written(case: moe_inputs.Case) -> None:
    for got, want in zip(moe.own_inputs(case, CPU), moe_inputs.make_inputs(case), strict=True):
        if not isinstance(want, torch.Tensor):
            assert got == want
            continue
        assert isinstance(got, torch.Tensor)
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        assert same_bits(got, want)


def test_moe_is_swept_in_both_modes() -> None:
    modes = catalog.operator("moe_fp8_block_scale").spec.modes
    count = Counter((listed, case.mode) for listed, case in moe.sweep_rows(modes))
    assert count == {("contest", m): 19 for m in modes} | {("serving", m): 7 for m in modes}
    assert {case.mode for _, case in moe.sweep_rows(modes[1:])} == {"precomputed"}


def test_moe_holds_its_weights_once() -> None:
    (case,) = (c for c in moe_inputs.SERVING if c.seq_len == 128)
    one, four = (moe.held_bytes(case, sets) for sets in (1, 4))
    assert 4e9 < one < four < 5e9  # three times 1.4 GB
    assert four - one == pytest.approx(9 * 128 * (7168 * 3 + 56 * 4 + 256 * 4), rel=1e-3)
