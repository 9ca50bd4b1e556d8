"""Workloads of operators without a module of their own, of cases that need the oracle, of the
operator whose cases share their weights, and of sparse attention."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from fastkernels import catalog
from fastkernels.core.device import CPU as CPU_INFO
from fastkernels.core.device import named_device
from fastkernels.core.route import Operator
from fastkernels.errors import ArgumentError
from fastkernels.ops._shared.cases import Case
from fastkernels.ops.dsa_sparse_attention import inputs as dsa_inputs
from fastkernels.ops.dsa_sparse_attention.reference import reference as dsa_reference
from fastkernels.ops.gdn_decode.inputs import make_inputs
from fastkernels.ops.moe_fp8_block_scale import inputs as moe_inputs
from fastkernels.testing import contracts, workloads
from fastkernels.testing.compare import as_tuple, clone, same_bits
from fastkernels.testing.workloads import dsa_sparse_attention as dsa
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
    assert workloads.load("dsa_sparse_attention") is dsa
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


# ---- dsa_sparse_attention -----------------------------------------------------------------------

DSA = catalog.operator("dsa_sparse_attention")
DSA_CASES = [
    case
    for case in (*dsa_inputs.CORRECTNESS, *dsa_inputs.CORNER)
    if case.name not in ("t17", "largest", "k4096")  # sizes; t8-contest has all that they have
]


@pytest.mark.parametrize("case", DSA_CASES, ids=lambda case: case.name)
def test_dsa_by_blocks_is_the_oracle(
    case: dsa_inputs.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens a block, so that most cases end with a smaller one."""
    width = case.head_dim_ckv + case.head_dim_kpe
    monkeypatch.setattr(dsa, "_GATHERED_BYTES", 2 * 8 * case.topk * width)
    inputs = dsa_inputs.make_inputs(case)
    ours, oracle = dsa.expect(inputs), dsa_reference(inputs)
    for name, want in vars(oracle).items():
        torch.testing.assert_close(getattr(ours, name), want, rtol=1e-12, atol=1e-14)
    got = as_tuple(DSA.function(**inputs._asdict()))
    for mine, theirs in zip(ours.judge(got), oracle.judge(got), strict=True):
        assert (mine.output, mine.limit, mine.ok) == (theirs.output, theirs.limit, True)
        assert mine.value == pytest.approx(theirs.value, rel=1e-6)


def test_dsa_what_is_wrong_is_found() -> None:
    """One head of one token; a token without a valid index; a NaN."""
    case = dsa_inputs.Case("x", 3, num_pages=4, topk=128, valid=(100, 0, 7), num_qo_heads=2)
    inputs = dsa.fresh_inputs(case, 5, CPU)
    expected = dsa.expect(inputs)
    outputs = as_tuple(DSA.function(**inputs._asdict()))
    assert all(error.ok for error in expected.judge(outputs))
    spoilt: Any = (
        (0, lambda output, lse: output[2, 1].mul_(1.02)),
        (0, lambda output, lse: output[1, 0, 9].fill_(1e-20)),
        (0, lambda output, lse: output[0, 0, 0].fill_(float("nan"))),
        (1, lambda output, lse: lse[0, 1].add_(1e-3)),
        (1, lambda output, lse: lse[1, 1].fill_(-1e30)),
    )
    for which, spoil in spoilt:
        wrong = tuple(tensor.clone() for tensor in outputs)
        spoil(*wrong)
        assert [error.ok for error in expected.judge(wrong)] == [which != 0, which != 1]


@pytest.mark.parametrize(
    ("law", "valid"),
    [("contest", (3, 300, 0, 511, 1)), ("local", ()), ("uniform", ()), ("uniform", (9,) * 5)],
)
def test_dsa_draws_are_like_the_cases(law: str, valid: tuple[int, ...]) -> None:
    case = dsa_inputs.Case("x", 5, num_pages=1100, topk=512, valid=valid, law=law)
    case = dataclasses.replace(case, num_qo_heads=2, head_dim_ckv=8, head_dim_kpe=2)
    one, same, other = (dsa.fresh_inputs(case, seed, CPU) for seed in (1, 1, 2))
    for mine, again, fresh, drawn in zip(
        one, same, other, dsa_inputs.make_inputs(case), strict=True
    ):
        if not isinstance(drawn, torch.Tensor):
            assert mine == drawn
            continue
        assert isinstance(mine, torch.Tensor)
        assert isinstance(again, torch.Tensor)
        assert isinstance(fresh, torch.Tensor)
        assert same_bits(mine, again)
        assert not same_bits(mine, fresh)
        assert (mine.shape, mine.dtype, mine.stride()) == (
            drawn.shape, drawn.dtype, drawn.stride(),
        )  # fmt: skip
        if mine.is_floating_point() and mine.numel() > 1000:
            assert mine.double().std() == pytest.approx(1.0, abs=0.05)
            assert abs(mine.double().mean()) < 0.05
    for token, (row, count) in enumerate(zip(one.sparse_indices, case.num_valid, strict=True)):
        named = row[:count]
        assert (row[count:] == -1).all()
        assert named.unique().numel() == count
        assert ((named >= 0) & (named < case.num_rows)).all()
        is_run = bool((named.diff() == 1).all())
        assert is_run == (law == "contest" and token % 2 == 0) or count < 2
    if law == "local":
        assert (one.sparse_indices // 64).unique().numel() <= dsa_inputs.LOCAL_PAGES


@pytest.mark.parametrize(("size", "count"), [(1, 1), (17, 1), (33, 2), (100, 100), (70_000, 2048)])
def test_dsa_distinct(size: int, count: int) -> None:
    found = dsa._distinct(50, size, count, torch.Generator().manual_seed(1))
    assert found.shape == (50, count)
    assert all(row.unique().numel() == count for row in found)
    assert ((found >= 0) & (found < size)).all()
    if count == 2048:  # uniform, and in no order
        assert found.double().mean() / size == pytest.approx(0.5, abs=0.01)
        assert (found.diff(dim=1) > 0).double().mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", ["scattered", "poisoned", "repeated", "strided-packed"])
def test_dsa_cases_that_shape_their_contents_are_drawn_as_written(name: str) -> None:
    case = next(case for case in dsa_inputs.CORNER if case.name == name)
    drawn = dsa_inputs.make_inputs(dataclasses.replace(case, seed=5))
    fresh = dsa.fresh_inputs(case, 5, CPU)
    assert fresh.ckv_cache.stride() == drawn.ckv_cache.stride()
    assert same_bits(fresh.sparse_indices, drawn.sparse_indices)
    assert same_bits(fresh.ckv_cache, drawn.ckv_cache)


def test_dsa_the_contests_own_inputs_are_everybodys() -> None:
    case = dataclasses.replace(dsa_inputs.CONTEST[0], num_pages=64)
    own, drawn = dsa.own_inputs(case, CPU), dsa_inputs.make_inputs(case)
    assert same_bits(own.ckv_cache, drawn.ckv_cache)
    assert same_bits(own.sparse_indices, drawn.sparse_indices)
    plain = dataclasses.replace(case, source="")
    own, drawn = dsa.own_inputs(plain, CPU), dsa.fresh_inputs(plain, plain.seed, CPU)
    assert same_bits(own.sparse_indices, drawn.sparse_indices)


def test_dsa_calls_change_nothing() -> None:
    inputs = dsa.fresh_inputs(dsa_inputs.Case("x", 2, num_pages=2, topk=64), 1, CPU)
    assert dsa.live(inputs) is inputs
    assert [(t.dtype, tuple(t.shape)) for t in dsa.outputs(inputs)] == [
        (torch.bfloat16, (2, 16, 512)), (torch.float32, (2, 16)),
    ]  # fmt: skip
    assert not dsa.updates(dsa_inputs.SERVING[0])


def test_dsa_rows() -> None:
    rows = list(dsa.rows(DSA, named_device("h200"), DSA.spec.modes))
    count = Counter(listed for listed, _ in rows)
    assert (count["contest"], count["serving"]) == (23, 18)
    assert list(dsa.rows(DSA, named_device("h200"), ())) == []


def test_dsa_serving_rows_are_full() -> None:
    """What the targets name: every index of 8 to 4096 tokens is valid, under both laws."""
    serving = {(case.law, case.num_tokens): case for case in dsa_inputs.SERVING}
    wanted = {(law, tokens) for law in ("local", "uniform") for tokens in (8, 32, 128, 512, 4096)}
    assert wanted <= set(serving)
    for (law, tokens), case in serving.items():
        assert case.name == f"serving-{law}-t{tokens}"
        assert dsa.details(case) == {"valid": 2048 * tokens, "longest": 2048}


def test_dsa_gap_rows_are_few_and_bearable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [dsa_inputs.Case(f"gap-t{n}", n) for n in (*range(1, 100), 8192, 8193)]
    seen += [dsa_inputs.Case(f"gap-p{n}", 3, num_pages=n) for n in (0, 1)]
    monkeypatch.setattr(dsa, "gap_cases", lambda table: seen)
    rows = dsa.rows(DSA, named_device("h200"), DSA.spec.modes)
    gap = [case for listed, case in rows if listed == "gap"]
    assert 0 < len(gap) <= dsa.MOST_GAP_ROWS
    assert all(0 < case.num_tokens <= 8192 and case.num_pages for case in gap)


def test_dsa_sweep_rows_reach_both_ends() -> None:
    rows = list(dsa.sweep_rows(DSA.spec.modes))
    assert len({case.name for _, case in rows}) == len(rows)
    groups: dict[Any, set[int]] = {}
    for _, case in rows:
        key = case.num_qo_heads, case.topk, case.page_size
        groups.setdefault(key, set()).add(case.num_tokens)
    assert set(groups) == {
        (16, 2048, 64), (8, 2048, 64), (32, 2048, 64), (64, 2048, 64), (128, 2048, 64),
        (16, 512, 64), (16, 1024, 64), (16, 2048, 1),
    }  # fmt: skip
    assert all({1, 4096} <= sizes for sizes in groups.values())
    assert {case.num_pages for _, case in rows} >= {32, 8462, 64 * 8462, 131072}
    assert list(dsa.sweep_rows(())) == []


def test_dsa_bytes_and_details() -> None:
    case = dsa_inputs.Case("x", 2, num_pages=8462, valid=(300, 5), law="contest")
    call = 2 * 16 * (576 * 2 + 512 * 2 + 4) + 4 * 2 * 2048
    assert dsa.details(case) == {"valid": 305, "longest": 300}
    assert dsa.moved_bytes(case) == 305 * 1152 + call
    empty = dataclasses.replace(case, valid=(0, 0))
    assert dsa.moved_bytes(empty) == call
    assert dsa.moved_bytes(dataclasses.replace(case, valid=(), num_pages=0)) == call
    assert dsa.details(empty) == {"valid": 0, "longest": 0}
    caches = 8462 * 64 * 1152
    assert 12 * caches < dsa.held_bytes(case, 4) < 20 * caches
    assert dsa.held_bytes(case, 1) < dsa.held_bytes(case, 2)
    assert all(dsa.held_bytes(each, 4) < 140e9 for each in dsa_inputs.SERVING)
    assert all(dsa.held_bytes(each, 1) < 120e9 for _, each in dsa.sweep_rows(DSA.spec.modes))


@pytest.mark.parametrize("law", ["local", "uniform", "contest"])
def test_dsa_bytes_are_those_of_the_rows_drawn(law: str) -> None:
    case = dsa_inputs.Case("x", 70, num_pages=1200, topk=512, law=law)
    case = dataclasses.replace(case, num_qo_heads=1, head_dim_ckv=8, head_dim_kpe=1)
    indices = dsa.fresh_inputs(case, 7, CPU).sparse_indices
    other = dsa.moved_bytes(dataclasses.replace(case, num_pages=0))
    found = (dsa.moved_bytes(case) - other) / (2 * 9)
    # Runs cover the cache unevenly.
    assert found == pytest.approx(indices.unique().numel(), rel=0.05 if law == "contest" else 0.01)


@pytest.mark.parametrize("case", [dsa_inputs.CONTEST[0], dsa_inputs.SERVING[-1]])
def test_dsa_the_oracle_is_for_few_tokens(case: dsa_inputs.Case) -> None:
    assert dsa.oracle(case) == (case.num_tokens == 1)


# ---- prefill ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["zero_length_sequences", "around_chunks", "hostile_offsets", "no_state", "pool", "raw_keys"],
)
def test_prefill_side_by_side_is_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several calls, whole and in groups of three sequences, slack of ill-conditioned heads
    included."""
    stratum = catalog.module("gdn_prefill", "adversarial").STRATA[name]
    many = [stratum.draw(seed)[0] for seed in (3, 4, 5)]
    wanted = gdn_prefill.expect_by_oracle(many)
    for limit in (1 << 30, 3 * 8 * many[0].v.shape[1] * 128 * 128):
        monkeypatch.setattr(gdn_prefill, "_SIDE_BY_SIDE_BYTES", limit)
        for want, got in zip(wanted, gdn_prefill.expect_side_by_side(many), strict=True):
            assert got.offsets == want.offsets
            assert torch.equal(got.kept, want.kept)
            for field in dataclasses.fields(want):
                one, other = getattr(want, field.name), getattr(got, field.name)
                if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                    size = one.nan_to_num().abs().max() if one.numel() else 0.0
                    torch.testing.assert_close(
                        other, one, rtol=0, atol=1e-11 * float(size), equal_nan=True
                    )


@pytest.mark.parametrize("mode", ["functional", "pool"])
@pytest.mark.parametrize("way", ["_run_chunks", "_run_tokens"])
def test_prefill_on_a_device_is_the_oracle(way: str, mode: str) -> None:
    """Chunk by chunk, and token by token of all sequences: results, and what errors are measured
    against."""
    lengths = (70, 0, 1, 129, 64)
    case: Any = case_of("gdn_prefill", "definition")
    case = dataclasses.replace(
        case, name="ways", lengths=lengths, num_q_heads=1, num_v_heads=2, mode=mode
    )
    inputs: Any = gdn_prefill.fresh_inputs(case, 11, CPU)
    offsets = inputs.cu_seqlens.tolist()
    got = gdn_prefill._expect_on_device(inputs, offsets, getattr(gdn_prefill, way))
    want: Any = gdn_prefill.expect_by_oracle([inputs])[0]
    slots = got.slots if got.slots is not None else torch.arange(len(lengths))
    for one, other in (
        (want.output, got.output), (want.new_state[slots], got.state),
        (want.output_kappa, got.output_kappa), (want.new_state_kappa[slots], got.state_kappa),
    ):  # fmt: skip
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("lengths", "way"),
    [
        ((512,), "_run_chunks"),
        ((30,), "_run_chunks"),
        ((2,), "_run_tokens"),
        ((4,) * 99, "_run_tokens"),
        ((0,), None),
    ],
)
def test_prefill_takes_the_fewer_steps(
    lengths: tuple[int, ...], way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Any = case_of("gdn_prefill", "definition")
    case = dataclasses.replace(
        case, name="steps", lengths=lengths, num_q_heads=1, num_v_heads=1, mode="functional"
    )
    inputs: Any = gdn_prefill.fresh_inputs(case, 12, CPU)
    other = {"_run_chunks": "_run_tokens", "_run_tokens": "_run_chunks"}
    if way is not None:
        monkeypatch.setattr(gdn_prefill, other[way], None)
    assert gdn_prefill.expect_on_device(inputs).output.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["around_chunks", "pool", "raw_keys"])
def test_prefill_side_by_side_on_a_device(name: str) -> None:
    stratum = catalog.module("gdn_prefill", "adversarial").STRATA[name]
    many = [stratum.draw(seed, "cuda")[0] for seed in (3, 4)]
    for inputs, got in zip(many, gdn_prefill.expect_by_oracle(many), strict=True):
        want = gdn_prefill.expect_by_oracle(
            [type(inputs)._make(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs)]
        )[0]
        assert got.output.is_cuda
        for one, other in ((want.output, got.output), (want.new_state, got.new_state)):
            size = float(one.nan_to_num().abs().max())
            torch.testing.assert_close(other.cpu(), one, rtol=0, atol=1e-11 * size, equal_nan=True)
        outputs = tuple(t.float() for t in (got.output, got.new_state))
        assert all(error.ok for error in got.judge(outputs))
