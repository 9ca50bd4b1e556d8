"""The oracle of moe_fp8_block_scale: float32, expert by expert, and how outputs are judged.

Routing is decided in float64. Where a decision is so close that float32 may turn it, every choice that
float32 may make is a variant, and an output is right if it matches one of its token's variants.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from fastkernels.core.spec import Tolerance
from fastkernels.ops._shared.compare import Error, official, relative_rows
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.spec import BLOCK, REQUANTISED, SPEC

BAND_ULPS = 8
MAX_VARIANTS = 64
"""Variants of a token that are tried. Beyond it (dozens of experts in one band) a token is held to the
first ones, always including float32 arithmetic on correctly rounded sigmoids, and the exact choice."""

ROWS = 1024  # rows that are computed or compared together; bounds the memory


# ---- routing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variants:
    """Admissible routings, one a row; row t < num_tokens is the preferred one of token t.

    token: [V] int64.   ids: [V, topk] int64, ascending unless given.   weights: [V, topk] float32.
    """

    token: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def mismatches(self, ids: torch.Tensor) -> list[int]:
        """Tokens whose row of `ids` [T, topk], in any order, is no admissible choice."""
        got = [tuple(sorted(row)) for row in ids.tolist()]
        accepted = {(t, tuple(sorted(row))) for t, row in zip(self.token.tolist(), self.ids.tolist())}
        return [t for t, row in enumerate(got) if (t, row) not in accepted]


def admissible_routing(inputs: Inputs) -> Variants:
    """Every routing that `inputs` admit (CPU tensors); given routing admits itself only."""
    if inputs.topk_ids is not None:
        assert inputs.topk_weights is not None
        token = torch.arange(inputs.topk_ids.shape[0])
        return Variants(token, inputs.topk_ids.long(), inputs.topk_weights.float())
    assert inputs.routing_logits is not None and inputs.routing_bias is not None
    logits, bias = _nan_to_minus_inf(inputs.routing_logits), _nan_to_minus_inf(inputs.routing_bias)
    exact = torch.sigmoid(logits.double())
    rounded = exact.float()

    token: list[int] = []
    ids: list[list[int]] = []
    others: list[tuple[int, list[int]]] = []
    columns = (rounded + bias.float(), exact + bias.double(), logits)
    for t, (float32, float64, logit) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        keys = list(zip(logit, bias.tolist(), strict=True))
        choices = islice(_expert_choices(float32, float64, keys, inputs), MAX_VARIANTS)
        first, *rest = dict.fromkeys(choices)
        token.append(t)
        ids.append(list(first))
        others += [(t, list(choice)) for choice in rest]
    token += [t for t, _ in others]
    ids += [choice for _, choice in others]

    where = torch.tensor(token, dtype=torch.int64)
    table = torch.tensor(ids, dtype=torch.int64).reshape(-1, inputs.topk)
    chosen = exact[where].gather(1, table)
    weights = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * inputs.routed_scaling_factor
    return Variants(where, table, weights.float())


def _expert_choices(
    float32: list[float], float64: list[float], keys: list[tuple[float, float]], inputs: Inputs
) -> Iterator[tuple[int, ...]]:
    """Ascending expert ids of one token, the preferred choice first; may repeat itself."""
    size = len(float64) // inputs.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(inputs.num_groups)]
    best = [sorted(group, key=lambda e: -float64[e])[:2] for group in groups]
    for kept in _choices(
        [_sum_float32([float32[e] for e in group]) for group in groups],
        [_nan_is_minus_inf(sum(float64[e] for e in pair)) for pair in best],
        [tuple(keys[e] for e in pair) for pair in best],
        range(inputs.num_groups),
        inputs.topk_groups,
    ):
        candidates = [e for g in kept for e in groups[g]]
        yield from _choices(float32, float64, keys, candidates, inputs.topk)


def _sum_float32(values: list[float]) -> float:
    largest = torch.tensor(sorted(values)[-2:], dtype=torch.float32)
    return _nan_is_minus_inf(float(largest.sum()))


def _choices(
    float32: Sequence[float],
    float64: Sequence[float],
    keys: Sequence[Hashable],
    candidates: Sequence[int],
    count: int,
) -> Iterator[tuple[int, ...]]:
    """The `count` largest of `candidates` (ascending) as ascending tuples: what float32 gives, what
    the exact values give, then every other set that leaves out nothing by more than the band.

    Entries with equal keys have equal inputs, so any arithmetic ties them: of those the lower index
    goes first, and no band applies.
    """
    ranked = sorted(candidates, key=lambda i: (-float32[i], i))
    yield tuple(sorted(ranked[:count]))
    if count == len(candidates):
        return
    ranked = sorted(candidates, key=lambda i: (-float64[i], i))
    last_in, first_out = float64[ranked[count - 1]], float64[ranked[count]]
    if not _in_band(last_in, first_out):
        return
    yield tuple(sorted(ranked[:count]))
    certain = [i for i in ranked[:count] if not _in_band(float64[i], first_out)]
    contested = [i for i in ranked[:count] if _in_band(float64[i], first_out)]
    contested += [i for i in ranked[count:] if _in_band(last_in, float64[i])]
    classes: dict[Hashable, list[int]] = {}
    for i in sorted(contested):
        classes.setdefault(keys[i], []).append(i)
    open_places = count - len(certain)
    for taken in islice(_prefixes(list(classes.values()), open_places), MAX_VARIANTS):
        left = [i for i in contested if i not in taken]
        if all(_in_band(float64[i], float64[j]) for i in left for j in taken):
            yield tuple(sorted((*certain, *taken)))


def _prefixes(classes: list[list[int]], count: int) -> Iterator[tuple[int, ...]]:
    """Every way to take `count` members, from each class its first ones."""
    if sum(map(len, classes)) < count:
        return
    if not classes:
        yield ()
        return
    first, *rest = classes
    for taken in range(min(len(first), count), -1, -1):
        for others in _prefixes(rest, count - taken):
            yield (*first[:taken], *others)


def _in_band(left_out: float, taken: float) -> bool:
    """Whether float32 arithmetic may prefer `taken` to `left_out`."""
    if left_out <= taken:
        return True
    larger = max(abs(left_out), abs(taken))
    if math.isinf(larger):
        return False
    return left_out - taken <= BAND_ULPS * math.ldexp(1.0, max(math.frexp(larger)[1] - 24, -149))


def _nan_to_minus_inf(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), -torch.inf, values)


def _nan_is_minus_inf(value: float) -> float:
    return -math.inf if math.isnan(value) else value


# ---- experts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The output of every variant, and the norm of the same row from absolute values.

    outputs: [V, hidden_size] float32.   kappa: [V] float32, `sum of weight |C| |W2|^T`.
    """

    variants: Variants
    outputs: torch.Tensor
    kappa: torch.Tensor
    num_tokens: int

    @property
    def output(self) -> torch.Tensor:
        """[T, hidden_size]: the preferred variants."""
        return self.outputs[: self.num_tokens]

    def judge(self, outputs: tuple[torch.Tensor, ...], requantised: bool = False) -> list[Error]:
        """Ours: worst token, against its nearest variant. `requantised`: the limits, a cosine among
        them, of a route that rounds the intermediate activations to FP8."""
        want, kappa = self._nearest(outputs[0])
        if not requantised:
            return [_worst_row(SPEC.tolerances[0], outputs[0], want, kappa)]
        frobenius, cosine = REQUANTISED
        return [
            _worst_row(frobenius, outputs[0], want, kappa),
            _worst_angle(cosine, outputs[0], want),
        ]

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        return [official(SPEC.tolerances[0], outputs[0], self._nearest(outputs[0])[0])]

    def _nearest(self, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per token the variant that is closest to `got`: its output and kappa."""
        extra = range(self.num_tokens, self.outputs.shape[0])
        if not extra:
            return self.outputs, self.kappa
        best = list(range(self.num_tokens))
        got = got.detach().cpu().float()

        def distance(row: int) -> float:
            gap = got[int(self.variants.token[row])] - self.outputs[row]
            norm = torch.maximum(self.outputs[row].norm(), self.kappa[row]) + 1e-30
            value = float(gap.norm() / norm)
            return math.inf if math.isnan(value) else value

        for row in extra:
            t = int(self.variants.token[row])
            best[t] = min(best[t], row, key=distance)
        rows = torch.tensor(best)
        return self.outputs[rows], self.kappa[rows]


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed. Holds one expert in float32 at a time."""
    x = Inputs(*(v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in inputs))
    num_tokens, hidden_size = x.hidden_states.shape
    variants = admissible_routing(x)
    outputs = torch.zeros((variants.token.shape[0], hidden_size))
    kappa = torch.zeros_like(outputs)
    for e in range(x.gemm1_weights.shape[0]):
        chosen = (variants.ids == x.local_expert_offset + e) & (variants.ids >= 0)
        rows = chosen.any(1).nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        weight = torch.where(chosen, variants.weights, 0.0).sum(1)
        w13 = dequantise(x.gemm1_weights[e], x.gemm1_weights_scale[e])
        w2 = dequantise(x.gemm2_weights[e], x.gemm2_weights_scale[e])
        w2_abs = w2.abs()
        for some in rows.split(ROWS):
            G = activations(x, variants.token[some]) @ w13.T
            linear, gate = G.chunk(2, dim=1)
            C = gate * torch.sigmoid(gate) * linear
            outputs[some] += weight[some, None] * (C @ w2.T)
            kappa[some] += weight[some, None].abs() * (C.abs() @ w2_abs.T)
    return Expected(variants, outputs, kappa.norm(dim=1), num_tokens)


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, columns] float32 from e4m3 codes and a scale per 128 x 128 block."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    return blocks.mul_(scale[:, None, :, None]).view(rows, columns)


def activations(inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """[len(tokens), hidden_size] float32."""
    codes = inputs.hidden_states.view(torch.uint8)[tokens].view(torch.float8_e4m3fn)
    scale = inputs.hidden_states_scale[:, tokens].T.repeat_interleave(BLOCK, dim=1)
    return codes.float() * scale


def _worst_row(
    tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor, kappa: torch.Tensor
) -> Error:
    """`relative_rows` in pieces: in one, 14107 tokens would take 5 GB of float64."""
    worst = Error(tolerance.output, tolerance.metric, 0.0, tolerance.limit)
    for start in range(0, want.shape[0], ROWS):
        some = slice(start, start + ROWS)
        error = relative_rows(tolerance, got[some], want[some], kappa[some], row_dims=1)
        if not error.value <= worst.value or not worst.at:
            worst = replace(error, at=(error.at[0] + start, *error.at[1:]))
    return worst


def _worst_angle(tolerance: Tolerance, got: torch.Tensor, want: torch.Tensor) -> Error:
    """Largest 1 - cosine between rows; a row that is 0 on both sides counts as parallel."""
    worst = Error(tolerance.output, tolerance.metric, 0.0, tolerance.limit)
    for t, (a, b) in enumerate(zip(got.detach().cpu(), want, strict=True)):
        a, b = a.double(), b.double()
        norms = float(a.norm() * b.norm())
        value = 1.0 - float(a @ b) / norms if norms else float(a.any() != b.any())
        if not value <= worst.value:
            worst = replace(worst, value=value, at=(t,), got=f"{float(a.norm()):.6g}", want="")
    return worst
