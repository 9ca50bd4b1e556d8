"""The routes over compiled kernels: one for each, all through one entry of the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastkernels.core.compiled import compiled_route
from fastkernels.core.device import DeviceInfo
from fastkernels.core.kernels import Kernel
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Decline, Route
from fastkernels.ops.moe_fp8_block_scale.kernels import (
    COLUMNS,
    KERNELS,
    LONG_CHUNK,
    MAX_EXPERTS,
    MAX_LOCAL,
    MAX_TOPK,
    ONE_CODE_LEAST,
    SCALED,
    WgmmaGrouped,
    tiles_bound,
    workspace_bytes,
)
from fastkernels.ops.moe_fp8_block_scale.problem import Inputs

# Blocks of a grid, tiles, rows, columns: kernels count them in int32.
_MOST = 2**31 - 1


def supports(key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    most = {"num_local_experts": MAX_LOCAL, "topk": MAX_TOPK}
    if key.mode == "logits":
        most["num_experts"] = MAX_EXPERTS
    most["hidden_size"] = _MOST // LONG_CHUNK * COLUMNS
    # Tiles of the first product, in the smallest ones.
    most["intermediate_size"] = _MOST // tiles_bound(LONG_CHUNK * MAX_TOPK, MAX_LOCAL, 16) * SCALED
    for name, limit in most.items():
        if key.axis(name) > limit:
            return Decline(f"serves {name} <= {limit}, got {key.axis(name)}")
    size = key.axis("intermediate_size")
    if isinstance(config, WgmmaGrouped) and config.codes == 1 and size < ONE_CODE_LEAST:
        return Decline(f"serves intermediate_size >= {ONE_CODE_LEAST} with 1 code, got {size}")
    return None


def call(
    entry: Any,
    plan: int,
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
) -> bool:
    """A checked problem to the library; see `Mix` in csrc/moe_fp8_block_scale/binding.cc."""
    return bool(
        entry(
            plan,
            inputs.routing_logits,
            inputs.routing_bias,
            inputs.hidden_states,
            inputs.hidden_states_scale,
            inputs.gemm1_weights,
            inputs.gemm1_weights_scale,
            inputs.gemm2_weights,
            inputs.gemm2_weights_scale,
            inputs.local_expert_offset,
            float(inputs.routed_scaling_factor),
            inputs.topk,
            inputs.num_groups,
            inputs.topk_groups,
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.deterministic,
            *outputs,
            workspace,
        )
    )


def fixed(key: ProblemKey) -> tuple[int, ...]:
    """What a plan is remembered by, besides tokens; see `FindPlan` in
    csrc/moe_fp8_block_scale/binding.cc. Two sizes to a number, of which there are six."""
    is_given = key.mode == "precomputed"

    def pair(high: str, low: str) -> int:
        return key.axis(high) << 32 | key.axis(low)

    return (
        key.axis("num_local_experts") if is_given else pair("num_experts", "num_local_experts"),
        pair("hidden_size", "intermediate_size"),
        key.axis("topk"),
        0 if is_given else pair("num_groups", "topk_groups"),
        is_given + 2 * ("deterministic" in key.traits),
        key.device_index,
    )


def _route(kernel: Kernel) -> Route:
    def workspace(axes: Mapping[str, int], config: Any) -> int:
        *_, chunk, partial_bytes = kernel.tile(config)
        return workspace_bytes(axes, chunk, partial_bytes)

    return compiled_route(
        kernel, call, supports, fixed, varying=("seq_len",), workspace_bytes=workspace
    )


ROUTES: tuple[Route, ...] = tuple(map(_route, KERNELS))
