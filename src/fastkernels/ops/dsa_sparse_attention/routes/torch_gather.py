"""Gather the named rows, then batched float32 products; any device, any geometry: the safe route.

Tokens are taken in tiles, so that the gathered rows of a long prefill never lie in memory at once:
a tile needs about `token_tile * topk * (head_dim_ckv + head_dim_kpe) * 6` bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fastkernels.core.route import ANY_DEVICE, Route, require_positive
from fastkernels.ops.dsa_sparse_attention.problem import Inputs


@dataclass(frozen=True)
class Config:
    """token_tile: tokens whose rows are gathered at once."""

    token_tile: int = 8

    def __post_init__(self) -> None:
        require_positive(self)


def launch(
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
    config: Config,
) -> None:
    output, lse = outputs
    if inputs.ckv_cache.shape[0] == 0:
        output.zero_()
        lse.fill_(-math.inf)
        return
    for first in range(0, output.shape[0], config.token_tile):
        tokens = slice(first, first + config.token_tile)
        values, weights_sum, maximum = _attend(inputs, tokens)
        output[tokens].copy_(values)
        if inputs.lse_base == 2:
            lse[tokens].copy_(weights_sum.log2() + maximum * math.log2(math.e))
        else:
            lse[tokens].copy_(weights_sum.log() + maximum)


def _attend(inputs: Inputs, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(output [t, H, D], sum of exp(logit - maximum) [t, H], maximum [t, H])` of a tile."""
    num_pages, page_size, _ = inputs.ckv_cache.shape
    indices = inputs.sparse_indices[tokens].long()  # [t, K]
    is_padding = (indices < 0) | (indices >= num_pages * page_size)
    indices = torch.where(is_padding, 0, indices)
    page, offset = indices // page_size, indices % page_size
    # Padding read row 0. Its logits are replaced below, but its values meet a weight of 0, and
    # 0 * NaN is NaN.
    ckv = inputs.ckv_cache[page, offset].masked_fill_(is_padding[..., None], 0.0).float()
    kpe = inputs.kpe_cache[page, offset].float()

    # The scale comes first: q.k may overflow where the logit does not.
    q_nope = inputs.q_nope[tokens].float() * inputs.sm_scale
    q_pe = inputs.q_pe[tokens].float() * inputs.sm_scale
    logits = torch.bmm(q_nope, ckv.transpose(1, 2))  # [t, H, K]
    logits.baddbmm_(q_pe, kpe.transpose(1, 2))
    logits.masked_fill_(is_padding[:, None], -math.inf)
    maximum = logits.amax(-1)
    is_empty = is_padding.all(-1)[:, None]  # [t, 1]
    shift = torch.where(is_empty, 0.0, maximum)  # -inf - -inf would be NaN
    weights = logits.sub_(shift[..., None]).exp_()
    weights_sum = weights.sum(-1)
    values = torch.bmm(weights, ckv) / torch.where(is_empty, 1.0, weights_sum)[..., None]
    return values, weights_sum, shift


ROUTE = Route(
    "torch_gather",
    "torch",
    ANY_DEVICE,
    Config(),
    launch,
    candidates={"token_tile": (2, 8, 32, 128)},
)
