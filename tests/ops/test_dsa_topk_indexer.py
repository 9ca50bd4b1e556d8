"""dsa_topk_indexer beyond the contract: the page layout, the selection rule, the judge, refusals.

The oracle over all cases, poisoned outputs and aliasing are in test_contracts.py. C58 (hanging
multi-block selection) and C59 (shared memory by length) concern kernels and need a GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastkernels
from fastkernels import dsa_topk_indexer
from fastkernels.core.table import Regime, Table
from fastkernels.errors import ArgumentError
from fastkernels.ops.dsa_topk_indexer.inputs import (
    CONTEST,
    CORNER,
    SERVING,
    Case,
    gap_cases,
    make_inputs,
    pack_pages,
)
from fastkernels.ops.dsa_topk_indexer.problem import Inputs, bind
from fastkernels.ops.dsa_topk_indexer.reference import Expected, Row, reference
from fastkernels.ops.dsa_topk_indexer.routes import torch_tiled
from fastkernels.ops.dsa_topk_indexer.spec import PAGE_BYTES, PAGE_KEY_BYTES, SPEC
from fastkernels.testing.compare import same_bits

INT32 = torch.iinfo(torch.int32)
CASE = Case("base", (300, 65, 1000), 16, 32, seed=5, num_index_heads=4, topk=256)


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


def call(inputs: Inputs, **options: Any) -> torch.Tensor:
    return dsa_topk_indexer(**inputs._asdict(), **options)


def wrong_metrics(expected: Expected, answer: torch.Tensor) -> set[str]:
    return {error.metric for error in expected.judge((answer,)) if not error.ok}


def assert_judged(expected: Expected, answer: torch.Tensor) -> None:
    errors = expected.judge((answer,))
    assert all(error.ok for error in errors), "; ".join(map(str, errors))


def corner(name: str) -> Inputs:
    return make_inputs(next(case for case in CORNER if case.name == name))


def scored(scores: list[float], topk: int, negate: bool = False) -> Inputs:
    """One row whose scores are exactly `relu(s)` of the given s (or `-relu(s)`): one head, keys and
    query e_0, the score as scale."""
    keys = torch.zeros(-(-len(scores) // 64) * 64, 128)
    keys[:, 0] = 1.0
    scales = torch.zeros(keys.shape[0])
    scales[: len(scores)] = torch.tensor(scores)
    cache = pack_pages(keys.to(torch.float8_e4m3fn), scales)
    num_pages = cache.shape[0]
    return Inputs(
        q_index_fp8=keys[None, :1].to(torch.float8_e4m3fn),
        k_index_cache_fp8=cache.view(torch.int8).view(num_pages, 64, 1, 132),
        weights=torch.tensor([[-1.0 if negate else 1.0]]),
        seq_lens=torch.tensor([len(scores)], dtype=torch.int32),
        block_table=torch.arange(num_pages, dtype=torch.int32)[None],
        topk=topk,
    )


def by_rule(scores: list[float], topk: int) -> set[int]:
    """NaN first, then by value, the lowest position among equals (-0.0 == 0.0 in Python, too)."""
    positions = range(len(scores))
    ranked = sorted(
        positions, key=lambda t: (0 if math.isnan(scores[t]) else 1, _descending(scores[t]), t)
    )
    return set(ranked[:topk])


def _descending(score: float) -> float:
    return 0.0 if math.isnan(score) else -score


# ---- layout and scores --------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    """A byte's value by the OCP FP8 definition: sign, 4 exponent bits (bias 7), 3 mantissa bits."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    if exponent == 0xF and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def page_bytes(key_bytes: list[list[int]], scales: list[float]) -> bytes:
    """64 keys of 128 bytes, then 64 little-endian float32 scales."""
    return b"".join(bytes(key) for key in key_bytes) + struct.pack("<64f", *scales)


def test_page_layout_byte_by_byte() -> None:
    """C53: pages built and scores computed without a tensor; oracle and route agree with them."""
    random = torch.Generator().manual_seed(3)
    finite = [byte for byte in range(256) if not math.isnan(e4m3(byte))]
    draws = torch.randint(len(finite), (2, 64, 128), generator=random).tolist()
    pages = [[[finite[i] for i in key] for key in page] for page in draws]
    scales = torch.randn(2, 64, generator=random).exp().mul(0.01).tolist()
    raw = b"".join(page_bytes(page, scale) for page, scale in zip(pages, scales, strict=True))
    cache = torch.frombuffer(bytearray(raw), dtype=torch.int8).view(2, 64, 1, 132)
    q = torch.randn(1, 2, 128, generator=random).to(torch.float8_e4m3fn)
    weights = torch.tensor([[1.5, -0.25]])
    inputs = Inputs(
        q, cache, weights, torch.tensor([100], dtype=torch.int32),
        torch.tensor([[1, 0]], dtype=torch.int32), topk=40,
    )  # fmt: skip

    queries = [[e4m3(byte) for byte in head] for head in q[0].view(torch.uint8).tolist()]
    scores = {}
    for t in range(100):
        page, offset = (1, 0)[t // 64], t % 64
        key = [e4m3(byte) for byte in pages[page][offset]]
        scale = struct.unpack("<f", struct.pack("<f", scales[page][offset]))[0]
        dots = [math.fsum(a * b for a, b in zip(head, key, strict=True)) for head in queries]
        terms = zip(weights[0].tolist(), dots, strict=True)
        scores[page * 64 + offset] = math.fsum(w * max(scale * dot, 0.0) for w, dot in terms)
    best = sorted(scores, key=lambda index: -scores[index])[:40]
    expected = reference(inputs)
    assert expected.topk_indices[0].tolist() == best
    assert sorted(call(inputs)[0].tolist()) == sorted(best)
    row = expected.rows[0]
    for index, score in zip(row.indices.tolist(), row.scores.tolist(), strict=True):
        assert score == pytest.approx(scores[index], rel=1e-14, abs=1e-18)


def _beside_keys(cache: torch.Tensor) -> torch.Tensor:
    """Each scale next to its key, 132 bytes per position."""
    keys = cache[:, :PAGE_KEY_BYTES].unflatten(1, (64, 128))
    scales = cache[:, PAGE_KEY_BYTES:].unflatten(1, (64, 4))
    return torch.cat([keys, scales], dim=2).flatten(1)


def _shifted(cache: torch.Tensor) -> torch.Tensor:
    """Every scale one position late within its page."""
    scales = cache[:, PAGE_KEY_BYTES:].roll(4, dims=1)
    return torch.cat([cache[:, :PAGE_KEY_BYTES], scales], dim=1)


def _scales_first(cache: torch.Tensor) -> torch.Tensor:
    return torch.cat([cache[:, PAGE_KEY_BYTES:], cache[:, :PAGE_KEY_BYTES]], dim=1)


@pytest.mark.parametrize("layout", [_beside_keys, _shifted, _scales_first])
def test_only_the_page_layout_matches(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """C53: 8192 positions with log-normal key norms and positive weights, so that the scale decides
    which score is large."""
    inputs = make_inputs(Case("layout", (8192,), 128, 128, seed=3, keys="lognormal"))
    inputs = inputs._replace(weights=inputs.weights.abs())
    expected = reference(inputs)
    assert_judged(expected, call(inputs))
    raw = layout(inputs.k_index_cache_fp8.view(torch.uint8).reshape(-1, PAGE_BYTES))
    other = inputs._replace(k_index_cache_fp8=raw.view(inputs.k_index_cache_fp8.shape))
    answer = call(other)
    assert "score_band" in wrong_metrics(expected, answer)
    shared = set(answer[0].tolist()) & set(expected.topk_indices[0].tolist())
    assert len(shared) < 1500


def test_oracle_equals_torch_topk() -> None:
    """On distinct scores the rule is torch.topk over sum(relu(scale * q k) * w)."""
    inputs = make_inputs(
        replace(CASE, num_index_heads=64, seq_lens=(1000, 700, 300), keys="signed")
    )
    expected = reference(inputs)
    for i, row in enumerate(expected.rows):
        pages = inputs.block_table[i].long()
        raw = inputs.k_index_cache_fp8[pages].view(torch.uint8).view(-1, PAGE_BYTES)
        keys = raw[:, :PAGE_KEY_BYTES].reshape(-1, 128).view(torch.float8_e4m3fn).double()
        scales = raw[:, PAGE_KEY_BYTES:].reshape(-1).view(torch.float32).double()
        weighted = torch.einsum(
            "h,hn->n",
            inputs.weights[i].double(),
            torch.relu(torch.einsum("hd,nd,n->hn", inputs.q_index_fp8[i].double(), keys, scales)),
        )[: int(inputs.seq_lens[i])]
        assert weighted.unique().numel() == weighted.numel()
        torch.testing.assert_close(row.scores, weighted, rtol=1e-12, atol=1e-15)
        best = weighted.topk(256).indices
        assert expected.topk_indices[i].tolist() == (pages[best // 64] * 64 + best % 64).tolist()


# ---- selection rule -----------------------------------------------------------------------------

SPECIAL = (0.0, -0.0, 1.0, 2.0**-126, 3.0e38, math.inf, -math.inf, math.nan, -math.nan, -5.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), negate=st.booleans())
def test_selection_rule(data: st.DataObject, negate: bool) -> None:
    """Any float32 scores, ties and specials included: exactly the rule's set, padding last."""
    number = st.floats(width=32, allow_nan=True, allow_subnormal=False)
    scores = data.draw(
        st.lists(st.one_of(st.sampled_from(SPECIAL), number), min_size=1, max_size=130)
    )
    topk = data.draw(st.integers(1, 140))
    inputs = scored(scores, topk, negate)
    sign = -1.0 if negate else 1.0
    exact = [s if math.isnan(s) else sign * max(s, 0.0) for s in scores]
    answer = call(inputs)[0].tolist()
    count = min(topk, len(scores))
    assert set(answer[:count]) == by_rule(exact, topk)
    assert len(set(answer[:count])) == count
    assert answer[count:] == [-1] * (topk - count)
    assert set(reference(inputs).topk_indices[0].tolist()) - {-1} == by_rule(exact, topk)
    assert_judged(reference(inputs), torch.tensor([answer], dtype=torch.int32))


def test_ranks_order_every_float() -> None:
    """NaN of either sign on top, then +inf down to -inf, -0.0 like +0.0."""
    falling = [math.inf, 3.4e38, 1.0, 2.0**-126, 1e-45, 0.0, -1e-45, -1.0, -3.4e38, -math.inf]
    ranks = torch_tiled._ranks(torch.tensor([math.nan, *falling, -0.0, -math.nan])).tolist()
    assert ranks[0] == ranks[-1] == max(ranks)
    assert ranks[-2] == ranks[1 + falling.index(0.0)]
    assert ranks[:-2] == sorted(set(ranks), reverse=True)
    assert min(ranks) > INT32.min  # the rank of what is no candidate


@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (8, 64), (100, 1000)])
@pytest.mark.parametrize("name", ["equal", "zero"])
def test_equal_scores_take_the_lowest_positions(name: str, tiles: tuple[int, int]) -> None:
    """Also across the boundaries of tiles, whatever their size."""
    inputs = corner(name)
    config = {"row_tile": tiles[0], "page_tile": tiles[1]}
    with fastkernels.force_route("dsa_topk_indexer", "torch_tiled", config):
        answer = call(inputs)
    position = torch.arange(2048)
    lowest = inputs.block_table[:, position // 64] * 64 + position % 64
    assert torch.equal(answer.sort(1).values, lowest.int().sort(1).values)


@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (3, 7), (100, 1000)])
def test_tiles_have_no_say(tiles: tuple[int, int]) -> None:
    inputs = make_inputs(replace(CASE, num_index_heads=16))
    config = {"row_tile": tiles[0], "page_tile": tiles[1]}
    with fastkernels.force_route("dsa_topk_indexer", "torch_tiled", config):
        assert_judged(reference(inputs), call(inputs))


def test_crowded_scores() -> None:
    """C47 at 65 536 positions: nearly equal keys, far more of them than any bucket of leading bits
    holds; the same answer every time."""
    case = Case("crowded", (65536,), 1024, 1024, seed=7, num_index_heads=16, keys="crowded")
    inputs = make_inputs(case)
    expected = reference(inputs)
    leading = expected.rows[0].scores.float().view(torch.int32) >> 20
    assert leading.unique(return_counts=True)[1].max() > 4096
    answer = call(inputs)
    assert_judged(expected, answer)
    assert same_bits(answer, call(inputs))


# ---- lengths, pages, padding --------------------------------------------------------------------


def test_rows_shorter_than_topk() -> None:
    """C49: every candidate of a short row, distinct, then -1."""
    answer = corner("short")
    indices = call(answer)
    for row, count in zip(indices, (0, 1, 2047, 2048, 2048, 2048), strict=True):
        assert (row[:count] >= 0).all()
        assert row[:count].unique().numel() == count
        assert (row[count:] == -1).all()


@pytest.mark.parametrize("topk", [64, 2048])
def test_nan_scores(topk: int) -> None:
    """C50: a NaN weight, NaN key bytes; every entry in range or -1, NaN scores first."""
    inputs = make_inputs(replace(CASE, seq_lens=(100, 100), topk=topk))
    inputs.weights[0, 1] = math.nan
    keys = inputs.k_index_cache_fp8.view(torch.uint8).view(-1, PAGE_BYTES)[:, :PAGE_KEY_BYTES]
    page = int(inputs.block_table[1, 1])
    keys[page, 30 * 128 + 9] = 0x7F
    answer = call(inputs)
    assert_judged(reference(inputs), answer)
    assert page * 64 + 30 in answer[1].tolist()
    for row, pages in zip(answer, inputs.block_table, strict=True):
        legal = {int(pages[t // 64]) * 64 + t % 64 for t in range(100)}
        named = row[row >= 0].tolist()
        assert len(named) == len(set(named)) == min(topk, 100)
        assert set(named) <= legal
    lowest = inputs.block_table[0, :2].long()[:, None] * 64 + torch.arange(64)
    if topk == 64:  # all scores of row 0 are NaN
        assert set(answer[0].tolist()) == set(lowest[0].tolist())


def test_strided_lengths_and_table() -> None:
    """C52: lengths of every second element, a column slice as table: the same bits."""
    inputs = make_inputs(CASE)
    lengths = torch.stack([inputs.seq_lens, torch.full((3,), -7, dtype=torch.int32)], 1).flatten()
    wide = torch.nn.functional.pad(inputs.block_table, (5, 3), value=10**6)
    transposed = wide.t().contiguous().t()
    for table in (wide, transposed):
        strided = inputs._replace(seq_lens=lengths[::2], block_table=table[:, 5:-3])
        assert same_bits(call(strided), call(inputs))


@pytest.mark.parametrize("junk", [-1, 10**6, 32, INT32.min, INT32.max])
def test_junk_beyond_the_used_pages(junk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: unused entries change nothing, also in checking mode."""
    inputs = make_inputs(replace(CASE, seq_lens=(65,)))
    clean = call(inputs)
    inputs.block_table[0, 2:] = junk
    assert same_bits(call(inputs), clean)
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    assert same_bits(call(inputs), clean)


@pytest.mark.parametrize("wrong", [-1, 32, INT32.min])
def test_used_page_outside_the_cache(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: its positions are no candidates; a clear error in checking mode."""
    inputs = make_inputs(replace(CASE, seq_lens=(300, 65)))
    inputs.block_table[0, 3] = wrong
    answer = call(inputs)
    assert_judged(reference(inputs), answer)
    assert int((answer[0] >= 0).sum()) == 300 - 64
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    with pytest.raises(ArgumentError) as caught:
        call(inputs)
    assert str(caught.value) == (
        f"dsa_topk_indexer: 'block_table'[0, 3] is {wrong}, expected a page of the cache "
        "(num_pages=32) within the row's length 300"
    )


@pytest.mark.parametrize(("length", "clamped"), [(-1, 0), (1025, 1024), (INT32.max, 1024)])
def test_impossible_length(length: int, clamped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C56: clamped; a clear error in checking mode."""
    inputs = make_inputs(replace(CASE, seq_lens=(64, 1024)))
    impossible = inputs._replace(seq_lens=torch.tensor([64, length], dtype=torch.int32))
    possible = inputs._replace(seq_lens=torch.tensor([64, clamped], dtype=torch.int32))
    assert same_bits(call(impossible), call(possible))
    monkeypatch.setenv("FASTKERNELS_CHECK", "values")
    call(possible)
    with pytest.raises(ArgumentError) as caught:
        call(impossible)
    assert str(caught.value) == (
        f"dsa_topk_indexer: 'seq_lens'[1] is {length}, expected 0..1024 (max_num_pages * page_size)"
    )


def test_page_listed_twice_gives_an_index_twice() -> None:
    inputs = make_inputs(replace(CASE, seq_lens=(256,), pages="repeated"))
    counts = call(inputs)[0].unique(return_counts=True)[1]
    assert counts.tolist() == [2] * 128


def test_neighbours_have_no_say() -> None:
    """A row alone and among others: the same set (float32 sums may differ in their last bit)."""
    inputs = make_inputs(replace(CASE, seq_lens=(1000,) * 9))
    for row in (0, 8):
        alone = Inputs(
            inputs.q_index_fp8[row : row + 1], inputs.k_index_cache_fp8,
            inputs.weights[row : row + 1], inputs.seq_lens[row : row + 1],
            inputs.block_table[row : row + 1], inputs.topk,
        )  # fmt: skip
        expected = reference(alone)
        assert_judged(expected, call(alone))
        assert_judged(expected, call(inputs)[row : row + 1])


def test_memory_is_bounded_by_tiles() -> None:
    """A tile of 8 rows and 64 pages, not all rows and pages, is expanded to float32 at once."""
    case = replace(CASE, seq_lens=(64 * 128,) * 16, max_num_pages=128, num_index_heads=64)
    inputs = make_inputs(case)
    with LargestTensor() as largest:
        call(inputs)
    assert largest.bytes == 8 * 64 * 64 * 128 * 4


# ---- the judge (C143) ---------------------------------------------------------------------------


def _answer(inputs: Inputs) -> tuple[Expected, torch.Tensor]:
    expected = reference(inputs)
    answer = expected.topk_indices
    assert wrong_metrics(expected, answer) == set()
    return expected, answer


def _replaced(answer: torch.Tensor, row: int, column: int, value: int) -> torch.Tensor:
    changed = answer.clone()
    changed[row, column] = value
    return changed


def test_judge_passes_any_order() -> None:
    expected, answer = _answer(make_inputs(CASE))
    shuffled = answer.clone()
    for row, count in ((0, 256), (1, 65), (2, 256)):
        shuffled[row, :count] = answer[row, torch.randperm(count)]
    assert wrong_metrics(expected, shuffled) == set()
    assert expected.judge_official((shuffled,))[0].ok


def test_judge_fails_padding() -> None:
    """Padding before indices, junk instead of -1, an index in the padding, one index too few."""
    expected, answer = _answer(make_inputs(CASE))
    swapped = answer.clone()
    swapped[1, 64], swapped[1, 65] = -1, answer[1, 64]
    assert wrong_metrics(expected, swapped) == {"padding"}
    assert wrong_metrics(expected, _replaced(answer, 1, 200, -2)) == {"padding"}
    assert wrong_metrics(expected, _replaced(answer, 1, 200, 0)) == {"padding", "membership"}
    assert wrong_metrics(expected, _replaced(answer, 1, 64, -1)) >= {"padding"}
    assert wrong_metrics(expected, _replaced(answer, 2, 255, -1)) >= {"padding"}


def test_judge_fails_strangers() -> None:
    """One duplicate; one index of a page of another row, past the length, or beyond the cache."""
    inputs = make_inputs(CASE)
    expected, answer = _answer(inputs)
    other = int(inputs.block_table[1, 0]) * 64
    beyond = int(inputs.block_table[0, 4]) * 64 + 300 % 64
    for stranger in (int(answer[0, 17]), other, beyond, 32 * 64, INT32.max):
        assert "membership" in wrong_metrics(expected, _replaced(answer, 0, 255, stranger))


def test_judge_fails_a_dropped_best() -> None:
    """The best position left out for the next one below, in one row of many."""
    expected, answer = _answer(make_inputs(replace(CASE, num_index_heads=64)))
    for row, column in ((0, 0), (2, 0), (2, 100)):
        after = int(expected.rows[row].indices[expected.rows[row].order[256]])
        changed = _replaced(answer, row, column, after)
        assert wrong_metrics(expected, changed) == {"score_band"}
        errors = [error for error in expected.judge((changed,)) if not error.ok]
        assert errors[0].at[0] == row
        assert str(int(answer[row, column])) in errors[0].want


def test_official_rule_fails_a_dropped_best() -> None:
    expected, answer = _answer(make_inputs(CASE))
    assert not expected.judge_official((_replaced(answer, 0, 255, -1),))[0].ok
    assert not expected.judge_official((torch.full_like(answer, -1),))[0].ok


@pytest.mark.parametrize(("ulps", "is_wrong"), [(8, False), (15, False), (17, True), (4000, True)])
def test_judge_knows_the_band(ulps: int, is_wrong: bool) -> None:
    """With one head and e_0 a score is its own magnitude, so a pair near 1.0 may swap within
    2 * 16 * 2**-24, which is 16 ulp."""
    expected, answer = _answer(scored([1.0 + ulps * 2.0**-23, 1.0, 0.5, 2.0], topk=2))
    assert set(answer[0].tolist()) == {0, 3}
    verdict = wrong_metrics(expected, torch.tensor([[1, 3]], dtype=torch.int32))
    assert verdict == ({"score_band"} if is_wrong else set())
    assert wrong_metrics(expected, torch.tensor([[2, 3]], dtype=torch.int32)) == {"score_band"}


def test_band_is_that_of_all_pairs() -> None:
    """The judge looks at one extreme pair; here it is compared with every pair."""
    limit, rng = SPEC.tolerances[0].limit, torch.Generator().manual_seed(6)
    verdicts = []
    for _ in range(300):
        n, topk = 12, 5
        magnitudes = torch.randint(4, (n,), generator=rng).double() ** 3
        scores = 1.0 + 60 * limit * torch.rand(n, generator=rng, dtype=torch.float64)
        row = Row(torch.arange(n), scores, magnitudes, torch.zeros(n, dtype=torch.bool))
        taken = row.order[torch.randperm(topk + 2, generator=rng)[:topk]]
        left = torch.tensor(sorted(set(range(n)) - set(taken.tolist())))
        gap = scores[left][:, None] - scores[taken]
        allowed = limit * (magnitudes[left][:, None] + magnitudes[taken])
        verdicts.append(bool((gap > allowed).any()))
        judged = wrong_metrics(Expected(topk, (row,)), taken[None].int())
        assert judged == ({"score_band"} if verdicts[-1] else set())
    assert 30 < sum(verdicts) < 270


def test_judge_on_swapped_ties() -> None:
    """Rounding may break a tie of non-zero scores, so a swap passes; a tie of certain zeros or of
    non-finite scores is exact in every kernel, so the lowest positions are required."""
    expected, _ = _answer(scored([1.0, 1.0, 0.5], topk=1))
    assert wrong_metrics(expected, torch.tensor([[1]], dtype=torch.int32)) == set()
    for value in (0.0, -3.0, math.inf, math.nan):
        expected, _ = _answer(scored([value] * 3, topk=1))
        assert wrong_metrics(expected, torch.tensor([[1]], dtype=torch.int32)) == {"tie_order"}
    expected, _ = _answer(scored([math.inf] * 3, topk=2, negate=True))
    assert wrong_metrics(expected, torch.tensor([[0, 2]], dtype=torch.int32)) == {"tie_order"}


@pytest.mark.parametrize(("exponent", "is_wrong"), [(-141, False), (-139, True)])
def test_judge_has_a_floor(exponent: int, is_wrong: bool) -> None:
    """A difference that float32 may flush to zero is allowed, however small the magnitudes."""
    expected, _ = _answer(scored([2.0**exponent, 0.0], topk=1))
    verdict = wrong_metrics(expected, torch.tensor([[1]], dtype=torch.int32))
    assert verdict == ({"score_band"} if is_wrong else set())


def test_zero_by_cancellation_is_no_certain_zero() -> None:
    """Terms or products that cancel may come out non-zero in float32, in another order."""
    inputs = scored([1.0, 2.0, 3.0], topk=1)
    twice = inputs._replace(
        q_index_fp8=inputs.q_index_fp8.repeat(1, 2, 1), weights=torch.tensor([[1.0, -1.0]])
    )
    row = reference(twice).rows[0]
    assert not row.scores.any()
    assert not row.is_zero.any()
    assert reference(twice._replace(weights=torch.zeros(1, 2))).rows[0].is_zero.all()
    keys = torch.zeros(64, 128)
    keys[0, :2], keys[1, :2], keys[2, 2] = torch.tensor([3.0, -3.0]), torch.tensor([3.0, -4.0]), 1.0
    cache = pack_pages(keys.to(torch.float8_e4m3fn), torch.ones(64)).view(torch.int8)
    q = torch.zeros(1, 1, 128)
    q[..., :2] = 1.0
    row = reference(
        inputs._replace(
            q_index_fp8=q.to(torch.float8_e4m3fn), k_index_cache_fp8=cache.view(1, 64, 1, 132)
        )
    ).rows[0]
    assert row.scores.tolist() == [0.0, 0.0, 0.0]
    assert row.is_zero.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("scores", "wrong"),
    [
        ([math.nan, 5.0], 1),
        ([math.inf, 3e38], 1),
        ([math.nan, math.inf], 1),
        ([3e38, math.inf], 0),
    ],
)
def test_judge_orders_non_finite_scores_exactly(scores: list[float], wrong: int) -> None:
    expected, _ = _answer(scored(scores, topk=1))
    assert wrong_metrics(expected, torch.tensor([[wrong]], dtype=torch.int32)) == {"score_band"}


def test_judge_of_repeated_pages() -> None:
    """An index may come as often as positions give it, and no oftener."""
    inputs = make_inputs(replace(CASE, seq_lens=(256,), pages="repeated", topk=200))
    expected, answer = _answer(inputs)
    (row,) = answer.tolist()
    assert sorted(row[0:2]) == [row[0]] * 2
    assert wrong_metrics(expected, _replaced(answer, 0, 199, row[0])) == {"membership"}


def test_random_bytes_are_judged() -> None:
    """C143: a cache of random bytes has NaN and huge scales; no false alarm, no silence."""
    inputs = make_inputs(CASE)
    rng = torch.Generator().manual_seed(4)
    inputs.k_index_cache_fp8.random_(-128, 128, generator=rng)
    expected = reference(inputs)
    assert any(row.scores.isnan().any() for row in expected.rows)
    answer = call(inputs)
    assert_judged(expected, answer)
    for row in (0, 2):
        worst = int(expected.rows[row].indices[expected.rows[row].order[-1]])
        assert wrong_metrics(expected, _replaced(answer, row, 0, worst))


# ---- the option topk, refusals ------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 2, 255, 1024, 1025, 5000])
def test_topk_is_the_output_width(topk: int) -> None:
    inputs = make_inputs(replace(CASE, topk=topk))
    answer = call(inputs)
    assert answer.shape == (3, topk)
    assert_judged(reference(inputs), answer)
    assert bind(inputs, None, None).key.axis("topk") == topk


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "topk 0": ({"topk": 0}, "'topk' has topk=0, expected 1..2147483647"),
    "topk negative": ({"topk": -5}, "'topk' has topk=-5, expected 1..2147483647"),
    "topk float": ({"topk": 2048.0}, "'topk' is float, expected an int"),
    "cache dtype": (
        {"k_index_cache_fp8": torch.zeros(32, 64, 1, 132, dtype=torch.float8_e4m3fn)},
        "'k_index_cache_fp8' is float8_e4m3fn, expected int8 or uint8; a page is 64 rows of 128",
    ),
    "cache rank": (
        {"k_index_cache_fp8": torch.zeros(32, 64, 132, dtype=torch.int8)},
        "'k_index_cache_fp8' has shape (32, 64, 132), expected 4 axes",
    ),
    "page size": (
        {"k_index_cache_fp8": torch.zeros(32, 32, 1, 132, dtype=torch.int8)},
        "'k_index_cache_fp8' has page_size=32, expected 64",
    ),
    "page not dense": (
        {"k_index_cache_fp8": torch.zeros(32, 64, 1, 136, dtype=torch.int8)[..., :132]},
        "'k_index_cache_fp8' has strides",
    ),
    "head width": (
        {"q_index_fp8": torch.zeros(3, 4, 64).to(torch.float8_e4m3fn)},
        "'q_index_fp8' has index_head_dim=64, expected 128",
    ),
    "query dtype": (
        {"q_index_fp8": torch.zeros(3, 4, 128)},
        "'q_index_fp8' is float32, expected float8_e4m3fn",
    ),
    "heads": (
        {"weights": torch.zeros(3, 5)},
        "'weights' has shape (3, 5), expected (batch_size=3, num_index_heads=4)",
    ),
    "lengths dtype": (
        {"seq_lens": torch.zeros(3, dtype=torch.int64)},
        "'seq_lens' is int64, expected int32",
    ),
    "table rows": (
        {"block_table": torch.zeros(2, 16, dtype=torch.int32)},
        "'block_table' has shape (2, 16), expected (batch_size=3, max_num_pages=16)",
    ),
    "table elsewhere": (
        {"block_table": torch.zeros(3, 16, dtype=torch.int32, device="meta")},
        "'block_table' is on meta, expected cpu like 'q_index_fp8'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, message = REFUSALS[name]
    with pytest.raises(ArgumentError) as caught:
        call(make_inputs(CASE)._replace(**changes))
    assert str(caught.value).startswith(f"dsa_topk_indexer: {message}")


def test_output_may_not_overlap_the_table() -> None:
    inputs = make_inputs(replace(CASE, topk=16))
    with pytest.raises(ArgumentError, match="'topk_indices' overlaps 'block_table'"):
        call(inputs, out=inputs.block_table)


# ---- inputs -------------------------------------------------------------------------------------


def test_contest_draw() -> None:
    """Pages of a permutation, then page 0; clamped queries; each key's largest byte is +-448."""
    case = replace(next(c for c in CONTEST if c.batch_size == 30), num_pages=200)
    inputs = make_inputs(case)
    used = [case.used_pages(row) for row in range(30)]
    entries = torch.cat([row[:n] for row, n in zip(inputs.block_table, used, strict=True)])
    assert entries[:200].unique().numel() == min(sum(used), 200)
    assert all(not row[n:].any() for row, n in zip(inputs.block_table, used, strict=True))
    assert inputs.q_index_fp8.float().abs().max() == 2.0
    raw = inputs.k_index_cache_fp8.view(torch.uint8).reshape(-1, PAGE_BYTES)
    keys = raw[:, :PAGE_KEY_BYTES].reshape(-1, 128).view(torch.float8_e4m3fn).float()
    assert (keys.abs().amax(1) == 448.0).all()
    assert same_bits(inputs.k_index_cache_fp8, make_inputs(case).k_index_cache_fp8)


def test_lists_are_the_contest_and_the_serving_shapes() -> None:
    assert len(CONTEST) == 128
    assert {case.num_pages for case in CONTEST} == {11923}
    assert sum(length > 2048 for case in CONTEST for length in case.seq_lens) == 59
    sizes = {(case.batch_size, case.seq_lens[0], case.num_pages) for case in SERVING}
    assert sizes == {
        (31, 5806, 11923), (64, 8192, 11923), (128, 8192, 16384),
        (64, 32768, 32768), (1, 131072, 11923), (8, 131072, 16384),
    }  # fmt: skip


def test_gap_cases_stand_around_boundaries() -> None:
    assert gap_cases(None, 1) == []
    limits = {"batch_size": (1, 64), "max_num_pages": (1, 128), "num_pages": (1, 20000)}
    regimes = tuple(
        Regime("default", {**limits, "max_num_pages": width}, {}, "torch_tiled", {})
        for width in ((1, 32), (33, 128))
    )
    table = Table(
        "<text>",
        SPEC.name,
        "measured",
        "cpu",
        "CPU",
        0,
        {},
        limits,
        regimes,
        (),
        dict(SPEC.constants),
    )
    cases = gap_cases(table, 1)
    widths = {case.max_num_pages for case in cases}
    assert {1, 2, 31, 32, 33, 34, 127, 128, 129} <= widths
    assert any(34 < width < 127 and width != 91 for width in widths)
    assert {1, 2, 63, 64, 65} <= {case.batch_size for case in cases}
    assert {0, 1, 2} <= {case.num_pages for case in cases}
    assert len({case.name for case in cases}) == len(cases)
    assert gap_cases(table, 1) == cases
