"""The routes over compiled kernels: one for each, all through one entry of the library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fastkernels.core.compiled import compiled_route
from fastkernels.core.device import DeviceInfo
from fastkernels.core.kernels import Kernel
from fastkernels.core.problem import ProblemKey
from fastkernels.core.route import Decline, Route
from fastkernels.ops.dsa_sparse_attention.kernels import (
    CKV,
    KERNELS,
    KPE,
    MAX_TOPK,
    TritonSplit,
    head_blocks,
    workspace_bytes,
)
from fastkernels.ops.dsa_sparse_attention.problem import Inputs

# Blocks of a grid, tokens, heads, rows: kernels count them in int32.
_MOST = 2**31 - 1

LSE_SCALE = {2: 1.0, "e": math.log(2.0)}
"""Of a logarithm to base 2."""


def supports(kernel: Kernel, key: ProblemKey, device: DeviceInfo, config: Any) -> Decline | None:
    for name, width in (("head_dim_ckv", CKV), ("head_dim_kpe", KPE)):
        if key.axis(name) != width:
            return Decline(f"serves {name}={width}, got {key.axis(name)}")
    if key.axis("topk") > MAX_TOPK:
        return Decline(f"serves topk <= {MAX_TOPK}, got {key.axis('topk')}")
    rows = key.axis("num_pages") * key.axis("page_size")
    if max(rows, key.axis("page_size")) > _MOST:
        return Decline(f"serves caches of at most {_MOST} rows, got {rows}")
    num_tokens, num_heads = key.axis("num_tokens"), key.axis("num_qo_heads")
    cluster = kernel.tile(config)[0]
    blocks = num_tokens * (head_blocks(num_heads) * cluster if cluster else num_heads)
    if blocks > _MOST:
        return Decline(f"would take {blocks} blocks, a grid has at most {_MOST}")
    return None


def workspace(axes: Mapping[str, int], config: Any) -> int:
    return workspace_bytes(axes, config) if isinstance(config, TritonSplit) else 0


def call(
    entry: Any,
    plan: int,
    inputs: Inputs,
    outputs: tuple[torch.Tensor, ...],
    workspace: torch.Tensor | None,
) -> bool:
    """A checked problem to the library; see `Attend` in csrc/dsa_sparse_attention/binding.cc."""
    output, lse = outputs
    return bool(
        entry(
            plan,
            inputs.q_nope,
            inputs.q_pe,
            inputs.ckv_cache,
            inputs.kpe_cache,
            inputs.sparse_indices,
            float(inputs.sm_scale),
            LSE_SCALE[inputs.lse_base],
            output,
            lse,
            workspace,
        )
    )


def fixed(key: ProblemKey) -> tuple[int, ...]:
    """What a plan is remembered by, besides tokens and pages; see `FindPlan` in
    csrc/dsa_sparse_attention/binding.cc."""
    axes = (key.axis(name) for name in ("num_qo_heads", "topk", "page_size"))
    return (*axes, key.device_index)


ROUTES: tuple[Route, ...] = tuple(
    compiled_route(
        kernel,
        call,
        partial(supports, kernel),
        fixed,
        varying=("num_tokens", "num_pages"),
        workspace_bytes=workspace,
    )
    for kernel in KERNELS
)
