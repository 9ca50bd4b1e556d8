"""Inputs that implementations of moe_fp8_block_scale get wrong, by name: what a candidate is judged
on beside its workloads. Where a list in `inputs` has them already, its case is taken.

The matrices are small (the definition's routing, hidden size 256). `draw(..., hidden_size=7168,
intermediate_size=2048, weights=...)` gives the same strata at full size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastkernels.ops._shared.adversarial import STREAM
from fastkernels.ops._shared.cases import generator, move
from fastkernels.ops.moe_fp8_block_scale.inputs import (
    CORNER,
    E4M3_MAX,
    NAN_CODE,
    ROUTED,
    Case,
    Weights,
    make_inputs,
)
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs

NEGATIVE_ZERO = 0x80


@dataclass(frozen=True)
class Stratum:
    """Draws of `case` under any seed, each `change`d afterwards by numbers of its own."""

    case: Case
    change: Callable[[Inputs, torch.Generator], Inputs] | None = None

    def draw(
        self,
        seed: int,
        device: torch.device | str = "cpu",
        weights: Weights | None = None,
        **fields: Any,
    ) -> tuple[Inputs, Case]:
        """Inputs on `device`, and their case. `fields` replace other fields of the case; `weights`
        made for one seed serve all of them and are not changed."""
        case = replace(self.case, seed=seed, **fields)
        inputs = make_inputs(case, weights=weights)
        if self.change is not None:
            inputs = self.change(inputs, generator(seed ^ STREAM))
        moved = (move(x, device) if isinstance(x, torch.Tensor) else x for x in inputs)
        return Inputs._make(moved), case


def _listed(name: str) -> Stratum:
    return Stratum(next(case for case in CORNER if case.name == name))


def _routed(name: str, seq_len: int, **fields: Any) -> Case:
    return Case(name, seq_len, **{**ROUTED, **fields})


# ---- routing ------------------------------------------------------------------------------------


def _logits(inputs: Inputs) -> torch.Tensor:
    assert inputs.routing_logits is not None
    return inputs.routing_logits


def _bias(inputs: Inputs) -> torch.Tensor:
    assert inputs.routing_bias is not None
    return inputs.routing_bias


def _prefer_local(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Local experts win, by their bias: where all tokens choose alike, a draw without any would say
    nothing."""
    bias = _bias(inputs).float()
    first = inputs.local_expert_offset
    bias[first : first + inputs.gemm1_weights.shape[0]] += 1.0
    return inputs._replace(routing_bias=bias.bfloat16())


def _equal_logits(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Every expert of a token has the same logit, and bias is 0: the lowest ones of the lowest
    groups."""
    logits = _logits(inputs)
    return inputs._replace(
        routing_logits=logits[:, :1].expand_as(logits).clone(),
        routing_bias=torch.zeros_like(_bias(inputs)),
    )


def _equal_groups(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Groups repeat one another, so that their scores tie; half of a group's logits are equal."""
    logits = _logits(inputs)
    size = logits.shape[1] // inputs.num_groups
    group = logits[:, :size].clone()
    group[:, size // 2 :] = group.amax(dim=1, keepdim=True)
    return inputs._replace(
        routing_logits=group.repeat(1, inputs.num_groups),
        routing_bias=torch.zeros_like(_bias(inputs)),
    )


def _bias_decides(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """A bias of hundreds, of either sign: it alone chooses, the first local expert among others,
    and the weights must not contain it."""
    bias = 100.0 * torch.randn(_bias(inputs).shape, generator=rng)
    bias[inputs.local_expert_offset] = 500.0
    return inputs._replace(routing_bias=bias.bfloat16())


def _two_groups_decide(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """One large c in each of half of the groups and two lesser ones in each of the others: the sum
    of two is larger there, and the largest c is not chosen."""
    logits = torch.full_like(_logits(inputs), -6.0)
    size = logits.shape[1] // inputs.num_groups
    for group in range(inputs.num_groups):
        first, second = (group * size + torch.randperm(size, generator=rng)[:2]).tolist()
        logits[:, first] = 3.0 if group % 2 else 0.5
        logits[:, second] = -6.0 if group % 2 else 0.5
    logits += 0.01 * torch.randn(logits.shape, generator=rng)
    return inputs._replace(routing_logits=logits)


# ---- numbers ------------------------------------------------------------------------------------


def _codes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).clone()


def _coded(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn)


def _negative_zeros(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """-0 for a third of all values, and for every value of a token and of an expert."""
    x, w13, w2 = (
        _codes(t) for t in (inputs.hidden_states, inputs.gemm1_weights, inputs.gemm2_weights)
    )
    for codes in (x, w13, w2):
        codes[torch.rand(codes.shape, generator=rng) < 1 / 3] = NEGATIVE_ZERO
    x[0], w13[0] = NEGATIVE_ZERO, NEGATIVE_ZERO
    return inputs._replace(
        hidden_states=_coded(x), gemm1_weights=_coded(w13), gemm2_weights=_coded(w2)
    )


def _nan_tokens(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """NaN bytes of either sign, and a NaN scale, in tokens without a local expert: their rows are
    0, and their neighbours in a tile do not see them."""
    x, scale, logits = (
        _codes(inputs.hidden_states),
        inputs.hidden_states_scale.clone(),
        _logits(inputs).clone(),
    )
    first, num_local = inputs.local_expert_offset, inputs.gemm1_weights.shape[0]
    for token in torch.randperm(x.shape[0], generator=rng)[: x.shape[0] // 4].tolist():
        logits[token, first : first + num_local] -= 50.0
        x[token, ::2], x[token, 1::2] = NAN_CODE, NAN_CODE | NEGATIVE_ZERO
        scale[0, token] = math.nan
    return inputs._replace(
        hidden_states=_coded(x), hidden_states_scale=scale, routing_logits=logits
    )


def _saturated(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Activations of +-448 alone: the largest products there are, and the smallest value is as
    large as the largest."""
    x = inputs.hidden_states.float().sign()
    x = torch.where(x == 0, 1.0, x) * E4M3_MAX
    return inputs._replace(
        hidden_states=x.to(torch.float8_e4m3fn), hidden_states_scale=inputs.hidden_states_scale / 3
    )


def _scale_extremes(inputs: Inputs, rng: torch.Generator) -> Inputs:
    """Activation scales from 1e-12 to 1e6 by token, and a factor of 1000 between the blocks of one:
    intermediates far outside float16, gates at both ends of silu."""
    scale = inputs.hidden_states_scale
    powers = torch.tensor([-12.0, -6.0, 0.0, 3.0, 6.0])
    by_token = powers[torch.randint(len(powers), (1, scale.shape[1]), generator=rng)]
    by_block = 3.0 * torch.rand(scale.shape[0], 1, generator=rng)
    return inputs._replace(hidden_states_scale=scale * 10.0 ** (by_token + by_block))


STRATA: dict[str, Stratum] = {
    "no_tokens": _listed("empty"),
    "one_token": Stratum(_routed("one", 1), _prefer_local),
    "one_expert": _listed("one-expert"),  # all other experts hold NaN
    "none_local": _listed("none-local"),
    "all_local": _listed("all-local"),
    "one_token_repeated": Stratum(_routed("repeated", 130, logits="repeated"), _prefer_local),
    **{f"t{T}": Stratum(_routed(f"t{T}", T)) for T in (15, 17, 63, 65, 129)},
    "integer_logits": _listed("ties"),
    "equal_logits": Stratum(_routed("equal-logits", 9), _equal_logits),
    "equal_groups": Stratum(_routed("equal-groups", 9), _equal_groups),
    "two_groups_decide": Stratum(_routed("two-groups", 12), _two_groups_decide),
    "bias_decides": Stratum(_routed("bias-decides", 24), _bias_decides),
    # Two tokens: rounding puts dozens of experts in one band, and the oracle tries every choice.
    "large_bias": Stratum(_routed("large-bias", 2, logits="large_bias")),
    "negative_logits": Stratum(_routed("negative", 9, logits="negative"), _prefer_local),
    "vanishing_sigmoids": Stratum(_routed("vanishing", 12, logits="vanishing"), _prefer_local),
    "nonfinite_logits": _listed("nonfinite"),
    "offset_straddles": _listed("straddling"),
    "offset_last": Stratum(_routed("offset-last", 24, local_expert_offset=224)),
    "offset_negative": Stratum(_routed("offset-negative", 24, local_expert_offset=-5)),
    "offset_beyond": Stratum(_routed("offset-beyond", 24, local_expert_offset=250)),
    "offset_far": Stratum(_routed("offset-far", 3, local_expert_offset=2**31 - 1)),
    "negative_zeros": Stratum(_routed("negative-zeros", 24), _negative_zeros),
    "nan_tokens": Stratum(_routed("nan-tokens", 24), _nan_tokens),
    "saturated": Stratum(_routed("saturated", 24), _saturated),
    "tiny_weight_scales": _listed("tiny-scales"),
    "scale_extremes": Stratum(_routed("scale-extremes", 40), _scale_extremes),
    "hostile_ids": Stratum(_routed("hostile-ids", 14, mode="precomputed", ids="hostile")),
    "deterministic": Stratum(_routed("deterministic", 40, deterministic=True)),
}
