"""Grouped top-k routing in torch operations: which experts a token uses, and their weights.

Nothing synchronises. Tests read the ids that the torch route uses from here.
"""

from __future__ import annotations

import torch

DENOMINATOR_GUARD = 1e-20  # the definition's; visible where all sigmoids vanish
SMALLEST_SIGMOID = torch.finfo(torch.float32).tiny


def route_tokens(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    topk: int,
    num_groups: int,
    topk_groups: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(ids, weights)`, both [T, topk], best expert first: int64 and float32.

    logits: [T, num_experts] float32, num_experts a multiple of num_groups.   bias: [num_experts].
    Equal values rank by index, the lower one first. NaN in logits or bias counts as -inf, a sigmoid
    below the normal range of float32 as 0.
    """
    num_tokens, num_experts = logits.shape
    group_size = num_experts // num_groups
    # Rounded from float64: torch's float32 sigmoid differs in the last place between its vector
    # body and its scalar tail, and equal logits must stay equal.
    scores = torch.sigmoid(_rankable(logits).double()).float()
    # Logits below -87.3: 0, as where exp(-x) leaves float32, and never a subnormal number.
    scores = torch.where(scores < SMALLEST_SIGMOID, 0.0, scores)
    biased = scores + _rankable(bias).float()

    grouped = biased.view(num_tokens, num_groups, group_size)
    group_scores = _rankable(grouped.topk(min(2, group_size), dim=-1).values.sum(dim=-1))
    groups = _best(group_scores, topk_groups).sort(dim=-1).values

    experts = torch.arange(num_experts, device=logits.device).view(num_groups, group_size)
    candidates = experts[groups].flatten(1)  # [T, topk_groups * group_size], ascending
    ids = candidates.gather(1, _best(biased.gather(1, candidates), topk))

    chosen = scores.gather(1, ids).double()  # float64: the same sum in every order of summation
    weights = chosen / (chosen.sum(dim=-1, keepdim=True) + DENOMINATOR_GUARD)
    return ids, (weights * routed_scaling_factor).float()


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest values of a row. torch.topk leaves the order of ties open."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _rankable(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), -torch.inf, values)
