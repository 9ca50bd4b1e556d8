"""The oracle of moe_fp8_block_scale: float32, expert by expert, and how outputs are judged.

Routing is decided in float64. Where a decision is so close that float32 may turn it, every choice
that float32 may make is a variant, and an output is right if it matches a variant of its token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from fastkernels.core.spec import Tolerance
from fastkernels.ops._shared.compare import Error, official, relative_rows, wrong_shape
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs
from fastkernels.ops.moe_fp8_block_scale.spec import BLOCK, REQUANTISED, REQUANTISED_COSINE, SPEC

BAND_ULPS = 8
MAX_VARIANTS = 64
"""Variants of a token that are tried. Beyond it (dozens of experts in one band) a token is held to
the first ones, among them what float32 makes of correctly rounded sigmoids and the exact choice."""

SMALLEST_SIGMOID = 2.0**-126
"""Smaller ones count as 0. Float32 arithmetic may give 0 or a subnormal number there."""

ROWS = 1024  # rows that are computed or compared together; bounds the memory


# ---- routing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variants:
    """Admissible routings, one a row; row t < num_tokens is the preferred one of token t.

    token: [V] int64.   ids: [V, topk] int64, ascending unless given.   weights: [V, topk] float32.
    lost: [V] float32, how far a weight moves with a sigmoid of SMALLEST_SIGMOID for 0.
    """

    token: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    lost: torch.Tensor

    def mismatches(self, ids: torch.Tensor) -> list[int]:
        """Tokens whose row of `ids` [T, topk], in any order, is no admissible choice."""
        got = [tuple(sorted(row)) for row in ids.tolist()]
        accepted = {
            (t, tuple(sorted(row)))
            for t, row in zip(self.token.tolist(), self.ids.tolist(), strict=True)
        }
        return [t for t, row in enumerate(got) if (t, row) not in accepted]


def admissible_routing(inputs: Inputs) -> Variants:
    """Every routing that `inputs` admit (CPU tensors); given routing admits itself only."""
    if inputs.topk_ids is not None:
        assert inputs.topk_weights is not None
        ids = inputs.topk_ids.long()
        token = torch.arange(ids.shape[0])
        return Variants(token, ids, inputs.topk_weights, torch.zeros(ids.shape[0]))
    assert inputs.routing_logits is not None
    assert inputs.routing_bias is not None
    logits, bias = _nan_to_minus_inf(inputs.routing_logits), _nan_to_minus_inf(inputs.routing_bias)
    exact = torch.sigmoid(logits.double())
    exact = torch.where(exact < SMALLEST_SIGMOID, 0.0, exact)
    rounded = exact.float()

    biased32, biased64 = rounded + bias.float(), exact + bias.double()
    columns = (
        biased32,
        biased64,
        _group_scores(biased32, inputs.num_groups),
        _group_scores(biased64, inputs.num_groups),
    )
    preferred: list[tuple[int, tuple[int, ...]]] = []
    others: list[tuple[int, tuple[int, ...]]] = []
    for t, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        keys = torch.stack((logits[t], bias.float()), dim=1)
        choices = islice(_expert_choices(values, keys, inputs), MAX_VARIANTS)
        first, *rest = dict.fromkeys(choices)
        preferred.append((t, first))
        others += [(t, choice) for choice in rest]

    token = torch.tensor([t for t, _ in preferred + others], dtype=torch.int64)
    ids = torch.tensor([choice for _, choice in preferred + others], dtype=torch.int64)
    ids = ids.reshape(-1, inputs.topk)  # without tokens, too
    chosen = exact[token].gather(1, ids)
    per_sigmoid = inputs.routed_scaling_factor / (chosen.sum(1, keepdim=True) + 1e-20)
    lost = SMALLEST_SIGMOID * per_sigmoid[:, 0].abs()
    return Variants(token, ids, (chosen * per_sigmoid).float(), lost.float())


def _group_scores(biased: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[T, num_groups]: the sum of a group's two largest values (of its only one)."""
    num_tokens, num_experts = biased.shape
    groups = biased.view(num_tokens, num_groups, num_experts // num_groups)
    return _nan_to_minus_inf(groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2))


def _expert_choices(
    columns: tuple[list[float], ...], keys: torch.Tensor, inputs: Inputs
) -> Iterator[tuple[int, ...]]:
    """Ascending expert ids of one token, the preferred choice first; may repeat itself.

    columns: the token's biased scores and group scores, each in float32 and in float64.
    keys: [num_experts, 2], what each expert's value is computed from.
    """
    experts32, experts64, groups32, groups64 = columns
    size = len(experts64) // inputs.num_groups

    def expert_key(e: int) -> Hashable:
        return tuple(keys[e].tolist())

    def group_key(g: int) -> Hashable:
        members = sorted(range(g * size, (g + 1) * size), key=lambda e: -experts64[e])
        return tuple(expert_key(e) for e in members[:2])

    for kept in _choices(
        groups32, groups64, group_key, range(inputs.num_groups), inputs.topk_groups
    ):
        candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
        yield from _choices(experts32, experts64, expert_key, candidates, inputs.topk)


def _choices(
    float32: Sequence[float],
    float64: Sequence[float],
    key: Callable[[int], Hashable],
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
    if not _in_band(
        min(float64[i] for i in ranked[:count]), max(float64[i] for i in ranked[count:])
    ):
        return
    ranked = sorted(candidates, key=lambda i: (-float64[i], i))
    yield tuple(sorted(ranked[:count]))
    last_in, first_out = float64[ranked[count - 1]], float64[ranked[count]]
    certain = [i for i in ranked[:count] if not _in_band(float64[i], first_out)]
    contested = [i for i in ranked[:count] if _in_band(float64[i], first_out)]
    contested += [i for i in ranked[count:] if _in_band(last_in, float64[i])]
    classes: dict[Hashable, list[int]] = {}
    for i in sorted(contested):
        classes.setdefault(key(i), []).append(i)
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


# ---- experts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The output of every variant, and two yardsticks for its row.

    outputs: [V, hidden_size] float32.
    kappa: [V] float32, the norm of the row computed from absolute values, `sum of w |C| |W2|^T`.
    rms: [V] float32, the same from squares, `sqrt(sum of w^2 C^2 (W2^2)^T)`: where signs are random
    it is close to the row's own norm, where terms cancel it is not.
    In both, w is raised so far that a vanished sigmoid passes (`Variants.lost`).
    """

    variants: Variants
    outputs: torch.Tensor
    kappa: torch.Tensor
    rms: torch.Tensor
    num_tokens: int

    @property
    def output(self) -> torch.Tensor:
        """[T, hidden_size]: the preferred variants."""
        return self.outputs[: self.num_tokens]

    def judge(self, outputs: tuple[torch.Tensor, ...], requantised: bool = False) -> list[Error]:
        """Ours: worst token, against its nearest variant, with both yardsticks.

        kappa alone is blind: with 2048 terms a sum it is 25 to 45 times the norm, and 5e-3 of it is
        an error of 12 to 22 %. `requantised`: the limits, a cosine among them, of a route that
        rounds the intermediate activations to FP8.
        """
        shape = (self.num_tokens, self.outputs.shape[1])
        if outputs[0].shape != shape:
            return [wrong_shape(SPEC.tolerances[0], outputs[0], shape)]
        nearest = self._nearest(outputs[0])
        want, kappa, rms = self.outputs[nearest], self.kappa[nearest], self.rms[nearest]
        limit = REQUANTISED if requantised else SPEC.tolerances[0]
        errors = [
            _worst_row(limit, outputs[0], want, kappa),
            _worst_row(replace(limit, metric="rel_frobenius (rms)"), outputs[0], want, rms),
        ]
        return [*errors, _worst_angle(outputs[0], want)] if requantised else errors

    def judge_official(self, outputs: tuple[torch.Tensor, ...]) -> list[Error]:
        nearest = self._nearest(outputs[0])
        return [official(SPEC.tolerances[0], outputs[0], self.outputs[nearest])]

    def _nearest(self, got: torch.Tensor) -> torch.Tensor | slice:
        """Per token the row of the variant that is closest to `got`."""
        if self.outputs.shape[0] == self.num_tokens:
            return slice(None)
        best = list(range(self.num_tokens))
        got = got.detach().cpu().float()

        def distance(row: int) -> float:
            gap = float((got[int(self.variants.token[row])] - self.outputs[row]).norm())
            scale = max(float(self.outputs[row].norm()), float(self.rms[row])) + 1e-30
            return math.inf if math.isnan(gap) else gap / scale

        for row in range(self.num_tokens, self.outputs.shape[0]):
            t = int(self.variants.token[row])
            best[t] = min(best[t], row, key=distance)
        return torch.tensor(best)


def reference(inputs: Inputs) -> Expected:
    """Runs on the CPU; `inputs` are not changed. Holds one expert in float32 at a time."""
    tensors: dict[str, Any] = {
        name: value.cpu()
        for name, value in inputs._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    x = inputs._replace(**tensors)
    num_tokens, hidden_size = x.hidden_states.shape
    variants = admissible_routing(x)
    outputs = torch.zeros((variants.token.shape[0], hidden_size))
    kappa = torch.zeros_like(outputs)
    squares = torch.zeros(len(outputs))
    w13, w2 = (torch.empty(w.shape[1:]) for w in (x.gemm1_weights, x.gemm2_weights))
    for e in range(x.gemm1_weights.shape[0]):
        chosen = (variants.ids == x.local_expert_offset + e) & (variants.ids >= 0)
        rows = chosen.any(1).nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        weight = torch.where(chosen, variants.weights, 0.0).sum(1, keepdim=True)
        yardstick = weight.abs() + (variants.lost / SPEC.tolerances[0].limit)[:, None]
        dequantise(x.gemm1_weights[e], x.gemm1_weights_scale[e], w13)
        dequantise(x.gemm2_weights[e], x.gemm2_weights_scale[e], w2)
        parts = [
            (some, gated(activations(x, variants.token[some]) @ w13.T)) for some in rows.split(ROWS)
        ]
        for some, C in parts:
            outputs[some] += weight[some] * (C @ w2.T)
        w2.abs_()
        for some, C in parts:
            kappa[some] += yardstick[some] * (C.abs() @ w2.T)
        column_squares = w2.square_().sum(0)
        for some, C in parts:
            squares[some] += yardstick[some, 0].square() * (C.square() @ column_squares)
    return Expected(variants, outputs, kappa.norm(dim=1), squares.sqrt(), num_tokens)


def gated(G: torch.Tensor) -> torch.Tensor:
    """The second half of the columns is the gate of the first."""
    linear, gate = G.chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * linear


def dequantise(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill [rows, columns] float32 from e4m3 codes and a scale per 128 x 128 block."""
    rows, columns = out.shape
    blocks = out.copy_(weight).view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    blocks.mul_(scale[:, None, :, None])


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
        if not error.value <= worst.value:
            at = (error.at[0] + start, *error.at[1:]) if error.at else ()
            worst = replace(error, at=at)
    return worst


def _worst_angle(got: torch.Tensor, want: torch.Tensor) -> Error:
    """Largest 1 - cosine between rows; two rows of zeros count as parallel."""
    worst = Error(SPEC.outputs[0].name, "1 - cosine", 0.0, 1.0 - REQUANTISED_COSINE)
    for start in range(0, want.shape[0], ROWS):
        a, b = (x[start : start + ROWS].detach().cpu().double() for x in (got, want))
        norms = a.norm(dim=1) * b.norm(dim=1)
        angle = 1.0 - (a * b).sum(1) / norms
        angle = torch.where((a == 0).all(1) & (b == 0).all(1), 0.0, angle)
        angle = angle.nan_to_num(nan=math.inf)
        row = int(angle.argmax())
        if float(angle[row]) > worst.value:
            norm_got, norm_want = (f"norm {float(x[row].norm()):.6g}" for x in (a, b))
            worst = replace(
                worst, value=float(angle[row]), at=(start + row,), got=norm_got, want=norm_want
            )
    return worst
