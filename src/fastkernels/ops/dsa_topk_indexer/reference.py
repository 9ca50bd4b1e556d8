"""The oracle of dsa_topk_indexer: float64 scores, row by row, the selection rule, and the judge.

A kernel need not return the oracle's set: rounding may swap positions of nearly equal score. The
judge scores what came back, instead: how many, whether each index can be reached, whether one came
too often, whether a position was left out whose score is above that of a taken one by more than
rounding explains, and whether ties that rounding cannot break went to the lowest positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.ops._shared.compare import Error, official, wrong_shape
from fastkernels.ops.dsa_topk_indexer.problem import Inputs
from fastkernels.ops.dsa_topk_indexer.spec import (
    KEY_BYTES,
    PAGE_BYTES,
    PAGE_KEY_BYTES,
    PAGE_SIZE,
    SPEC,
)

BAND_FLOOR = 2.0**-140
"""Score difference that float32 cannot hold; always allowed."""

CERTAIN_SIGN = 2.0**-17
"""A dot product this far from 0, relative to `sum |q_d k_d|`, keeps its sign in float32 in any
order of its 128 terms."""

_OUTPUT = SPEC.outputs[0].name
_CHUNK = 8192  # positions scored at once


@dataclass(frozen=True)
class Row:
    """A row's candidates in order of position.

    indices: page * 64 + offset.   scores: float64, infinite beyond float32's range.
    magnitudes: `|scale| * sum_h |w_h| * sum_d |q_hd k_d|`, 0 where not finite.
    is_zero: every term of the score is zero, and is so in float32, too.
    """

    indices: torch.Tensor
    scores: torch.Tensor
    magnitudes: torch.Tensor
    is_zero: torch.Tensor

    @property
    def order(self) -> torch.Tensor:
        """Positions, best first by the selection rule (torch sorts NaN above +inf)."""
        return torch.sort(self.scores, descending=True, stable=True).indices


@dataclass(frozen=True)
class Expected:
    """What the judge needs of every row."""

    topk: int
    rows: tuple[Row, ...]

    @property
    def topk_indices(self) -> torch.Tensor:
        """The selection rule's answer on exact scores, best first."""
        answer = torch.full((len(self.rows), self.topk), -1, dtype=torch.int32)
        for i, row in enumerate(self.rows):
            best = row.indices[row.order[: self.topk]]
            answer[i, : best.numel()] = best.int()
        return answer

    def judge(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """Ours, each the worst over rows: wrong padding, wrong members, band, wrong ties."""
        if outputs[0].shape != (len(self.rows), self.topk):
            return [wrong_shape(SPEC.tolerances[0], outputs[0], (len(self.rows), self.topk))]
        got = outputs[0].detach().cpu().long()
        judged = [_judge_row(i, row, got[i], self.topk) for i, row in enumerate(self.rows)]
        kinds = zip(*judged, strict=True) if judged else ((error,) for error in _nothing_wrong())
        return [max(errors, key=lambda error: error.value) for errors in kinds]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        """The contest's: exact scores of both answers, best first, position by position."""
        got = outputs[0].detach().cpu().long()
        ranked = torch.full((2, len(self.rows), self.topk), -math.inf, dtype=torch.float64)
        for i, row in enumerate(self.rows):
            taken, _ = _take(row, got[i])
            for side, scores in enumerate((row.scores[taken], row.scores[row.order[: self.topk]])):
                ranked[side, i, : scores.numel()] = scores.sort(descending=True).values
        return [official(SPEC.tolerances[0], ranked[0], ranked[1])]


# ---- judge --------------------------------------------------------------------------------------


def _nothing_wrong() -> list[Error]:
    band = SPEC.tolerances[0]
    return [
        Error(_OUTPUT, "padding", 0.0, 0.0),
        Error(_OUTPUT, "membership", 0.0, 0.0),
        Error(_OUTPUT, band.metric, 0.0, band.limit),
        Error(_OUTPUT, "tie_order", 0.0, 0.0),
    ]


def _judge_row(i: int, row: Row, entries: torch.Tensor, topk: int) -> list[Error]:
    taken, strays = _take(row, entries)
    return [
        _judge_padding(i, row, entries, topk),
        _judge_membership(i, entries, strays),
        _judge_band(i, row, taken),
        _judge_ties(i, row, taken),
    ]


def _judge_padding(i: int, row: Row, entries: torch.Tensor, topk: int) -> Error:
    """min(topk, candidates) indices first, then -1 alone."""
    count = min(topk, row.indices.numel())
    is_wrong = torch.cat([entries[:count] < 0, entries[count:] != -1])
    return _count_wrong(
        i, "padding", is_wrong.nonzero().flatten(), entries, f"{count} indices, then -1"
    )


def _judge_membership(i: int, entries: torch.Tensor, strays: torch.Tensor) -> Error:
    """Every index belongs to a candidate of its own."""
    return _count_wrong(i, "membership", strays, entries, "a candidate that no other entry names")


def _count_wrong(
    i: int, metric: str, wrong: torch.Tensor, entries: torch.Tensor, want: str
) -> Error:
    if wrong.numel() == 0:
        return Error(_OUTPUT, metric, 0.0, 0.0)
    first = int(wrong.min())
    return Error(
        _OUTPUT, metric, float(wrong.numel()), 0.0, (i, first), str(int(entries[first])), want
    )


def _take(row: Row, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(taken, strays)`: the candidates that the entries name, and the columns that name none.

    An index that several positions give (a page listed twice) takes the lowest of them first; their
    keys are the same, so no other choice could be judged better.
    """
    columns = (entries >= 0).nonzero().flatten()
    named, by_value = entries[columns].sort(stable=True)
    candidates, by_index = row.indices.sort(stable=True)
    repeat = torch.arange(named.numel()) - torch.searchsorted(named, named)
    slot = torch.searchsorted(candidates, named) + repeat
    inside = slot.clamp(max=candidates.numel() - 1)
    is_found = torch.zeros_like(named, dtype=torch.bool)
    if candidates.numel():
        is_found = (slot < candidates.numel()) & (candidates[inside] == named)
    taken = torch.zeros(candidates.shape, dtype=torch.bool)
    taken[by_index[slot[is_found]]] = True
    return taken, columns[by_value[~is_found]]


def _judge_band(i: int, row: Row, taken: torch.Tensor) -> Error:
    """The worst `(s_i - s_j) / (M_i + M_j)` of a position i left out and a position j taken.

    Over all pairs the limit c is kept exactly if it is kept by the i of largest `s_i - c M_i` and
    the j of smallest `s_j + c M_j`. NaN, +inf, finite, -inf are classes and compared exactly.
    """
    band = SPEC.tolerances[0]
    kind = _classes(row.scores)
    left = ~taken
    if not taken.any() or not left.any():
        return Error(_OUTPUT, band.metric, 0.0, band.limit)
    best_left, worst_taken = int(kind[left].max()), int(kind[taken].min())
    if best_left > worst_taken:
        skipped = int((left & (kind == best_left)).nonzero()[0])
        chosen = int((taken & (kind == worst_taken)).nonzero()[0])
        return _band_error(i, row, skipped, chosen, math.inf)
    is_finite = kind == _FINITE
    if not (left & is_finite).any() or not (taken & is_finite).any():
        return Error(_OUTPUT, band.metric, 0.0, band.limit)
    low = row.scores - band.limit * row.magnitudes
    high = row.scores + band.limit * row.magnitudes
    skipped = int(torch.where(left & is_finite, low, -math.inf).argmax())
    chosen = int(torch.where(taken & is_finite, high, math.inf).argmin())
    excess = float(row.scores[skipped] - row.scores[chosen]) - BAND_FLOOR
    if excess <= 0:
        return Error(_OUTPUT, band.metric, 0.0, band.limit)
    magnitude = float(row.magnitudes[skipped] + row.magnitudes[chosen])
    ratio = excess / magnitude if magnitude > 0 else math.inf
    return _band_error(i, row, skipped, chosen, ratio)


def _band_error(i: int, row: Row, skipped: int, chosen: int, value: float) -> Error:
    band = SPEC.tolerances[0]
    got = f"index {int(row.indices[chosen])} of score {float(row.scores[chosen]):.9g}"
    want = f"index {int(row.indices[skipped])} of score {float(row.scores[skipped]):.9g}"
    return Error(_OUTPUT, band.metric, value, band.limit, (i, skipped), got, want)


_NAN, _POSITIVE, _FINITE, _NEGATIVE = 3, 2, 1, 0


def _classes(scores: torch.Tensor) -> torch.Tensor:
    kind = torch.full(scores.shape, _FINITE, dtype=torch.int8)
    kind[scores.isnan()] = _NAN
    kind[scores == math.inf] = _POSITIVE
    kind[scores == -math.inf] = _NEGATIVE
    return kind


def _judge_ties(i: int, row: Row, taken: torch.Tensor) -> Error:
    """Among equal non-finite scores, and among certain zeros, the lowest positions are taken."""
    kind = _classes(row.scores)
    worst = Error(_OUTPUT, "tie_order", 0.0, 0.0)
    for group in (kind == _NAN, kind == _POSITIVE, row.is_zero, kind == _NEGATIVE):
        members = taken[group]
        expected = torch.arange(members.numel()) < int(members.sum())
        wrong = (members != expected).nonzero().flatten()
        if wrong.numel() > worst.value:
            position = int(group.nonzero()[wrong[0]])
            got = f"index {int(row.indices[position])} left out, a later one of equal score taken"
            want = "the lowest positions"
            worst = Error(_OUTPUT, "tie_order", float(wrong.numel()), 0.0, (i, position), got, want)
    return worst


# ---- scores -------------------------------------------------------------------------------------


def _on_cpu(inputs: Inputs) -> Inputs:
    tensors: dict[str, Any] = {
        name: value.cpu()
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return inputs._replace(**tensors)


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed."""
    x = _on_cpu(inputs)
    num_pages, max_num_pages = x.k_index_cache_fp8.shape[0], x.block_table.shape[1]
    rows = []
    for q, weights, length, table in zip(
        x.q_index_fp8, x.weights, x.seq_lens.tolist(), x.block_table, strict=True
    ):
        length = min(max(length, 0), max_num_pages * PAGE_SIZE)
        position = torch.arange(length)
        page = table[position // PAGE_SIZE].long()
        is_candidate = (page >= 0) & (page < num_pages)
        page, offset = page[is_candidate], position[is_candidate] % PAGE_SIZE
        rows.append(_score_row(q, x.k_index_cache_fp8, weights, page, offset))
    return Expected(x.topk, tuple(rows))


def _score_row(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> Row:
    """The candidates at `(page, offset)` [n] for one query [H, 128] and weights [H]."""
    parts: list[tuple[torch.Tensor, ...]] = [(torch.empty(0, dtype=torch.float64),) * 2]
    zeros = [torch.empty(0, dtype=torch.bool)]
    q64, w64 = q.double(), weights.double()
    for first in range(0, page.numel(), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        key, scale = read_keys(cache, page[chunk], offset[chunk])
        terms = w64[:, None] * torch.relu(scale * (q64 @ key.T))  # [H, n]
        scores = terms.sum(0)
        magnitudes = scale.abs() * ((w64.abs() @ q64.abs()) @ key.abs().T)
        is_zero = scores == 0
        is_zero[is_zero.clone()] = _is_certain_zero(q64, w64, key[is_zero], scale[is_zero])
        parts.append((scores, magnitudes))
        zeros.append(is_zero)
    scores, magnitudes = (torch.cat(part) for part in zip(*parts, strict=True))
    scores = torch.where(scores.float().isinf(), scores.sign() * math.inf, scores)
    magnitudes = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    return Row(page * PAGE_SIZE + offset, scores, magnitudes, torch.cat(zeros))


def read_keys(
    cache: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, 128] and scales [n] in float64 of the positions `(page, offset)`."""
    used, which = page.unique(return_inverse=True)
    raw = cache[used].view(torch.uint8).reshape(-1, PAGE_BYTES)
    keys = raw[:, :PAGE_KEY_BYTES].view(torch.float8_e4m3fn).reshape(-1, PAGE_SIZE, KEY_BYTES)
    scales = raw[:, PAGE_KEY_BYTES:].contiguous().view(torch.float32)
    return keys.double()[which, offset], scales.double()[which, offset]


def _is_certain_zero(
    q: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Whether each of n positions of score 0 has zero terms only, in any order of summation."""
    size = q.abs() @ key.abs().T  # [H, n]
    is_negative = (q @ key.T) * scale.sign() <= -CERTAIN_SIGN * size
    return ((weights == 0)[:, None] | (scale == 0) | is_negative).all(0)
