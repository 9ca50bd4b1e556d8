"""dsa_sparse_attention beyond the contract: the oracle against SDPA, padding, layouts, refusals.

The oracle over all cases, poisoned outputs and aliasing are in test_contracts.py. C43 (page numbers
beyond 32-bit offsets) needs 4 GiB of cache and is a GPU test. C41: equal bits alone and among other
tokens are not promised (README.md), so nothing here asserts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastkernels
from fastkernels import dsa_sparse_attention
from fastkernels.core.table import Regime, Table
from fastkernels.errors import ArgumentError
from fastkernels.ops.dsa_sparse_attention.inputs import (
    CONTEST,
    CORNER,
    SERVING,
    Case,
    distinct,
    gap_cases,
    make_inputs,
)
from fastkernels.ops.dsa_sparse_attention.problem import Inputs
from fastkernels.ops.dsa_sparse_attention.reference import Expected, reference
from fastkernels.ops.dsa_sparse_attention.spec import SPEC
from fastkernels.testing.compare import same_bits

INT32 = torch.iinfo(torch.int32)
CASE = Case("base", 3, seed=5, num_pages=40, topk=128, valid=(128, 17, 90))


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation allocates; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in known
            ):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def call(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return dsa_sparse_attention(**inputs._asdict(), **options)


def assert_judged(expected: Expected, outputs: tuple[torch.Tensor, ...]) -> None:
    errors = expected.judge(outputs)
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def is_judged_wrong(expected: Expected, outputs: tuple[torch.Tensor, ...]) -> list[bool]:
    return [not error.ok for error in expected.judge(outputs)]


def with_row(inputs: Inputs, indices: list[int]) -> Inputs:
    """The first token alone, with these indices."""
    return inputs._replace(
        q_nope=inputs.q_nope[:1],
        q_pe=inputs.q_pe[:1],
        sparse_indices=torch.tensor([indices], dtype=torch.int32),
    )


# ---- oracle and judge ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scattered", "outside", "repeated", "one-page"])
def test_oracle_equals_sdpa(name: str) -> None:
    """Masked attention over all indices at once, keys concatenated."""
    inputs = make_inputs(next(case for case in CORNER if case.name == name))
    expected = reference(inputs)
    num_rows = inputs.ckv_cache.shape[0] * inputs.ckv_cache.shape[1]
    values = inputs.ckv_cache.reshape(num_rows, -1).double()
    keys = torch.cat([values, inputs.kpe_cache.reshape(num_rows, -1).double()], dim=1)
    queries = torch.cat([inputs.q_nope, inputs.q_pe], dim=2).double()
    for token, row in enumerate(inputs.sparse_indices.long()):
        is_valid = (row >= 0) & (row < num_rows)
        if not is_valid.any():
            assert not expected.output[token].any()
            continue
        row = row.clamp(0, num_rows - 1)
        bias = torch.zeros(row.shape, dtype=torch.float64).masked_fill(~is_valid, -math.inf)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[token][None, None],
            keys[row][None, None],
            values[row][None, None],
            attn_mask=bias.expand(queries.shape[1], -1),
            scale=inputs.sm_scale,
        )[0, 0]
        torch.testing.assert_close(expected.output[token], attended, rtol=1e-12, atol=1e-13)
        weights = (inputs.sm_scale * queries[token] @ keys[row].T + bias).exp().sum(1)
        torch.testing.assert_close(expected.lse[token], weights.log2(), rtol=1e-12, atol=1e-13)


CORRUPTIONS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], list[bool]]] = {
    "five percent": (lambda output, lse: output[1, 2].mul_(1.05), [True, False]),
    "one element": (lambda output, lse: output[2, 15, 511].add_(0.2), [True, False]),
    "a zero row": (lambda output, lse: output[0, 0].zero_(), [True, False]),
    "natural": (lambda output, lse: lse.mul_(math.log(2.0)), [False, True]),
    "lse off": (lambda output, lse: lse[2, 0].add_(1e-3), [False, True]),
    "finite lse of padding": (lambda output, lse: lse[3, 3].fill_(-1e30), [False, True]),
    "infinite lse": (lambda output, lse: lse[0, 3].fill_(-math.inf), [False, True]),
    "NaN": (lambda output, lse: output[3, 0, 0].fill_(math.nan), [True, False]),
    "not zero in padding": (lambda output, lse: output[3, 0, 0].fill_(1e-20), [True, False]),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_judge_sees(name: str) -> None:
    """Token 3 has no valid index."""
    inputs = make_inputs(replace(CASE, num_tokens=4, valid=(128, 17, 90, 0)))
    expected = reference(inputs)
    outputs = expected.output.bfloat16(), expected.lse.float()
    assert is_judged_wrong(expected, outputs) == [False, False]
    corrupt, verdict = CORRUPTIONS[name]
    corrupt(*outputs)
    assert is_judged_wrong(expected, outputs) == verdict


def test_cancellation_is_not_held_against_a_kernel() -> None:
    """Two opposite rows of equal weight: the output is 0, the yardstick the rows' own size."""
    inputs = with_row(make_inputs(CASE), [0, 1])
    inputs.ckv_cache[0, 1] = -inputs.ckv_cache[0, 0]
    inputs.q_nope.zero_()
    inputs.q_pe.zero_()
    expected = reference(inputs)
    assert not expected.output.any()
    row = inputs.ckv_cache[0, 0].expand(1, 16, -1).double()
    for factor, is_wrong in ((5e-3, False), (7e-3, True)):
        assert is_judged_wrong(expected, (factor * row, expected.lse)) == [is_wrong, False]


def test_slack_is_the_rounding_of_the_largest_logit() -> None:
    inputs = make_inputs(next(case for case in CORNER if case.name == "huge"))
    expected = reference(inputs)
    row = inputs.sparse_indices[1, :33].long()
    keys = torch.cat([inputs.ckv_cache.flatten(0, 1)[row], inputs.kpe_cache.flatten(0, 1)[row]], 1)
    query = torch.cat([inputs.q_nope[1], inputs.q_pe[1]], dim=1)
    products = (query[:, None].double() * keys.double()).abs().sum(2)  # [H, n]
    slack = 2.0**-20 * inputs.sm_scale * products.amax(1)
    torch.testing.assert_close(expected.slack[1], slack, rtol=1e-12, atol=0)
    lse = expected.lse.clone()
    lse[1] += 1e-4 + slack
    assert is_judged_wrong(expected, (expected.output, lse)) == [False, False]
    lse[1] += 2.0**-17 * lse[1].abs()
    assert is_judged_wrong(expected, (expected.output, lse)) == [False, True]


# ---- padding and values on the device -----------------------------------------------------------


def test_row_without_valid_key() -> None:
    """C32: output 0 and lse -inf, and the other row is as if alone."""
    inputs = make_inputs(replace(CASE, num_tokens=2, valid=(0, 90)))
    output, lse = call(inputs)
    assert not output[0].any()
    assert (lse[0] == -math.inf).all()
    alone = inputs._replace(
        q_nope=inputs.q_nope[1:], q_pe=inputs.q_pe[1:], sparse_indices=inputs.sparse_indices[1:]
    )
    assert_judged(reference(alone), (output[1:], lse[1:]))


def test_index_outside_the_cache_is_padding() -> None:
    """C39: 40 pages; 2560, -2 and INT32_MIN read nothing and count for nothing."""
    inputs = make_inputs(CASE)
    wild = with_row(inputs, [7, 2560, -2, 900, INT32.min, INT32.max, 2559])
    tame = with_row(inputs, [7, -1, -1, 900, -1, -1, 2559])
    for a, b in zip(call(wild), call(tame), strict=True):
        assert same_bits(a, b)
    assert_judged(reference(with_row(inputs, [7, 900, 2559])), call(wild))


@pytest.mark.parametrize("wrong", [2560, -2, INT32.min, INT32.max])
def test_index_outside_the_cache_in_checking_mode(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C39: a clear error; -1 stays legal."""
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    inputs = make_inputs(CASE)
    call(with_row(inputs, [7, -1, 2559]))
    with pytest.raises(ArgumentError) as caught:
        call(with_row(inputs, [7, -1, wrong]))
    assert str(caught.value) == (
        f"dsa_sparse_attention: 'sparse_indices'[0, 2] is {wrong}, expected -1 or 0..2559"
    )


def test_nan_stays_in_the_tokens_that_name_it() -> None:
    """Row 0 is where clamped padding lands: its NaN must not leak, and must not be hidden."""
    inputs = make_inputs(CASE)
    inputs.ckv_cache[0, 0] = math.nan
    inputs.kpe_cache[0, 0] = math.nan
    clean = with_row(inputs, [-1, 5, 10**6, 70])
    assert_judged(reference(clean), call(clean))
    output, lse = call(with_row(inputs, [-1, 5, 0, 70]))
    assert output.isnan().all()
    assert lse.isnan().all()


def test_repeated_index_counts_each_time() -> None:
    inputs = make_inputs(CASE)
    output, lse = call(with_row(inputs, [9, 9, 9, 9]))
    once, lse_once = call(with_row(inputs, [9]))
    torch.testing.assert_close(output, once)
    torch.testing.assert_close(lse, lse_once + 2.0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_indices(data: st.DataObject) -> None:
    """Whatever int32 values stand in the row, the result is the oracle's."""
    case = Case(
        "drawn",
        num_tokens=data.draw(st.integers(1, 3)),
        num_qo_heads=data.draw(st.integers(1, 3)),
        head_dim_ckv=data.draw(st.sampled_from((1, 8, 20))),
        head_dim_kpe=data.draw(st.sampled_from((1, 4))),
        page_size=data.draw(st.sampled_from((1, 3, 16))),
        topk=data.draw(st.integers(1, 9)),
        num_pages=data.draw(st.integers(0, 4)),
        valid=(0, 0, 0),
        layout=data.draw(st.sampled_from(("contiguous", "packed", "padded"))),
    )
    inputs = make_inputs(replace(case, valid=(0,) * case.num_tokens))
    value = st.one_of(st.integers(-3, case.num_rows + 2), st.sampled_from((INT32.min, INT32.max)))
    size = case.num_tokens * case.topk
    drawn = data.draw(st.lists(value, min_size=size, max_size=size))
    indices = torch.tensor(drawn, dtype=torch.int32).view(case.num_tokens, case.topk)
    inputs = inputs._replace(sparse_indices=indices)
    assert_judged(reference(inputs), call(inputs))


# ---- lse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "base_2"), [(2, 1.0), (2048, 11.0), (1, 0.0)])
def test_base_of_lse(count: int, base_2: float) -> None:
    """C40: q = 0 makes every logit 0, so that the base shows."""
    inputs = make_inputs(replace(CASE, num_tokens=1, topk=2048, valid=(count,)))
    inputs = inputs._replace(
        q_nope=torch.zeros_like(inputs.q_nope), q_pe=torch.zeros_like(inputs.q_pe)
    )
    assert (call(inputs)[1] == base_2).all()
    natural = call(inputs._replace(lse_base="e"))[1]
    torch.testing.assert_close(natural, torch.full_like(natural, math.log(count)))


@pytest.mark.parametrize("base", [10, "2", 2.0, None, True, "E"])
def test_unknown_base_of_lse(base: Any) -> None:
    with pytest.raises(ArgumentError, match=r"'lse_base' is .*, expected 2 or 'e'"):
        call(make_inputs(CASE)._replace(lse_base=base))


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1024, 2047, 4096])
def test_any_index_width(width: int) -> None:
    """C35: the width has no say in the result; 2048 columns with padding give the same."""
    inputs = make_inputs(Case("width", 1, seed=9, num_pages=80, num_qo_heads=4, topk=width))
    output, lse = call(inputs)
    expected = reference(inputs)
    assert_judged(expected, (output, lse))
    padded = torch.nn.functional.pad(inputs.sparse_indices, (37, 100), value=-1)
    assert_judged(expected, call(inputs._replace(sparse_indices=padded)))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 128])
def test_same_token_at_every_count(num_tokens: int) -> None:
    """C34: the same query and indices in every row, at every token count."""
    inputs = make_inputs(replace(CASE, num_tokens=1, valid=(100,)))
    expected = reference(inputs)
    many = inputs._replace(
        q_nope=inputs.q_nope.expand(num_tokens, -1, -1),
        q_pe=inputs.q_pe.expand(num_tokens, -1, -1),
        sparse_indices=inputs.sparse_indices.expand(num_tokens, -1),
    )
    output, lse = call(many)
    for token in {0, 7, num_tokens // 2, num_tokens - 1} & set(range(num_tokens)):
        assert_judged(expected, (output[token][None], lse[token][None]))
    torch.testing.assert_close(output, output[:1].expand_as(output), rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(lse, lse[:1].expand_as(lse), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tile", [1, 2, 5, 100])
def test_token_tile_has_no_say(tile: int) -> None:
    inputs = make_inputs(replace(CASE, num_tokens=5, valid=(128, 0, 17, 90, 1)))
    with fastkernels.force_route("dsa_sparse_attention", "torch_gather", {"token_tile": tile}):
        assert_judged(reference(inputs), call(inputs))


def test_memory_does_not_grow_with_tokens() -> None:
    """Rows are gathered tile by tile: 8 tokens' rows at most, in float32, however many tokens."""
    inputs = make_inputs(replace(CASE, num_tokens=64, num_qo_heads=1, valid=()))
    with LargestTensor() as largest:
        call(inputs)
    assert largest.bytes == 8 * 128 * 512 * 4


# ---- layouts ------------------------------------------------------------------------------------


def test_caches_as_views_of_one_buffer() -> None:
    """C44: the same bits as from separate caches, and no copy of a cache."""
    inputs = make_inputs(CASE)
    buffer = torch.cat([inputs.ckv_cache, inputs.kpe_cache], dim=2)
    packed = inputs._replace(ckv_cache=buffer[..., :512], kpe_cache=buffer[..., 512:])
    with LargestTensor() as largest:
        outputs = call(packed)
    assert largest.bytes < inputs.ckv_cache.numel() * inputs.ckv_cache.element_size()
    for a, b in zip(outputs, call(inputs), strict=True):
        assert same_bits(a, b)


def test_pages_far_apart() -> None:
    """One page under 33 million numbers (stride 0): no copy could hold them, and indices near 2**31
    find their row."""
    inputs = make_inputs(replace(CASE, num_pages=1, valid=(0, 0, 0)))
    pages = 33_000_000
    far = inputs._replace(
        ckv_cache=inputs.ckv_cache.expand(pages, -1, -1),
        kpe_cache=inputs.kpe_cache.expand(pages, -1, -1),
    )
    near, row = with_row(inputs, [5, 63, 0]), [64 * 9 + 5, 64 * (pages - 1) + 63, 64 * 40_000]
    for a, b in zip(call(with_row(far, row)), call(near), strict=True):
        assert same_bits(a, b)


def test_transposed_cache_is_refused() -> None:
    cache = torch.zeros(40, 512, 64, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(ArgumentError, match="'ckv_cache' has strides"):
        call(make_inputs(CASE)._replace(ckv_cache=cache))


# ---- refusals -----------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "C37 rank 3": (
        {"sparse_indices": torch.zeros(3, 1, 128, dtype=torch.int32)},
        "'sparse_indices' has shape (3, 1, 128), expected 2 axes (num_tokens, topk)",
    ),
    "C37 rank 1": (
        {"sparse_indices": torch.zeros(384, dtype=torch.int32)},
        "'sparse_indices' has shape (384,), expected 2 axes (num_tokens, topk)",
    ),
    "C38 int64": (
        {"sparse_indices": torch.zeros(3, 128, dtype=torch.int64)},
        "'sparse_indices' is int64, expected int32",
    ),
    "C38 indices elsewhere": (
        {"sparse_indices": torch.zeros(3, 128, dtype=torch.int32, device="meta")},
        "'sparse_indices' is on meta, expected cpu like 'q_nope'",
    ),
    "C38 queries elsewhere": (
        {"q_pe": torch.zeros(3, 16, 64, dtype=torch.bfloat16, device="meta")},
        "'q_pe' is on meta, expected cpu like 'q_nope'",
    ),
    "C46 mixed FP8 rows": (
        {"ckv_cache": torch.zeros(40, 64, 656, dtype=torch.uint8)},
        "'ckv_cache' is uint8, expected bfloat16; FP8 caches are not supported yet: dequantise",
    ),
    "C46 float8": (
        {"ckv_cache": torch.zeros(40, 64, 512, dtype=torch.float8_e4m3fn)},
        "'ckv_cache' is float8_e4m3fn, expected bfloat16; FP8 caches are not supported yet",
    ),
    "other token count": (
        {"sparse_indices": torch.zeros(4, 128, dtype=torch.int32)},
        "'sparse_indices' has shape (4, 128), expected (num_tokens=3, topk=128)",
    ),
    "other page count": (
        {"kpe_cache": torch.zeros(39, 64, 64, dtype=torch.bfloat16)},
        "'kpe_cache' has shape (39, 64, 64), expected (num_pages=40, page_size=64, head_dim_kpe=",
    ),
    "no indices": (
        {"sparse_indices": torch.zeros(3, 0, dtype=torch.int32)},
        "'sparse_indices' has topk=0, expected >= 1",
    ),
    "scale": ({"sm_scale": torch.tensor(0.1)}, "'sm_scale' is Tensor, expected a float"),
    "no scale": ({"sm_scale": None}, "'sm_scale' is NoneType, expected a float"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, message = REFUSALS[name]
    with pytest.raises(ArgumentError) as caught:
        call(make_inputs(CASE)._replace(**changes))
    assert str(caught.value).startswith(f"dsa_sparse_attention: {message}")


def test_output_may_not_overlap_the_query() -> None:
    inputs = make_inputs(CASE)
    with pytest.raises(ArgumentError, match="'output' overlaps 'q_nope'"):
        call(inputs, out=(inputs.q_nope, torch.empty(3, 16)))


# ---- inputs -------------------------------------------------------------------------------------


def test_contest_draw() -> None:
    """`valid` indices of each token as a prefix; even tokens a run, odd ones distinct positions."""
    case = replace(next(c for c in CONTEST if c.num_tokens == 6), num_pages=100)
    indices = make_inputs(case).sparse_indices
    for token, (row, count) in enumerate(zip(indices, case.valid, strict=True)):
        named = row[:count]
        assert (row[count:] == -1).all()
        assert ((named >= 0) & (named < case.num_rows)).all()
        assert named.unique().numel() == count
        if token % 2 == 0:
            assert (named.diff() == 1).all()
    assert same_bits(indices, make_inputs(case).sparse_indices)


def test_lists_are_the_contest_and_the_serving_shapes() -> None:
    assert len(CONTEST) == 23
    assert {case.num_pages for case in (*CONTEST, *SERVING)} == {8462}
    assert {case.num_tokens for case in SERVING} == {8, 16, 32, 64, 128, 256, 512, 1024, 4096}
    local = replace(SERVING[0], num_tokens=2, head_dim_ckv=1, head_dim_kpe=1)
    assert make_inputs(local).sparse_indices.div(64, rounding_mode="floor").unique().numel() <= 1024


@pytest.mark.parametrize(("size", "count"), [(10, 10), (541_568, 2048), (8, 2), (5, 1)])
def test_distinct(size: int, count: int) -> None:
    found = distinct(size, count, torch.Generator().manual_seed(1))
    assert found.unique().numel() == found.numel() == count
    assert ((found >= 0) & (found < size)).all()


def test_gap_cases_stand_around_boundaries() -> None:
    assert gap_cases(None, 1) == []
    regimes = tuple(
        Regime("default", {"num_tokens": tokens, "num_pages": (1, 9000)}, {}, "torch_gather", {})
        for tokens in ((1, 32), (33, 4096))
    )
    table = Table(
        "<text>", SPEC.name, "measured", "cpu", "CPU", 0, {},
        {"num_tokens": (1, 4096), "num_pages": (1, 9000)}, regimes, (), dict(SPEC.constants),
    )  # fmt: skip
    cases = gap_cases(table, 1)
    counts = {case.num_tokens for case in cases if case.num_pages == 8462}
    assert {1, 2, 31, 32, 33, 34, 4095, 4096, 4097} <= counts
    assert any(34 < count < 4095 for count in counts)
    assert {0, 1, 2, 8999, 9000, 9001} <= {case.num_pages for case in cases}
    assert len({case.name for case in cases}) == len(cases)
    assert gap_cases(table, 1) == cases
