"""Workloads of gdn_decode: inputs and float64 results on the device, rows, bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.core.device import named_device
from fastkernels.core.table import parse
from fastkernels.ops.gdn_decode.inputs import CORRECTNESS, Case, make_inputs
from fastkernels.ops.gdn_decode.reference import reference
from fastkernels.ops.gdn_decode.spec import SPEC
from fastkernels.testing.workloads import gdn_decode as work

CPU = torch.device("cpu")
MODES = SPEC.modes
OPERATOR = catalog.operator("gdn_decode")


def result(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    live = work.live(inputs)
    output, state = OPERATOR.function(**live._asdict())
    return output, state


ON_DEVICE = [c for c in CORRECTNESS if c.state == "random" and c.indices == "int32"]


@pytest.mark.parametrize("case", ON_DEVICE, ids=str)
def test_float64_on_the_device_is_the_oracle(case: Case) -> None:
    """Where every row of a pool is used; padding is for the contract tests."""
    if case.mode == "pool":
        inputs = work.own_inputs(case, CPU)
    else:
        inputs = make_inputs(case)
    ours, oracle = work.expect_on_device(inputs), reference(inputs)
    state = oracle.new_state if ours.slots is None else oracle.new_state[ours.slots]
    torch.testing.assert_close(ours.output, oracle.output[:, 0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.state, state, rtol=1e-12, atol=1e-14)
    got = result(inputs)
    for mine, theirs in zip(ours.judge(got), oracle.judge(got), strict=True):
        assert (mine.output, mine.metric, mine.limit) == (
            theirs.output, theirs.metric, theirs.limit,
        )  # fmt: skip
        assert mine.value == pytest.approx(theirs.value, rel=1e-6)
    judged = zip(ours.judge_official(got), oracle.judge_official(got), strict=True)
    assert all((a.output, a.value, a.limit) == (b.output, b.value, b.limit) for a, b in judged)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_wrong_is_found(mode: str) -> None:
    inputs = work.fresh_inputs(Case("x", 3, mode=mode), 5, CPU)
    expected = work.expect_on_device(inputs)
    output, state = result(inputs)
    assert all(error.ok for error in expected.judge((output, state)))
    row = 1 if expected.slots is None else int(expected.slots[1])
    for spoil in (
        lambda o, s: o[2, 0, 7].mul_(1.5),
        lambda o, s: o[0, 0, 0, 0].fill_(math.nan),
        lambda o, s: s[row, 3].mul_(1.0001),
        lambda o, s: s[row, 3, 5, 7].fill_(math.inf),
    ):
        wrong = output.clone(), state.clone()
        spoil(*wrong)
        assert not all(error.ok for error in expected.judge(wrong))
    assert all(error.ok for error in expected.judge_official((output, state)))
    assert [e.ok for e in expected.judge_official((output + 0.1, state))] == [False, True]
    output[1, 0, 0, 0] = math.inf
    assert not expected.judge_official((output, state))[0].ok
    if mode == "pool":
        wrong = output.clone(), state.clone()
        assert expected.slots is not None
        other = next(i for i in range(6) if i not in expected.slots.tolist())
        wrong[1][other, 0, 0, 0] = 1.0
        assert expected.judge(wrong)[2].value == 1


@pytest.mark.parametrize("mode", MODES)
def test_restoring_undoes_a_call(mode: str) -> None:
    inputs: Any = work.fresh_inputs(Case("x", 2, mode=mode), 5, CPU)
    pristine = inputs.state.clone()
    live: Any = work.live(inputs)
    OPERATOR.function(**live._asdict())
    torch.testing.assert_close(inputs.state, pristine, rtol=0, atol=0, equal_nan=True)
    assert (live.state is inputs.state) == (mode == "functional")
    work.restore(live, inputs)
    torch.testing.assert_close(live.state, pristine, rtol=0, atol=0, equal_nan=True)
    assert len(work.outputs(inputs)) == (2 if mode == "functional" else 1)


def test_draws_are_seeded_and_like_the_contests() -> None:
    case = Case("x", 4)
    draws: list[Any] = [work.fresh_inputs(case, seed, CPU) for seed in (1, 1, 2)]
    one, same, other = draws
    assert torch.equal(one.state, same.state)
    assert not torch.equal(one.state, other.state)
    drawn: Any = make_inputs(case)
    for mine, theirs in zip(one, drawn, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.dtype, mine.stride()) == (
                theirs.shape, theirs.dtype, theirs.stride(),
            )  # fmt: skip
    contest: Any = work.own_inputs(dataclasses.replace(case, mode="inplace"), CPU)
    assert torch.equal(contest.state, drawn.state)
    assert contest.inplace


def test_rows() -> None:
    table = """
schema = 1
op = "gdn_decode"
status = "unmeasured"
spec_digest = "DIGEST"
[device]
arch = "sm90"
product = "NVIDIA H200"
num_sms = 132
[provenance]
[limits]
batch_size = [0, 4096]
[[regime]]
mode = "functional"
batch_size = [0, 20]
route = "torch_recurrent"
config = {}
[[regime]]
mode = "functional"
batch_size = [21, 4096]
route = "torch_recurrent"
config = {}
[[fallback]]
route = "torch_recurrent"
reason = "test"
""".replace("DIGEST", SPEC.digest)
    assert parse(table, SPEC).regimes
    rows = list(work.rows(OPERATOR, named_device("h200"), MODES))
    count: dict[Any, int] = {}
    for listed, case in rows:
        count[listed, case.mode] = count.get((listed, case.mode), 0) + 1
    assert count["contest", "functional"] == count["contest", "inplace"] == 54
    assert count["serving", "pool"] == count["serving", "functional"] == 5
    assert ("contest", "pool") not in count
    only = list(work.rows(OPERATOR, named_device("h200"), ("inplace",)))
    assert {case.mode for _, case in only} == {"inplace"}


def test_gap_rows_lie_around_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [Case(f"gap-b{size}", size) for size in (0, 1, 20, 21, 4097)]
    monkeypatch.setattr(work, "gap_cases", lambda table: seen)
    gap = [c for listed, c in work.rows(OPERATOR, named_device("h200"), MODES) if listed == "gap"]
    assert sorted({c.batch_size for c in gap}) == [1, 20, 21]


def test_sweep_rows_are_distinct_and_reach_both_ends_of_every_group() -> None:
    rows = list(work.sweep_rows(MODES))
    groups: dict[Any, list[int]] = {}
    for _, case in rows:
        key = case.mode, case.num_q_heads, case.num_v_heads
        groups.setdefault(key, []).append(case.batch_size)
    assert len(groups) == 3 * 4
    for sizes in groups.values():
        assert len(set(sizes)) == len(sizes)
        assert (min(sizes), max(sizes)) == (1, 1024)
    assert len(groups["pool", 4, 8]) == 12


def test_bytes() -> None:
    case = Case("x", 64)
    state = 64 * 8 * 128 * 128 * 4
    assert work.moved_bytes(case) / (2 * state) == pytest.approx(1.0, abs=0.01)
    assert work.moved_bytes(case) > 2 * state
    assert work.held_bytes(case, 4) > 4 * 4 * state
