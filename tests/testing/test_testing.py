"""The testers are tested: each check fails on what it is there to find."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest
import torch

from fastkernels import catalog, demo
from fastkernels.core.route import Operator
from fastkernels.ops._shared.cases import Case
from fastkernels.ops._shared.compare import official
from fastkernels.testing import contracts, hostile, timing
from fastkernels.testing.compare import clone, run_case, same_bits
from fastkernels.testing.workloads import gdn_forms

DECODE = catalog.operator("gdn_decode")
AXES = {"batch_size": 3, "seq_len": 1, "num_v_heads": 8, "head_size": 128}


def case(mode: str) -> Case:
    return next(c for c in contracts.cases(DECODE, "CORRECTNESS") if c.mode == mode)


def spoilt(spoil: Any) -> Operator:
    """gdn_decode whose route misbehaves after the right result is there."""
    route = DECODE.safe_route

    def launch(inputs: Any, outputs: Any, workspace: Any, config: Any) -> None:
        route.launch(inputs, outputs, workspace, config)
        spoil(inputs, outputs)

    return dataclasses.replace(DECODE, routes=(dataclasses.replace(route, launch=launch),))


def beyond(inputs: Any, outputs: Any) -> None:
    """Write one element past the end of the output."""
    output = outputs[0]
    reach = 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride(), strict=True))
    output.as_strided((1,), (1,), output.storage_offset() + reach).fill_(1.0)


SPOILERS = {
    "a guard byte": beyond,
    "an input": lambda inputs, outputs: inputs.k.mul_(2),
    "an element left poisoned": lambda inputs, outputs: outputs[0][-1, 0, 0, 0].fill_(math.nan),
    "a wrong row": lambda inputs, outputs: outputs[0][-1].mul_(1.5),
}


@pytest.mark.parametrize("mode", ["functional", "inplace", "pool"])
@pytest.mark.parametrize("what", SPOILERS)
@pytest.mark.parametrize("layout", hostile.LAYOUTS)
def test_given_outputs_finds(
    what: str, mode: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = spoilt(SPOILERS[what])
    monkeypatch.setattr("fastkernels.ops.gdn_decode.op.OPERATOR", operator)
    monkeypatch.setattr(catalog, "OPERATORS", (operator,))
    with pytest.raises(AssertionError):
        contracts.check_given_outputs(operator, operator.safe_route, case(mode), "cpu", layout)


def test_fresh_outputs_finds_shared_memory_and_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    calls: list[int] = []

    def reuse(inputs: Any, outputs: Any) -> None:
        kept.append(outputs[0])
        if len(kept) > 1:
            kept[0].zero_()

    def chance(inputs: Any, outputs: Any) -> None:
        calls.append(1)
        outputs[0].mul_(len(calls))

    for spoil, message in ((reuse, "changed in a later call"), (chance, "differs between two")):
        operator = spoilt(spoil)
        monkeypatch.setattr("fastkernels.ops.gdn_decode.op.OPERATOR", operator)
        with pytest.raises(AssertionError, match=message):
            contracts.check_fresh_outputs(operator, operator.safe_route, case("functional"), "cpu")


def test_layouts_are_what_they_say() -> None:
    plain, offset, strided = (
        hostile.guarded_output(DECODE.spec.outputs[0], AXES, "cpu", layout)
        for layout in hostile.LAYOUTS
    )
    assert plain.tensor.is_contiguous()
    assert (offset.tensor.data_ptr() - plain.tensor.data_ptr()) % 64 == 16 or (
        offset.tensor.storage_offset() * 2 == hostile.GUARD_BYTES + 16
    )
    assert not strided.tensor.is_contiguous()
    for guarded in (plain, offset, strided):
        assert guarded.tensor.isnan().all()
        guarded.assert_intact()
        guarded.tensor.zero_()
        guarded.assert_intact()
    strided.buffer[hostile.GUARD_BYTES + 2 * 8 * 128 + 1] = 0  # between two rows
    with pytest.raises(AssertionError, match="was written"):
        strided.assert_intact()
    indices = catalog.operator("dsa_topk_indexer").spec.outputs[0]
    assert (
        hostile.guarded_output(indices, {"batch_size": 2, "topk": 3}, "cpu").tensor == 123
    ).all()


def test_same_bits_is_about_bits() -> None:
    zero = torch.zeros(2)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[:1])
    nan = torch.full((2,), math.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, (nan.view(torch.int32) + 1).view(torch.float32))


def test_official_limits_count_on_contest_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside our limit against kappa can still be beyond the contest's."""
    operator = spoilt(lambda inputs, outputs: outputs[0][0, 0, 0].add_(0.02))
    monkeypatch.setattr("fastkernels.ops.gdn_decode.op.OPERATOR", operator)
    contest = contracts.cases(DECODE, "CONTEST")[0]
    report = run_case(operator, contest)
    assert report.official
    assert any(not error.ok for error in report.official)
    assert not report.ok


LOOSE = dataclasses.replace(
    catalog.operator("moe_fp8_block_scale").spec.tolerances[0],
    official_abs=0.1, official_rel=0.1, official_share=0.9,
)  # fmt: skip


@pytest.mark.parametrize(("count", "ok"), [(10, True), (11, False)])
def test_officially_a_tenth_may_be_wrong(count: int, ok: bool) -> None:
    want = torch.ones(100)
    got = want.clone()
    got[:count] = 2.0
    assert official(LOOSE, got, want).ok is ok


@pytest.mark.parametrize(("got", "want"), [(1.0, math.inf), (-math.inf, math.inf), (math.nan, 1.0)])
def test_officially_what_is_finite_on_one_side_is_wrong(got: float, want: float) -> None:
    """Also on the device, where workloads have a judge of their own."""
    pair = torch.full((4,), got), torch.full((4,), want)
    assert official(LOOSE, *pair).value == 1.0
    assert float(gdn_forms._beyond(LOOSE, *pair)) == 1.0
    assert official(LOOSE, pair[1], pair[1]).ok


def test_clone_keeps_strides_and_memory_apart() -> None:
    inputs = catalog.module("gdn_decode", "inputs").make_inputs(case("pool"))
    copy = clone(inputs)
    for a, b in zip(inputs, copy, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
            assert a.data_ptr() != b.data_ptr()


def test_the_timer_counts_microseconds_and_sorts() -> None:
    pauses = iter([0.03, 0.001, 0.001, 0.001, 0.001])
    measured = timing.time_call(lambda: time.sleep(next(pauses)), "cpu", repeats=5)
    assert 900 < measured.median_us < 20_000
    assert measured.p10_us <= measured.median_us <= measured.p90_us
    assert measured.p90_us > 25_000
    assert timing.time_call(lambda: time.sleep(0.02), "cpu", 50, budget_s=0.01).repeats == 1


@pytest.mark.parametrize("operator", catalog.OPERATORS, ids=lambda op: op.name)
def test_the_demo_takes_smallest_median_and_largest(operator: Operator) -> None:
    smallest, median, largest = demo.chosen_cases(operator, torch.device("cpu"))
    axis, limit = demo.CPU_LIMITS.get(operator.name, (operator.spec.variable_axes[0], None))
    sizes = sorted(c.axes[axis] for c in contracts.cases(operator, "CONTEST"))
    fitting = [size for size in sizes if limit is None or size <= limit]
    assert smallest.axes[axis] == fitting[0]
    assert largest.axes[axis] == fitting[-1]
    assert median.axes[axis] == fitting[len(fitting) // 2]
    assert demo.chosen_cases(operator, torch.device("cuda"))[2].axes[axis] == sizes[-1]


def test_the_demo_judges_the_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing calls the operator again; a first result that was wrong stays wrong."""
    calls: list[int] = []

    def first_is_wrong(inputs: Any, outputs: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            outputs[0].zero_()

    operator = spoilt(first_is_wrong)
    monkeypatch.setattr("fastkernels.ops.gdn_decode.op.OPERATOR", operator)
    smallest = demo.chosen_cases(DECODE, torch.device("cpu"))[0]
    row = demo.measure(operator, smallest, torch.device("cpu"), lambda what: None)
    assert len(calls) > 1
    assert not row.ok
