"""The routes over compiled kernels: one for each, all through one entry of the library."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.compiled import compiled_route
from fastkernels.core.device import DeviceInfo
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Decline, Route
from fastkernels.ops._shared.gdn import MIXED_INDICES
from fastkernels.ops.gdn_decode.kernels import HEAD_SIZE, KERNELS
from fastkernels.ops.gdn_decode.problem import Inputs


def supports(key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    if key.axis("head_size") != HEAD_SIZE:
        return Decline(f"serves head_size={HEAD_SIZE}, got {key.axis('head_size')}")
    if MIXED_INDICES in key.traits:
        return Decline("needs read_indices and write_indices of one dtype")
    return None


def call(
    entry: Any,
    plan: int,
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
) -> bool:
    """A checked problem to the library; see `Decode` in csrc/gdn_decode/binding.cc."""
    output, new_state = outputs
    return bool(
        entry(
            plan,
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.state,
            inputs.A_log,
            inputs.a,
            inputs.dt_bias,
            inputs.b,
            float(inputs.scale or 0.0),
            inputs.read_indices,
            inputs.write_indices,
            output,
            None if new_state is inputs.state else new_state,
        )
    )


def fixed(key: ProblemKey) -> tuple[int, ...]:
    """What a plan is remembered by, besides the batch; see `FindPlan` in
    csrc/gdn_decode/binding.cc."""
    return (
        *(key.axis(name) for name in ("num_q_heads", "num_v_heads")),
        key.device_index,
        key.mode == "pool",
        key.mode != "functional",
    )


ROUTES: tuple[Route, ...] = tuple(
    compiled_route(kernel, call, supports, fixed, varying=("batch_size",)) for kernel in KERNELS
)
