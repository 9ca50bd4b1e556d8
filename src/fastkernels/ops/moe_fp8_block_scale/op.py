"""The public function of moe_fp8_block_scale."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels import envs
from fastkernels.core import dispatch, torch_ops
from fastkernels.core.extension import LaunchFailed
from fastkernels.core.route import Operator
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs, bind
from fastkernels.ops.moe_fp8_block_scale.routes import ROUTES, library
from fastkernels.ops.moe_fp8_block_scale.spec import SPEC


def moe_fp8_block_scale(
    routing_logits: torch.Tensor | None,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
    *,
    topk: int = 8,
    num_groups: int = 8,
    topk_groups: int = 4,
    topk_ids: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped top-k routing and the local experts' feed-forward; returns output [T, H] bfloat16.

    Experts [local_expert_offset, local_expert_offset + El) of E are held here; the output is their
    share of the sum, exactly 0 for a token that uses none of them. Any int32 offset is legal.

    routing_logits: [T, E] float32, raw (the sigmoid happens inside).   routing_bias: [E] bfloat16,
    added for the choice only, not to the weights.
    hidden_states: [T, H] float8_e4m3fn.   hidden_states_scale: [H/128, T] float32, any strides.
    gemm1_weights: [El, 2I, H] float8_e4m3fn, first I rows linear, last I rows gate.
    gemm1_weights_scale: [El, 2I/128, H/128] float32.
    gemm2_weights: [El, H, I] float8_e4m3fn.   gemm2_weights_scale: [El, H/128, I/128] float32.
    H and I are multiples of 128. Scales multiply.
    routed_scaling_factor: float, applied to the normalised weights.

    topk, num_groups, topk_groups: experts of a token; groups of E / num_groups experts, and how
    many of them a token may use. Ties go to the lower index.
    topk_ids, topk_weights: [T, topk] int32 or int64, and float32, any strides: routing computed
    elsewhere, the factor already in. routing_logits and routing_bias must be None, num_groups,
    topk_groups and routed_scaling_factor are not used. Negative ids are padding; an id that stands
    twice counts twice.
    deterministic: bit-equal outputs from run to run.
    workspace: uint8, see fastkernels.workspace_size.

    Equations and sources: ops/moe_fp8_block_scale/README.md.
    Raises ArgumentError, UnsupportedProblem, NotWarmedUp.
    """
    inputs = Inputs(
        routing_logits,
        routing_bias,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        local_expert_offset,
        routed_scaling_factor,
        topk,
        num_groups,
        topk_groups,
        topk_ids,
        topk_weights,
        deterministic,
    )
    is_compiling = torch.compiler.is_compiling()
    if workspace is None and not is_compiling:
        entered = _enter(inputs, out)
        if entered is not None:
            return entered
    if is_compiling or torch_ops.is_traced(inputs):
        (output,) = torch_ops.call(SPEC, inputs, out, workspace)
    else:
        (output,) = dispatch.run(OPERATOR, bind(inputs, out, workspace))
    return output


def _enter(inputs: Inputs, out: Any) -> torch.Tensor | None:
    """The short way of a call whose sizes were served before, as in gdn_decode's op.py; a workspace
    is allocated by the library. None, with nothing launched, where `bind` has to look."""
    way = dispatch.short_way(SPEC.name)
    if way is None or envs.check_values():
        return None
    x = inputs
    try:
        numbers = (x.local_expert_offset, x.topk, x.num_groups, x.topk_groups)
        if (
            any(type(number) is not int for number in numbers)
            or type(x.routed_scaling_factor) not in (float, int)
            or (x.deterministic is not False and x.deterministic is not True)
        ):
            return None
        output = out
        if output is None:
            output = x.hidden_states.new_empty(x.hidden_states.shape, dtype=torch.bfloat16)
        # The library would read the values without their sign; other dtypes have no such views.
        signed = (
            x.routing_logits, x.topk_weights,
            x.hidden_states_scale, x.gemm1_weights_scale, x.gemm2_weights_scale,
        )  # fmt: skip
        if any(tensor is not None and tensor.is_neg() for tensor in signed):
            return None
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (*signed, x.routing_bias, output)
        ):
            return None
        is_served = library.call(way.call, 0, x, (output,), None)
    except LaunchFailed as error:
        key = bind(inputs, out, None).key
        raise dispatch.launch_error(key, dispatch.select(OPERATOR, key), error) from error
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not what the types say: `bind` has the words
        return None
    return output if is_served else None


OPERATOR = Operator(SPEC, ROUTES, moe_fp8_block_scale)
